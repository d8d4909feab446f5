"""Which loops of a script's text are put under recovery, and that the rewritten text does what it did."""

from __future__ import annotations

import ast
import io
import queue
import textwrap
import types
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrecovery.worker.own_loops.rewrite import HANDLE, Makes, Rewritten, rewrite
from flashrecovery.worker.own_loops.taken import taken_in

CALLS = """
class Engine:
    def __init__(self):
        self.calls = []
    def __call__(self, x):
        return x
    def backward(self, loss):
        self.calls.append(("backward", loss))
    def step(self):
        self.calls.append("step")
engine = Engine()
"""


def rewritten(text: str) -> Rewritten:
    return rewrite(textwrap.dedent(text), "train.py")


def lines(text: str) -> dict[int, bool]:
    """Line of each loop that is rewritten, and whether it is a step loop."""
    return {line: loop.steps for line, loop in rewritten(text).loops.items()}


def test_the_innermost_loop_with_a_whole_step_and_the_loops_around_it() -> None:
    assert lines("""
        for epoch in range(3):
            for x in loader:
                engine.backward(engine(x))
                engine.step()
            for x in evaluation:
                engine(x)
    """) == {2: False, 3: True}


def test_micro_batches_in_a_loop_of_their_own_are_a_part_of_the_step() -> None:
    assert lines("""
        while step < 10:
            for x in batches:
                model(x).backward()
            optimizer.step()
    """) == {2: True}


def test_a_loop_that_takes_steps_besides_those_of_a_loop_in_it_is_one_step() -> None:
    assert lines("""
        for x in loader:
            for _ in range(2):
                critic(x).backward()
                first.step()
            critic(made(x)).backward()
            second.step()
    """) == {2: True}


def test_the_rest_of_an_accumulation_is_a_step_in_the_loop_around() -> None:
    text = rewritten("""
        for epoch in range(3):
            for number, x in enumerate(loader):
                model(x).backward()
                if number % 3 == 0:
                    optimizer.step()
            if rest:
                optimizer.step()
            validate()
    """)
    assert {line: loop.steps for line, loop in text.loops.items()} == {2: False, 3: True}
    assert ast.unparse(text.tree).count(f"optimizer.step()\n{' ' * 20}{HANDLE}.step_taken()") == 1
    assert ast.unparse(text.tree).count("step_taken()") == 2


def test_a_number_of_steps_is_no_hand_made_loop() -> None:
    assert lines("""
        for _ in range(args.steps):
            model(next(batches)).backward()
            optimizer.step()
    """) == {2: True}


def test_a_modules_train_is_not_a_trainers() -> None:
    assert lines("""
        class Trainer:
            def train(self):
                for x in self.loader:
                    if evaluate:
                        self.model.eval()
                        self.model.train()
                    self.model(x).backward()
                    self.optimizer.step()
        for fold in range(3):
            trainer.train()
        for fold in range(3):
            model.train()
    """) == {4: True, 10: False}


def test_functions_and_methods_are_followed() -> None:
    assert lines("""
        def train_step(x):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
        class Trainer:
            def run_epoch(self):
                for x in loader:
                    train_step(x)
            def run(self):
                for epoch in range(3):
                    self.run_epoch()
                    self.evaluate()
            def evaluate(self):
                for x in loader:
                    engine(x)
    """) == {8: True, 11: False}


@pytest.mark.parametrize(
    "text",
    [
        "for x in loader:\n    engine(x)\n",
        "for x in loader:\n    engine.backward(engine(x))\n",
        "for x in loader:\n    loss.backward()\n    scheduler.step()\n",
        "for step in engine.recovery.steps(9):\n    engine.backward(x)\n    engine.step()\n",
        "for _ in range(9):\n    engine.train_batch(data)\n",
        "engine.backward(x)\nengine.step()\n",
    ],
)
def test_what_is_left_as_it_is(text: str) -> None:
    found = rewrite(text, "train.py")
    assert not found.loops and ast.dump(found.tree) == ast.dump(ast.parse(text))


@pytest.mark.parametrize(
    ("body", "below"),
    [
        ("engine.backward(x)\nengine.step()\nlog(x)", "log(x)"),
        ("loss.backward()\nif i % 2:\n    optimizer.step()\n    log(x)", "log(x)"),
        ("loss.backward()\nwith ctx():\n    scaler.step(optimizer)\n    scaler.update()", "scaler.update()"),
        ("loss.backward()\ndisc.step()\nif i % 5 == 0:\n    gen.step()\nlog(x)", "log(x)"),
        ("loss.backward()\noptimizer.step()\nscheduler.step()", "scheduler.step()"),
    ],
)
def test_a_step_ends_behind_the_last_call_that_belongs_to_it(body: str, below: str) -> None:
    text = f"for x in loader:\n{textwrap.indent(body, '    ')}\n"
    new = ast.unparse(rewrite(text, "train.py").tree).splitlines()
    end = next(number for number, line in enumerate(new) if line.strip() == f"{HANDLE}.step_taken()")
    assert new[end + 1].strip() == below


def test_what_cannot_be_led_back_is_named() -> None:
    found = rewritten("""
        def losses():
            for x in loader:
                engine.backward(x)
                engine.step()
                yield x
    """)
    assert "generator" in found.loops[3].refused
    assert HANDLE not in {node.id for node in ast.walk(found.tree) if isinstance(node, ast.Name)} - {HANDLE}


def test_iterators_that_a_step_asks_are_known_by_their_name() -> None:
    found = rewritten("""
        it = iter(loader)
        other = iter(loader)
        def batches():
            source = iter(loader)
            while True:
                yield next(source)
        def step():
            engine.backward(next(it))
            engine.step()
        for _ in range(9):
            step()
    """)
    assert found.iterators == {"it"}
    text = ast.unparse(found.tree)
    assert f"it = {HANDLE}.iterator(loader)" in text and "other = iter(loader)" in text
    assert "yield next(source)" in text


SCRIPTS = {
    "else and continue": """
        out = []
        for number, x in enumerate([3, 1, 4, 1, 5], start=7):
            if x == 4:
                continue
            engine.backward(x)
            engine.step()
            out.append((number, x))
        else:
            out.append("else")
    """,
    "break": """
        out = []
        for epoch in range(3):
            for x in range(5):
                engine.backward(x)
                engine.step()
                if x == 2:
                    break
            else:
                out.append("never")
            out.append(epoch)
            if epoch == 1:
                break
        out.append(x)
    """,
    "else that leaves the loop around": """
        out, n = [], 0
        for epoch in range(6):
            for x in range(3):
                engine.backward(x)
                engine.step()
                if (epoch, x) in ((1, 1), (4, 0)):
                    break
            else:
                out.append(("whole", epoch))
                for again in range(2):
                    if again == epoch:
                        break
                continue
            n = 0
            while n < epoch:
                engine.backward(n)
                engine.step()
                n += 1
            else:
                out.append(("else", n))
                if epoch == 4:
                    break
            out.append(epoch)
        else:
            out.append("never")
    """,
    "while with else": """
        out, n = [], 0
        while n < 4:
            engine.backward(n)
            engine.step()
            n += 1
        else:
            out.append(("else", n))
    """,
    "return": """
        def train():
            for x in range(9):
                engine.backward(x)
                engine.step()
                if x == 3:
                    return x
        out = [train()]
    """,
    "an error": """
        out = []
        try:
            for x in range(9):
                engine.backward(x)
                engine.step()
                if x == 3:
                    raise ValueError(x)
        except ValueError as e:
            out.append(str(e))
    """,
    "next": """
        out = []
        it = iter([1, 2])
        for _ in range(5):
            x = next(it, None)
            if x is None:
                it = iter([7, 8])
                x = next(it)
            engine.backward(x)
            engine.step()
            out.append(x)
    """,
    "closures and globals": """
        count = 0
        def train():
            total = 0
            def add(x):
                nonlocal total
                global count
                total += x
                count += 1
            for x in range(4):
                engine.backward(x)
                engine.step()
                add(x)
            return total
        out = [train(), count]
    """,
    "one after the other": """
        total = 0
        for x in range(3):
            engine.backward(engine(x))
            engine.step()
            total += x
        else:
            total += 100
        def more(n):
            global total
            while n:
                engine.backward(n)
                engine.step()
                n -= 1
                total += 10
            return n
        out = [more(2), total]
        out += [[more(1) for _ in range(1)], total]
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_recovery_it_does_what_it_did(name: str) -> None:
    text = CALLS + textwrap.dedent(SCRIPTS[name])
    found = rewrite(text, "train.py")
    assert found.loops
    from flashrecovery.worker.own_loops.loops import LOOPS

    LOOPS.texts |= {("train.py", line): loop for line, loop in found.loops.items()}
    plain: dict[str, Any] = {}
    led: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()):
        exec(compile(text, "train.py", "exec"), plain)
        exec(compile(found.tree, "train.py", "exec"), led)
    assert led["out"] == plain["out"] and led["engine"].calls == plain["engine"].calls


def test_every_statement_keeps_its_line() -> None:
    text = CALLS + textwrap.dedent(SCRIPTS["break"])
    found = rewrite(text, "train.py")
    lines_of = {ast.unparse(n): n.lineno for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.Expr, ast.AugAssign))}
    for node in ast.walk(found.tree):
        if isinstance(node, (ast.Expr, ast.AugAssign)) and ast.unparse(node) in lines_of:
            assert node.lineno == lines_of[ast.unparse(node)]


def test_loops_one_after_the_other_are_one_round_of_a_loop_around_them() -> None:
    text = """
        def fit(batches):
            for x in batches:
                engine.backward(engine(x))
                engine.step()
        def main():
            if warm:
                fit(a)
            log()
            for epoch in range(2):
                fit(b)
            log()
        main()
    """
    assert lines(text) == {3: True, -7: False, 10: False}
    alone = text.replace("if warm:", "if False:").replace("                fit(a)", "                pass")
    assert lines(alone) == {3: True, 10: False}


def test_a_loop_in_a_function_that_a_step_calls_is_a_part_of_the_step() -> None:
    """A critic takes several steps there, and then the generator one, in the loop or in a function."""
    critic = "def critic():\n    for _ in range(2):\n        loss.backward()\n        first.step()\n"
    direct = f"{critic}for x in loader:\n    critic()\n    made.backward()\n    second.step()\n"
    assert {line: text.steps for line, text in rewrite(direct, "train.py").loops.items()} == {5: True}
    generator = "def generator():\n    made.backward()\n    second.step()\n"
    called = f"{critic}{generator}for x in loader:\n    critic()\n    generator()\n"
    assert {line: text.steps for line, text in rewrite(called, "train.py").loops.items()} == {8: True}
    epochs = f"{critic}for e in range(3):\n    critic()\n    scheduler.step()\n"
    assert {line: text.steps for line, text in rewrite(epochs, "train.py").loops.items()} == {2: True, 5: False}


def test_such_a_function_of_another_module_is_refused() -> None:
    text = "from other import critic\nfor x in loader:\n    critic()\n    made.backward()\n    second.step()\n"
    (found,) = rewrite(text, "train.py", Makes(looping=frozenset(("critic",)))).loops.values()
    assert "critic() of another module" in found.refused


def test_what_a_step_takes_from_a_queue_or_a_file_is_named(tmp_path: Path) -> None:
    text = "def more():\n    todo.get()\nwhile True:\n    lines.readline()\n    more()\n    names.get(1)\n"
    text += "    for x in islice(stream, 2): pass\n    next(batches)\n"
    (tmp_path / "lines").write_text("1\n")
    with open(tmp_path / "lines") as lines, open(tmp_path / "log", "w") as log:
        for variables, found in (
            ({"lines": lines}, "line 4: `lines.readline()` takes from a TextIOWrapper"),
            ({"lines": log, "todo": queue.Queue()}, "line 2: `todo.get()` takes from a Queue"),
            ({"stream": iter([1])}, "line 7: `islice(stream, 2)` takes from a list_iterator"),
            ({"lines": None, "todo": {}, "names": {}, "stream": [1], "batches": iter([1])}, ""),
        ):
            frame = types.SimpleNamespace(f_locals=variables, f_globals={})
            assert taken_in(frame, ast.parse(text), 3) == found  # type: ignore[arg-type]
            assert "stream" not in taken_in(frame, ast.parse(text), 3, steps=False)  # type: ignore[arg-type]


TAKEN = {
    "rate = steps.send(loss)": "`steps.send(loss)` takes from a generator",
    "batch = list(islice(steps, 2))": "`islice(steps, 2)` takes from a generator",
    "named = dict(zip(names, steps))": "`zip(names, steps)` takes from a generator",
    "child = seeds.spawn(1)": "`seeds.spawn(1)` takes from a SeedSequence",
    "batch = draw(steps)": "",  # a function of the script's, whose own next() is led back
    "print(steps, type(steps))": "",
    "for x in enumerate(range(3)): rest = list(steps2)": "",  # made in the round
}


@pytest.mark.parametrize("line", TAKEN)
def test_what_goes_on_with_an_iterator_by_other_means_than_next_is_named(line: str) -> None:
    def steps() -> Iterator[int]:
        yield from range(9)

    own = {"steps": steps(), "steps2": steps(), "names": ["a"], "seeds": np.random.SeedSequence(1)}
    frame: Any = types.SimpleNamespace(f_locals={**own, "islice": islice, "draw": steps}, f_globals={})
    found = taken_in(frame, ast.parse(f"while True:\n    {line}\n"), 1, remade=frozenset(("steps2",)))
    assert found == (f"line 2: {TAKEN[line]}" if TAKEN[line] else "")


def test_next_and_iter_as_methods_are_led_back() -> None:
    text = "it = loader.__iter__()\nwhile True:\n    engine.backward(it.__next__())\n    engine.step()\n"
    rewritten = rewrite(text, "train.py")
    assert rewritten.iterators == {"it"}
    written = ast.unparse(rewritten.tree)
    assert ".iterator(loader)" in written and ".next(('train.py', 'it'), it)" in written and "__next__" not in written


@pytest.mark.parametrize("bound", ["partial(train_step, 'mse')", "torch.compile(train_step)", "train_step"])
def test_a_function_of_the_step_that_is_called_by_another_name(bound: str) -> None:
    text = "def train_step(kind, batch):\n    made.backward()\n    optimizer.step()\n"
    text += f"step = {bound}\nfor x in loader:\n    step(x)\n"
    assert {line: found.steps for line, found in rewrite(text, "train.py").loops.items()} == {5: True}


@pytest.mark.parametrize("over", ["averages", "averages.items()", "zip(averages.values(), now)"])
def test_what_a_loop_in_the_step_runs_over_may_be_written(over: str) -> None:
    text = f"for x in loader:\n    x.backward()\n    optimizer.step()\n    for one in {over}:\n        one.mul_(2)\n"
    (found,) = rewrite(text, "train.py").loops.values()
    assert "averages" in found.passed


def test_variables_that_are_set_by_a_text_belong_to_the_loop() -> None:
    body = "for x in loader:\n    (x * alpha).backward()\n    optimizer.step()\n"
    text = f"alpha = 1\ndef decay(name):\n    globals()[name] *= 0.9\n{body}    decay('alpha')\n"
    (found,) = rewrite(text, "train.py").loops.values()
    assert "alpha" in found.shared
    for reads in ("print(globals()['alpha'])", "setattr(x, 'alpha', 1)"):
        (found,) = rewrite(f"alpha = 1\n{body}    {reads}\n", "train.py").loops.values()
        assert "alpha" not in found.shared
    (found,) = rewrite(
        f"own = sys.modules[__name__]\nalpha = 1\n{body}    setattr(own, 'beta', 1)\n", ""
    ).loops.values()
    assert {"alpha", "beta"} <= found.shared
