"""Interrupting communication, and exchanging what is inside the groups.

The order in a recovery: :func:`abandon` (control thread; frees blocked threads), the training thread unwinds,
:func:`drain` (nothing can touch a tensor any more), :func:`detach_all` (local stand-ins, so that half-finished
framework state can be reset), :func:`attach` (connected again, under a new generation).
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from flashrecovery.errors import RegroupError
from flashrecovery.groups import native_build, torch_private
from flashrecovery.groups.accelerator import accelerator
from flashrecovery.groups.builder import Builder, Part
from flashrecovery.groups.inner import Inners
from flashrecovery.groups.registry import ManagedGroup, groups
from flashrecovery.groups.state import STATE
from flashrecovery.groups.stores import OneStore, Servers, StoresInUse, stop_all
from flashrecovery.groups.torch_private import HashStore, Store
from flashrecovery.runtime import process_end

_REGISTERS = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
_NO = ("", "0", "n", "no", "f", "false")  # as torch reads it
ENOUGH_FREE_BYTES = 2 << 30
"""What NCCL's buffers, some hundred MB with a dozen communicators, do not come near."""
_IN_VAIN = "an earlier attach"
_POLL_S = 0.0005  # between looks at what is still draining
_EXIT_S = 2.0  # at the end of the process, for closing connections in an orderly way


@dataclass(frozen=True)
class DrainReport:
    """What :func:`drain` found.

    Attributes:
        quiet: no abandoned operation can touch a tensor any more.
        seconds: how long it took.
        operations, buffers: operations still running and buffers still open to the network, if not quiet.
        stuck_aborts: groups whose NCCL abort has not returned. Such a process cannot go on; it has to be replaced.
        open_sections: groups on which a thread other than the calling one has begun to coalesce operations and has not
            ended it. NCCL launches nothing of that thread any more, so such a process has to be replaced, too.
    """

    quiet: bool
    seconds: float
    operations: int = 0
    buffers: int = 0
    stuck_aborts: tuple[str, ...] = ()
    open_sections: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttachReport:
    """What :func:`attach` did: ``groups`` exchanged, ``seconds`` taken, and the slowest group."""

    generation: int
    groups: int
    seconds: float
    slowest: str = ""
    slowest_s: float = 0.0


class AbortOrder(Protocol):
    """When NCCL communicators may be aborted, and who is told. A protocol, as the worker above has it
    (:class:`flashrecovery.worker.control.quiet_abort.QuietAbort`)."""

    def opened(self, generation: int) -> None:
        """The calling thread has made some."""

    def before_aborts(self) -> None:
        """No thread of this process launches anything any more. Returns when it may abort."""

    def begun(self, aborting: Callable[[], bool]) -> None:
        """All are being aborted, as long as ``aborting`` says so."""


def use_abort_order(order: AbortOrder, generation: int) -> None:
    """From now on every :func:`abandon` keeps to ``order``. ``generation``: of the groups that there are."""
    STATE.keep_to(order)
    if not STATE.detached and any(_has_communicators(group) for group in groups()):
        order.opened(generation)


def _has_communicators(group: ManagedGroup) -> bool:
    return bool(group.request.kind == "nccl" and group.size > 1)


def abandon(reason: str) -> int:
    """Give up all communication of this process; return how many operations were pending.

    Thread-safe; meant for a control thread. Every pending ``Work`` fails, its waiters wake, and every later operation
    raises at the call, until the groups are detached or attached. Waits in the stores of the groups wake too. A running
    :func:`attach` fails. Detached groups go on answering locally. NCCL communicators are aborted in parallel, when
    :func:`use_abort_order` lets them; :func:`drain` waits for that.
    """
    with STATE.abandoning:
        return _abandon(reason)


def _abandon(reason: str) -> int:
    module = native_build.loaded()
    with STATE.lock:
        STATE.count_abandonment(reason)
        stores = list(STATE.stores)
        targets = list(STATE.groups)
    STATE.changed.set()
    if module is None:
        return 0
    for store in stores:
        module.stop_store(store, reason)
    stop_all(reason)
    count = 0
    to_abort = []
    for group in targets:
        outer = group.outer()
        if outer is None or module.is_local(outer):
            continue
        count += module.abandon(outer, reason)
        if _has_communicators(group):
            to_abort.append(outer)
    order: AbortOrder | None = STATE.abort_order if to_abort else None
    if order is not None:
        order.before_aborts()
    for outer in to_abort:
        module.start_abort(outer)
    if order is not None:
        order.begun(lambda: any(map(module.aborting, to_abort)))
    return count


def may_connect_beside_aborts() -> bool:
    """Whether new NCCL communicators may be made while old ones are still being aborted.

    An abort ends its kernels at once, and then waits for NCCL's proxy thread, which looks every 0.5 s; its
    communicators keep their buffers meanwhile, so the device needs room for both. Where tensors are registered with
    NCCL, only the end of the abort says that no network card writes to them any more. :func:`attach` returns after
    them, so that nothing is launched before: an abort frees memory, which waits for the device, and a kernel may wait
    for a peer that does the same.
    """
    if not accelerator().in_use() or os.environ.get(_REGISTERS, "0").lower() not in _NO:
        return False
    return accelerator().free_bytes() >= ENOUGH_FREE_BYTES


def stuck_aborts() -> tuple[str, ...]:
    """Groups whose abort has not returned; also communicators that an attach has made in vain."""
    module = native_build.loaded()
    if module is None:
        return ()
    aborting = [g.name for g in groups() if (outer := g.outer()) is not None and module.aborting(outer)]
    return (*aborting, _IN_VAIN) if module.discarding() else tuple(aborting)


def _wait_for_aborts(epoch: int, deadline: float) -> None:
    """Until all have returned, at most to ``deadline`` (monotonic), or ``STATE.abandonments`` is no longer ``epoch``:
    a newer recovery does not wait for them here."""
    while stuck_aborts() and STATE.abandonments == epoch and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def drain(deadline_s: float, *, aborts: bool = True) -> DrainReport:
    """After :func:`abandon`: wait at most ``deadline_s`` seconds until no abandoned operation can touch a tensor.

    To be called on the thread that communicates: it ends what this thread has begun to coalesce. Without ``aborts``
    those of NCCL communicators may still be under way; then the device has to be waited for as well.
    """
    began = time.monotonic()
    module = native_build.loaded()
    if module is None:
        return DrainReport(True, 0.0)
    # A poller sees an abandonment by its count, before the abandonment has reached every group.
    if STATE.abandoning.acquire(timeout=max(deadline_s, 0.0)):
        STATE.abandoning.release()
    named = [(g.name, outer) for g in groups() if (outer := g.outer()) is not None and module.is_abandoned(outer)]
    while True:
        left = [module.undrained(outer) for _, outer in named]
        sections = tuple(name for name, outer in named if module.close_section(outer))
        operations, buffers = sum(o for o, _ in left), sum(b for _, b in left)
        stuck = stuck_aborts() if aborts else ()  # also of an earlier abandonment
        seconds = time.monotonic() - began
        if not (operations or buffers or stuck or sections):
            return DrainReport(True, seconds)
        if seconds >= deadline_s:
            return DrainReport(False, seconds, operations, buffers, stuck, sections)
        time.sleep(_POLL_S)


def detach_all() -> None:
    """Put a local stand-in inside every group: collectives act as if every rank had this rank's data.

    Also ends an abandonment. Old connections are closed in the background.
    """
    module = native_build.loaded()
    with STATE.lock:
        STATE.clear_abandonments()
        stores = list(STATE.stores)
    torch_private.clear_coalescing()
    if module is None:
        return
    for group in groups():
        _put_inside(module, group, None)
    for store in stores:
        module.resume_store(store)


def attach(store: Store | Servers, generation: int, deadline_s: float) -> AttachReport:
    """Connect every group again, in creation order, under ``fr/gen<generation>/`` in ``store``, or in that one of
    several servers which is the group's (:func:`~flashrecovery.plan.membership.stores.server_of`).

    Survivors and replacements do the same. All members of a group must take part. On failure (deadline in seconds, an
    :func:`abandon` since the last :func:`detach_all`, a peer that cannot be reached) raises
    :class:`~flashrecovery.errors.RegroupError`, and the groups keep what they had inside. Aborts that are still under
    way (see :func:`may_connect_beside_aborts`) have returned when it does.
    """
    began = time.monotonic()
    todo = [g for g in groups() if g.size > 1 or g.detached]
    module = native_build.loaded()
    if module is None:
        return AttachReport(generation, 0, 0.0)
    source = store if isinstance(store, Servers) else OneStore(store)
    stores = StoresInUse(module, source, STATE.world, f"fr/gen{generation}/")
    with STATE.lock:
        if STATE.abandonments != STATE.cleared:
            raise RegroupError(f"generation {generation} was abandoned before its groups were attached")
        epoch = STATE.abandonments
        STATE.begin_attach(stores)
    device = accelerator().current()  # on this thread: the connecting thread has no current device
    parts = [_part(module, g, stores, device) for g in todo]
    builder = Builder(module, parts, began + deadline_s)
    try:
        builder.start()
        builder.wait(epoch)
        _wait_for_aborts(epoch, began + deadline_s)
        stuck = stuck_aborts()
        problem = f"came to nothing: the aborts of {', '.join(stuck)} have not returned" if stuck else None
        problem = problem or _put_all_inside(module, builder, todo, stores, epoch, deadline_s)
    finally:
        with STATE.lock:
            STATE.end_attach()
    if problem is not None:
        stores.stop(problem)
        if isinstance(source, Servers) and builder.error is not None:
            source.doubt()
        builder.give_up()
        raise RegroupError(f"generation {generation} {problem}") from builder.error
    if isinstance(source, Servers):
        source.settled()
    for group in groups():
        if group.size == 1:
            _put_inside(module, group, None)
    if STATE.abort_order is not None and any(_has_communicators(group) for group in todo):
        STATE.abort_order.opened(generation)
    for known in STATE.stores:
        module.resume_store(known)
    torch_private.clear_coalescing()
    module.log_stop_replay()
    slowest = max(builder.seconds.items(), key=lambda item: item[1], default=("", 0.0))
    return AttachReport(generation, len(todo), time.monotonic() - began, *slowest)


def _part(module: Any, group: ManagedGroup, stores: StoresInUse, device: Any) -> Part:
    """``device``: the one that this process uses. A group of one rank is connected by its first operation, which waits
    for no peer."""
    if group.size == 1:
        return Part(group.request, HashStore, _timeout(module, group))
    return Part(group.request, partial(stores.of, group.request), _timeout(module, group), device)


def _put_all_inside(
    module: Any, builder: Builder, todo: list[ManagedGroup], stores: StoresInUse, epoch: int, deadline_s: float
) -> str | None:
    """All or none; returns why not."""
    with STATE.lock:  # no abandon() can come between the check and the exchange
        if STATE.abandonments != epoch:
            return "was abandoned while its groups were attached"
        if not builder.finished or builder.late:
            last = f": {builder.error}" if builder.error is not None else ""
            return f"did not form its groups within {deadline_s:g} s; waiting in group {builder.current!r}{last}"
        if builder.error is not None:
            return f"could not form group {builder.current!r}: {builder.error}"
        for group in todo:
            _put_inside(module, group, builder.take(group.name))
        STATE.spread_over(stores)
    return None


def _timeout(module: Any, group: ManagedGroup) -> datetime.timedelta:
    """The operations' time-out, which the user may have changed since the group was made."""
    outer = group.outer()
    timeout: datetime.timedelta = group.request.timeout if outer is None else module.timeout(outer)
    return timeout


def _put_inside(module: Any, group: ManagedGroup, inners: Inners | None) -> None:
    outer = group.outer()
    if outer is None:
        return
    if group.size == 1 and inners is None:
        module.revive(outer)  # no peer can break it
    elif inners is None:
        module.exchange(outer, [], [])
    else:
        module.exchange(outer, inners.backends, inners.devices)


def _at_exit() -> None:
    """From here on no thread of the groups wants the interpreter: one that did while it is finalized would take the
    process with it (native/ending.h). The script's own exit handlers are over."""
    module = native_build.loaded()
    if module is None:
        return
    module.close_all("the process ends")
    module.wait_buried(datetime.timedelta(seconds=_EXIT_S))
    module.close_to_threads(datetime.timedelta(seconds=_EXIT_S))


process_end.at_last(_at_exit)


def is_communication_error(error: BaseException) -> bool:
    """True if a collective, a connection or a store failed: a dead peer, or :func:`~.abandon`.

    Our backend turns gloo's plain ``RuntimeError`` into ``DistBackendError``, so the type tells. Misuse (wrong shapes,
    unknown ranks) has other types.
    """
    return isinstance(error, dist.DistError)


def follows_communication_error(error: BaseException) -> bool:
    """True if it is one, or has been raised where one was handled."""
    seen: BaseException | None = error
    while seen is not None and not is_communication_error(seen):
        seen = seen.__cause__ or seen.__context__
    return seen is not None
