"""The megatron-core example with experts whose router balances by quantiles (core 0.19): buffers that change in each
forward pass and, on all ranks together, in ``finalize_model_grads``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

import fr_megatron  # noqa: F401 - first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import pretrain_gpt

example = pretrain_gpt.model_config


def model_config(args: Any) -> Any:
    """As the example's."""
    config = example(args)
    config.moe_router_load_balancing_type, config.moe_aux_loss_coeff = "quantile_balancing", 0.0
    config.moe_router_quantile_balancing_ema = 0.5
    return config


if __name__ == "__main__":
    pretrain_gpt.model_config = model_config
    pretrain_gpt.main()
