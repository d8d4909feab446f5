"""Does a script make a name of the time that it asks for, or does it measure with it? By its text; pure.

A name (``f"runs/{int(time.time())}"``, ``now.strftime(...)``) has to be the same in a replacement. What is subtracted
or compared has to be the time of now: with an old one a script would wait for hours, or give up at once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

_TEXT_METHODS = frozenset({"strftime", "isoformat", "ctime", "format", "join"})
_TEXT_FUNCTIONS = frozenset({"str", "repr", "format", "hex", "strftime", "ctime", "asctime"})
_SAME_TIME = frozenset({"int", "round", "float", "localtime", "gmtime", "fromtimestamp"})
_PARTS = frozenset({"replace", "astimezone", "date", "timestamp", "timetuple"}) | frozenset(
    {"year", "month", "day", "hour", "minute", "second", "microsecond"}
)
_SHOWN = frozenset({"print", "write", "log", "debug", "info", "warning", "error", "critical", "exception"})
"""Functions that print or log a time, where the current time is right."""
_DEPTH = 8
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)


class ClockNames:
    """The text of one file."""

    def __init__(self, tree: ast.AST) -> None:
        self._parents: dict[ast.AST, ast.AST] = {}
        self._calls: dict[int, list[ast.Call]] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
            if isinstance(node, ast.Call):
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    self._calls.setdefault(line, []).append(node)

    def names(self, line: int, function: str) -> bool:
        """Whether every call of ``function`` (``time``, ``now``, ``strftime``, ...) in this line becomes part of a
        name, or seeds random numbers."""
        calls = [call for call in self._calls.get(line, ()) if name_of(call.func) == function]
        return bool(calls) and all(self._is_text(call, function in _TEXT_FUNCTIONS, _DEPTH) for call in calls)

    def _is_text(self, node: ast.AST, text: bool, depth: int) -> bool:
        """Whether the value of ``node`` ends up in a text that is not shown. ``text``: it is one already."""
        parent = self._parents.get(node)
        if depth == 0 or parent is None:
            return False
        if isinstance(parent, ast.keyword):
            return self._is_text(parent, text, depth)
        if isinstance(parent, ast.Call) and node is not parent.func:
            return self._in_call(parent, text, depth)
        if isinstance(parent, ast.Attribute):
            text = text or parent.attr in _TEXT_METHODS
            return (text or parent.attr in _PARTS) and self._is_text(parent, text, depth - 1)
        if isinstance(parent, ast.Call):
            return self._is_text(parent, text, depth)
        if isinstance(parent, (ast.FormattedValue, ast.JoinedStr)):
            return self._is_text(parent, True, depth)
        if isinstance(parent, ast.BinOp):
            other = parent.right if node is parent.left else parent.left
            text = text or (isinstance(parent.op, ast.Mod) and isinstance(other, ast.Constant) and node is parent.right)
            return (text or _is_constant(other)) and self._is_text(parent, text, depth)
        if text:
            return not isinstance(parent, ast.expr) or self._is_text(parent, True, depth)
        if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node is parent.value:
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            return len(targets) == 1 and isinstance(targets[0], ast.Name) and self._all_uses(targets[0], depth - 1)
        return False

    def _in_call(self, call: ast.Call, text: bool, depth: int) -> bool:
        name = name_of(call.func)
        if name in _SHOWN:
            return False
        if "seed" in name.lower():
            return True
        text = text or name in _TEXT_FUNCTIONS | _TEXT_METHODS
        if not text and name not in _SAME_TIME:
            return False
        return self._is_text(call, text, depth - 1)

    def _all_uses(self, target: ast.Name, depth: int) -> bool:
        scope: ast.AST = target
        while not isinstance(scope, _SCOPES):
            scope = self._parents[scope]
        uses = list(_loads(scope, target.id))
        return bool(uses) and all(self._is_text(use, False, depth) for use in uses)


def name_of(function: ast.expr) -> str:
    """The last part of a dotted name; "" if it has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _loads(scope: ast.AST, name: str) -> Iterator[ast.Name]:
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node


def _is_constant(node: ast.expr) -> bool:
    kinds = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    return all(isinstance(part, kinds) for part in ast.walk(node))
