"""What a step of a script's own loop takes from things that cannot be read again: queues, files, sockets, and iterators
by other means than ``next()``.

What a ``for`` loop runs over, and what ``next()`` is called on, is led back (:mod:`.loop_data`). A call such as
``todo.get()`` or ``lines.readline()`` in the body is the script's own: in a replacement, which has run the script from
its first line, it would give the first element again.
"""

from __future__ import annotations

import ast
import builtins
import io
import queue
import socket
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from flashrecovery.worker.own_loops.rewrite import called, called_from, calls_in, own_nodes
from flashrecovery.worker.script_text.script_frames import resolve

_TAKING = frozenset(("get", "get_nowait", "read", "readline", "readlines", "recv"))
_RESUMING = frozenset(("send", "throw"))
"""Methods by which a generator goes on, besides ``next()``, which is led back."""
_LEAVING = frozenset(
    ("next", "iter", "isinstance", "type", "id", "hash", "repr", "str", "print", "callable", "bool")
) | {
    *("hasattr", "getattr", "setattr", "vars", "dir"),
}
"""Functions of Python that take nothing from an iterator; what ``next()`` takes is led back."""


def taken_in(
    frame: types.FrameType, tree: ast.AST, line: int, *, steps: bool = True, remade: Collection[str] = ()
) -> str:
    """Line and text of such a call in the loop at ``line``, or in a function of the file that it calls, with the class
    of what it takes from; "" if there is none. Of a loop of ``steps`` also that of a loop in it over an iterator that
    is not the round's own. ``frame``: of the function of the loop. ``remade``: variables that each round sets."""
    variables = {**vars(builtins), **frame.f_globals, **frame.f_locals}
    places = list(_places(tree, line))
    for place in places:
        own = frozenset(remade) if isinstance(place, (ast.For, ast.While)) else _locals_of(place)
        run_over = {node for loop in own_nodes(place) if isinstance(loop, ast.For) for node in ast.walk(loop.iter)}
        for call in calls_in(place):
            source = _taken_by(call, variables, own, call in run_over)
            if source is not None:
                return f"line {call.lineno}: `{ast.unparse(call)}` takes from a {type(source).__name__}"
    for text in (text for place in places if steps for text in _run_over_in(place)):
        for node in (node for node in ast.walk(text) if isinstance(node, (ast.Name, ast.Attribute))):
            source = resolve(variables, ast.unparse(node))
            if isinstance(source, Iterator):
                return f"line {text.lineno}: `{ast.unparse(text)}` takes from a {type(source).__name__}"
    return ""


def _locals_of(place: ast.AST) -> frozenset[str]:
    """Names that a function has itself, which are not those of the function with the loop."""
    if not isinstance(place, ast.FunctionDef):
        return frozenset()
    names = {node.arg for node in ast.walk(place.args) if isinstance(node, ast.arg)} - {"self"}
    return frozenset(
        names | {node.id for node in own_nodes(place) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    )


def _taken_by(call: ast.Call, variables: Mapping[str, Any], own: Collection[str], is_run_over: bool) -> object | None:
    """What such a call takes from; None if it is none of them. ``own``: names that lead to other things in the place of
    the call. ``is_run_over``: a loop runs over its result."""
    if isinstance(call.func, ast.Attribute):
        attribute, place = call.func.attr, ast.unparse(call.func.value)
        source = resolve(variables, place)
        if attribute in _TAKING and _gives_once(source):
            return source
        goes_on = (attribute in _RESUMING and isinstance(source, Iterator)) or (
            attribute == "spawn" and _counts_children(source)
        )
        if goes_on and place.partition(".")[0] not in own:
            return source
    if is_run_over or called(call) in _LEAVING or not _is_pythons(resolve(variables, ast.unparse(call.func))):
        return None
    # list(islice(batches, 3)), dict(zip(names, values)): no function of the script's goes on with the iterator
    for argument in (node for node in call.args if isinstance(node, (ast.Name, ast.Attribute))):
        path = ast.unparse(argument)
        source = resolve(variables, path)
        if isinstance(source, Iterator) and not isinstance(source, io.IOBase) and path.partition(".")[0] not in own:
            return source
    return None


def _is_pythons(function: object) -> bool:
    """Whether it is a function or class of Python's that is written in C: no text shows what it takes."""
    written_in_c = isinstance(function, (type, types.BuiltinFunctionType))
    return written_in_c and function.__module__ in ("builtins", "itertools", "collections", "_collections")


def _counts_children(source: object) -> bool:
    """Whether it counts the children that it has spawned, which cannot be set back."""
    return type(source).__module__.partition(".")[0] == "numpy" and hasattr(source, "spawn")


def _run_over_in(place: ast.AST) -> Iterator[ast.expr]:
    """What the loops and comprehensions in ``place`` run over."""
    for node in own_nodes(place):
        if isinstance(node, ast.For) and node is not place:
            yield node.iter
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            yield from (part.iter for part in node.generators)


def _places(tree: ast.AST, line: int) -> Iterator[ast.AST]:
    """The loop, and the functions of the file that it calls, one after the other."""
    nodes = list(ast.walk(tree))
    functions: dict[str, list[ast.AST]] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
    for loop in (node for node in nodes if isinstance(node, (ast.For, ast.While)) and node.lineno == line):
        yield loop
        yield from called_from(loop, functions)


def _gives_once(source: object) -> bool:
    processes = sys.modules.get("multiprocessing.queues")
    queues = (processes.Queue, processes.SimpleQueue) if processes is not None else ()
    if isinstance(source, io.IOBase):
        return not source.closed and source.readable()
    return isinstance(source, (queue.Queue, queue.SimpleQueue, socket.socket, *queues))
