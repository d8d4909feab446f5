"""What of megatron-core has no other layout, by name. The layouts themselves: ``tests/integration/test_replan.py``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashrecovery.errors import UnsupportedError

pytest.importorskip("megatron.core")

from megatron.core import num_microbatches_calculator as calculators

from fr_megatron.logical import MegatronLogical


class DistributedDataParallel:
    """As much of megatron-core's as is looked at."""

    def __init__(self) -> None:
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=False, overlap_param_gather=False)
        self.config = SimpleNamespace(num_moe_experts=None)
        self.module = SimpleNamespace(sharded_state_dict=dict)


def refused() -> str:
    optimizer = SimpleNamespace(is_stub_optimizer=True)
    with pytest.raises(UnsupportedError) as raised:
        MegatronLogical([DistributedDataParallel()], optimizer, list)._check()
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


def test_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = calculators.ConstantNumMicroBatchesCalculator(24, 2, 2, False, 1)
    monkeypatch.setattr(calculators, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", plain)
    optimizer = SimpleNamespace(is_stub_optimizer=True)
    for chunks in (1, 2):  # virtual stages
        MegatronLogical([DistributedDataParallel() for _ in range(chunks)], optimizer, list)._check()
