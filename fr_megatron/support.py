"""Which Megatron versions and settings can be protected. Everything else is refused at start, with its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flashrecovery.errors import UnsupportedError
from flashrecovery.versions import in_range, range_text

LOW, HIGH = (0, 16), (0, 17)
"""Every private name of megatron-core that this package uses has been looked up in these."""


def check_version(version: str) -> None:
    """Raises UnsupportedError if this package was not tested with megatron-core ``version``."""
    if not in_range(version, LOW, HIGH):
        raise UnsupportedError(
            f"megatron-core {version} is not supported; flash-recovery was tested with {range_text(LOW, HIGH)}"
        )


def check(chunks: Sequence[Any], optimizer: Any) -> None:
    """Raises UnsupportedError that lists everything about chunks and optimizer that cannot be protected."""
    found = list(dict.fromkeys(_unsupported(chunks, optimizer)))
    if found:
        raise UnsupportedError("flash-recovery does not support: " + "; ".join(found))


def _unsupported(chunks: Sequence[Any], optimizer: Any) -> Iterator[str]:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    for chunk in chunks:
        if type(chunk) is not DistributedDataParallel:
            yield f"a model chunk of type {type(chunk).__name__}; allowed: Megatron's DistributedDataParallel"
            continue
        for name in ("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather"):
            if getattr(chunk.ddp_config, name, False):
                yield f"{name}"
        if getattr(chunk, "overlap_param_gather_with_optimizer_step", False):
            yield "overlap_param_gather_with_optimizer_step"
    if not isinstance(optimizer, ChainedOptimizer):
        yield f"the optimizer {type(optimizer).__name__}; make it with megatron.core.optimizer.get_megatron_optimizer"
        return
    for inner in optimizer.chained_optimizers:
        yield from _unsupported_optimizer(inner)


def _unsupported_optimizer(inner: Any) -> Iterator[str]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    if type(inner) not in (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer):
        yield f"the optimizer {type(inner).__name__}"
        return
    for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload", "overlap_param_gather_with_optimizer_step"):
        if getattr(inner.config, name, False):
            yield name
