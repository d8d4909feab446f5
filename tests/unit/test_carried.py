"""Which variables a loop, or the methods of a class, carry from one round to the next."""

from __future__ import annotations

import ast
import textwrap

import pytest

from flashrecovery.worker.carried import carried_by_class, carried_by_loop, loop_around

SETTINGS = """
def main():
    for step in recovery.steps(10):
        {body}
"""


def of_loop(body: str) -> set[str]:
    source = SETTINGS.format(body=textwrap.dedent(body).strip().replace("\n", "\n        "))
    tree = ast.parse(source)
    loop = loop_around(tree, 3)
    assert loop is not None, source
    return set(carried_by_loop(loop))


@pytest.mark.parametrize(
    ("body", "carried"),
    [
        ("x = 1; y = x", set()),
        ("y = x; x = 1", {"x"}),
        ("x += 1; y = x", {"x"}),
        ("x = x + 1", {"x"}),
        ("x += 1", set()),  # nothing follows from it
        ("losses.append(1)", set()),
        ("losses.append(1); print(losses[-1])", {"losses"}),
        ("seen[3] = 1", set()),
        ("seen[3] = 1; y = seen[2]", {"seen"}),
        ("y = stack.pop()", {"stack"}),
        ("batch = next(batches)", {"batches"}),
        ("next(batches)", {"batches"}),
        ("out, hidden = model(x, hidden)", {"hidden"}),
        ("hidden = model(x, hidden.detach())", {"hidden"}),
        ("self.hidden = model(self.hidden)", {"self.hidden"}),
        ("state.mean.mul_(0.9).add_(x)\ny = state.mean", {"state.mean"}),
        ("x = mean.mul_(0.9)", {"mean"}),
        ("x = fresh(); x.mul_(2); y = x", set()),
        ("if loss < best:\n    best = loss", {"best"}),
        ("if step:\n    a = 1\nelse:\n    a = 2\ny = a", set()),
        ("if step:\n    a = 1\ny = a", {"a"}),
        ("for a in b:\n    c = a\ny = c", {"c"}),
        ("while n:\n    n -= 1", {"n"}),
        ("with step:\n    loss = model(x)\ny = loss", set()),
        ("with step as s:\n    y = s", set()),
        ("try:\n    a = f()\nexcept ValueError:\n    b = 1\ny = b", {"b"}),
        ("match step:\n    case 1:\n        a = 1\ny = a", {"a"}),
        ("y = [x for x in z]; x = 1; z = y", {"z"}),
        ("if (n := n + 1) > 3: pass", {"n"}),
        ("last = time.time(); y = last", set()),
        ("y = last; last = time.time()", set()),
        ("now = time.time()\nrate, last = 1 / (now - last), now", set()),
        ("def f():\n    return x\nx = 1", set()),
        ("x: int = 1; y = x", set()),
        ("a, *b = b", {"b"}),
        ("del x", set()),
    ],
)
def test_of_a_loop(body: str, carried: set[str]) -> None:
    assert of_loop(body) == carried


def test_the_innermost_loop_of_the_function_counts() -> None:
    tree = ast.parse(
        "for epoch in range(3):\n    for batch in batches:\n        train(batch)\n    def inner():\n        return 1\n"
    )
    inner, outer = loop_around(tree, 3), loop_around(tree, 1)
    assert isinstance(inner, ast.For) and ast.unparse(inner.target) == "batch"
    assert isinstance(outer, ast.For) and ast.unparse(outer.target) == "epoch"
    assert loop_around(tree, 5) is None
    assert loop_around(ast.parse("x = 1"), 1) is None


def test_of_a_class() -> None:
    tree = ast.parse(
        textwrap.dedent(
            """
            class Trainer:
                def step(self, x):
                    self.loss = self.model(x)
                    self.hidden = self.cell(x, self.hidden)
                    self.count += 1
                    self.average.mul_(0.9).add_(self.loss)
                    self.history.append(self.loss)
                    batch = next(self.batches)

                @staticmethod
                def other(): ...

            class Other:
                def step(self):
                    self.mine += 1
            """
        )
    )
    assert carried_by_class(tree, "Trainer") == {"hidden", "count", "average", "batches"}
    assert carried_by_class(tree, "Nobody") == frozenset()
