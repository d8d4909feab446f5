"""``--auto=print``: the patch of a running script, from what is found at its first step.

Each rank runs the script up to there and ends; rank 0 writes the patch, for the launcher to print it. Nothing is
changed, and no step is taken.
"""

from __future__ import annotations

import collections
import contextlib
import difflib
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from flashrecovery.config import PATCH_ENV
from flashrecovery.errors import UnsupportedError
from flashrecovery.state import codec
from flashrecovery.worker.auto.found import Found, Tensors, TrainedModel
from flashrecovery.worker.auto.inline import inlined, without
from flashrecovery.worker.auto.patch import THIS_FILE, Running, by_hand, keyword_of
from flashrecovery.worker.auto.straight import NotByHand
from flashrecovery.worker.local_state.fingerprints import attributes_of
from flashrecovery.worker.local_state.generators import as_stateful
from flashrecovery.worker.own_loops.loops import LOOPS, ScriptLoop
from flashrecovery.worker.own_loops.rewrite import NONE, Makes
from flashrecovery.worker.own_loops.variables import is_of_module, protected
from flashrecovery.worker.script_checks.module_state import ScriptModuleState
from flashrecovery.worker.script_checks.wrapped_module import wrapper_of
from flashrecovery.worker.script_text.held_state import changing_defaults, held_by
from flashrecovery.worker.script_text.plain_values import LARGE, is_kept
from flashrecovery.worker.script_text.script_frames import STATIC, carried_by_class_in, file_of, frames, is_own

_IMMUTABLE = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
"""What else a method reads it may change, by a method of that: `self.losses.append(loss)`."""
_DATA = (
    *(*_IMMUTABLE, bytearray, list, dict, set, range, collections.deque),
    *(torch.dtype, torch.device, torch.Size),
)
_UNCHANGED = (*STATIC, Dataset, DataLoader, Sampler, torch.device, torch.dtype)


def print_patch(found: Found, made_elsewhere: Callable[[bytes, str], Makes] | None) -> NoReturn:
    """Write it and end this process. Raises UnsupportedError with file and line."""
    stack = LOOPS.stack
    text = patch(stack, found, made_elsewhere)
    if dist.is_initialized():
        dist.barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        path = Path(os.environ[PATCH_ENV])
        new = path.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def patch(
    stack: Sequence[ScriptLoop], found: Found, made_elsewhere: Callable[[bytes, str], Makes] | None = None
) -> str:
    """A unified diff. ``stack``: the loops that are running, the outermost first."""
    loop = stack[-1]
    file = loop.key[0]
    try:
        _check(stack)
        if found.unsaved:
            raise NotByHand(loop.key[1], f"{', '.join(found.unsaved)}: too large to be kept with each step")
        data = Path(file).read_bytes()
        text = data.decode("utf-8")
        if "\r" in text or not text.endswith("\n"):
            raise NotByHand(1, "its lines, or the last of them, do not end with a line feed")
        elsewhere = NONE if made_elsewhere is None else made_elsewhere(data, file)
        new = _written(text, stack, found, elsewhere)
    except NotByHand as e:
        raise UnsupportedError(
            f"no patch, {file}:{e.line}: {e}. A program cannot write the lines by hand here; --auto protects the "
            "script as it is"
        ) from e
    name = os.path.relpath(file)
    name = os.path.basename(file) if name.startswith("..") else name
    return "".join(
        difflib.unified_diff(text.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}")
    )


def _written(text: str, stack: Sequence[ScriptLoop], found: Found, elsewhere: Makes) -> str:
    """Raises NotByHand."""
    loop = stack[-1]
    if len(stack) == 1:
        return by_hand(text, loop.key[1], 0, _Seen([loop], found).running(), elsewhere)
    outer = stack[0]
    if loop.is_in_function_of(outer):
        return by_hand(text, loop.key[1], outer.key[1], _Seen([loop], found).running(), elsewhere)
    one = inlined(text, loop.key[1], outer.key[1])
    try:
        new = by_hand(one.text, one.step_line, one.epoch_line, _Seen([loop, outer], found).running(), elsewhere)
    except NotByHand as e:
        raise NotByHand(one.line(e.line), str(e)) from e
    return without(new, one.function)


def _check(stack: Sequence[ScriptLoop]) -> None:
    inner = stack[-1]
    for loop in stack:
        line = abs(loop.key[1])
        if loop.key[1] < 0:
            raise NotByHand(line, "several loops of steps come one after the other; by hand there is one")
        calls = inner.frame.f_back is loop.frame and loop.key[0] == inner.key[0]
        if not loop.is_in_function_of(inner) and not calls:
            raise NotByHand(
                line,
                f"this loop calls {inner.frame.f_code.co_name}(), which has the loop of steps (line {inner.key[1]}): "
                "both become one, and so belong into one function",
            )
    if len(stack) > 2:
        raise NotByHand(stack[0].key[1], f"{len(stack)} loops in one another: by hand there is one")


class _Seen:
    """What the function of the loop sees. ``loops``: that of steps and, if it is in a function that the loop of epochs
    calls, that one."""

    def __init__(self, loops: Sequence[ScriptLoop], found: Found) -> None:
        self._loop, self._loops, self._found, self._frame = loops[0], loops, found, loops[0].frame
        self._locals = {name: value for one in reversed(loops) for name, value in one.frame.f_locals.items()}
        models = [model.module for model in found.models]
        optimizers = [one for model in found.models for one in model.optimizers.values()]
        self._registered = [*models, *optimizers, *found.objects.values()]
        self._inside = [part for model in models for part in model.modules()]
        tensors = [p for model in models for p in (*model.parameters(), *model.buffers())]
        self._ids = protected(self._registered, tensors)

    def running(self) -> Running:
        in_modules, of_modules = self._by_modules(self._of_modules())
        return Running(
            [self._model(model) for model in self._found.models],
            {keyword_of(path): self._expression(path, one) for path, one in self._objects().items()},
            frozenset(path for path, one in self._loop_objects() if as_stateful(one) is not None),
            self._own(),
            self._sampler_of,
            self._value,
            self._plain,
            self._known,
            self._whose,
            lambda name: name not in self._locals and name in self._frame.f_globals,
            lambda name: any(name in one.frame.f_code.co_freevars for one in self._loops),
            in_modules,
            of_modules,
        )

    def _by_modules(self, paths: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
        """Of ``paths``: what modules keep themselves, by an expression for the module; and all else."""
        found, others = dict[str, list[str]](), list[str]()
        for path in paths:
            module, _, name = path.rpartition(".")
            variables = self._frame.f_globals if not module else vars(sys.modules.get(module, types.SimpleNamespace()))
            if name in variables and is_kept(variables[name], self._ids) and not has_objects(variables[name]):
                found.setdefault(f'sys.modules["{module}"]' if module else THIS_FILE, []).append(name)
            else:
                others.append(path)
        return found, others

    def _of_modules(self) -> list[str]:
        """What modules keep, but for objects whose attributes the patch registers."""
        registered = frozenset({*self._ids, *map(id, self._inside), *(id(thing) for _, thing in self._loop_objects())})
        return ScriptModuleState().may_change([*frames(self._frame)], registered)

    def _value(self, path: str) -> Any:
        with contextlib.suppress(Exception):  # the script's own attributes may be properties
            return eval(path, self._frame.f_globals, dict(self._locals))
        return None

    def _loop_objects(self) -> Iterator[tuple[str, object]]:
        seen: list[object] = []
        """But for those of other modules, which the script's own file does not name."""
        for path, thing in (one for loop in self._loops for one in loop.objects()):
            if not is_of_module(path) and not any(thing is one for one in seen):
                seen.append(thing)
                yield path, thing

    def _changed(self) -> set[str]:
        """Variables and attributes that the loops may change."""
        return {path for one in self._loops for path in one.text.carried.names | one.text.carried.set_here}

    def _expression(self, path: str, thing: object) -> str:
        """``path``, or another one that leads to ``thing`` from the loop's function. Raises NotByHand."""
        if self._value(path) is not thing:
            for other in self._paths_to(thing):
                return other
            raise NotByHand(
                self._loop.key[1],
                f"{path} ({type(thing).__name__}) cannot be reached from {self._frame.f_code.co_name}(), which has "
                "the loop of steps",
            )
        return path

    def _paths_to(self, thing: object) -> Iterator[str]:
        """A variable, or an attribute of an object of the script's own that a variable has."""
        for name, value in self._locals.items():
            if value is thing:
                yield name
        for name, value in self._locals.items():
            if is_own(type(value)):
                yield from (f"{name}.{attribute}" for attribute, one in attributes_of(value).items() if one is thing)

    def _model(self, model: TrainedModel) -> tuple[str, list[str]]:
        value = self._value(model.path)
        if not isinstance(value, torch.nn.Module) or (
            value is not model.module and wrapper_of(value) is not model.module
        ):
            path = self._expression(model.path, model.module)
            return path, [self._expression(path, one) for path, one in model.optimizers.items()]
        return model.path, [self._expression(path, one) for path, one in model.optimizers.items()]

    def _objects(self) -> Mapping[str, object]:
        """Those to be registered as they are, and generators of random numbers."""
        found = {path: one for path, one in self._found.objects.items() if not isinstance(one, Tensors)}
        found = {
            path[:-1] if path.endswith("_") and self._value(path) is None else path: v for path, v in found.items()
        }
        for path, thing in self._loop_objects():
            if as_stateful(thing) is not None and not any(thing is one for one in found.values()):
                found[path] = thing
        return found

    def _own(self) -> dict[str, list[str]]:
        """Objects with plain attributes that change, by expression."""
        found: dict[str, list[str]] = {}
        for path, one in self._found.objects.items():
            if isinstance(one, Tensors):
                owner, _, name = path.rpartition(".")
                found.setdefault(owner, []).append(name)
        text = self._changed()
        for path, thing in self._loop_objects():
            if as_stateful(thing) is not None or any(thing is one for one in self._registered):
                continue
            if isinstance(thing, types.FunctionType):
                self._refuse_closure(path, thing)
                continue
            if isinstance(thing, type):
                self._refuse_class(path, thing)
                continue
            if type(thing).__module__.partition(".")[0] == "tqdm":
                continue
            attributes = attributes_of(thing)
            kinds = [kind for kind in type(thing).__mro__ if is_own(kind)]
            changed = {name for kind in kinds for name in carried_by_class_in(file_of(kind), kind.__name__).names}
            paths = [one for one in text if one.startswith(f"{path}.")]
            changed |= {one[len(path) + 1 :].partition(".")[0] for one in paths}
            read = {name for kind in kinds for name in carried_by_class_in(file_of(kind), kind.__name__).read}
            changed |= {n for n in read & attributes.keys() if not isinstance(attributes[n], _IMMUTABLE)}
            names = [n for n in sorted(changed) if n not in attributes or self._is_plain(attributes[n])]
            if names:
                self._expression(path, thing)
                found.setdefault(path, []).extend(name for name in names if name not in found.get(path, ()))
        return {path: sorted(names) for path, names in found.items()}

    def _refuse_closure(self, path: str, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):
                value = cell.cell_contents
                own = name in self._locals and self._locals[name] is value
                if isinstance(value, (list, dict, set)) and is_kept(value, self._ids) and not own:
                    raise NotByHand(
                        function.__code__.co_firstlineno,
                        f"{path}() may change {name}, which is a variable of another function: make it an attribute",
                    )

        if any(
            is_kept(value, self._ids) for value in (*vars(function).values(), *changing_defaults(function).values())
        ):
            raise NotByHand(
                function.__code__.co_firstlineno,
                f"{path}() may keep something in its attributes or default arguments: make it a variable",
            )

    def _refuse_class(self, path: str, kind: type) -> None:
        changed = {one for one in self._changed() if one.startswith(f"{path}.")}
        changed |= {f"{path}.{n}" for n in carried_by_class_in(file_of(kind), kind.__name__).names if n in vars(kind)}
        if changed:
            raise NotByHand(self._loop.key[1], f"{min(changed)}, an attribute of a class, changes: make it a variable")

    def _sampler_of(self, path: str) -> Sequence[object] | None:
        """The part of a loader that gets ``set_epoch``; None: the batches of this loader cannot be counted."""
        loader = self._value(path)
        if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
            return None
        parts = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
        return [one for one in parts if callable(getattr(one, "set_epoch", None))]

    def _plain(self, name: str, made: Collection[str]) -> bool | None:
        variables = {**self._frame.f_globals, **self._locals}
        if name not in variables:
            return None
        value = variables[name]
        if not has_objects(value):
            return is_kept(value, self._ids, largest=LARGE)
        return name in made and is_kept(value, self._ids | self._held_elsewhere(made))

    def _is_plain(self, value: object) -> bool:
        """Objects in it have a path of their own."""
        return is_kept(value, self._ids) and not has_objects(value)

    def _held_elsewhere(self, made: Collection[str]) -> frozenset[int]:
        """Identities of what other variables than ``made`` lead to. They would lead to another thing than an object
        that is put back."""
        things = [value for name, value in self._locals.items() if name not in made]
        for path, thing in self._loop_objects():
            if re.split(r"\W", path)[0] not in made:
                things += [thing, *held_by(thing).values()]
        return frozenset(id(one) for one in things if not isinstance(one, _IMMUTABLE) or isinstance(one, tuple))

    def _known(self, name: str) -> bool:
        value = self._value(name)
        return isinstance(value, _UNCHANGED) or any(value is one for one in (*self._registered, *self._inside))

    def _whose(self, name: str) -> str:
        value = self._value(name)
        return "" if value is None else f" ({name} is a {type(value).__name__})"


def has_objects(value: object) -> bool:
    """Whether something in it is not plain data: an object of a class of the script's, a path, a function."""
    found = list[object]()

    def stand_in(part: object) -> codec.StandIn | None:
        if isinstance(part, (torch.Tensor, np.ndarray, np.generic)):
            return codec.StandIn("", None)
        if not isinstance(part, _DATA):
            found.append(part)
            return codec.StandIn("", None)
        return None

    codec.dumps(value, stand_in)
    return bool(found)
