"""A process group that behaves as ProcessGroupNCCL does, over gloo and host tensors, and the device behind it.

:func:`install` puts it where the product makes its NCCL backends. What it guarantees stands in README.md.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from flashrecovery.groups import accelerator, native_build, torch_private
from flashrecovery.groups.accelerator import DeviceMark
from flashrecovery.groups.torch_private import GroupRequest, PrefixStore, Store, TCPStore
from tests.support.fake_nccl.held_back import FakeHold, queue_kernels

EXTENSION = native_build.Extension(
    Path(__file__).parent, "flashrecovery_fake_nccl", "fake NCCL for tests", headers=(native_build.BACKEND.sources,)
)
_CONNECT = datetime.timedelta(minutes=5)  # a real ncclCommInitRank has no time-out that we could set

_NO_COLLECTIVES = frozenset(
    {
        *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"),
        *(
            "abort",
            "bound_device_id",
            "boxed",
            "get_group_store",
            "group_desc",
            "group_name",
            "merge_remote_group",
            "name",
        ),
        *(
            "monitored_barrier",
            "rank",
            "recv",
            "recv_anysource",
            "send",
            "set_timeout",
            "shutdown",
            "size",
            "split_group",
        ),
        *("supports_coalescing", "unbox", "use_pg_for_symm_mem_rendezvous"),
    }
)
"""What else a ProcessGroup has. Any other method may be a collective: each version of torch has new names for them."""

KIND = "FAKE_NCCL_KIND"
"""Environment variable: which of torch's NCCL backends is played; "nccl" (whatever torch means by it) or one of
``torch_private.NCCL_CLASSES``."""


def backend_name() -> str:
    """For ``init_process_group``: the host's tensors play the device's."""
    return "cpu:" + os.environ.get(KIND, "nccl")


class FakeStream:
    """A stream of a thread's own, which the host does not play: see ``Stream`` in module.cpp."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._stream = module.Stream()

    @contextmanager
    def current(self) -> Iterator[None]:
        outer = self._module.set_stream(self._stream)
        try:
            yield
        finally:
            self._module.set_stream(outer)

    def mark(self) -> DeviceMark:
        return cast(DeviceMark, self._stream.mark())


class FakeDevice:
    """The host plays the current stream; the communicators' streams run beside it."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._held_back: FakeHold | None = None

    def in_use(self) -> bool:
        return True

    def current(self) -> torch.device | None:
        return torch.device("cpu")

    def synchronize_stream(self) -> None:
        """The host *is* the stream: it waits in the operations themselves, where it does not run ahead."""
        self._module.catch_up()

    def synchronize(self, device: torch.device | None = None) -> None:
        """All streams."""
        if self._held_back is not None:
            self._held_back.drain()
        self._module.synchronize()

    def stream_hold(self, device: torch.device) -> FakeHold:
        """From now on the host runs ahead."""
        self._module.run_ahead(True)
        self._held_back = FakeHold(self._module)
        return self._held_back

    def holds(self, tensor: torch.Tensor, device: torch.device) -> bool:
        """What torch has allocated itself. What was made of bytes, or maps memory, plays the host's: rank-local states,
        and the copies that processes share.

        (``resizable()`` of the storage is no answer: it turns false when someone has looked at the tensor by numpy.)
        """
        return bool(self._module.allocated(tensor))

    def stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self._module)

    def mark(self, device: torch.device) -> DeviceMark:
        """The host is the stream: it has come so far."""
        return cast(DeviceMark, self._module.Stream().mark())

    def free_bytes(self) -> int:
        return int(os.environ.get("FAKE_NCCL_FREE_MIB", 64 << 10)) << 20

    def empty_cache(self) -> None:
        """There is none."""

    def check(self) -> None:
        self._module.check()

    def fail(self) -> None:
        self._module.fail_kernels()


def _collectives() -> list[str]:
    """The methods by which torch's Python functions make a collective, in this version of torch."""
    kind = dist.ProcessGroup
    public = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    return sorted((public - _NO_COLLECTIVES) | {"_allgather_base", "_reduce_scatter_base"})


def _catch_up_after(name: str, module: Any) -> None:
    """torch's Python functions call ``ProcessGroup.<name>``, and do not wait for what is synchronous."""
    original = getattr(dist.ProcessGroup, name)

    @wraps(original)
    def call(*arguments: Any, **more: Any) -> Any:
        work = original(*arguments, **more)
        if not any(getattr(options, "asyncOp", False) for options in (*arguments, *more.values())):
            module.catch_up()
        return work

    setattr(dist.ProcessGroup, name, call)


def _catch_up_while_recording(module: Any) -> None:
    """The set-up log reads what a synchronous operation has brought: on a real device it waits for it there."""
    native = native_build.native()
    start, take = native.log_start, native.log_take

    def log_start() -> None:
        module.catch_up_at_once(True)
        start()

    def log_take() -> bytes:
        module.catch_up_at_once(False)
        return bytes(take())

    native.log_start, native.log_take = log_start, log_take


def build() -> None:
    """Compile it, if need be; ranks with a deadline should not have to."""
    native_build.build(extension=EXTENSION)


def install() -> Any:
    """From now on in this process; returns the extension."""
    module = native_build.load(EXTENSION)

    def nccl_backend(store: Store, request: GroupRequest, timeout: datetime.timedelta, device: Any) -> Any:
        roots: list[TCPStore] = []

        def connect(prefix: str, rank: int, size: int) -> tuple[Any, list[Any]]:
            """As ncclGetUniqueId and ncclCommInitRankConfig do.

            The address of a root comes over the group's store, which can be asked to stop. Everything else goes over
            the root, and no one can interrupt it.
            """
            store_of = PrefixStore(prefix, store)
            if rank == 0:
                root = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_CONNECT)
                store_of.set("root", str(root.port))
            else:
                root = TCPStore("127.0.0.1", int(store_of.get("root")), is_master=False, timeout=_CONNECT)
            roots.append(root)
            native, ranks, name = native_build.native(), list(range(size)), f"{request.name}/{prefix}"
            return torch_private.gloo_backend(
                root, rank, size, timeout, ranks, name, native.shared_device, lambda d: module.device(d, _CONNECT)
            )

        newer = request.nccl != torch_private.LEGACY
        backend = module.backend(request.rank, request.size, connect, request.nccl if newer else "nccl")
        if device is not None or newer:  # the newer ones are connected in their constructor
            backend.eager_connect_single_device(device or torch.device("cpu"))
        return backend

    for name in torch_private.NCCL_CLASSES.values():
        if not hasattr(dist, name):
            setattr(dist, name, None)  # a torch that has all of them
    torch_private.nccl_backend = nccl_backend
    native_build.native().use_device_marks(module.marks())
    _catch_up_while_recording(module)
    for name in _collectives():
        _catch_up_after(name, module)
    queue_kernels(module)
    accelerator.use(FakeDevice(module))
    return module
