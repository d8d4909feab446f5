"""DistributedDataParallel's Reducer: renewing it after an interrupted backward, and giving it a known bucket layout.

An interrupted backward leaves the Reducer waiting for a finalisation that never comes, so a new one takes its place.

The trap is the layout. DDP starts with buckets in reverse registration order and, at the first forward after the first
synchronised backward, rebuilds them in the order in which rank 0's gradients became ready. A sum's last bits depend on
where a gradient lies in its bucket. So survivors and replacement must use the layout that the undisturbed run has: a
new Reducer is brought there by one simulated backward in that order, with a separate, local group.

All that is private to torch about DDP stands in this file.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from flashrecovery.adapter import zeros_backed_by_pages
from flashrecovery.capabilities.of_torch import PYTHON_REDUCER, REDUCER, TORCH
from flashrecovery.errors import RestoreError, UnsupportedError

BucketLayout = tuple[tuple[int, ...], ...]
"""Parameter indices, bucket by bucket, in reduction order."""

_STATELESS_HOOK_STATES = (type(None), dist.ProcessGroup)


def refuse_unsupported(ddp: DistributedDataParallel) -> None:
    """Raise UnsupportedError, by name, for options under which a bitwise recovery is not possible, or if this torch
    lacks something of the inside that is needed."""
    TORCH.require((REDUCER, PYTHON_REDUCER))
    reasons = {
        "static_graph=True": ddp.static_graph,
        "mixed_precision": ddp.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(ddp._delay_all_reduce_params),
        "the compiled 'python_reducer' mode": PYTHON_REDUCER.way is not None and ddp._use_python_reducer,
        "sparse gradients": any(ddp._build_params_for_reducer()[1]),
        "optimizers that run in backward": any(hasattr(p, "_in_backward_optimizers") for p in ddp._module_parameters),
    }
    for name, used in reasons.items():
        if used:
            raise UnsupportedError(f"DistributedDataParallel with {name} is not supported")
    for hook, state in ddp._comm_hooks:
        if not isinstance(state, _STATELESS_HOOK_STATES):
            name = getattr(hook, "__qualname__", repr(hook))
            raise UnsupportedError(
                f"DistributedDataParallel with communication hook {name!r} is not supported: its state, a "
                f"{type(state).__name__}, would not be rolled back (hooks without state, or with a process group, are)"
            )
    if not ddp._comm_hooks and (builtin := _builtin_hook_name(ddp)):
        raise UnsupportedError(
            f"DistributedDataParallel with the built-in communication hook {builtin!r} is not supported; "
            "register the Python hook of torch.distributed.algorithms.ddp_comm_hooks.default_hooks instead"
        )


def _builtin_hook_name(ddp: DistributedDataParallel) -> str:
    if ddp.logger is None:
        raise UnsupportedError(
            "DistributedDataParallel without its logger, which its constructor makes: which built-in communication "
            "hook it has is not known"
        )
    data = ddp.logger._get_ddp_logging_data()
    return str(data.strs_map.get("comm_hook", ""))


def reducer_parameters(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that DDP reduces, by index; within :func:`_requiring_gradients_as_reduced`."""
    parameters, _sparse = ddp._build_params_for_reducer()
    return list(parameters)


@contextlib.contextmanager
def _requiring_gradients_as_reduced(ddp: DistributedDataParallel) -> Iterator[list[Any]]:
    """Exactly those parameters that the Reducer reduces require gradients meanwhile, as when DDP was made. A script may
    have changed that since: a GAN switches its discriminator off for the generator's step. Gives the buckets."""
    buckets = _buckets(ddp)
    reduced = {id(p) for bucket in buckets for p in bucket.parameters()}
    before = {p: p.requires_grad for p in ddp.module.parameters()}
    changed = [p for p, requires in before.items() if requires != (id(p) in reduced)]
    for parameter in changed:
        parameter.requires_grad_(id(parameter) in reduced)
    try:
        yield buckets
    finally:
        for parameter in changed:
            parameter.requires_grad_(before[parameter])


def read_layout(ddp: DistributedDataParallel) -> BucketLayout:
    """The current bucket layout. Looks at every parameter: do not call it every step."""
    with _requiring_gradients_as_reduced(ddp) as buckets:
        index = {id(p): i for i, p in enumerate(reducer_parameters(ddp))}
    return tuple(tuple(index[id(p)] for p in bucket.parameters()) for bucket in buckets)


def _buckets(ddp: DistributedDataParallel) -> list[Any]:
    with _ZerosWithoutMemory():  # type: ignore[no-untyped-call]  # as large as all gradients, otherwise
        return list(ddp.reducer._get_zeros_like_grad_buckets())


class _ZerosWithoutMemory(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            return torch.empty_like(args[0], device="meta")
        return func(*args, **(kwargs or {}))


class _ContentLeftAlone(TorchDispatchMode):
    """Gradients and buckets keep the old content of their memory: it is not read, and new memory is then not allocated
    before its first use. Everything else that the Reducer copies is integers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = kwargs.get("out", args[0]) if func in _FILLING else None
        if isinstance(target, torch.Tensor) and target.is_floating_point():
            return target
        return func(*args, **kwargs)


_FILLING = (torch.ops.aten.zero_.default, torch.ops.aten.copy_.default, torch.ops.aten.mul.out)


def renew(ddp: DistributedDataParallel, layout: BucketLayout | None, *, gradients: bool = False) -> None:
    """Replace the Reducer and its Logger by new ones: in the initial layout (None), or as after a first step that has
    led to ``layout``. Does no communication.

    With ``gradients``, every reduced parameter is left with a gradient of undefined content, a view of its bucket if
    DDP wants that. Else parameters are left without, if there is a layout.

    Raises:
        RestoreError: the layout cannot be reached here (another model, another torch).
    """
    with _requiring_gradients_as_reduced(ddp):
        _renew(ddp, layout, gradients)


def _renew(ddp: DistributedDataParallel, layout: BucketLayout | None, gradients: bool) -> None:
    hooks, ddp._comm_hooks = list(ddp._comm_hooks), []
    if layout is not None or (gradients and ddp.find_unused_parameters):
        _drop_gradients(reducer_parameters(ddp))  # they may be views of the old buckets, which would stay with them
    _new_reducer(ddp)
    if layout is not None:
        _adopt_layout(ddp, layout, gradients)
    elif gradients and ddp.find_unused_parameters:
        # Never rebuilt, so a simulated backward leaves no other trace. (Otherwise None means: before the first step.)
        _simulate_backward(ddp, range(len(reducer_parameters(ddp))), gradients)
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)


def zero_gradients(ddp: DistributedDataParallel) -> frozenset[int]:
    """Gradients that have just been made, and whose content is undefined, become zero, and their storages with them.
    Returns the addresses of these."""
    gradients = [p.grad for p in reducer_parameters(ddp) if p.grad is not None]
    by_storage = {g.untyped_storage().data_ptr(): g for g in gradients}
    for gradient in by_storage.values():
        zeros_backed_by_pages(gradient)
    return frozenset(by_storage)


def _drop_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _new_reducer(ddp: DistributedDataParallel) -> None:
    ddp.reducer._remove_autograd_hooks()  # an old Reducer kept alive by a traceback must not see a gradient
    # It goes, and its buckets with it, before the new one takes as much memory.
    ddp.reducer = ddp.logger = None  # type: ignore[assignment]
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False


def rebuild_now(ddp: DistributedDataParallel) -> bool:
    """Rebuild the buckets as DDP would at its next forward; True if they are (now) in their final layout.

    A collective of DDP's group in the first step; later it does nothing. Call it after the gradients are reduced.
    """
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True
    return bool(ddp._has_rebuilt_buckets)


def _adopt_layout(ddp: DistributedDataParallel, layout: BucketLayout, gradients: bool) -> None:
    parameters = reducer_parameters(ddp)
    if sorted(itertools.chain.from_iterable(layout)) != list(range(len(parameters))):
        raise RestoreError(f"the bucket layout of the source does not fit this model's {len(parameters)} parameters")
    for attempt, order in enumerate(_ready_orders(layout, parameters)):
        if attempt:
            _new_reducer(ddp)
        _simulate_backward(ddp, order, gradients)
        if not ddp._has_rebuilt_buckets:
            raise RestoreError("DistributedDataParallel did not rebuild its buckets")
        if read_layout(ddp) == layout:
            return
    raise RestoreError("DistributedDataParallel's gradient buckets cannot be brought to the layout of the other ranks")


class _LocalGroup(dist.ProcessGroup):
    """A group of this rank alone, unknown to torch: what the Reducer reduces stays as it is."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        return _DoneWork(tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        return _DoneWork(tensors)


class _DoneWork(dist.Work):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        devices: list[int | str | torch.device] = sorted({t.device for t in tensors if t.device.type != "cpu"}, key=str)
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future


def _ready_orders(layout: BucketLayout, parameters: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Orders of gradients that can have led to ``layout``, the likeliest first.

    With one dtype the order is the layout itself. With several, buckets that never filled up are emitted in an order
    that depends on which dtype came first.
    """
    flat = list(itertools.chain.from_iterable(layout))
    yield flat
    first: dict[Any, int] = {}
    for i in flat:
        first.setdefault((parameters[i].dtype, parameters[i].device), i)
    if len(first) > 1:
        for permutation in itertools.islice(itertools.permutations(first.values()), 24):
            yield [*permutation, *(i for i in flat if i not in permutation)]


def _simulate_backward(ddp: DistributedDataParallel, order: Sequence[int], gradients: bool) -> None:
    """Let the Reducer see one backward in which the gradients become ready in ``order``, and rebuild its buckets.

    Args:
        gradients: keep those that it has made; else they go before the buckets are rebuilt, for they may be views of
            the first ones.
    """
    reducer = ddp.reducer
    parameters = reducer_parameters(ddp)
    for parameter in parameters:
        # Without a gradient a parameter would count as unused, where DDP looks for that.
        parameter.grad = torch.empty_like(parameter) if ddp.find_unused_parameters else None

    def gradients_ready(_grad: torch.Tensor) -> None:
        for index in order:
            reducer._autograd_hook(index)  # type: ignore[attr-defined]

    seed = torch.zeros((), device=parameters[0].device, requires_grad=True)
    with torch.enable_grad():
        output = seed * 1
        used = [p.view_as(p) for p in parameters]  # where the search for unused parameters starts
    output.register_hook(gradients_ready)
    local = _LocalGroup()
    reducer._update_process_group(local)
    reducer.prepare_for_forward()
    reducer.prepare_for_backward(used)
    with _ContentLeftAlone():  # type: ignore[no-untyped-call]
        torch.autograd.backward([output])
        if not gradients:
            _drop_gradients(parameters)
        rebuild_now(ddp)
    reducer._update_process_group(ddp.process_group)
