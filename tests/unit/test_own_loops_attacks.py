"""What scripts do in their loops: variables that lead to protected state, generators, functions of other modules."""

from __future__ import annotations

import ast
import collections
import contextvars
import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashrecovery.state import codec
from flashrecovery.worker.own_loops.rewrite import LoopText, Makes, made_in, may_make_steps, rewrite
from flashrecovery.worker.own_loops.variables import Identities, LoopVariables, Saved, protected, put_back, take_down
from flashrecovery.worker.script_text import script_modules
from flashrecovery.worker.script_text.loop_carried import loops_around
from flashrecovery.worker.startup import own_text
from flashrecovery.worker.startup.own_text import OwnSources

EPOCH = """
def train_one_epoch(model, loader):
    for x, y in loader:
        loss = model(x)
        model.backward(loss)
        model.step()
"""
STEP = """
def train_step(model, x):
    model.backward(model(x))
    model.step()
"""


READ = frozenset(("a", "b", "c", "d", "increment", "callbacks"))
"""What the script of a test reads."""


def names(*own: str) -> LoopVariables:
    return LoopVariables.of(LoopText(True, local=frozenset(own), read=READ))


def frame_with(**variables: object) -> types.FrameType:
    return types.SimpleNamespace(f_locals=variables, f_globals=variables)  # type: ignore[return-value]


def test_a_variable_that_leads_to_parameter_groups_is_left_alone() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    flat = torch.zeros(8)
    (group,) = optimizer.param_groups
    frame = frame_with(group=group, view=flat[:4], own=torch.zeros(2))
    known = protected([optimizer], [flat])
    saved = take_down(frame, names("group", "view", "own"), known)
    assert {*saved.variables} == {"own"}
    put_back(frame, names("group", "view", "own"), known, saved)
    assert group["params"][0] is weight


def test_generators_come_back() -> None:
    kinds: dict[str, Any] = {
        "a": torch.Generator(),
        "b": random.Random(1),
        "c": np.random.default_rng(2),
        "d": [random.Random(3)],
    }
    frame = frame_with(**kinds)

    def drawn() -> list[float]:
        a, b, c, d = kinds.values()
        return [torch.rand(1, generator=a).item(), b.random(), c.random(), d[0].random()]

    saved = take_down(frame, names(), Identities())
    first = drawn()
    put_back(frame, names(), Identities(), saved)
    assert drawn() == first


class Sampler:
    def __init__(self) -> None:
        self.noise: torch.Generator | None = None
        self.others: list[Any] = []


def test_generators_that_the_training_makes_come_back() -> None:
    """A replacement has none of them yet, and would seed new ones."""
    sampler = Sampler()
    sampler.noise = torch.Generator().manual_seed(1)
    sampler.others = [random.Random(2), np.random.default_rng(3), np.random.RandomState(4), sampler.noise]
    made = torch.Generator().manual_seed(5)
    frame, of = (
        frame_with(sampler=sampler, made=made),
        LoopVariables.of(LoopText(True, local=frozenset(["made"]), read=frozenset(["sampler", "made"]))),
    )

    def drawn(sampler: Any, made: Any) -> list[float]:
        torchs = [torch.rand(1, generator=g).item() for g in (sampler.noise, made, sampler.others[3])]
        return [*torchs, *(g.random() for g in sampler.others[:3])]

    saved = take_down(frame, of, Identities())
    first = drawn(sampler, made)
    found = put_back(frame, of, Identities(), saved)
    assert found["made"] is made and sampler.others[3] is sampler.noise
    assert drawn(sampler, made) == first

    replaced = frame_with(sampler=Sampler(), made=None)
    plain = codec.loads(codec.dumps(saved.plain()))
    found = put_back(replaced, of, Identities(), Saved.of(plain))
    there = replaced.f_locals["sampler"]
    assert there.others[3] is there.noise and type(there.others[1]) is np.random.Generator
    assert drawn(there, found["made"]) == first


def test_context_variables_come_back() -> None:
    with_default: contextvars.ContextVar[int] = contextvars.ContextVar("with_default", default=1)
    count: contextvars.ContextVar[Any] = contextvars.ContextVar("count")
    count.set([1])
    frame = frame_with(a=with_default, b=count)
    saved = take_down(frame, names(), Identities())
    with_default.set(2)
    count.get().append(2)
    put_back(frame, names(), Identities(), Saved.of(codec.loads(codec.dumps(saved.plain()))))
    assert (with_default.get(), count.get()) == (1, [1])


def test_random_numbers_of_the_system_have_no_state() -> None:
    frame = frame_with(a=random.SystemRandom())
    assert "a" not in take_down(frame, names(), Identities()).attributes


def test_a_tensor_that_rounds_of_the_inner_loop_add_to_is_kept() -> None:
    text = """
for epoch in range(3):
    total = torch.zeros(1)
    for x in loader:
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        total = total + loss.detach()
        print(total)
"""
    loops = rewrite(text, "train.py").loops
    assert "total" in loops[2].carried.remade and "total" not in loops[4].carried.remade
    assert "loss" in loops[4].carried.remade


def test_what_an_else_clause_and_functions_read_is_read_after() -> None:
    text = """
def report():
    print(last)
for x in loader:
    last = shown = engine(x)
    engine.backward(last)
    engine.step()
else:
    print(shown)
report()
"""
    assert {"last", "shown"} <= rewrite(text, "train.py").loops[4].read_after


def test_a_loop_over_an_imported_function_is_an_outer_loop() -> None:
    text = "for epoch in range(3):\n    train_one_epoch(engine, loader)\n"
    assert not rewrite(text, "train.py").loops
    assert not rewrite(text, "train.py", made_in(ast.parse(EPOCH))).loops[1].steps
    text = "for x in loader:\n    train_step(engine, x)\n"
    assert rewrite(text, "train.py", made_in(ast.parse(STEP))).loops[1].steps


def test_imported_modules_are_read(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from .epochs import train_one_epoch\n")
    (tmp_path / "package" / "epochs.py").write_text(EPOCH)
    text = b"import deepspeed\nfrom package import train_one_epoch\n"
    sources = OwnSources(text, str(tmp_path / "train.py"))
    assert sources.take_steps
    assert "train_one_epoch" in sources.made_in_imported(text, str(tmp_path / "train.py")).looping


def test_what_a_zygote_has_read_counts_until_it_changes(tmp_path: Path) -> None:
    module, script = tmp_path / "epochs.py", str(tmp_path / "train.py")
    module.write_text(EPOCH)
    text = b"import deepspeed\nfrom epochs import train_one_epoch\n"
    sources = OwnSources(text, script)
    assert sources.are_of(text, script, any_framework=False)
    assert not sources.are_of(text, script, any_framework=True)
    assert not sources.are_of(text + b"\n", script, any_framework=False)
    module.write_text(EPOCH + "\n")
    assert not sources.are_of(text, script, any_framework=False)
    assert OwnSources(text, script).are_of(text, script, any_framework=False)
    module.unlink()
    assert not sources.are_of(text, script, any_framework=False)


def test_a_fork_takes_what_its_zygote_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, module = tmp_path / "train.py", tmp_path / "epochs.py"
    module.write_text(EPOCH)
    script.write_text("import epochs\n")
    monkeypatch.setattr(own_text, "_sources", None)
    monkeypatch.setattr(own_text, "_folders", [])
    own_text.read_ahead(str(script))
    read = own_text._sources
    assert read is not None
    own_text.compiled_text(script.read_bytes(), str(script))
    assert own_text._sources is read
    module.write_text("")
    own_text.compiled_text(script.read_bytes(), str(script))
    assert own_text._sources is not read


def test_modules_without_a_step_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand lines of them take a tenth of a second, in each process."""
    script = tmp_path / "train.py"
    (tmp_path / "model.py").write_text("import layers\n\n\nclass Model:\n    steps = 0\n\n    def forward(self): ...\n")
    (tmp_path / "layers.py").write_text("def layer(): ...\n" * 100)
    (tmp_path / "epochs.py").write_text("from model import Model\n" + EPOCH)
    script.write_text("import deepspeed, epochs, model\n\nepochs.train_one_epoch(model.Model(), [])\n")
    monkeypatch.setattr(own_text, "_sources", None)
    monkeypatch.setattr(own_text, "_folders", [])
    parsed = list[str]()
    plain = ast.parse

    def counted(text: Any, *args: Any, **options: Any) -> Any:
        parsed.extend(name for name in ("model", "layers", "epochs") if text == (tmp_path / f"{name}.py").read_bytes())
        return plain(text, *args, **options)

    monkeypatch.setattr(ast, "parse", counted)
    script_modules._read.cache_clear()
    own_text.read_ahead(str(script))
    assert sorted(parsed) == ["epochs", "epochs", "layers", "model"]  # how names are used, once; and what makes steps
    parsed.clear()
    own_text.compiled_text(script.read_bytes(), str(script))  # in a fork
    for name in ("model", "layers", "epochs"):
        path = tmp_path / f"{name}.py"
        rewritten = own_text._rewritten(path.read_bytes(), str(path))
        assert (rewritten is not None) == (name == "epochs")
        script_modules._set_by(str(path))
    assert parsed == ["epochs"]  # it is rewritten


@pytest.mark.parametrize(
    ("text", "makes"),
    [
        ("engine.step()", True),
        ("scaler . step (optimizer)", True),
        ("loss.\\\nbackward()", True),
        ("fit(model)", True),
        ("trainer.fit \\\n(model)", True),
        ("refit(model); self.steps = fit", False),
        ("for step in range(3): (step)", False),
    ],
)
def test_whether_a_text_may_make_steps(text: str, makes: bool) -> None:
    assert may_make_steps(text.encode(), Makes(looping=frozenset(("fit",)))) == makes


def test_imports_of_several_lines_are_read(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.py").write_text(EPOCH.replace("train_one_epoch", name))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from ..one import (  # the first\n    one as first,\n)\n")
    text = b"import deepspeed, two as second  # a comment\nif True:\n    from package import (\n    one,\n)\n"
    text += b"import three\n"
    made = OwnSources(text, str(tmp_path / "train.py")).made_in_imported(text, str(tmp_path / "train.py"))
    assert {"one", "two", "three"} <= made.looping


def test_loops_around_a_line() -> None:
    tree = ast.parse("for a in b:\n    while c:\n        d()\n        def e():\n            f()\n")
    assert [loop.lineno for loop in loops_around(tree, 3)] == [1, 2]
    assert not loops_around(tree, 5)


def test_a_list_that_a_library_shuffles_belongs_to_the_loop() -> None:
    text = """
for epoch in range(3):
    random.shuffle(order)
    print(sum(numbers))
    for i in order:
        engine.backward(engine(i))
        engine.step()
"""
    passed = rewrite(text, "train.py").loops[2].passed
    assert "order" in passed and "numbers" not in passed
    order, count = [1, 2, 3], 4
    frame = frame_with(order=order, count=count)
    wanted = LoopVariables(frozenset(), frozenset(), frozenset(), frozenset(("order", "count")))
    saved = take_down(frame, wanted, Identities())
    assert saved.variables == {"order": [1, 2, 3]}
    order.reverse()
    put_back(frame, wanted, Identities(), saved)
    assert order == [1, 2, 3]


def test_a_method_of_its_own_may_be_called_step() -> None:
    text = """
class Trainer:
    def step(self, batch):
        self.engine.backward(self.engine(batch))
        self.engine.step()

    def train(self, epochs):
        for epoch in range(epochs):
            for batch in loader:
                self.step(batch)
"""
    loops = rewrite(text, "train.py").loops
    assert (loops[8].steps, loops[9].steps) == (False, True)


def test_what_a_closure_counts_and_dictionaries_of_other_kinds_come_back() -> None:
    count = 0

    def increment() -> int:
        nonlocal count
        count += 1
        return count

    found: collections.Counter[str] = collections.Counter(a=1)
    frame = frame_with(increment=increment, found=found)
    saved = take_down(frame, names("found"), Identities())
    increment()
    found["a"] += 1
    put_back(frame, names("found"), Identities(), saved)
    assert increment() == 1
    assert type(found) is collections.Counter and found == {"a": 1}


class Counting:
    def __init__(self) -> None:
        self.count = 0


def test_an_object_is_found_where_the_loop_has_not_set_its_variable_yet() -> None:
    one = Counting()
    one.count = 3
    saved = take_down(frame_with(callbacks=[one], callback=one), names("callback"), Identities())
    new = Counting()
    put_back(frame_with(callbacks=[new]), names("callback"), Identities(), saved)
    assert new.count == 3


def test_what_a_loop_runs_over_may_be_written_in_place() -> None:
    """As an average of the weights: its tensors have no name of their own there."""
    text = """
for batch in batches:
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
    for one, now in zip(slow, enumerate(fast)):
        one.lerp_(now[1], 0.5)
    [one.zero_() for one in sums]
"""
    assert {"slow", "fast", "sums"} <= rewrite(text, "train.py").loops[2].passed
