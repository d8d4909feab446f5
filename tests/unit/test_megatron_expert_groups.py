"""Parameter groups and loss scalers where experts have their own optimizer in one layout, and none in another."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core")

from flashrecovery.errors import RestoreError
from fr_megatron.expert_groups import check_alike, groups_for, scalers_for


def group(*, expert: bool, decayed: bool = True, lr: float = 0.5) -> dict[str, Any]:
    wd = 1.0 if decayed else 0.0
    return {"lr": lr, "weight_decay": wd / 100, "wd_mult": wd, "lr_mult": 1.0, "is_expert_parallel": expert}


TOGETHER = [[group(expert=False), group(expert=False, decayed=False)]]
APART = [*TOGETHER, [group(expert=True)]]
SCALER = {"scale": 8.0, "growth_tracker": 2}


def test_two_optimizers_become_one_and_one_becomes_two() -> None:
    now = [[{**one, "lr": 0.125} for one in some] for some in APART]
    found = groups_for(TOGETHER, now)
    assert found == [[group(expert=False, lr=0.125), group(expert=False, decayed=False, lr=0.125)]]
    assert groups_for(APART, found) == now
    assert groups_for(APART, now) == now


def test_as_many_optimizers_are_those_of_the_same_numbers() -> None:
    """Groups without Megatron's names, too."""
    assert groups_for([[{"lr": 1.0}]], [[{"lr": 2.0}]]) == [[{"lr": 2.0}]]


def test_a_group_that_is_like_none_or_like_several() -> None:
    with pytest.raises(RestoreError, match="0 of the other layout"):
        groups_for([*APART, []], [[group(expert=False, decayed=False)]])
    with pytest.raises(RestoreError, match="2 of the other layout"):
        groups_for([*APART, []], [[group(expert=False), group(expert=False), group(expert=False, decayed=False)]])


def test_what_would_be_one_must_be_alike() -> None:
    check_alike(APART, {"0": SCALER, "1": dict(SCALER)})
    check_alike(TOGETHER, {"0": SCALER})
    check_alike([[{"lr": 1.0}]], {})
    with pytest.raises(RestoreError, match="another 'lr'"):
        check_alike([*TOGETHER, [group(expert=True, lr=0.25)]], {})
    with pytest.raises(RestoreError, match="another 'betas'"):
        check_alike([*TOGETHER, [{**group(expert=True), "betas": (0.9, 0.95)}]], {})
    with pytest.raises(RestoreError, match="loss scalers of optimizers 0 and 1 differ"):
        check_alike(APART, {"0": SCALER, "1": {**SCALER, "scale": 4.0}})


def test_groups_of_other_multipliers_may_differ() -> None:
    other = {**group(expert=True, lr=0.25), "lr_mult": 0.5}
    check_alike([*TOGETHER, [other]], {})


def test_loss_scalers() -> None:
    assert scalers_for({"0": 1, "1": 1}, {"0": SCALER}) == {"0": SCALER, "1": SCALER}
    assert scalers_for({"0": 1}, {"0": SCALER, "1": SCALER})["0"] == SCALER
    assert scalers_for({}, {}) == {}
    with pytest.raises(RestoreError, match="none has been kept"):
        scalers_for({"0": 1}, {})
