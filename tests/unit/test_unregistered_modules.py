"""What the script's modules keep, and functions that are not running change: named when it is not registered."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flashrecovery.worker.script_checks.unregistered import Unregistered
from flashrecovery.worker.script_text.script_modules import ScriptModules

HELPERS = """
import collections, functools, random, time, types
import numpy as np
import torch

WIDTH, NAMES = 8, ("a", "b")
TABLE = list(range(5000))
count = shown = 0
last = 0.0
counts, nested = {"steps": 0}, {"train": {"seen": 0}}
recent = collections.deque(maxlen=3)
log, kept = [], []
array, running = np.zeros(4), torch.zeros(4)
state = types.SimpleNamespace(n=0)
draws = random.Random(0)
average = torch.nn.Linear(2, 2)

class Meter:
    every = 0

    def __init__(self):
        self.sum = 0.0

    def update(self, value):
        self.sum += value
        return self.sum

meter = Meter()

@torch.no_grad()
def average_weights():
    average.weight.mul_(0.9)

def count_one():
    global count
    count += 1
    return count % 2

newest = 0

def read_newest():
    return newest

def only_count():
    global shown
    shown += 1

def clock():
    global last
    before, last = last, time.time()
    return last - before

def add(where, name):
    where[name] += 1
    return where[name]

def add_to_counts():
    counts["steps"] += 1
    return counts["steps"]

def add_to_nested():
    nested["train"]["seen"] += 1
    return nested["train"]["seen"]

def remember(value):
    recent.append(value)
    return sum(recent) / len(recent)

def only_append(value):
    log.append(value)

def append(value):
    kept.append(value)

def best():
    return max(kept)

def add_to_array():
    array[0] += 1
    return array.sum()

def of_class():
    Meter.every += 1
    return Meter.every

def of_namespace():
    state.n += 1
    return state.n

def of_function():
    of_function.calls += 1
    return of_function.calls

of_function.calls = 0

def of_default(value, seen=[]):
    seen.append(value)
    return len(seen)

def made():
    n = 0

    def inner():
        nonlocal n
        n = n + 1
        return n

    return inner

counted = made()
"""
SCRIPT = """
import helpers

own = {"n": 0}
own_log = []

class Run:
    steps = 0

def of_own():
    own["n"] = own["n"] + 1

def of_own_class():
    Run.steps = Run.steps + 1

def of_own_log(value):
    own_log.append(value)

def train(unregistered, change, steps):
    for number in steps:
        unregistered.before_step(sys._getframe(), 0)
        change(helpers, number)

def train_here(unregistered, change, steps):
    for number in steps:
        unregistered.before_step(sys._getframe(), 0)
        helpers.count = helpers.count + 1

def train_again(unregistered, change, steps):
    for number in steps:
        unregistered.before_step(sys._getframe(), 0)
        other.newest = number
        other.read_newest()

def outside(m, number):
    m.counts["steps"] = m.counts["steps"] + 1

import sys
import helpers as other
"""

NAMED: dict[str, tuple[Callable[[Any, int], object], str]] = {
    "global": (lambda m, i: m.count_one(), "helpers.count"),
    "dictionary": (lambda m, i: m.add_to_counts(), "helpers.counts"),
    "nested dictionary": (lambda m, i: m.add_to_nested(), "helpers.nested"),
    "deque": (lambda m, i: m.remember(i), "helpers.recent"),
    "list that is read": (lambda m, i: m.append(i), "helpers.kept"),
    "array": (lambda m, i: m.add_to_array(), "helpers.array"),
    "tensor": (lambda m, i: m.running.add_(1), "helpers.running"),
    "object": (lambda m, i: m.meter.update(1.0), "helpers.meter.sum"),
    "class": (lambda m, i: m.of_class(), "helpers.Meter.every"),
    "namespace": (lambda m, i: m.of_namespace(), "helpers.state.n"),
    "function": (lambda m, i: m.of_function(), "helpers.of_function.calls"),
    "default argument": (lambda m, i: m.of_default(i), "helpers.of_default.seen="),
    "closure": (lambda m, i: m.counted(), "helpers.counted.n"),
    "generator": (lambda m, i: m.draws.random(), "helpers.draws (Random)"),
    "module": (lambda m, i: m.average_weights(), "helpers.average (Linear)"),
    "own module": (lambda m, i: _script().of_own(), "own"),
    "own class": (lambda m, i: _script().of_own_class(), "Run.steps"),
    "from the script": (lambda m, i: _script().outside(m, i), "helpers.counts"),
}
NOT_NAMED: dict[str, Callable[[Any, int], object]] = {
    "nothing": lambda m, i: None,
    "count that nothing reads": lambda m, i: m.only_count(),
    "clock": lambda m, i: m.clock(),
    "log": lambda m, i: m.only_append(i),
    "own log": lambda m, i: _script().of_own_log(i),
}


def _script() -> Any:
    return sys.modules["own_script"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its modules are the only ones of a script in the process, as far as this is looked at."""
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "own_script.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    besides = ScriptModules.besides
    mine = ("helpers", "own_script")
    monkeypatch.setattr(
        ScriptModules, "besides", lambda self, those: (one for one in besides(self, those) if one[0] in mine)
    )
    yield importlib.import_module("own_script")
    for name in mine:
        del sys.modules[name]


def _told(
    script: Any, change: Callable[[Any, int], object], *more: object, loop: str = "train", **options: Any
) -> list[str]:
    told: list[str] = []
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    getattr(script, loop)(Unregistered([model, optimizer, *more], False, told.append, **options), change, [*range(5)])
    return told


@pytest.mark.parametrize("kind", NAMED)
def test_what_changes_in_a_module_is_named(kind: str, script: Any) -> None:
    change, path = NAMED[kind]
    told = _told(script, change)
    assert any(path in text for text in told), told
    others = [other for _, other in NAMED.values() if not path.startswith(other) and not other.startswith(path)]
    assert not any(f" {other}" in text for other in others for text in told), told


@pytest.mark.parametrize("kind", NOT_NAMED)
def test_what_does_not_matter_is_not_named(kind: str, script: Any) -> None:
    told = _told(script, NOT_NAMED[kind])
    assert not told, told


def test_what_is_registered_is_not_named(script: Any) -> None:
    helpers = sys.modules["helpers"]
    for kind in ("generator", "module", "object", "namespace"):
        name = NAMED[kind][1].split(".")[1].partition(" ")[0]
        told = _told(script, NAMED[kind][0], getattr(helpers, name))
        assert not any("helpers" in text for text in told), told


def test_what_comes_back_with_the_scripts_own_loops_is_not_named(script: Any) -> None:
    for kind in ("global", "dictionary", "object", "closure"):
        told = _told(script, NAMED[kind][0], kept=lambda value, largest: True)
        assert not told, told


def test_where_steps_are_calls_only_modules_and_tensors_are_named(script: Any) -> None:
    assert not _told(script, NAMED["dictionary"][0], calls=True)
    assert "helpers.average" in "".join(_told(script, NAMED["module"][0], calls=True))


def test_what_the_loop_itself_changes_in_a_module(script: Any) -> None:
    assert "helpers.count;" in "".join(_told(script, NOT_NAMED["nothing"], loop="train_here"))
    assert not _told(script, NOT_NAMED["nothing"], loop="train_again")
