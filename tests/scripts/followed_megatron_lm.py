"""pretrain_gpt.py of the Megatron-LM on the path, unmodified, of which each iteration is printed as exact numbers: the
loop's own loss (reduced over all replicas), and what a :class:`Watched` says of the whole state. Scripts that are
started are those that say what that is.

The flags of the parser below are not Megatron's.
"""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import fr_megatron  # first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe import moe_utils
from megatron.training import get_args, training
from pacing import take_time

assert fr_megatron


def summed_up() -> dict[str, float]:
    """What layers of experts have summed up in a step, as its log should say it: that of all ranks, where each has its
    tokens' part (Megatron says over which ranks), else of the last one and its peers in other stages. A collective."""
    mine = {
        name: (entry["values"].tolist(), entry.get("reduce_group") is not None)
        for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()
    }
    everybody: list[dict[str, tuple[list[float], bool]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    stages, settings = parallel_state.get_pipeline_model_parallel_world_size(), get_args()
    last = everybody[:: -(len(everybody) // stages)]
    found: dict[str, float] = {}
    for name in sorted({name for some in everybody for name in some}):
        of_parts = any(some[name][1] for some in everybody if name in some)
        among, replicas = (everybody, settings.data_parallel_size) if of_parts else (last, 1)
        total = sum(sum(some[name][0]) for some in among if name in some)
        found[name] = total / replicas / settings.num_layers / get_num_microbatches()
    return found


class Watched(Protocol):
    """What a script trains."""

    def place(self) -> str:
        """The size or the layout that there is, as it is printed; it has been checked that Megatron says the same."""

    def digest(self) -> str:
        """Of the whole state. A collective."""

    def save(self, version: int, folder: Path) -> None:
        """Write the whole state down. A collective."""

    def load(self, path: Path) -> int:
        """Begin with such a state; returns its version."""


def follow(watch: Callable[[Any, Any, Any], Watched], *, begins: bool = False) -> None:
    """Train, to the end. ``watch``: of model chunks, optimizer and scheduler. ``begins``: what an iteration begins with
    is printed, too."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=12, help="iterations")
    parser.add_argument("--step-time", type=int, default=0, help="milliseconds that a step takes longer")
    parser.add_argument("--save-to", type=Path, help="a directory for the state of each version")
    parser.add_argument("--start-from", type=Path, help="such a state")
    own, others = parser.parse_known_args()
    sys.argv[1:] = [*others, f"--train-iters={own.steps}"]
    set_up, train_step, evaluate = training.setup_model_and_optimizer, training.train_step, training.evaluate
    watched: list[Watched] = []

    @functools.wraps(set_up)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        made = set_up(*args, **kwargs)
        watched[:] = [watch(*made)]
        if own.start_from:
            settings = get_args()
            settings.iteration = watched[0].load(own.start_from)
            settings.consumed_train_samples = settings.iteration * settings.global_batch_size
            settings.num_floating_point_operations_so_far = 0
        return made

    @functools.wraps(train_step)
    def printing_train_step(*args: Any, **kwargs: Any) -> Any:
        settings, (state,) = get_args(), watched
        number, place = settings.curr_iteration, state.place()
        assert (settings.rank, settings.world_size) == (dist.get_rank(), dist.get_world_size())
        assert settings.consumed_train_samples == number * settings.global_batch_size
        if begins:
            print(f"begin={number} {place} {state.digest()}", flush=True)
        returned = train_step(*args, **kwargs)
        take_time(own.step_time, number)
        loss = returned[0].get("lm loss")  # of the last stage
        shown = "none" if loss is None else float(loss).hex()
        print(f"step={number} rank={dist.get_rank()} {place} loss_hex={shown}", flush=True)
        print(f"state={number + 1} {place} {state.digest()}", flush=True)
        if settings.num_experts:
            for name, value in summed_up().items():
                print(f"experts={number} {place} {name} {value.hex()}", flush=True)
        if own.save_to:
            state.save(number + 1, own.save_to)
        return returned

    @functools.wraps(evaluate)
    def printing_evaluate(*args: Any, **kwargs: Any) -> Any:
        returned = evaluate(*args, **kwargs)
        losses = {name: float(loss).hex() for name, loss in returned[0].items()}
        place = watched[0].place()
        print(f"evaluated={get_args().curr_iteration} rank={dist.get_rank()} {place} {losses}", flush=True)
        return returned

    training.setup_model_and_optimizer = setup_model_and_optimizer
    training.train_step = printing_train_step
    training.evaluate = printing_evaluate
    spec = find_spec("pretrain_gpt")
    assert spec is not None and spec.origin is not None
    runpy.run_path(spec.origin, run_name="__main__")
    assert watched
