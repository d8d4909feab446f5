"""pretrain_gpt.py of the Megatron-LM on the path, unmodified, in whatever layout: losses of each iteration as exact
numbers, and digests of the whole state, which do not depend on the layout.

With ``--save-to`` it writes the state of each iteration down with megatron-core's own ``dist_checkpointing.save``; with
``--start-from`` it begins with what megatron-core's own ``load`` reads there. The flags of the parser below are this
script's own.
"""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fr_megatron  # first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import torch.distributed as dist
from logical_values import begin_with, digest, save
from megatron.core import parallel_state
from megatron.training import get_args, training

assert fr_megatron
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--steps", type=int, default=12, help="iterations")
parser.add_argument("--step-time", type=int, default=0, help="milliseconds that a step takes longer")
parser.add_argument("--save-to", type=Path, help="a directory for the state of each iteration")
parser.add_argument("--start-from", type=Path, help="such a state; the name is the iteration")
own, others = parser.parse_known_args()
sys.argv[1:] = [*others, f"--train-iters={own.steps}"]
state: tuple[Any, Any, Any] | None = None
set_up, train_step, evaluate = (
    training.setup_model_and_optimizer,
    training.train_step,
    training.evaluate,
)


def layout() -> str:
    """What Megatron's groups are; its arguments say the same."""
    sizes = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }
    args = get_args()
    said = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.data_parallel_size)
    assert said == tuple(sizes.values()) and (args.rank, args.world_size) == (dist.get_rank(), dist.get_world_size())
    return ",".join(f"{name}={size}" for name, size in sizes.items())


@functools.wraps(set_up)
def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
    global state
    made = set_up(*args, **kwargs)
    state = made
    if own.start_from:
        settings = get_args()
        settings.iteration = begin_with(*made, own.start_from)
        settings.consumed_train_samples = settings.iteration * settings.global_batch_size
        settings.num_floating_point_operations_so_far = 0
    return made


@functools.wraps(train_step)
def printing_train_step(*args: Any, **kwargs: Any) -> Any:
    assert state is not None
    settings = get_args()
    number, sizes = settings.curr_iteration, layout()
    assert settings.consumed_train_samples == number * settings.global_batch_size
    print(f"begin={number} layout={sizes} {digest(*state)}", flush=True)
    returned = train_step(*args, **kwargs)
    time.sleep(own.step_time / 1e3)
    loss = returned[0].get("lm loss")  # of the last stage
    shown = "none" if loss is None else float(loss).hex()
    print(f"step={number} rank={dist.get_rank()} layout={sizes} loss_hex={shown}", flush=True)
    print(f"state={number + 1} layout={sizes} {digest(*state)}", flush=True)
    if own.save_to:
        save(*state, own.save_to / str(number + 1))
    return returned


@functools.wraps(evaluate)
def printing_evaluate(*args: Any, **kwargs: Any) -> Any:
    returned = evaluate(*args, **kwargs)
    losses = {name: float(loss).hex() for name, loss in returned[0].items()}
    print(f"evaluated={get_args().curr_iteration} rank={dist.get_rank()} layout={layout()} {losses}", flush=True)
    return returned


training.setup_model_and_optimizer = setup_model_and_optimizer
training.train_step = printing_train_step
training.evaluate = printing_evaluate
spec = find_spec("pretrain_gpt")
assert spec is not None and spec.origin is not None
runpy.run_path(spec.origin, run_name="__main__")
assert state is not None
