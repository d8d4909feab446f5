"""Which variables a loop, or the methods of a class, carry from one round to the next."""

from __future__ import annotations

import ast
import textwrap

import pytest

from flashrecovery.worker.script_text.loop_carried import LoopCarried, carried_by_class, carried_by_loop, loop_around


def read_loop(body: str, above: str = "pass") -> LoopCarried:
    def indented(text: str, by: int) -> str:
        return textwrap.indent(textwrap.dedent(text).strip(), by * " ")

    source = f"def main():\n{indented(above, 4)}\n    for step in recovery.steps(10):\n{indented(body, 8)}\n"
    tree = ast.parse(source)
    loop = loop_around(tree, source[: source.index("recovery.steps")].count("\n") + 1)
    assert loop is not None, source
    return carried_by_loop(tree, loop)


def of_loop(body: str, above: str = "pass") -> set[str]:
    return set(read_loop(body, above).names)


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
        ("if first:\n    a = 1\nif not first:\n    a = 2\ny = a", set()),
        ("if not first:\n    a = 1\nif first:\n    a = 2\ny = a", set()),
        ("if k % 2 == 0:\n    a = 1\nif k % 2 != 0:\n    a = 2\ny = a", set()),
        ("if k < 2 and done:\n    a = 1\nif k >= 2 and not done:\n    a = 2\ny = a", {"a"}),
        ("if first:\n    a = 1\nfirst = f()\nif not first:\n    a = 2\ny = a", {"a", "first"}),
        ("if first:\n    a = 1\nif not second:\n    a = 2\ny = a", {"a"}),
        ("if not first:\n    y = a\nif first:\n    a = 2", {"a"}),
        ("if acc.sync_gradients:\n    n = clip()\ny = n", set()),
        ("for m in range(4):\n    if self.acc.sync_gradients:\n        n = clip()\ny = n", set()),
        ("if engine.is_gradient_accumulation_boundary():\n    n = clip()\ny = n", set()),
        ("y = n\nif acc.sync_gradients:\n    n = clip()", {"n"}),
        ("if not acc.sync_gradients:\n    n = clip()\ny = n", {"n"}),
        ("for a in b:\n    c = a\ny = c", set()),
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
        # an inner loop has a first round
        ("for _ in range(2):\n    loss = f()\nprint(loss)", set()),
        ("for x, y in zip(a.chunk(2), b.chunk(2)):\n    loss = f()\nprint(loss)", set()),
        ("k = 0\nwhile k < 2:\n    loss = f()\n    k += 1\nprint(loss)", set()),
        ("while True:\n    try:\n        loss = f()\n        break\n    except E:\n        pass\nprint(loss)", set()),
        ("total = 0\nfor x in xs:\n    total += x\nprint(total)", set()),
        ("found = None\nfor x in xs:\n    if x: found = x\nprint(found)", set()),
        # what leaves the round, or is known under a condition that is asked again
        ("if done:\n    continue\na = 1\nprint(a)", set()),
        ("if bad:\n    best = 3\n    break\nprint(best)", set()),
        ("try:\n    loss = f()\nexcept RuntimeError:\n    continue\nprint(loss)", set()),
        ("try:\n    loss = f()\nexcept RuntimeError:\n    pass\nprint(loss)", {"loss"}),
        ("try:\n    x = next(it)\nexcept StopIteration:\n    it = iter(l)\n    x = next(it)\nprint(x)", {"it"}),
        ("try:\n    x = 1\nfinally:\n    n = n + 1", {"n"}),
        ("if due:\n    m = f()\nx()\nif due:\n    print(m)", set()),
        ("if due and rank == 0:\n    m = f()\nif due and rank == 0 and more:\n    print(m)", set()),
        ("if due:\n    m = f()\ndue = g()\nif due:\n    print(m)", {"m", "due"}),
        ("if due:\n    m = f()\nif other:\n    print(m)", {"m"}),
        ("match a:\n    case 1:\n        z = 1\n    case _:\n        z = 2\nprint(z)", set()),
        # set by a method, or as a whole
        ("buf.zero_()\nbuf.add_(x)\nprint(buf)", set()),
        ("print(buf)\nbuf.zero_()", {"buf"}),
        ("gen.manual_seed(step.index)\ny = rand(gen)", set()),
        ("grads[:] = f()\nprint(grads)", set()),
        ("grads[:2] = f()\nprint(grads)", {"grads"}),
        ("x = prev\ndel prev\nprev = 1", {"prev"}),
        ("x = prev\nprev = 1\ndel prev", set()),
        # expressions with their own order
        ("y = [last := x for x in z]\nprint(last)", set()),
        ("print(last)\ny = [last := x for x in z]", {"last"}),
        ("a = b if (b := c) else 0", set()),
        ("a = b if (b := b + 1) else 0", {"b"}),
        ("rate = 1 / (timer() - last); last = timer()", set()),
        ("state = replace(state, n=state.n + 1)", {"state"}),
        ("state.n += 1\nprint(state.n)", {"state.n"}),
        ("table = {**table, step: 1}", {"table"}),
        ("mean = mean * 0.9 + x * 0.1 if mean is not None else x", {"mean"}),
        ("a, b = b, a", {"a", "b"}),
        ("with torch.no_grad():\n    ema.mul_(0.9).add_(p)\nx = ema", {"ema"}),
    ],
)
def test_of_a_loop(body: str, carried: set[str]) -> None:
    assert of_loop(body) == carried


@pytest.mark.parametrize(
    ("above", "body", "carried"),
    [
        ("c = 0", "for a in b:\n    c = a\ny = c", {"c"}),  # if b is empty, it is what it was
        ("c = 0", "for a in range(2):\n    c = a\ny = c", set()),
        ("c = 0", "for a in batch.split(2):\n    c = a\ny = c", set()),
        ("def work():\n    return last", "work(); last = 1", {"last"}),
        ("def work():\n    nonlocal last\n    last = last + 1", "work(); print(last)", {"last"}),
        ("def work():\n    nonlocal last\n    last = 5", "work(); print(last)", set()),
        ("def work():\n    last = 5\n    return last", "work(); print(last); last = 1", {"last"}),
        ("def work(x):\n    return work(x - 1) if x else last", "y = work(3); last = y", {"last"}),
        ("def closure():\n    nonlocal loss\n    loss = f()", "opt.step(closure); print(loss)", set()),
        ("pass", "x = max(xs, key=lambda v: v - best); best = x", {"best"}),
        ("pass", "def inner():\n    return last\ninner()\nlast = 1", {"last"}),
        ("pass", "def inner(last):\n    return last\ninner(1)\nlast = 1", set()),
    ],
)
def test_of_a_loop_with_what_stands_above_it(above: str, body: str, carried: set[str]) -> None:
    assert of_loop(body, above) == carried


def test_what_follows_from_the_number_of_the_round_alone() -> None:
    body = """
        n += 1
        m = 2 * n
        if m > k:
            k = m
        print(m, k)
        best = min(best, float(loss))
        loss = engine.train_batch(data)
        if loss < low:
            low = n
        self.calls.append(n)
        print(self.calls)
    """
    found = read_loop(body)
    assert found.names == {"n", "k", "best", "loss", "low", "self.calls"}
    assert found.counted == {"n", "k"}


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

            class Third:
                def prepare(self):
                    self.best = Best()

                def step(self):
                    self.batch = Batch()
                    self.batch.size = 1
                    self.best.count += self.batch.size
            """
        )
    )
    assert carried_by_class(tree, "Trainer").names == {"hidden", "count", "average", "batches"}
    assert carried_by_class(tree, "Trainer").remade == {"loss"}
    assert carried_by_class(tree, "Third").remade == {"batch"}, "that of another object is not made in each step"
    assert carried_by_class(tree, "Nobody").names == frozenset()
