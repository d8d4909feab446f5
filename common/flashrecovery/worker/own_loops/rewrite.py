"""Puts the loops of a script under recovery by rewriting its text before it runs. Pure.

A *step loop* is the innermost loop whose rounds make the calls of an optimizer step (``loss.backward()`` and
``optimizer.step()``, or ``engine.backward(loss)`` and ``engine.step()``), directly or in functions of the same file. A
loop around it, or around a call of a function that has it, is an *outer loop*: that of the epochs. Both are rewritten::

    for x, y in loader:                  __loop__ = LOOPS.enter(place)
        loss = engine(x)                 while __loop__.runs():
        engine.backward(loss)                with __loop__.whole:
        engine.step()                            for x, y in __loop__.iterate(loader):
        print(loss.item())                           with __loop__:
                                                         if __loop__.restoring: total = __loop__.values["total"]
                                                         loss = engine(x)
                                                         engine.backward(loss)
                                                         engine.step()
                                                         __loop__.step_taken()
                                                         print(loss.item())

Where statements of one block come to step loops one after the other (a warm-up, then the training), they become the
one round of an outer loop, so that the way leads from each of these loops to the others.

Every statement keeps its line. What the objects do: :mod:`.loops`.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flashrecovery.worker.script_text.data_flow import IN_PLACE
from flashrecovery.worker.script_text.loop_carried import AnyFunction, LoopCarried, carried_by_loop

PlainLoop = ast.For | ast.While
_WRITING = IN_PLACE | {"move_to_end", "popitem", "reverse", "rotate", "sort", "subtract", "__setitem__"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
HANDLE = "__flashrecovery_loops__"
_PHASE = "__flashrecovery_phase__"
_MODULE = "flashrecovery.worker.own_loops.loops"
_NO_STEPS = ("sched", "plateau", "ema", "profiler", "prof", "env", "writer", "logger", "bar", "timer")
"""What is called so has a ``step()`` that is no optimizer's."""

_OF_MODULES = ("step", "backward", "forward", "__call__", "train", "eval")
"""Methods that modules and optimizers have: of what is called so, too, in a script they are not called."""
_TRAINERS = ("trainer", "runner", "learner")
"""``train()`` of an object with one of these in its name trains."""

_CHANGE_NOTHING = frozenset(("torch", "nn", "F", "dist", "math", "json", "logging", "logger", *dir(builtins)))
"""Functions and modules of functions that leave lists and dictionaries that they are given as they are."""
_VIEWS = ("items", "values")
"""Methods of dictionaries that give what is in them."""


@dataclass(frozen=True)
class LoopText:
    """What the text says of one loop.

    Attributes:
        steps: it is a step loop; else an outer loop.
        reads: it is a ``for`` loop: what it runs over belongs to the step.
        carried: what it changes, and carries from round to round; of the outermost loop of its function.
        local: names that its rounds may set, for which the rewritten text has an assignment.
        shared: names that functions of the file set by ``global``, or that it may set by ``globals()``.
        read_after: names that are read below it, in its function, or that functions in that one read.
        passed: names that are handed to functions of other files, which may change what they lead to; and those that
            functions of this one write in, which others may call: hooks of modules, callbacks.
        read: names that the file reads anywhere.
        refused: why it cannot be protected; "" if it can.
    """

    steps: bool
    carried: LoopCarried = field(default_factory=LoopCarried)
    local: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    read_after: frozenset[str] = frozenset()
    passed: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    refused: str = ""
    reads: bool = False


@dataclass
class Rewritten:
    """A file's text.

    Attributes:
        loops: by line (see :func:`_key`); none if nothing was to be rewritten.
        iterators: what its steps call ``next()`` on, as it is written there.
    """

    tree: ast.Module
    loops: dict[int, LoopText] = field(default_factory=dict)
    iterators: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Makes:
    """Names of functions and methods that make the calls of a step.

    Attributes:
        backward, step: the one or the other call.
        looping: they have a step loop, or come to one.
    """

    backward: frozenset[str] = frozenset()
    step: frozenset[str] = frozenset()
    looping: frozenset[str] = frozenset()

    def __or__(self, other: Makes) -> Makes:
        return Makes(self.backward | other.backward, self.step | other.step, self.looping | other.looping)


NONE = Makes()


def may_make_steps(text: bytes, elsewhere: Makes = NONE) -> bool:
    """Whether a call in ``text`` may be one of those of a step, or of what makes them ``elsewhere``. Most modules of a
    large script have none, and need not be parsed to know it."""
    names = {"backward", "step", *elsewhere.backward, *elsewhere.step, *elsewhere.looping}
    if not all(map(str.isascii, names)):
        return True
    return re.search(rb"\b(?:%s)[\s\\]*\(" % "|".join(sorted(names)).encode(), text) is not None


def made_in(tree: ast.Module, elsewhere: Makes = NONE) -> Makes:
    """By the functions of a file. ``elsewhere``: by those of the modules that it imports."""
    return StepCalls(tree, elsewhere).makes


def rewrite(text: bytes | str, file: str, elsewhere: Makes = NONE) -> Rewritten:
    """``elsewhere``: functions of the script's own modules that this file imports.

    Raises SyntaxError as the compiler does."""
    tree = ast.parse(text, file)
    if _hands_out_steps(tree):
        return Rewritten(tree)
    calls = StepCalls(tree, elsewhere)
    if not calls.loops and not calls.whole_steps:
        return Rewritten(tree)
    if _join_phases(tree, calls):
        calls = StepCalls(tree, elsewhere)
    names = _FileNames.of(tree, calls)
    texts = {_key(loop): _text_of(tree, loop, calls, names) for loop in calls.loops}
    iterators = _Iterators(file, calls)
    iterators.rewrite(tree)
    if not texts and not iterators.names:
        return Rewritten(tree)
    _Rewriter(file, calls, texts).visit(tree)
    _import_loops(tree)
    return Rewritten(ast.fix_missing_locations(tree), texts, frozenset(iterators.names))


def _hands_out_steps(tree: ast.AST) -> bool:
    """The script takes its steps from ``recovery.steps()``, or its calls are protected one by one."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(made, ast.Attribute) and made.attr in ("steps", "train_batch", "protect") for made in calls)


# -- which loops ------------------------------------------------------------------------------------


class StepCalls:
    """Which functions of a file make the calls of a step, and which loops are step loops and outer loops."""

    def __init__(self, tree: ast.Module, elsewhere: Makes) -> None:
        self._elsewhere = elsewhere
        self._nodes: dict[ast.AST, list[ast.AST]] | None = {}
        self._calls: dict[ast.AST, list[ast.Call]] = {}
        self.functions: dict[str, list[AnyFunction]] = {}
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions.setdefault(node.name, []).append(node)
        for name, function in _bound_to(tree):
            if name not in self.functions and function in self.functions:
                self.functions[name] = self.functions[function]
        self.loops: dict[PlainLoop, bool] = {}
        """All that are rewritten; True: a step loop."""
        # functions that have a step loop, or call one that has
        self._looping: set[str] = set()
        self._parts: set[str] = set()
        """Functions whose loops are parts of one step: that of a loop that calls them."""
        self._optimizers = _optimizers(tree)
        self.mixed: dict[PlainLoop, str] = {}
        """Loops that make a step, and call such a function of another module."""
        while True:
            self._look(tree)
            parts = {name for _, name in self._called_besides(tree) if name in self.functions} - self._parts
            if not parts:
                break
            self._parts |= parts
        self.mixed = {loop: name for loop, name in self._called_besides(tree) if name not in self.functions}
        self._nodes = None  # the tree may change from here on

    def _own_nodes(self, place: ast.AST) -> Iterable[ast.AST]:
        """See :func:`own_nodes`. The same places are asked for many times here."""
        if self._nodes is None:
            return own_nodes(place)
        if place not in self._nodes:
            self._nodes[place] = [*own_nodes(place)]
        return self._nodes[place]

    def _calls_in(self, place: ast.AST) -> Iterable[ast.Call]:
        if self._nodes is None:
            return calls_in(place)
        if place not in self._calls:
            self._calls[place] = [node for node in self._own_nodes(place) if isinstance(node, ast.Call)]
        return self._calls[place]

    def _look(self, tree: ast.Module) -> None:
        elsewhere = self._elsewhere
        self._looping = {*elsewhere.looping} - self.functions.keys()
        self.loops = {}
        own = [one for name, same in self.functions.items() if name not in self._parts for one in same]
        places: list[ast.AST] = [tree, *own]
        while True:
            before = len(self._looping), len(self.loops)
            self._backward = self._closure(self._is_backward, elsewhere.backward)
            self._step = self._closure(self._is_step, elsewhere.step)
            self.loops = {}
            for place in places:
                self._find(place)
            for name, same in self.functions.items():
                if name not in self._parts and any(self._loops_in(one) for one in same):
                    self._looping.add(name)
            if (len(self._looping), len(self.loops)) == before:
                return

    @property
    def makes(self) -> Makes:
        return Makes(frozenset(self._backward), frozenset(self._step), frozenset(self._looping))

    @property
    def whole_steps(self) -> list[AnyFunction]:
        """Functions that make all calls of a step, for a loop that may be elsewhere."""
        names = (self._backward & self._step & self.functions.keys()) - self._looping
        return [one for name in sorted(names) for one in self.functions[name]]

    def _closure(self, direct: object, elsewhere: frozenset[str]) -> set[str]:
        """Functions that make such a call, except those that have their own loop for it."""
        found = {*elsewhere} - self.functions.keys()
        while True:
            more = {
                name
                for name, same in self.functions.items()
                if name not in found | self._looping and any(self._makes(one, direct, found) for one in same)
            }
            if not more:
                return found
            found |= more

    def _makes(self, place: ast.AST, direct: object, functions: set[str]) -> bool:
        assert callable(direct)
        return any(direct(call) or called(call) in functions for call in self._calls_in(place))

    def _is_backward(self, call: ast.Call) -> bool:
        return isinstance(call.func, ast.Attribute) and call.func.attr == "backward"

    def _is_step(self, call: ast.Call) -> bool:
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
            return False
        receiver = ast.unparse(call.func.value)
        return receiver in self._optimizers or not any(word in receiver.lower() for word in _NO_STEPS)

    def takes_step(self, node: ast.AST) -> bool:
        """Whether ``node`` calls what takes an optimizer's step."""
        return self._makes(node, self._is_step, self._step)

    def comes_to_a_loop(self, node: ast.AST) -> bool:
        """Whether a call in ``node`` reaches a step loop."""
        return any(called(call) in self._looping for call in self._calls_in(node))

    def _find(self, place: ast.AST) -> None:
        for loop in (node for node in self._own_nodes(place) if isinstance(node, (ast.For, ast.While))):
            inner = [
                node for node in self._own_nodes(loop) if isinstance(node, (ast.For, ast.While)) and node is not loop
            ]
            whole = [one for one in inner if self._whole_step(one)]
            if whole and self._has_step_besides(loop, whole):
                self.loops[loop] = True
            elif self._loops_in(loop) or whole:
                self.loops[loop] = False
            elif self._whole_step(loop):
                self.loops[loop] = True
        for loop in [one for one, steps in self.loops.items() if steps]:
            for node in self._own_nodes(loop):
                if isinstance(node, (ast.For, ast.While)) and node is not loop:
                    self.loops.pop(node, None)

    def _has_step_besides(self, loop: PlainLoop, inner: Iterable[PlainLoop]) -> bool:
        """Whether ``loop`` makes the calls of a step outside of the loops in it, too: those are parts of its step, as
        where a discriminator takes several of them, and then the generator one."""
        within = {node for one in inner for node in self._own_nodes(one)}
        besides = [node for node in self._own_nodes(loop) if isinstance(node, ast.Call) and node not in within]
        return any(self._is_backward(call) or called(call) in self._backward for call in besides) and any(
            self._is_step(call) or called(call) in self._step for call in besides
        )

    def _called_besides(self, tree: ast.Module) -> Iterator[tuple[PlainLoop, str]]:
        """Loops that make the calls of a step themselves, or in functions that have no loop for it, with what else they
        call that has such a loop: a critic takes several steps there, and then the generator one."""
        for loop in (node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While))):
            inner = [
                node for node in self._own_nodes(loop) if isinstance(node, (ast.For, ast.While)) and node is not loop
            ]
            within = {node for one in inner for node in self._own_nodes(one)}
            direct = [call for call in self._calls_in(loop) if call not in within]
            looping = [called(call) for call in direct if called(call) in self._looping]
            backward = any(self._is_backward(call) or called(call) in self._backward for call in direct)
            if looping and backward and any(self._is_step(call) or called(call) in self._step for call in direct):
                yield from ((loop, name) for name in looping)

    def _whole_step(self, loop: PlainLoop) -> bool:
        return self._makes(loop, self._is_backward, self._backward) and self.takes_step(loop)

    def _loops_in(self, place: ast.AST) -> bool:
        """Whether a call in ``place`` reaches a step loop, or a step loop is in it."""
        return self.comes_to_a_loop(place) or any(
            node in self.loops and node is not place for node in self._own_nodes(place)
        )


def _optimizers(tree: ast.AST) -> set[str]:
    """What ``zero_grad()`` is called on, too."""
    return {
        ast.unparse(call.func.value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "zero_grad"
    }


def _bound_to(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Variables and attributes that call a function of the file, with its name: ``step = partial(train_step, "mse")``,
    ``torch.compile(train_step)``, or the function itself."""
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Assign)):
        value = node.value
        if isinstance(value, ast.Call) and value.args and called(value) in ("partial", "compile"):
            value = value.args[0]
        if isinstance(value, (ast.Name, ast.Attribute)):
            function = value.id if isinstance(value, ast.Name) else value.attr
            for target in node.targets:
                if isinstance(target, (ast.Name, ast.Attribute)):
                    yield target.id if isinstance(target, ast.Name) else target.attr, function


def called(call: ast.Call) -> str:
    """The name of the function, or of the method."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    if not isinstance(call.func, ast.Attribute):
        return ""
    own = isinstance(call.func.value, ast.Name) and call.func.value.id == "self"
    if own or call.func.attr not in _OF_MODULES:
        return call.func.attr
    trains = call.func.attr == "train" and any(w in ast.unparse(call.func.value).lower() for w in _TRAINERS)
    return call.func.attr if trains else ""


def own_nodes(place: ast.AST) -> Iterator[ast.AST]:
    """``place`` and what is in it, but not what is in functions and classes in it."""
    yield place
    waiting = deque(ast.iter_child_nodes(place))
    while waiting:
        node = waiting.popleft()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)


def calls_in(place: ast.AST) -> Iterator[ast.Call]:
    return (node for node in own_nodes(place) if isinstance(node, ast.Call))


def called_from(place: ast.AST, functions: Mapping[str, Sequence[ast.AST]]) -> Iterator[ast.AST]:
    """Those of the file's ``functions``, by name, that ``place`` may call."""
    waiting, seen = [place], set[str]()
    while waiting:
        for call in calls_in(waiting.pop()):
            name = called(call)
            if name in functions and name not in seen:
                seen.add(name)
                yield from functions[name]
                waiting += functions[name]


# -- several loops, one after the other -------------------------------------------------------------


class _Phases(ast.For):
    """A loop of one round, around statements that come to step loops one after the other."""


def _key(loop: PlainLoop) -> int:
    """Its line; of :class:`_Phases`, which begin where their first statement does, the negative one."""
    return -loop.lineno if isinstance(loop, _Phases) else loop.lineno


def _join_phases(tree: ast.Module, calls: StepCalls) -> bool:
    """Make those statements one round of an outer loop. Returns whether there were any."""
    functions = [one for same in calls.functions.values() for one in same]
    bodies = [one.body for one in functions if not isinstance(one, ast.AsyncFunctionDef) and not _is_generator(one)]
    joined = [_join_in(body, calls) for body in (tree.body, *bodies)]
    return any(joined)


def _join_in(body: list[ast.stmt], calls: StepCalls) -> bool:
    looping = [number for number, statement in enumerate(body) if _comes_to_loops(statement, calls)]
    if len(looping) > 1:
        first, last = looping[0], looping[-1]
        (made,) = ast.parse(f"for {_PHASE} in (0,):\n    pass").body
        assert isinstance(made, ast.For)
        phases = _Phases(made.target, made.iter, body[first : last + 1], [])
        for node in (phases, phases.target, *ast.walk(phases.iter)):
            ast.copy_location(node, body[first])
        phases.end_lineno = body[last].end_lineno
        body[first : last + 1] = [phases]
        return True
    joined = [_join_in(block, calls) for number in looping for block in _all_blocks(body[number])]
    return any(joined)


def _comes_to_loops(statement: ast.stmt, calls: StepCalls) -> bool:
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return False
    return calls.comes_to_a_loop(statement) or any(node in calls.loops for node in own_nodes(statement))


def _all_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """But for those of loops."""
    if isinstance(statement, ast.Try):
        handlers = [handler.body for handler in statement.handlers]
        return [statement.body, *handlers, statement.orelse, statement.finalbody]
    return _blocks(statement)


# -- what the text says of a loop -------------------------------------------------------------------


@dataclass(frozen=True)
class _FileNames:
    """Names of a file, and the function around each of its loops."""

    shared: frozenset[str]
    passed: frozenset[str]
    read: frozenset[str]
    around: Mapping[ast.AST, AnyFunction]

    @staticmethod
    def of(tree: ast.Module, calls: StepCalls) -> _FileNames:
        nodes = list(ast.walk(tree))
        functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        return _FileNames(
            frozenset((*_names_declared(nodes), *_names_by_text(tree, nodes))),
            frozenset((*_names_passed(tree, calls), *_names_written_in(nodes))),
            frozenset(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)),
            {node: one for one in functions for node in own_nodes(one) if isinstance(node, (ast.For, ast.While))},
        )


def _text_of(tree: ast.Module, loop: PlainLoop, calls: StepCalls, names: _FileNames) -> LoopText:
    function = names.around.get(loop)
    place: ast.AST = tree if function is None else function
    outermost = next(node for node in own_nodes(place) if node in calls.loops and loop in set(own_nodes(node)))
    assert isinstance(outermost, (ast.For, ast.While))
    carried = carried_by_loop(tree, outermost)
    if loop is not outermost:  # rounds of this loop may change what each round of the outer loop creates
        carried = replace(carried, remade=carried.remade & carried_by_loop(tree, loop).remade)
    return LoopText(
        calls.loops[loop],
        carried,
        frozenset(_names_set(place if function is not None else outermost)),
        names.shared,
        frozenset(_names_read_after(place, loop)),
        names.passed,
        names.read,
        _refusal(loop, function, calls),
        isinstance(loop, ast.For),
    )


def _refusal(loop: PlainLoop, function: AnyFunction | None, calls: StepCalls) -> str:
    if loop in calls.mixed:
        return f"it takes a step, and {calls.mixed[loop]}() of another module, which it calls, has a loop of steps, too"
    if function is not None and (isinstance(function, ast.AsyncFunctionDef) or _is_generator(function)):
        return f"{function.name}() is a generator or a coroutine, and goes on elsewhere between two of its rounds"
    return ""


def _is_generator(function: AnyFunction) -> bool:
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in own_nodes(function))


def _own_jumps(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements in ``body`` that are not in a loop or function in it."""
    for node in body:
        yield node
        if not isinstance(node, (ast.For, ast.While, ast.AsyncFor, *_FUNCTIONS, ast.ClassDef)):
            yield from _own_jumps(ast.iter_child_nodes(node))


def _names_set(place: ast.AST) -> set[str]:
    """Names that statements in ``place`` set, and arguments of it."""
    inner = set(_set_by_comprehensions(place))
    names = {
        node.id
        for node in own_nodes(place)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in inner
    }
    if isinstance(place, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = place.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        names |= {one.arg for one in every if one.arg not in ("self", "cls")}
    return names


def _names_read_after(place: ast.AST, loop: PlainLoop) -> Iterator[str]:
    """Below it, in its ``else`` clause, and in functions, which may be called there."""
    end = loop.end_lineno or loop.lineno
    for node in own_nodes(place):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.lineno > end:
            yield node.id
    functions = [node for node in own_nodes(place) if isinstance(node, _FUNCTIONS) and node is not place]
    for part in (*loop.orelse, *functions):
        for node in ast.walk(part):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                yield node.id


def _names_declared(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """By ``global``."""
    return (name for node in nodes if isinstance(node, ast.Global) for name in node.names)


def _names_by_text(tree: ast.Module, nodes: Sequence[ast.AST]) -> set[str]:
    """Variables of the file that it may set by a text: ``globals()[name] = 1``, ``globals().update(rate=0.1)``, or as
    an attribute of ``sys.modules[__name__]``. Those that it sets elsewhere, and texts in it that are names."""
    if not any(_writes_by_text(node) for node in nodes):
        return set()
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    keywords = {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
    return _names_set(tree) | keywords | {text for text in texts if text.isidentifier()}


def _writes_by_text(node: ast.AST) -> bool:
    written: ast.AST | None = None
    if isinstance(node, ast.Subscript):
        if ast.unparse(node) == "sys.modules[__name__]":
            return True
        written = None if isinstance(node.ctx, ast.Load) else node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _WRITING:
        written = node.func.value
    return isinstance(written, ast.Call) and called(written) == "globals" and not written.args


def _names_passed(tree: ast.Module, calls: StepCalls) -> Iterator[str]:
    for loop in (node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.comprehension))):
        yield from _names_iterated(loop.iter)  # what it gives may be written in place: `for s, p in zip(slow, now)`
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        root = ast.unparse(call.func).partition(".")[0]
        if root in _CHANGE_NOTHING or called(call) in calls.functions:
            continue
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            if isinstance(argument, ast.Name):
                yield argument.id


def _names_written_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Lists, dictionaries and the like that functions change: ``seen.append(x)``, ``calls[0] += 1``."""
    for function in (node for node in nodes if isinstance(node, _FUNCTIONS)):
        for node in own_nodes(function):
            written: ast.AST | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _WRITING:
                written = node.func.value
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                written = node.value
            while isinstance(written, ast.Subscript):  # table[i][j] = 0
                written = written.value
            if isinstance(written, ast.Name):
                yield written.id


def _names_iterated(source: ast.expr) -> Iterator[str]:
    if isinstance(source, ast.Name):
        yield source.id
    elif isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and called(source) in _VIEWS:
        yield from _names_iterated(source.func.value)
    elif isinstance(source, ast.Call) and called(source) in _CHANGE_NOTHING:
        for argument in source.args:
            yield from _names_iterated(argument)


def _set_by_comprehensions(place: ast.AST) -> Iterator[ast.AST]:
    for node in own_nodes(place):
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            for generator in node.generators:
                yield from ast.walk(generator.target)


class _Iterators:
    """``next(batches)`` in a step, and the ``iter()`` whose result that is."""

    def __init__(self, file: str, calls: StepCalls) -> None:
        self._file = file
        self._places: list[ast.AST] = [loop for loop, steps in calls.loops.items() if steps]
        self._places += calls.whole_steps
        waiting, seen = [*self._places], {function.name for function in calls.whole_steps}
        while waiting:
            for call in calls_in(waiting.pop()):
                name = called(call)
                if name in calls.functions and name not in seen:
                    seen.add(name)
                    more = [one for one in calls.functions[name] if not _is_generator(one)]
                    self._places += more
                    waiting += more
        self._calls = [call for place in self._places for call in calls_in(place) if self._name(call)]
        self.names = {self._name(call) for call in self._calls}

    @staticmethod
    def _name(call: ast.Call) -> str:
        """What is asked for its next element, if it is a variable."""
        asked = _of_builtin(call, "next")
        return ast.unparse(asked) if isinstance(asked, (ast.Name, ast.Attribute)) else ""

    def rewrite(self, tree: ast.Module) -> None:
        for call in self._calls:
            asked = _of_builtin(call, "next")
            if asked is not None:  # a function may be in two of the places
                key = ast.parse(repr((self._file, self._name(call))), mode="eval").body
                for part in ast.walk(key):
                    ast.copy_location(part, call)
                call.func, call.args = _attribute("next", call), [key, asked, *call.args[1:]]
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and any(ast.unparse(target) in self.names for target in node.targets):
                made = node.value
                over = _of_builtin(made, "iter") if isinstance(made, ast.Call) else None
                if isinstance(made, ast.Call) and over is not None:
                    made.func, made.args = _attribute("iterator", made), [over, *made.args[1:]]


def _of_builtin(call: ast.Call, name: str) -> ast.expr | None:
    """What ``next(it)`` or ``it.__next__()`` is called of; None if it is another call."""
    if isinstance(call.func, ast.Name) and call.func.id == name and call.args:
        return call.args[0]
    by_method = isinstance(call.func, ast.Attribute) and call.func.attr == f"__{name}__" and not call.args
    owner = call.func.value if by_method and isinstance(call.func, ast.Attribute) else None
    return owner if isinstance(owner, (ast.Name, ast.Attribute)) else None


def _attribute(name: str, at: ast.expr) -> ast.expr:
    """``LOOPS.name``."""
    owner = ast.copy_location(ast.Name(HANDLE, ast.Load()), at)
    return ast.copy_location(ast.Attribute(owner, name, ast.Load()), at)


# -- the new text -----------------------------------------------------------------------------------


class _Rewriter(ast.NodeTransformer):
    def __init__(self, file: str, calls: StepCalls, texts: dict[int, LoopText]) -> None:
        self._file = file
        self._calls = calls
        self._texts = texts

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        return self._loop(node)

    def visit__Phases(self, node: _Phases) -> ast.AST | list[ast.stmt]:
        return self._loop(node)

    def visit_While(self, node: ast.While) -> ast.AST | list[ast.stmt]:
        return self._loop(node)

    def _loop(self, loop: PlainLoop) -> ast.AST | list[ast.stmt]:
        text = self._texts.get(_key(loop)) if loop in self._calls.loops else None
        handle = f"__flashrecovery_{'phases' if isinstance(loop, _Phases) else 'loop'}_{loop.lineno}__"
        if text is not None and not text.refused:
            if isinstance(loop, _Phases):
                loop.body = [self._passing(handle, statement) for statement in loop.body]
            if text.steps:
                _after_the_step(loop.body, self._calls)
            else:
                _after_rests(loop.body, self._calls)
                self._after_calls(loop, loop.body, handle, text)
        self.generic_visit(loop)
        if text is None or text.refused:
            return loop
        # An else clause that leaves the loop around this one stands behind ours, which are around this one, too.
        leaves = any(isinstance(node, (ast.Break, ast.Continue)) for node in _own_jumps(loop.orelse))
        behind: list[ast.stmt] = []
        if leaves:
            under = self._at(loop, f"if {handle}.exhausted:\n    pass")
            assert isinstance(under, ast.If)
            under.body, behind = loop.orelse, [under]
            loop.orelse = [self._at(loop, f"{handle}.exhausted = True")]
        round_ = self._at(loop, f"with {handle}:\n    pass")
        assert isinstance(round_, ast.With)
        round_.body = [*self._restored(loop, handle, text), *loop.body]
        inner: list[ast.stmt]
        if isinstance(loop, ast.For):
            call = self._at(loop, f"{handle}.iterate(None)")
            assert isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
            call.value.args = _numbered(loop.iter) if text.steps else [loop.iter]
            loop.iter, loop.body = call.value, [round_]
            loop.orelse = [*self._restored(loop, handle, text, whole=True), *loop.orelse]
            inner = [loop]
        else:
            more = self._at(loop, f"while {handle}.goes_on():\n    if not None:\n        break")
            assert isinstance(more, ast.While) and isinstance(more.body[0], ast.If)
            test = more.body[0]
            assert isinstance(test.test, ast.UnaryOp)
            test.test.operand = loop.test
            test.body = [*loop.orelse, *test.body]
            more.body = [*self._restored(loop, handle, text), test, round_]
            round_.body = loop.body
            inner = [more]
        entered = self._at(loop, f"{handle} = {HANDLE}.enter({self._file!r}, {_key(loop)})")
        again = self._at(loop, f"while {handle}.runs():\n    with {handle}.whole:\n        pass")
        assert isinstance(again, ast.While) and isinstance(again.body[0], ast.With)
        again.body[0].body = inner
        return [entered, again, *self._restored(loop, handle, text, whole=True), *behind]

    @staticmethod
    def _passing(handle: str, statement: ast.stmt) -> ast.stmt:
        (made,) = ast.parse(f"with {handle}.passing:\n    pass").body
        assert isinstance(made, ast.With)
        for node in (made, *ast.walk(made.items[0])):
            ast.copy_location(node, statement)
        made.body = [statement]
        return made

    def _after_calls(self, loop: PlainLoop, body: list[ast.stmt], handle: str, text: LoopText) -> None:
        """Repeat the code after each statement that reaches a step loop in another function: the code on the way there
        was void, except for what the statement itself sets."""
        for number, statement in reversed([*enumerate(body)]):
            if isinstance(statement, (ast.For, ast.While, ast.AsyncFor)):
                continue
            blocks = [block for block in _blocks(statement) if block]
            if blocks:
                for block in blocks:
                    self._after_calls(loop, block, handle, text)
            elif self._calls.comes_to_a_loop(statement):
                body[number + 1 : number + 1] = self._restored(loop, handle, text, _names_set(statement))

    def _restored(
        self, loop: PlainLoop, handle: str, text: LoopText, but: Collection[str] = (), *, whole: bool = False
    ) -> list[ast.stmt]:
        """Assignments of what has been brought back; at the beginning of a round not of what the loop has just set."""
        target = _names_set(loop.target) if isinstance(loop, ast.For) and not whole else set()
        names = sorted(text.local - target - {*but})
        if not names:
            return []
        lines = [f"if {handle}.restoring:"]
        lines += [f"    if {name!r} in {handle}.values: {name} = {handle}.values[{name!r}]" for name in names]
        return [self._at(loop, "\n".join(lines)), self._at(loop, f"{handle}.restored()")]

    def _at(self, loop: PlainLoop, text: str) -> ast.stmt:
        """Statements of ours, in the line of the loop."""
        (statement,) = ast.parse(text).body
        for node in ast.walk(statement):
            if hasattr(node, "lineno"):
                ast.copy_location(node, loop)
                node.end_lineno, node.end_col_offset = loop.lineno, loop.col_offset  # type: ignore[attr-defined]
        return statement


def _after_the_step(body: list[ast.stmt], calls: StepCalls) -> None:
    """Put the end of the step after the last statement that takes it, in the smallest block that has all of them."""
    taking = [number for number, statement in enumerate(body) if calls.takes_step(statement)]
    only = body[taking[0]] if len(taking) == 1 else None
    if only is not None:
        blocks = [block for block in _blocks(only) if any(calls.takes_step(statement) for statement in block)]
        if len(blocks) == 1 and not any(calls.takes_step(part) for part in _head(only)):
            _after_the_step(blocks[0], calls)
            return
    body.insert(taking[-1] + 1, _Taken.like(body[taking[-1]]))


def _after_rests(body: list[ast.stmt], calls: StepCalls) -> None:
    """The same in an outer loop, where the rest of an accumulation makes a step."""
    for number, statement in reversed([*enumerate(body)]):
        if isinstance(statement, (ast.For, ast.While, ast.AsyncFor)) or not calls.takes_step(statement):
            continue
        blocks = [block for block in _blocks(statement) if block]
        for block in blocks:
            _after_rests(block, calls)
        if not blocks:
            body.insert(number + 1, _Taken.like(statement))


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, ast.If):
        return [statement.body, statement.orelse]
    if isinstance(statement, ast.With):
        return [statement.body]
    return []


def _head(statement: ast.stmt) -> Sequence[ast.AST]:
    if isinstance(statement, ast.If):
        return [statement.test]
    return [item.context_expr for item in statement.items] if isinstance(statement, ast.With) else []


def _numbered(iterable: ast.expr) -> list[ast.expr]:
    """What the loop runs over and, of an ``enumerate()`` of that, the first number: so that its length is known, and it
    can be read again."""
    if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) and iterable.func.id == "enumerate":
        first = [*iterable.args[1:], *(keyword.value for keyword in iterable.keywords if keyword.arg == "start")]
        plain = len(iterable.args) in (1, 2) and not any(isinstance(part, ast.Starred) for part in iterable.args)
        if plain and len(first) == len(iterable.args) - 1 + len(iterable.keywords) <= 1:
            zero = ast.copy_location(ast.Constant(0), iterable)
            return [iterable.args[0], first[0] if first else zero]
    return [iterable]


class _Taken:
    """``LOOPS.step_taken()``."""

    @staticmethod
    def like(statement: ast.stmt) -> ast.stmt:
        (made,) = ast.parse(f"{HANDLE}.step_taken()").body
        for node in ast.walk(made):
            if hasattr(node, "lineno"):
                ast.copy_location(node, statement)
                node.lineno = node.end_lineno = statement.end_lineno or statement.lineno  # type: ignore[attr-defined]
                node.end_col_offset = node.col_offset  # type: ignore[attr-defined]
        return made


def _import_loops(tree: ast.Module) -> None:
    """After the docstring and what comes from ``__future__``."""
    number = 0
    for statement in tree.body:
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not docstring and not future:
            break
        number += 1
    (imported,) = ast.parse(f"from {_MODULE} import LOOPS as {HANDLE}").body
    tree.body.insert(number, imported)
