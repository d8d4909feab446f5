"""DeepSpeed's Muon (``{"type": "Muon"}``, ``MuonWithAuxAdam``) with ZeRO.

What ``optimizer.step()`` gets as a gradient is an update already: ZeRO orthogonalises whole matrices before that, and
writes the momentum into the optimizer's state: before the first parameter changes, the step has begun to change state.
With ZeRO-1 and 2 this rank's momentum is of whole matrices, also of one that the next rank has a part of, and made in
the first backward pass, in the dtype of gradients. With ZeRO-3 it is cut like the parameters, and gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from fr_deepspeed.capabilities import MUON


def is_muon(optimizer: Any) -> bool:
    """Whether a basic optimizer is DeepSpeed's Muon. (Its module compiles when it is imported.)"""
    return type(optimizer).__name__ == "MuonWithAuxAdam"


def unsupported(engine: Any) -> Iterator[str]:
    """What cannot be protected of an engine's Muon."""
    if not is_muon(engine.basic_optimizer):
        return
    if MUON.way is None:
        yield f"the optimizer Muon of this DeepSpeed, which lacks {'; '.join(MUON.missing())}"
    if engine.pipeline_parallelism:
        yield "the optimizer Muon in a pipeline"
    if engine.has_moe_layers:
        yield "the optimizer Muon with MoE layers"
    if getattr(engine._config.zero_config, "save_muon_momentum_buffer_in_memory", False):
        yield "zero_optimization.save_muon_momentum_buffer_in_memory"


def make_momentum(zero: Any) -> None:
    """Make the momentum of ZeRO-1 and 2 now, as DeepSpeed does in the first backward pass: that would be a change of
    state before the optimizer."""
    import torch

    dtype = zero.gradient_accumulation_dtype if zero.use_grad_accum_attribute else zero.dtype
    basic = zero.optimizer
    for group, parameters in zip(basic.param_groups, zero.params_in_partition, strict=True):
        if not (parameters and zero._is_muon_group(parameters)):
            continue
        (partition,) = group["params"]
        if "momentum_buffer" not in basic.state[partition]:
            elements = sum(parameter.numel() for parameter in parameters)
            basic.state[partition]["momentum_buffer"] = torch.zeros(elements, dtype=dtype, device=partition.device)


def before_momentum(zero: Any, callback: Callable[[], None]) -> None:
    """Call ``callback`` before each write into the momentum, from now on."""
    for name in ("_commit_muon_momentum", "_apply_muon_to_accumulated_grads"):
        if hasattr(zero, name):
            setattr(zero, name, _after(callback, getattr(zero, name)))


def _after(callback: Callable[[], None], write: Callable[[], None]) -> Callable[[], None]:
    @wraps(write)
    def told() -> None:
        callback()
        write()

    return told


def reset_muon(zero: Any) -> None:
    """Drop what an interrupted update has left: what it has gathered, and a momentum that was not taken over."""
    zero._clear_muon_allgather_buffers()
    if hasattr(zero, "_muon_pending_momentum"):
        zero._muon_pending_momentum.clear()
