"""What of megatron-core has no other layout, by name. The layouts: ``tests/integration/relayout/test_replan.py``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashrecovery.errors import UnsupportedError

pytest.importorskip("megatron.core")

from megatron.core import num_microbatches_calculator as calculators
from megatron.core import parallel_state

from fr_megatron.logical import MegatronLogical, _dense_layers, _of_sizes


class DistributedDataParallel:
    """As much of megatron-core's as is looked at."""

    def __init__(self) -> None:
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=False, overlap_param_gather=False)
        self.config = SimpleNamespace(num_moe_experts=None)
        self.module = SimpleNamespace(sharded_state_dict=dict)


def refused(experts: dict[str, object] | None = None, chunks: int = 1) -> str:
    optimizer = SimpleNamespace(is_stub_optimizer=True)
    made = [DistributedDataParallel() for _ in range(chunks)]
    for chunk in made if experts is not None else ():
        chunk.config = SimpleNamespace(num_moe_experts=4, sequence_parallel=True, **experts)
    with pytest.raises(UnsupportedError) as raised:
        MegatronLogical(made, optimizer, list)._check()
    return str(raised.value)


@pytest.mark.parametrize(
    ("calculator", "reason"),
    [
        (calculators.RampupBatchsizeNumMicroBatchesCalculator(24, 2, 2, False, 1, 4, 4, 100), "rampup_batch_size"),
        (calculators.ConstantNumMicroBatchesCalculator(24, 2, 5, True, 1), "decrease_batch_size_if_needed"),
    ],
    ids=["ramp", "decrease"],
)
def test_batches_of_several_sizes(calculator: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calculators, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", calculator)
    assert reason in refused()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias"),
        ({"moe_router_load_balancing_type": "global_aux_loss"}, "global_aux_loss"),
        ({"moe_router_topk_limited_devices": 2}, "moe_router_topk_limited_devices"),
        ({"cp_comm_type": ["p2p", "a2a+p2p"]}, "cp_comm_type = a2a+p2p"),
        ({}, "expert_tensor_parallel_size = 1 (allowed: that of the rest, 2)"),
    ],
    ids=["bias", "global", "devices", "ways", "slices"],
)
def test_experts(settings: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_experts = 1 if reason.startswith("expert_tensor") else 2
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_expert_tensor_parallel_world_size", lambda: of_experts)
    assert reason in refused(experts=settings)


def test_experts_in_several_model_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 4)
    assert "MoE layers in several model chunks" in refused(experts={}, chunks=2)


@pytest.mark.parametrize(
    ("experts", "frequency", "dense"),
    [(None, 1, 6), (4, 1, 0), (4, 2, 3), (4, [0, 1, 1, 1, 1, 1], 1)],
)
def test_dense_layers(experts: int | None, frequency: object, dense: int) -> None:
    config = SimpleNamespace(num_layers=6, num_moe_experts=experts, moe_layer_freq=frequency)
    assert _dense_layers(config) == dense


@pytest.mark.parametrize(("context", "length"), [(2, 1), (2, 6), (3, 8)])
def test_lengths_that_context_parallelism_does_not_divide(
    context: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: context)
    chunk = DistributedDataParallel()
    chunk.config.num_layers = 1
    chunk.module.max_sequence_length = length
    with pytest.raises(UnsupportedError, match=f"max_sequence_length is {length}"):
        MegatronLogical([chunk], SimpleNamespace(is_stub_optimizer=True), list).facts()


def test_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = calculators.ConstantNumMicroBatchesCalculator(24, 2, 2, False, 1)
    monkeypatch.setattr(calculators, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", plain)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 4)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    optimizer = SimpleNamespace(is_stub_optimizer=True)
    for chunks in (1, 2):  # virtual stages
        MegatronLogical([DistributedDataParallel() for _ in range(chunks)], optimizer, list)._check()


@pytest.mark.parametrize(("experts", "tp", "sharded"), [(4, 2, False), (4, 2, True), (4, 1, False), (None, 2, False)])
def test_experts_with_tensor_parallelism_need_divided_sequences(
    experts: int | None, tp: int, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core says so in the first step only, when it is too late for another layout."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: tp)
    found = list(_of_sizes(SimpleNamespace(num_moe_experts=experts, sequence_parallel=sharded)))
    assert bool(found) == bool(experts and tp > 1 and not sharded)
