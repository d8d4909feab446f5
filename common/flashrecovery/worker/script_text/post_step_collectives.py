"""Does the script communicate below its ``with step:`` block? Read from its text, before its first step.

A step that does needs a copy of the state before it, and the first evaluation of a job can be its thousandth step. What
is not found here (calls of libraries, of variables that have no value yet) is seen when it happens
(:mod:`flashrecovery.worker.script_checks.stray_collectives`).
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from flashrecovery.worker.preimport.own_files import FRAMEWORKS, is_own_file
from flashrecovery.worker.script_text.function_parts import shared_variables
from flashrecovery.worker.script_text.script_frames import frames, loop_at, tree_of

_COLLECTIVES = (
    frozenset(
        ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single")
    )
    | frozenset(
        ("broadcast", "broadcast_object_list", "gather", "gather_object", "recv", "reduce", "reduce_scatter", "send")
    )
    | frozenset(("gather_for_metrics", "reduce_scatter_tensor", "scatter", "scatter_object_list", "recv_object_list"))
)
_DEPTH = 5
_LIBRARIES = FRAMEWORKS - {"torch", "flashrecovery"}
_Names = Callable[[str], Any]


def communicates_below(frame: types.FrameType) -> str | None:
    """File and line of a collective below the block in whose first line ``frame`` is, or in a function that is called
    there; None: none is found."""
    reader = _Reader()
    for one in frames(frame):
        file, line = one.f_code.co_filename, one.f_lineno
        blocks = _blocks_like(file, line)
        for statement in _below(file, line):
            found = reader.read(statement, _names_in(one), file, _DEPTH, blocks)
            if found is not None:
                return found
        if loop_at(file, line) is not None:
            return None
    return None


def _below(file: str, line: int) -> Iterator[ast.stmt]:
    """What a function, or its outermost loop around ``line``, runs after the statement there."""
    tree = tree_of(file)
    if tree is None:
        return
    function = _function_at(tree, line)
    within = ast.walk(tree if function is None else function)
    loops = (n for n in within if isinstance(n, (ast.For, ast.While)) and n.lineno <= line <= _end(n))
    around: Any = next(loops, function)  # outer ones first
    yield from _after(getattr(around, "body", ()), line)


def _blocks_like(file: str, line: int) -> frozenset[ast.AST]:
    """The ``with`` statement in that line, and those that enter the same: a script may take its steps in several
    places, and nothing in one of them is below another one."""
    nodes = [n for n in ast.walk(tree_of(file) or ast.Module([], [])) if isinstance(n, ast.With)]
    entered = {ast.dump(item.context_expr) for n in nodes if n.lineno == line for item in n.items}
    return frozenset(n for n in nodes if any(ast.dump(item.context_expr) in entered for item in n.items))


def _function_at(tree: ast.AST | None, line: int) -> ast.AST | None:
    """The innermost function around ``line``."""
    found = None
    for node in ast.walk(tree) if tree is not None else ():  # outer ones first
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno <= line <= _end(node):
            found = node
    return found


def _end(node: ast.AST) -> int:
    return getattr(node, "end_lineno", None) or 0


def _after(body: Iterable[ast.stmt], line: int) -> Iterator[ast.stmt]:
    statements = iter(body)
    for statement in statements:
        if statement.lineno <= line <= _end(statement):
            for name in ("body", "orelse", "finalbody"):
                yield from _after(getattr(statement, name, ()), line)
            yield from statements


def _names_in(frame: types.FrameType) -> _Names:
    return lambda name: frame.f_locals.get(name, frame.f_globals.get(name))


def _names_of(function: types.FunctionType, owner: object) -> _Names:
    code = function.__code__
    own = shared_variables(function)
    if owner is not None and code.co_argcount:
        own[code.co_varnames[0]] = owner
    return lambda name: own.get(name, function.__globals__.get(name))


class _Reader:
    """Reads each function once."""

    def __init__(self) -> None:
        self._seen: set[types.CodeType] = set()

    def read(
        self, node: ast.AST, names: _Names, file: str, depth: int, blocks: frozenset[ast.AST] = frozenset()
    ) -> str | None:
        for call in _outside(node, blocks):
            if not isinstance(call, ast.Call):
                continue
            owner, value = _resolved(call.func, names)
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if _communicates(name, owner, value):
                return f"{file}:{call.lineno}"
            found = self._within(value, owner, depth - 1)
            if found is not None:
                return found
        return None

    def _within(self, value: object, owner: object, depth: int) -> str | None:
        function = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else None
        if not isinstance(function, types.FunctionType) or depth < 0 or function.__code__ in self._seen:
            return None
        code = function.__code__
        self._seen.add(code)
        if not is_own_file(code.co_filename) or function.__module__.partition(".")[0] in FRAMEWORKS:
            return None
        node = _function_at(tree_of(code.co_filename), _last_line(code))
        return None if node is None else self.read(node, _names_of(function, owner), code.co_filename, depth)


def _outside(node: ast.AST, blocks: frozenset[ast.AST]) -> Iterator[ast.AST]:
    """The node and all that is in it, without what is in ``blocks``."""
    if node in blocks:
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside(child, blocks)


def _last_line(code: types.CodeType) -> int:
    """A line of the function that is in none of its decorators."""
    return max((line for *_, line in code.co_lines() if line is not None), default=code.co_firstlineno)


def _communicates(name: str, owner: object, value: object) -> bool:
    if isinstance(value, torch.nn.parallel.DistributedDataParallel):
        return bool(value.will_sync_module_buffers())  # also in evaluation mode
    if name not in _COLLECTIVES and getattr(value, "__name__", "") not in _COLLECTIVES:
        return False
    module = str(getattr(value, "__module__", None) or "")
    return module.startswith("torch.distributed") or type(owner).__module__.partition(".")[0] in _LIBRARIES


def _resolved(node: ast.expr, names: _Names) -> tuple[object, object]:
    """What a dotted name is of, and its value; None where that is not known. No code of the script's runs."""
    if isinstance(node, ast.Name):
        value = names(node.id)
        return getattr(value, "__self__", None) if isinstance(value, types.MethodType) else None, value
    if not isinstance(node, ast.Attribute):
        return None, None
    _, owner = _resolved(node.value, names)
    if owner is None or isinstance(owner, types.ModuleType):
        return None, vars(owner).get(node.attr) if owner is not None else None
    value = inspect.getattr_static(owner, node.attr, None)
    if value is None:
        modules: Mapping[str, Any] = getattr(owner, "__dict__", {}).get("_modules") or {}
        value = modules.get(node.attr)
    return owner, value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
