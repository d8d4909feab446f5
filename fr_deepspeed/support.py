"""Which settings of DeepSpeed can be protected, and with which of its inside. Everything else is refused at start, with
its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashrecovery.errors import UnsupportedError
from fr_deepspeed import experts, muon, offload
from fr_deepspeed.capabilities import ALL_STAGES, DEEPSPEED, PIPELINE, STAGE3, STAGE12, is_managed

_UNIQUE_TO_RANK = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam", "DummyOptim")
"""Optimizers that keep error feedback of their own."""


_POWERS_IN_CPP = ("DeepSpeedCPUAdam", "ZenFlowCPUAdam")
"""Optimizers that multiply the powers of their betas on in C++. FusedAdam does on a CPU: :mod:`.beta_powers`."""


def check_inside(engine: Any, version: str) -> None:
    """Raises UnsupportedError that names everything of DeepSpeed's inside that is needed for ``engine``, and that this
    ``version`` lacks."""
    needed = [*ALL_STAGES, *([PIPELINE] if engine.pipeline_parallelism else [])]
    stage = engine.zero_optimization_stage()
    needed += STAGE3 if stage == 3 else STAGE12 if stage > 0 else ()
    DEEPSPEED.require(needed, version)


def check(engine: Any) -> None:
    """Raises UnsupportedError that lists every setting of ``engine`` that cannot be protected."""
    found = list(_unsupported(engine))
    if found:
        raise UnsupportedError("flash_recovery does not support: " + "; ".join(found))


def check_param_groups(engine: Any) -> None:
    """Hyper-parameters are restored from any rank, so all have to have the same number of groups. Stages need not:
    DeepSpeed drops a group of which a stage has no parameter. Raises UnsupportedError."""
    import torch.distributed as dist

    from flashrecovery.adapter import world_size

    if not engine.pipeline_parallelism:
        return
    counts: list[int] = [0] * world_size()
    dist.all_gather_object(counts, len(engine.basic_optimizer.param_groups))
    if len(set(counts)) > 1:
        raise UnsupportedError(
            f"flash_recovery does not support: pipeline stages with different parameter groups ({counts} on ranks 0 to "
            f"{len(counts) - 1}); give every stage parameters of each group"
        )


def _unsupported(engine: Any) -> Iterator[str]:
    kind = type(engine).__name__
    if kind not in ("DeepSpeedEngine", "PipelineEngine"):
        yield f"the engine {kind}"
        return
    if engine.basic_optimizer is None:
        yield "an engine without an optimizer"
        return
    name = type(engine.basic_optimizer).__name__
    if name in _UNIQUE_TO_RANK:
        yield f"the optimizer {name}"
    if name in _POWERS_IN_CPP and not offload.offloads(engine):
        yield f'the optimizer {name}; use {{"type": "Adam"}}, or one of torch'
    yield from muon.unsupported(engine)
    yield from experts.unsupported(engine)
    if _model_parallel(engine) or engine.autotp_size() > 1:
        yield "tensor parallelism (mpu, tensor_parallel)"
    if engine.sequence_parallel_size > 1:
        yield "sequence parallelism"
    if not is_managed(engine):
        yield "managed_gradient_accumulation = false"
    if getattr(engine, "torch_autocast_enabled", _never)():  # from 0.17 on
        yield "torch_autocast"
    if engine.is_deepcompile_enabled():
        yield "compile.deepcompile"
    if engine.data_efficiency_enabled():
        yield "data_efficiency"
    # DeepSpeed looks at these alone, whether data efficiency is switched on or not.
    if engine.random_ltd_enabled():
        yield "data_efficiency.data_routing.random_ltd"
    if engine.curriculum_learning_enabled():
        yield "data_efficiency.data_sampling.curriculum_learning"
    yield from _zero_settings(engine)


def _model_parallel(engine: Any) -> bool:
    if engine.pipeline_parallelism:  # its grid is the mpu
        return bool(engine.grid.model_parallel_size > 1)
    return engine.mpu is not None


def _zero_settings(engine: Any) -> Iterator[str]:
    zero = engine._config.zero_config
    device = offload.device_of(zero.offload_param)
    if device != "none":
        yield f"zero_optimization.offload_param to {device}"
    yield from offload.unsupported(engine)
    for key in ("zenflow", "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if getattr(zero, key, None):  # zenflow: from 0.17 on
            yield f"zero_optimization.{key}"


def _never() -> bool:
    return False
