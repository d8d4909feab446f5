"""What the script's other modules keep: taken down with its loop's variables, and put back."""

from __future__ import annotations

import collections
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashrecovery.state import codec
from flashrecovery.worker.own_loops import variables
from flashrecovery.worker.own_loops.foreign_iterators import gone_on, progress
from flashrecovery.worker.own_loops.variables import (
    Identities,
    LoopVariables,
    Saved,
    is_of_module,
    iterators_of,
    objects_of,
    put_back,
    take_down,
)
from flashrecovery.worker.script_text import held_state
from flashrecovery.worker.script_text.script_modules import ScriptModules

HELPERS = """
import collections, functools, random
import numpy as np
import torch

RATE, NAMES, LIMIT = 0.5, ("a", "b"), 3
count, total, best = 0, 0.0, None
history, by_name, recent = [], collections.defaultdict(list), collections.deque(maxlen=5)
running, array = torch.zeros(8), np.zeros(16)
draws = random.Random(0)

class Meter:
    every = 0

    def __init__(self):
        self.n, self.sum = 0, 0.0

    def update(self, value):
        self.n, self.sum = self.n + 1, self.sum + value
        Meter.every += 1

class Constant:
    WIDTH = 8

meter = Meter()

def log(value):
    global count, total, best
    count, total = count + 1, total + value
    best = value if best is None else min(best, value)
    history.append(value)
    by_name["loss"].append(value)
    recent.append(value)
    running.mul_(0.9).add_(value)
    array[:] += value
    meter.update(value)
    draws.random()

def made():
    n = 0

    def inner():
        nonlocal n
        n += 1
        return n

    return inner

counted = made()

def with_default(value, seen=[]):
    seen.append(value)

class Slots:
    __slots__ = ("n", "seen")

    def __init__(self, n):
        self.n, self.link = n, open

    @property
    def link(self):
        return None

    @link.setter
    def link(self, value):
        pass

slots = Slots(1)

def later_set():
    def inner(given):
        nonlocal value
        value = given

    if False:
        value = 0
    return inner

later = later_set()

def attributed():
    attributed.n += 1

attributed.n = 0
"""
SCRIPT = """
import helpers

def outside():
    helpers.extra = getattr(helpers, "extra", 0) + 1
    helpers.LIMIT -= 1
"""


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module that a script imports, and the script, as they are alone in their process."""
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "own_script.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("own_script")
    modules = ScriptModules()
    monkeypatch.setattr(variables, "MODULES", modules)
    monkeypatch.setattr(held_state, "MODULES", modules)
    mine = ("helpers", "own_script")
    look = modules._look

    def look_at_mine() -> None:  # what other tests' files set has the same names
        look()
        modules._modules = {name: modules._modules[name] for name in mine}

    monkeypatch.setattr(modules, "_look", look_at_mine)
    yield sys.modules["helpers"]
    for name in mine:
        del sys.modules[name]


def _frame() -> types.FrameType:
    variables: dict[str, object] = {}
    return types.SimpleNamespace(f_locals=variables, f_globals=variables)  # type: ignore[return-value]


NAMES = LoopVariables(frozenset(), frozenset(), frozenset())
NOTHING = Identities()


def _saved() -> Saved:
    return Saved.of(codec.loads(codec.dumps(take_down(_frame(), NAMES, NOTHING).plain())))


CHANGES: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "global": (lambda m: m.log(2.0), lambda m: (m.count, m.total, m.best)),
    "list": (lambda m: m.log(2.0), lambda m: list(m.history)),
    "defaultdict": (lambda m: m.log(2.0), lambda m: {name: list(values) for name, values in m.by_name.items()}),
    "deque": (lambda m: m.log(2.0), lambda m: list(m.recent)),
    "tensor": (lambda m: m.log(2.0), lambda m: m.running.tolist()),
    "array": (lambda m: m.log(2.0), lambda m: m.array.tolist()),
    "object": (lambda m: m.log(2.0), lambda m: (m.meter.n, m.meter.sum)),
    "class": (lambda m: m.log(2.0), lambda m: m.Meter.every),
    "random": (lambda m: m.log(2.0), lambda m: m.draws.getstate()),
    "closure": (lambda m: m.counted(), lambda m: m.counted.__closure__[0].cell_contents),
    "default": (lambda m: m.with_default(1), lambda m: list(m.with_default.__defaults__[0])),
    "function attribute": (lambda m: m.attributed(), lambda m: m.attributed.n),
    "set by another module": (lambda m: sys.modules["own_script"].outside(), lambda m: m.LIMIT),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_functions_of_another_module_change_comes_back(what: str, helpers: types.ModuleType) -> None:
    change, look = CHANGES[what]
    change(helpers)
    before, saved = look(helpers), _saved()
    change(helpers)
    assert look(helpers) != before
    put_back(_frame(), NAMES, NOTHING, saved)
    assert look(helpers) == before


def test_an_attribute_that_the_training_has_made_is_made_in_a_replacement(helpers: types.ModuleType) -> None:
    sys.modules["own_script"].outside()
    things = helpers.meter, helpers.Meter, helpers.log, helpers.slots, helpers.later
    helpers.meter.seen, helpers.Meter.seen, helpers.log.seen, helpers.slots.seen = 3, 4, 5, 6
    helpers.later(7)
    saved = _saved()
    del helpers.extra, helpers.meter.seen, helpers.Meter.seen, helpers.log.seen, helpers.slots.seen
    del helpers.later.__closure__[0].cell_contents
    put_back(_frame(), NAMES, NOTHING, saved)
    assert things == (helpers.meter, helpers.Meter, helpers.log, helpers.slots, helpers.later)
    assert (helpers.extra, vars(helpers.meter)["seen"], helpers.Meter.seen, helpers.log.seen) == (1, 3, 4, 5)
    assert helpers.slots.seen == 6 and helpers.later.__closure__[0].cell_contents == 7


def test_constants_modules_and_functions_are_not_looked_at(helpers: types.ModuleType) -> None:
    _saved()
    looked_at = held_state.MODULES.changing("helpers")
    assert not {"RATE", "NAMES", "Constant", "later_set", "made", "np", "torch", "collections"} & {*looked_at}
    assert {"count", "history", "Meter", "counted", "LIMIT"} <= {*looked_at}


def test_what_only_a_module_leads_to_is_told_from_what_variables_lead_to(helpers: types.ModuleType) -> None:
    """The patch of ``--auto=print`` can name the latter alone."""
    names = LoopVariables(frozenset(), frozenset(), frozenset(), read=frozenset(("mine",)))
    frame = types.SimpleNamespace(f_locals={"mine": helpers.meter}, f_globals={})
    paths = dict(objects_of(frame, names, NOTHING))  # type: ignore[arg-type]
    assert [path for path in paths if not is_of_module(path)] == ["mine"]
    assert paths["mine"] is helpers.meter and paths["module helpers.draws"] is helpers.draws


def test_the_loops_own_module_is_that_of_its_variables(helpers: types.ModuleType) -> None:
    modules = [name for name, _ in held_state.MODULES.besides(vars(helpers))]
    assert modules == ["own_script"]


ITERATORS = {
    "generator": "def made():\n    for _ in range(9):\n        for i in [1, 2, 3]:\n            yield i\nit = made()",
    "over a loader": "import torch\ndef made():\n    yield from iter([1, 2, 3])\nit = made()",
    "count": "import itertools\nit = itertools.count()",
    "list": "it = iter([1, 2, 3])",
    "file": "import csv\nit = csv.reader(['a', 'b', 'c'])",
    "loader": "from torch.utils.data import DataLoader\nit = iter(DataLoader([1, 2, 3]))",
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_of_another_module_that_goes_on_is_seen(kind: str, helpers: types.ModuleType) -> None:
    exec(ITERATORS[kind], vars(helpers))
    held_state.MODULES._changing.clear()
    looks = []
    for asked in (True, False, True):
        looks.append(progress(iterators_of(_frame(), NAMES, NOTHING)))
        if asked:
            next(helpers.it)
    looks.append(progress(iterators_of(_frame(), NAMES, NOTHING)))
    assert [*gone_on(looks[0], looks[1])] == [*gone_on(looks[2], looks[3])] == ["module helpers.it"]
    assert not gone_on(looks[1], looks[2])


def test_a_container_keeps_its_identity(helpers: types.ModuleType) -> None:
    history, by_name = helpers.history, helpers.by_name
    saved = _saved()
    helpers.log(1.0)
    put_back(_frame(), NAMES, NOTHING, saved)
    assert helpers.history is history and helpers.by_name is by_name
    assert isinstance(by_name, collections.defaultdict) and not by_name
