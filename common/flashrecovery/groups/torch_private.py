"""Everything private to torch that the groups package relies on, in one place.

Whether the installed torch has it is probed first (:mod:`flashrecovery.capabilities.of_torch`). What is used, and why:

* ``distributed_c10d._new_process_group_helper`` is wrapped: it is the one function through which every group, by
  ``init_process_group``, ``new_group`` or a device mesh, is made. Keywords that came after 2.13 are handed on.
* ``destroy_process_group`` is wrapped: a script that comes to it takes no more steps (:func:`before_destruction`).
* Our backend is a plug-in of type CUSTOM. It must not claim to be of type GLOO: C++ code of DDP's logger casts such
  a backend to ``ProcessGroupGloo``. ``_world.pg_map`` and ``_world.pg_backend_config`` are put right afterwards, so
  that ``dist.get_backend`` and everything that asks it sees the backend the user named.
* ``Backend.backend_capability`` of the plug-in is set to the devices of the group that is being made.
* ``ProcessGroupGloo._Options`` has no public constructor; its devices are replaced by ours.
* ``_world.pg_group_ranks`` is rewritten when the world is resized; rank and size themselves are changed in C++.
* ``_FR_SELF_RECORDING_BACKENDS`` says which backends torch's flight recorder need not be hooked to (from 2.15 on).
* ``ProcessGroup._start_coalescing`` and ``_end_coalescing``, as ``batch_isend_irecv`` calls them.
* ``formatSockAddr`` of its sockets asks for no more names once it has failed (:mod:`.peer_names`).
* ``native/gloo_abi.h`` declares gloo's transport interface (see there).
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as _typed_c10d
from torch._C._distributed_c10d import DebugLevel, HashStore, PrefixStore, Store, TCPStore, get_debug_level

from flashrecovery.capabilities.of_torch import FLIGHT_RECORDER_HOOK, NCCL_BY_NAME, SEQUENCE_NUMBERS, TORCHCOMMS
from flashrecovery.errors import UnsupportedError

__all__ = ["GroupRequest", "HashStore", "PrefixStore", "Store", "TCPStore"]

c10d: Any = _typed_c10d  # what is used of it is private, and so are its types

PLUGIN = "flashrecovery"
_SPARSE_TAG = "flashrecovery-sparse:"
DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)
LEGACY = "nccl-legacy"
NCCL2 = "nccl2"
NCCL_CLASSES = {LEGACY: "ProcessGroupNCCL", NCCL2: "ProcessGroupNCCL2", "nccl-lazy": "ProcessGroupNCCLLazy"}
"""torch's NCCL backends, by the names that it gives them from 2.14 on. "nccl" is one of the first two."""
MANAGED_KINDS = frozenset({"gloo", "nccl", *NCCL_CLASSES})
_NCCL2_ENV = "TORCH_DIST_USE_NCCL2"
_LAZY_ENV = "TORCH_GLOO_LAZY_INIT"
_TRUE = frozenset({"1", "y", "yes", "t", "true"})  # as torch reads it


@dataclass(frozen=True)
class GroupRequest:
    """One group that torch is about to make, as this rank sees it."""

    name: str
    ranks: tuple[int, ...]  # global, in group order
    rank: int
    size: int
    kinds: dict[str, str]  # device type -> "gloo" | "nccl"
    timeout: datetime.timedelta
    options: Any
    device_id: torch.device | None
    sparse: bool = False  # one of the recovery's own, see native/sparse_backend.h
    nccl: str = LEGACY  # which of NCCL_CLASSES its NCCL backend is, if it has one

    @property
    def kind(self) -> str:
        """The backend that matters for coalescing and the like: the accelerator's if there is one."""
        return "nccl" if "nccl" in self.kinds.values() else "gloo"


Creator = Callable[[GroupRequest, Store], Any]
Created = Callable[[GroupRequest, Any], None]

_original: Callable[..., Any] | None = None
_current: GroupRequest | None = None
_before_destruction: list[Callable[[], None]] = []


def installed() -> bool:
    return _original is not None


def wrap_group_creation(create: Creator, created: Created, wrap_store: Callable[[Store], Store]) -> None:
    """Let every later group be made with the backend that ``create(request, store)`` returns.

    ``created(request, pg)`` is called after torch has registered the group. ``wrap_store`` is applied to the store
    of the default group, from which every other group's store is derived.
    """
    global _original
    if _original is not None:
        return
    original = _original = c10d._new_process_group_helper

    def plugin(options: Any, backend_options: Any) -> Any:
        if _current is None:
            raise UnsupportedError(
                f"backend {PLUGIN!r} is made by something other than torch.distributed.new_group() or "
                "init_process_group(): make the group with one of these"
            )
        _bind_device(_current, getattr(options, "process_group", None))
        return create(_current, options.store)

    dist.Backend.register_backend(PLUGIN, plugin, extended_api=True, devices=[])

    def helper(  # noqa: PLR0913 - torch's own parameters
        group_size: int,
        group_rank: int,
        global_ranks_in_group: Sequence[int],
        backend: Any,
        store: Store,
        group_name: str,
        backend_options: Any = None,
        timeout: datetime.timedelta | None = None,
        pg_tag: str | None = None,
        device_id: torch.device | None = None,
        group_desc: str | None = None,
        **newer: Any,
    ) -> tuple[Any, Any]:
        global _current
        config = c10d.BackendConfig(dist.Backend(str(backend)))
        kinds = {device: str(kind) for device, kind in config.get_device_backend_map().items()}
        rest = (group_name, backend_options, timeout, pg_tag, device_id, group_desc)
        if set(kinds.values()) == {"fake"}:
            return cast(
                "tuple[Any, Any]",
                original(group_size, group_rank, global_ranks_in_group, backend, store, *rest, **newer),
            )
        refuse_unsupported(kinds)
        nccl = chosen_nccl(kinds)
        _leave_recording_to_inner(kinds, nccl)
        kinds = {device: "nccl" if kind in NCCL_CLASSES else kind for device, kind in kinds.items()}
        _refuse_newer(newer)
        is_default = len(global_ranks_in_group) == 0
        request = GroupRequest(
            name=group_name,
            ranks=tuple(range(group_size)) if is_default else tuple(global_ranks_in_group),
            rank=group_rank,
            size=group_size,
            kinds=kinds,
            timeout=timeout or DEFAULT_TIMEOUT,
            options=backend_options,
            device_id=device_id,
            nccl=nccl,
            sparse=(pg_tag or "").startswith(_SPARSE_TAG),
        )
        if is_default:
            store = wrap_store(store)
        known = set(c10d._world.pg_map)
        dist.Backend.backend_capability[PLUGIN] = list(kinds)
        outer_request, _current = _current, request
        try:
            pg, prefix_store = original(group_size, group_rank, global_ranks_in_group, PLUGIN, store, *rest, **newer)
        finally:
            _current = outer_request
        if pg is None or pg is dist.GroupMember.NON_GROUP_MEMBER or pg in known:
            return pg, prefix_store
        c10d._world.pg_map[pg] = (str(backend), prefix_store)
        c10d._world.pg_backend_config[pg] = str(config)
        created(request, pg)
        return pg, prefix_store

    c10d._new_process_group_helper = helper
    _wrap_destruction()


def chosen_nccl(kinds: Mapping[str, str]) -> str:
    """Which of torch's NCCL backends (a key of NCCL_CLASSES) torch itself would make for ``kinds`` (device type ->
    backend's name)."""
    named = next((kind for kind in kinds.values() if kind in NCCL_CLASSES), None)
    if named is not None:
        return named
    if NCCL_BY_NAME.way is not None:
        c10d.Backend._ensure_backend_registered("nccl")
        plugin = c10d.Backend._plugins.get("NCCL")
        return NCCL2 if plugin is not None and plugin.creator_fn is c10d._create_nccl2_process_group else LEGACY
    asked = os.environ.get(_NCCL2_ENV) == "1" and hasattr(dist, NCCL_CLASSES[NCCL2])
    return NCCL2 if asked else LEGACY


def _bind_device(request: GroupRequest, pg: Any) -> None:
    """As torch does for its newer NCCL backends, so that a barrier finds the device."""
    if request.kinds.get("cuda") == "nccl" and request.nccl != LEGACY and pg is not None and pg.bound_device_id is None:
        pg.bound_device_id = default_device(request.ranks[request.rank])


def _leave_recording_to_inner(kinds: Mapping[str, str], nccl: str) -> None:
    """torch 2.15 hooks its flight recorder to every group of a backend that it does not know. Where the inner backends
    record by themselves, each operation would be recorded twice, at a cost on the training thread."""
    if FLIGHT_RECORDER_HOOK.way is None:
        return
    recorders = c10d._FR_SELF_RECORDING_BACKENDS
    if recorders.issuperset(nccl if kind == "nccl" else kind for kind in kinds.values()):
        recorders.add(PLUGIN)
    else:
        recorders.discard(PLUGIN)


def refuse_unsupported(kinds: Mapping[str, str]) -> None:
    """Raises UnsupportedError, by name, for a backend that is asked for, by device type or in the environment, and
    cannot be recovered."""
    unmanaged = sorted(set(kinds.values()) - MANAGED_KINDS)
    if unmanaged:
        raise UnsupportedError(
            f"process-group backend {', '.join(unmanaged)} cannot be recovered; use gloo, nccl or cpu:gloo,cuda:nccl"
        )
    absent = [kind for kind in kinds.values() if kind in NCCL_CLASSES and not hasattr(dist, NCCL_CLASSES[kind])]
    if absent:
        raise UnsupportedError(
            f"process-group backend {absent[0]}: torch {torch.__version__} has no {NCCL_CLASSES[absent[0]]}; use nccl"
        )
    if len({kind for kind in kinds.values() if kind != "gloo"}) > 1:
        raise UnsupportedError(
            f"process-group backends {', '.join(kinds.values())}: one kind of NCCL at most in a group"
        )
    if get_debug_level() == DebugLevel.DETAIL:
        raise UnsupportedError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper with a separate connection around every group, which "
            "cannot be recovered; use INFO or OFF"
        )
    if "gloo" in kinds.values() and os.environ.get(_LAZY_ENV, "").lower() in _TRUE:
        raise UnsupportedError(
            f"{_LAZY_ENV}={os.environ[_LAZY_ENV]}: an operation of gloo that is still connecting cannot be "
            "interrupted, so such groups cannot be recovered; unset it"
        )
    if TORCHCOMMS.way is not None and c10d._use_torchcomms_enabled():
        raise UnsupportedError("torchcomms backends cannot be recovered; unset TORCH_DISTRIBUTED_USE_TORCHCOMMS")


def _refuse_newer(keywords: dict[str, Any]) -> None:
    """What later versions of torch pass to their helper. None of it may ask for anything: we would not do it."""
    asked = sorted(name for name, value in keywords.items() if value not in (None, False))
    if asked:  # 2.14: enable_reconfigure
        raise UnsupportedError(f"{', '.join(asked)}: recoverable groups do not support this; leave it out")


def make_sparse_group(name: str, size: int, rank: int, ranks: Sequence[int], store: Store) -> Any:
    """One of the recovery's own groups, which does not count in torch's numbering of the user's; None for a non-member.

    To torch it is a gloo group.
    """
    tag = _SPARSE_TAG + name  # a unique tag: torch would return an existing group with equal tag and ranks
    pg, _ = c10d._new_process_group_helper(
        size, rank, list(ranks), "gloo", store, name, timeout=DEFAULT_TIMEOUT, pg_tag=tag, group_desc=name
    )
    if pg is None or pg is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    del c10d._world.pg_names[pg]  # their number goes into the names of groups made with hashed names
    c10d._world.pg_group_ranks[pg] = {r: i for i, r in enumerate(ranks or range(size))}
    return pg


def renumber(pg: Any, ranks: Sequence[int]) -> None:
    """The ranks of a job that has changed its size have new numbers: these are the global numbers of a group's, in its
    order."""
    c10d._world.pg_group_ranks[pg] = {rank: number for number, rank in enumerate(ranks)}


def before_destruction(callback: Callable[[], None]) -> None:
    """Call ``callback`` before the script destroys all groups at its end; not if it does so because it is failing."""
    _before_destruction.append(callback)


def _wrap_destruction() -> None:
    original = c10d.destroy_process_group

    @wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if group in (None, dist.GroupMember.WORLD) and sys.exc_info()[0] is None:
            for callback in _before_destruction:
                callback()
        original(group)

    c10d.destroy_process_group = destroy_process_group
    dist.destroy_process_group = destroy_process_group


def default_store() -> Store:
    return cast(Store, c10d._get_default_store())


def is_registered(pg: Any) -> bool:
    """False once the group has been destroyed."""
    return pg in c10d._world.pg_map


def named_group(name: str) -> dist.ProcessGroup:
    """The group that has this ``group_name`` here. Groups are made in the same order on all ranks, so it is the same
    one everywhere."""
    return cast(dist.ProcessGroup, c10d._resolve_process_group(name))


def backend_of(pg: Any, device: str) -> Any:
    return pg._get_backend(torch.device(device))


def send_and_receive(
    pg: Any,
    device: torch.device,
    sends: Sequence[tuple[torch.Tensor, int]],
    receives: Sequence[tuple[torch.Tensor, int]],
) -> Any | None:
    """Start messages to and from ranks of the group (tensor, rank), all in one section, so that none waits for another.

    Returns the Work of the section, or None where the backend gives none: then they are on the current stream.
    """
    pg._start_coalescing(device)
    try:
        for tensor, peer in sends:
            pg.send([tensor], peer, 0)
        for tensor, peer in receives:
            pg.recv([tensor], peer, 0)
    except dist.DistError:
        raise  # our backend has ended the section
    except BaseException:
        pg._end_coalescing(device)
        raise
    return pg._end_coalescing(device)


def clear_coalescing() -> None:
    """Forget operations that an interrupted ``_coalescing_manager`` had collected."""
    c10d._world.pg_coalesce_state.clear()


def gloo_backend(
    store: Store,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    ranks: Sequence[int],
    name: str,
    share_device: Callable[[str, Callable[[], Any]], Any],
    wrap_device: Callable[[Any], Any],
) -> tuple[Any, list[Any]]:
    """A stock gloo backend over wrapped devices, and those devices. Chooses the interfaces as torch does."""
    gloo: Any = dist.ProcessGroupGloo
    interfaces = [i for i in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if i]
    plain = [share_device(i, partial(gloo.create_device, interface=i)) for i in interfaces]
    plain = plain or [share_device("", gloo.create_default_device)]
    options = gloo._Options()
    options._devices = [wrap_device(d) for d in plain]
    options._threads = 2 * len(plain)
    options._timeout = timeout
    options.global_ranks_in_group = list(ranks)
    options.group_name = name
    backend = gloo(store, rank, size, options)
    _agree_on_sequence_number(backend)
    return backend, list(options._devices)


def _agree_on_sequence_number(backend: Any) -> None:
    if SEQUENCE_NUMBERS.way is not None:
        backend._set_sequence_number_for_group()


def nccl_backend(store: Store, request: GroupRequest, timeout: datetime.timedelta, device: torch.device | None) -> Any:
    """The NCCL backend that the script has chosen, with the group's own options. Never split from another: its parent
    may be dead.

    With ``device`` it makes its communicator here (which blocks until all members have come) and is bound to that one.
    Only ``ProcessGroupNCCL`` can wait for its first operation: the others always have a device, as in torch itself.
    """
    options = request.options if request.options is not None else dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.split_from = None
    options.global_ranks_in_group = list(request.ranks)
    options.group_name = request.name
    backend = getattr(dist, NCCL_CLASSES[request.nccl])(store, request.rank, request.size, options)
    _agree_on_sequence_number(backend)
    if device is None and request.nccl != LEGACY:
        device = default_device(request.ranks[request.rank])
    if device is not None:
        with torch.cuda.device(device):  # this may be a helper thread
            backend.eager_connect_single_device(device)
    return backend


def default_device(rank: int) -> torch.device:
    """The GPU that torch takes for ``nccl2`` where the script names none: that of LOCAL_RANK, else of the global rank.

    Source: ``_nccl2_device`` in torch 2.15's distributed_c10d.py. Raises UnsupportedError on a machine without a GPU.
    """
    count = torch.cuda.device_count()
    if count == 0:
        raise UnsupportedError("process-group backend nccl2 needs a GPU, and this process sees none")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % count)
