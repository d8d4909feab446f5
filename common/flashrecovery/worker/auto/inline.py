"""Puts a function that has the loop of steps into the loop of epochs that calls it. Pure.

The lines of the function take the place of its call, with the names that its arguments have there::

    for epoch in range(epochs):                  for epoch in range(epochs):
        train_epoch(model, loader)                   model.train()
                                                     for x, y in loader:
    def train_epoch(model, loader):                      ...
        model.train()
        for x, y in loader:
            ...
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashrecovery.worker.auto.straight import NotByHand
from flashrecovery.worker.own_loops.rewrite import called, calls_in, own_nodes

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True)
class Inlined:
    """Attributes:
    text: the file's new text; the function is still in it.
    step_line, epoch_line: of the two loops there.
    function: the name of the function.
    origin: of each line of the new text, the number of the one that it comes from.
    """

    text: str
    step_line: int
    epoch_line: int
    function: str
    origin: Sequence[int]

    def line(self, number: int) -> int:
        """The line of the script for line ``number`` of the new text."""
        return self.origin[min(number, len(self.origin)) - 1]


def inlined(text: str, step_line: int, epoch_line: int) -> Inlined:
    """Raises NotByHand."""
    tree = ast.parse(text)
    loops = {node.lineno: node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While))}
    function, outer = _function_of(tree, loops[step_line]), loops[epoch_line]
    assert isinstance(function, ast.FunctionDef), "its frame is one of a function"
    _check(function, loops[step_line])
    call = _Call.of(outer, function)
    caller = _function_of(tree, outer)
    bindings = _bindings(function, call)
    _Names(tree, function, caller, call, bindings).check()
    lines = text.splitlines()
    constant, now = _divided(tree, outer, function, bindings)
    indent, before = _prefix(lines, call.statement), _prefix(lines, outer)
    above = [f"{before}{name} = {ast.unparse(value)}" for name, value in constant.items()]
    within = [f"{indent}{name} = {ast.unparse(value)}" for name, value in now.items()]
    body, numbers = _body(lines, function, indent)
    below = [f"{indent}{line}" for line in call.result(function)]
    start, end, top = call.statement.lineno, call.statement.end_lineno or 0, outer.lineno
    new = [*lines[: top - 1], *above, *lines[top - 1 : start - 1], *within, *body, *below, *lines[end:]]
    origin = [*range(1, top), *([start] * len(above)), *range(top, start), *([start] * len(within)), *numbers]
    origin += [*([start] * len(below)), *range(end + 1, len(lines) + 1)]
    offset = len(above) + (start - 1) + len(within)
    inner = offset + 1 + numbers.index(step_line)
    return Inlined("\n".join(new) + "\n", inner, top + len(above), function.name, origin)


def without(text: str, function: str) -> str:
    """Without the function, if nothing calls it any more."""
    tree = ast.parse(text)
    methods = {one for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for one in node.body}
    is_method = any(isinstance(one, ast.FunctionDef) and one.name == function for one in methods)
    for node in ast.walk(tree):  # `model.train()` is another one than a function that is called so
        if function == getattr(node, "attr" if is_method else "id", None):
            return text
    for node in ast.walk(tree):
        found = getattr(node, "body", None)
        body = found if isinstance(found, list) and len(found) > 1 else []
        for number, one in enumerate(body):
            if isinstance(one, ast.FunctionDef) and one.name == function:
                lines = text.splitlines(keepends=True)
                first, end = one.lineno - 1, one.end_lineno or 0
                if number + 1 < len(body):
                    while end < len(lines) and not lines[end].strip():
                        end += 1
                else:
                    while not lines[first - 1].strip():
                        first -= 1
                return "".join([*lines[:first], *lines[end:]])
    return text


# -- the call ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """Attributes:
    statement: of the loop of epochs, of which ``call`` is all but what it sets.
    targets: what it sets, as it is written there; "" if nothing.
    """

    statement: ast.stmt
    call: ast.Call
    targets: str
    names: frozenset[str]

    @staticmethod
    def of(outer: ast.For | ast.While, function: ast.FunctionDef) -> _Call:
        name = function.name
        statements = [one for one in outer.body if any(called(call) == name for call in calls_in(one))]
        if len(statements) != 1:
            raise NotByHand(
                outer.lineno, f"{name}(), which has the loop of steps, is called in {len(statements)} places"
            )
        (statement,) = statements
        targets: list[ast.expr] = statement.targets if isinstance(statement, ast.Assign) else []
        value = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
        names = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        plain = all(isinstance(node, (ast.Name, ast.Tuple, ast.expr_context)) for t in targets for node in ast.walk(t))
        if not isinstance(value, ast.Call) or called(value) != name or len(targets) > 1 or not plain:
            raise NotByHand(
                statement.lineno, f"{name}(), which has the loop of steps, is called in the midst of another statement"
            )
        own = isinstance(value.func, ast.Attribute) and ast.unparse(value.func.value) == "self"
        if not isinstance(value.func, ast.Name) and not own:
            raise NotByHand(
                statement.lineno,
                f"{ast.unparse(value.func)}() has the loop of steps, and belongs into one function with that of epochs",
            )
        return _Call(statement, value, ast.unparse(targets[0]).strip("()") if targets else "", frozenset(names))

    def result(self, function: ast.FunctionDef) -> list[str]:
        """What becomes of what the function gives."""
        last = function.body[-1]
        value = last.value if isinstance(last, ast.Return) else None
        text = "None" if value is None else ast.unparse(value)
        if self.targets:
            text = text.strip("()") if isinstance(value, ast.Tuple) else text
            return [] if text == self.targets else [f"{self.targets} = {text}"]
        return [text] if value is not None and any(True for _ in calls_in(value)) else []


def _check(function: ast.FunctionDef, loop: ast.For | ast.While) -> None:
    last = function.body[-1]
    for node in (node for statement in function.body for node in own_nodes(statement)):
        if isinstance(node, ast.Return) and node is not last:
            raise NotByHand(node.lineno, f"{function.name}() is left in the midst of it")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            raise NotByHand(node.lineno, f"{node.name} is re-created in each call of {function.name}()")
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal)):
            raise NotByHand(node.lineno, f"`{ast.unparse(node)}` in {function.name}()")
    if function.decorator_list:
        raise NotByHand(function.lineno, f"{function.name}(), which has the loop of steps, has a decorator")
    if loop not in function.body:
        raise NotByHand(loop.lineno, "the loop of steps is in the midst of another statement")


def _bindings(function: ast.FunctionDef, call: _Call) -> dict[str, ast.expr]:
    """What each argument is given."""
    arguments = function.args
    if arguments.vararg or arguments.kwarg:
        raise NotByHand(function.lineno, f"{function.name}() takes any number of arguments")
    positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    if isinstance(call.call.func, ast.Attribute):
        if not positional or positional[0] != "self":
            raise NotByHand(function.lineno, f"the first argument of {function.name}() is not called self")
        positional = positional[1:]
    given: dict[str, ast.expr] = {}
    for name, default in zip(reversed(positional), reversed(arguments.defaults), strict=False):
        given[name] = default
    for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if value is not None:
            given[one.arg] = value
    for name, value in given.items():
        if not isinstance(value, ast.Constant):
            raise NotByHand(function.lineno, f"the default of {name} is not a number or a text")
    if any(isinstance(one, ast.Starred) for one in call.call.args) or any(k.arg is None for k in call.call.keywords):
        raise NotByHand(call.statement.lineno, "arguments with a star")
    given |= dict(zip(positional, call.call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.call.keywords if keyword.arg is not None}
    return given


def _divided(
    tree: ast.AST, outer: ast.For | ast.While, function: ast.FunctionDef, bindings: dict[str, ast.expr]
) -> tuple[dict[str, ast.expr], dict[str, ast.expr]]:
    """Arguments that are the same in each epoch, and those that are not; without those that keep their name."""
    changed = {*_stored(outer), *_stored(function)}
    attributes = {
        node.attr
        for one in ast.walk(tree)
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and one.name != "__init__"
        for node in ast.walk(one)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    constant: dict[str, ast.expr] = {}
    now: dict[str, ast.expr] = {}
    for name, value in bindings.items():
        if isinstance(value, ast.Name) and value.id == name:
            continue
        parts = [node for node in ast.walk(value) if not isinstance(node, ast.expr_context)]
        plain = all(isinstance(node, (ast.Name, ast.Attribute, ast.Constant)) for node in parts)
        changes = any(
            getattr(node, "id", None) in changed or getattr(node, "attr", None) in attributes for node in parts
        )
        (constant if plain and not changes and name not in changed else now)[name] = value
    return constant, now


# -- names ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """Whether the names of the function mean the same where it is called."""

    tree: ast.Module
    function: ast.FunctionDef
    caller: ast.AST
    call: _Call
    bindings: dict[str, ast.expr]

    def check(self) -> None:
        set_here = {*_stored(self.function)}
        local = set_here | self.bindings.keys()
        around = self._around()
        for name in sorted(local):
            value = self.bindings.get(name)
            same = isinstance(value, ast.Name) and value.id == name and name not in set_here
            if same or name not in around or (name in self.call.names and name not in self._read_elsewhere()):
                continue
            raise NotByHand(
                self.function.lineno,
                f"{self.function.name}(), which has the loop of steps, and what calls it have a variable {name} each: "
                "rename one of them, as both loops become one",
            )
        if isinstance(self.caller, ast.Module) or self.function in set(ast.walk(self.caller)):
            return
        outer = {*_stored(self.caller), *_arguments(self.caller)}
        for name in sorted({*_read(self.function)} - local - {*_arguments(self.function)} - {*dir(builtins)}):
            if name in outer:
                raise NotByHand(
                    self.function.lineno,
                    f"{name} is another variable in {self.function.name}(), which has the loop of steps, than in what "
                    "calls it: rename one of them, as both loops become one",
                )

    def _around(self) -> set[str]:
        """Names that the caller has, and those that other functions have from it."""
        module = isinstance(self.caller, ast.Module)
        nodes = own_nodes(self.caller) if module else _nodes_without(self.caller, self.function)
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        return names | {*_stored(self.caller), *_arguments(self.caller)} | self._read_elsewhere()

    def _read_elsewhere(self) -> set[str]:
        """What functions take from the module, if that is the caller."""
        if not isinstance(self.caller, ast.Module):
            return set()
        found = set[str]()
        for one in ast.walk(self.tree):
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and one is not self.function:
                found |= {*_read(one)} - {*_stored(one)} - {*_arguments(one)}
        return found


def _nodes_without(place: ast.AST, function: ast.AST) -> Iterator[ast.AST]:
    yield place
    for child in ast.iter_child_nodes(place):
        if child is not function:
            yield from _nodes_without(child, function)


def _stored(place: ast.AST) -> Iterator[str]:
    """But not in functions and comprehensions in it."""
    waiting = list(ast.iter_child_nodes(place))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id
        if isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        if isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        if not isinstance(node, (*_SCOPES, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            waiting += ast.iter_child_nodes(node)


def _read(place: ast.AST) -> Iterator[str]:
    made = {
        node.id
        for one in ast.walk(place)
        if isinstance(one, ast.comprehension)
        for node in ast.walk(one.target)
        if isinstance(node, ast.Name)
    }
    for node in ast.walk(place):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in made:
            yield node.id


def _arguments(place: ast.AST) -> Iterator[str]:
    if isinstance(place, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        arguments = place.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            yield one.arg


# -- lines ------------------------------------------------------------------------------------------


def _function_of(tree: ast.Module, loop: ast.AST) -> ast.AST:
    """The innermost one around the loop, or the module."""
    found: ast.AST = tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and loop in set(own_nodes(node)):
            found = node
    return found


def _prefix(lines: Sequence[str], statement: ast.stmt) -> str:
    line = lines[statement.lineno - 1]
    return line[: len(line) - len(line.lstrip())]


def _body(lines: Sequence[str], function: ast.FunctionDef, indent: str) -> tuple[list[str], list[int]]:
    """The function's lines without its docstring and its last ``return``, and their numbers."""
    body = function.body
    docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    own = _prefix(lines, body[0])
    first = (body[0].end_lineno or 0) + 1 if docstring else body[0].lineno
    end = body[-1].lineno - 1 if isinstance(body[-1], ast.Return) else body[-1].end_lineno or 0
    numbers = list(range(first, end + 1))
    while numbers and not lines[numbers[0] - 1].strip():
        numbers.pop(0)
    while numbers and not lines[numbers[-1] - 1].strip():
        numbers.pop()
    moved = []
    for number in numbers:
        line = lines[number - 1]
        moved.append(indent + line[len(own) :] if line.startswith(own) else line.strip() and indent + line.lstrip())
    return moved, numbers
