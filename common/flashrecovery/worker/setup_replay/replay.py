"""The time from a script's first line to its first step: recorded in a first process, replayed in its replacements."""

from __future__ import annotations

from collections.abc import Callable

from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.words import shortened
from flashrecovery.worker.preimport.preimport import Installed
from flashrecovery.worker.setup_replay.absent import AbsentFiles
from flashrecovery.worker.setup_replay.call_sites import CallSites
from flashrecovery.worker.setup_replay.files import WrittenFiles
from flashrecovery.worker.setup_replay.record import SetupRecord
from flashrecovery.worker.setup_replay.values import DrawnValues

_SHOWN = 4


class SetupReplay:
    """``record``: what the predecessor's set-up has drawn and written; None: this process records that."""

    def __init__(self, installed: Installed, record: SetupRecord | None) -> None:
        self.record = SetupRecord() if record is None else record
        sites = CallSites(installed)
        self._values = DrawnValues(self.record, sites, replays=record is not None)
        self._files = WrittenFiles(self.record, sites, replays=record is not None)
        self._absent = AbsentFiles(self.record, sites, replays=record is not None)

    def start(self) -> None:
        """The script's first line comes next."""
        self._values.start()
        self._files.start()
        self._absent.start()

    def stop(self, tell: Callable[[NoticeKind, str], None]) -> None:
        """The first step comes next. Idempotent.

        Args:
            tell: sends a notice.
        """
        self._absent.stop()
        self._values.stop()
        self._files.stop()
        for kind, what, places in (
            (
                NoticeKind.FILE_KEPT,
                "files are kept, and what set-up writes to them is not written again",
                self._files.kept,
            ),
            (NoticeKind.SETUP_DIFFERS, "files are cut off that had been written to", self._files.truncated),
            (
                NoticeKind.SETUP_DIFFERS,
                "random or clock values are drawn that the dead process did not draw",
                self._values.new,
            ),
        ):
            if places:
                tell(kind, f"{what}: {shortened([*dict.fromkeys(places)], _SHOWN)}")
        for told in (self._files.kept, self._files.truncated, self._values.new):
            told.clear()
