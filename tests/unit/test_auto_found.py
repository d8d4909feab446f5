"""What ``--auto`` finds among the variables of a script's functions."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flashrecovery.errors import UnsupportedError
from flashrecovery.worker.auto import found
from flashrecovery.worker.auto.found import Found, Tensors, find
from flashrecovery.worker.auto.report import table


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file is a script, and nothing around it is."""
    here = __name__
    monkeypatch.setattr(found, "is_own", lambda kind: kind.__module__ == here)
    monkeypatch.setattr(found, "frames", lambda frame: [frame])


def here() -> types.FrameType:
    return sys._getframe(1)


def names(it: Found) -> dict[str, list[str]]:
    return {model.path: [*model.optimizers] for model in it.models}


def test_models_with_their_optimizers_and_what_goes_with_them() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    one, two = torch.optim.SGD(first.parameters(), 0.1), torch.optim.SGD(second.parameters(), 0.1)
    schedules = {"warmup": torch.optim.lr_scheduler.StepLR(one, 1)}
    average, loss = copy.deepcopy(first), nn.MSELoss()
    it = find(here())
    assert names(it) == {"first": ["one"], "second": ["two"]}
    assert it.objects == {"schedules['warmup']": schedules["warmup"], "average": average} and loss is not average
    assert find(here(), [first, one, second, two]).models == ()
    assert two.param_groups


class Trainer:
    def __init__(self) -> None:
        self.net = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.history = [1.0]

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])


class Shadow:
    def __init__(self, net: nn.Module) -> None:
        self.shadow = {name: torch.zeros(5000) for name, _ in net.named_parameters()}
        self.table = torch.zeros(5000)

    def update(self) -> float:
        for name in self.shadow:
            self.shadow[name] = self.shadow[name] + 1
        return float(self.table.sum())


def closing(over: object) -> Callable[[], object]:
    return lambda: over


def test_attributes_closures_and_partial_functions_lead_to_them() -> None:
    trainer = Trainer()
    it = find(here())
    assert names(it) == {"trainer.net": ["trainer.optimizer"]}
    assert not it.objects, "a trainer's state is made of what is protected"

    def inner(trainer: object) -> Found:
        step = functools.partial(print, trainer)
        frame = types.SimpleNamespace(f_locals={"step": step}, f_globals={})
        return find(frame)  # type: ignore[arg-type]

    assert names(inner(trainer)) == {"step.args[0].net": ["step.args[0].optimizer"]}


def test_modules_in_a_module_that_the_script_has_made_by_hand() -> None:
    tools = types.ModuleType("tools")
    tools.heads = [torch.nn.Linear(1, 1)]  # type: ignore[attr-defined]
    frame = types.SimpleNamespace(f_locals={"tools": tools, "math": types}, f_globals={})
    assert [*find(frame).objects] == ["tools.heads[0]"]  # type: ignore[arg-type]


def test_tensors_that_a_method_changes() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    shadow = Shadow(net)
    it = find(here())
    assert it.objects.keys() == {"shadow.shadow"} and optimizer.param_groups
    kept = it.objects["shadow.shadow"]
    saved = kept.state_dict()
    first = shadow.shadow["weight"]
    shadow.update()
    kept.load_state_dict(saved)
    assert first is not shadow.shadow["weight"] and torch.equal(first, shadow.shadow["weight"])


def test_a_tensor_that_is_replaced_by_another_shape() -> None:
    owner = types.SimpleNamespace(queue=torch.zeros(3))
    kept = Tensors(owner, "queue")
    saved = kept.state_dict()
    owner.queue = torch.ones(4)
    kept.load_state_dict(saved)
    assert torch.equal(owner.queue, torch.zeros(3))


def test_lbfgs_is_refused() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(net.parameters())
    with pytest.raises(UnsupportedError, match=r"optimizer .LBFGS."):
        find(here())
    assert optimizer.param_groups


def test_the_table_names_what_is_protected_and_what_is_not() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    it = find(here()) + Found(unsaved={"bank.rows": "tensors of 99 bytes"})
    text = table(it, "train.py:7", {"train.py:7": "loop of steps, and its data"})
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "--auto: the loop of steps is at train.py:7. Protected:"
    assert "net Linear from the ranks that have the same, or a neighbour's copy" in lines
    assert "optimizer SGD with its model" in lines
    assert lines[lines.index("Not protected:") + 1].startswith("bank.rows tensors of 99 bytes")
    assert optimizer.param_groups
