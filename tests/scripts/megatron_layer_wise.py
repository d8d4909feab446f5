"""The megatron-core example with LayerWiseDistributedOptimizer: each data-parallel rank owns whole parameters.

Around Adam, of FusedAdam's kind, so that it needs no package besides megatron-core. ``--muon``: around Muon and Adam,
as Megatron makes it with ``optimizer="dist_muon"`` (emerging-optimizers). ``--elastic-loop``: in a loop whose other
sizes are known.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

import fr_megatron  # noqa: F401 - first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import megatron.core.optimizer
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

import megatron_model
import pretrain_gpt
from tests.scripts.megatron_fused_adam import FusedAdam


def layer_wise(config: OptimizerConfig, chunks: list[Any]) -> LayerWiseDistributedOptimizer:
    wanted, config.bf16 = config.bf16, False  # the fp32 copies are made of what each rank owns
    made = get_megatron_optimizer(config, chunks)
    config.bf16 = wanted
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return LayerWiseDistributedOptimizer(list(made.chained_optimizers), config, groups)


if __name__ == "__main__":
    if "--muon" in sys.argv:
        sys.argv.remove("--muon")
        made = megatron_model.OptimizerConfig
        megatron_model.OptimizerConfig = lambda **settings: made(**{**settings, "optimizer": "dist_muon"})
    else:
        megatron.core.optimizer.Adam = FusedAdam
        megatron_model.get_megatron_optimizer = layer_wise
    if "--elastic-loop" in sys.argv:
        sys.argv.remove("--elastic-loop")
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        import elastic_megatron

        elastic_megatron.main()
    else:
        pretrain_gpt.main()
