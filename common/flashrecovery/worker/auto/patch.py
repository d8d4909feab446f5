"""``--auto=print``: the text of a script with the lines by hand that do what ``--auto`` does. Pure.

The loop of steps, and one of epochs around it, become one loop over ``recovery.steps(...)``::

    for epoch in range(epochs):              rounds = len(loader)
        sampler.set_epoch(epoch)             for step in recovery.steps(epochs * rounds):
        total = 0.0                              epoch, number = divmod(step.index, rounds)
        for x, y in loader:                      total = kept.total
            loss = train(x, y)                   with step:
            optimizer.step()                         if number == 0:
            total += loss                                total = 0.0
        scheduler.step()                             x, y = next(data)
        print(total)                                 loss = train(x, y)
                                                     optimizer.step()
                                                 total += loss
                                                 if number == rounds - 1:
                                                     scheduler.step()
                                                     if step.committed:
                                                         print(total)
                                                 kept.total = total

What cannot be written so is refused with its line and the reason.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flashrecovery.worker.auto.micro_batches import Accumulated, accumulated
from flashrecovery.worker.auto.straight import NotByHand, jumps, straight, word_of
from flashrecovery.worker.own_loops.rewrite import (
    NONE,
    Makes,
    PlainLoop,
    StepCalls,
    called,
    called_from,
    calls_in,
    own_nodes,
)
from flashrecovery.worker.script_text.loop_carried import carried_by_loop

_ENDLESS = "sys.maxsize"
_PURE = frozenset(
    (
        *("item", "hex", "tolist", "format", "mean", "sum", "float", "cpu", "detach", "numpy", "items", "keys"),
        *("values", "norm", "max", "min", "abs", "strip", "join", "get_last_lr", "get_scale", "len", "int", "str"),
        *("round", "sorted", "repr", "list", "dict", "type", "bool", "get_rank", "time", "perf_counter"),
    )
)  # fmt: skip
"""What may be called for a line that is printed where the step counts, and left out where it does not."""
THIS_FILE = "sys.modules[__name__]"
_LOGS = ("debug", "info", "warning", "error", "log", "exception")


@dataclass(frozen=True)
class Running:
    """What is known only when the script runs, at its first step.

    Attributes:
        models: of each, the expression that leads to it, and those of its optimizers.
        objects: expressions by the names under which they are registered.
        generators: of these expressions, those of generators of random numbers.
        own: of each object with plain attributes, its expression and those that change.
        sampler_of: the object whose ``set_epoch`` is called for a loader's expression; None: its batches cannot be
            counted.
        value_of: what an expression gives; None: nothing.
        plain: whether a variable's value is a number, a text, a tensor, a container of these or an object of the
            script's with such attributes; None: there is none. Asked with the variables that the loop sets: what other
            ones lead to stays where it is.
        of_file: whether a name is one of the file's variables, which the function of the loop has not itself.
        of_function: whether it is one of a function around that of the loop.
        known: whether a variable leads to what is registered, or never changes (a function, a loader).
        whose: what a name is, for a refusal.
        in_modules: of expressions of the script's modules, the names of what they keep and change.
        of_modules: paths of what modules keep and change besides, which the new lines do not register.
    """

    models: Sequence[tuple[str, Sequence[str]]]
    objects: Mapping[str, str]
    generators: frozenset[str]
    own: Mapping[str, Sequence[str]]
    sampler_of: Callable[[str], Sequence[object] | None]
    value_of: Callable[[str], object]
    plain: Callable[[str, Collection[str]], bool | None]
    known: Callable[[str], bool]
    whose: Callable[[str], str] = field(default=lambda name: "")
    of_file: Callable[[str], bool] = field(default=lambda name: False)
    of_function: Callable[[str], bool] = field(default=lambda name: False)
    in_modules: Mapping[str, Sequence[str]] = field(default_factory=dict)
    of_modules: Sequence[str] = ()


def by_hand(text: str, step_line: int, epoch_line: int, running: Running, elsewhere: Makes = NONE) -> str:
    """The new text. ``epoch_line``: 0 if there is one loop. Raises NotByHand."""
    loops = _Loops.of(text, step_line, epoch_line, elsewhere)
    names = _Names.of(loops.tree)
    if loops.outer is None or loops.accumulation is not None or not any(jumps(loops.loop.body)):
        return _written(loops, running, names)
    new = straight(text, loops.loop, names.left)
    try:
        loops = _Loops.of(new.text, step_line, epoch_line, elsewhere)
        return _written(replace(loops, branches=new.branches, leaves=new.leaves), running, names)
    except NotByHand as e:
        raise NotByHand(new.origin(e.line), str(e)) from e


def _written(loops: _Loops, running: Running, names: _Names) -> str:
    _Checks(loops, running).run()
    return _Writer(loops, running, names).write()


@dataclass(frozen=True)
class _Loops:
    """The loop of steps, and perhaps one of epochs around it.

    Attributes:
        branches: lines of ``if`` statements around steps that are taken unless their round is gone on with, or the
            loop left.
        leaves: ``break`` has left the loop of steps, in place of which a variable is set.
    """

    tree: ast.Module
    text: str
    calls: StepCalls
    loop: PlainLoop
    outer: PlainLoop | None
    accumulation: Accumulated | None
    branches: frozenset[int] = frozenset()
    leaves: bool = False

    @staticmethod
    def of(text: str, step_line: int, epoch_line: int, elsewhere: Makes) -> _Loops:
        tree = ast.parse(text)
        calls = StepCalls(tree, elsewhere)
        loops = {loop.lineno: loop for loop in calls.loops}
        loop = loops[step_line]
        return _Loops(tree, text, calls, loop, loops.get(epoch_line), accumulated(loop, calls.takes_step))

    @property
    def whole(self) -> PlainLoop:
        return self.outer or self.loop

    @property
    def last(self) -> list[ast.stmt]:
        """Statements below the loop of steps, in that of epochs."""
        return [] if self.outer is None else self.outer.body[self.outer.body.index(self.loop) + 1 :]


# -- what is refused --------------------------------------------------------------------------------


class _Checks:
    def __init__(self, loops: _Loops, running: Running) -> None:
        self._tree, self._text, self._calls = loops.tree, loops.text, loops.calls
        self._loops, self._loop, self._outer, self._whole = loops, loops.loop, loops.outer, loops.whole
        self._accumulation, self._running = loops.accumulation, running

    def run(self) -> None:
        for loop in [self._loop] if self._outer is None else [self._outer, self._loop]:
            if loop.orelse:
                raise NotByHand(loop.orelse[0].lineno, "the loop has an else clause")
        if self._outer is not None:
            self._around(self._outer)
        self._jumps()
        self._others()
        self._lines()
        self._steps()

    def _jumps(self) -> None:
        for node in own_nodes(self._whole):
            if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom, ast.Await)):
                raise NotByHand(node.lineno, "the function is left, or goes on elsewhere, in the midst of its loop")
        inner = [*jumps(self._loop.body)]
        if self._accumulation is not None and inner:
            raise NotByHand(inner[0].lineno, "a round of several that make a step is left in the midst of it")
        last = {jump for jump in jumps(self._loops.last) if isinstance(jump, ast.Break)}
        for jump in () if self._outer is None else jumps(self._outer.body):
            if jump not in last:
                raise NotByHand(
                    jump.lineno,
                    f"`{word_of(jump)}` in the loop of epochs around that of steps: both become one, which only "
                    "`break` below the loop of steps leaves",
                )

    def _others(self) -> None:
        """Names that are set by functions, objects that are made again, and iterators that are asked for more."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Nonlocal):
                names = ", ".join(node.names)
                raise NotByHand(node.lineno, f"a function sets variables of another one (`nonlocal {names}`)")
        places = (self._whole, *called_from(self._whole, self._calls.functions))
        held = {path.rpartition(".")[2]: path for path in self._running.own if "." in path}
        for node in (node for place in places for node in ast.walk(place)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in held:
                raise NotByHand(node.lineno, f"{held[node.attr]}, whose attributes change, is made again in the loop")
        for place in places:
            for call in (node for node in ast.walk(place) if isinstance(node, ast.Call)):
                if isinstance(call.func, ast.Name) and call.func.id in ("next", "exec", "eval"):
                    if call.func.id == "next" and call.args and _is_call(call.args[0], "iter"):
                        continue  # the first element, each time
                    raise NotByHand(call.lineno, f"a step calls `{ast.unparse(call)}`: let it read recovery.data()")

    def _lines(self) -> None:
        """Statements of the loops are on separate lines."""
        first, last = self._whole.lineno, self._whole.end_lineno or 0
        for token in tokenize.generate_tokens(io.StringIO(self._text).readline):
            several = token.start[0] != token.end[0] and token.type == tokenize.STRING
            if several and first <= token.start[0] <= last:
                raise NotByHand(token.start[0], "a text of several lines in the loop")
        for node in own_nodes(self._whole):
            for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    self._alone(block, getattr(node, "lineno", 0))

    def _alone(self, block: list[ast.stmt], header: int) -> None:
        last = header
        for statement in block:
            if statement.lineno <= last:
                raise NotByHand(statement.lineno, "several statements in one line of the loop")
            last = statement.end_lineno or statement.lineno

    def _steps(self) -> None:
        body = self._loop.body if self._accumulation is None else self._accumulation.branch.body
        for statement in body:
            if self._calls.takes_step(statement):
                self._unconditional(statement, frozenset())

    def _unconditional(self, statement: ast.stmt, within: frozenset[str]) -> None:
        """Every round must make the same step of it."""
        if isinstance(statement, ast.If):
            blocks = [statement.body, statement.orelse]
            if statement.lineno in self._loops.branches:
                pass
            elif not all(any(self._calls.takes_step(one) for one in block) for block in blocks):
                raise NotByHand(
                    statement.lineno,
                    f"the optimizer's step is taken in some rounds only (`if {ast.unparse(statement.test)}`), and not "
                    "as by `if (i + 1) % n == 0`: all micro-batches of a step belong into one `with step:`",
                )
        elif isinstance(statement, (ast.With, ast.For, ast.While)):
            blocks = [statement.body]
        elif isinstance(statement, (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign)):
            names = {called(call) for call in calls_in(statement)} & self._calls.functions.keys() - within
            blocks = [one.body for name in sorted(names) for one in self._calls.functions[name]]
            within = within | names
        else:
            raise NotByHand(statement.lineno, "the optimizer's step is taken in the midst of another statement")
        for block in blocks:
            for one in block:
                if self._calls.takes_step(one) and not isinstance(one, ast.FunctionDef):
                    self._unconditional(one, within)

    def _around(self, outer: PlainLoop) -> None:
        for statement in outer.body:
            if statement is not self._loop and self._calls.takes_step(statement):
                raise NotByHand(statement.lineno, "an optimizer's step outside of the loop of steps")
        if self._loop not in outer.body:
            raise NotByHand(self._loop.lineno, "the loop of steps is in the midst of another statement")


# -- the new text -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """Names that the new text adds; none of them is in the script."""

    recovery: str
    step: str
    kept: str
    data: str
    rounds: str
    number: str
    left: str

    @staticmethod
    def of(tree: ast.Module) -> _Names:
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        used |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        choices = (
            ("recovery", "flash_recovery"),
            ("step", "attempt", "recovery_step"),
            ("kept", "kept_state", "recovery_kept"),
            ("data", "batches", "recovery_data"),
            ("rounds", "rounds_of_epoch"),
            ("number", "round_number", "number_of_round"),
            ("left", "epoch_is_left", "left_epoch"),
        )
        found = []
        for names in choices:
            free = [name for name in names if name not in used]
            if not free:
                raise NotByHand(1, f"all of the names {', '.join(names)} are taken")
            found.append(free[0])
        return _Names(*found)


@dataclass(frozen=True)
class _Rounds:
    """How the loop of steps goes on.

    Attributes:
        count: expression of how many rounds there are; "" of a ``while`` loop.
        first: statements at the beginning of a round's block.
        before: statements above the block.
        data: what is to be read by ``recovery.data()``; "" if nothing is.
        dropped: lines of the script that are left out.
    """

    count: str
    first: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    data: str = ""
    dropped: frozenset[int] = frozenset()


class _Writer:
    def __init__(self, loops: _Loops, running: Running, names: _Names) -> None:
        self._loops, self._running, self._names = loops, running, names
        self._tree, self._calls = loops.tree, loops.calls
        self._loop, self._outer, self._whole, self._accumulation = (
            loops.loop,
            loops.outer,
            loops.whole,
            loops.accumulation,
        )
        self._lines = loops.text.splitlines()
        self._set = {
            node.id
            for node in own_nodes(self._whole)
            if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del))
        }
        self._indent = self._prefix(self._whole)
        self._unit = self._prefix(self._whole.body[0])[len(self._indent) :]
        self._rounds = self._rounds_of()
        self._kept: list[str] = []
        self._of_file = set[str]()
        """Variables of the file that change, where a function has the loop."""
        self._asking: set[int] = set()
        """Lines of functions outside of the loop that print, and ask whether the attempt counts."""

    def write(self) -> str:
        self._kept = self._carried(self._loop_lines())
        above, loop, below = self._above(), self._loop_lines(), self._below()
        end = self._whole.end_lineno or 0
        lines = [
            *self._outside(range(1, self._whole.lineno)),
            *above,
            *loop,
            *below,
            *self._outside(range(end + 1, len(self._lines) + 1)),
        ]
        new = "\n".join(self._with_imports(lines)) + "\n"
        ast.parse(new)
        return new

    # -- rounds -----------------------------------------------------------------------------------

    def _rounds_of(self) -> _Rounds:
        loop, number = self._loop, self._number
        if isinstance(loop, ast.While):
            if self._outer is not None:
                raise NotByHand(loop.lineno, "a `while` loop of steps in one of epochs: its rounds cannot be counted")
            always = isinstance(loop.test, ast.Constant) and loop.test.value
            return _Rounds("", before=() if always else (f"if {_negated(loop.test)}:", f"{self._unit}break"))
        target, iterable = loop.target, loop.iter
        first: tuple[str, ...] = ()
        if _is_call(iterable, "enumerate"):
            assert isinstance(iterable, ast.Call)
            if not isinstance(target, ast.Tuple) or len(target.elts) != 2 or iterable.keywords:
                raise NotByHand(loop.lineno, f"`{ast.unparse(iterable)}`")
            begin = ast.unparse(iterable.args[1]) if len(iterable.args) > 1 else "0"
            if self._accumulation is None:
                first = (f"{ast.unparse(target.elts[0])} = {number if begin == '0' else f'{begin} + {number}'}",)
            target, iterable = target.elts[1], iterable.args[0]
        if _is_call(iterable, "range"):
            if self._loops.leaves:
                raise NotByHand(
                    loop.lineno,
                    "`break` in a loop over a range() with one of epochs around it: how many rounds an epoch has "
                    "cannot be known",
                )
            return self._of_range(target, iterable, first)
        return self._of_loader(target, iterable, first)

    @property
    def _number(self) -> str:
        """Expression of the number of the round."""
        return self._names.number if self._outer is not None else f"{self._names.step}.index"

    def _of_range(self, target: ast.expr, iterable: ast.expr, first: tuple[str, ...]) -> _Rounds:
        assert isinstance(iterable, ast.Call)
        self._constant(iterable)
        text = ast.unparse(iterable)
        plain = len(iterable.args) == 1
        count = ast.unparse(iterable.args[0]) if plain else f"len({text})"
        if self._accumulation is not None and ast.unparse(target) == self._accumulation.number:
            return _Rounds(self._steps_of(count), first)
        value = self._number if plain else f"{text}[{self._number}]"
        name = ast.unparse(target)
        is_read = any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in self._all())
        return _Rounds(count, (*first, f"{name} = {value}") if is_read or name != "_" else first)

    def _all(self) -> Iterator[ast.AST]:
        return ast.walk(self._tree)

    def _constant(self, iterable: ast.expr) -> None:
        for node in ast.walk(iterable):
            if isinstance(node, ast.Name) and node.id in self._set:
                raise NotByHand(iterable.lineno, f"`{ast.unparse(iterable)}`: {node.id} is set in the loop")
            if isinstance(node, ast.Call) and ast.unparse(node.func) not in ("range", "len", "int", "min", "max"):
                raise NotByHand(
                    iterable.lineno,
                    f"`{ast.unparse(iterable)}`: what {ast.unparse(node.func)}() gives may be another thing each time",
                )

    def _of_loader(self, target: ast.expr, iterable: ast.expr, first: tuple[str, ...]) -> _Rounds:
        path = ast.unparse(iterable)
        samplers = self._running.sampler_of(path) if isinstance(iterable, (ast.Name, ast.Attribute)) else None
        if samplers is None:
            raise NotByHand(
                self._loop.lineno,
                f"what the loop runs over (`{path}`) is neither a range() nor a DataLoader over a data set of a known "
                "length, so that its rounds cannot be counted",
            )
        if any(isinstance(node, ast.Name) and node.id in self._set for node in ast.walk(iterable)):
            raise NotByHand(self._loop.lineno, f"`{path}` is re-created in the loop")
        dropped = self._told_epochs(samplers)
        take = f"{ast.unparse(target).strip('()')} = next({self._names.data})"
        return _Rounds(self._steps_of(f"len({path})"), (*first, take), data=path, dropped=dropped)

    def _steps_of(self, count: str) -> str:
        """How many steps ``count`` rounds make. Raises NotByHand if some of them belong to no step."""
        micro = self._accumulation
        if micro is None:
            return count
        every = ast.parse(micro.every, mode="eval").body
        for node in ast.walk(every):
            if isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in self._set):
                raise NotByHand(micro.branch.lineno, f"`{micro.every}` may be another number in each step")
        if micro.rest:
            return f"-(-{_factor(count)} // {_factor(micro.every)})"
        rounds, number = self._running.value_of(count), self._running.value_of(micro.every)
        if isinstance(rounds, int) and isinstance(number, int) and rounds % number:
            raise NotByHand(
                micro.branch.lineno,
                f"{count} is {rounds}, of which steps of {number} micro-batches leave {rounds % number}: take a step "
                f"there, too (`or {micro.number} + {1 - micro.first} == {count}`), or drop them",
            )
        return f"{_factor(count)} // {_factor(micro.every)}"

    def _told_epochs(self, samplers: Sequence[object]) -> frozenset[int]:
        """Lines that tell the sampler its epoch, which recovery.data() does."""
        if self._outer is None or not samplers:
            return frozenset()
        if isinstance(self._outer, ast.While):
            raise NotByHand(
                self._outer.lineno,
                "recovery.data() tells the sampler its epoch, which a `while` loop of epochs does not count: make it "
                "one over a range()",
            )
        before = self._outer.body[: self._outer.body.index(self._loop)]
        for statement in before:
            call = statement.value if isinstance(statement, ast.Expr) else None
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            told = call.func.attr == "set_epoch" and any(
                self._running.value_of(ast.unparse(call.func.value)) is one for one in samplers
            )
            if told and ast.unparse(call.args[0]) == ast.unparse(self._outer.target):
                return frozenset(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
        raise NotByHand(
            self._outer.lineno,
            "recovery.data() tells the sampler its epoch, which this script does not at the beginning of each epoch: "
            "write `sampler.set_epoch(epoch)` there first",
        )

    # -- variables --------------------------------------------------------------------------------

    def _carried(self, loop_lines: Sequence[str]) -> list[str]:
        """Variables that a round of the new loop may read as the one before has left them, and those that are read
        below it. Raises NotByHand if something else is carried."""
        lines = [*self._lines[: self._whole.lineno - 1], *loop_lines, *self._lines[self._whole.end_lineno or 0 :]]
        tree = ast.parse("\n".join(lines))
        loop = next(n for n in ast.walk(tree) if isinstance(n, ast.For) and n.lineno == self._whole.lineno)
        carried = carried_by_loop(tree, loop)
        names = self._names
        own = {names.recovery, names.step, names.kept, names.data, names.rounds, names.number, names.left}
        targets = {*_targets(self._outer), *_targets(self._loop)}
        end = self._whole.end_lineno or 0
        after = {
            n.id
            for n in own_nodes(self._function())
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.lineno > end
        }
        by_epoch, kept = self._made_by_epoch(), set[str]()
        for path in sorted(carried.names | carried.set_here):
            root, _, rest = path.partition(".")
            is_plain = self._running.plain(root, self._set)
            changes = path in carried.names or root in by_epoch
            changes = changes or (bool(is_plain or rest) and path not in carried.remade)
            if root in own or (root in targets and root not in after):
                continue
            if not changes and (root not in after or root not in self._set):
                continue
            if self._running.of_file(root) and (is_plain or not rest) and not self._running.known(root):
                self._of_file.add(root)
            elif is_plain or (is_plain is None and not rest):
                kept.add(root)
            elif (rest and self._is_own(root, rest)) or (root in self._running.own and root not in self._set):
                continue
            elif root in self._set or not self._running.known(root):
                raise NotByHand(
                    self._whole.lineno,
                    f"{path}{self._running.whose(root)} changes from step to step, and is not a number, a text, a "
                    "tensor or a container of these, nor registered",
                )
        kept |= self._set_by_functions()
        for name in sorted(kept):
            if self._running.of_function(name):
                raise NotByHand(self._whole.lineno, f"{name}, which changes, is a variable of another function")
        for path in self._running.own:
            root = path.partition(".")[0].partition("[")[0]
            if root in self._set and self._running.plain(root, self._set):
                kept.add(root)  # methods may change what they do not seem to read
            if root in self._set - kept:
                raise NotByHand(self._whole.lineno, f"{path}, whose attributes change, is re-created in the loop")
        return sorted(kept)

    def _made_by_epoch(self) -> set[str]:
        """Variables that only the first round of an epoch sets, and others use."""
        if self._outer is None:
            return set()
        above = self._outer.body[: self._outer.body.index(self._loop)]
        return _names_in(above, ast.Store) & _names_in([self._loop, *self._loops.last], ast.Load)

    def _set_by_functions(self) -> set[str]:
        """Variables of the file that functions set by ``global``, if the file itself has the loop. Those that are set
        for a function that has it are noted. Raises NotByHand for others than plain ones."""
        found, here = set[str](), isinstance(self._function(), ast.Module)
        places = {
            node for one in (self._whole, *called_from(self._whole, self._calls.functions)) for node in ast.walk(one)
        }
        for statement in (node for node in ast.walk(self._tree) if isinstance(node, ast.Global)):
            for name in statement.names:
                if self._running.plain(name, (*self._set, name)) is not False:
                    (found if here else self._of_file).add(name)
                elif statement in places or name in self._set:
                    raise NotByHand(
                        statement.lineno,
                        f"a function sets {name}{self._running.whose(name)} (`global {name}`), which is not a number, "
                        "a text, a tensor or a container of these",
                    )
        return found

    def _is_own(self, root: str, rest: str) -> bool:
        return any(f"{root}.{rest}".startswith(f"{path}.") for path in self._running.own)

    def _function(self) -> ast.AST:
        """The innermost one around the loop, or the module."""
        found: ast.AST = self._tree
        for node in ast.walk(self._tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and self._whole in set(own_nodes(node)):
                found = node
        return found

    def _bound_before(self) -> set[str]:
        """Names that have a value above the loops, in their function or outside of it."""
        function = self._function()
        names = {
            node.id
            for node in own_nodes(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno < self._whole.lineno
        }
        if isinstance(function, ast.FunctionDef):
            arguments = function.args
            names |= {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        return names

    # -- lines ------------------------------------------------------------------------------------

    def _above(self) -> list[str]:
        names, running = self._names, self._running
        lines = [*_named(running.of_modules), f"{names.recovery} = flashrecovery.init()"]
        used = self._used()
        objects = {name: path for name, path in running.objects.items() if not self._is_idle(path, used)}
        own = [
            (keyword_of(path), path, attributes)
            for path, attributes in running.own.items()
            if re.split(r"\W", path)[0] not in self._set
        ]
        per_rank = []
        if self._kept:
            bound = self._bound_before()
            values = [f"{name}={name if name in bound else None}" for name in self._kept]
            lines += self._call(f"{names.kept} = types.SimpleNamespace", values)
            own.append((names.kept, names.kept, self._kept))
        modules = {THIS_FILE: sorted(self._of_file)} if self._of_file else {}
        for module, variables in running.in_modules.items():
            here = self._kept if module == THIS_FILE and isinstance(self._function(), ast.Module) else []
            modules[module] = sorted({*variables, *modules.get(module, ())} - {*here})
        own += [("variables" if m == THIS_FILE else keyword_of(m), m, names) for m, names in modules.items() if names]
        for name, path, attributes in own:
            free = next(n for n in (name, f"{name}_attributes", f"{name}_own") if n not in objects)
            objects[free] = f"flashrecovery.KeptAttributes({path}, {', '.join(map(_quoted, attributes))})"
            per_rank.append(free)
        calls = [[f"model={model}", _optimizers(optimizers)] for model, optimizers in running.models]
        self._made_before(
            [*objects.values(), *(path for _, path, _ in own), *(p for m, o in running.models for p in (m, *o))]
        )
        calls[0] += [f"{name}={path}" for name, path in objects.items()]
        if per_rank:
            calls[0].append(f"per_rank=[{', '.join(map(_quoted, per_rank))}]")
        for arguments in calls:
            lines += self._call(f"{names.recovery}.register", [one for one in arguments if one])
        if self._rounds.data:
            first = self._first_epoch() if self._rounds.dropped else ""
            more = f", first_epoch={first}" if first else ""
            lines.append(f"{names.data} = {names.recovery}.data({self._rounds.data}{more})")
        if self._outer is not None:
            lines.append(f"{names.rounds} = {self._rounds.count}")
        if self._accumulation is not None and not self._accumulation.rest:
            count, every = _factor(self._accumulation.count), _factor(self._accumulation.every)
            lines.append(f'assert {count} % {every} == 0, "each micro-batch belongs to a step"')
        return [f"{self._indent}{line}" for line in lines]

    def _made_before(self, paths: Iterable[str]) -> None:
        """Raises NotByHand if one of them is not there when the loops begin."""
        late = self._set - self._bound_before()
        for path in paths:
            if re.split(r"\W", path)[0] in late:
                raise NotByHand(self._whole.lineno, f"{path} is made in the loop: make it above")

    def _used(self) -> set[str]:
        """Names that the loops and the functions that they call read."""
        places = [self._whole, *called_from(self._whole, self._calls.functions)]
        return {node.id for place in places for node in ast.walk(place) if isinstance(node, ast.Name)}

    def _is_idle(self, path: str, used: set[str]) -> bool:
        """A generator that is used above the loops alone."""
        return path in self._running.generators and re.split(r"\W", path)[0] not in used

    def _call(self, function: str, arguments: Sequence[str]) -> list[str]:
        line = f"{function}({', '.join(arguments)})"
        if len(line) + len(self._indent) <= 100:
            return [line]
        return [f"{function}(", *(f"{self._unit}{one}," for one in arguments), ")"]

    def _loop_lines(self) -> list[str]:
        names, unit = self._names, self._unit
        i1, i2 = self._indent + unit, self._indent + unit * 2
        lines = [f"{self._indent}for {names.step} in {names.recovery}.steps({self._count()}):"]
        lines += [f"{i1}{line}" for line in self._place()]
        lines += [f"{i1}{name} = {names.kept}.{name}" for name in self._kept]
        lines += [f"{i1}{line}" for line in self._test()]
        lines += [f"{i1}{line}" for line in self._rounds.before]
        lines.append(f"{i1}with {names.step}:")
        before, after = self._around()
        shown = self._region(before, i1, i2 + unit)
        if any(line.strip() and not line.strip().startswith("#") for line in shown):
            lines += [f"{i2}if {names.number} == 0:", *shown]
        lines += self._round(i1, i2) if self._accumulation is None else self._micro_batches(i1, i2, self._accumulation)
        is_last = f"{names.number} == {names.rounds} - 1"
        if self._loops.last or self._loops.leaves:
            lines += [f"{i1}if {names.left} or {is_last}:" if self._loops.leaves else f"{i1}if {is_last}:"]
            lines += self._region(after, i1, i2, gated=self._loops.last)
        if self._loops.leaves:
            lines += [f"{i2}{names.data}.next_epoch()"]
        return [*lines, *self._stores(i1)]

    def _place(self) -> list[str]:
        """Which epoch it is, and which round of it."""
        names, outer = self._names, self._outer
        if outer is None:
            return []
        if self._loops.leaves:  # epochs may have fewer rounds
            epoch, number = f"{names.data}.epoch", f"{names.data}.position.batch"
        else:
            epoch, number = f"{names.step}.index // {names.rounds}", f"{names.step}.index % {names.rounds}"
        if isinstance(outer, ast.While):
            return [f"{names.number} = {number}"]
        shift = self._shift()
        if not self._loops.leaves:
            place = [f"{self._epoch()}, {names.number} = divmod({names.step}.index, {names.rounds})"]
            return [*place, shift] if shift else place
        return [f"{self._epoch()}, {names.number} = {epoch}, {number}", *([shift] if shift else [])]

    def _test(self) -> list[str]:
        """Whether there is another epoch, where that is not known from the number of steps."""
        outer, names = self._outer, self._names
        if isinstance(outer, ast.While) and not (isinstance(outer.test, ast.Constant) and outer.test.value):
            return [f"if {names.number} == 0 and {_negated(outer.test)}:", f"{self._unit}break"]
        if isinstance(outer, ast.For) and self._loops.leaves:
            assert isinstance(outer.iter, ast.Call)
            return [f"if {self._epoch()} >= {ast.unparse(outer.iter.args[-1])}:", f"{self._unit}break"]
        return []

    def _round(self, i1: str, i2: str) -> list[str]:
        loop = self._loop
        lines = [f"{i2}{line}" for line in self._rounds.first]
        taking = max(n for n, one in enumerate(loop.body) if self._calls.takes_step(one))
        own = self._prefix(loop.body[0])
        block, rest = self._split(loop, taking)
        lines += self._region(block, own, i2)
        self._hidden_lines([*loop.body[taking + 1 :], *self._loops.last])
        return [*lines, *self._region(rest, own, i1, gated=loop.body[taking + 1 :])]

    def _micro_batches(self, i1: str, i2: str, micro: Accumulated) -> list[str]:
        """A loop over those of one step; where nothing comes below the step, that stands below this loop."""
        loop, branch, i3 = self._loop, micro.branch, i2 + self._unit
        every, more = _factor(micro.every), f" + {micro.first}" if micro.first else ""
        begin = f"{self._number} * {every}"
        end = f"{begin} + {every}"
        end = f"min({end}, {micro.count}){more}" if micro.rest else f"{end}{more}"
        lines = [f"{i2}for {micro.number} in range({begin}{more}, {end}):"]
        lines += [f"{i3}{line}" for line in self._rounds.first]
        own, last = self._prefix(loop.body[0]), loop.body[-1]
        first = (loop.iter if isinstance(loop, ast.For) else loop.test).end_lineno or loop.lineno
        self._hidden_lines(self._loops.last)
        if last is not branch:
            return [*lines, *self._region(range(first + 1, (last.end_lineno or first) + 1), own, i3)]
        lines += self._region(range(first + 1, branch.lineno), own, i3)
        if not self._rounds.first and branch is loop.body[0]:
            lines.append(f"{i3}pass")
        taking = max(n for n, one in enumerate(branch.body) if self._calls.takes_step(one))
        end_of_step, inner = branch.body[taking].end_lineno or 0, self._prefix(branch.body[0])
        lines += self._region(range((branch.test.end_lineno or 0) + 1, end_of_step + 1), inner, i2)
        below = branch.body[taking + 1 :]
        self._hidden_lines(below)
        return [*lines, *self._region(range(end_of_step + 1, (branch.end_lineno or 0) + 1), inner, i1, gated=below)]

    def _split(self, loop: PlainLoop, taking: int) -> tuple[range, range]:
        """Lines of the block, and of what is below it."""
        end = loop.body[taking].end_lineno or 0
        first = (loop.iter if isinstance(loop, ast.For) else loop.test).end_lineno or loop.lineno
        return range(first + 1, end + 1), range(end + 1, (loop.end_lineno or end) + 1)

    def _around(self) -> tuple[range, range]:
        """Lines of the loop of epochs above and below that of steps."""
        if self._outer is None:
            return range(0), range(0)
        header = (self._outer.iter if isinstance(self._outer, ast.For) else self._outer.test).end_lineno or 0
        return range(header + 1, self._loop.lineno), range(
            (self._loop.end_lineno or 0) + 1, (self._outer.end_lineno or 0) + 1
        )

    def _count(self) -> str:
        if self._outer is None:
            return self._rounds.count or _ENDLESS
        if isinstance(self._outer, ast.While):
            return _ENDLESS
        iterable = self._outer.iter
        if not _is_call(iterable, "range") or not isinstance(iterable, ast.Call):
            raise NotByHand(self._outer.lineno, "the loop of epochs is not one over a range()")
        if len(iterable.args) > 2 or iterable.keywords:
            raise NotByHand(self._outer.lineno, f"`{ast.unparse(iterable)}`")
        self._constant(iterable)
        if len(iterable.args) == 2 and not isinstance(iterable.args[0], ast.Constant):
            self._no_checkpoint(iterable)
        if self._loops.leaves:
            return _ENDLESS
        texts = [ast.unparse(one) if isinstance(one, _SIMPLE) else f"({ast.unparse(one)})" for one in iterable.args]
        count = texts[0] if len(texts) == 1 else f"({texts[1]} - {texts[0]})"
        return f"{count} * {self._names.rounds}"

    def _no_checkpoint(self, iterable: ast.Call) -> None:
        """Raises NotByHand if a checkpoint of the script's own may say where the loop begins."""
        if any(isinstance(node, ast.Call) and called(node) == "load" for node in ast.walk(self._tree)):
            raise NotByHand(
                iterable.lineno,
                f"`{ast.unparse(iterable)}` may begin where a checkpoint says that the script loads: a replacement "
                "would find one that this job has saved, and begin elsewhere. Let it begin with a number; "
                "`flashrecovery run --resume` goes on with a job",
            )

    def _epoch(self) -> str:
        assert isinstance(self._outer, ast.For)
        if not isinstance(self._outer.target, ast.Name):
            raise NotByHand(self._outer.lineno, "the loop of epochs has no number")
        return self._outer.target.id

    def _shift(self) -> str:
        first = self._first_epoch()
        return f"{self._epoch()} += {first}" if first else ""

    def _first_epoch(self) -> str:
        """The number of the first epoch, if it is given."""
        arguments = getattr(self._outer.iter, "args", []) if isinstance(self._outer, ast.For) else []
        return ast.unparse(arguments[0]) if len(arguments) == 2 else ""

    def _stores(self, indent: str) -> list[str]:
        return [f"{indent}{self._names.kept}.{name} = {name}" for name in self._kept]

    def _below(self) -> list[str]:
        """The lines for variables that are read below the loop: for a process that comes when all steps are done."""
        end, names = self._whole.end_lineno or 0, []
        for name in self._kept:
            if any(
                isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) and n.lineno > end
                for n in own_nodes(self._function())
            ):
                names.append(name)
        return [f"{self._indent}{name} = {self._names.kept}.{name}" for name in names]

    def _region(self, lines: range, own: str, new: str, gated: Sequence[ast.stmt] = ()) -> list[str]:
        """These lines with the indentation ``new`` in place of ``own``; what ``gated`` prints only where it counts."""
        shown = dict(self._gates(gated))
        jumping = {n.lineno for n in jumps(self._whole.body) if self._kept}
        found: list[str] = []
        for number in lines:
            line = self._lines[number - 1]
            if number in self._rounds.dropped:
                continue
            if not line.strip():
                found.append("")
                continue
            moved = new + line[len(own) :] if line.startswith(own) else line
            if not line.startswith(own) and line.strip().startswith("#"):
                moved = new + line.strip()
            indent = moved[: len(moved) - len(moved.lstrip())]
            if number in jumping:
                found += self._stores(indent)
            if shown.get(number):
                found.append(f"{indent}if {self._names.step}.committed:")
            found.append(self._unit + moved if number in shown else moved)
        while found and not found[-1]:
            found.pop()
        return found

    def _gates(self, statements: Sequence[ast.stmt]) -> Iterator[tuple[int, bool]]:
        """Lines of statements that only print; True: the first of several in a row."""
        in_row = False
        for statement in statements:
            prints = isinstance(statement, ast.Expr) and self._only_prints(statement)
            if prints:
                numbers = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
                yield from ((number, number == statement.lineno and not in_row) for number in numbers)
            else:
                for block in (getattr(statement, "body", []), getattr(statement, "orelse", [])):
                    yield from self._gates(block if isinstance(block, list) else [])
            in_row = prints

    def _only_prints(self, statement: ast.stmt) -> bool:
        if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
            return False
        call = statement.value
        if not self._is_print(call):
            return False
        for one in self._impure(call):
            raise NotByHand(
                one.lineno,
                f"a line that is printed below the block calls {ast.unparse(one.func)}(): assign what that gives to a "
                "variable, and print this",
            )
        return True

    @staticmethod
    def _impure(call: ast.Call) -> list[ast.Call]:
        """Calls in its arguments that may do more than give a value."""
        inner = [one for one in ast.walk(call) if isinstance(one, ast.Call) and one is not call]
        return [one for one in inner if getattr(one.func, "attr", getattr(one.func, "id", "")) not in _PURE]

    def _is_print(self, call: ast.Call) -> bool:
        if isinstance(call.func, ast.Name):
            functions = self._calls.functions.get(call.func.id, [])
            return call.func.id == "print" or (bool(functions) and all(map(self._is_printing, functions)))
        root = ast.unparse(call.func).partition(".")[0].lower()
        return isinstance(call.func, ast.Attribute) and call.func.attr in _LOGS and "log" in root

    def _is_printing(self, function: ast.AST) -> bool:
        """A function that does nothing but print."""
        body = [one for one in getattr(function, "body", []) if not _is_docstring(one)]
        return bool(body) and all(
            isinstance(one, ast.Expr)
            and isinstance(one.value, ast.Call)
            and ast.unparse(one.value.func) == "print"
            and not self._impure(one.value)
            for one in body
        )

    def _hidden_lines(self, statements: Iterable[ast.stmt]) -> None:
        """What functions print that are called there, below the block, is printed where the attempt counts. Raises
        NotByHand if that is amid other things."""
        for function in (f for one in statements for f in called_from(one, self._calls.functions)):
            if self._is_printing(function):
                continue
            printing = [n for n in ast.walk(function) if isinstance(n, ast.Expr) and self._only_prints(n)]
            within = {node for statement in printing for node in ast.walk(statement)}
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and node not in within and self._is_print(node):
                    raise NotByHand(
                        node.lineno,
                        f"{getattr(function, 'name', '')}() prints in the midst of a statement, and is called below "
                        "the block, where an attempt may be void",
                    )
            for statement in printing:
                self._alone_in_line(statement)
                self._asking |= {*range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)}

    def _alone_in_line(self, statement: ast.stmt) -> None:
        line = self._lines[statement.lineno - 1]
        many = (statement.end_lineno or statement.lineno) > statement.lineno and any(
            isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno != node.lineno
            for node in ast.walk(statement)
        )
        if line[: statement.col_offset].strip() or many:
            raise NotByHand(statement.lineno, "a line that is printed below the block: write it as a statement alone")

    def _outside(self, lines: range) -> list[str]:
        """Lines that are not of the loop."""
        found: list[str] = []
        for number in lines:
            line = self._lines[number - 1]
            if number in self._asking and number - 1 not in self._asking:
                found.append(f"{line[: len(line) - len(line.lstrip())]}if not flashrecovery.init().void:")
            found.append(self._unit + line if number in self._asking and line.strip() else line)
        return found

    def _prefix(self, statement: ast.stmt) -> str:
        line = self._lines[statement.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    # -- the head of the file ---------------------------------------------------------------------

    def _with_imports(self, lines: list[str]) -> list[str]:
        """``import flashrecovery`` after the first block of imports."""
        last = 0
        for statement in self._tree.body:
            if not isinstance(statement, (ast.Import, ast.ImportFrom)) and not _is_docstring(statement):
                break
            last = statement.end_lineno or statement.lineno
        text = "\n".join(lines)
        wanted = ["flashrecovery"]
        wanted += ["types"] if "types.SimpleNamespace(" in text else []
        wanted += ["sys"] if _ENDLESS in text or "sys.modules[" in text else []
        there = {
            alias.asname or alias.name
            for statement in self._tree.body
            if isinstance(statement, ast.Import)
            for alias in statement.names
        }
        taken = {n.id for n in ast.walk(self._tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for name in wanted:
            if name in taken:
                raise NotByHand(1, f"the script has a variable that is called {name}, as a module is that is needed")
        imports = [f"import {name}" for name in sorted(wanted) if name not in there]
        return [*lines[:last], *imports, *lines[last:]]


_SIMPLE = (ast.Constant, ast.Name, ast.Attribute, ast.Call)


def _named(paths: Sequence[str]) -> list[str]:
    """Comments on what is not registered."""
    if not paths:
        return []
    text = f"Not brought back by these lines, if it changes from step to step: {', '.join(paths)}. Register an object"
    lines = textwrap.wrap(f"{text} that holds it.", 90, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in lines]


def _names_in(statements: Iterable[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    nodes = (node for one in statements for node in own_nodes(one))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _negated(test: ast.expr) -> str:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.unparse(test.operand)
    return f"not ({ast.unparse(test)})"


def _factor(text: str) -> str:
    """In parentheses if it needs them."""
    node = ast.parse(text, mode="eval").body
    return text if isinstance(node, (*_SIMPLE, ast.Subscript)) else f"({text})"


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _targets(loop: PlainLoop | None) -> set[str]:
    if not isinstance(loop, ast.For):
        return set()
    return {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}


def _optimizers(paths: Sequence[str]) -> str:
    if not paths:
        return ""
    return f"optimizer={paths[0]}" if len(paths) == 1 else f"optimizer=[{', '.join(paths)}]"


def _quoted(name: str) -> str:
    return f'"{name}"'


def keyword_of(path: str) -> str:
    """A keyword for what ``path`` leads to."""
    name = "_".join(re.findall(r"\w+", path.removeprefix("self.")))
    return f"{name}_" if name in ("self", "model", "optimizer", "per_rank") else name
