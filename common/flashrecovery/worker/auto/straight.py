"""Takes ``break`` and ``continue`` out of a loop of steps that has one of epochs around it. Pure.

Both loops become one, which they would leave, or go on with, in another place::

    for x, y in loader:                          for x, y in loader:
        if skipped(x):                               left = False
            continue                                 if not (skipped(x)):
        train(x, y)                                      train(x, y)
        if seen >= limit:                                if seen >= limit:
            print(seen)                                      print(seen)
            break                                            left = True
        log(seen)                                        else:
                                                             log(seen)
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashrecovery.worker.own_loops.rewrite import PlainLoop


class NotByHand(Exception):
    """``line``: of the script, where what cannot be written by hand mechanically is."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line = line


class ScriptLine(NamedTuple):
    """``origin``: the number of the line that it comes from. ``branches``: what follows may be done or not."""

    origin: int
    text: str
    branches: bool = False


@dataclass(frozen=True)
class Straight:
    """Attributes:
    lines: of the file's new text.
    leaves: the loop was left by ``break``, and sets a variable for it.
    """

    lines: Sequence[ScriptLine]
    leaves: bool

    @property
    def text(self) -> str:
        return "".join(f"{line.text}\n" for line in self.lines)

    @property
    def branches(self) -> frozenset[int]:
        """Lines of the new text that have an ``if`` in the place of a jump's."""
        return frozenset(number for number, line in enumerate(self.lines, 1) if line.branches)

    def origin(self, number: int) -> int:
        return self.lines[min(number, len(self.lines)) - 1].origin


def jumps(body: Iterable[ast.AST]) -> Iterator[ast.Break | ast.Continue]:
    """``break`` and ``continue`` of the loop with this body."""
    for node in body:
        if isinstance(node, (ast.Break, ast.Continue)):
            yield node
        elif not isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            yield from jumps(ast.iter_child_nodes(node))


def word_of(jump: ast.Break | ast.Continue) -> str:
    return "break" if isinstance(jump, ast.Break) else "continue"


def straight(text: str, loop: PlainLoop, left: str) -> Straight:
    """``left``: the variable. The new loop begins at the line of the old one. Raises NotByHand."""
    old = [ScriptLine(number, line) for number, line in enumerate(text.splitlines(), 1)]
    first = ((loop.iter if isinstance(loop, ast.For) else loop.test).end_lineno or loop.lineno) + 1
    end = loop.end_lineno or first
    found = [_Jump.of(one) for one in loop.body if any(jumps([one]))]
    indent = _prefix(old[loop.body[0].lineno - 1].text)
    rewriter = _Rewriter(old, end, left, indent[len(_prefix(old[loop.lineno - 1].text)) :])
    body = rewriter.lines(first, found)
    leaves = any(isinstance(one.jump, ast.Break) for one in found)
    above = [ScriptLine(loop.lineno, f"{indent}{left} = False")] if leaves else []
    return Straight([*old[: first - 1], *above, *body, *old[end:]], leaves)


class _Jump(NamedTuple):
    branch: ast.If
    jump: ast.Break | ast.Continue

    @staticmethod
    def of(statement: ast.stmt) -> _Jump:
        """Raises NotByHand."""
        inner = [*jumps([statement])]
        jump = inner[0]
        if isinstance(statement, ast.If) and not statement.orelse and inner == statement.body[-1:]:
            return _Jump(statement, jump)
        raise NotByHand(
            jump.lineno,
            f"`{word_of(jump)}` in a loop of steps with one of epochs around it, and not as the end of an `if` without "
            "`else` in this loop: both loops become one",
        )


@dataclass(frozen=True)
class _Rewriter:
    old: Sequence[ScriptLine]
    end: int
    left: str
    unit: str

    def lines(self, first: int, found: Sequence[_Jump]) -> list[ScriptLine]:
        """Those from ``first`` to the end of the loop."""
        if not found:
            return [*self.old[first - 1 : self.end]]
        branch, jump = found[0]
        rest = self.lines((branch.end_lineno or 0) + 1, found[1:])
        moved = [ScriptLine(one.origin, self.unit + one.text if one.text.strip() else "", one.branches) for one in rest]
        is_empty = all(not one.text.strip() or one.text.strip().startswith("#") for one in rest)
        above, header = self.old[first - 1 : branch.lineno - 1], branch.lineno
        indent = _prefix(self.old[header - 1].text)
        if isinstance(jump, ast.Continue) and len(branch.body) == 1 and not is_empty:
            return [*above, ScriptLine(header, f"{indent}if not ({ast.unparse(branch.test)}):", True), *moved]
        end = f"{self.left} = True" if isinstance(jump, ast.Break) else "pass" if len(branch.body) == 1 else ""
        if branch.body[0].lineno == header:  # all of it in one line
            if len(branch.body) > 1:
                raise NotByHand(header, "several statements in one line of the loop")
            own = [ScriptLine(header, f"{indent}if {ast.unparse(branch.test)}:", True)]
        else:
            own = [ScriptLine(header, self.old[header - 1].text, True), *self.old[header : jump.lineno - 1]]
        if end:
            own.append(ScriptLine(jump.lineno, f"{indent}{self.unit}{end}"))
        below = rest if is_empty else [ScriptLine(jump.lineno, f"{indent}else:"), *moved]
        return [*above, *own, *below]


def _prefix(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
