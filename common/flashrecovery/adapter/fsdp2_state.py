"""The inside of FSDP2 (``fully_shard``): finding its parameters, and undoing an interrupted forward or backward.

All that is private to torch about FSDP2 stands in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_init

from flashrecovery.capabilities.of_torch import FSDP2, FSDP2_ACCUMULATION, FSDP2_ITERATION, FSDP2_RESHARDING, TORCH
from flashrecovery.errors import RestoreError, UnsupportedError
from flashrecovery.worker.local_state.version_counters import ItemTable


def states(root: FSDPModule) -> list[Any]:
    """Every FSDPState below ``root``, each once, in module order. Asked for several times a step: after
    :func:`initialise` torch has written them down."""
    found: dict[int, Any] = {id(state): state for state in root._get_fsdp_state()._state_ctx.all_states}
    if found:
        return list(found.values())
    assert isinstance(root, nn.Module)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found.setdefault(id(state), state)
    return list(found.values())


def check(root: FSDPModule) -> None:
    """Raises UnsupportedError, by name, for what recovery cannot undo, or what of FSDP2's inside this torch lacks."""
    TORCH.require((FSDP2, FSDP2_ITERATION))
    for group in groups(root):
        if group._all_reduce_hook is not None:
            raise UnsupportedError("FSDP2 with set_all_reduce_hook is not supported: recovery cannot see its groups")


def middle_unit(root: FSDPModule) -> nn.Module:
    """A module given to ``fully_shard`` about half-way through ``root``."""
    assert isinstance(root, nn.Module)
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    middle = units[len(units) // 2]
    assert isinstance(middle, nn.Module)
    return middle


def groups(root: FSDPModule) -> Iterator[Any]:
    """Every FSDPParamGroup below ``root``."""
    for state in states(root):
        yield from _groups_of(state)


def _groups_of(state: Any) -> list[Any]:
    if FSDP2.takes("several groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def initialise(root: FSDPModule) -> None:
    """What the first forward would do: find the root, fix the sharded parameters. Idempotent, no communication."""
    root._get_fsdp_state()._lazy_init()


def sharded_parameters(root: FSDPModule) -> dict[str, Any]:
    """``{fully qualified name: FSDPParam}``, tied parameters once; works in every state of the parameters."""
    assert isinstance(root, nn.Module)
    names = {id(module): fqn for fqn, module in reversed(list(root.named_modules(remove_duplicate=False)))}
    found: dict[str, Any] = {}
    for group in groups(root):
        for parameter in group.fsdp_params:
            info = parameter._module_info
            prefix = names[id(info.module)]
            found[f"{prefix}.{info.param_name}" if prefix else info.param_name] = parameter
    return found


def registered_on_modules(parameters: Iterable[Any]) -> frozenset[int]:
    """``id()`` of each object that one of these FSDPParams registers on its module, in whatever state it is."""
    attributes = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    return frozenset(id(getattr(parameter, name, None)) for parameter in parameters for name in attributes)


def reset(root: FSDPModule) -> None:
    """Bring ``root`` to the state between two steps, from any point of a forward or backward, without waiting for
    anything: the collectives in flight have been abandoned."""
    for group in groups(root):
        # reset_iter_state() would wait for these.
        group._all_gather_result = None
        group._all_reduce_state = None
    root_state = root._get_fsdp_state()
    if root_state._is_root is None:
        return  # interrupted before its first forward: nothing has happened yet
    if FSDP2_ITERATION.takes("its own"):
        root.reset_iter_state()
    else:
        _reset_iteration(root_state)
    for state in states(root):
        state._state_ctx.is_last_backward = True
        state._state_ctx.post_optim_event = None
    for group in groups(root):
        group._sharded_state = type(group._sharded_state).SHARDED
        for parameter in group.fsdp_params:
            if FSDP2_ACCUMULATION.way is not None:
                parameter.unsharded_accumulated_grad = None
            parameter.grad_offload_event = None
            parameter._sharded_post_forward_param = None
            parameter._sharded_post_forward_param_data = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
            parameter.to_sharded()  # also one that was caught between two states; frees the unsharded memory


def _reset_iteration(root_state: Any) -> None:
    """As ``reset_iter_state`` of later versions of torch, but without waiting."""
    context = root_state._comm_ctx
    context.all_gather_state = None
    if FSDP2_ITERATION.takes("states"):
        context.reduce_scatter_states.clear()
    else:
        context.reduce_scatter_state = None
    context.post_forward_order.clear()
    for state in root_state._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        for group in _groups_of(state):
            group._post_reduce_event = group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
    root_state._state_ctx.iter_forward_root = None
    root_state._state_ctx.post_backward_final_callback_queued = False


def synchronises(root: FSDPModule) -> bool:
    """Whether the next backward pass reduces gradients, and is not said to be followed by another one of the step."""
    return any(map(_reduces, groups(root))) and bool(root._get_fsdp_state()._state_ctx.is_last_backward)


def _reduces(group: Any) -> bool:
    return bool(group.reduce_grads and (group.all_reduce_grads or not group._is_hsdp))


class LastReduction:
    """Calls ``callback`` in each backward pass that no other one follows: just before the unit that comes last hands
    over its gradients to be reduced.

    That is the first unit of the model with something to train when :meth:`choose` was called last: its own, or that of
    the embeddings. It is the same one on all ranks, so that none waits for another in the meantime. If it has no
    gradients in a pass, it hands over nothing, and there is no callback: what counts is that a contribution of this
    rank *follows*.
    """

    def __init__(self, root: FSDPModule, callback: Callable[[], None]) -> None:
        self._root, self._callback = root, callback
        self._units = list(groups(root))
        self._chosen: Any = None
        self._ours: Callable[..., Any] | None = None
        self._theirs: Callable[..., Any] | None = None  # what another library has put there
        self.choose()

    def choose(self) -> None:
        """Look which unit comes last in the backward pass that follows. All others are left as they are: a call of
        Python in each unit would take longer than all the rest."""
        first = next(filter(_trains, self._units), None)
        if first is self._chosen:
            return
        before, self._chosen = self._chosen, first
        if before is not None and vars(before).get("post_backward") is self._ours:
            del before.post_backward
            if self._theirs is not None:
                before.post_backward = self._theirs
        if first is not None:
            self._theirs = vars(first).get("post_backward")
            self._ours = first.post_backward = partial(self._post_backward, first, first.post_backward)

    def _post_backward(self, group: Any, original: Callable[..., Any], *arguments: Any) -> Any:
        if group is self._chosen and synchronises(self._root) and _hands_over(group):
            self._callback()
        return original(*arguments)


def _trains(group: Any) -> bool:
    return any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params)


def _hands_over(group: Any) -> bool:
    """Whether there are gradients that it will have reduced, as FSDPParamGroup.post_backward asks."""
    if not _reduces(group):
        return False
    for parameter in group.fsdp_params:
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None and (parameter.unsharded_accumulated_grad is not None or unsharded.grad is not None):
            return True
    return False


_GROUP_FLAGS = (
    *("reduce_grads", "all_reduce_grads", "reshard_after_backward", "unshard_in_backward"),
    *("gradient_divide_factor", "force_sum_reduction_for_comms"),
)
"""What scripts and libraries switch for a part of a step (accumulation of gradients, a loss in chunks), and some switch
back at its end alone."""


def capture_flags(root: FSDPModule) -> dict[str, Any]:
    """The switches that a script may flip within a step."""
    return {
        "last_backward": bool(root._get_fsdp_state()._state_ctx.is_last_backward),
        "groups": [[getattr(group, flag, None) for flag in _GROUP_FLAGS] for group in groups(root)],
        "kept": [_kept_of(state) for state in states(root)] if FSDP2_RESHARDING.takes("there") else [],
    }


class Flags:
    """Gives :func:`capture_flags` again and again, and asks all units only if one may have changed."""

    def __init__(self, root: FSDPModule) -> None:
        self._root = root
        self._watch: ItemTable | None = None
        self._states = 0  # how many there were
        self._last: dict[str, Any] = {}

    def now(self) -> dict[str, Any]:
        """Not to be changed."""
        count = len(self._root._get_fsdp_state()._state_ctx.all_states)
        if self._watch is None or count != self._states:
            self._watch, self._states = self._watched() if count else None, count
        if self._watch is None or self._watch.changed():
            self._last = capture_flags(self._root)
        return self._last

    def _watched(self) -> ItemTable | None:
        """None: some of what is asked for is no plain attribute in this torch."""
        several = "_fsdp_param_groups" if FSDP2.takes("several groups") else "_fsdp_param_group"
        found: list[tuple[Any, str]] = [
            (state, name) for state in states(self._root) for name in (several, "_auto_reshard_after_forward")
        ]
        found += [(group, name) for group in groups(self._root) for name in (*_GROUP_FLAGS, "post_forward_mesh_info")]
        found += [(self._root._get_fsdp_state()._state_ctx, "is_last_backward")]
        if any(hasattr(type(owner), name) for owner, name in found if name not in vars(owner)):
            return None
        return ItemTable([(vars(owner), name) for owner, name in found], ())


def _kept_of(state: Any) -> list[bool] | None:
    """For each group, whether its parameters stay gathered after the forward pass. None: not configured; torch then
    keeps those of the root gathered."""
    automatic = state._auto_reshard_after_forward
    return None if automatic else [group.post_forward_mesh_info is None for group in _groups_of(state)]


def restore_flags(root: FSDPModule, flags: dict[str, Any]) -> None:
    """Raises RestoreError if ``flags`` are those of another model."""
    every = states(root)
    if len(flags["groups"]) != sum(1 for _ in groups(root)) or len(flags["kept"]) not in (0, len(every)):
        raise RestoreError(
            "fully_shard was applied to other modules than in the failed process: apply it alike in every process"
        )
    for state in every:
        state._state_ctx.is_last_backward = flags["last_backward"]
    for group, values in zip(groups(root), flags["groups"], strict=True):
        for flag, value in zip(_GROUP_FLAGS, values, strict=True):
            if hasattr(group, flag):
                setattr(group, flag, value)
    for state, kept in zip(every, flags["kept"], strict=False):
        _restore_kept(state, kept, is_root=state is root._get_fsdp_state() and state._is_root is not None)


def _restore_kept(state: Any, kept: list[bool] | None, *, is_root: bool) -> None:
    """See :func:`_kept_of`. ``is_root``: it has found out that it is that."""
    groups_of = _groups_of(state)
    for group, keep in zip(groups_of, [is_root] * len(groups_of) if kept is None else kept, strict=True):
        if keep != (group.post_forward_mesh_info is None):
            group.post_forward_mesh_info = _fsdp_init._get_post_forward_mesh_info(not keep, group.mesh_info)
    state._auto_reshard_after_forward = kept is None
