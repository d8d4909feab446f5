"""Which variables a loop carries from one round to the next, read from the script's text. Pure.

A variable is carried if a round may change it and may read what the round before has left in it. Those that every round
sets before it reads them (``loss``, ``batch``, a buffer after ``zero_()``, a generator after ``manual_seed()``) are
not, nor those that are only added to (``losses.append(...)``). Names and attributes of names are looked at (``hidden``,
``self.hidden``), and what is changed in place counts, too: ``best[0] = 1``, ``mean.mul_(0.9)``, ``next(batches)``.
Functions of the same file that are called by their name are followed; what others do is not seen. Times of a clock do
not count. How one statement follows another is known to :mod:`.data_flow`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from flashrecovery.worker.script_text.data_flow import LOOPS, AnyLoop, FlowState, Function, Reader

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class LoopCarried:
    """The carried variables of one loop, as dotted names.

    Attributes:
        names: carried from one round to the next.
        set_here: all that the loop itself may set or change, or that each round sets, carried or not.
        remade: what a round sets, and reads only after that.
        reset: of these, those that it sets by a method of theirs in any case.
        counted: of ``names``, those that follow from the number of the round alone (``n += 1``).
    """

    names: frozenset[str] = frozenset()
    set_here: frozenset[str] = frozenset()
    remade: frozenset[str] = frozenset()
    reset: frozenset[str] = frozenset()
    counted: frozenset[str] = frozenset()


def carried_by_loop(tree: ast.AST, loop: AnyLoop) -> LoopCarried:
    """``tree``: of the file that has the loop."""
    around = list(_functions_around(tree, loop.lineno))
    reader = Reader(_functions(tree, around), _set_before(around[-1] if around else tree, loop))
    alone = Reader({}, frozenset())
    alone.round(loop)
    end = reader.round(loop) or FlowState()
    names = frozenset(reader.exposed & end.changed)
    every = frozenset(reader.all_changed)
    remade = every - reader.exposed - reader.updated
    return LoopCarried(
        names,
        set_here=frozenset(alone.all_changed | alone.times | reader.times | (remade & end.assigned)),
        remade=remade,
        reset=remade & reader.reset & end.assigned,
        counted=_counted(loop, names, every),
    )


def loop_around(tree: ast.AST, line: int) -> AnyLoop | None:
    """The innermost loop around ``line``, within the function that has it."""
    inner: ast.AST | None = None
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, (*LOOPS, *_DEFINITIONS)) and _spans(node, line):
            inner = node
    return inner if isinstance(inner, LOOPS) else None


def loops_around(tree: ast.AST, line: int) -> list[AnyLoop]:
    """All loops around ``line`` within the function that has it, outer ones first."""
    found: list[AnyLoop] = []
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, _DEFINITIONS) and _spans(node, line):
            found.clear()
        elif isinstance(node, LOOPS) and _spans(node, line):
            found.append(node)
    return found


@dataclass(frozen=True)
class CarriedByClass:
    """The carried attributes of the methods of a class, as names of attributes.

    Attributes:
        names: a method carries them from one call to the next: it changes them after it may have read them.
        remade: methods set them in any case, before they read them, all that do either.
        read: a method may read them before it sets them, or sets them in some cases only.
    """

    names: frozenset[str] = frozenset()
    remade: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()

    @classmethod
    def together(cls, parts: Sequence[CarriedByClass]) -> CarriedByClass:
        """The same for a class together with its base classes."""
        names = frozenset(name for part in parts for name in part.names)
        read = frozenset(name for part in parts for name in part.read)
        remade = frozenset(name for part in parts for name in part.remade)
        return cls(names, remade - names - read, read)


def carried_by_class(tree: ast.AST, name: str) -> CarriedByClass:
    classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    methods = [n for c in classes for n in c.body if isinstance(n, _DEFINITIONS) and n.name != "__init__"]
    functions = _functions(tree, [])
    carried, exposed = set[str](), set[str]()
    remade: set[str] | None = None
    for method in methods:
        arguments = [*method.args.posonlyargs, *method.args.args]
        if not arguments:
            continue
        reader, own = Reader(functions, frozenset()), arguments[0].arg
        end = reader.end_of(method)
        exposed |= {path.split(".")[1] for path in reader.exposed | reader.updated if path.startswith(f"{own}.")}
        carried |= _attributes((reader.exposed | reader.updated) & reader.all_changed, own)
        changed, assigned = _attributes(reader.all_changed, own), _attributes(end.assigned, own)
        remade = assigned if remade is None else remade | assigned
        exposed |= changed - assigned
    return CarriedByClass(frozenset(carried), frozenset((remade or set()) - exposed), frozenset(exposed))


@dataclass(frozen=True)
class SharedByFunctions:
    """The variables that functions share, of a file, as paths.

    Attributes:
        read: a function may read them as other calls have left them, or the file's own statements read them.
        changed: a function, or a loop or the like of the file, sets or changes them. Not to what a clock gives.
        imported: names that come from other files.
    """

    read: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    imported: frozenset[str] = frozenset()

    @functools.cached_property
    def names_read(self) -> tuple[frozenset[str], frozenset[str]]:
        """The last names of the paths: of all, and of those that may lead to things of other files."""
        return _last(self.read), self._of_others(self.read)

    @functools.cached_property
    def names_changed(self) -> tuple[frozenset[str], frozenset[str]]:
        """Likewise."""
        return _last(self.changed), self._of_others(self.changed)

    def _of_others(self, paths: frozenset[str]) -> frozenset[str]:
        return _last(path for path in paths if "." in path or path in self.imported)


def shared_by_functions(tree: ast.Module) -> SharedByFunctions:
    """What only grows (``losses.append(loss)``) or is only counted, and looked at nowhere, is not among ``read``."""
    read, changed, imported = set[str](), set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, (*_DEFINITIONS, ast.Lambda)):
            reader = Reader({}, frozenset())
            reader.end_of(node)
            read |= reader.exposed
            changed |= reader.all_changed
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            changed |= {f".{one.value!s}" for one in node.args if isinstance(one, ast.Constant)}
    for statement in tree.body:
        if not isinstance(statement, (*_DEFINITIONS, ast.ClassDef)):  # each alone: what was set above counts as read
            reader = Reader({}, frozenset())
            reader.body([statement], FlowState())
            read |= reader.exposed
            if hasattr(statement, "body"):  # others run once
                changed |= reader.all_changed
    return SharedByFunctions(frozenset(read), frozenset(changed), frozenset(imported))


def _last(paths: Iterable[str]) -> frozenset[str]:
    return frozenset(path.rpartition(".")[2] for path in paths)


def _attributes(paths: Iterable[str], own: str) -> set[str]:
    return {path[len(own) + 1 :] for path in paths if path.startswith(f"{own}.") and path.count(".") == 1}


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _functions_around(tree: ast.AST, line: int) -> Iterator[AnyFunction]:
    """Outer ones first."""
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS) and _spans(node, line):
            yield node


def _functions(tree: ast.AST, around: Iterable[AnyFunction]) -> dict[str, Function]:
    """Those that code in the innermost of ``around`` can call by their name."""
    found: dict[str, Function] = {}
    for place in (tree, *around):
        for node in _own_statements(place):
            if isinstance(node, _DEFINITIONS):
                found[node.name] = Function(node)
    return found


def _own_statements(place: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module or function, nested ones too, but not those of functions and classes in it."""
    waiting = list(ast.iter_child_nodes(place))
    while waiting:
        node = waiting.pop()
        yield node
        inner = isinstance(node, ast.stmt) and not isinstance(node, (*_DEFINITIONS, ast.ClassDef))
        if inner or isinstance(node, (ast.excepthandler, ast.match_case)):
            waiting += ast.iter_child_nodes(node)


def _set_before(place: ast.AST, loop: AnyLoop) -> frozenset[str]:
    """Names that the function, or the module, sets above the loop."""
    return frozenset(
        node.id
        for statement in _own_statements(place)
        if isinstance(statement, ast.stmt) and statement.lineno < loop.lineno and not isinstance(statement, LOOPS)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


# -- what follows from the number of the round alone ------------------------------------------------


def _counted(loop: AnyLoop, names: frozenset[str], changed: frozenset[str]) -> frozenset[str]:
    """The counters among ``names``: whatever a round sets them to, and whether it does, calls nothing, and is made of
    such names and of what the loop does not change."""
    sources: dict[str, set[str]] = {}
    _sources(loop.body, frozenset(), sources)
    target = set() if isinstance(loop, ast.While) else _names(loop.target)
    known = {name for name in sources if _CALL not in sources[name]} | target
    while True:
        fewer = {
            name for name in known if name in target or sources[name].isdisjoint({p for p in changed if p not in known})
        }
        if fewer == known:
            return frozenset(known & names)
        known = fewer


_CALL = "()"


def _sources(body: Iterable[ast.stmt], conditions: frozenset[str], found: dict[str, set[str]]) -> None:
    """Which names decide what each name is set to; :data:`_CALL` if a call does."""
    for statement in body:
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            made_of = _names(statement.value) if statement.value is not None else set[str]()
            for target in targets:
                for name in _names(target):
                    found.setdefault(name, set()).update(made_of, conditions)
        elif isinstance(statement, (ast.If, ast.While)):
            inner = conditions | _names(statement.test)
            _sources([*statement.body, *statement.orelse], inner, found)
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            _sources(statement.body, conditions, found)
        elif not isinstance(statement, (ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.Assert, ast.Return)):
            for name in _stored(statement):
                found.setdefault(name, set()).add(_CALL)
        for node in ast.walk(statement) if isinstance(statement, ast.Expr) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                found.setdefault(ast.unparse(node.func.value), set()).add(_CALL)


def _names(node: ast.AST) -> set[str]:
    found = set[str]()
    for part in ast.walk(node):
        if isinstance(part, (ast.Name, ast.Attribute)):
            found.add(ast.unparse(part))
        elif isinstance(part, (ast.Call, ast.Await, ast.NamedExpr)):
            found.add(_CALL)
    return found


def _stored(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
