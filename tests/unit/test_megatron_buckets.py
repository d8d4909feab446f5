"""What an interrupted step has left in Megatron's buckets is dropped: in groups and buffers of Megatron's own kinds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.distributed import param_and_grad_buffer as kinds

from fr_megatron.buckets import reset_buckets

pytestmark = pytest.mark.megatron


class Group(kinds._ParamAndGradBucketGroup):
    """As another version might have it: it notes more of a step, and forgets that where a step begins."""

    def __init__(self, parameters: list[Any]) -> None:
        self.buckets = [SimpleNamespace(layerwise_gather_list=[torch.ones(1)])]
        self.params = set(parameters)
        self.grad_reduce_handle = self.param_gather_handle = object()
        self.param_gather_dispatched = self.is_last_microbatch = True
        self.is_first_batch = True
        self.per_param_grad_ready_counts = {parameters[0]: 1}  # of two: the backward pass was cut short
        self.golden_per_param_grad_ready_counts = {}
        self.params_with_grad = {parameters[0]}  # to 0.15
        self.grad_reduce_finished = True  # from 0.18 on
        self.noted_later = True

    def reset(self) -> None:
        super().reset()
        self.noted_later = False


def chunk_of(group: Group) -> Any:
    buffer = kinds._ParamAndGradBuffer.__new__(kinds._ParamAndGradBuffer)
    buffer.grad_data, buffer.extra_main_grads = torch.ones(4), [torch.ones(2)]
    return SimpleNamespace(
        bucket_groups=[group],
        expert_parallel_bucket_groups=[],
        params_with_grad=list(group.params),
        buffers=[buffer],
        expert_parallel_buffers=[],
    )


def test_whatever_a_group_notes_in_a_step_is_forgotten() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    group = Group(parameters)
    chunk = chunk_of(group)
    reset_buckets([chunk], [])
    assert group.grad_reduce_handle is None and group.param_gather_handle is None
    assert not group.param_gather_dispatched and not group.noted_later
    assert not group.per_param_grad_ready_counts and group.is_first_batch
    assert group.buckets[0].layerwise_gather_list is None
    assert not chunk.buffers[0].grad_data.any()


def test_a_reduction_that_has_ended_is_made_again() -> None:
    """Without it, the step that is done again would take each rank's own gradients for the mean."""
    group = Group([torch.nn.Parameter(torch.ones(2))])
    if "grad_reduce_finished" not in kinds._ParamAndGradBucketGroup.reset.__code__.co_names:
        pytest.skip("this megatron-core notes no end of a reduction (from 0.18 on)")
    reset_buckets([chunk_of(group)], [])
    assert not group.grad_reduce_finished


def test_gradients_beside_the_buffer_are_zero() -> None:
    """From 0.17 on some may be summed up in fp32, in their own tensors."""
    if "extra_main_grads" not in kinds._ParamAndGradBuffer.reset.__code__.co_names:
        pytest.skip("this megatron-core has none")
    chunk = chunk_of(Group([torch.nn.Parameter(torch.ones(2))]))
    reset_buckets([chunk], [])
    assert not chunk.buffers[0].extra_main_grads[0].any()
