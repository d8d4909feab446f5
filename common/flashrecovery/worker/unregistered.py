"""What a script has, changes from step to step, and has not registered: named, for nothing of it is brought back.

A survivor keeps what a void attempt has made of it, and in a replacement it is what the script's first lines make of
it. Found are, from the variables of the function with the ``with step:`` and of those that have called it:

* *objects*: random generators of torch, Python and numpy, modules (an average of the weights), schedulers, scalers, and
  what has ``state_dict()`` and ``load_state_dict()``, if they differ between two looks;
* *iterators* from which the loop takes in each round (``next(batches)``, ``for batch in loader``);
* *variables* that the loop carries from one round to the next (:mod:`.carried`); and, if they differ between two looks,
  attributes that a method carries from one call to the next, tensors that are written in place, numbers among global
  variables and among those that inner functions share.

The looks are made before a few of the first steps, without running code of the script. That something is found does not
say that it matters: a count of steps for a log file does not.
"""

from __future__ import annotations

import ast
import collections
import itertools
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from flashrecovery.worker.generators import as_stateful
from flashrecovery.worker.marks import CONTAINERS, ELEMENTS, PLAIN, InPlace, attributes_of, is_plain, mark, plain_mark
from flashrecovery.worker.script_frames import (
    STATIC,
    carried_by_class_in,
    carried_by_loop_at,
    file_of,
    frames,
    gives_steps,
    is_own,
    loop_in,
    place_of,
    resolve,
    set_elsewhere,
    variables_of,
)

log = logging.getLogger("flashrecovery")

LOOKS = frozenset({2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64})
"""Before these of a process's steps is looked. Not before the first one, for which others wait after a recovery."""
_DEPTH = 3
_OBJECTS = 10_000
_LEAVES = (*STATIC, *PLAIN)


class Unregistered:
    """Looks at the variables of one script.

    Args:
        known: what is protected: models, optimizers, registered objects, data streams and their loaders.
        frameworks: a framework protects its own optimizers, schedulers and scalers, whichever they are.
        tell: gets a text that names what has been found for the first time.
    """

    def __init__(self, known: Iterable[object], frameworks: bool, tell: Callable[[str], None]) -> None:
        self._known, self._parameters = _known(known)
        self._frameworks = frameworks
        self._tell = tell
        self._steps = 0
        self._generation = 0
        self._seen: dict[str, Any] = {}
        self._objects: dict[str, str] = {}
        self._iterators: dict[str, None] = {}
        self._variables: dict[str, None] = {}

    def before_step(self, frame: types.FrameType, generation: int) -> None:
        """``frame``: where the ``with step:`` is. To be called before each step of this process."""
        self._steps += 1
        if self._steps in LOOKS:
            told = self._count
            place = place_of(frame, frame.f_lineno)
            try:
                self._look(frame)
            except Exception:  # whatever a script's objects raise: that they cannot be looked at does not end its job
                log.warning("%s: the variables of the script could not be looked at", place, exc_info=True)
                self._steps = max(LOOKS)
            if self._count > told:
                self._tell(f"{place}: {self._text('')}")
        if generation != self._generation:
            self._generation = generation
            if self._count:
                self._tell(self._text(" What this recovery has made of them is not what they would have been."))

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

    def _look(self, frame: types.FrameType) -> None:
        seen: dict[str, Any] = {}
        self._look_at_loop(frame)
        everything: dict[str, Any] = {}
        for one in frames(frame):
            variables = variables_of(one)
            for path in carried_by_loop_at(one.f_code.co_filename, one.f_lineno):
                value = resolve(variables, path)
                if self._is_foreign_iterator(value):
                    self._iterators.setdefault(path)
                elif is_plain(value) and not self._holds_known(value):
                    self._variables.setdefault(path)
            everything = {**variables, **everything}
            seen |= {name: ("", plain_mark(value)) for name, value in set_elsewhere(one).items()}
        self._walk(everything, seen)
        for path, (kind, newest) in seen.items():
            if path in self._seen and self._seen[path][1] != newest and path not in self._variables:
                if kind:
                    self._objects.setdefault(path, kind)
                else:
                    self._variables.setdefault(path.partition("[")[0])  # a list's elements are told together
        self._seen = seen

    def _look_at_loop(self, frame: types.FrameType) -> None:
        """A loop over something else than the steps goes on in a void attempt, and begins anew in a replacement."""
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

    def _walk(self, variables: Mapping[str, Any], seen: dict[str, Any]) -> None:
        """Put what the values of ``variables`` and their parts are like into ``seen``: path -> (kind, or empty for a
        plain value, mark). Each object has the shortest of its paths."""
        todo = collections.deque((name, value, _DEPTH) for name, value in variables.items())
        visited: set[int] = set()
        while todo and len(visited) < _OBJECTS:
            path, thing, depth = todo.popleft()
            if isinstance(thing, _LEAVES) or id(thing) in visited:
                continue
            visited.add(id(thing))
            if isinstance(thing, torch.Tensor):
                if id(thing) not in self._parameters:
                    seen.setdefault(path, ("", InPlace(thing)))
                continue
            if isinstance(thing, CONTAINERS):
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
        if isinstance(thing, torch.nn.Module):
            self._attributes(path, thing, seen, tensors_only=known or self._shares(thing))
        elif not known and not kind and is_own(type(thing)):
            self._attributes(path, thing, seen, tensors_only=False)
            return [(f"{path}.{name}", part) for name, part in attributes_of(thing).items()]
        return ()

    def _attributes(self, path: str, thing: object, seen: dict[str, Any], tensors_only: bool) -> None:
        """Plain attributes that a method of the script's own carries from call to call. Numbers in registered modules
        are protected: ``tensors_only``."""
        modules = thing.named_modules() if isinstance(thing, torch.nn.Module) else [("", thing)]
        for name, one in modules:
            if not is_own(type(one)):
                continue
            carried = self._carried(type(one))
            for attribute, value in list(attributes_of(one).items()) if carried else ():
                where = ".".join(filter(None, (path, name, attribute)))
                if attribute not in carried or (tensors_only and isinstance(value, PLAIN)):
                    continue
                if self._is_foreign_iterator(value):
                    self._iterators.setdefault(where)
                elif is_plain(value) and not self._holds_known(value):
                    seen[where] = "", plain_mark(value)

    def _carried(self, kind: type) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for one in kind.__mro__:
            if is_own(one):
                found |= carried_by_class_in(file_of(one), one.__name__)
        return found

    def _kind(self, thing: object) -> str:
        """What ``thing`` is called if it has state of its own, unknown to us; else empty."""
        if isinstance(thing, Optimizer) or (self._frameworks and isinstance(thing, (LRScheduler, GradScaler))):
            return ""
        if isinstance(thing, torch.nn.Module):
            return "" if self._shares(thing) else type(thing).__name__
        if as_stateful(thing) is not None or isinstance(thing, (LRScheduler, GradScaler)):
            return type(thing).__name__
        stateful = all(callable(getattr(type(thing), name, None)) for name in ("state_dict", "load_state_dict"))
        return type(thing).__name__ if stateful and is_own(type(thing)) else ""

    def _shares(self, module: torch.nn.Module) -> bool:
        """It is part of a registered model, or contains one."""
        parts = itertools.chain(module.modules(), module.parameters())
        return any(id(part) in self._known or id(part) in self._parameters for part in parts)

    def _is_foreign_iterator(self, value: object) -> bool:
        return hasattr(type(value), "__next__") and id(value) not in self._known and not gives_steps(value)

    def _holds_known(self, value: object) -> bool:
        """A registered object, or a container of some."""
        if isinstance(value, dict):
            return any(self._holds_known(part) for part in list(value.values())[:ELEMENTS])
        if isinstance(value, (list, tuple, collections.deque)):
            return any(self._holds_known(part) for part in list(value)[:ELEMENTS])
        return id(value) in self._known or id(value) in self._parameters


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


def _parts(thing: object, depth: int) -> Iterator[object]:
    """The attributes of ``thing``, and theirs."""
    for part in list(attributes_of(thing).values()) if depth else ():
        if not isinstance(part, (*STATIC, *PLAIN)):
            yield part
            yield from _parts(part, depth - 1)
