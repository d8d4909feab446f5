"""Which variables a piece of a script reads before it sets them, and which it changes, statement by statement. Pure.

Where the text is ambiguous, the author's likely intention is assumed: a ``for`` has at least one iteration (unless its
variable already has a value and the length of the iterable is unknown), all parts of an expression are evaluated, and a
function that is passed as an argument is called.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

LOOPS = (ast.For, ast.AsyncFor, ast.While)
AnyLoop = ast.For | ast.AsyncFor | ast.While
IN_PLACE = frozenset({"add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert"}) | frozenset(
    {"pop", "popleft", "remove", "setdefault", "update"}
)
"""Methods of containers that change them. Methods of tensors that do end in an underscore."""
_SETTING = frozenset(
    {"clear", "zero_", "fill_", "copy_", "normal_", "uniform_", "manual_seed", "set_state", "load_state_dict"}
)
"""Methods after which nothing is left of what was there before, as far as anybody reads it."""
_CLOCK = re.compile(r"(time|timer|perf_counter|monotonic|process_time|default_timer)(_ns)?$|datetime\.now$|utcnow$")
_TRIES = tuple(getattr(ast, name) for name in ("Try", "TryStar") if hasattr(ast, name))
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NEVER_EMPTY = frozenset(("range", "split", "chunk", "tensor_split", "array_split", "unbind"))
_AROUND = frozenset(("enumerate", "zip", "tqdm", "trange", "list", "tuple", "reversed", "sorted", "map"))


_BOUNDARY = re.compile(r"^\w[\w.]*\.(sync_gradients|is_gradient_accumulation_boundary\(\))$")
"""Calls of accelerate and DeepSpeed that ask whether gradients are complete. All micro-batches of a step are in one
``with step:``."""
_EACH_OTHERS = ((ast.Eq, ast.NotEq), (ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
_OPPOSITES: dict[type, type[ast.cmpop]] = {k: v for a, b in _EACH_OTHERS for k, v in ((a, b), (b, a))}


@dataclass
class FlowState:
    """At one place of the text.

    Attributes:
        assigned: set on every way that leads here.
        changed: set or changed in place on one of them.
        implied: condition (its parts that must all hold) -> what is assigned where it holds.
    """

    assigned: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    implied: dict[frozenset[str], set[str]] = field(default_factory=dict)

    def copy(self) -> FlowState:
        return FlowState(set(self.assigned), set(self.changed), dict(self.implied))

    def forget_implied(self, path: str) -> None:
        """It has another value: what a condition on it has told does not hold any more."""
        self.implied = {known: names for known, names in self.implied.items() if not _mentions(known, {path})}

    def has(self, path: str) -> bool:
        """The name itself is assigned, or an object that it is an attribute of."""
        parts = path.split(".")
        return any(".".join(parts[:count]) in self.assigned for count in range(1, len(parts) + 1))


@dataclass(frozen=True)
class Function:
    """A function that can be called by its name."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class _Effect:
    """What a function does to variables that are not its own; see :class:`Reader`."""

    exposed: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    updated: frozenset[str] = frozenset()
    times: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()


@dataclass
class _Jumps:
    """Where the rounds of one loop end early."""

    breaks: list[FlowState] = field(default_factory=list)
    continues: list[FlowState] = field(default_factory=list)


class Reader:
    """Reads one piece of text.

    Args:
        functions: those that it can call by their name.
        before: names that have a value before it.

    Attributes:
        exposed: read, and perhaps not set before.
        all_changed: set or changed anywhere.
        updated: numbers and tensors whose new value is made of the old one; that alone is no reading.
        times: what a clock has said.
        reset: set by a method of theirs, so that they are the same objects as before.
    """

    def __init__(
        self, functions: Mapping[str, Function], before: frozenset[str], effects: dict[int, _Effect] | None = None
    ) -> None:
        self.exposed: set[str] = set()
        self.all_changed: set[str] = set()
        self.updated: set[str] = set()
        self.times: set[str] = set()
        self.reset: set[str] = set()
        self._leaves: list[FlowState] = []  # where a function returns
        self._functions = dict(functions)
        self._before = before
        self._loops: list[_Jumps] = []
        self._effects: dict[int, _Effect] = {} if effects is None else effects

    def round(self, loop: AnyLoop) -> FlowState | None:
        """One iteration of a loop, up to its end; None if no path reaches the end."""
        state = FlowState()
        jumps = _Jumps()
        self._loops.append(jumps)
        if isinstance(loop, ast.While):
            self._read(loop.test, state)
        else:
            self._assign(loop.target, state)
        end = self.body(loop.body, state)
        self._loops.pop()
        return _merged([end, *jumps.continues])

    def end_of(self, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> FlowState:
        """The state where it returns. Attributes of its arguments are not its own."""
        state = FlowState()
        if isinstance(function, ast.Lambda):
            self._read(function.body, state)
            return state
        return _merged([self.body(function.body, state), *self._leaves]) or FlowState()

    def body(self, statements: Iterable[ast.stmt], state: FlowState | None) -> FlowState | None:
        """The state behind them, None if nothing comes there. ``state`` is used up."""
        for statement in statements:
            if state is None:
                return None
            state = self._statement(statement, state)
        return state

    # -- statements -------------------------------------------------------------------------------

    def _statement(self, statement: ast.stmt, state: FlowState) -> FlowState | None:
        if isinstance(statement, ast.If):
            return self._if(statement, state)
        if isinstance(statement, LOOPS):
            return self._loop(statement, state)
        if isinstance(statement, ast.Match):
            return self._match(statement, state)
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                self._read(item.context_expr, state)
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, state)
            return self.body(statement.body, state)
        if isinstance(statement, _TRIES):
            return self._try(statement, state)
        if isinstance(statement, (ast.Return, ast.Raise)):
            self._read_parts(statement, state)
            if isinstance(statement, ast.Return):
                self._leaves.append(state)
            return None
        if isinstance(statement, (ast.Break, ast.Continue)):
            if self._loops:
                jumps = self._loops[-1]
                (jumps.breaks if isinstance(statement, ast.Break) else jumps.continues).append(state)
            return None
        self._simple(statement, state)
        return state

    def _simple(self, statement: ast.stmt, state: FlowState) -> None:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            if statement.value is not None:
                self._read(statement.value, state)
                for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                    for part, value in _pairs(target, statement.value):
                        if self._is_time(value):
                            self.times.add(ast.unparse(part))
                        else:
                            self._assign(part, state)
        elif isinstance(statement, ast.AugAssign):
            self._read(statement.value, state)
            self._change(statement.target, state, update=True)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                path = path_of(target)
                if path is None:
                    self._change(target, state, update=True)
                else:  # it is set again before it can be read
                    state.assigned.add(path)
                    state.changed.discard(path)
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for default in (*statement.args.defaults, *filter(None, statement.args.kw_defaults)):
                self._read(default, state)
            self._functions[statement.name] = Function(statement)
            self._set(statement.name, state)
        elif isinstance(statement, ast.ClassDef):
            self._set(statement.name, state)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                self._set((alias.asname or alias.name).partition(".")[0], state)
        elif isinstance(statement, ast.Expr):
            self._read(statement.value, state, bare=True)
        else:
            self._read_parts(statement, state)

    def _if(self, statement: ast.If, state: FlowState) -> FlowState | None:
        self._read(statement.test, state)
        conditions, opposite = _conjuncts(statement.test), _opposite(statement.test)
        then = self.body(statement.body, _where(conditions, state))
        if _BOUNDARY.search(ast.unparse(statement.test)) and not statement.orelse:
            return then  # it holds at the end of each step
        other = self.body(statement.orelse, _where(opposite, state))
        end = _merged([then, other])
        for holds, way in ((conditions, then), (opposite, other)):
            if end is not None and way is not None and not _mentions(holds, way.changed - state.changed):
                end.implied[holds] = way.assigned | end.implied.get(holds, set())
        return end

    def _loop(self, loop: AnyLoop, state: FlowState) -> FlowState | None:
        endless = isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and bool(loop.test.value)
        if isinstance(loop, ast.While):
            self._read(loop.test, state)
            tested = {path.partition(".")[0] for path in _names_in(loop.test)}
            surely = endless or (bool(tested) and all(state.has(name) for name in tested))
            inner = state.copy()
        else:
            self._read(loop.iter, state)
            inner = state.copy()
            self._assign(loop.target, inner)
            surely = _never_empty(loop.iter)
        jumps = _Jumps()
        self._loops.append(jumps)
        end = _merged([self.body(loop.body, inner), *jumps.continues])
        self._loops.pop()
        if not surely and not isinstance(loop, ast.While) and end is not None:
            # What has no value from before could not be read behind a loop without a round.
            none = state.copy()
            none.assigned.update(path for path in end.assigned if path.partition(".")[0] not in self._before)
            end = _merged([end, none])
        elif not surely:
            end = _merged([end, state])
        if endless:
            return _merged(jumps.breaks)
        return _merged([self.body(loop.orelse, end), *jumps.breaks])

    def _match(self, statement: ast.Match, state: FlowState) -> FlowState | None:
        self._read(statement.subject, state)
        ends, always = list[FlowState | None](), False
        for case in statement.cases:
            inner = state.copy()
            for node in ast.walk(case.pattern):
                name = getattr(node, "name", None) or getattr(node, "rest", None)
                if isinstance(name, str):
                    self._set(name, inner)
            if case.guard is not None:
                self._read(case.guard, inner)
            ends.append(self.body(case.body, inner))
            always |= case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
        return _merged(ends if always else [*ends, state])

    def _try(self, statement: ast.Try, state: FlowState) -> FlowState | None:
        outer, self.all_changed = self.all_changed, set()
        end = self.body(statement.body, state.copy())
        in_body, self.all_changed = self.all_changed, outer | self.all_changed
        ends = [self.body(statement.orelse, end)]
        for handler in statement.handlers:  # any part of the body may have run
            inner = state.copy()
            inner.changed.update(in_body)
            if handler.type is not None:
                self._read(handler.type, inner)
            if handler.name is not None:
                inner.assigned.add(handler.name)
            ends.append(self.body(handler.body, inner))
        merged = _merged(ends)
        if merged is None:  # all ways leave, and each passes here
            self.body(statement.finalbody, state)
            return None
        return self.body(statement.finalbody, merged)

    # -- changes ----------------------------------------------------------------------------------

    def _set(self, path: str, state: FlowState) -> None:
        state.assigned.add(path)
        state.changed.add(path)
        self.all_changed.add(path)
        state.forget_implied(path)

    def _changed(self, path: str, state: FlowState, *, update: bool) -> None:
        """In place. ``update``: not only by an addition to a container."""
        if not state.has(path):
            state.changed.add(path)
            self.all_changed.add(path)
            if update:
                self.updated.add(path)
        state.forget_implied(path)

    def _assign(self, target: ast.expr, state: FlowState) -> None:
        path = path_of(target)
        if path is not None:
            self._set(path, state)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self._assign(element, state)
        elif isinstance(target, ast.Starred) or (isinstance(target, ast.Subscript) and _is_whole(target)):
            self._assign(target.value, state)
        else:  # a part of something
            self._change(target, state, update=False)

    def _change(self, target: ast.expr, state: FlowState, *, update: bool) -> None:
        """``target``, or what it is a part of, is changed in place."""
        path = path_of(target)
        if path is not None:
            self._changed(path, state, update=update)
        elif isinstance(target, ast.Subscript):
            self._read(target.slice, state)
            self._change(target.value, state, update=update)
        elif isinstance(target, (ast.Attribute, ast.Starred)):
            self._change(target.value, state, update=update)
        else:
            self._read(target, state, bare=True)

    # -- expressions ------------------------------------------------------------------------------

    def _read(self, node: ast.AST, state: FlowState, *, bare: bool = False) -> None:
        """Everything that an expression reads, and what it changes on its way. ``bare``: its value is unused."""
        if isinstance(node, ast.expr):
            path = path_of(node)
            if path is not None:
                self._read_path(path, state)
                return
        if isinstance(node, _COMPREHENSIONS):
            self._comprehension(node, state)
        elif isinstance(node, ast.Lambda):
            self._call(Function(node), state)
        elif isinstance(node, ast.Call):
            self._read_call(node, state, bare=bare)
        elif isinstance(node, ast.NamedExpr):
            self._read(node.value, state)
            self._assign(node.target, state)
        elif isinstance(node, ast.IfExp):
            for part in (node.test, node.body, node.orelse):
                self._read(part, state)
        else:
            self._read_parts(node, state)

    def _read_parts(self, node: ast.AST, state: FlowState) -> None:
        for child in ast.iter_child_nodes(node):
            self._read(child, state)

    def _read_path(self, path: str, state: FlowState) -> None:
        """With every object on the way to it."""
        parts = path.split(".")
        self.exposed |= {p for count in range(1, len(parts) + 1) if not state.has(p := ".".join(parts[:count]))}
        if path in self._functions:  # passed on, so it will be called
            self._call(self._functions[path], state)

    def _read_call(self, node: ast.Call, state: FlowState, *, bare: bool) -> None:
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute) and (_changes(method) or method in _SETTING):
            for argument in arguments:
                self._read(argument, state)
            path = path_of(node.func.value)
            if method in _SETTING and path is not None:
                if not state.has(path):
                    self._set(path, state)
                    self.reset.add(path)
            else:
                self._change(node.func.value, state, update=method not in IN_PLACE)
            if not bare:
                self._read(node.func.value, state)
            return
        for argument in arguments:
            self._read(argument, state)
        self._read(node.func, state)
        if isinstance(node.func, ast.Name) and node.func.id == "next" and node.args:
            self._change(node.args[0], state, update=True)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, state: FlowState
    ) -> None:
        """Its variables are its own; those of ``:=`` in it are not."""
        own = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        hidden = own - state.assigned
        changed = {name for name in own if name in state.changed}
        for generator in node.generators:
            self._read(generator.iter, state)
            for name in own:
                state.assigned.add(name)
            for condition in generator.ifs:
                self._read(condition, state)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self._read(part, state)
        state.assigned.difference_update(hidden)
        state.changed.difference_update(own - changed)

    def _call(self, function: Function, state: FlowState) -> None:
        effect = self._effect_of(function.node)
        self.exposed |= {path for path in effect.exposed if not state.has(path)}
        self.all_changed |= effect.changed
        self.updated |= {path for path in effect.updated if not state.has(path)}
        self.times |= effect.times
        state.changed.update(effect.changed)
        state.assigned.update(effect.assigned)

    def _effect_of(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> _Effect:
        """What a function of this file does to variables that are not its own."""
        if id(node) in self._effects:
            return self._effects[id(node)]
        self._effects[id(node)] = _Effect()  # for one that calls itself
        own = _own_names(node)
        functions = {name: f for name, f in self._functions.items() if name not in own}
        inner = Reader(functions, self._before, self._effects)
        end = inner.end_of(node)

        def foreign(paths: Iterable[str]) -> frozenset[str]:
            return frozenset(p for p in paths if p.partition(".")[0] not in own and not hasattr(builtins, p))

        effect = _Effect(
            exposed=foreign(inner.exposed),
            changed=foreign(inner.all_changed),
            updated=foreign(inner.updated),
            times=foreign(inner.times),
            assigned=foreign(end.assigned),
        )
        self._effects[id(node)] = effect
        return effect

    def _is_time(self, value: ast.expr) -> bool:
        """What a clock has said, or a variable that has been assigned such a value here."""
        if isinstance(value, ast.Call):
            return bool(_CLOCK.search(ast.unparse(value.func))) and not value.args
        return ast.unparse(value) in self.times


def path_of(node: ast.AST) -> str | None:
    """``a`` or ``a.b.c``; None for anything else."""
    parts = list(_parts(node))
    return None if None in parts else ".".join(str(part) for part in reversed(parts))


def _parts(node: ast.AST) -> Iterator[str | None]:
    while isinstance(node, ast.Attribute):
        yield node.attr
        node = node.value
    yield node.id if isinstance(node, ast.Name) else None


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is assigned to what: ``a, b = 1, 2`` are two."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def _changes(method: str) -> bool:
    """Whether a method of this name changes its object."""
    return method in IN_PLACE or (method.endswith("_") and not method.endswith("__"))


def _is_whole(target: ast.Subscript) -> bool:
    """``x[:]`` and ``x[...]``"""
    index = target.slice
    if path_of(target.value) is None:
        return False
    if isinstance(index, ast.Slice):
        return index.lower is None and index.upper is None
    return isinstance(index, ast.Constant) and index.value is ...


def _never_empty(over: ast.expr) -> bool:
    """Whether a loop over this has a first round, by its text."""
    if isinstance(over, (ast.List, ast.Tuple)):
        return bool(over.elts)
    if not isinstance(over, ast.Call):
        return False
    name = ast.unparse(over.func).rpartition(".")[2]
    if name in _AROUND:
        return bool(over.args) and all(_never_empty(argument) for argument in over.args)
    return name in _NEVER_EMPTY


def _where(conditions: frozenset[str], state: FlowState) -> FlowState:
    """A copy of ``state``, where these hold."""
    inner = state.copy()
    for known, names in state.implied.items():
        if known <= conditions:
            inner.assigned.update(names)
    return inner


def _opposite(test: ast.expr) -> frozenset[str]:
    """What holds where ``test`` does not; conditions as :func:`_conjuncts` writes them."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _conjuncts(test.operand)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return frozenset().union(*(_opposite(value) for value in test.values))
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _OPPOSITES:
        opposite = ast.Compare(test.left, [_OPPOSITES[type(test.ops[0])]()], test.comparators)
        return frozenset({ast.unparse(opposite)})
    return frozenset({ast.unparse(ast.UnaryOp(ast.Not(), test))})


def _conjuncts(test: ast.expr) -> frozenset[str]:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return frozenset().union(*(_conjuncts(value) for value in test.values))
    return frozenset({ast.unparse(test)})


def _mentions(conditions: Iterable[str], paths: Iterable[str]) -> bool:
    names = {word for condition in conditions for word in re.findall(r"[A-Za-z_]\w*", condition)}
    return not names.isdisjoint(path.rpartition(".")[2] for path in paths)


def _names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _merged(states: Sequence[FlowState | None]) -> FlowState | None:
    """Where several ways come together."""
    live = [state for state in states if state is not None]
    if not live:
        return None
    implied = {
        known: set.intersection(*(state.implied[known] for state in live))
        for known in live[0].implied
        if all(known in state.implied for state in live)
    }
    return FlowState(
        set.intersection(*(state.assigned for state in live)), set().union(*(s.changed for s in live)), implied
    )


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    args = node.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
    return {argument.arg for argument in every}


def _own_names(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """Arguments and local variables."""
    found = _arguments(node)
    shared = set[str]()
    waiting: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
    while waiting:
        part = waiting.pop()
        if isinstance(part, (ast.Global, ast.Nonlocal)):
            shared |= {*part.names}
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            found.add(part.id)
        elif isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(part.name)
            continue
        elif isinstance(part, ast.Lambda):
            continue
        waiting += ast.iter_child_nodes(part)
    return found - shared
