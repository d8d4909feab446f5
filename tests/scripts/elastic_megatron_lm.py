"""pretrain_gpt.py of the Megatron-LM on the path, unmodified, with losses and digests of each step as exact numbers.

What is printed is the loop's own loss (reduced over all replicas) and the whole state, gathered.

The flags of the parser below are this script's own.
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
from megatron.core import parallel_state
from megatron.training import get_args, training
from megatron_whole_state import State

assert fr_megatron
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--steps", type=int, default=12, help="iterations")
parser.add_argument("--step-time", type=int, default=0, help="milliseconds that a step takes longer")
parser.add_argument("--save-to", help="a directory for the state of each version")
parser.add_argument("--start-from", help="such a state")
own, others = parser.parse_known_args()
sys.argv[1:] = [*others, f"--train-iters={own.steps}"]
state: State | None = None
set_up, train_step, evaluate = (
    training.setup_model_and_optimizer,
    training.train_step,
    training.evaluate,
)


@functools.wraps(set_up)
def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
    global state
    made = set_up(*args, **kwargs)
    state = State(*made)
    if own.start_from:
        settings = get_args()
        settings.iteration = state.load(own.start_from)
        settings.consumed_train_samples = settings.iteration * settings.global_batch_size
        settings.num_floating_point_operations_so_far = 0
    return made


@functools.wraps(train_step)
def printing_train_step(*args: Any, **kwargs: Any) -> Any:
    returned = train_step(*args, **kwargs)
    assert state is not None
    settings, rank, size = get_args(), dist.get_rank(), dist.get_world_size()
    time.sleep(own.step_time / 1e3)
    number, loss = settings.curr_iteration, returned[0].get("lm loss")  # of the last stage
    replicas = parallel_state.get_data_parallel_world_size()
    assert (settings.rank, settings.world_size, settings.data_parallel_size) == (rank, size, replicas)
    shown = "none" if loss is None else float(loss).hex()
    print(f"step={number} rank={rank} size={size} loss_hex={shown}", flush=True)
    print(f"state={number + 1} size={size} {state.digest()}", flush=True)
    if own.save_to:
        state.save(number + 1, f"{own.save_to}/{number + 1}.pt")
    return returned


@functools.wraps(evaluate)
def printing_evaluate(*args: Any, **kwargs: Any) -> Any:
    returned = evaluate(*args, **kwargs)
    losses = {name: float(loss).hex() for name, loss in returned[0].items()}
    print(f"evaluated={get_args().curr_iteration} size={dist.get_world_size()} {losses}", flush=True)
    return returned


training.setup_model_and_optimizer = setup_model_and_optimizer
training.train_step = printing_train_step
training.evaluate = printing_evaluate
spec = find_spec("pretrain_gpt")
assert spec is not None and spec.origin is not None
runpy.run_path(spec.origin, run_name="__main__")
assert state is not None
