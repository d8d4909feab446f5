"""Does a script itself deal with a file or folder that is there already? By its text; pure."""

from __future__ import annotations

import ast

_CAUGHT = frozenset({"FileExistsError", "OSError", "IOError", "EnvironmentError", "Exception", "BaseException"})


def catches_existing(tree: ast.AST, line: int) -> bool:
    """Whether this line is in a ``try`` or a ``with suppress(...)`` that catches FileExistsError: there an existing
    file means that another process was faster."""
    return any(_around(node, line) for node in ast.walk(tree))


def _around(node: ast.AST, line: int) -> bool:
    if isinstance(node, ast.Try):
        caught = [handler.type for handler in node.handlers]
        return _within(node.body, line) and any(kind is None or _names(kind) for kind in caught)
    if isinstance(node, (ast.With, ast.AsyncWith)):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        suppressed = [a for call in calls if ast.unparse(call.func).endswith("suppress") for a in call.args]
        return _within(node.body, line) and any(_names(kind) for kind in suppressed)
    return False


def _within(body: list[ast.stmt], line: int) -> bool:
    return bool(body) and body[0].lineno <= line <= (body[-1].end_lineno or body[-1].lineno)


def _names(kind: ast.expr) -> bool:
    return any(ast.unparse(part).rpartition(".")[2] in _CAUGHT for part in ast.walk(kind) if isinstance(part, ast.expr))
