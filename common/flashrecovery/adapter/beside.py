"""State that an optimizer keeps outside ``optimizer.state`` and its groups: in its own attributes.

fp32 copies of the weights (apex's FusedAdam), counters, norms of the step before, slow weights, an optimizer within the
optimizer. No optimizer declares it; its attributes are read, through lists, dicts and objects, and written back as they
were. Little of it travels with the hyper-parameters. Where there are tensors when the optimizer is registered, or an
optimizer of its own within, it is a shard. What cannot be read and goes on by itself (an iterator, a file) is named.
"""

from __future__ import annotations

import ast
import collections
import contextvars
import enum
import io
import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flashrecovery.adapter.parts import TensorParts, is_composite, part_key, put_together
from flashrecovery.contract.adapter import Shard, ShardSpec
from flashrecovery.errors import RestoreError, UnsupportedError
from flashrecovery.state.exact import exact_clone, exact_copy
from flashrecovery.worker.local_state.generators import as_stateful
from flashrecovery.worker.script_text.extents import is_array
from flashrecovery.worker.script_text.function_parts import function_parts, with_parts
from flashrecovery.worker.script_text.plain_values import SMALL, copy_of, is_kept, put
from flashrecovery.worker.script_text.script_frames import is_own

SMALL_BYTES = 64 << 10
"""Up to so much travels with the hyper-parameters, which are written down in every step."""

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LISTS = (list, tuple, collections.deque)
_SETS = (set, frozenset)
_GOES_ON = (Iterator, io.IOBase, memoryview, contextvars.ContextVar, types.CellType, dict, set)
"""What may be asked for more, or be written to. If it cannot be read, it is named."""
_KEYS = ("value", "parameter", "id")
_DEEPEST = 8
_LEAST_ID = 1 << 16
"""An ``id()`` is an address; below this one there is nothing."""
_LEFT = ["left"]
"""What is not read (functions, modules, groups) stays as it is."""

Node = list[Any]
"""A kind and what belongs to it, in plain values; tensors by key."""


def keeps_beside(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` may keep something in its attributes: torch's own do not."""
    return not type(optimizer).__module__.startswith("torch.optim")


class OptimizerAttributes:
    """The attributes of one optimizer.

    Args:
        own: the registered optimizers, which are protected themselves.
        parameters: gives what the optimizer steps on, where its groups do not say it at any time.
        outside: gives tensors that a framework protects, which are left as they are.
        where_instead: what to do with tensors that are too large, for a message.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        own: Sequence[Optimizer],
        parameters: Callable[[], Sequence[torch.Tensor]] | None = None,
        outside: Callable[[], Iterable[torch.Tensor]] = tuple,
        where_instead: str = "make them with the optimizer, or keep them in optimizer.state",
    ) -> None:
        self.optimizer = optimizer
        self._given, self._outside, self._where_instead = parameters, outside, where_instead
        self.nested: list[Optimizer] = []
        """Optimizers found within it."""
        self._kind = type(optimizer).__name__
        self._own = {id(o) for o in own}
        self._base = frozenset(vars(Optimizer([nn.Parameter(torch.empty(0))], {})))

    # -- reading ----------------------------------------------------------------------------------

    def read(self) -> tuple[Node, dict[str, torch.Tensor]]:
        """The attributes as plain values, and the live tensors among them by key, without those of the model and of
        ``optimizer.state``. Raises UnsupportedError for tensors that cannot be kept."""
        node, reader = self._read()
        self.nested = [o for o in reader.optimizers if id(o) not in self._own]
        return node, reader.tensors

    def not_read(self, known: Collection[int]) -> dict[str, str]:
        """What may change and cannot be read: where it is -> its class. ``known``: identities of the tensors that are
        protected."""
        _, reader = self._read()
        return {
            f"{self._kind}.{path}": type(thing).__name__
            for path, thing in reader.left.items()
            if not (isinstance(thing, nn.Module) and all(id(t) in known for t in _tensors_of(thing)))
        }

    def _read(self) -> tuple[Node, _Reader]:
        reader = _Reader(self._kind, _Elsewhere(self.optimizer, self._own, self._parameters, self._outside), self._base)
        attributes = {k: v for k, v in vars(self.optimizer).items() if k not in self._base}
        return reader.attributes(attributes, "", 0), reader

    def _parameters(self) -> list[torch.Tensor]:
        if self._given is not None:
            return list(self._given())
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def needs_a_shard(self) -> bool:
        """Whether there is too much to be written down in every step, or will be."""
        node, tensors = self.read()
        return bool(self.nested) or sum(t.nbytes for t in tensors.values()) > SMALL_BYTES or _holds_composite(node)

    # -- writing ----------------------------------------------------------------------------------

    def shape(self, node: Node) -> dict[str, torch.Tensor]:
        """Give the attributes this structure and these plain values; returns the live tensors, whose content the
        caller overwrites. Raises RestoreError if an object is not there whose attributes are to be set."""
        writer = _Writer(self._kind, self._parameters(), self.optimizer)
        mine, _ = self.read()
        for name in mine[1].keys() - node[1].keys():
            if mine[1][name] != _LEFT:
                delattr(self.optimizer, name)
        writer.attributes(node, vars(self.optimizer), "")
        return self.read()[1]

    def capture(self) -> list[Any]:
        """As plain values with copies of the tensors, for what is little."""
        node, tensors = self.read()
        nbytes = sum(t.nbytes for t in tensors.values())
        if nbytes > SMALL_BYTES:
            raise UnsupportedError(
                f"{self._kind} keeps {nbytes:,} bytes of tensors in its attributes ({', '.join([*tensors][:3])}), more "
                f"than the {SMALL_BYTES:,} that can be kept if they were not there when it was registered: "
                f"{self._where_instead}"
            )
        return [node, {key: exact_clone(tensor) for key, tensor in tensors.items()}]

    def restore(self, captured: Sequence[Any]) -> None:
        """See :meth:`shape`."""
        node, content = captured
        for key, tensor in self.shape(node).items():
            exact_copy(tensor, content[key].to(tensor.device))


class AttributesShard(Shard):
    """Attributes of an optimizer with tensors among them. ``holders``: global ranks that have the same."""

    def __init__(self, name: str, holders: tuple[int, ...], beside: OptimizerAttributes) -> None:
        self.name, self.holders = name, holders
        self._beside = beside
        self._seen: dict[str, torch.Tensor] = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.tensors_and_values()[0]

    def values(self) -> dict[str, Any]:
        return self.tensors_and_values()[1]

    def tensors_and_values(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        node, tensors = self._beside.read()
        # Return the same objects while nothing has changed: a caller that copies them copies only what is new.
        same = tensors.keys() == self._seen.keys() and all(
            tensors[key].data_ptr() == seen.data_ptr()
            and tensors[key].shape == seen.shape
            and tensors[key].dtype == seen.dtype
            and tensors[key].stride() == seen.stride()
            for key, seen in self._seen.items()
        )
        if not same:
            self._seen = tensors
        return self._seen, {"attributes": node}

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        """Raises RestoreError."""
        live = self._beside.shape(spec.values["attributes"])
        if live.keys() != spec.tensors.keys():
            raise RestoreError(f"{self.name}: this rank has {sorted(live)}, the source has {sorted(spec.tensors)}")
        return live


class _Elsewhere:
    """What is kept elsewhere: parameters, their gradients, what is in ``optimizer.state``, the optimizers ``own``, and
    the tensors ``outside``. It is asked in every step, so that of thousands of parameters only what is needed is looked
    at."""

    def __init__(
        self,
        optimizer: Optimizer,
        own: set[int],
        parameters: Callable[[], list[torch.Tensor]],
        outside: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self._optimizer, self._stepped_on, self._outside = optimizer, parameters, outside
        groups = optimizer.param_groups
        self._left = {*own, id(optimizer.state), id(groups), *map(id, groups)}

    def node(self, value: object) -> Node | None:
        """What stands for ``value``; None: it is kept nowhere else."""
        if id(value) in self._left:
            return _LEFT
        if not isinstance(value, torch.Tensor):
            return None
        place = self.places.get(id(value))
        if place is not None:
            return ["parameter", place]
        if id(value) in self._states:
            return self._of_state(value)
        return _LEFT if id(value) in self._others else None

    @cached_property
    def parameters(self) -> list[torch.Tensor]:
        return self._stepped_on()

    @cached_property
    def places(self) -> dict[int, int]:
        """The number of each parameter, by ``id()``."""
        return {id(parameter): place for place, parameter in enumerate(self.parameters)}

    @cached_property
    def _states(self) -> set[int]:
        return {
            id(value) for state in self._optimizer.state.values() if isinstance(state, dict) for value in state.values()
        }

    @cached_property
    def _others(self) -> set[int]:
        return ({id(parameter.grad) for parameter in self.parameters} - {id(None)}) | {*map(id, self._outside())}

    def _of_state(self, tensor: torch.Tensor) -> Node | None:
        for place, parameter in enumerate(self.parameters):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if value is tensor:
                    return ["state", place, key]
        return None


class _Reader:
    def __init__(self, kind: str, elsewhere: _Elsewhere, base: frozenset[str]) -> None:
        self._kind, self._elsewhere, self._base = kind, elsewhere, base
        self._above: set[int] = set()
        self._in_functions = 0
        self.tensors: dict[str, torch.Tensor] = {}
        self.optimizers: list[Optimizer] = []
        self.left: dict[str, Any] = {}

    def attributes(self, found: Mapping[str, Any], path: str, depth: int) -> Node:
        return ["object", {name: self.node(value, f"{path}{name}", depth + 1) for name, value in found.items()}]

    def node(self, value: Any, path: str, depth: int) -> Node:
        if type(value) in _SCALARS:
            # some name parameters by id(), which is another one in another process
            by_id = type(value) is int and value > _LEAST_ID and value in self._elsewhere.places
            return ["id", self._elsewhere.places[value]] if by_id else ["value", value]
        known = self._elsewhere.node(value)
        if known is not None:
            return known
        if isinstance(value, torch.Tensor):
            read = not self._in_functions or is_kept(value)
            return self._tensor(value, path) if read else _LEFT
        if depth > _DEEPEST or id(value) in self._above:
            return _LEFT
        self._above.add(id(value))
        try:
            return self._container(value, path, depth)
        finally:
            self._above.discard(id(value))

    def _container(self, value: Any, path: str, depth: int) -> Node:
        if self._in_functions and not _is_of_a_function(value):
            return _LEFT
        if type(value) in _LISTS:
            more = [value.maxlen] if isinstance(value, collections.deque) else []
            items = [self.node(item, f"{path}/{number}", depth + 1) for number, item in enumerate(value)]
            return [type(value).__name__, items, *more]
        if type(value) in _SETS:
            items = [self.node(item, f"{path}/{number}", depth + 1) for number, item in enumerate(value)]
            if all(item[0] in _KEYS for item in items):
                return [type(value).__name__, sorted(items, key=repr)]
            return self._plain(value, path)
        if isinstance(value, dict):
            keys = [self.node(key, f"{path}/key{number}", depth + 1) for number, key in enumerate(value)]
            if any(key[0] not in _KEYS for key in keys):
                return self._plain(value, path)
            parts = [self.node(one, f"{path}/{number}", depth + 1) for number, one in enumerate(value.values())]
            return ["dict", [[key, part] for key, part in zip(keys, parts, strict=True)]]
        stateful = as_stateful(value)
        if stateful is not None:
            return ["stateful", stateful.state_dict()]
        held = function_parts(value)
        if held is not None:
            return self._function(held, path, depth)
        found = vars(value) if hasattr(value, "__dict__") else {}
        if isinstance(value, Optimizer):
            self.optimizers.append(value)
            found = {k: v for k, v in found.items() if k in ("state", "param_groups") or k not in self._base}
        elif not _is_read(value):
            return self._plain(value, path)
        return self.attributes(found, f"{path}.", depth)

    def _function(self, parts: Mapping[str, Any], path: str, depth: int) -> Node:
        self._in_functions += 1
        try:
            nodes = {name: self.node(part, f"{path}.{name}", depth + 1) for name, part in parts.items()}
        finally:
            self._in_functions -= 1
        return ["function", nodes] if any(node != _LEFT for node in nodes.values()) else _LEFT

    def _plain(self, value: Any, path: str) -> Node:
        """A value of one of many small kinds: an array, an enum, a named tuple, an object with slots."""
        if isinstance(value, type):
            return _LEFT
        if isinstance(value, nn.Module):
            self.left[path] = value
            return _LEFT
        if type(value) is itertools.count:
            numbers = _numbers_of(value)
            if numbers is not None:
                return ["count", *numbers]
        elif not callable(value) and is_kept(value, largest=SMALL_BYTES):
            return ["plain", copy_of(value)]
        of_numpy = is_array(value) or type(value).__module__.startswith("numpy.random")
        if (isinstance(value, _GOES_ON) or of_numpy or is_own(type(value))) and not _is_over(value):
            self.left[path] = value
        return _LEFT

    def _tensor(self, tensor: torch.Tensor, path: str) -> Node:
        where = tensor.device.type
        if tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"{self._kind}.{path} is a tensor of layout {tensor.layout}, which cannot be kept: make it a dense "
                "one, or keep its indices and values"
            )
        if isinstance(tensor, DTensor) or is_composite(tensor):
            parts = TensorParts.of(tensor, f"{self._kind}.{path}", _template(self._elsewhere.parameters))
            self.tensors |= {part_key(path, at): part for at, part in parts.tensors.items()}
            kinds = {at: [tuple(t.shape), t.dtype] for at, t in parts.tensors.items()}
            return ["composite", path, parts.form, kinds, where]
        self.tensors[path] = tensor.detach()
        return ["tensor", path, tuple(tensor.shape), tensor.dtype, where]


def _holds_composite(node: Any) -> bool:
    if isinstance(node, dict):
        return any(map(_holds_composite, node.values()))
    return isinstance(node, list) and (node[:1] == ["composite"] or any(map(_holds_composite, node)))


def _template(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The one on whose mesh DTensors are taken to lie."""
    return next((p for p in parameters if isinstance(p, DTensor)), parameters[0])


def _is_read(value: object) -> bool:
    """An object of a user-defined class, without C++ behind it, whose attributes are all that it has."""
    kind = type(value)
    plain = hasattr(value, "__dict__") and all(not str(one.__module__).startswith("torch") for one in kind.__mro__)
    if not plain or isinstance(value, (nn.Module, types.ModuleType, type, enum.Enum, io.IOBase, *_LISTS, *_SETS)):
        return False
    return not callable(value) or is_own(kind)


def _is_of_a_function(value: object) -> bool:
    """Not what a function only uses: data, the script's trainer with all that it has."""
    if isinstance(value, (*_LISTS, *_SETS, dict)):
        return len(value) <= SMALL
    if isinstance(value, (nn.Module, Optimizer)):
        return False
    return not _is_read(value) or is_kept(vars(value), with_generators=True)


def _numbers_of(count: itertools.count[Any]) -> tuple[Any, Any] | None:
    """The next one and the step, if they are plain."""
    try:
        found = ast.literal_eval(repr(count).removeprefix("count(").removesuffix(")"))
    except (ValueError, SyntaxError):
        return None
    return found if isinstance(found, tuple) else (found, 1)


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _is_over(value: object) -> bool:
    """Whether an iterator gives nothing more: ``filter(..., parameters)`` that has been read through."""
    if isinstance(value, types.GeneratorType):
        return value.gi_frame is None
    if type(value) in (map, filter, zip, enumerate):
        return any(_is_over(one) for one in value.__reduce__()[1] if isinstance(one, Iterator))
    return type(value).__module__ == "builtins" and operator.length_hint(value, 1) == 0


class _Writer:
    def __init__(self, kind: str, parameters: Sequence[torch.Tensor], optimizer: Optimizer) -> None:
        self._kind, self._parameters, self._optimizer = kind, parameters, optimizer
        self._template = _template(parameters)

    def attributes(self, node: Node, live: dict[str, Any], path: str) -> None:
        for name, part in node[1].items():
            if part != _LEFT:
                live[name] = self._made(part, live.get(name), f"{path}{name}")

    def _made(self, node: Node, live: Any, path: str) -> Any:
        kind, *rest = node
        if kind == "value":
            return rest[0]
        if kind in ("parameter", "id"):
            parameter = self._parameters[rest[0]]
            return parameter if kind == "parameter" else id(parameter)
        if kind == "state":
            return self._optimizer.state[self._parameters[rest[0]]].get(rest[1], live)
        if kind == "left":
            return live
        if kind in ("tensor", "composite"):
            return self._tensor(kind, rest, live)
        if kind == "dict":
            return self._dict(rest[0], live, path)
        if kind in ("list", "tuple", "deque"):
            return self._list(kind, rest, live, path)
        if kind in ("set", "frozenset"):
            return self._set(kind, [self._made(item, None, path) for item in rest[0]], live)
        if kind == "plain":
            return put(live, rest[0])
        if kind == "count":
            return itertools.count(*rest)
        if live is None:
            raise RestoreError(
                f"{self._kind}.{path} is not there before the first step, in a process that has taken none"
            )
        if kind == "stateful":
            stateful = as_stateful(live)
            if stateful is None:
                raise RestoreError(f"{self._kind}.{path} is a {type(live).__name__}, and was a random generator")
            stateful.load_state_dict(rest[0])
        elif kind == "function":
            parts = function_parts(live) or {}
            made = {n: self._made(node, parts.get(n), f"{path}.{n}") for n, node in rest[0].items() if node != _LEFT}
            return with_parts(live, made)
        else:
            self.attributes(node, vars(live), f"{path}.")
        return live

    def _list(self, kind: str, rest: Sequence[Any], live: Any, path: str) -> Any:
        old = list(live) if isinstance(live, (list, tuple, collections.deque)) else []
        items = [
            self._made(item, old[number] if number < len(old) else None, f"{path}/{number}")
            for number, item in enumerate(rest[0])
        ]
        if kind == "list" and type(live) is list:
            live[:] = items
            return live
        return collections.deque(items, rest[1]) if kind == "deque" else tuple(items) if kind == "tuple" else items

    @staticmethod
    def _set(kind: str, items: list[Any], live: Any) -> Any:
        if kind == "frozenset" or type(live) is not set:
            return frozenset(items) if kind == "frozenset" else set(items)
        live.clear()
        live.update(items)
        return live

    def _dict(self, entries: Sequence[Sequence[Node]], live: Any, path: str) -> Any:
        old = live if isinstance(live, dict) else {}
        new = {}
        for number, (key, value) in enumerate(entries):
            found = self._made(key, None, path)
            if value == _LEFT and found not in old:
                continue
            new[found] = self._made(value, old.get(found), f"{path}/{number}")
        if not isinstance(live, dict):
            return new
        live.clear()
        live.update(new)
        return live

    def _tensor(self, kind: str, rest: Sequence[Any], live: Any) -> torch.Tensor:
        if kind == "tensor":
            _, shape, dtype, where = rest
            plain = isinstance(live, torch.Tensor) and not isinstance(live, DTensor) and not is_composite(live)
            if plain and (tuple(live.shape), live.dtype) == (tuple(shape), dtype):
                found: torch.Tensor = live
                return found
            return torch.zeros(shape, dtype=dtype, device=self._device(where))
        _, form, kinds, where = rest
        if isinstance(live, torch.Tensor) and (isinstance(live, DTensor) or is_composite(live)):
            parts = TensorParts.of(live, self._kind, self._template)
            if parts.form == form and {at: [tuple(t.shape), t.dtype] for at, t in parts.tensors.items()} == kinds:
                return live
        made = {at: torch.zeros(shape, dtype=dtype, device=self._device(where)) for at, (shape, dtype) in kinds.items()}
        return put_together(form, made, self._template)

    def _device(self, where: str) -> torch.device:
        mine = self._template.device
        return mine if where == mine.type else torch.device("cpu")
