"""How the script's loop asks for its steps: a step may be handed out more than once, and a replacement begins in the
middle. So what goes along with the steps by counting (``zip``, ``enumerate``) would part from them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from flashrecovery.errors import RegistrationError

_COUNTING = frozenset(
    ("zip", "zip_longest", "enumerate", "islice", "map", "starmap", "product", "chain", "pairwise", "batched")
)


def check(loop: ast.For, place: str, is_steps: Callable[[str], bool]) -> None:
    """``loop`` is the one around the ``with step:``.

    Args:
        place: file and line, for the error.
        is_steps: whether the value of a name is what ``recovery.steps()`` has returned.

    Raises:
        RegistrationError: something else is taken along with each step.
    """
    for call in _calls(loop.iter):
        name = ast.unparse(call.func).rpartition(".")[2]
        if name in _COUNTING and any(_has_steps(argument, is_steps) for argument in call.args):
            raise RegistrationError(
                f"{place}: `for ... in {ast.unparse(loop.iter)}`: a step that failed is handed out again, and a "
                f"replacement begins with the step in which its predecessor died; {name}() knows nothing of that. "
                "Write `for step in recovery.steps(n):`, take the step's number from step.index, and batches by "
                "next(data) from data = recovery.data(loader)"
            )


def _has_steps(argument: ast.expr, is_steps: Callable[[str], bool]) -> bool:
    for node in ast.walk(argument):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "steps":
            return True
        if isinstance(node, (ast.Name, ast.Attribute)) and is_steps(ast.unparse(node)):
            return True
    return False


def _calls(node: ast.expr) -> Iterator[ast.Call]:
    return (found for found in ast.walk(node) if isinstance(found, ast.Call))
