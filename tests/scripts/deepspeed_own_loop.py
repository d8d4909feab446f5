"""The pipeline example with its own loop: ``train_batch``, an ``eval_batch`` now and then, no ``steps()``.

``--mode``: ``tracker`` adds noise from DeepSpeed's tracked random stream in every block; ``training-data`` gives the
data to ``deepspeed.initialize()``; ``stops`` ends the loop after four steps if the file that ``STOPS`` in the
environment names is there as the process begins, and then rank 1 takes it away and dies; the others misbehave in one
way, and have to be refused.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.utils import RepeatingLoader
from torch import Tensor

import gpt_pipeline
import train_deepspeed
import training

TRACKED = "tracked"


class TrackedLayer(gpt_pipeline.Layer):
    """Adds noise from the tracked stream."""

    def forward(self, x: Tensor) -> Tensor:
        with checkpointing.get_cuda_rng_tracker().fork(TRACKED):
            noise = torch.rand_like(x)
        result: Tensor = super().forward(x + 0.1 * noise)
        return result


TrackedLayer.__name__ = gpt_pipeline.Layer.__name__  # by which DeepSpeed tells what it may checkpoint


def state(engine: Any) -> Iterator[tuple[str, object]]:
    """As the example's, with the tracked streams."""
    yield from train_deepspeed.state(engine)
    yield from sorted(checkpointing.get_cuda_rng_tracker().get_states().items())


def main() -> None:
    flags = train_deepspeed.parser(__doc__)
    flags.add_argument("--mode", default="plain")
    flags.add_argument("--save", type=Path, help="save a checkpoint of DeepSpeed's there after step 4")
    args = flags.parse_args()
    stops = Path(os.environ["STOPS"]) if args.mode == "stops" else None
    stopping = stops is not None and stops.exists()
    device = training.start_process_group()
    if args.mode == "tracker":
        gpt_pipeline.Layer = TrackedLayer  # type: ignore[misc]
        checkpointing.get_cuda_rng_tracker().add(TRACKED, args.seed + dist.get_rank())
    if args.mode == "training-data":
        blocks = training.build_loader(args, 0, 1).dataset
        train_deepspeed.deepspeed.initialize = partial(train_deepspeed.deepspeed.initialize, training_data=blocks)
    engine = train_deepspeed.build_engine(args, device)
    training.seed_rank(args.seed)
    group = engine.data_parallel_group
    place = dist.get_rank(group), dist.get_world_size(group)
    data = RepeatingLoader(training.build_loader(args, *place))
    args.seed += 1
    other = RepeatingLoader(training.build_loader(args, *place))
    if args.mode == "eval-first":
        engine.eval_batch(other)
    log = training.StepLog(args)
    for index in range(args.steps):
        if args.mode == "other-data" and index == 1:
            data = RepeatingLoader(training.build_loader(args, *place))
        nothing = args.mode == "training-data" or (args.mode == "no-data" and engine.is_first_stage())
        loss = engine.train_batch(None if nothing else data)
        if engine.global_steps == index + 1:  # else a replacement skips what the dead process had behind it
            log.step(index, loss)
        torch.rand(index % 3)
        if index % 3 == 2:
            # in turn on other data, and on the training's
            evaluated = engine.eval_batch(data if index % 2 and args.mode == "tracker" else other)
            if not math.isnan(float(evaluated)):
                log.step(1000 + index, evaluated)
        if stopping and index == 3:
            break
        if args.save and index == 4:
            engine.save_checkpoint(args.save)
    if stopping and dist.get_rank() == 1:
        assert stops is not None
        stops.unlink()
        time.sleep(2)  # the others are at their end
        os.kill(os.getpid(), signal.SIGKILL)
    training.emit(f"digest rank={dist.get_rank()} {training.digest(state(engine))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
