"""What an optimizer holds: hyper-parameters per group, and per-parameter state that appears with the first step.

Torch's optimizers create their state lazily, so version 0 has none and a replacement starts without any. The layout
of each state tensor (on the parameter's device, on the host, or a DTensor placed like its parameter) travels with the
shard as a plain value, so that the receiver can make room for it without having taken a step.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flashrecovery.adapter.parts import TensorParts, is_composite, is_plainly_placed, refuse_odd
from flashrecovery.adapter.placement import backed_by_pages, like_placed, local_tensor
from flashrecovery.errors import RegistrationError, RestoreError, UnsupportedError
from flashrecovery.state.exact import exact_clone, exact_copy

HOST, DEVICE, PLACED = "host", "device", "placed"
_SCALARS = (bool, int, float, complex, str, type(None), torch.dtype)


_SCALING = ("grad_scale", "found_inf")


def scaling_of(optimizer: Optimizer) -> dict[str, Any]:
    """What a GradScaler gives a fused optimizer as attributes for the time of one step."""
    return {name: value for name in _SCALING if (value := vars(optimizer).get(name)) is not None}


def restore_scaling(optimizer: Optimizer, scaling: dict[str, Any]) -> None:
    """Put :func:`scaling_of` back. A step that is interrupted leaves the scaler's there, and the scaler would multiply
    its next scale by that one (``torch.amp.GradScaler.step``)."""
    for name in _SCALING:
        vars(optimizer).pop(name, None)
    vars(optimizer).update(scaling)


def check_optimizers(optimizers: Sequence[Optimizer], parameters: Sequence[torch.Tensor]) -> None:
    """Refuse what cannot be protected.

    Raises:
        RegistrationError: an object is no optimizer, is given twice, or owns parameters that are not the model's.
        UnsupportedError: an optimizer that shards its state outside of ``optimizer.state``.
    """
    known = {id(p) for p in parameters}
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise RegistrationError(f"optimizer {index} is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        if any(optimizer is other for other in optimizers[:index]):
            raise RegistrationError(f"optimizer {index} ({type(optimizer).__name__}) is registered twice")
        if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
            raise UnsupportedError(
                "ZeroRedundancyOptimizer is not supported; use FSDP2 (fully_shard) to shard the state"
            )
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise RegistrationError(
                        f"optimizer {index} ({type(optimizer).__name__}), group {number}: parameter {position} "
                        f"of shape {tuple(parameter.shape)} does not belong to the registered model"
                    )


def check_state(optimizers: Sequence[Optimizer], parameters: Sequence[torch.Tensor]) -> None:
    """Look at the state after the first step; raise UnsupportedError by name for what has no place in a shard."""
    known = {id(p) for p in parameters}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for parameter, state in optimizer.state.items():
            if id(parameter) not in known:
                raise UnsupportedError(
                    f"{kind} keeps state that belongs to no parameter of the model: register the model with all that "
                    "it steps on"
                )
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    refuse_odd(value, f"{kind} state {key!r}")
                    if not is_plainly_placed(value, parameter):
                        TensorParts.of(value, f"{kind} state {key!r}", parameter)
                else:
                    plain(value, f"{kind} state {key!r}")


def layout_of(parameter: torch.Tensor, state: torch.Tensor, what: str) -> str:
    """How a state tensor lies relative to its parameter: HOST, DEVICE or PLACED."""
    if isinstance(state, DTensor):
        if (
            not isinstance(parameter, DTensor)
            or state.placements != parameter.placements
            or state.shape != parameter.shape
        ):
            raise UnsupportedError(f"{what} is a DTensor that is not placed like its parameter")
        return PLACED
    return DEVICE if state.device == parameter.device else HOST


def state_layout_of(parameter: torch.Tensor, state: torch.Tensor) -> str:
    """The same of a state tensor that may also consist of parts, or be placed in another way: HOST or DEVICE then."""
    if is_plainly_placed(state, parameter):
        return layout_of(parameter, state, "")
    return DEVICE if state.device == parameter.device else HOST


def new_state_tensor(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """An uninitialised state tensor of the given local shape and layout."""
    reference = local_tensor(parameter)
    device = torch.device("cpu") if layout == HOST else reference.device
    if tuple(reference.shape) == shape:
        # Optimizers make their state with the parameter's strides; so do we.
        local = torch.empty_like(reference, dtype=dtype, device=device, memory_format=torch.preserve_format)
    else:
        local = torch.empty(shape, dtype=dtype, device=device)
    backed_by_pages(local)
    if layout != PLACED:
        return local
    if not isinstance(parameter, DTensor):
        raise RestoreError("a state tensor placed like a DTensor arrived for a parameter that is none")
    return like_placed(local, parameter)


def plain(value: Any, what: str) -> Any:
    """A copy of a plain value (scalars, tensors, and tuples, lists and dicts of them).

    Raises:
        UnsupportedError: naming ``what``, for anything else.
    """
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor) or is_composite(value):
            raise UnsupportedError(f"{what} is a {type(value).__name__}; only plain tensors are kept there")
        return exact_clone(value)
    if isinstance(value, _SCALARS) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, (tuple, list)):
        items = [plain(v, what) for v in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {k: plain(v, what) for k, v in value.items()}
    raise UnsupportedError(
        f"{what} is a {type(value).__name__}; only numbers, strings, tensors and containers of them can be kept"
    )


def capture_hyperparameters(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """Every param_group's entries except ``params``, copied."""
    return [
        [
            {
                # exact types first: this runs in every step
                k: v if type(v) in _SCALARS else plain(v, f"{type(o).__name__} option {k!r}")
                for k, v in group.items()
                if k != "params"
            }
            for group in o.param_groups
        ]
        for o in optimizers
    ]


def restore_hyperparameters(optimizers: Sequence[Optimizer], saved: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Make the param_groups' entries exactly ``saved``; tensors (a tensor learning rate) are overwritten in place.

    Raises:
        RestoreError: another number of optimizers or groups.
    """
    if len(saved) != len(optimizers):
        raise RestoreError(f"{len(optimizers)} optimizers are registered, and {len(saved)} were in the failed process")
    for index, (optimizer, groups) in enumerate(zip(optimizers, saved, strict=True)):
        if len(groups) != len(optimizer.param_groups):
            raise RestoreError(
                f"optimizer {index} ({type(optimizer).__name__}) had {len(groups)} parameter groups, "
                f"it has {len(optimizer.param_groups)}; groups that a script adds while it trains cannot be brought "
                "back: add all of them before the first step, with a learning rate of 0 where they are to wait"
            )
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            for key in [k for k in group if k != "params" and k not in values]:
                del group[key]
            for key, value in values.items():
                _assign(group, key, value)


def _assign(group: dict[str, Any], key: str, value: Any) -> None:
    live = group.get(key)
    if (
        isinstance(live, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and live.shape == value.shape
        and live.dtype == value.dtype
    ):
        exact_copy(live, value)  # schedulers and captured graphs hold this very tensor
        return
    group[key] = plain(value, key)
