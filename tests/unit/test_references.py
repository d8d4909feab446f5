"""Variables that refer to a module, an optimizer, a function or a method: a replacement's refer to the same one."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

from flashrecovery.state import codec
from flashrecovery.worker.own_loops import variables
from flashrecovery.worker.own_loops.loops import ScriptLoops
from flashrecovery.worker.own_loops.rewrite import rewrite
from flashrecovery.worker.own_loops.variables import Identities, LoopVariables, Saved, protected, put_back, take_down
from flashrecovery.worker.script_text.held_state import referred_to_from
from flashrecovery.worker.script_text.plain_values import References, is_kept


@pytest.fixture(autouse=True)
def _no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "MODULES", types.SimpleNamespace(besides=lambda variables: iter(())))


class Task:
    """A state machine: one of its methods is the next to be called."""

    def __init__(self) -> None:
        self.count = 0
        self.act = self.first

    def first(self) -> str:
        return "first"

    def second(self) -> str:
        return "second"


class Link:
    def __init__(self, before: Link | None) -> None:
        self.before = before


def _made_at_set_up() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name in ("one", "other")}
    phases = [lambda: "warm", lambda: "hot"]
    current, phase, task = optimizers["one"], phases[0], Task()
    return {
        "model": model,
        "optimizers": optimizers,
        "phases": phases,
        "current": current,
        "phase": phase,
        "task": task,
        "criterion": nn.MSELoss(),
    }


def _frame(values: dict[str, Any]) -> types.FrameType:
    return types.SimpleNamespace(f_locals=values, f_globals=values)  # type: ignore[return-value]


def _names(*own: str, read: tuple[str, ...] = ()) -> LoopVariables:
    return LoopVariables(
        frozenset(own), frozenset(), frozenset(), read=frozenset((*own, *read)), carried=frozenset(own)
    )


def _known(values: dict[str, Any]) -> Identities:
    known = protected([values["model"], *values["optimizers"].values()], values["model"].parameters())
    known.references = References(referred_to_from(values.items()))
    return known


def _brought_over(
    names: LoopVariables, before: dict[str, Any], now: dict[str, Any], known: Identities | None = None
) -> dict[str, Any]:
    """What ``names`` are in a replacement, of a process that has gone from ``before`` to ``now``."""
    saved = take_down(_frame(now), names, known or _known(before))
    new = _made_at_set_up()
    found = put_back(_frame(new), names, _known(new), Saved.of(codec.loads(codec.dumps(saved.plain()))))
    return {**new, **found}


def test_what_was_made_at_set_up_is_found_again() -> None:
    before = _made_at_set_up()
    now = {**before, "current": before["optimizers"]["other"], "phase": before["phases"][1]}
    new = _brought_over(_names("current", "phase"), before, now)
    assert new["current"] is new["optimizers"]["other"] and new["phase"] is new["phases"][1]


def test_a_path_says_what_was_there_before_the_loop_began() -> None:
    """``phases.reverse()``: the first one is now another one than it was."""
    before = _made_at_set_up()
    now = {**before, "phases": before["phases"][::-1], "phase": before["phases"][1]}
    new = _brought_over(_names("phases", "phase"), before, now)
    assert [one() for one in new["phases"]] == ["hot", "warm"] and new["phase"] is new["phases"][0]


def test_a_method_is_that_of_the_object_there() -> None:
    before = _made_at_set_up()
    known = _known(before)
    before["task"].act, before["task"].count = before["task"].second, 3
    new = _brought_over(_names(read=("task",)), before, before, known)
    assert (new["task"].act(), new["task"].count) == ("second", 3) and new["task"].act.__self__ is new["task"]


def test_modules_without_parameters_and_partials_are_made_again() -> None:
    before = _made_at_set_up()
    loss = functools.partial(nn.functional.smooth_l1_loss, beta=0.5)
    now = {**before, "criterion": nn.SmoothL1Loss(beta=0.25), "loss": loss}
    new = _brought_over(_names("criterion", "loss"), before, now)
    x, y = torch.zeros(2), torch.ones(2)
    for name in ("criterion", "loss"):
        assert new[name](x, y) == now[name](x, y)
    assert is_kept(nn.CrossEntropyLoss(weight=torch.ones(3))) and not is_kept(nn.Linear(1, 1))


def test_the_criterion_of_the_set_up_stays_what_it_is() -> None:
    """A new one of its class is another one."""
    before = _made_at_set_up()
    before["criteria"] = [before["criterion"]]
    now = {**before, "criterion": nn.MSELoss(reduction="sum")}
    saved = take_down(_frame(now), _names("criterion"), _known(before))
    new = _made_at_set_up()
    new["criteria"] = [new["criterion"]]
    found = put_back(_frame(new), _names("criterion"), _known(new), saved)
    assert new["criteria"][0].reduction == "mean" and found["criterion"].reduction == "sum"


def test_what_can_neither_be_found_nor_made_is_named_when_it_is_exchanged() -> None:
    before, told = _made_at_set_up(), list[str]()
    loops = ScriptLoops()
    loops._protection = types.SimpleNamespace(session=types.SimpleNamespace(tell_not_registered=told.append))  # type: ignore[assignment]
    loop: Any = types.SimpleNamespace(key=("train.py", 3), place="train.py:3")
    known = _known(before)
    factor = 2.0
    values = {**before, "phase": 1, "last": lambda: factor, "all": {"model": nn.Linear(1, 1)}, "chain": None}
    names = _names("phase", "last", "all", "chain")
    for _ in range(2):
        loops.note_left_out(loop, take_down(_frame(values), names, known))
    assert not told
    values |= {"phase": lambda: factor + 1, "all": {**values["all"]}}
    for _ in range(9):
        values["chain"] = Link(values["chain"])
    for _ in range(2):
        loops.note_left_out(loop, take_down(_frame(values), names, known))
    assert len(told) == 1 and "train.py:3: " in told[0] and ": all, chain, phase (" in told[0]


def test_what_a_script_adds_to_an_optimizer_comes_back() -> None:
    before = _made_at_set_up()
    names = _names(read=("optimizers",))
    before["optimizers"]["one"].skipped = 2
    before["optimizers"]["one"].norms = [1.0]
    known = _known(before)
    saved = take_down(_frame(before), names, known)
    assert not any(name.endswith((".param_groups", ".state", ".defaults")) for name in saved.attributes)
    new = _made_at_set_up()
    put_back(_frame(new), names, _known(new), saved)
    assert (new["optimizers"]["one"].skipped, new["optimizers"]["one"].norms) == (2, [1.0])


HOOKS = """
seen, calls, table, fixed = [], [0], {}, []
def hook(module, inputs, output):
    calls[0] += 1
    table[len(seen)] = len(fixed)
model.register_forward_hook(hook)
model.register_forward_hook(lambda module, inputs, output: seen.append(1))
for x in data:
    loss = model(x)
    loss.backward()
    optimizer.step()
"""


def test_containers_in_which_hooks_write_belong_to_the_loop() -> None:
    (text,) = rewrite(HOOKS, "train.py").loops.values()
    assert {"seen", "calls", "table"} <= text.passed and "fixed" not in text.passed
