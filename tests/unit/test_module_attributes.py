"""Numbers and texts among the attributes of modules come back, also those that a module gets later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flashrecovery.adapter.modes import AttributeTracker, ModeTracker
from flashrecovery.errors import RestoreError
from flashrecovery.worker.local_state.version_counters import Constant, ParameterTable


def model() -> Any:
    made = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    made.calls = 0
    return made


def moved(one: Any) -> Any:
    """As a script leaves a model: attributes that are others, new ones, one that is no number any more."""
    one[0].p = 0.25
    one.average = 1.5
    one[1].seen = True
    one.newest = torch.ones(2)
    one.calls = 1.0
    return one


def numbers(one: Any) -> dict[str, Any]:
    return {
        f"{name}.{key}": (type(value), value)
        for name, module in one.named_modules()
        for key, value in vars(module).items()
        if type(value) in (int, float, bool, str)
    }


def test_a_replacement_gets_attributes_that_came_later() -> None:
    dead, new = model(), model()
    of_dead, of_new = AttributeTracker(dead), AttributeTracker(new)
    saved = of_dead.capture()
    assert saved == {}
    saved = [of_dead, moved(dead)][0].capture()
    of_new.restore(saved)
    assert numbers(new) == numbers(dead)
    assert of_new.capture() == saved
    assert AttributeTracker(model()).capture() == {}


def test_a_survivor_loses_what_a_void_attempt_has_made() -> None:
    one = model()
    tracker = AttributeTracker(one)
    before, start = tracker.capture(), numbers(one)
    mark = tracker.mark()
    moved(one)
    assert tracker.mark() != mark
    tracker.restore(before)
    assert numbers(one) == start and not hasattr(one, "average")
    assert tracker.mark()[: len(mark)] == mark


def test_what_was_no_number_then_is_left() -> None:
    one = model()
    tracker = AttributeTracker(one)
    one.loss = 1.0
    tracker.mark()
    one.loss = torch.ones(())
    saved = tracker.capture()
    one.loss = 2.0
    tracker.restore(saved)
    assert one.loss == 2.0


def test_an_attribute_that_takes_the_place_of_another_one() -> None:
    one = model()
    tracker = AttributeTracker(one)
    mark = tracker.mark()
    del one.calls
    one.other = 0
    assert tracker.mark() != mark
    assert tracker.capture() == {".other": 0}


def test_names_of_frameworks_are_left_alone() -> None:
    one = model()
    tracker = AttributeTracker(one, prefixes=("ds_",))
    one._hidden, one.ds_remaining = 1, 2
    assert tracker.capture() == {}


class Adapter(nn.Module):
    """As peft's, whose package this test pretends to be."""

    _disabled = False

    def __init__(self) -> None:
        super().__init__()
        self._active: str | list[str] = "first"
        self.active: str | list[str] = "first"
        self.scaling = {"first": 1.0}
        self.steps = list(range(100))


def test_other_libraries_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrecovery.adapter.modes.is_own", lambda kind: False)

    def switch(one: Any) -> None:
        one._active = one.active = ["second"]
        one._disabled = True
        one.scaling["second"] = 0.5
        one.steps.append(0)

    dead, new = Adapter(), Adapter()
    of_dead, of_new = AttributeTracker(dead), AttributeTracker(new)
    start, mark = of_dead.capture(), of_dead.mark()
    switch(dead)
    assert of_dead.mark() != mark
    saved = of_dead.capture()
    assert saved == {
        "._active": ["second"],
        ".active": ["second"],
        "._disabled": True,
        ".scaling": {"first": 1.0, "second": 0.5},
    }
    of_new.restore(saved)
    assert (new._active, new.active, new._disabled, new.scaling) == (["second"], ["second"], True, dead.scaling)
    of_dead.restore(start)
    assert (dead._active, dead.active, dead.scaling) == ("first", "first", {"first": 1.0})
    assert "_disabled" not in vars(dead)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(RestoreError, match="no module 'head'"):
        AttributeTracker(model()).restore({"head.calls": 1})


def test_what_is_frozen_later_is_frozen_in_a_replacement_and_trained_where_one_goes_back() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    modes = ModeTracker(network, ParameterTable([Constant(p) for p in network.parameters()]))
    start, mark = modes.capture(), modes.mark()
    network[0].requires_grad_(False)
    frozen = modes.capture()
    assert modes.mark() != mark and frozen["turned"] == [0, 1]
    replacement = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ModeTracker(replacement, ParameterTable([Constant(p) for p in replacement.parameters()])).restore(frozen)
    assert [p.requires_grad for p in replacement.parameters()] == [False, False, True, True]
    modes.restore(start)
    assert all(p.requires_grad for p in network.parameters())
