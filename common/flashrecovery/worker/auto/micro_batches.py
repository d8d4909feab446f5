"""Micro-batches of which every n-th takes the optimizer's step, from a loop's text. Pure.

The number of the round says when::

    for i, (x, y) in enumerate(loader):
        model(x, y).backward()
        if (i + 1) % 4 == 0 or i + 1 == len(loader):
            optimizer.step()
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from flashrecovery.worker.own_loops.rewrite import PlainLoop


@dataclass(frozen=True)
class Accumulated:
    """Attributes:
    branch: the ``if`` with the step in it.
    number: the variable with the number of the round.
    first: that of the first round.
    every: expression of how many micro-batches make a step.
    count: expression of how many rounds there are.
    rest: the last round takes a step, too, with fewer micro-batches.
    """

    branch: ast.If
    number: str
    first: int
    every: str
    count: str
    rest: bool


def accumulated(loop: PlainLoop, takes_step: Callable[[ast.AST], bool]) -> Accumulated | None:
    """None if each round takes a step, or if its number does not say which ones do."""
    taking = [statement for statement in loop.body if takes_step(statement)]
    branch = taking[0] if len(taking) == 1 else None
    numbered = _numbered(loop)
    if not isinstance(branch, ast.If) or branch.orelse or takes_step(branch.test) or numbered is None:
        return None
    number, first, count = numbered
    test = _meant(branch.test, loop.body[: loop.body.index(branch)])
    every, rest = "", False
    for part in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]:
        found = _every(part, number, first)
        if found and not every:
            every = found
        elif _is_last(part, number, first, count):
            rest = True
        else:
            return None
    return Accumulated(branch, number, first, every, count, rest) if every else None


def _numbered(loop: PlainLoop) -> tuple[str, int, str] | None:
    """The variable with the number of the round, the first one, and how many there are."""
    if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call) or not isinstance(loop.iter.func, ast.Name):
        return None
    call, target, function = loop.iter, loop.target, loop.iter.func.id
    if function == "range" and len(call.args) == 1 and isinstance(target, ast.Name):
        return target.id, 0, ast.unparse(call.args[0])
    if function != "enumerate" or not isinstance(target, ast.Tuple) or len(target.elts) != 2 or call.keywords:
        return None
    begin = ast.literal_eval(call.args[1]) if len(call.args) == 2 and isinstance(call.args[1], ast.Constant) else 0
    number = target.elts[0]
    if not isinstance(number, ast.Name) or begin not in (0, 1) or len(call.args) != (2 if begin else len(call.args)):
        return None
    return number.id, begin, f"len({ast.unparse(call.args[0])})"


def _meant(test: ast.expr, above: list[ast.stmt]) -> ast.expr:
    """What the variable ``test`` is set to in the round, or ``test`` itself."""
    if not isinstance(test, ast.Name):
        return test
    stored = [
        node
        for statement in above
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and node.id == test.id and isinstance(node.ctx, ast.Store)
    ]
    for statement in above:
        if isinstance(statement, ast.Assign) and statement.targets == stored:
            return statement.value
    return test


def _every(test: ast.expr, number: str, first: int) -> str:
    """n of ``(number + 1) % n == 0``, ``not (number + 1) % n`` or ``number % n == n - 1``; "" of something else."""
    equals = "0"
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        divided: ast.expr = test.operand
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        divided, equals = test.left, ast.unparse(test.comparators[0])
    else:
        return ""
    if not isinstance(divided, ast.BinOp) or not isinstance(divided.op, ast.Mod):
        return ""
    every = ast.unparse(divided.right)
    one_less = [f"{every} - 1"]
    if isinstance(divided.right, ast.Constant) and isinstance(divided.right.value, int):
        one_less.append(str(divided.right.value - 1))
    more = _more_than(divided.left, number)
    if more == 1 - first and equals == "0":
        return every
    return every if more == -first and equals in one_less else ""


def _is_last(test: ast.expr, number: str, first: int, count: str) -> bool:
    """``number + 1 == count``, ``number == count - 1``."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    more, other = _more_than(test.left, number), test.comparators[0]
    if more is None:
        more, other = _more_than(other, number), test.left
    text = ast.unparse(other)
    return (more == 1 - first and text == count) or (more == -first and text == f"{count} - 1")


def _more_than(node: ast.expr, number: str) -> int | None:
    """What is added to the number; None if something else is done with it."""
    if isinstance(node, ast.Name) and node.id == number:
        return 0
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add) or not isinstance(node.right, ast.Constant):
        return None
    more, named = node.right.value, isinstance(node.left, ast.Name) and node.left.id == number
    return more if named and isinstance(more, int) else None
