"""Which variables a loop carries from one round to the next, read from the script's text. Pure.

A variable is carried if a round may change it and may read what the round before has left in it. Those that every round
assigns before it reads them (``loss``, ``batch``) are not, nor those that are only added to (``losses.append(...)``).
Names and attributes of names are looked at (``hidden``, ``self.hidden``), and what is changed in place counts, too:
``best[0] = 1``, ``mean.mul_(0.9)``, ``next(batches)``. What other functions do when they are called is not seen. Times
of a clock do not count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

_IN_PLACE = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert"}
) | frozenset({"pop", "popleft", "remove", "setdefault", "update"})
"""Methods of containers that change them. Methods of tensors that do end in an underscore."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_CLOCKS = frozenset(
    ("time.time", "time.monotonic", "time.perf_counter", "perf_counter", "datetime.now", "datetime.datetime.now")
)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
AnyLoop = ast.For | ast.AsyncFor | ast.While
_TRIES = (ast.Try, ast.TryStar) if sys.version_info >= (3, 11) else (ast.Try,)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def carried_by_loop(loop: AnyLoop) -> frozenset[str]:
    """Dotted names."""
    flow = _round(loop)
    return frozenset(flow.exposed & flow.changed)


def loop_around(tree: ast.AST, line: int) -> AnyLoop | None:
    """The innermost loop around ``line``, within the function that has it."""
    inner: ast.AST | None = None
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, (*_LOOPS, ast.FunctionDef, ast.AsyncFunctionDef)) and _spans(node, line):
            inner = node
    return inner if isinstance(inner, _LOOPS) else None


def changed_by_loop(loop: AnyLoop) -> frozenset[str]:
    """All that a round may assign or change, carried or not."""
    flow = _round(loop)
    return frozenset(flow.changed | flow.times)


def carried_by_class(tree: ast.AST, name: str) -> frozenset[str]:
    """Attributes that a method of the class carries from one call to the next: it changes them after it may have read
    them."""
    classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    methods = [n for c in classes for n in c.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    found = set[str]()
    for method in methods:
        arguments = [*method.args.posonlyargs, *method.args.args]
        flow = _flow(method.body)
        paths = [path.split(".") for path in (flow.exposed | flow.updated) & flow.changed]
        found |= {parts[1] for parts in paths if arguments and len(parts) == 2 and parts[0] == arguments[0].arg}
    return frozenset(found)


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


@dataclass
class _Flow:
    """``exposed``: read, and perhaps not assigned before. ``changed``: perhaps assigned or changed in place.
    ``assigned``: assigned in any case. ``updated``: numbers and tensors whose new value is made of the old one; that
    alone is no reading. ``times``: a clock's."""

    exposed: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)
    updated: set[str] = field(default_factory=set)
    times: set[str] = field(default_factory=set)

    def read(self, path: str) -> None:
        """With every object on the way to it."""
        parts = path.split(".")
        self.exposed |= {
            p for count in range(1, len(parts) + 1) if not self._was_assigned(p := ".".join(parts[:count]))
        }

    def assign(self, path: str) -> None:
        self.changed.add(path)
        self.assigned.add(path)

    def change(self, path: str, *, update: bool) -> None:
        """In place. ``update``: not only by an addition to a container."""
        if not self._was_assigned(path):
            self.changed.add(path)
            if update:
                self.updated.add(path)

    def then(self, other: _Flow) -> None:
        """``other`` comes next."""
        self.exposed |= {path for path in other.exposed if not self._was_assigned(path)}
        self.changed |= other.changed
        self.assigned |= other.assigned
        self.updated |= other.updated
        self.times |= other.times

    def perhaps(self, others: Sequence[_Flow]) -> None:
        """One of ``others`` comes next."""
        for other in others:
            self.exposed |= {path for path in other.exposed if not self._was_assigned(path)}
            self.changed |= other.changed
            self.updated |= other.updated
            self.times |= other.times
        if others:
            self.assigned |= set.intersection(*(other.assigned for other in others))

    def _was_assigned(self, path: str) -> bool:
        """The name itself, or an object that it is an attribute of."""
        parts = path.split(".")
        return any(".".join(parts[:count]) in self.assigned for count in range(1, len(parts) + 1))


def _round(loop: AnyLoop) -> _Flow:
    """One round of a loop."""
    flow = _Flow()
    if isinstance(loop, ast.While):
        _read(loop.test, flow)
    else:
        _assign(loop.target, flow)
    flow.then(_flow(loop.body))
    return flow


def _flow(body: Iterable[ast.stmt]) -> _Flow:
    flow = _Flow()
    for statement in body:
        _statement(statement, flow)
    return flow


def _statement(statement: ast.stmt, flow: _Flow) -> None:
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        if statement.value is not None:
            _read(statement.value, flow)
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                for part, value in _pairs(target, statement.value):
                    if _is_time(value, flow):
                        flow.times.add(ast.unparse(part))
                    else:
                        _assign(part, flow)
    elif isinstance(statement, ast.AugAssign):
        _read(statement.value, flow)
        _change(statement.target, flow, update=True)
    elif isinstance(statement, ast.If):
        _read(statement.test, flow)
        flow.perhaps([_flow(statement.body), _flow(statement.orelse)])
    elif isinstance(statement, ast.Match):
        _read(statement.subject, flow)
        flow.perhaps([*(_flow(case.body) for case in statement.cases), _Flow()])
    elif isinstance(statement, _LOOPS):
        if not isinstance(statement, ast.While):
            _read(statement.iter, flow)
        flow.perhaps([_round(statement), _Flow()])
        flow.then(_flow(statement.orelse))
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        for item in statement.items:
            _read(item.context_expr, flow)
            if item.optional_vars is not None:
                _assign(item.optional_vars, flow)
        flow.then(_flow(statement.body))
    elif isinstance(statement, _TRIES):
        flow.then(_flow(statement.body))
        flow.perhaps([*(_flow(handler.body) for handler in statement.handlers), _Flow()])
        flow.then(_flow([*statement.orelse, *statement.finalbody]))
    elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        flow.assign(statement.name)
    elif isinstance(statement, ast.Expr):
        _read(statement.value, flow, bare=True)
    else:
        _read(statement, flow)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is assigned to what: ``a, b = 1, 2`` are two."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def _is_time(value: ast.expr, flow: _Flow) -> bool:
    """What a clock has said, or a variable that has been assigned such a value here."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in _CLOCKS
    return ast.unparse(value) in flow.times


def _assign(target: ast.expr, flow: _Flow) -> None:
    path = _path(target)
    if path is not None:
        flow.assign(path)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            _assign(element, flow)
    elif isinstance(target, ast.Starred):
        _assign(target.value, flow)
    else:  # a part of something
        _change(target, flow, update=False)


def _change(target: ast.expr, flow: _Flow, *, update: bool) -> None:
    """``target``, or what it is a part of, is changed in place."""
    path = _path(target)
    if path is not None:
        flow.change(path, update=update)
    elif isinstance(target, ast.Subscript):
        _read(target.slice, flow)
        _change(target.value, flow, update=update)
    elif isinstance(target, (ast.Attribute, ast.Starred)):
        _change(target.value, flow, update=update)
    else:
        _read(target, flow, bare=True)


def _read(node: ast.AST, flow: _Flow, *, bare: bool = False) -> None:
    """Everything that an expression, or a simple statement, reads; and what it changes on its way. ``bare``: nobody
    uses its value."""
    if isinstance(node, ast.expr):
        path = _path(node)
        if path is not None:
            flow.read(path)
            return
    if isinstance(node, _COMPREHENSIONS):
        inner = _Flow()
        for generator in node.generators:
            _read(generator.iter, inner)
            _assign(generator.target, inner)
            for condition in generator.ifs:
                _read(condition, inner)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            _read(part, inner)
        inner.changed -= inner.assigned
        inner.assigned.clear()
        flow.then(inner)
        return
    if isinstance(node, _FUNCTIONS):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _changes(node.func.attr):
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            _read(argument, flow)
        _change(node.func.value, flow, update=node.func.attr not in _IN_PLACE)
        if not bare:
            _read(node.func.value, flow)
        return
    for child in ast.iter_child_nodes(node):
        _read(child, flow)
    if isinstance(node, ast.NamedExpr):
        _assign(node.target, flow)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next" and node.args:
        _change(node.args[0], flow, update=True)


def _changes(method: str) -> bool:
    """Whether a method of this name changes its object."""
    return method in _IN_PLACE or (method.endswith("_") and not method.endswith("__"))


def _path(node: ast.AST) -> str | None:
    """``a`` or ``a.b.c``; None for anything else."""
    parts = list(_parts(node))
    return None if None in parts else ".".join(str(part) for part in reversed(parts))


def _parts(node: ast.AST) -> Iterator[str | None]:
    while isinstance(node, ast.Attribute):
        yield node.attr
        node = node.value
    yield node.id if isinstance(node, ast.Name) else None
