"""The batches of a job with tensor and pipeline parallelism: a replica is all ranks of a data-parallel coordinate.

All of them compute the same micro-batches. Their random streams are functions of step and micro-batch, as everywhere in
such a job, and besides of the stage, whose layers must not drop what those of another stage drop; and those streams
that Megatron tracks for what is cut over tensor ranks, of the tensor rank. In data parallelism alone nothing changes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import xxhash

from flashrecovery.adapter import FrameworkBatch
from fr_megatron import elastic

_CUT = "model-parallel-rng"
"""Megatron's name of the stream in which tensor ranks differ."""


def batch_of() -> FrameworkBatch:
    """As :func:`fr_megatron.elastic.batch_of`, for replicas of several ranks."""
    return replace(elastic.batch_of(), seed=seed, place=place)


def place() -> tuple[int, int]:
    """This rank's replica, and how many there are."""
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        return 0, 1
    return state.get_data_parallel_rank(), state.get_data_parallel_world_size()


def seed(number: int) -> None:
    """Seed torch's stream and those that Megatron tracks."""
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel import random as module

    if not state.model_parallel_is_initialized():
        elastic.seed_tracked(number)
        return
    stage = state.get_pipeline_model_parallel_rank()
    if stage:
        number = xxhash.xxh3_64_intdigest(f"stage {stage} {number}".encode()) >> 1
        torch.manual_seed(number)
    elastic.seed_tracked(number)
    tensor = state.get_tensor_model_parallel_rank()
    tracker = module.get_cuda_rng_tracker()
    if tensor and _CUT in tracker.get_states():
        states = tracker.get_states()
        del states[_CUT]
        tracker.reset()
        tracker.set_states(states)
        tracker.add(_CUT, xxhash.xxh3_64_intdigest(f"{_CUT} {tensor} {number}".encode()) >> 1)
