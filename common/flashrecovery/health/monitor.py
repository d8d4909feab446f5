"""Asks the device plugins, and tells the agent what is new.

One thread looks at all plugins in turn, so that neither a slow driver nor a plugin's bug touches the agent's event
loop. When a call is stuck (a driver that hangs is a usual symptom of a dying GPU), the loop notices, another thread
goes on with the other plugins, and the stuck plugin takes part again if its call ever returns.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint

from flashrecovery.config import Timeouts
from flashrecovery.errors import PluginError
from flashrecovery.health.findings import HealthContext, HealthFinding, HealthPlugin, Severity
from flashrecovery.health.plugins import open_plugin

MAX_ERRORS = 5
"""Calls in a row that may raise before a plugin is switched off."""


class Reported:
    """Remembers which findings of one plugin have been reported. A finding is reported once, until it is gone.

    A fatal one is gone at the first look without it: the next may hit the replacement. A warning has to stay away for
    ``quiet_s``, for pressure and temperatures go up and down.
    """

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._seen: dict[tuple[object, ...], float] = {}

    def fresh(self, findings: Sequence[HealthFinding], now: float) -> list[HealthFinding]:
        """The findings that have to be reported, of all that there are at ``now`` (seconds)."""
        present = {f.key: f for f in findings}
        new = [f for key, f in present.items() if key not in self._seen]
        away = {key: seen for key, seen in self._seen.items() if key not in present}
        quiet = {k: t for k, t in away.items() if k[0] is Severity.WARNING and now - t < self._quiet_s}
        self._seen = {**quiet, **dict.fromkeys(present, now)}
        return new


@dataclass
class _Slot:
    """One plugin and how its calls go. ``began``: when the call under way began."""

    entry: EntryPoint
    reported: Reported
    plugin: HealthPlugin | None = None
    began: float | None = None
    stuck: bool = False
    off: bool = False
    errors: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class HealthMonitor:
    """Runs the plugins of ``entries``. Both callbacks come on the event loop that is running now.

    ``on_finding``: something new is wrong. ``on_trouble``: a plugin itself does not work.
    """

    def __init__(
        self,
        entries: Sequence[EntryPoint],
        context: HealthContext,
        limits: Timeouts,
        on_finding: Callable[[HealthFinding], None],
        on_trouble: Callable[[str], None],
        *,
        say_declined: bool = False,
    ) -> None:
        self._slots = [_Slot(entry, Reported(limits.health_quiet_s)) for entry in entries]
        self._context = context
        self._limits = limits
        self._on_finding = on_finding
        self._on_trouble = on_trouble
        self._say_declined = say_declined
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._turn = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look. Plugins are also made in the thread: NVML takes seconds to come up on a big node."""
        if self._slots:
            self._start_thread()
            self._watch()

    def close(self) -> None:
        """No more findings are reported. The thread closes the plugins and ends after the current check."""
        self._stop.set()
        if self._timer is not None:
            self._timer.cancel()

    # -- on the event loop ------------------------------------------------------------------------

    def _start_thread(self) -> None:
        threading.Thread(
            target=self._run, args=(self._turn,), name=f"flashrecovery-health-{self._turn}", daemon=True
        ).start()

    def _watch(self) -> None:
        """Is a call stuck?"""
        for slot in self._slots:
            with slot.lock:
                began = slot.began
                late = began is not None and time.monotonic() - began >= self._limits.health_stuck_s
                if not late or slot.stuck:
                    continue
                slot.stuck = True
                self._turn += 1
            waits = f"a call has not returned for {self._limits.health_stuck_s:g} s; the others go on without it"
            self._on_trouble(f"{slot.entry.name}: {waits}")
            self._start_thread()
        self._timer = self._loop.call_later(self._limits.health_s, self._watch)

    # -- in the thread ----------------------------------------------------------------------------

    def _run(self, turn: int) -> None:
        while not self._stop.is_set():
            for slot in self._slots:
                if not (slot.off or slot.stuck) and not self._look(slot, turn):
                    return
            self._stop.wait(self._limits.health_s)
        for slot in self._slots:
            if slot.plugin is not None and not slot.stuck:
                self._guarded(slot, slot.plugin.close)

    def _look(self, slot: _Slot, turn: int) -> bool:
        """Ask one plugin. False if the call was stuck, and another thread has taken over."""
        with slot.lock:
            slot.began = time.monotonic()
        self._guarded(slot, lambda: self._ask(slot))
        with slot.lock:
            slot.began = None
            was_stuck, slot.stuck = slot.stuck, False
        if was_stuck:
            self._post(self._on_trouble, f"{slot.entry.name}: the call has returned; the plugin is asked again")
        return not was_stuck and turn == self._turn

    def _ask(self, slot: _Slot) -> None:
        if slot.plugin is None:
            slot.plugin = open_plugin(slot.entry, self._context)
        if slot.plugin is None:
            slot.off = True
            if self._say_declined:
                self._post(self._on_trouble, f"{slot.entry.name}: finds nothing to watch on this node")
            return
        findings = list(slot.plugin.health())
        if not all(isinstance(f, HealthFinding) for f in findings):
            raise PluginError(f"{slot.entry.value}: health() gives {findings!r}, which is no list of findings")
        for finding in slot.reported.fresh(findings, time.monotonic()):
            self._post(self._on_finding, finding)

    def _guarded(self, slot: _Slot, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as e:  # noqa: BLE001 - a plugin is anyone's code, and must never hurt the job
            slot.errors += 1
            if slot.errors == MAX_ERRORS:
                slot.off = True
                failed = f"has failed {MAX_ERRORS} times in a row and is switched off"
                self._post(self._on_trouble, f"{slot.entry.name}: {failed}; the last time: {type(e).__name__}: {e}")
        else:
            slot.errors = 0

    def _post(self, callback: Callable[..., None], what: object) -> None:
        if self._stop.is_set():
            return
        try:
            self._loop.call_soon_threadsafe(self._tell, callback, what)
        except RuntimeError:  # the loop was closed since the check above: there is nothing left to notify
            self._stop.set()

    def _tell(self, callback: Callable[..., None], what: object) -> None:
        if not self._stop.is_set():
            callback(what)
