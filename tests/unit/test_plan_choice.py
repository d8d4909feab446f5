"""Neighbour copies or parity, where that is left to us."""

from __future__ import annotations

import pytest
import torch

from flashrecovery.plan.parity.copies_or_parity import (
    ROOM,
    Sizes,
    choose,
    neighbour_memory,
    own_memory,
    parity_memory,
    refusal,
)
from flashrecovery.worker.replication.policy import state_to_come

GROUPS = ((0, 2, 4, 6), (1, 3, 5, 7))
GB = 10**9


def sizes(free: float, unique: float = 4) -> Sizes:
    return Sizes(own=int(5 * GB), copied=int(unique * GB), in_parity=int(unique * GB), free=int(free * GB), ranks=2)


def test_memory_of_a_node() -> None:
    assert neighbour_memory(sizes(1)) == 2 * 2 * 9 * GB
    assert parity_memory(sizes(1), GROUPS, 1) == pytest.approx(2 * 2 * (5 + 4 / 3) * GB, rel=1e-6)
    assert parity_memory(sizes(1), GROUPS, 2) == 2 * 2 * (5 + 4) * GB
    assert parity_memory(sizes(1), (*GROUPS, (8, 9)), 1) == 2 * 2 * (5 + 4) * GB, "of the smallest group"


def test_copies_are_chosen_where_they_fit() -> None:
    chosen = choose(sizes(36 / ROOM + 0.1), GROUPS, 1)
    assert not chosen.parity and chosen.fits and "neighbour copies fit: 36.00 of 36" in chosen.reason


def test_parity_is_chosen_where_only_that_fits() -> None:
    chosen = choose(sizes(36 / ROOM - 0.1), GROUPS, 1)
    assert chosen.parity and chosen.fits and "parity 25.33 of" in chosen.reason


def test_nothing_fits() -> None:
    chosen = choose(sizes(10), GROUPS, 1)
    assert not chosen.parity and not chosen.fits and "parity would need 25.33" in chosen.reason


def test_there_are_no_groups() -> None:
    chosen = choose(sizes(36), "two nodes of three are missing", 2)
    assert not chosen.parity and not chosen.fits and "two nodes of three are missing" in chosen.reason


def test_state_that_optimizers_have_not_made_yet_is_counted() -> None:
    weight, frozen = torch.nn.Parameter(torch.zeros(100)), torch.nn.Parameter(torch.zeros(7), requires_grad=False)
    adam = torch.optim.AdamW([weight, frozen])
    assert state_to_come([adam]) == 2 * weight.nbytes
    assert state_to_come([torch.optim.SGD([weight], lr=0.1)]) == 0
    assert state_to_come([torch.optim.SGD([weight], lr=0.1, momentum=0.9)]) == weight.nbytes
    weight.grad = torch.ones(100)
    adam.step()
    assert state_to_come([adam]) == 0, "it is there"


def test_state_of_a_frameworks_optimizer_is_counted_once() -> None:
    """Megatron's steps on plain fp32 tensors that ask for no gradients; Accelerate's wraps another one."""
    adam = torch.optim.AdamW([torch.zeros(100)])
    wrapping = torch.optim.AdamW(adam.param_groups)
    assert state_to_come([adam, wrapping]) == 2 * 400


def test_what_cannot_be_kept_is_refused() -> None:
    assert own_memory(sizes(1)) == 2 * 2 * 5 * GB
    assert refusal(sizes(20), own_memory(sizes(20))) == ""
    why = refusal(sizes(19.5), own_memory(sizes(19.5)))
    assert "need 20.00 GB" in why and "19.50 GB are free" in why and "redundancy 'none'" in why
