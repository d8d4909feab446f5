"""Registered objects: equal on all ranks, or each rank's own; modules; generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flashrecovery.errors import DivergedError, RegistrationError, UnsupportedError
from flashrecovery.state import witness
from flashrecovery.torch_native import ModuleAdapter, adapter_for
from flashrecovery.worker.registry import Registry


class Kept:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def registry(rank: int = 0, per_rank: tuple[str, ...] = (), **objects: Any) -> Registry:
    made = Registry(rank, 2, adapter_for, ModuleAdapter)
    made.register(nn.Linear(2, 2), [], objects, per_rank)
    return made


def local_state(made: Registry) -> bytes:
    return made.capture_local_state(made.drawn(), 1)


@pytest.mark.parametrize("per_rank", [(), ("average",)])
def test_a_state_that_is_not_plain_is_refused_by_the_objects_name(per_rank: tuple[str, ...]) -> None:
    made = registry(0, per_rank, average=Kept([object()]))
    with pytest.raises(UnsupportedError, match=r"registered object 'average'.*object.*to_local"):
        made.shared_states(), made.drawn()


def test_a_list_of_models_is_refused_with_the_line_to_write() -> None:
    made = Registry(0, 2, adapter_for, ModuleAdapter)
    with pytest.raises(RegistrationError, match=r"is a list.*each model needs its own register\(model="):
        made.register([nn.Linear(2, 2)], [], {}, ())  # type: ignore[arg-type]


def test_a_replacement_gets_its_peers_object() -> None:
    dead, peer, new = (registry(rank, count=Kept(3)) for rank in (1, 0, 1))
    dead.capture_common(7)
    mine, theirs = local_state(dead), peer.capture_common(7)
    new.objects["count"].load_state_dict({"value": 0})
    new.restore_plain(theirs, mine, 7, fresh=True)
    assert new.objects["count"].state_dict() == {"value": 3}


def test_another_object_than_the_dead_ranks_is_refused_by_name() -> None:
    dead, peer, new = (
        registry(1, best=Kept(2.5)),
        registry(0, best=Kept(9.0)),
        registry(1, best=Kept(9.0)),
    )
    dead.capture_common(7)
    with pytest.raises(
        DivergedError, match=r"\['best'\] are not equal on all ranks: at version 7 .*per_rank=\['best'\]"
    ):
        new.restore_plain(peer.capture_common(7), local_state(dead), 7, fresh=True)


def test_also_if_the_local_state_was_sealed_before_the_end_of_the_step() -> None:
    """It says what the object was like when the step was yielded, and the peer's common state says the same."""
    dead, peer, new = (
        registry(1, best=Kept(2.5)),
        registry(0, best=Kept(9.0)),
        registry(1, best=Kept(9.0)),
    )
    dead.capture_common(6)
    peer.capture_common(6)
    with pytest.raises(DivergedError, match="at version 6"):
        new.restore_plain(peer.capture_common(7), local_state(dead), 7, fresh=True)
    alike = registry(1, best=Kept(9.0))
    alike.capture_common(6)
    new.restore_plain(peer.capture_common(7), local_state(alike), 7, fresh=True)


def test_the_witness_says_what_an_object_was_like_when_the_version_was_complete() -> None:
    """The rank-local state was sealed before that; both sides were alike then."""
    dead, peer, new = (
        registry(1, best=Kept(9.0)),
        registry(0, best=Kept(9.0)),
        registry(1, best=Kept(9.0)),
    )
    dead.capture_common(6)
    peer.capture_common(6)
    sealed = local_state(dead)
    dead.objects["best"].load_state_dict({"value": 2.5})
    dead.capture_common(7)
    ended = witness.put(sealed, dead.witness(7))
    theirs = peer.capture_common(7)
    new.restore_plain(theirs, sealed, 7, fresh=True)
    with pytest.raises(DivergedError, match=r"\['best'\] are not equal on all ranks: at version 7"):
        new.restore_plain(theirs, ended, 7, fresh=True)
    new.restore_plain(theirs, witness.put(sealed, peer.witness(7)), 7, fresh=True)


def test_an_own_object_is_the_dead_ranks() -> None:
    dead, peer, new = (registry(rank, ("best",), best=Kept(rank + 0.5)) for rank in (1, 0, 1))
    new.objects["best"].load_state_dict({"value": None})
    dead.capture_common(7)
    new.restore_plain(peer.capture_common(7), local_state(dead), 7, fresh=True)
    assert new.objects["best"].state_dict() == {"value": 1.5}


def test_an_object_that_was_found_to_differ_is_the_dead_ranks_too() -> None:
    dead, peer, new = (registry(rank, best=Kept(rank + 0.5)) for rank in (1, 0, 1))
    for made in (dead, peer):
        made.habits.own = ["best"]
    new.objects["best"].load_state_dict({"value": None})
    dead.capture_common(7)
    new.restore_plain(peer.capture_common(7), local_state(dead), 7, fresh=True)
    assert new.objects["best"].state_dict() == {"value": 1.5} and new.habits.own == ["best"]


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand((), generator=g).item()),
        (lambda: random.Random(1), lambda g: g.random()),
        (lambda: np.random.default_rng(1), lambda g: g.random()),
        (lambda: np.random.RandomState(1), lambda g: g.rand()),
    ],
)
def test_generators_are_each_ranks_own(make: Any, draw: Any) -> None:
    generator, other = make(), make()
    made, new = registry(augment=generator), registry(augment=other)
    draw(generator)
    marks = made.drawn()
    made.capture_common(3)
    saved, common = local_state(made), made.capture_common(3)
    following = draw(generator)
    assert made.drawn() != marks, "a draw is seen"
    new.restore_plain(common, saved, 3, fresh=True)
    assert draw(other) == following


def test_a_module_is_protected_by_its_tensors_not_as_plain_state() -> None:
    average = nn.Linear(2, 2)
    made = registry(ema=average)
    made.close()
    names = sorted(shard.name for shard in made.tensor_shards())
    assert names == ["model1/param/bias", "model1/param/weight", "param/bias", "param/weight"]
    assert len(made.capture_common(0)) < 2000 and made.objects == {}


def test_what_is_registered_twice_or_has_no_state_is_refused() -> None:
    average = nn.Linear(2, 2)
    made = registry(ema=average)
    with pytest.raises(RegistrationError, match="'again' is registered already"):
        made.register(nn.Linear(2, 2), [], {"again": average})
    with pytest.raises(RegistrationError, match="state_dict"):
        made.register(nn.Linear(2, 2), [], {"number": 3})
    with pytest.raises(RegistrationError, match=r"per_rank names \['bst'\]; registered in this call: \['best'\]"):
        made.register(nn.Linear(2, 2), [], {"best": Kept(1)}, ["bst"])
