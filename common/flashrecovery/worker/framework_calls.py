"""For frameworks in which a step is one call (``engine.train_batch(data)``): the step transaction inside that call.

The script has its own loop and does not use ``recovery.steps()``. So that it needs no change:

* A call that fails is repeated, and so are earlier calls that the recovery has undone. (The script already has their
  results, and the repeated calls return the same bits.)
* A replacement runs the script from its first line: its calls up to the restored version are *skipped*.
* The script's end, or its ``destroy_process_group()``, is the end of the loop: the process stays until all ranks have
  reached it, and takes part in recoveries until then.

Every such call is one version, even one that changes nothing (an evaluation, a checkpoint), so that a replacement knows
which calls the others have completed. A replacement draws again the random numbers that the script draws between two
calls. A survivor repeats a call in the random state in which it first began it. Anything else that the script's loop
keeps and the calls read or change (averages, counters, a history) is a :class:`LoopState`.

A fallback checkpoint lies far back, and the calls after it are repeated. With a :class:`PlacedLoop` each call is
repeated as it was: all calls since the oldest checkpoint are kept. With other loops only the newest call of each kind
is known, without the iteration, position or arguments of older ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from flashrecovery import groups
from flashrecovery.contract.loop_adapter import LoopState, PlacedLoop
from flashrecovery.errors import RegistrationError
from flashrecovery.runtime.page import Page
from flashrecovery.worker.local_state.rng import RngState, restore_rng
from flashrecovery.worker.loop import Loop
from flashrecovery.worker.session import Session
from flashrecovery.worker.step.step import Step

T = TypeVar("T")

_KEPT = 3
"""Versions whose own call is kept; a recovery in place never goes back further."""


@dataclass(frozen=True)
class _Call:
    body: Callable[[], Any]
    rng: RngState | None
    """The random state in which it begins; None for a call of this kind at another time."""
    loop: LoopState | None
    saved: Any


@dataclass(frozen=True)
class _Placed:
    """A call that can be made again whenever it was."""

    body: Callable[[], Any]
    loop: PlacedLoop
    place: Any


_AFTER = 1 << 16
"""Numbers of deliveries between a call and the next one begin here."""


class Deliveries:
    """What leaves the process for good, such as a line of a log: each once, however often its call is made. The newest
    one is noted in the page (:meth:`.page.Page.set_shown`), which a replacement on the same node inherits."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._newest = (0, 0)
        """Number of the call, and within it."""

    def begin(self, call: int) -> None:
        """The body of this call is about to be run."""
        self._newest = call, 0

    def end(self, call: int) -> None:
        """What comes now belongs to no call; ``call`` was the last one."""
        self._newest = max(self._newest, (call, _AFTER))

    def next_is_new(self) -> bool:
        """Whether the next one has not been made, here or by the process before. :meth:`made` must follow."""
        call, number = self._newest
        self._newest = call, number + 1
        return self._newest > self._page.shown

    def made(self) -> None:
        """It has been."""
        if self._newest > self._page.shown:
            self._page.set_shown(*self._newest)


class Calls:
    """The calls of one process, in order. ``session``: the one of ``flashrecovery run``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loop: Loop | None = None  # from the first call on that is not skipped ahead of it
        self._kinds: list[str] = []
        self._recent: dict[int, _Call] = {}
        self._newest: dict[str, _Call] = {}
        self._placed: dict[int, _Placed] = {}  # with fallback checkpoints: all after the oldest one
        self._oldest = 0
        self._skipped_to = 0
        self._restored: RngState | None = None
        self.finished = False
        self.deliveries = Deliveries(session.gate.page)
        self.running = False
        """A body is being run; a call inside of it is a part of it."""

    def run(
        self,
        kind: str,
        body: Callable[[], T],
        skipped: Callable[[], T],
        loop: LoopState | None = None,
        *,
        ahead: bool = False,
    ) -> T:
        """Make one call, until it is committed.

        Args:
            kind: what is called. After a fallback to a checkpoint, which goes back far, a step is repeated by the
                newest call of its kind, if ``loop`` is no :class:`PlacedLoop`.
            body: the call. May be made several times.
            skipped: what to return in a replacement for a call that the dead process had behind it. It must take from
                the script's iterators what ``body`` would, unless they are ``recovery.data()`` streams.
            loop: what the body reads and changes outside of the registered state.
            ahead: ``skipped`` needs nothing of what a replacement gets from the others, but for the last skipped call.
        """
        number = len(self._kinds)
        if number == 0:
            self._session.at_script_end(self.finish)
            groups.before_destruction(self.finish)
        is_ahead = self._loop is None and ahead and self._session.ahead.skips(number)
        if self._loop is None and not is_ahead:
            self._open(number)
            if what := getattr(loop, "counted", ""):
                self._session.count_calls(what)
        self._kinds.append(kind)
        saved = None if loop is None else loop.save()
        self._newest[kind] = _Call(body, None, loop, saved)
        self._keep(number, body, loop)
        self.deliveries.end(number)  # if it is skipped
        if is_ahead:
            return skipped()
        if number < self._skipped_to:
            last = number == self._skipped_to - 1
            if last and loop is not None:
                loop.resume()
            result = skipped()
            if last:
                self._set_rng(self._restored)  # the skipped part of the script has drawn random numbers
            return result
        self._recent[number] = _Call(body, RngState.now(), loop, saved)
        self._recent.pop(number - _KEPT, None)
        made: T = self._until(number + 1)
        return made

    def _keep(self, number: int, body: Callable[[], Any], loop: LoopState | None) -> None:
        """So that the call can be made again after a fallback to a checkpoint."""
        if not self._session.has_checkpoints or not isinstance(loop, PlacedLoop):
            return
        self._placed[number] = _Placed(body, loop, loop.place())
        oldest = min(self._session.oldest_checkpoint, number)
        if oldest > self._oldest:
            for old in range(self._oldest, oldest):
                self._placed.pop(old, None)
            self._oldest = oldest
            self._placed[oldest].loop.forget(self._placed[oldest].place)

    @staticmethod
    def _set_rng(state: RngState | None) -> None:
        if state is not None and state != RngState.now():
            restore_rng(state.plain())

    def _open(self, number: int) -> Loop:
        """The script has come to the call of this number; all before it were skipped.

        Raises RegistrationError: the job goes on from an earlier one. This process ends, and the next one skips less.
        """
        self._loop = loop = self._session.open(None)
        self._skipped_to = self._session.gate.version
        if 0 < number >= self._skipped_to:
            raise RegistrationError(
                f"the job goes on from call {self._skipped_to}, and {number} were skipped while it trained on"
            )
        self._restored = RngState.now()
        loop.came_from_checkpoint()  # all before it is skipped
        return loop

    @property
    def _opened(self) -> Loop:
        """The loop; if the script ends earlier than it did in the others, it begins now."""
        return self._open(len(self._kinds)) if self._loop is None else self._loop

    def _until(self, version: int, *, again: bool = False) -> Any:
        """Make calls until ``version`` is committed; returns the result of the last one. ``again``: the first of them
        has been made before."""
        loop, result = self._opened, None
        gate, followed = loop.gate, -1  # the call before this one has just been made again
        while gate.stopped or gate.version < version:
            loop.settle()
            if gate.stopped:
                loop.recover()
                again = True
                continue
            if gate.paused:
                loop.pause()
                again = True
                continue
            if loop.came_from_checkpoint():
                followed = -1
                if self._placed:
                    self._recent.clear()  # these began with what has been given up
            number = gate.version
            if 0 < loop.ended_at <= number:
                raise RegistrationError(
                    f"the scripts of other ranks have come to their end after {loop.ended_at} calls, and this one "
                    "makes another: what has ended their loops (a signal, a time, a number that is read somewhere) is "
                    "not known here, since this process has taken the place of a dead one; let it follow from what is "
                    "registered, or from what calls return"
                )
            if number in self._placed and number not in self._recent:
                call = self._put_in_place(number, restored=number != followed)
            else:
                call = self._call(number)
                self._set_rng(call.rng)
                if again and call.loop is not None:
                    call.loop.load(call.saved)
            again, followed = True, -1
            iteration: Callable[[str], int] | None = getattr(call.loop, "iteration_of", None)
            if iteration is not None:
                gate.page.set_iteration(number, iteration(self._kinds[number]))
            with Step(number, loop):
                self.running = True
                self.deliveries.begin(number)
                try:
                    result = call.body()
                finally:
                    self.running = False
                    self.deliveries.end(number)
                followed = number + 1
        return result

    def _put_in_place(self, number: int, *, restored: bool) -> _Call:
        """A call that lies far back is about to be made again."""
        placed = self._placed[number]
        if restored:
            self._recent.clear()  # later ones began with what this one had left before
        placed.loop.go_back(placed.place, restored=restored)
        call = self._recent[number] = _Call(placed.body, RngState.now(), placed.loop, placed.loop.save())
        self._recent.pop(number - _KEPT, None)
        return call

    def _call(self, version: int) -> _Call:
        if version in self._recent:
            return self._recent[version]
        if version >= len(self._kinds):
            raise RegistrationError(
                f"call {version} is to be repeated, and this process has made only {len(self._kinds)}"
            )
        if self._placed:
            raise RegistrationError(
                f"call {version} is to be repeated, and it came before the oldest checkpoint that there was "
                f"({self._oldest})"
            )
        return self._newest[self._kinds[version]]

    def finish(self) -> None:
        """The script has come to its end."""
        loop = self._opened
        if loop.left:
            return
        total = len(self._kinds)
        if total < self._skipped_to and any(isinstance(call.loop, PlacedLoop) for call in self._newest.values()):
            raise RegistrationError(
                f"the script has come to its end after {total} calls, and the state has {self._skipped_to} behind it: "
                "it was begun elsewhere, or makes fewer; it has trained nothing"
            )
        while not self.finished:
            self.finished = loop.finished(total)
            if not self.finished:
                self._until(total, again=True)
