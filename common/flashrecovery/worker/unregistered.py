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
import functools
import itertools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from flashrecovery.worker import loop_form
from flashrecovery.worker.ahead import Installed
from flashrecovery.worker.carried import AnyLoop, carried_by_class, carried_by_loop, changed_by_loop, loop_around
from flashrecovery.worker.generators import as_stateful

LOOKS = frozenset({2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64})
"""Before these of a process's steps is looked. Not before the first one, for which others wait after a recovery."""
_FRAMES = 8
_HERE = os.path.dirname(__file__)
_DEPTH = 3
_ELEMENTS = 64
"""Of a list or dictionary that are looked at."""
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, collections.deque)
_OBJECTS = 10_000
_STATIC = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_LEAVES = (*_STATIC, *_PLAIN)


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
            place = self._look(frame)
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

    def _look(self, frame: types.FrameType) -> str:
        seen: dict[str, Any] = {}
        self._look_at_loop(frame)
        everything: dict[str, Any] = {}
        for one in _frames(frame):
            variables = _variables(one)
            for path in _carried_by_loop(one.f_code.co_filename, one.f_lineno):
                value = _resolve(variables, path)
                if self._is_foreign_iterator(value):
                    self._iterators.setdefault(path)
                elif _is_plain(value) and not self._holds_known(value):
                    self._variables.setdefault(path)
            everything = {**variables, **everything}
            seen |= {name: ("", _plain_mark(value)) for name, value in _set_elsewhere(one).items()}
        self._walk(everything, seen)
        for path, (kind, mark) in seen.items():
            if path in self._seen and self._seen[path][1] != mark and path not in self._variables:
                if kind:
                    self._objects.setdefault(path, kind)
                else:
                    self._variables.setdefault(path.partition("[")[0])  # a list's elements are told together
        self._seen = seen
        return _place(frame, frame.f_lineno)

    def _look_at_loop(self, frame: types.FrameType) -> None:
        """A loop over something else than the steps goes on in a void attempt, and begins anew in a replacement."""
        around = _loop_around(frame)
        if around is None:
            return
        one, loop = around
        variables = _variables(one)
        for node in ast.walk(loop.iter):
            if isinstance(node, (ast.Name, ast.Attribute)):
                value = _resolve(variables, ast.unparse(node))
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
                    seen.setdefault(path, ("", _InPlace(thing)))
                continue
            if isinstance(thing, _CONTAINERS):
                parts = thing.items() if isinstance(thing, dict) else enumerate(thing)
                found: Iterable[tuple[str, Any]] = (
                    (f"{path}[{key!r}]", part) for key, part in itertools.islice(parts, _ELEMENTS)
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
            seen[path] = kind, _mark(thing)
        if isinstance(thing, torch.nn.Module):
            self._attributes(path, thing, seen, tensors_only=known or self._shares(thing))
        elif not known and not kind and _is_own(type(thing)):
            self._attributes(path, thing, seen, tensors_only=False)
            return [(f"{path}.{name}", part) for name, part in _vars(thing).items()]
        return ()

    def _attributes(self, path: str, thing: object, seen: dict[str, Any], tensors_only: bool) -> None:
        """Plain attributes that a method of the script's own carries from call to call. Numbers in registered modules
        are protected: ``tensors_only``."""
        modules = thing.named_modules() if isinstance(thing, torch.nn.Module) else [("", thing)]
        for name, one in modules:
            if not _is_own(type(one)):
                continue
            carried = self._carried(type(one))
            for attribute, value in _vars(one).items() if carried else ():
                where = ".".join(filter(None, (path, name, attribute)))
                if attribute not in carried or (tensors_only and isinstance(value, _PLAIN)):
                    continue
                if self._is_foreign_iterator(value):
                    self._iterators.setdefault(where)
                elif _is_plain(value) and not self._holds_known(value):
                    seen[where] = "", _plain_mark(value)

    def _carried(self, kind: type) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for one in kind.__mro__:
            if _is_own(one):
                found |= _carried_by_class(_file(one), one.__name__)
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
        return type(thing).__name__ if stateful and _is_own(type(thing)) else ""

    def _shares(self, module: torch.nn.Module) -> bool:
        """It is part of a registered model, or contains one."""
        parts = itertools.chain(module.modules(), module.parameters())
        return any(id(part) in self._known or id(part) in self._parameters for part in parts)

    def _is_foreign_iterator(self, value: object) -> bool:
        return hasattr(type(value), "__next__") and id(value) not in self._known and not _gives_steps(value)

    def _holds_known(self, value: object) -> bool:
        """A registered object, or a container of some."""
        if isinstance(value, dict):
            return any(self._holds_known(part) for part in list(value.values())[:_ELEMENTS])
        if isinstance(value, (list, tuple, collections.deque)):
            return any(self._holds_known(part) for part in list(value)[:_ELEMENTS])
        return id(value) in self._known or id(value) in self._parameters


class _InPlace:
    """What a tensor is like: unequal to its earlier self if it is the same one, and has been written."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._identity, self._version = _identity(tensor), tensor._version

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _InPlace)
        return self._identity != other._identity or self._version == other._version

    __hash__ = None  # type: ignore[assignment]


def check_loop(frame: types.FrameType) -> None:
    """``frame``: where the ``with step:`` is. Raises RegistrationError if its loop takes something along with each step
    that would part from the steps."""
    around = _loop_around(frame)
    if around is not None:
        one, loop = around
        variables = _variables(one)
        loop_form.check(loop, _place(one, loop.lineno), lambda name: _gives_steps(_resolve(variables, name)))


def _loop_around(frame: types.FrameType) -> tuple[types.FrameType, ast.For] | None:
    """The innermost loop around ``frame``'s line, in it or in a function that has called it, if it is a ``for``."""
    for one in _frames(frame):
        loop = _loop_at(one.f_code.co_filename, one.f_lineno)
        if loop is not None:
            return (one, loop) if isinstance(loop, ast.For) else None
    return None


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.AST | None:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):  # a notebook's cell, or code that was made by a program
        return None


@functools.lru_cache(maxsize=64)
def _loop_at(file: str, line: int) -> AnyLoop | None:
    tree = _tree(file)
    return None if tree is None else loop_around(tree, line)


@functools.lru_cache(maxsize=64)
def _carried_by_loop(file: str, line: int) -> tuple[str, ...]:
    loop = _loop_at(file, line)
    return () if loop is None else tuple(sorted(carried_by_loop(loop)))


@functools.lru_cache(maxsize=1024)
def _carried_by_class(file: str, name: str) -> frozenset[str]:
    tree = _tree(file)
    return frozenset() if tree is None else carried_by_class(tree, name)


def _place(frame: types.FrameType, line: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{line}"


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
    for part in _vars(thing).values() if depth else ():
        if not isinstance(part, (*_STATIC, *_PLAIN)):
            yield part
            yield from _parts(part, depth - 1)


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The script's own, from ``frame`` outwards."""
    count = 0
    while frame is not None and count < _FRAMES:
        if _is_own_file(frame.f_code.co_filename):
            count += 1
            yield frame
        frame = frame.f_back


def _variables(frame: types.FrameType) -> dict[str, Any]:
    """Of a function: its own, and the global ones that it names."""
    names = frame.f_code.co_names
    used = {name: frame.f_globals[name] for name in names if name in frame.f_globals}
    own = frame.f_locals if frame.f_locals is not frame.f_globals else {}
    return {name: v for name, v in {**used, **own}.items() if not isinstance(v, _STATIC)}


def _set_elsewhere(frame: types.FrameType) -> dict[str, Any]:
    """Numbers and the like that other functions can set (``global``, ``nonlocal``), and the own loop does not."""
    if frame.f_locals is frame.f_globals:
        return {}
    own = {name: frame.f_locals[name] for name in frame.f_code.co_cellvars if name in frame.f_locals}
    loop = _loop_at(frame.f_code.co_filename, frame.f_lineno)
    by_loop = frozenset() if loop is None else changed_by_loop(loop)
    found = {**{name: value for name, value in frame.f_globals.items() if not name.startswith("__")}, **own}
    return {name: v for name, v in found.items() if isinstance(v, _PLAIN) and name not in by_loop}


def _resolve(variables: Mapping[str, Any], path: str) -> object:
    """The value of a dotted name; itself as a module, which is never plain, if it has none."""
    first, *rest = path.split(".")
    value = variables.get(first, sys)
    for name in rest:
        value = _vars(value).get(name, sys)
    return value


def _gives_steps(value: object) -> bool:
    """What ``recovery.steps()`` returns, or another generator of ours."""
    return isinstance(value, types.GeneratorType) and os.path.dirname(value.gi_code.co_filename) == _HERE


def _is_plain(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    arrays = (numpy.ndarray, numpy.generic) if numpy is not None else ()
    return isinstance(value, (*_PLAIN, *_CONTAINERS, torch.Tensor, *arrays))


def _mark(thing: object) -> Any:
    """Another value when ``thing`` has changed, as far as that is seen without running code of the script."""
    generator = as_stateful(thing)
    if generator is not None:
        return _state_text(generator.state_dict())
    if isinstance(thing, torch.nn.Module):
        return [(_identity(t), t._version) for t in (*thing.parameters(), *thing.buffers())]
    return {name: _plain_mark(value) for name, value in _vars(thing).items()}


def _state_text(state: Any) -> str:
    return f"{state!r}" if not isinstance(state, bytes) else state.hex()


def _plain_mark(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _identity(value), value._version
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, _CONTAINERS):
        parts = value.values() if isinstance(value, dict) else value
        return len(value), [_element_mark(part) for part in itertools.islice(parts, _ELEMENTS)]
    if isinstance(value, torch.nn.Module):
        return _mark(value)
    return _identity(value) if as_stateful(value) is None else _mark(value)


def _element_mark(value: Any) -> Any:
    if isinstance(value, (*_CONTAINERS, torch.nn.Module)):
        return _identity(value)
    return _plain_mark(value)


def _identity(thing: object) -> tuple[int, object]:
    """Equal only for the same object: a number may come again when an object is gone, a weak reference to it not."""
    try:
        reference = weakref.ref(thing)
    except TypeError:
        return id(thing), None
    return id(reference), reference


def _vars(thing: object) -> dict[str, Any]:
    found = getattr(thing, "__dict__", None)
    return found if isinstance(found, dict) else {}


def _is_own(kind: type) -> bool:
    """Of a class: defined by the script, and by nothing that is installed."""
    return _is_own_file(_file(kind))


def _is_own_file(file: str) -> bool:
    return bool(file) and not file.startswith("<") and not _installed().has_file(file)


@functools.cache
def _installed() -> Installed:
    return Installed()


def _file(kind: type) -> str:
    return str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
