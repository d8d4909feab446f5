"""One engine on one rank, made with whatever deepspeed is on the path; prints what happened to ``engine.recovery``.

python deepspeed_attach.py [--import-first | --not-installed] [--off] [--key JSON]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", "0")


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--import-first", action="store_true", help="import fr_deepspeed before the engine is made")
    flags.add_argument("--not-installed", action="store_true", help="as if there were no fr_deepspeed")
    flags.add_argument("--key", default='{"enabled": true}', help="the flash_recovery block")
    args = flags.parse_args()
    if args.not_installed:
        sys.modules["fr_deepspeed"] = None  # type: ignore[assignment]
    if args.import_first:
        import fr_deepspeed  # noqa: F401

    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # where no process patches it: not to be compiled
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "flash_recovery": json.loads(args.key),
    }

    def engine() -> Any:
        model = torch.nn.Linear(2, 2)
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    for number in (1, 2):
        made = engine()
        print(f"engine {number}: recovery={type(vars(made).get('recovery')).__name__}", flush=True)
    print(f"deepspeed from {os.path.dirname(os.path.dirname(deepspeed.__file__))}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
