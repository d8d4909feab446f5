"""This rank's own state at the last two step boundaries, in host memory.

Needed wherever a survivor may have to go back a step: when the only copies of a dead rank's shards are one
version older than the living state, or when an optimizer step can be torn because it communicates.

``start`` notes which tensors are live, in the training thread; the copy itself is made beside the next
forward pass and must be over before the first mutation: ``before_mutation``. On CUDA it is queued on a stream
stream, into pinned memory, and the mutating stream waits for it, not the host.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashrecovery.errors import RestoreError
from flashrecovery.redundancy.memory.background import Background
from flashrecovery.redundancy.memory.flat_buffer import NOTHING, Beside, Keep, Layout, Slot, slot_for_next
from flashrecovery.redundancy.memory.safe_points import Between
from flashrecovery.state.exact import exact, exact_copy
from flashrecovery.state.shard import Shard, ShardSource, Structure

_KEPT = 2
"""Versions that are kept; one more while one of them is reserved."""
_LONGEST_S, _SLOWEST = 2.0, 500e6
"""An operation of the script takes at most this many seconds, and writes at least this many bytes a second."""
_TRIED, _TRIED_AGAIN = 4, 64
"""After this many walks in a row the structure is assumed to change in each step; it is watched again after that
many."""
ChangeCounter = Callable[[Sequence[torch.Tensor]], Callable[[], int]]
"""Gives what gives another number when one of the tensors has been changed."""
StructureWatch = Callable[[Sequence[Structure]], Callable[[], bool]]
"""Gives what says whether a walk through the shards would find the same tensors in the same memory."""


@dataclass(frozen=True)
class Capture:
    """The live tensors at one moment, and on CUDA the event after which they may be read.

    ``seen``: what a look at their version counters showed.
    """

    found: _Found
    ready: torch.cuda.Event | None
    beside: Beside = NOTHING
    seen: int = 0


@dataclass(frozen=True)
class _Found:
    """What a walk through the shards has found. It is not changed.

    Attributes:
        shards: through which.
        loose: those of them that have to be asked in each step.
        same: whether a walk through the others would find the same.
        values: a copy, by shard.
        live: all tensors, shard by shard.
        look: at their version counters.
    """

    shards: Sequence[Shard]
    loose: Sequence[Shard]
    same: Callable[[], bool]
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    values: Mapping[str, dict[str, Any]]
    live: list[torch.Tensor]
    look: Callable[[], int] | None


class PreStepCopy:
    """Two versions of the given shards. Memory is allocated once and reused; twice the shards' bytes. ``share``: in
    memory that other processes can map. ``brief``: for a few steps, in memory that is not page-locked, which would take
    time; see :meth:`keep_on`.
    ``look``: given where only the script changes the tensors before :meth:`wait` has returned; a copy during which it
    has done so is not whole. ``same``: without it, each copy begins with a walk through the shards.
    ``keep``: the copies outlive this process, and begin with those of the process before."""

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        share: bool = False,
        brief: bool = False,
        look: ChangeCounter | None = None,
        same: StructureWatch | None = None,
        keep: Keep | None = None,
    ) -> None:
        self.shards = list(shards)
        self._brief = brief
        self._look = look
        self._same = same
        self._found: _Found | None = None
        self._walks = 0  # in a row
        self.between = Between()
        self._started = -1
        self._share = share
        self._keep = keep
        self._slots = {number: self._new_slot(number) for number in range(_KEPT + 1)}
        self._drop_to(_KEPT)
        self._wanted = -1  # the version whose copy is to be reserved
        self._reserved: Slot | None = None
        self._decided = threading.Event()  # whether there is a reserved copy
        self._layout = Layout()
        self._last: list[torch.Tensor] = []
        self._background = Background("flashrecovery-undo")
        self._copied = threading.Event()
        self._copied.set()
        self._copied_event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def keep_on(self) -> None:
        """It is not for a few steps only: memory that is used from now on may be page-locked."""
        self._brief = False

    def copy_from(self, shards: Sequence[Shard]) -> None:
        """These are copied from the next copy on, in this order."""
        self.shards = list(shards)

    def _new_slot(self, number: int) -> Slot:
        return Slot() if self._keep is None else Slot(self._keep(f"own-{number}"))

    def stop_outliving(self) -> None:
        """The copies stay, and are this process's alone from now on."""
        self._keep = None
        for slot in self._slots.values():
            slot.stop_outliving()

    def _drop_to(self, count: int) -> None:
        """Drop the oldest copies beyond this number."""
        while len(self._slots) > count:
            oldest = min(self._slots, key=lambda number: self._slots[number].version)
            self._slots.pop(oldest).free()

    # -- keeping ----------------------------------------------------------------------------------

    def hold(self, version: int) -> None:
        """Copy the live state as ``version``, now. Does nothing if that version is held."""
        self.begin()
        with self.between.resting():
            self.copy(version, self.capture())

    def start(self, version: int, beside: Beside = NOTHING) -> None:
        """Like :meth:`hold`, but beside the training thread; see :meth:`before_mutation`."""
        self.wait()
        capture = self.capture(beside)
        self.begin()
        self._started = version

        def job() -> None:
            self.copy(version, capture)

        self._background.submit(job)

    def started(self, version: int) -> bool:
        """Whether :meth:`start` was last called for ``version``."""
        return self._started == version

    def before_mutation(self) -> None:
        """Returns when the live tensors may be changed. Raises what the copying has raised."""
        with self.between.resting():
            self._copied.wait()
        self._raise_error()
        if self._copied_event is not None:
            torch.cuda.current_stream().wait_event(self._copied_event)

    def wait(self) -> None:
        """Returns when no copy is being made. Raises what the copying has raised."""
        with self.between.resting():
            self._background.wait()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._background.error is not None:
            raise self._background.error

    # The three parts of start(), for NeighbourCopies, which copies in its own thread.

    def begin(self) -> None:
        """From now on :meth:`before_mutation` waits for the next :meth:`copy`."""
        self._copied.clear()

    def capture(self, beside: Beside = NOTHING) -> Capture:
        """The live tensors, and what belongs to them. In the training thread, at a step boundary."""
        known = self._found
        if known is None or known.shards is not self.shards or not known.same():
            self._walks += 1
            known = self._walk(None)
        else:
            self._walks = 0
            if known.loose:
                known = self._walk(known)
        self._found = known
        on_device = torch.cuda.is_initialized() and any(t.is_cuda for t in known.live)
        ready = torch.cuda.current_stream().record_event() if on_device else None
        return Capture(known, ready, beside, 0 if known.look is None else known.look())

    def _walk(self, known: _Found | None) -> _Found:
        """Through all shards; with ``known``, through its loose ones."""
        tensors = {} if known is None else dict(known.tensors)
        values = {} if known is None else dict(known.values)
        for shard in self.shards if known is None else known.loose:
            tensors[shard.name], found = shard.tensors_and_values()
            values[shard.name] = dict(found)
        live = [t for ts in tensors.values() for t in ts.values()]
        if known is not None and _same_objects(live, known.live):
            return replace(known, tensors=tensors, values=values)
        look = None if self._look is None else self._look([t for shard in self.shards for t in shard.watched()])
        if known is not None:
            return replace(known, tensors=tensors, values=values, live=live, look=look)
        structures = {} if not self._watches() else {s.name: s.structure() for s in self.shards}
        loose = [shard for shard in self.shards if structures.get(shard.name) is None]
        fixed = [one for one in structures.values() if one is not None]
        same = self._same(fixed) if self._same is not None and fixed else _never
        return _Found(self.shards, loose, same, tensors, values, live, look)

    def _watches(self) -> bool:
        """Whether it is worth while to watch the structure."""
        return self._same is not None and (self._walks <= _TRIED or self._walks % _TRIED_AGAIN == 0)

    def copy(self, version: int, capture: Capture) -> Slot:
        """Copy what was captured; returns the slot for ``version``, which holds it unless the tensors have been changed
        meanwhile. Any thread, one at a time."""
        try:
            if self._reserved is None:
                self._drop_to(_KEPT)
            held = next((s for s in self._slots.values() if s.version == version), None)
            if held is not None:
                self._reserve_if_wanted(version, held)
                return held
            slot = slot_for_next([s for s in self._slots.values() if s is not self._reserved])
            slot.drop()
            live, tensors = capture.found.live, capture.found.tensors
            # The same tensor objects have the same structure: the usual case, and much cheaper than comparing it.
            same = bool(live) and _same_objects(live, self._last) and tuple(tensors) == self._layout.shards
            if not (same or self._layout.matches(tensors)):
                self._layout = Layout.of(tensors)
            self._last = live
            pin = capture.ready is not None and not self._brief
            slot.shape(self._layout, pin=pin, share=self._share)
            event = self._copy_tensors(slot.exact, self._exact_of(live), capture.ready)
            slot.describe({name: found for name, found in capture.found.values.items() if found})
            if self._look is None:
                self._copied.set()  # the device's stream waits for the rest; the host need not
            if event is not None:
                event.synchronize()
            if self._unchanged(capture):
                slot.finish(version, capture.beside)
            self._reserve_if_wanted(version, slot)
            return slot
        finally:
            self._copied.set()

    def _unchanged(self, capture: Capture) -> bool:
        """Whether nothing has been written to the tensors since they were captured."""
        look = capture.found.look
        if look is None:
            return True
        if look() != capture.seen:
            return False
        written_by_host = self._layout.nbytes if capture.ready is None else 0
        bound_s = _LONGEST_S + written_by_host / _SLOWEST
        return self.between.ask(look, bound_s) == capture.seen

    def _exact_of(self, live: list[torch.Tensor]) -> list[torch.Tensor]:
        """What is copied of the live tensors, of the same layout: mostly they themselves."""
        return [exact(t) for t in live] if self._layout.as_bytes else live

    def _copy_tensors(
        self, views: list[torch.Tensor], live: list[torch.Tensor], ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        if not live:
            return None
        with torch.no_grad():
            if ready is None:
                # One call for all tensors: the interpreter lock is free meanwhile, the forward pass runs on.
                torch._foreach_copy_(views, live)
                return None
            if self._stream is None:
                self._stream = torch.cuda.Stream(device=live[0].device)  # a new thread is on device 0
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                torch._foreach_copy_(views, live, non_blocking=True)
                self._copied_event = self._stream.record_event()
            return self._copied_event

    # -- a copy that stays for as long as it has readers ----------------------------------------------

    def reserve(self, version: int) -> None:
        """Have the next copy, which is to be of ``version``, stay as it is until :meth:`release`; one at a time. In the
        training thread. It takes the memory of a third copy meanwhile."""
        self._decided.clear()
        self._wanted = version

    def _reserve_if_wanted(self, version: int, slot: Slot) -> None:
        if version != self._wanted:
            return
        self._wanted = -1
        if slot.version == version:
            self._reserved = slot
            (free,) = {*range(_KEPT + 1)} - self._slots.keys()
            self._slots[free] = self._new_slot(free)
        self._decided.set()

    def reserved(self) -> Callable[[str], ShardSource] | None:
        """Waits for the copy that was reserved. Gives each shard's content, by name; None if the copy is not whole, or
        was not made because of a recovery. Any thread."""
        self._decided.wait()
        slot = self._reserved
        return None if slot is None else lambda shard: ShardSource(shard, *slot.content(shard))

    def release(self) -> None:
        """What was reserved may be overwritten. Any thread."""
        self._reserved = None

    # -- what is held -----------------------------------------------------------------------------

    def versions(self) -> list[int]:
        """Versions held whole, ascending."""
        return sorted({s.version for s in self._slots.values() if s.version >= 0})

    def slot(self, version: int) -> Slot | None:
        """The copy of ``version``, if it is held whole."""
        return next((s for s in self._slots.values() if s.version == version), None)

    def held(self) -> list[tuple[int, tuple[str, ...], Beside]]:
        """(version, names of the shards, what belongs to them) of each version held whole, ascending."""
        whole = [s for s in self._slots.values() if s.version >= 0]
        return [(s.version, s.layout.shards, s.beside) for s in sorted(whole, key=lambda s: s.version)]

    def source(self, shard: str, version: int) -> ShardSource:
        """A shard's content at ``version``, sharing memory with the copy. Raises RestoreError if it is not
        held.
        """
        for slot in self._slots.values():
            if slot.version == version and shard in slot.layout.payload:
                return ShardSource(shard, *slot.content(shard))
        raise RestoreError(f"no pre-step copy of shard {shard!r} at version {version}; held: {self.versions()}")

    def restore(self, version: int, shard: Shard) -> None:
        """Write the copy back into the live tensors. Raises RestoreError if it is not held."""
        write_back(self.source(shard.name, version), shard)

    def drop_after(self, version: int) -> None:
        """Forget versions that belong to steps which have been undone."""
        for slot in self._slots.values():
            slot.drop_after(version)

    def reset(self, version: int) -> None:
        """After a recovery to ``version``: no error, no newer copies. No copy may be under way (see
        :meth:`wait_idle`).
        """
        self._background.clear_error()
        self._started = self._wanted = -1
        self._decided.set()
        self.drop_after(version)

    def wait_idle(self, timeout_s: float) -> bool:
        """True when no copy of :meth:`start` is under way; errors stay where they are."""
        with self.between.resting():
            return self._background.wait(timeout_s)

    def nbytes(self) -> int:
        """Host memory taken now, bytes."""
        return sum(s.nbytes for s in self._slots.values())

    def close(self) -> None:
        """End the thread and free the memory."""
        with self.between.resting():
            self._background.close(5.0)
        self._decided.set()
        self._slots = {0: Slot(), 1: Slot()}


def write_back(source: ShardSource, shard: Shard) -> None:
    """Write what was kept of a shard into its live tensors."""
    live = shard.allocate(source.spec)
    for key, tensor in zip(source.spec.tensors, source.tensors, strict=True):
        exact_copy(live[key], tensor)


def _never() -> bool:
    return False


def _same_objects(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
