"""The functions of a script that are running, their variables, and what their text says of them."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flashrecovery.errors import RegistrationError
from flashrecovery.worker.local_state.fingerprints import PLAIN, attributes_of
from flashrecovery.worker.preimport.own_files import FRAMEWORKS, is_own_file
from flashrecovery.worker.script_text.data_flow import AnyLoop
from flashrecovery.worker.script_text.loop_carried import (
    CarriedByClass,
    LoopCarried,
    carried_by_class,
    carried_by_loop,
    loop_around,
)

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
                f"{place}: `for ... in {ast.unparse(loop.iter)}`: a step that failed is yielded again, and a "
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


STATIC = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
"""What a script's variables hold besides its state."""
_FRAMES = 8
_HERE = os.path.dirname(__file__)


def check_loop(frame: types.FrameType) -> None:
    """``frame``: where the ``with step:`` is. Raises RegistrationError if its loop takes something along with each step
    that would part from the steps."""
    around = loop_in(frame)
    if around is not None:
        one, loop = around
        variables = variables_of(one)
        check(loop, place_of(one, loop.lineno), lambda name: gives_steps(resolve(variables, name)))


def frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The script's own, from ``frame`` outwards; of a framework's code none."""
    count = 0
    while frame is not None and count < _FRAMES:
        module = str(frame.f_globals.get("__name__", ""))
        if is_own_file(frame.f_code.co_filename) and module.partition(".")[0] not in FRAMEWORKS:
            count += 1
            yield frame
        frame = frame.f_back


def loop_in(frame: types.FrameType) -> tuple[types.FrameType, ast.For] | None:
    """The innermost loop around ``frame``'s line, in it or in a function that has called it, if it is a ``for``."""
    for one in frames(frame):
        loop = loop_at(one.f_code.co_filename, one.f_lineno)
        if loop is not None:
            return (one, loop) if isinstance(loop, ast.For) else None
    return None


def local_to_call(frame: types.FrameType) -> frozenset[str]:
    """The variables of a function, called in each step, that are new in each call."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return frozenset(code.co_varnames[count:])


def variables_of(frame: types.FrameType) -> dict[str, Any]:
    """The variables of a function: its own, and the global ones that it names."""
    names = frame.f_code.co_names
    used = {name: frame.f_globals[name] for name in names if name in frame.f_globals}
    own = frame.f_locals if frame.f_locals is not frame.f_globals else {}
    return {name: v for name, v in {**used, **own}.items() if not isinstance(v, STATIC)}


def set_elsewhere(frame: types.FrameType) -> dict[str, Any]:
    """Numbers and the like that other functions can set (``global``, ``nonlocal``), and the own loop does not."""
    if frame.f_locals is frame.f_globals:
        return {}
    own = {name: frame.f_locals[name] for name in frame.f_code.co_cellvars if name in frame.f_locals}
    by_loop = carried_by_loop_at(frame.f_code.co_filename, frame.f_lineno).set_here
    found = {**{name: value for name, value in frame.f_globals.items() if not name.startswith("__")}, **own}
    return {name: v for name, v in found.items() if isinstance(v, PLAIN) and name not in by_loop}


def resolve(variables: Mapping[str, Any], path: str) -> object:
    """The value of a dotted name; itself as a module, which is never plain, if it has none."""
    first, *rest = path.split(".")
    value = variables.get(first, sys)
    for name in rest:
        value = attributes_of(value).get(name, sys)
    return value


def gives_steps(value: object) -> bool:
    """What ``recovery.steps()`` returns, or another generator of ours."""
    return isinstance(value, types.GeneratorType) and os.path.dirname(value.gi_code.co_filename) == _HERE


def texts_of(frame: types.FrameType | None) -> list[str]:
    """The files of the script's functions that are running; those that can be read."""
    found = []
    for file in sorted({one.f_code.co_filename for one in frames(frame)}):
        try:
            found.append(Path(file).read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
    return found


@functools.lru_cache(maxsize=64)
def tree_of(file: str) -> ast.AST | None:
    return parsed(file)


def parsed(file: str) -> ast.AST | None:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):  # a notebook's cell, or code that was made by a program
        return None


@functools.lru_cache(maxsize=64)
def loop_at(file: str, line: int) -> AnyLoop | None:
    tree = tree_of(file)
    return None if tree is None else loop_around(tree, line)


@functools.lru_cache(maxsize=64)
def carried_by_loop_at(file: str, line: int) -> LoopCarried:
    tree, loop = tree_of(file), loop_at(file, line)
    return LoopCarried() if tree is None or loop is None else carried_by_loop(tree, loop)


@functools.lru_cache(maxsize=1024)
def carried_by_class_in(file: str, name: str) -> CarriedByClass:
    tree = tree_of(file)
    return CarriedByClass() if tree is None else carried_by_class(tree, name)


def carried_by_own_classes(kind: type) -> CarriedByClass:
    """Of a class and of those that it is made of, as far as they are the script's own."""
    own = [one for one in kind.__mro__ if is_own(one)]
    return CarriedByClass.together([carried_by_class_in(file_of(one), one.__name__) for one in own])


def place_of(frame: types.FrameType, line: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{line}"


def is_own(kind: type) -> bool:
    """Whether the script defines this class, and no installed package."""
    return kind.__module__.partition(".")[0] not in FRAMEWORKS and is_own_file(file_of(kind))


def file_of(kind: type) -> str:
    return str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
