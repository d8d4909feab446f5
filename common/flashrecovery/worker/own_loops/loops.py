"""What the rewritten loops of a script call (:mod:`.rewrite`): where its steps begin and end, and the way back.

A round of a step loop begins with the yield of a step (:class:`flashrecovery.worker.loop.Loop`), and takes its
element. It is a step from there to the call after the optimizer's. Rounds that take no step (gradient accumulation)
leave the step open. What comes after a loop's last element, and before the first round of its next run, lies above the
block of the next step.

*The place* of a version is the round of each loop that is running, with the variables of its function. A rank that does
not stand there, because it was in the next epoch already or has just been started, goes there: the loop around begins
the round of that place again, in the random state and with the variables that it had then, and the loops in it do
the same. All that happens on the way belongs to no version (:class:`.step.discarded_run.DiscardedRun`).

Without recovery the loops run as they are.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from flashrecovery.errors import RegistrationError, UnsupportedError
from flashrecovery.plan.words import shortened
from flashrecovery.state import codec
from flashrecovery.worker.local_state.fingerprints import identity
from flashrecovery.worker.local_state.rng import RngState, restore_rng
from flashrecovery.worker.loop import Loop
from flashrecovery.worker.own_loops.environment import EnvironmentChanges
from flashrecovery.worker.own_loops.files import LoopFiles
from flashrecovery.worker.own_loops.foreign_iterators import gone_on, progress
from flashrecovery.worker.own_loops.loop_data import LoopData, OwnIterator
from flashrecovery.worker.own_loops.output import Output
from flashrecovery.worker.own_loops.rewrite import LoopText, Rewritten
from flashrecovery.worker.own_loops.taken import taken_in
from flashrecovery.worker.own_loops.variables import (
    NAMES,
    Identities,
    LoopVariables,
    Saved,
    iterators_of,
    objects_of,
    protected,
    put_back,
    put_back_objects,
    references_at,
    take_down,
    values_of_objects,
)
from flashrecovery.worker.preimport.own_files import is_own_file
from flashrecovery.worker.script_checks.stray_collectives import line_of_script
from flashrecovery.worker.script_text.loop_carried import loops_around
from flashrecovery.worker.script_text.plain_values import NO_REFERENCES
from flashrecovery.worker.script_text.script_frames import tree_of
from flashrecovery.worker.session import Session
from flashrecovery.worker.step.step import Step

_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_ENDLESS = 1 << 62
_ROUNDS_KEPT = 2
_SHOWN = 12
"""Variables that are named."""
_TRIES = 16
_LOOKS = 3
"""Steps of a process before which is looked whether the one before has asked an iterator for more."""


@dataclass(frozen=True)
class _Past:
    """A loop that has ended in the round under way of the loop around it: the random state, and its variables; whether
    it went to its end."""

    rng: dict[str, Any]
    end: Saved
    exhausted: bool = False

    def plain(self) -> dict[str, Any]:
        return {"rng": self.rng, "end": self.end.plain(), "exhausted": self.exhausted}

    @staticmethod
    def of(plain: dict[str, Any]) -> _Past:
        return _Past(plain["rng"], Saved.of(plain["end"]), plain["exhausted"])


@dataclass(frozen=True)
class _Level:
    """One of the running loops, in a place.

    Attributes:
        key: file and line.
        ordinal: how many loops have come before it in the round under way of the loop around it.
        index: which round of an outer loop.
        rng, start: its random state and variables as that round began.
        now: its variables.
        past: the loops that have ended in that round.
        over: the range that an outer loop runs over: begin, end and step.
    """

    key: tuple[str, int]
    ordinal: int
    index: int
    rng: dict[str, Any] | None
    start: Saved
    now: Saved
    past: tuple[_Past, ...]
    over: tuple[int, int, int] | None = None

    def plain(self) -> dict[str, Any]:
        parts = {"start": self.start.plain(), "now": self.now.plain(), "past": [one.plain() for one in self.past]}
        return {**vars(self), **parts}

    @staticmethod
    def of(plain: dict[str, Any]) -> _Level:
        return _Level(
            tuple(plain["key"]),
            plain["ordinal"],
            plain["index"],
            plain["rng"],
            Saved.of(plain["start"]),
            Saved.of(plain["now"]),
            tuple(map(_Past.of, plain["past"])),
            None if plain["over"] is None else tuple(plain["over"]),
        )


@dataclass(frozen=True)
class _Target:
    """The place of a version that has been restored, until the loops stand there. ``ended``: the outermost one has
    ended there."""

    levels: tuple[_Level, ...]
    ended: bool


class _Leave(BaseException):
    """Leaves what is running, up to the round of the loop at ``level``, or that loop itself if there is a target, the
    place further on. No handler of the script's for errors catches it."""

    def __init__(self, level: int, target: _Target | None = None) -> None:
        super().__init__()
        self.level = level
        self.target = target


class Accumulation(Protocol):
    """What takes the steps of a script's own loops, and which rounds make one.

    Attributes:
        by_hand: which lines a script gets where its loops cannot be led back.
    """

    @property
    def by_hand(self) -> str: ...

    def prepare(self, frame: types.FrameType, *, last: bool) -> None:
        """The outermost of the loops begins in ``frame`` or, ``last``, the first step does."""

    def check_first(self, check: Callable[[], None]) -> None:
        """``check`` is to be called before each call of the optimizer's step."""

    def is_whole(self) -> bool:
        """Whether the call of the optimizer's step that has just been made was the last one of a step."""


@dataclass(frozen=True)
class _Protection:
    """What protects the loops of a process."""

    session: Session
    accumulation: Accumulation


class AutoStart(Protocol):
    """What protects scripts in which no framework does. A protocol, as it lies above
    (:class:`flashrecovery.worker.auto.steps.AutoProtection`)."""

    def begin(self) -> None:
        """The script has reached its first loop."""


class ScriptLoops:
    """The loops of one process. :data:`LOOPS` is the only one."""

    def __init__(self) -> None:
        self.texts: dict[tuple[str, int], LoopText] = {}
        """The new texts of all files that were rewritten."""
        self.iterators: set[tuple[str, str]] = set()
        """File, and what is written in its calls of ``next()``."""
        self.stack: list[ScriptLoop] = []
        self._asked: dict[tuple[str, str], LoopData] = {}
        self._protection: _Protection | None = None
        self._known_ids: tuple[list[int], Identities] | None = None
        self._references = NO_REFERENCES
        """What the script had made when it came to the first of its loops."""
        self._others: dict[tuple[str, int], dict[str, list[tuple[int, object]]]] = {}
        """For each loop: objects behind its variables at its begin that cannot be created again."""
        self._loop: Loop | None = None
        self._step: Step | None = None
        self._late = False
        """Known when the newest step began: steps change variables after the optimizer has begun."""
        self._handed_out = False
        self._cut_short = False
        """What the script did between two steps was cut short: a rank has died."""
        self._finished: ScriptLoop | None = None
        self._data: dict[tuple[str, int], LoopData] = {}
        self._target: _Target | None = None
        self._restores = 0
        self._ending = False
        """The outermost loop has ended, as it has at the place to go to."""
        self.output = Output()
        self.files = LoopFiles()
        self._environment = EnvironmentChanges()
        self._seeking = False
        self._kept: dict[tuple[str, int], set[str]] = {}
        """For each loop: the variables that have been restored so far."""
        self._iterators: dict[str, tuple[object, object]] = {}
        """How far those that modules and objects hold had come when the newest step began, ..."""
        self._looks_left = _LOOKS
        """... of the first few."""
        self._named: set[tuple[str, int, str]] = set()
        """Variables of loops that are not brought back."""
        self._tries = (-1, 0)
        """A generation, and how often a round was begun in it on the way to a place."""
        self._met: BaseException | None = None
        """The last error of the script on such a way."""
        self.auto: AutoStart | None = None

    # -- set-up -----------------------------------------------------------------------------------

    def protect(self, session: Session, accumulation: Accumulation) -> None:
        """From now on these loops are protected."""
        self._protection = _Protection(session, accumulation)
        session.registry.follow_place(self)
        self.output.protect(session.gate.page)
        self.files.protect(session.gate.page, session.tell_not_brought_back)
        self._environment.begin()

    @property
    def active(self) -> bool:
        return self._protection is not None

    @property
    def _protected_by(self) -> _Protection:
        if self._protection is None:
            raise RegistrationError("the loops of this script are not protected: call flashrecovery.init() first")
        return self._protection

    def start_by(self, auto: AutoStart | None) -> None:
        """``auto``: begins the protection by itself, before the first round."""
        self.auto = auto

    def take(self, rewritten: Rewritten, file: str, *, replacement: bool) -> None:
        """The loops of one more file. ``replacement``: this process is not the first one of its rank."""
        self.output.take(replacement=replacement)
        self.files.take(replacement=replacement)
        self.texts |= {(file, line): text for line, text in rewritten.loops.items()}
        self.iterators |= {(file, name) for name in rewritten.iterators}

    def enter(self, file: str, line: int) -> ScriptLoop:
        self._begin_auto()
        return ScriptLoop(self, (file, line), self.texts[file, line])

    @property
    def known(self) -> Identities:
        """Identities of what is protected otherwise: see :func:`.variables.protected`."""
        registry = self._protected_by.session.registry
        step = self._loop is not None and min(self._loop.gate.version, 2)  # optimizers make their state in a first step
        states = [step, *(id(optimizer.state) for optimizer in registry.optimizers)]  # another one once it is loaded
        if self._known_ids is None or self._known_ids[0] != states:
            tensors = [tensor for shard in registry.tensor_shards() for tensor in shard.tensors().values()]
            self._known_ids = states, protected(registry.known(), tensors, self._references)
        return self._known_ids[1]

    # -- steps ------------------------------------------------------------------------------------

    def yield_step(self, loop: ScriptLoop) -> None:
        """``loop``, a step loop, begins a round: the step begins with it, or goes on."""
        if self._step is not None:
            return
        if self._finished is not None:
            raise UnsupportedError(
                f"{loop.place}: the job's steps have ended with the loop at {self._finished.place}, and this one takes "
                "more; only one loop of a script, with all loops in it, can be protected"
            )
        own = self._loop
        if own is None:
            own = self._loop = self._open(loop)
        if self._handed_out and not own.gate.stopped:
            return
        if self._target is not None and self._target.ended:  # no peer begins a step any more
            raise self._leave(own, 0, self._target)
        own.finished(_ENDLESS)
        self._handed_out, self._cut_short = True, False
        if self._target is not None:
            self._go(own, self._target)
        self.output.handed_out(own.gate.version)
        self.files.handed_out(own.gate.version)

    def catch_up(self) -> None:
        """An outer loop goes on after what was cut short between two steps."""
        if self._cut_short and self._loop is not None:
            self._loop.finished(_ENDLESS)
            self._cut_short, self._handed_out = False, self._target is None
            if self._target is not None:
                self._go_back(self._loop)

    def _open(self, loop: ScriptLoop) -> Loop:
        session = self._protected_by.session
        self._check_loops_around(loop)
        self._refuse_what_is_taken()
        self._prepare(loop, last=True)
        reading = [key for key, text in self.texts.items() if text.steps and text.reads and not text.refused]
        for place in sorted(reading):
            session.refuse_streams()
            session.add_stream(self._data.setdefault(place, LoopData(objects=self)))
        for key in sorted(self.iterators):
            session.refuse_streams()
            self._asked[key] = LoopData(objects=self)
            session.add_stream(self._asked[key])
        return session.open(None, own_calls=False)

    def _begin_auto(self) -> None:
        if self._protection is None and self.auto is not None:
            self.auto.begin()

    def entered(self, loop: ScriptLoop) -> None:
        """``loop`` begins to run."""
        if not self.stack and self._loop is None:
            self._references = references_at(loop.frame)
            self._prepare(loop, last=False)
        self.stack.append(loop)

    def _prepare(self, loop: ScriptLoop, *, last: bool) -> None:
        self._protected_by.accumulation.prepare(loop.frame, last=last)
        self._known_ids = None

    @property
    def _opened(self) -> Loop:
        if self._loop is None:
            raise RegistrationError("no loop of this script has begun its first step")
        return self._loop

    def loops_around_step(self) -> str:
        """The place of the outermost loop, if there is one around the loop of steps."""
        return self.stack[0].place if len(self.stack) > 1 else ""

    def described(self) -> dict[str, str]:
        """The loops that are running, and their variables that are brought back."""
        found = {}
        for loop, saved in self._variables():
            place = f"{Path(loop.key[0]).name}:{loop.key[1]}"
            found[place] = "loop of steps, and its data" if loop.text.steps else "loop around it"
            names = [*saved.variables, *(name for name in saved.attributes if not name.endswith(NAMES))]
            if names:
                found[f"variables at {place}"] = shortened(names, _SHOWN)
        return found

    def _check_loops_around(self, step_loop: ScriptLoop) -> None:
        """Raises UnsupportedError if the script is in a loop that is not led back."""
        led = {loop.key for loop in self.stack}
        around: types.FrameType | None = step_loop.frame
        while around is not None:
            file, line = around.f_code.co_filename, around.f_lineno
            tree = tree_of(file) if is_own_file(file) else None
            lines = [] if tree is None else [loop.lineno for loop in loops_around(tree, line)]
            if around.f_code.co_name in _COMPREHENSIONS and tree is not None:
                lines.append(line)
            for number in lines:
                if (file, number) not in led:
                    raise UnsupportedError(
                        f"{file}:{number}: the steps of the loop at {step_loop.place} are taken in this loop, which "
                        f"cannot be led back{self._because(file, number)}; {self._by_hand}"
                    )
            around = around.f_back

    def _refuse_what_is_taken(self) -> None:
        """Raises UnsupportedError if a round takes something from a queue, or the like."""
        for loop in self.stack:
            tree = tree_of(loop.key[0])
            if tree is None:
                continue
            remade = loop.text.carried.remade
            found = taken_in(loop.frame, tree, loop.key[1], steps=loop.text.steps, remade=remade)
            if found:
                raise UnsupportedError(
                    f"{loop.place}: {found}, which a replacement cannot repeat: let the loop run over something "
                    f"that restarts with `iter()`; or {self._by_hand}"
                )

    def _because(self, file: str, line: int) -> str:
        text = self.texts.get((file, line))
        return "" if text is None or not text.refused else f": {text.refused}"

    def check_call(self) -> None:
        """The optimizer's step is called. Raises UnsupportedError if that is in no loop that is led back."""
        protection = self._protection
        if self._step is not None or self._finished is not None or protection is None or protection.session.begun:
            return
        self.refuse_call(sys._getframe(1), self._by_hand)

    def refuse_call(self, around: types.FrameType | None, by_hand: str) -> NoReturn:
        """The optimizer's step is called in ``around`` or what has called that. Raises UnsupportedError."""
        reasons = [
            f"{file}:{line}{self._because(file, line)}" for file, line in self.texts if self._because(file, line)
        ]
        because = f" ({'; '.join(reasons)})" if reasons else ""
        raise UnsupportedError(
            f"{line_of_script(around)}: the optimizer's step is called, and is in no loop that is led back by itself"
            f"{because}; {by_hand}"
        )

    def begin(self) -> None:
        """The body of a round begins."""
        if self._step is not None:
            return
        own = self._opened
        self._late = self._protected_by.session.registry.habits.late
        if self._looks_left:
            self._refuse_foreign_iterators()
        self._step = Step(own.gate.version, own)
        self._step.__enter__()

    def _refuse_foreign_iterators(self) -> None:
        """Raises UnsupportedError if the step before has asked an iterator for more that nothing leads back."""
        self._looks_left -= 1
        now: dict[str, tuple[object, object]] = {}
        for loop in self.stack:
            now |= progress(loop.iterators())
        led = [source for data in (*self._data.values(), *self._asked.values()) for source in data.sources]
        asked = {path: one for path, one in gone_on(self._iterators, now).items() if not any(one is s for s in led)}
        self._iterators = now
        for path, one in asked.items():
            raise UnsupportedError(
                f"{self.stack[-1].place}: a step takes elements from {path} (a {type(one).__name__}), which a "
                "replacement cannot repeat: get them with `next()` in the file of the loop, or let the loop "
                f"run over them; or {self._by_hand}"
            )

    def step_taken(self) -> None:
        """The optimizer's step has been called."""
        if self._step is None or (self._protection is not None and not self._protection.accumulation.is_whole()):
            return
        step, self._step, self._handed_out = self._step, None, False
        step.__exit__(None, None, None)
        if not step.committed:
            raise _Leave(len(self.stack) - 1)

    def interrupted(self, error: BaseException) -> bool:
        """A round has raised ``error``. Returns whether it was only the consequence of a stop."""
        if isinstance(error, _Leave):
            return False
        if self._step is not None:
            step, self._step, self._handed_out = self._step, None, False
            self._cut_short = True
            return step.__exit__(type(error), error, error.__traceback__)
        own = self._loop
        if own is None or not isinstance(error, Exception) or not (own.void or own.explains(error)):
            return False
        self._met = error
        own.stood_in()
        self._cut_short = True
        return True

    def finish(self, loop: ScriptLoop) -> bool:
        """The outermost loop has ended. False: steps of it are done again."""
        own = self._loop
        if own is None or self._finished is not None:
            return True
        if self._seeking and not (self._target is not None and self._target.ended):
            raise self._lost(loop)
        last = own.gate.version
        self._ending, self._handed_out = True, False
        if self._step is not None:  # it takes no step of the optimizer: what is left of an accumulation
            last += 1
            step, self._step = self._step, None
            step.__exit__(None, None, None)
        if own.finished(last, goes_back=True):
            self._finished = loop
            self.output.show_all()
            self.files.end()
            return True
        self._ending = False
        self._go_back(own)
        return False

    @property
    def _by_hand(self) -> str:
        return "" if self._protection is None else self._protection.accumulation.by_hand

    # -- the way to a place -----------------------------------------------------------------------

    def target_of(self, loop: ScriptLoop) -> _Level | None:
        """Where ``loop`` is to begin, if all loops around it stand where they should."""
        level = self.stack.index(loop)
        if self._target is None or not self._seeking or level >= len(self._target.levels):
            return None
        there = self._target.levels[level]
        return there if (there.key, there.ordinal) == (loop.key, loop.ordinal) else None

    def passes(self, error: BaseException) -> bool:
        """A statement between two loops has raised ``error``. Returns whether it belongs to no version: the script is
        on its way to a loop further on, and stand-ins answer for its peers."""
        own = self._loop
        if own is None or not isinstance(error, Exception) or not self._seeking or not own.void or own.gate.stopped:
            return False
        self._met = error
        return True

    def begins_again(self, loop: ScriptLoop) -> None:
        """``loop`` begins the round of the place again. Raises UnsupportedError if that leads nowhere."""
        now, (generation, tries) = self._opened.gate.generation, self._tries
        self._tries = now, tries + 1 if now == generation else 1
        if self._tries[1] > _TRIES:
            raise self._lost(loop)

    def _lost(self, loop: ScriptLoop) -> UnsupportedError:
        met = "" if self._met is None else f"; on the way it raised {type(self._met).__name__}: {self._met}"
        error = UnsupportedError(
            f"{loop.place}: the script does not come again to the loop in which the step that is done again was "
            f"taken{met}"
        )
        error.__cause__ = self._met
        return error

    def past_of(self, loop: ScriptLoop, target: _Target) -> _Past:
        """The past of a loop that is not begun, since ``target`` is further on in the round of the loop around it, or
        below all loops."""
        level = self.stack.index(loop)
        if level == 0:
            return _Past(RngState.now().plain(), target.levels[0].now)
        past = target.levels[level - 1].past[loop.ordinal]
        self.stack[level - 1].past.append(past)
        return past

    def _go(self, own: Loop, target: _Target) -> None:
        """A version has been restored. If this is not its place, ``target``, go there."""
        levels, was_seeking = target.levels, self._seeking
        for level, (loop, there) in enumerate(zip(self.stack, levels, strict=False)):
            if level == 0 and loop.key != there.key:
                raise UnsupportedError(
                    f"{loop.place}: the steps that are restored were taken in the loop at line {abs(there.key[1])} of "
                    f"{there.key[0]}; both must be in one block of statements, or in one loop"
                )
            if (loop.key, loop.ordinal) != (there.key, there.ordinal):
                if was_seeking and loop.ordinal >= there.ordinal:
                    raise self._lost(loop)
                raise self._leave(own, level, target) if was_seeking else self._leave(own, level - 1)
            if loop.index != there.index:
                raise self._leave(own, level)
        if len(self.stack) != len(levels):
            raise self._leave(own, min(len(self.stack), len(levels)) - 1)
        data = self._data.get(self.stack[-1].key)
        if data is not None and data.must_be_entered:
            raise self._leave(own, len(self.stack) - 2)
        self._target, self._seeking, self._tries, self._met = None, False, (-1, 0), None
        for key, other in self._data.items():
            if key != self.stack[-1].key:
                other.left()
        for number, (loop, there) in enumerate(zip(self.stack, levels, strict=True)):
            if not any(inner.is_in_function_of(loop) for inner in self.stack[number + 1 :]):  # else that one does it
                loop.arrived(there.now)

    def _leave(self, own: Loop, level: int, target: _Target | None = None) -> _Leave:
        self._go_back(own)
        return _Leave(level, target)

    def _go_back(self, own: Loop) -> None:
        self._seeking, self._handed_out = True, False
        own.discard()
        self.output.drop()
        self.files.go_back()

    # -- a part of each version -------------------------------------------------------------------

    def mark(self) -> bytes:
        """Changes with what the loops' functions have in their variables. Where it is known that these change after the
        optimizer has begun, nothing more follows from it: then it only says that the step is over."""
        if self._late and self._loop is not None:
            return b"%d" % self._loop.gate.version
        variables = [(loop.index, saved.plain()) for loop, saved in self._variables()]
        return codec.dumps((variables, self.output.printed(), self.files.mark(), self._environment.now()))

    def capture(self, version: int) -> dict[str, Any]:
        """Where the loops stand, in plain values."""
        self.files.flush()
        place = self._target
        if place is None:
            place = _Target(tuple(loop.level(saved) for loop, saved in self._variables()), self._ending)
        return {
            "levels": [level.plain() for level in place.levels],
            "ended": place.ended,
            "printed": self.output.newest(version),
            "environment": self._environment.now(),
        }

    def _variables(self) -> list[tuple[ScriptLoop, Saved]]:
        """As they are now; of loops in one function the innermost has them."""
        having = dict(self._innermost())
        return [(loop, loop.variables() if n in having else Saved()) for n, loop in enumerate(self.stack)]

    def _innermost(self) -> list[tuple[int, ScriptLoop]]:
        """The innermost loop of each function, with its number among the running loops."""
        return [
            (number, loop)
            for number, loop in enumerate(self.stack)
            if not any(inner.is_in_function_of(loop) for inner in self.stack[number + 1 :])
        ]

    def note_left_out(self, loop: ScriptLoop, saved: Saved) -> None:
        """Name what was brought back until now and has grown too long for that, and what never was."""
        kept = self._kept.setdefault(loop.key, set())
        left_out = [*saved.left_out, *self._exchanged(loop, saved)]
        left_out = [name for name in left_out if (*loop.key, name) not in self._named]
        self._named.update((*loop.key, name) for name in left_out)
        session = None if self._protection is None else self._protection.session
        if left_out and session is not None:
            session.tell_not_registered(
                f"{loop.place}: carried from step to step, and not brought back by a recovery: {', '.join(left_out)} "
                "(too large, or of what cannot be made again); if they are needed after one, recovery.register() an "
                "object that holds them"
            )
        for path in kept.intersection(saved.too_long) if saved.too_long else ():
            kept.remove(path)
            if session is not None:
                session.tell_not_registered(
                    f"{loop.place}: {path} has grown too long to be brought back from here on; if it is needed after a "
                    "recovery, recovery.register() an object that holds it"
                )
        kept.update(saved.variables, saved.attributes)

    def _exchanged(self, loop: ScriptLoop, saved: Saved) -> list[str]:
        """What leads to another module, function or the like than when the loop began: one that it has made itself."""
        parts = {
            name: (value.__self__, value.__func__) if isinstance(value, types.MethodType) else (value,)
            for name, value in saved.others.items()
        }
        now = {name: [*map(identity, one)] for name, one in parts.items()}
        before = self._others.setdefault(loop.key, now)
        return [name for name, one in now.items() if before.get(name) != one]

    def restore(self, state: dict[str, Any], version: int) -> None:
        self._restores += 1
        self._target = _Target(tuple(map(_Level.of, state["levels"])), state["ended"])
        self.output.restore(version, state["printed"])
        self.files.restore(version)
        self._environment.put(state["environment"])

    # -- data -------------------------------------------------------------------------------------

    def now(self) -> dict[str, Any]:
        """What the objects keep that the running loops' variables lead to."""
        return {
            f"{n}:{path}": value for n, loop in self._innermost() for path, value in loop.values_of_objects().items()
        }

    def put(self, values: Mapping[str, Any]) -> None:
        """As :meth:`now` gave them."""
        for number, loop in self._innermost():
            prefix = f"{number}:"
            loop.put_objects({path[len(prefix) :]: v for path, v in values.items() if path.startswith(prefix)})

    def data_of(self, loop: ScriptLoop, iterable: Iterable[Any]) -> LoopData:
        known = self._data.get(loop.key)
        if known is None:
            if self._loop is not None:
                raise UnsupportedError(
                    f"{loop.place}: the module of this loop was imported after the first step of another one; import "
                    "it before, so that what the loop runs over is known from the first step on"
                )
            known = self._data[loop.key] = LoopData(iterable, objects=self)
        known.enter(iterable)
        return known

    def iterator(self, *iterable: Any) -> Any:
        """``iter(iterable)`` of the script."""
        self._begin_auto()
        if len(iterable) != 1 or not self.active or isinstance(iterable[0], Iterator):
            return iter(*iterable)
        return OwnIterator(iterable[0], self._restores if self._target is None else None)

    def next(self, key: tuple[str, str], asked: Any, *default: Any) -> Any:
        """``next(asked)`` of the script, in a step."""
        data = self._asked.get(key) if self._loop is not None and self._finished is None else None
        if data is None:
            return next(asked, *default)
        try:
            return data.next_of(asked, self._restores)
        except StopIteration:
            if default:
                return default[0]
            raise


class ScriptLoop:
    """One run of a loop of the script."""

    def __init__(self, loops: ScriptLoops, key: tuple[str, int], text: LoopText) -> None:
        self.key = key
        self.index = -1
        self.ordinal = 0
        self.past: list[_Past] = []
        self.text = text
        self.restoring = False
        self.exhausted = False
        """It has come to its end, without a `break`. Known where its ``else`` clause leaves another loop."""
        self.values: dict[str, Any] = {}
        self.whole = _Around(self.ends)
        """All rounds."""
        self.passing = _Around(self.passes)
        """A statement in which several loops, one after the other, are begun, or between these."""
        self._loops = loops
        self._names = LoopVariables.of(text)
        self._active = loops.active
        self._begun = self._again = False
        self._frame: types.FrameType | None = None
        self._rng: dict[str, Any] | None = None
        self._start = Saved()
        self._over: range | None = None

    @property
    def frame(self) -> types.FrameType:
        """The frame of the function in which it runs. Raises RegistrationError where it runs unprotected."""
        if self._frame is None:
            raise RegistrationError(f"{self.place}: this loop does not run, or is not protected")
        return self._frame

    @property
    def place(self) -> str:
        return f"{self.key[0]}:{abs(self.key[1])}"

    def runs(self) -> bool:
        """True once, and each time it has to be begun again."""
        if self._begun and not self._again:
            return False
        self._begun, self._again, self.exhausted = True, False, False
        if self._active:
            self._frame = sys._getframe(1)
            self.index, around = -1, self._loops.stack
            self.ordinal = len(around[-1].past) if around else 0
            self._loops.entered(self)
        return True

    def ends(self, error: BaseException | None) -> bool:
        """Returns whether ``error`` is done with."""
        if not self._active:
            return False
        stack = self._loops.stack
        level = stack.index(self)
        if isinstance(error, _Leave) and error.level == level and error.target is not None:
            past = self._loops.past_of(self, error.target)
            restore_rng(past.rng)
            self.exhausted = past.exhausted
            self.arrived(past.end)
            if level == 0:
                self._again = not self._loops.finish(self)
            del stack[level:]
            return True
        if level == 0 and isinstance(error, _Leave) and error.level < 0:
            del stack[:]
            self._again = True
            return True
        if error is None and level == 0:
            self._again = not self._loops.finish(self)
        if error is not None and level == 0:
            self._loops.output.failed()
        if level > 0 and not isinstance(error, _Leave):
            stack[level - 1].past.append(_Past(RngState.now().plain(), self.variables(), self.exhausted))
        del stack[level:]
        return False

    # -- rounds -----------------------------------------------------------------------------------

    def iterate(self, iterable: Iterable[Any], first: int | None = None) -> Iterator[Any]:
        """``first``: of numbers that come with the elements, as ``enumerate()`` gives them."""
        if not self._active:
            return iter(iterable) if first is None else enumerate(iterable, first)
        return self._steps(iterable, first) if self.text.steps else self._rounds(iterable)

    def _steps(self, iterable: Iterable[Any], first: int | None) -> Iterator[Any]:
        data = self._loops.data_of(self, iterable)
        while True:
            self._loops.yield_step(self)
            try:
                element = data.fetch()
            except StopIteration:
                return
            except BaseException as e:  # of a later micro-batch: the step has begun with an earlier one
                if not self._loops.interrupted(e):
                    raise
                continue
            yield element if first is None else (first + data.position.batch - 1, element)

    def _rounds(self, iterable: Iterable[Any]) -> Iterator[Any]:
        source, kept = iter(iterable), deque[tuple[int, Any]](maxlen=_ROUNDS_KEPT)
        reached = -1
        while True:
            self._loops.catch_up()
            there = self._loops.target_of(self)
            wanted = self.index + 1 if there is None else there.index
            if isinstance(iterable, range):
                self._over = iterable
                if there is not None and there.over is not None and iterable != range(*there.over):
                    # A replacement may have loaded a checkpoint itself, and start later.
                    iterable = self._over = range(*there.over)
                    source, reached = iter(iterable), -1
                    kept.clear()
            known = dict(kept)
            if wanted < reached and wanted not in known:
                if isinstance(iterable, Iterator):
                    raise RegistrationError(
                        f"{self.place}: this loop cannot go back to its round {wanted}, as it runs over an iterator; "
                        "let it run over something that restarts with `iter()`"
                    )
                source, reached = iter(iterable), -1
            if wanted in known:
                element = known[wanted]
            else:
                element = _END
                while reached < wanted:
                    element = next(source, _END)
                    if element is _END:
                        return
                    reached += 1
                kept.append((reached, element))
            self._round_begins(wanted, there)
            yield element

    def goes_on(self) -> bool:
        """A round of a ``while`` loop begins."""
        if self._active:
            if self.text.steps:
                self._loops.yield_step(self)
            else:
                self._loops.catch_up()
                there = self._loops.target_of(self)
                self._round_begins(self.index + 1 if there is None else there.index, there)
        return True

    def _round_begins(self, index: int, there: _Level | None) -> None:
        """A round of an outer loop begins."""
        self.index = index
        self.past.clear()
        if there is not None:
            self._loops.begins_again(self)
            restore_rng(there.rng or {})
            self._rng, self._start = there.rng, there.start
            self.arrived(there.start)
            return
        self._rng = RngState.now().plain()
        self._start = take_down(self.frame, self._names, self._loops.known)

    def arrived(self, variables: Saved) -> None:
        """The variables are to be these."""
        self.values = put_back(self.frame, self._names, self._loops.known, variables)
        self.restoring = True

    def objects(self) -> list[tuple[str, object]]:
        """What of the script's own its variables lead to, with its path: see :func:`.variables.objects_of`."""
        return list(objects_of(self.frame, self._names, self._loops.known))

    def iterators(self) -> dict[str, object]:
        """See :func:`.variables.iterators_of`."""
        return iterators_of(self.frame, self._names, self._loops.known)

    def is_in_function_of(self, other: ScriptLoop) -> bool:
        return self.frame is other.frame

    def restored(self) -> None:
        self.restoring = False

    def __enter__(self) -> None:
        if self._active and self.text.steps:
            self._loops.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool:
        if not self._active or error is None:
            return False
        if isinstance(error, _Leave):
            return error.target is None and error.level == self._loops.stack.index(self)
        return self._loops.interrupted(error)

    def passes(self, error: BaseException | None) -> bool:
        """Whether an error between two loops is done with."""
        return error is not None and self._active and self._loops.passes(error)

    def level(self, variables: Saved) -> _Level:
        over = None if self._over is None else (self._over.start, self._over.stop, self._over.step)
        return _Level(self.key, self.ordinal, self.index, self._rng, self._start, variables, tuple(self.past), over)

    def variables(self) -> Saved:
        """As they are now."""
        saved = take_down(self.frame, self._names, self._loops.known)
        self._loops.note_left_out(self, saved)
        return saved

    def values_of_objects(self) -> dict[str, Any]:
        """What the objects keep that its variables lead to."""
        return values_of_objects(self.frame, self._names, self._loops.known)

    def put_objects(self, values: Mapping[str, Any]) -> None:
        """Some of :meth:`values_of_objects`."""
        if not values:
            return
        put_back_objects(self.frame, self._names, self._loops.known, values)
        if self.restoring:  # variables that this function shares with one of them
            code, now = self.frame.f_code, self.frame.f_locals
            shared = {*code.co_cellvars, *code.co_freevars} & {path.rpartition(".")[2] for path in values}
            self.values.update({name: now[name] for name in shared & self.values.keys() if name in now})


_END: Any = object()


@dataclass
class _Around:
    """Around statements of a loop. ``ends``: called with what they have raised; whether that is dropped."""

    ends: Callable[[BaseException | None], bool] = field(repr=False)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool:
        return self.ends(error)


LOOPS = ScriptLoops()
