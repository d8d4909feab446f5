"""One shard per parameter: the parameter's local piece together with the optimizer state that belongs to it; and shards
of one tensor without any."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flashrecovery.adapter.optimizer_state import HOST, layout_of, new_state_tensor, plain, state_layout_of
from flashrecovery.adapter.parts import SEPARATOR, Form, TensorParts, is_plainly_placed, part_key, put_together
from flashrecovery.adapter.placement import MemoryLayout, addresses, local_tensor
from flashrecovery.adapter.state_order import StateOrder
from flashrecovery.contract.adapter import Shard, ShardSpec, TensorSpec
from flashrecovery.errors import RestoreError
from flashrecovery.state.shard import Structure
from flashrecovery.worker.local_state.version_counters import AttributeOf, Constant

PARAM = "param"
_DICTIONARIES = (dict, collections.defaultdict, collections.OrderedDict)


@dataclass(frozen=True)
class ParamRecord:
    """One parameter of the model. ``get`` returns the Parameter object that the optimizer knows."""

    fqn: str
    name: str
    holders: tuple[int, ...]
    get: Callable[[], torch.nn.Parameter]


def constant(parameter: torch.nn.Parameter) -> Callable[[], torch.nn.Parameter]:
    """``get`` of a parameter that is always the same object."""
    return Constant(parameter)


def attribute_of(owner: object, name: str) -> Callable[[], torch.nn.Parameter]:
    """``get`` of a parameter that is an attribute of a framework's object, and may become another one."""
    return AttributeOf(owner, name)


def owners_of(parameter: torch.nn.Parameter, optimizers: Sequence[Optimizer]) -> dict[int, Optimizer]:
    """The optimizers that have ``parameter`` in a group, by their place in ``optimizers``."""
    return {
        number: optimizer
        for number, optimizer in enumerate(optimizers)
        if any(parameter is p for group in optimizer.param_groups for p in group["params"])
    }


@dataclass(frozen=True)
class _Seen:
    """A parameter and its optimizer state at one look: the objects, in order, and what was made of them."""

    made_of: list[Any]
    addresses: list[MemoryLayout]
    sources: dict[str, torch.Tensor]
    composites: dict[str, TensorParts]
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]

    def holds(self, objects: list[Any]) -> bool:
        """Whether the same tensors, with the same memory, are all there is. Plain values may change unseen."""
        return (
            len(self.sources) + len(self.composites) == len(objects) == len(self.made_of)
            and all(map(operator.is_, objects, self.made_of))
            and addresses([*self.sources.values()] if self.composites else objects) == self.addresses
            and all(parts.unchanged() for parts in self.composites.values())
        )

    def locals_of(self, sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The local tensors of those ``sources`` that are still the same, in the same memory."""
        return {
            key: self.tensors[key]
            for (key, source), place in zip(self.sources.items(), self.addresses, strict=True)
            if sources.get(key) is source and addresses([source]) == [place]
        }


def _watched(tensors: list[torch.Tensor], sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """What is written to a DTensor moves its own version counter and not that of its local tensor."""
    return tensors + [source for source in sources if isinstance(source, DTensor)]


def _placed(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return tensor, tensor._local_tensor if isinstance(tensor, DTensor) else None


class FixedShard(Shard):
    """One tensor that exists from the start and keeps its shape. ``holders``: global ranks."""

    def __init__(self, name: str, holders: Sequence[int], tensor: torch.Tensor) -> None:
        self.name = name
        self.holders = tuple(sorted(holders))
        self._tensor = tensor
        self._local = local_tensor(tensor)

    def tensors(self) -> dict[str, torch.Tensor]:
        if addresses([self._tensor]) != addresses([self._local]):
            self._local = local_tensor(self._tensor)
        return {"data": self._local}

    def watched(self) -> list[torch.Tensor]:
        return _watched([*self.tensors().values()], [self._tensor])

    def structure(self) -> Structure:
        return Structure([(self, "name", self.name), (self, "_tensor", self._tensor)], (), [_placed(self._tensor)])

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        """Raises RestoreError if the source's tensor has another shape or dtype."""
        mine = self.spec().tensors
        if dict(spec.tensors) != mine:
            raise RestoreError(f"{self.name}: this rank has {mine}, the source has {dict(spec.tensors)}")
        return self.tensors()


class ParamShard(Shard):
    """A parameter and its optimizer state.

    Tensors are keyed ``param``, ``state/<key>``, and ``state<n>/<key>`` for the n-th optimizer if n > 0. Their
    layouts, state that is not a tensor, and what stands where in ``optimizer.state`` are in :meth:`values`.

    Args:
        optimizers: those that keep state of the parameter, by their number (see :func:`owners_of`).
    """

    def __init__(self, record: ParamRecord, optimizers: Mapping[int, Optimizer]) -> None:
        self.name = record.name
        self.holders = record.holders
        self._record = record
        self._seen: _Seen | None = None
        self._optimizers = [(_prefix(number), optimizer) for number, optimizer in optimizers.items()]

    @property
    def optimizers(self) -> Sequence[tuple[str, Optimizer]]:
        """Those that keep state of the parameter, each with what its keys begin with."""
        return self._optimizers

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._look().tensors)

    def watched(self) -> list[torch.Tensor]:
        seen = self._look()
        return _watched([*seen.tensors.values()], [*seen.sources.values()])

    def values(self) -> dict[str, Any]:
        return self._look().values

    def tensors_and_values(self) -> tuple[Mapping[str, torch.Tensor], dict[str, Any]]:
        seen = self._look()
        return seen.tensors, seen.values

    def structure(self) -> Structure | None:
        """None where plain values or composite tensors are among the state, or an optimizer does not keep it in a
        plain dictionary."""
        seen, get = self._look(), self._record.get
        if seen.composites or len(seen.sources) != len(seen.made_of):
            return None
        attributes: list[tuple[object, str, object]] = [(self, "name", self.name), (self, "_record", self._record)]
        if isinstance(get, AttributeOf):
            attributes.append((get.owner, get.name, seen.made_of[0]))
        elif not isinstance(get, Constant):
            return None
        states = []
        for _, optimizer in self._optimizers:
            state = optimizer.state
            entry = state.get(seen.made_of[0], {})
            if type(state) not in _DICTIONARIES or type(entry) not in _DICTIONARIES:
                return None
            attributes.append((optimizer, "state", state))
            states.append(state)
        return Structure(attributes, states, [*map(_placed, seen.sources.values())])

    def _look(self) -> _Seen:
        """Asked for in every step: what was found last is still right while it is made of the same objects."""
        parameter = self._record.get()
        states = [(prefix, optimizer.state.get(parameter, {})) for prefix, optimizer in self._optimizers]
        made_of = [parameter, *(value for _, state in states for value in state.values())]
        if not (self._seen is not None and self._seen.holds(made_of)):
            self._seen = self._find(parameter, states, made_of)
        return self._seen

    def _find(
        self, parameter: torch.nn.Parameter, states: Sequence[tuple[str, Mapping[str, Any]]], made_of: list[Any]
    ) -> _Seen:
        sources: dict[str, torch.Tensor] = {}
        composites: dict[str, TensorParts] = {}
        layout: dict[str, str] = {}
        others: dict[str, Any] = {}
        places: dict[str, int] = {}
        self._put(PARAM, parameter, f"parameter {self._record.fqn!r}", parameter, sources, composites)
        for (prefix, state), (_, optimizer) in zip(states, self._optimizers, strict=True):
            if state:
                places[prefix] = StateOrder.of(optimizer).place(parameter)
            for key, value in state.items():
                what = f"optimizer state {key!r} of {self._record.fqn!r}"
                if isinstance(value, torch.Tensor):
                    self._put(prefix + key, value, what, parameter, sources, composites)
                    layout[prefix + key] = state_layout_of(parameter, value)
                else:
                    others[prefix + key] = plain(value, what)
        order = [prefix + key for prefix, state in states for key in state] if others or composites else []
        forms = {key: found.form for key, found in composites.items()}
        parts: dict[str, Any] = {"layout": layout, "plain": others, "order": order, "places": places, "forms": forms}
        known = self._seen.locals_of(sources) if self._seen is not None else {}
        tensors = {key: known[key] if key in known else local_tensor(value) for key, value in sources.items()}
        found = addresses([*tensors.values()])
        for key, whole in composites.items():
            tensors |= {part_key(key, path): part for path, part in whole.tensors.items()}
        values = {name: part for name, part in parts.items() if part}
        return _Seen(made_of, found, sources, composites, tensors, values)

    def _put(
        self,
        key: str,
        tensor: torch.Tensor,
        what: str,
        parameter: torch.Tensor,
        sources: dict[str, torch.Tensor],
        composites: dict[str, TensorParts],
    ) -> None:
        """Into ``composites``, if it has to be taken apart."""
        if is_plainly_placed(tensor, parameter):
            sources[key] = tensor
            return
        known = self._seen.composites.get(key) if self._seen is not None else None
        same = known is not None and known.whole is tensor and known.unchanged()
        composites[key] = known if known is not None and same else TensorParts.of(tensor, what, parameter)

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        """See :meth:`Shard.allocate`.

        Raises:
            RestoreError: the parameter itself has another shape or dtype, or state belongs to no optimizer here.
        """
        parameter = self._record.get()
        self._check_parameter(spec)
        ordered: list[str] = spec.values.get("order", []) or [k for k in spec.tensors if not _is_of(PARAM, k)]
        left = set(ordered)
        for prefix, optimizer in self._optimizers:
            keys = [k for k in ordered if k.startswith(prefix)]
            left.difference_update(keys)
            self._shape_state(optimizer, parameter, prefix, keys, spec)
            if keys:
                StateOrder.of(optimizer).put(parameter, spec.values["places"][prefix])
        if left:
            raise RestoreError(f"{self.name}: no registered optimizer of this rank keeps {sorted(left)}")
        return self.tensors()

    def _check_parameter(self, spec: ShardSpec) -> None:
        """What the script has built here is what the source has: class, shapes and dtypes."""
        mine = self.spec()
        ours, theirs = ({k: t for k, t in s.tensors.items() if _is_of(PARAM, k)} for s in (mine, spec))
        forms = [s.values.get("forms", {}).get(PARAM) for s in (mine, spec)]
        if ours == theirs and forms[0] == forms[1]:
            return
        shown = [_told(t, form) or "no parameter" for t, form in zip((ours, theirs), forms, strict=True)]
        raise RestoreError(f"{self.name}: this rank has {shown[0]}, the source has {shown[1]}")

    def _shape_state(
        self,
        optimizer: Optimizer,
        parameter: torch.nn.Parameter,
        prefix: str,
        keys: Sequence[str],
        spec: ShardSpec,
    ) -> None:
        layouts: dict[str, str] = spec.values.get("layout", {})
        others: dict[str, Any] = spec.values.get("plain", {})
        forms: dict[str, Form] = spec.values.get("forms", {})
        if not keys:
            optimizer.state.pop(parameter, None)
            StateOrder.of(optimizer).forget(parameter)
            return
        old = dict(optimizer.state.get(parameter, {}))
        new: dict[str, Any] = {}
        for full in keys:
            key = full[len(prefix) :]
            if full in others:
                new[key] = others[full]
            elif full in forms:
                known = self._look().composites.get(full)
                new[key] = _keep_or_put_together(known, parameter, forms[full], spec, layouts.get(full, "device"), full)
            else:
                layout = layouts.get(full, "device")
                new[key] = _keep_or_make(old.get(key), parameter, spec.tensors[full], layout, full)
        state = optimizer.state[parameter]
        state.clear()
        state.update(new)


def _is_of(key: str, full: str) -> bool:
    return full == key or full.startswith(key + SEPARATOR)


def _told(tensors: Mapping[str, TensorSpec], form: Form | None) -> str:
    kind = "" if form is None else f"{form.get('class', 'DTensor')} of "
    return kind + ", ".join(f"{t.shape} {t.dtype}" for t in tensors.values()) + (f" {form}" if form else "")


def _prefix(index: int) -> str:
    return "state/" if index == 0 else f"state{index}/"


def _keep_or_make(old: Any, parameter: torch.nn.Parameter, spec: TensorSpec, layout: str, what: str) -> torch.Tensor:
    if (
        isinstance(old, torch.Tensor)
        and is_plainly_placed(old, parameter)
        and layout_of(parameter, old, what) == layout
        and tuple(local_tensor(old).shape) == spec.shape
        and old.dtype == spec.dtype
    ):
        return old
    return new_state_tensor(parameter, spec.shape, spec.dtype, layout)


def _keep_or_put_together(
    known: TensorParts | None, parameter: torch.nn.Parameter, form: Form, spec: ShardSpec, layout: str, full: str
) -> torch.Tensor:
    wanted = {k.removeprefix(full + SEPARATOR): t for k, t in spec.tensors.items() if k.startswith(full + SEPARATOR)}
    if known is not None and known.form == form:
        found = {path: TensorSpec(tuple(t.shape), t.dtype) for path, t in known.tensors.items()}
        if found == wanted:
            return known.whole
    device = torch.device("cpu") if layout == HOST else local_tensor(parameter).device
    parts = {path: torch.zeros(t.shape, dtype=t.dtype, device=device) for path, t in wanted.items()}
    return put_together(form, parts, parameter)
