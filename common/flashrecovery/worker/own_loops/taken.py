"""What a step of a script's own loop takes from things that cannot be read again: queues, files, sockets.

What a ``for`` loop runs over, and what ``next()`` is called on, is led back (:mod:`.loop_data`). A call such as
``todo.get()`` or ``lines.readline()`` in the body is the script's own: in a replacement, which has run the script from
its first line, it would give the first element again.
"""

from __future__ import annotations

import ast
import io
import queue
import socket
import sys
import types
from collections.abc import Iterator

from flashrecovery.worker.own_loops.rewrite import called_from, calls_in, own_nodes
from flashrecovery.worker.script_text.script_frames import resolve

_TAKING = frozenset(("get", "get_nowait", "read", "readline", "readlines", "recv"))


def taken_in(frame: types.FrameType, tree: ast.AST, line: int, *, steps: bool = True) -> str:
    """Line and text of such a call in the loop at ``line``, or in a function of the file that it calls, with the class
    of what it takes from; "" if there is none. Of a loop of ``steps`` also that of a loop in it over an iterator that
    is not the round's own. ``frame``: of the function of the loop."""
    variables = {**frame.f_globals, **frame.f_locals}
    places = list(_places(tree, line))
    for call in (call for place in places for call in calls_in(place)):
        if isinstance(call.func, ast.Attribute) and call.func.attr in _TAKING:
            source = resolve(variables, ast.unparse(call.func.value))
            if _gives_once(source):
                return f"line {call.lineno}: `{ast.unparse(call)}` takes from a {type(source).__name__}"
    for text in (text for place in places if steps for text in _run_over_in(place)):
        for node in (node for node in ast.walk(text) if isinstance(node, (ast.Name, ast.Attribute))):
            source = resolve(variables, ast.unparse(node))
            if isinstance(source, Iterator):
                return f"line {text.lineno}: `{ast.unparse(text)}` takes from a {type(source).__name__}"
    return ""


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
