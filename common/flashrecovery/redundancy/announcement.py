"""The version that all ranks are to save next, as the controller has named it
(:mod:`flashrecovery.plan.checkpoint_interval`, :mod:`flashrecovery.plan.snapshot_interval`)."""

from __future__ import annotations


class Announcement:
    """What one rank has heard of it. Heard in any thread; too late is harmless, and then it is not saved."""

    def __init__(self) -> None:
        self._heard: tuple[int, int] | None = None

    def hear(self, version: int, generation: int) -> None:
        """``version`` is to be saved when it is committed in ``generation``."""
        self._heard = version, generation

    @property
    def version(self) -> int | None:
        """The one that is to be saved next; None: none has been named yet."""
        return None if self._heard is None else self._heard[0]

    def withdraw(self, generation: int) -> None:
        """Training goes on in ``generation``: not every rank knows of what was named in an earlier one. What has been
        named in this one counts, although it has come here before the news of it."""
        heard = self._heard
        if heard is not None and heard[1] < generation:
            self._heard = None

    def take(self, version: int) -> bool:
        """``version`` is committed. Whether it is the one; it is not asked for a second time."""
        heard = self.version
        if heard is None or heard > version:
            return False
        self._heard = None
        return heard == version
