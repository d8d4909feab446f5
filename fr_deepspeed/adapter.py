"""Which adapter protects an engine: the ZeRO stage decides."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from flashrecovery.errors import UnsupportedError
from fr_deepspeed.engine import EngineAdapter
from fr_deepspeed.stage0 import MasterWeightsAdapter, PlainEngineAdapter
from fr_deepspeed.stage3 import Stage3Adapter
from fr_deepspeed.stage12 import Stage12Adapter
from fr_deepspeed.support import check, check_inside, check_param_groups


def adapter_for(engine: Any) -> EngineAdapter:
    """The adapter for the ZeRO stage of ``engine``.

    Raises:
        UnsupportedError: a version, setting or optimizer wrapper that cannot be protected, by name.
    """
    import deepspeed
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    check_inside(engine, deepspeed.__version__)
    check(engine)
    check_param_groups(engine)
    kind = type(engine.optimizer)
    known: dict[type, type[EngineAdapter]] = {
        FP16_UnfusedOptimizer: MasterWeightsAdapter,
        DeepSpeedZeroOptimizer: Stage12Adapter,
        DeepSpeedZeroOptimizer_Stage3: Stage3Adapter,
    }
    if kind in known:
        return known[kind](engine, engine.optimizer.optimizer)
    if isinstance(engine.optimizer, Optimizer) and engine.optimizer is engine.basic_optimizer:
        return PlainEngineAdapter(engine, engine.optimizer)
    raise UnsupportedError(f"flash_recovery does not support: the optimizer wrapper {kind.__name__}")
