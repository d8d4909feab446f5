"""``examples/gpt/train_hf.py`` with FSDP2 on CPUs, where accelerate takes no notice of ``fsdp``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from transformers import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))
import train_hf

_make_accelerator = Trainer.create_accelerator_and_postprocess


def _make_accelerator_with_fsdp(trainer: Any) -> None:
    _make_accelerator(trainer)
    state = trainer.accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        cpu_ram_efficient_loading=False,
    )
    state.distributed_type = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


if __name__ == "__main__":
    Trainer.create_accelerator_and_postprocess = _make_accelerator_with_fsdp
    train_hf.main()
