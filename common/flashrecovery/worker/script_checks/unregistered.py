"""What a script has, changes from step to step, and has not registered: named, for nothing of it is brought back.

A survivor keeps what a discarded attempt has made of it, and in a replacement it is what the script's first lines make
of it. Found are, from the variables of the function with the ``with step:`` and of those that have called it:

* *objects*: random generators of torch, Python and numpy, modules (an average of the weights), schedulers, scalers, and
  what has ``state_dict()`` and ``load_state_dict()``, if they differ between two looks;
* *iterators* from which the loop takes in each round (``next(batches)``, ``for batch in loader``);
* *variables* that the loop carries from one round to the next (:mod:`flashrecovery.worker.script_text.loop_carried`);
  and, if they differ between two looks, attributes that a method carries from one call to the next, tensors that are
  written in place, numbers among global variables and among those that inner functions share.

What each round sets before it reads it is not carried, whatever it is. Where steps are calls
(:mod:`flashrecovery.worker.framework_calls`) a replacement runs the script's loop from its beginning, so what follows
from the number of the round comes back, and so
does what a generator or an iterator gives: named are modules, tensors, and variables that depend on what calls return.

The looks are made before a few steps, more and more seldom, and before the first one after a recovery, without running
code of the script. That something is found does not say that it matters: a count of steps for a log file does not.
"""

from __future__ import annotations

import ast
import collections
import itertools
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from flashrecovery.worker.data.step_data import StepData
from flashrecovery.worker.kept_attributes import KeptAttributes
from flashrecovery.worker.local_state.fingerprints import (
    CONTAINERS,
    ELEMENTS,
    KEPT_NUMBERS,
    PLAIN,
    InPlace,
    attributes_of,
    content_mark,
    identity,
    is_plain,
    mark,
    plain_mark,
)
from flashrecovery.worker.local_state.generators import as_stateful
from flashrecovery.worker.script_checks.hooks import HookWatch
from flashrecovery.worker.script_checks.module_state import ScriptModuleState
from flashrecovery.worker.script_text.function_parts import function_parts
from flashrecovery.worker.script_text.held_state import objects_from
from flashrecovery.worker.script_text.loop_carried import LoopCarried
from flashrecovery.worker.script_text.plain_values import LARGE, SMALL, storage_of
from flashrecovery.worker.script_text.script_frames import (
    STATIC,
    carried_by_loop_at,
    carried_by_own_classes,
    frames,
    gives_steps,
    is_own,
    local_to_call,
    loop_in,
    place_of,
    resolve,
    set_elsewhere,
    variables_of,
)

log = logging.getLogger("flashrecovery")

_DEPTH = 3
_OBJECTS = 10_000
_LEAVES = (*STATIC, *PLAIN)


def is_looked_at(step: int) -> bool:
    """Before which of a process's steps, counted from 1, is looked: 2, 3, 4, 6, 8, 12, 16, 24, and so on. Not before
    the first one, for which others wait after a recovery."""
    power = 1 << (step.bit_length() - 1)
    return step > 1 and step in (power, power + power // 2)


@dataclass
class _Seen:
    """What one check has found: path -> (kind, or empty for a plain value, mark).

    ``roots``: for paths through a variable that each iteration sets again, the object that it was then.
    """

    marks: dict[str, tuple[str, Any]] = field(default_factory=dict)
    roots: dict[str, object] = field(default_factory=dict)

    def differs(self, path: str, newest: _Seen) -> bool:
        """Whether what ``path`` leads to is still the same thing, and another one than it was."""
        root = path.partition(".")[0].partition("[")[0]
        if root in newest.roots and newest.roots[root] != self.roots.get(root):
            return False
        return path in self.marks and bool(self.marks[path][1] != newest.marks[path][1])


class Unregistered:
    """Finds unprotected variables of one script that change from step to step.

    Args:
        known: what is protected: models, optimizers, registered objects, data streams and their loaders.
        frameworks: a framework protects its own optimizers, schedulers and scalers, whichever they are.
        tell: called with a text that names new findings.
        calls: steps are calls.
        kept: if the script's own loops are protected (:mod:`flashrecovery.worker.own_loops`): whether a variable with
            this value is restored with them; the number limits the elements of a tensor.
    """

    def __init__(
        self,
        known: Iterable[object],
        frameworks: bool,
        tell: Callable[[str], None],
        *,
        calls: bool = False,
        kept: Callable[[object, int], bool] | None = None,
    ) -> None:
        things = list(known)
        self._registered, self._parameters = _known(things)
        self._known = self._registered
        self._objects_known, _ = _known(thing for thing in things if not isinstance(thing, StepData))
        self._kept_attributes = [thing for thing in things if isinstance(thing, KeptAttributes)]
        self._named = frozenset(_variables_of_modules(self._kept_attributes))
        self._things = [thing for thing in things if isinstance(thing, (torch.nn.Module, Optimizer))]
        self._hooks = HookWatch([thing for thing in things if isinstance(thing, torch.nn.Module) and not frameworks])
        self._storages: frozenset[int] = frozenset()
        self._frameworks = frameworks
        self._tell = tell
        self._calls = calls
        self._kept = kept
        self._steps = 0
        self._generation = 0
        self._given_up = False
        self._seen = _Seen()
        self._modules = ScriptModuleState()
        self._carried: set[str] = set()
        self._objects: dict[str, str] = {}
        self._iterators: dict[str, None] = {}
        self._variables: dict[str, None] = {}

    def before_step(self, frame: types.FrameType, generation: int) -> None:
        """``frame``: where the ``with step:`` is. To be called before each step of this process."""
        self._steps += 1
        recovered = generation != self._generation
        self._generation = generation
        told, place = self._count, ""
        if self._steps > 1 and (recovered or is_looked_at(self._steps)) and not self._given_up:
            place = self._look_from(frame)
            changed = self._hooks.changed()
            if changed:
                self._tell(f"{place}: {self._hooks.text(changed)}")
        if recovered and self._count:
            self._tell(self._text(" After this recovery they may not be what they would have been."))
        elif self._count > told:
            self._tell(f"{place}: {self._text('')}")

    def _look_from(self, frame: types.FrameType) -> str:
        """Returns where the script is."""
        around = list(frames(frame))
        if not around:
            return ""
        place = place_of(around[0], around[0].f_lineno)
        try:
            self._look(around)
        except Exception:  # whatever a script's objects raise: that they cannot be looked at does not end its job
            log.warning("%s: the variables of the script could not be looked at", place, exc_info=True)
            self._given_up = True
        return place

    @property
    def _count(self) -> int:
        return len(self._objects) + len(self._iterators) + len(self._variables)

    def _text(self, more: str) -> str:
        parts = []
        if self._objects:
            names = ", ".join(f"{path} ({kind})" for path, kind in self._objects.items())
            example = ", ".join(f"{path.rpartition('.')[2]}={path}" for path in list(self._objects)[:3])
            parts.append(f"changed from step to step, and not registered: {names}; add recovery.register({example})")
        if self._iterators:
            parts.append(
                f"iterators that are asked for another element in each step: {', '.join(self._iterators)}; give what "
                "they read to recovery.data() and take from that"
            )
        if self._variables:
            parts.append(
                f"plain variables that are carried from step to step: {', '.join(self._variables)}; if one of them "
                "decides what a step computes, register an object that holds it"
            )
        return f"{'. '.join(parts)}. A recovery does not bring them back (docs/limits.md).{more}"

    def _look(self, around: Sequence[types.FrameType]) -> None:
        """``around``: the script's functions that are running, inner ones first."""
        seen = _Seen()
        self._storages = _storages(self._things)
        self._known = self._registered | _held_by(self._kept_attributes)
        if not self._calls and self._kept is None:
            self._look_at_loop(around[0])
        everything: dict[str, Any] = {}
        remade = set[str]()
        reset: dict[int, object] = {}
        in_loop = False
        for one in around:
            variables = variables_of(one)
            carried = carried_by_loop_at(one.f_code.co_filename, one.f_lineno)
            found_here = {name: v for name, v in variables.items() if name not in everything}
            if carried != LoopCarried():
                in_loop = True
                remade |= carried.remade & found_here.keys()
                self._carried |= (carried.names | carried.set_here) - carried.remade
            elif not in_loop:  # it is called in each step
                remade |= local_to_call(one) & found_here.keys()
            reachable = {**{name: v for name, v in one.f_globals.items() if name in carried.names}, **variables}
            for path in sorted(carried.names - (carried.counted if self._calls else frozenset())):
                if not self._is_of_registered(reachable, path):
                    self._look_at_carried(path, resolve(reachable, path), seen)
            reset |= {id(value): value for value in (resolve(variables, path) for path in carried.reset)}
            everything |= found_here
            if not self._calls:
                elsewhere = {name: v for name, v in set_elsewhere(one).items() if not self._comes_back(v)}
                seen.marks |= {name: ("", plain_mark(value)) for name, value in elsewhere.items()}
        seen.roots = {name: identity(everything[name]) for name in remade}
        of_modules = self._look_at_modules(around, everything, seen, {*reset})
        for path, (kind, _newest) in seen.marks.items():
            if path not in self._variables and self._seen.differs(path, seen):
                if path in of_modules and not self._modules.is_shared(path, of_modules[path]):
                    continue
                if kind:
                    self._objects.setdefault(path, kind)
                else:
                    self._note_variable(path.partition("[")[0])  # a list's elements are reported together
        self._seen = seen

    def _look_at_modules(
        self, around: Sequence[types.FrameType], everything: Mapping[str, Any], seen: _Seen, reset: set[int]
    ) -> dict[str, str]:
        """After what ``everything`` leads to, what the script's modules have. Returns paths of plain values of theirs
        that count only if the script's text shares them among functions, with the modules' names."""
        variables = self._modules.variables(around)
        paths = dict.fromkeys(reset, "")
        self._walk(everything, seen.marks, paths)
        self._walk({path: value for path, (_, value) in variables.items()}, seen.marks, paths)
        found: dict[str, str] = {}
        if self._calls:
            return found
        for path, module, value in self._modules.plain(variables, self._known | reset, paths):
            tensor = isinstance(value, torch.Tensor)  # which the walk has seen
            if path not in seen.marks and not tensor and not self._holds_known(value) and not self._comes_back(value):
                seen.marks[path] = "", content_mark(value)
                found[path] = module
        return found

    def _look_at_carried(self, path: str, value: object, seen: _Seen) -> None:
        """The text says that the loop carries this variable."""
        if self._is_foreign_iterator(value):
            if not self._calls:
                self._iterators.setdefault(path)
        elif is_plain(value):
            if not self._holds_known(value) and not self._comes_back(value, path):
                self._note_variable(path)
        elif is_own(type(value)) and id(value) not in self._known and not isinstance(value, torch.nn.Module):
            for name, part in attributes_of(value).items():  # an object of plain values, re-created in each round
                if is_plain(part) and not self._holds_known(part) and not self._comes_back(part):
                    seen.marks[f"{path}.{name}"] = "", plain_mark(part)

    def _note_variable(self, path: str) -> None:
        parts = path.split(".")
        if not any(".".join(parts[:end]) in self._named for end in range(1, len(parts) + 1)):
            self._variables.setdefault(path)

    def _is_of_registered(self, variables: Mapping[str, Any], path: str) -> bool:
        """Whether ``path`` is an attribute of what is registered, and so brought back with it."""
        owner_path, dot, attribute = path.rpartition(".")
        if not dot:
            return False
        owner = resolve(variables, owner_path)
        if isinstance(owner, torch.nn.Module):
            return id(owner) in self._known and _keeps(type(owner), attribute, resolve(variables, path))
        return id(owner) in self._objects_known or self._is_of_registered(variables, owner_path)

    def _look_at_loop(self, frame: types.FrameType) -> None:
        """Look at a loop over something other than the steps: it continues in a discarded attempt, and starts from its
        beginning in a replacement."""
        around = loop_in(frame)
        if around is None:
            return
        one, loop = around
        variables = variables_of(one)
        for node in ast.walk(loop.iter):
            if isinstance(node, (ast.Name, ast.Attribute)):
                value = resolve(variables, ast.unparse(node))
                if isinstance(value, DataLoader) or self._is_foreign_iterator(value):
                    self._iterators.setdefault(ast.unparse(node))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("range", "count", "itertools.count"):
                self._variables.setdefault(ast.unparse(loop.target))

    def _walk(self, variables: Mapping[str, Any], seen: dict[str, Any], visited: dict[int, str]) -> None:
        """Put what the values of ``variables`` and their parts are like into ``seen``: path -> (kind, or empty for a
        plain value, mark). Each object has the shortest of its paths. ``visited``: these paths by identity; objects
        that are in it are left out."""
        todo = collections.deque((name, value, _DEPTH) for name, value in variables.items())
        while todo and len(visited) < _OBJECTS:
            path, thing, depth = todo.popleft()
            if isinstance(thing, _LEAVES) or id(thing) in visited:
                continue
            visited[id(thing)] = path
            if isinstance(thing, torch.Tensor):
                own = id(thing) not in self._parameters and storage_of(thing) not in self._storages
                if own and (path.endswith("]") or not self._comes_back(thing, path)):
                    seen.setdefault(path, ("", InPlace(thing)))
                continue
            if isinstance(thing, CONTAINERS):
                if not path.endswith("]") and self._comes_back(thing):
                    continue
                parts = thing.items() if isinstance(thing, dict) else enumerate(thing)
                found: Iterable[tuple[str, Any]] = (
                    (f"{path}[{key!r}]", part) for key, part in itertools.islice(parts, ELEMENTS)
                )
            else:
                found = self._look_into(path, thing, seen)
            if depth:
                todo.extend((where, part, depth - 1) for where, part in found)

    def _look_into(self, path: str, thing: object, seen: dict[str, Any]) -> Iterable[tuple[str, Any]]:
        """Returns the parts that are looked at next."""
        known = id(thing) in self._known
        kind = "" if known else self._kind(thing)
        if kind:
            seen[path] = kind, mark(thing)
        if self._calls:
            return ()
        if isinstance(thing, torch.nn.Module):
            self._attributes(path, thing, seen)
            return self._held_by_modules(path, thing, seen)
        if not known and not kind and is_own(type(thing)):
            self._attributes(path, thing, seen)
            remade = carried_by_own_classes(type(thing)).remade
            return [(f"{path}.{name}", part) for name, part in attributes_of(thing).items() if name not in remade]
        return ()

    def _attributes(self, path: str, thing: object, seen: dict[str, Any]) -> None:
        """Plain attributes that a method of the script's own carries from call to call. Most numbers in registered
        modules are protected."""
        modules = thing.named_modules() if isinstance(thing, torch.nn.Module) else [("", thing)]
        for name, one in modules:
            if not is_own(type(one)):
                continue
            carried = carried_by_own_classes(type(one)).names
            for attribute, value in list(attributes_of(one).items()) if carried else ():
                where = ".".join(filter(None, (path, name, attribute)))
                if attribute not in carried or (id(one) in self._known and _keeps(type(one), attribute, value)):
                    continue
                if self._is_foreign_iterator(value):
                    self._iterators.setdefault(where)
                elif is_plain(value) and not self._holds_known(value) and not self._comes_back(value):
                    seen[where] = "", plain_mark(value)

    def _held_by_modules(self, path: str, module: torch.nn.Module, seen: dict[str, Any]) -> list[tuple[str, Any]]:
        """Objects in attributes of the script's own modules: generators of random numbers, and of its classes. What
        its functions hold is looked at here."""
        found = list[tuple[str, Any]]()
        for name, one in module.named_modules():
            for attribute, value in list(attributes_of(one).items()) if is_own(type(one)) else ():
                where = ".".join(filter(None, (path, name, attribute)))
                if isinstance(value, types.FunctionType):
                    for part, held in (function_parts(value) or {}).items():
                        if is_plain(held) and not self._holds_known(held) and not self._comes_back(held):
                            seen[f"{where}.{part}"] = "", plain_mark(held)
                elif as_stateful(value) is not None or (is_own(type(value)) and not isinstance(value, torch.nn.Module)):
                    found.append((where, value))
        return found

    def _comes_back(self, value: object, path: str = "") -> bool:
        """``path``: of a variable."""
        return self._kept is not None and self._kept(value, LARGE if path in self._carried else SMALL)

    def _kind(self, thing: object) -> str:
        """The name of ``thing`` if it has state that is unknown to us; else empty."""
        if isinstance(thing, Optimizer) or (self._frameworks and isinstance(thing, (LRScheduler, GradScaler))):
            return ""
        if isinstance(thing, torch.nn.Module):
            return "" if self._shares(thing) else type(thing).__name__
        if self._calls:
            return ""
        if as_stateful(thing) is not None:
            return "" if self._kept is not None else type(thing).__name__
        if isinstance(thing, (LRScheduler, GradScaler)):
            return type(thing).__name__
        stateful = all(callable(getattr(type(thing), name, None)) for name in ("state_dict", "load_state_dict"))
        return type(thing).__name__ if stateful and is_own(type(thing)) else ""

    def _shares(self, module: torch.nn.Module) -> bool:
        """It is part of a registered model, or contains one."""
        parts = itertools.chain(module.modules(), module.parameters())
        return any(id(part) in self._known or id(part) in self._parameters for part in parts)

    def _is_foreign_iterator(self, value: object) -> bool:
        if self._kept is not None:  # what loops run over, and what is asked by ``next()``, is led back
            return False
        return hasattr(type(value), "__next__") and id(value) not in self._known and not gives_steps(value)

    def _holds_known(self, value: object) -> bool:
        """A registered object, or a container of some."""
        if isinstance(value, dict):
            return any(self._holds_known(part) for part in [*itertools.islice(value.values(), ELEMENTS)])
        if isinstance(value, (list, tuple, collections.deque)):
            return any(self._holds_known(part) for part in [*itertools.islice(value, ELEMENTS)])
        return id(value) in self._known or id(value) in self._parameters


def _keeps(kind: type, attribute: str, value: object) -> bool:
    """Whether this attribute of such a registered module comes back: not those of a wrapper or an engine around the
    model, and those alone that :class:`flashrecovery.adapter.modes.AttributeTracker` knows."""
    module = kind.__module__.startswith("torch.nn.modules") or any(is_own(one) for one in kind.__mro__)
    return module and type(value) in KEPT_NUMBERS and not attribute.startswith("_")


def _known(things: Iterable[object]) -> tuple[frozenset[int], frozenset[int]]:
    """Identities of ``things`` and of what belongs to them; those of all parameters and buffers of modules."""
    ids: set[int] = set()
    tensors: set[int] = set()
    for thing in things:
        ids.add(id(thing))
        if isinstance(thing, torch.nn.Module):
            ids |= {id(module) for module in thing.modules()}
            tensors |= {id(tensor) for tensor in (*thing.parameters(), *thing.buffers())}
        elif not isinstance(thing, Optimizer):
            ids |= {id(part) for part in _parts(thing, _DEPTH)}
    return frozenset(ids), frozenset(tensors)


def _held_by(registered: Iterable[KeptAttributes]) -> frozenset[int]:
    """Identities of what these attributes are now, and of what they lead to."""
    values = [pair for one in registered for pair in one.values().items()]
    found = [thing for _, thing in objects_from(values, frozenset(), set())]
    return frozenset(id(thing) for thing in (*found, *(value for _, value in values if not isinstance(value, _LEAVES))))


def _variables_of_modules(registered: Iterable[KeptAttributes]) -> Iterator[str]:
    """Names of the variables of modules among them, as the module itself has them and as others do."""
    for one in registered:
        if isinstance(one.owner, types.ModuleType):
            yield from (name for plain in one.names for name in (plain, f"{one.owner.__name__}.{plain}"))


def _storages(things: Iterable[object]) -> frozenset[int]:
    """Where the tensors of models and optimizers lie: a ``state_dict()`` has others of the same memory, and the
    parameter groups that a script has made hold what DeepSpeed has put in place of its parameters."""
    tensors = list[object]()
    for thing in things:
        if isinstance(thing, torch.nn.Module):
            tensors += (*thing.parameters(), *thing.buffers())
        elif isinstance(thing, Optimizer):
            tensors += (part for state in list(thing.state.values()) for part in _values(state))
            tensors += (parameter for group in thing.param_groups for parameter in group["params"])
    return frozenset(storage_of(t) for t in tensors if isinstance(t, torch.Tensor))


def _values(state: object) -> Iterable[object]:
    return list(state.values()) if isinstance(state, dict) else ()


def _parts(thing: object, depth: int) -> Iterator[object]:
    """The attributes of ``thing``, and theirs."""
    for part in list(attributes_of(thing).values()) if depth else ():
        if not isinstance(part, (*STATIC, *PLAIN)):
            yield part
            yield from _parts(part, depth - 1)
