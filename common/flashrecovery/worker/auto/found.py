"""What a script trains and keeps, found from the variables of its running functions, for ``--auto``.

Found are models with their optimizers, schedulers, gradient scalers, further modules (an average of the weights), and
objects of the script's own classes that have ``state_dict()`` and ``load_state_dict()``. The same script finds the same
things under the same names in each process: names are paths, and functions and their variables have an order.
"""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from flashrecovery.errors import UnsupportedError
from flashrecovery.worker.data import accelerate, lightning_fabric
from flashrecovery.worker.local_state.fingerprints import ELEMENTS, PLAIN, attributes_of
from flashrecovery.worker.local_state.generators import as_stateful
from flashrecovery.worker.preimport.own_files import is_own_file
from flashrecovery.worker.script_checks.wrapped_module import wrapper_of
from flashrecovery.worker.script_text.plain_values import is_kept, storage_of
from flashrecovery.worker.script_text.script_frames import carried_by_class_in, file_of, frames, is_own
from flashrecovery.worker.script_text.script_modules import is_made_by_hand

_DEPTH = 5
_THINGS = 10_000
_LARGEST = 64 << 20
"""Bytes of tensors in a container that is brought back as a whole."""
_WRAPPERS = (DistributedDataParallel, FSDPModule)
_RESERVED = frozenset(("model", "optimizer", "per_rank"))


@dataclass(frozen=True)
class TrainedModel:
    """``path``: as the script writes it. ``optimizers``: with their paths."""

    path: str
    module: torch.nn.Module
    optimizers: Mapping[str, Optimizer]


@dataclass(frozen=True)
class Found:
    """What is there at the first step.

    Attributes:
        objects: to be registered by name.
        unsaved: path and kind of what changes, as the text says, and cannot be brought back.
    """

    models: tuple[TrainedModel, ...] = ()
    objects: Mapping[str, Any] = field(default_factory=dict)
    unsaved: Mapping[str, str] = field(default_factory=dict)

    def without(self, other: Found) -> Found:
        """What ``other`` does not have. (Models are distinguished by their registered parts.)"""
        return Found(
            self.models, {name: one for name, one in self.objects.items() if name not in other.objects}, self.unsaved
        )

    def __add__(self, other: Found) -> Found:
        return Found(
            (*self.models, *other.models), {**self.objects, **other.objects}, {**self.unsaved, **other.unsaved}
        )


class Tensors:
    """Tensors in a container of the script, such as the shadows of an average of the weights, as a registered object.

    ``owner``, ``name``: the attribute that leads to it, which may lead to another container later."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name

    @property
    def _now(self) -> Any:
        return attributes_of(self._owner)[self._name]

    def state_dict(self) -> dict[str, Any]:
        now = self._now
        if isinstance(now, torch.Tensor):
            return {"only": now.detach().clone()}
        pairs = now.items() if isinstance(now, dict) else enumerate(now)
        return {str(key): value.detach().clone() for key, value in pairs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        now = self._now
        if isinstance(now, torch.Tensor):
            self._set(now, state["only"], lambda new: attributes_of(self._owner).__setitem__(self._name, new))
            return
        for key in list(now) if isinstance(now, dict) else range(len(now)):
            self._set(now[key], state[str(key)], functools.partial(now.__setitem__, key))

    @staticmethod
    def _set(now: torch.Tensor, saved: torch.Tensor, replace: Any) -> None:
        saved = saved.to(now.device)
        if now.shape == saved.shape and now.dtype == saved.dtype and not now.requires_grad:
            now.copy_(saved)
        else:
            replace(saved)


def find(frame: types.FrameType, registered: Iterable[object] = ()) -> Found:
    """``frame``: where the loop of steps is. ``registered``: what the script has registered itself.

    Raises UnsupportedError that names what of it cannot be protected."""
    things = list(_things(frame))
    known = [*registered]
    optimizers = {path: one for path, one in things if isinstance(one, Optimizer) and not _is_among(one, known)}
    for path, one in optimizers.items():
        refuse_closures(path, one)
    modules = {path: one for path, one in things if isinstance(one, torch.nn.Module)}
    models = _models(modules, optimizers, known)
    every = [*known, *(model.module for model in models)]
    objects = {path: one for path, one in things if _is_object(one) and not _is_among(one, known)}
    objects |= _further_modules(modules, every)
    storages = _storages(every)
    taken = {id(one) for one in (*every, *optimizers.values(), *objects.values())}
    unsaved: dict[str, str] = {}
    for path, one in things:
        if id(one) in taken or isinstance(one, torch.nn.Module) or not is_own(type(one)):
            continue
        if _has_state_of_its_own(one, taken, storages):
            objects[path] = one
        elif not _is_stateful(one):
            _add_tensors(path, one, storages, objects, unsaved)
    return Found(tuple(models), {_name(path): one for path, one in objects.items()}, unsaved)


def _name(path: str) -> str:
    return f"{path}_" if path in _RESERVED else path


def _is_among(thing: object, others: Iterable[object]) -> bool:
    return any(other is thing for other in others)


# -- which things -----------------------------------------------------------------------------------


def _things(frame: types.FrameType) -> Iterator[tuple[str, Any]]:
    """All that variables of the script lead to, each with the shortest of its paths."""
    roots: dict[str, Any] = {}
    for one in frames(frame):
        for names in (one.f_locals, one.f_globals):
            for name, value in names.items():
                if not name.startswith("__"):
                    roots.setdefault(name, value)
    waiting = collections.deque((name, value, _DEPTH) for name, value in roots.items())
    seen: set[int] = set()
    while waiting and len(seen) < _THINGS:
        path, thing, depth = waiting.popleft()
        if (scaler := lightning_fabric.scaler_of(thing)) is not None:
            waiting.append((f"{path}_scaler", scaler, 0))
        thing = accelerate.scheduler_inside(lightning_fabric.inside(thing))
        if isinstance(thing, (*PLAIN, torch.Tensor)) or id(thing) in seen:
            continue
        seen.add(id(thing))
        yield path, thing
        if depth:
            waiting.extend((where, part, depth - 1) for where, part in _parts(path, thing))


def _parts(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, types.ModuleType):
        if is_made_by_hand(thing) or is_own_file(str(getattr(thing, "__file__", None) or "")):
            yield from ((f"{path}.{n}", v) for n, v in vars(thing).items() if not n.startswith("__"))
    elif type(thing) in (list, tuple, dict, collections.OrderedDict, collections.defaultdict):
        pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
        yield from ((f"{path}[{key!r}]", part) for key, part in itertools.islice(pairs, ELEMENTS))
    elif isinstance(thing, types.MethodType):
        yield f"{path}.__self__", thing.__self__
    elif isinstance(thing, functools.partial):
        yield from ((f"{path}.args[{n}]", part) for n, part in enumerate((*thing.args, *thing.keywords.values())))
    elif isinstance(thing, types.FunctionType):
        if is_own_file(thing.__code__.co_filename):
            for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
                if (content := _content(cell)) is not None:
                    yield f"{path}.{name}", content
    elif isinstance(thing, torch.nn.Module):
        if is_own(type(thing)):
            kinds = (Optimizer, LRScheduler, GradScaler)
            yield from ((f"{path}.{n}", v) for n, v in attributes_of(thing).items() if isinstance(v, kinds))
    elif _leads_on(thing):
        yield from ((f"{path}.{n}", v) for n, v in attributes_of(thing).items())


def _leads_on(thing: object) -> bool:
    """Objects of the script's own classes, but for data."""
    if isinstance(thing, (Dataset, DataLoader, type)):
        return False
    return isinstance(thing, types.SimpleNamespace) or is_own(type(thing))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


# -- models and optimizers --------------------------------------------------------------------------


def refuse_closures(path: str, optimizer: Optimizer) -> None:
    """Raises UnsupportedError."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            f"{path} (LBFGS): its step() calls the script's closure again and again, forward and backward, which "
            "--auto does not take for a step; write the lines by hand (docs/tutorial.md)"
        )


def _models(
    modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Optimizer], known: Sequence[object]
) -> list[TrainedModel]:
    """Wrapped ones first, then those that have parameters of an optimizer."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for path, module in modules.items():
        _refuse_engine(path, module)
        for name, part in module.named_modules():
            wraps = isinstance(part, DistributedDataParallel) or (name == "" and isinstance(part, FSDPModule))
            if wraps and isinstance(part, torch.nn.Module):
                found.setdefault(id(part), (f"{path}.{name}" if name else path, part))
    within = {id(part) for _, module in found.values() for part in module.modules() if part is not module}
    found = {number: one for number, one in found.items() if number not in within}
    _paths_of_wrappers(found, modules)
    covered = {id(p) for _, module in found.values() for p in module.parameters()}
    for optimizer in optimizers.values():
        left = {id(p) for p in _parameters(optimizer)} - covered
        for path, module in modules.items() if left else ():
            own = {id(p) for p in module.parameters()}
            if left <= own and id(module) not in found:
                wrapper = wrapper_of(module)
                found[id(wrapper)] = (path, wrapper)
                covered |= own
                break
    models = []
    for path, module in found.values():
        if _is_among(module, known):
            continue
        own = {id(p) for p in module.parameters()}
        belonging = {where: o for where, o in optimizers.items() if any(id(p) in own for p in _parameters(o))}
        if belonging or isinstance(module, _WRAPPERS):
            models.append(TrainedModel(path, module, belonging))
    return models


def _paths_of_wrappers(found: dict[int, tuple[str, torch.nn.Module]], modules: Mapping[str, torch.nn.Module]) -> None:
    """A wrapper that no variable leads to is around a module that one leads to."""
    covered = {id(part) for _, module in found.values() for part in module.modules()}
    for path, module in modules.items():
        if id(module) in covered or not any(p.requires_grad for p in module.parameters()):
            continue
        wrapper = wrapper_of(module)
        if wrapper is not module:
            found.setdefault(id(wrapper), (path, wrapper))
            covered |= {id(part) for part in wrapper.modules()}


def _refuse_engine(path: str, module: torch.nn.Module) -> None:
    if any(kind.__module__.partition(".")[0] == "deepspeed" for kind in type(module).__mro__):
        raise UnsupportedError(
            f'{path} is a {type(module).__name__}: put "flash_recovery": {{"enabled": true}} into its DeepSpeed '
            "config, which protects it without --auto"
        )


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _further_modules(modules: Mapping[str, torch.nn.Module], models: Sequence[object]) -> dict[str, torch.nn.Module]:
    """Those that share nothing with a model, and have something to keep: an average of the weights, a teacher."""
    of_models = [m for m in models if isinstance(m, torch.nn.Module)]
    taken = {id(part) for m in of_models for part in (*m.modules(), *m.parameters(), *m.buffers())}
    found: dict[str, torch.nn.Module] = {}
    for path, module in modules.items():
        tensors = [*module.parameters(), *module.buffers()]
        parts = (*module.modules(), *tensors)
        if tensors and not any(id(part) in taken for part in parts):
            found[path] = module
    within = {id(part) for module in found.values() for part in module.modules() if part is not module}
    return {path: module for path, module in found.items() if id(module) not in within}


# -- objects ----------------------------------------------------------------------------------------


def _is_object(thing: object) -> bool:
    return isinstance(thing, (LRScheduler, GradScaler)) or (
        type(thing).__name__ == "Accelerator" and type(thing).__module__.partition(".")[0] == "accelerate"
    )


def _is_stateful(thing: object) -> bool:
    return all(callable(getattr(type(thing), name, None)) for name in ("state_dict", "load_state_dict"))


def _has_state_of_its_own(thing: object, taken: Collection[int], storages: Collection[int]) -> bool:
    """An object of the script's own class that keeps more than plain attributes, and none of it a model's: those that
    gather the states of others (a trainer) are made of what is protected already."""
    if not _is_stateful(thing):
        return False
    attributes = attributes_of(thing).values()
    if any(id(part) in taken for part in attributes):
        return False
    if all(is_kept(part) or isinstance(part, (types.FunctionType, type)) for part in attributes):
        return False
    return not any(storage_of(tensor) in storages for tensor in _tensors_in(getattr(thing, "state_dict")()))  # noqa: B009


def _tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and depth:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part, depth - 1)


def _add_tensors(
    path: str, thing: object, storages: Collection[int], objects: dict[str, Any], unsaved: dict[str, str]
) -> None:
    """Attributes with tensors that a method changes and that are too large to be plain values of the loop."""
    carried = {n for kind in type(thing).__mro__ if is_own(kind) for n in _carried(kind)}
    for name, value in attributes_of(thing).items():
        if name not in carried or is_kept(value) or as_stateful(value) is not None:
            continue
        parts = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if not parts or not all(type(part) is torch.Tensor for part in parts):
            continue
        if any(storage_of(part) in storages for part in parts):
            continue
        size = sum(part.nbytes for part in parts)
        if size <= _LARGEST:
            objects[f"{path}.{name}"] = Tensors(thing, name)
        else:
            unsaved[f"{path}.{name}"] = f"tensors of {size:,} bytes"


def _carried(kind: type) -> Collection[str]:
    return carried_by_class_in(file_of(kind), kind.__name__).names


def _storages(things: Iterable[object]) -> frozenset[int]:
    modules = [thing for thing in things if isinstance(thing, torch.nn.Module)]
    return frozenset(storage_of(t) for module in modules for t in (*module.parameters(), *module.buffers()))
