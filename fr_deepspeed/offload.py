"""The optimizer's state and step on the CPU (``zero_optimization.offload_optimizer``), with an optimizer of torch.

The fp32 partitions then have gradient buffers that DeepSpeed makes once, fills at the end of each accumulation, and
never drops; gradients of earlier micro-batches wait in their own buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flashrecovery.errors import UnsupportedError
from fr_deepspeed.capabilities import OFFLOAD_EVENTS


def offloads(engine: Any) -> bool:
    """Whether the optimizer is offloaded."""
    return device_of(engine._config.zero_config.offload_optimizer) != "none"


def device_of(config: Any) -> str:
    """``device`` of an offload block, "none" without one. DeepSpeed has it as a string or as an enum."""
    device = "none" if config is None else config.device
    return str(getattr(device, "value", device))


def unsupported(engine: Any) -> Iterator[str]:
    """What cannot be protected of the offload of ``engine``."""
    if not offloads(engine):
        return
    key, device = "zero_optimization.offload_optimizer", device_of(engine._config.zero_config.offload_optimizer)
    if device != "cpu":
        yield f"{key} to {device}; allowed: cpu"
    kind = type(engine.basic_optimizer)
    if not kind.__module__.startswith("torch.optim"):
        # DeepSpeedCPUAdam keeps the powers of its betas in C++, multiplied from step to step.
        yield f"{key} with {kind.__name__}; use torch's (optimizer.params.torch_adam = true)"
    if engine.pipeline_parallelism:
        yield f"{key} in a pipeline"
    if engine.has_moe_layers:
        yield f"{key} with MoE layers"


def reset_accumulation(zero: Any) -> None:
    """Drop what earlier micro-batches have left (ZeRO-1 and 2)."""
    if OFFLOAD_EVENTS.way is not None:
        zero._pending_offload_events.clear()
        zero._offload_accumulated_param_ids = set()
    for gradient in zero.accumulated_grads_in_cpu.values():
        gradient.zero_()
    zero.norm_for_param_grads = {}
    zero.local_overflow = False


def check_gradients(zero: Any, parameters: Sequence[Any]) -> None:
    """Check the gradients before the step of ZeRO-1 and 2. ``parameters``: all of which this rank's partitions hold a
    part.

    DeepSpeed steps on the *last* gradient of a parameter that has none now, and a replacement does not have that.
    Raises UnsupportedError with its name.
    """
    if len(zero.norm_for_param_grads) == len(parameters):
        return
    for parameter in parameters:
        if zero.get_param_id(parameter) not in zero.norm_for_param_grads:
            raise UnsupportedError(
                "flash_recovery does not support: zero_optimization.offload_optimizer where a parameter "
                f"({zero.param_names[parameter]}) has no gradient in a step; freeze it (requires_grad = False)"
            )
