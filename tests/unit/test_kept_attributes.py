"""Attributes that are registered as one thing: what comes back, in place, and what is refused by name."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import flashrecovery
from flashrecovery.errors import UnsupportedError
from flashrecovery.state import codec

seen = 3


class Meter:
    def __init__(self) -> None:
        self.sum, self.values = 0.0, [1.0]


class Display:
    def __init__(self, meters: list[Meter]) -> None:
        self.meters = meters


def moved(state: dict[str, object]) -> dict[str, object]:
    """As another process gets it."""
    found: dict[str, object] = codec.loads(codec.dumps(state))
    return found


def test_objects_come_back_with_what_they_share() -> None:
    meter = Meter()
    kept = types.SimpleNamespace(meter=meter, display=Display([meter]), n=1, mean=torch.ones(2))
    state = flashrecovery.KeptAttributes(kept, "meter", "display", "n", "mean").state_dict()
    meter.sum, kept.n = 5.0, 2
    meter.values.append(2.0)
    kept.mean += 1
    flashrecovery.KeptAttributes(kept, "meter", "display", "n", "mean").load_state_dict(moved(state))
    assert kept.meter is meter is kept.display.meters[0]
    assert (meter.sum, meter.values, kept.n, kept.mean.tolist()) == (0.0, [1.0], 1, [1.0, 1.0])
    other = types.SimpleNamespace(meter=None)
    flashrecovery.KeptAttributes(other, "meter", "display").load_state_dict(moved(state))
    assert other.meter is other.display.meters[0] and type(other.meter) is Meter and other.meter.values == [1.0]


def test_one_that_was_not_there_is_gone_again() -> None:
    kept = types.SimpleNamespace()
    registered = flashrecovery.KeptAttributes(kept, "loss")
    state = registered.state_dict()
    kept.loss = 1.0
    registered.load_state_dict(state)
    assert not hasattr(kept, "loss")


def test_variables_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    registered = flashrecovery.KeptAttributes(here, "seen")
    state = registered.state_dict()
    monkeypatch.setattr(here, "seen", 9)
    registered.load_state_dict(moved(state))
    assert seen == 3


def test_what_cannot_be_kept_is_named() -> None:
    kept = types.SimpleNamespace(lines=iter([1]))
    with pytest.raises(
        UnsupportedError, match=r"KeptAttributes\(SimpleNamespace, 'lines'\): a list_iterator cannot be kept"
    ):
        flashrecovery.KeptAttributes(kept, "lines").state_dict()
