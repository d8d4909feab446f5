"""The groups of this process in creation order, and how they come to be.

A group's handle never dies: torch makes a stock ``ProcessGroup`` with our backend in it, and only what that backend
forwards to is exchanged. The order of this list is the same on every rank that belongs to the groups, survivor or
replacement, because all run the same script; it is the order in which they are attached again.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from flashrecovery.capabilities.of_torch import GROUPS, TORCH
from flashrecovery.errors import SetupDiffersError
from flashrecovery.groups import native_build, refusals, torch_private
from flashrecovery.groups.builder import Builder, Part
from flashrecovery.groups.inner import Inners
from flashrecovery.groups.peer_names import stop_asking
from flashrecovery.groups.state import STATE
from flashrecovery.groups.stores import start_stores
from flashrecovery.groups.torch_private import GroupRequest, PrefixStore, Store

CONTROL_GROUP = "flashrecovery"
EVERYBODY = -1
UNKNOWN = -2


@dataclass(frozen=True)
class OpInfo:
    """An operation that has started and not finished on this rank.

    Attributes:
        group: name of its process group.
        sequence: its number on this rank within the group, since the group was last attached, from 0.
        op: what it is, e.g. ``all_reduce``.
        since: when it started, seconds on the monotonic clock.
        peer: global rank of the other side of a send or receive, :data:`EVERYBODY` for a collective, :data:`UNKNOWN` if
            the other side cannot be known.
        number: for a collective, its number among the collectives of the group: the same on every rank. The n-th send
            to a peer meets its n-th receive from this rank.
        certain: it certainly has not finished; if false, that is known only once it has been waited for.
    """

    group: str
    sequence: int
    op: str
    since: float
    peer: int
    number: int
    certain: bool


@dataclass(frozen=True)
class GroupProgress:
    """How far this rank has come in a group since it was last attached: ``collectives`` started, and by the global rank
    of each peer the sends to it and the receives from it. With NCCL: that its device has come to; ``ahead``: so many
    more operations its host has launched."""

    collectives: int
    pairs: dict[int, tuple[int, int]]
    ahead: int = 0


def come_to(
    collectives: int, pairs: Mapping[int, tuple[int, int]], ahead: Sequence[tuple[int, int, bool]]
) -> GroupProgress:
    """What the device has come to, of what the host has launched. ``ahead``: (peer, number, whether it sends) of what
    it has not come to. Operations of one kind are run one after the other."""
    reached = dict(pairs)
    for peer, number, sends in ahead:
        if peer == EVERYBODY:
            collectives = min(collectives, number)
        else:
            sent, received = reached.get(peer, (0, 0))
            reached[peer] = (min(sent, number), received) if sends else (sent, min(received, number))
    return GroupProgress(collectives, reached, len(ahead))


class ManagedGroup:
    """One process group of this rank.

    Attributes:
        launched: the ranks for which it was made, as the job was launched.
        among: all ranks that the job had then; None: those of its launch.
    """

    def __init__(self, request: GroupRequest, pg: Any) -> None:
        self.among = STATE.members or None
        self.launched = request.ranks
        if self.among is not None:
            self.launched = tuple(self.among[rank] for rank in request.ranks)
        self.request = replace(request, ranks=self.launched)
        self._pg = weakref.ref(pg)

    def became(self, request: GroupRequest) -> None:
        """The group has other members now."""
        self.request = request
        self.__dict__.pop("members", None)

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, as the job was launched, in group order."""
        return self.request.ranks

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return self.request.rank

    @property
    def size(self) -> int:
        return self.request.size

    @property
    def ops_started(self) -> int:
        """Operations started since the group was made."""
        outer = self.outer()
        return 0 if outer is None else int(native_build.native().started(outer))

    @property
    def pending(self) -> tuple[OpInfo, ...]:
        """Operations not yet finished, oldest first."""
        outer = self.outer()
        if outer is None:
            return ()
        return tuple(
            OpInfo(self.name, sequence, op, since, self._global(peer), number, certain)
            for sequence, op, since, peer, number, certain in native_build.native().pending(outer)
        )

    @property
    def on_device(self) -> OpInfo | None:
        """The newest collective or receive of NCCL that this rank's device has come to. Whether it has ended is not
        known: while another rank has not come to it, it has not."""
        outer = self.outer()
        newest = None if outer is None else native_build.native().on_device(outer)[1]
        if newest is None:
            return None
        op, peer, number, _ = newest
        return OpInfo(self.name, 0, op, 0.0, self._global(peer), number, False)

    def _global(self, peer: int) -> int:
        return self.ranks[peer] if peer >= 0 else peer

    @property
    def progress(self) -> GroupProgress:
        """How far this rank has come in it."""
        outer = self.outer()
        if outer is None:
            return GroupProgress(0, {})
        ahead, _ = native_build.native().on_device(outer)  # first: what is launched meanwhile has been come to
        collectives, pairs = native_build.native().progress(outer)
        return come_to(
            collectives, {self.ranks[p]: (s, r) for p, s, r in pairs}, [(self._global(p), n, s) for _, p, n, s in ahead]
        )

    @cached_property
    def members(self) -> int:
        """Tells this group from others of its name, on all of its ranks alike."""
        return xxhash.xxh3_64_intdigest(",".join(map(str, self.ranks)).encode())

    @property
    def detached(self) -> bool:
        """True while a local stand-in is inside."""
        outer = self.outer()
        return outer is not None and bool(native_build.native().is_local(outer))

    def process_group(self) -> Any | None:
        """The stock ``ProcessGroup``, or None once it has been destroyed."""
        pg = self._pg()
        return pg if pg is not None and torch_private.is_registered(pg) else None

    def outer(self) -> Any | None:
        """Our backend inside the stock group; None once the group has been destroyed."""
        pg = self.process_group()
        return None if pg is None else torch_private.backend_of(pg, next(iter(self.request.kinds)))


def native() -> Any:
    """The extension, with what was asked for before it was loaded."""
    module = native_build.native()
    with STATE.lock:
        start, replay = STATE.take_log_wishes()
    if start:
        module.log_start()
    if replay is not None:
        module.log_replay(replay, _refuse_set_up)
    return module


def _refuse_set_up(group: str, difference: str) -> None:
    """Raises SetupDiffersError in the collective that is not the recorded one."""
    del group  # it is in the text
    raise SetupDiffersError(
        f"the script's set-up is not the same on every start: {difference} in the process that this one replaces"
    )


def install(control_group: bool = True) -> None:
    """Make every process group from now on recoverable. Call before ``init_process_group``; idempotent and cheap.

    With ``control_group`` a group over all ranks is made together with the default group, for the recovery's own
    transfers and barriers (see :func:`control_group`); its ranks are connected when they first need each other. The
    compiled backend is loaded when the first group is made.
    Groups that torch cannot make recoverable are refused with :class:`~flashrecovery.errors.UnsupportedError`, and so
    is what communicates past groups (:mod:`.refusals`).

    Raises UnsupportedError if this torch lacks something private that groups need (its name is in the message).
    """
    STATE.want_control_group(control_group)
    if not torch_private.installed():
        TORCH.require(GROUPS)
        stop_asking()
        refusals.refuse(operation_count)
    torch_private.wrap_group_creation(_create, _created, _wrap_store)


def set_detached(on: bool) -> None:
    """Groups created from now on get a local stand-in inside (``on``) or are connected with their peers."""
    STATE.set_detached(on)


def groups() -> list[ManagedGroup]:
    """The living groups of this rank in creation order."""
    with STATE.lock:
        STATE.groups[:] = [g for g in STATE.groups if g.process_group() is not None]
        return list(STATE.groups)


def main_op() -> OpInfo | None:
    """The oldest operation that has not finished: where this rank hangs, if it hangs."""
    if native_build.loaded() is None:
        return None
    firsts = [g.pending[:1] for g in groups()]
    return min((op for first in firsts for op in first), key=lambda op: op.since, default=None)


def create_control_group(name: str = CONTROL_GROUP) -> Any:
    """A managed group of all ranks of the recovery's own, outside torch's numbering of the user's groups.

    It knows send and receive, barrier, ``all_gather``, and ``all_reduce`` of small tensors (SUM, MAX), in host memory,
    and connects two ranks when they first need each other.

    To be called by every rank, after ``init_process_group`` and at the same place in the order of groups.
    """
    world = dist.get_world_size()
    store = torch_private.default_store()
    return torch_private.make_sparse_group(name, world, dist.get_rank(), list(range(world)), store)


def control_group(name: str = CONTROL_GROUP) -> Any | None:
    """The control group of this process, or None (not made, or the world is one rank)."""
    for group in groups():
        if group.name == name:
            return group.process_group()
    return None


def set_operation_hook(callback: Callable[[str, str], None] | None) -> None:
    """Call ``callback(group name, operation)`` at the start of each operation; for fault injection. None removes it."""
    if callback is not None or native_build.loaded() is not None:
        native().set_hook(callback)


def stand_in(on: bool) -> None:
    """While ``on``, the script's operations are answered locally, as if every rank had this rank's data. Nothing is
    sent, and the groups stay connected. The recovery's own groups are not affected."""
    module = native_build.loaded()
    if module is None:
        return
    for group in groups():
        outer = group.outer()
        if outer is not None:
            module.stand_in(outer, on)


@contextmanager
def apart_from_steps() -> Iterator[None]:
    """What this thread communicates in here belongs to no step: it is not counted, and no stand-in answers it."""
    module = native_build.loaded()
    if module is None:
        yield
        return
    module.recovery_here(True)
    try:
        yield
    finally:
        module.recovery_here(False)


def stand_in_count() -> int:
    """How many operations of this process a stand-in has answered so far; see :func:`stand_in`."""
    module = native_build.loaded()
    return 0 if module is None else int(module.stand_ins())


def set_outside_hook(callback: Callable[[str, str], None]) -> None:
    """Call ``callback(group name, operation)``, in any thread, when the script starts an operation while
    :func:`watch_outside` is on."""
    if native_build.loaded() is not None:
        native().set_outside_hook(callback)


def watch_outside(on: bool) -> None:
    """See :func:`set_outside_hook`."""
    module = native_build.loaded()
    if module is not None:
        module.watch_outside(on)


def set_between_hook(explains: Callable[[bool], bool]) -> None:
    """Ask ``explains(elsewhere)`` of each of the script's operations that fails while :func:`between_steps` is on:
    True, and a stand-in answers it in the place of its error. ``elsewhere``: the main thread waits for its future;
    otherwise it is asked in the thread that waits."""
    if native_build.loaded() is not None:
        native().set_between_hook(explains)


def between_steps(on: bool) -> None:
    """Whether the script is between two steps. See :func:`set_between_hook`."""
    module = native_build.loaded()
    if module is not None:
        module.between_steps(on)


def operation_count() -> int:
    """How many operations the script has started in this process so far, on any group."""
    module = native_build.loaded()
    return 0 if module is None else int(module.operations())


def underway_ns() -> int:
    """How long the training thread has had operations under way so far, overlapping ones counted once."""
    module = native_build.loaded()
    return 0 if module is None else int(module.underway_ns())


def device_own_ns() -> int | None:
    """A step has been committed. The device's own work, in nanoseconds, in one before it that was measured; 0: nothing
    new is known. None: the script does not use NCCL, so that the host's clock tells (:func:`underway_ns`)."""
    module = native_build.loaded()
    own_ns = -1 if module is None else int(module.device_committed())
    return None if own_ns < 0 else own_ns


def device_restart() -> None:
    """What comes next is no step like the others: what is being measured of it says nothing."""
    module = native_build.loaded()
    if module is not None:
        module.device_restart()


def backward_waits_for_futures() -> None:
    """To be called as a backward pass starts, at whose end a callback that is queued later waits for futures of
    operations: how long the device does so is known, if the step is measured."""
    module = native_build.loaded()
    if module is None or not module.device_measures():
        return
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(module.backward_ended)
    engine.queue_callback(lambda: engine.queue_callback(module.gradients_whole))  # behind that one


def reported_errors() -> list[str]:
    """Names of the groups of which NCCL reports an asynchronous error, such as a connection that has broken.

    It lets the operations wait for ever, and has to be asked.
    """
    module = native_build.loaded()
    if module is None:
        return []
    asked = [(g.name, g.outer()) for g in groups() if g.request.kind == "nccl" and g.size > 1]
    return [name for name, outer in asked if outer is not None and module.reports_error(outer)]


def failure_count() -> int:
    """How many of the script's operations have failed or been abandoned in this process so far."""
    module = native_build.loaded()
    return 0 if module is None else int(module.failures())


def raised_count() -> int:
    """How often an operation of the script has raised in this process so far, at its call or when waited for."""
    module = native_build.loaded()
    return 0 if module is None else int(module.raised())


def abandonment_count() -> int:
    """How often the communication of this process has been abandoned so far."""
    return STATE.abandonments


def last_abandonment() -> str:
    """Why the communication of this process was last abandoned; "" if it never was."""
    return STATE.reason


def _create(request: GroupRequest, store: Store) -> Any:
    module = native()
    STATE.group_made(request.name, request.size)
    outer = module.create(request.rank, request.size, request.name, request.kind, request.timeout, request.sparse)
    # A group of one rank has no peer to wait for. But torch takes the rank in the first NCCL backend of a process for
    # the rank of the process, by which it chooses a GPU (ProcessGroupNCCL::globalRank), and in a replacement the groups
    # of one rank would come first. So they are connected with the others, after the default group.
    if not STATE.detached or (request.size == 1 and request.kind != "nccl"):
        inners = _connect(module, request, store)
        module.exchange(outer, inners.backends, inners.devices)
    return outer


def _connect(module: Any, request: GroupRequest, store: Store) -> Inners:
    """Connect a new group; fails as communication does if a peer is lost or :func:`abandon` comes meanwhile."""
    epoch = STATE.abandonments
    deadline = time.monotonic() + request.timeout.total_seconds()
    builder = Builder(module, [Part(request, _place(module, request, store), request.timeout)], deadline)
    builder.start()
    builder.wait(epoch)
    if builder.finished and builder.error is None:
        return builder.take(request.name)
    builder.give_up()
    if builder.error is None:
        why = "was abandoned" if STATE.abandonments != epoch else "reached its time-out"
        raise dist.DistBackendError(f"making process group {request.name!r} {why}")
    if isinstance(builder.error, RuntimeError) and not isinstance(builder.error, dist.DistError):
        raise dist.DistBackendError(str(builder.error)) from builder.error
    raise builder.error


def _place(module: Any, request: GroupRequest, store: Store) -> Callable[[], Store]:
    """The store and the address by which a new group connects: under the default group's ``store``, or, if there are
    several servers, on its own one. After a recovery it is where the other groups are, for the default group's store
    may have been lost."""
    with STATE.lock:
        if STATE.spread is None:
            STATE.spread_over(start_stores(module, STATE.world))
        stores = STATE.spread
    if stores is None or request.size == 1 or (stores.at_start and request.size == STATE.world):
        return lambda: store
    return partial(stores.of, request, f"{STATE.made[request.name]}/")


def _created(request: GroupRequest, pg: Any) -> None:
    with STATE.lock:
        STATE.groups.append(ManagedGroup(request, pg))
        first = STATE.control_wanted and request.name != CONTROL_GROUP and len(STATE.stores) > 0
        wanted = first and not any(g.name == CONTROL_GROUP and g.process_group() is not None for g in STATE.groups)
        store = STATE.stores[-1] if STATE.stores else None
    if wanted and store is not None and request.size > 1 and not dist.is_initialized():
        # The default group has just been made, but torch does not know it yet: make this one like a default group.
        torch_private.make_sparse_group(CONTROL_GROUP, request.size, request.rank, [], store)


def _wrap_store(store: Store) -> Store:
    """``store`` with waits that can be given up, under a prefix of this start of the script."""
    if any(store is known for known in STATE.stores):
        return store
    # The store outlives a start from the first line; torch 2.13 itself does not keep the attempts' keys apart.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    wrapped: Store = native().wrap_store(PrefixStore(f"attempt_{attempt}", store))
    with STATE.lock:
        STATE.stores.append(wrapped)
    return wrapped
