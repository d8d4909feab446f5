"""One shard per parameter: the parameter's local piece together with the optimizer state that belongs to it; and shards
of one tensor without any."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flashrecovery.adapter.optimizer_state import layout_of, new_state_tensor, plain
from flashrecovery.adapter.placement import addresses, local_tensor
from flashrecovery.adapter.state_order import StateOrder
from flashrecovery.contract import Shard, ShardSpec, TensorSpec
from flashrecovery.errors import RestoreError

PARAM = "param"


@dataclass(frozen=True)
class ParamRecord:
    """One parameter of the model. ``get`` returns the Parameter object that the optimizer knows."""

    fqn: str
    name: str
    holders: tuple[int, ...]
    get: Callable[[], torch.nn.Parameter]


def constant(parameter: torch.nn.Parameter) -> Callable[[], torch.nn.Parameter]:
    """``get`` of a parameter that is always the same object."""
    return lambda: parameter


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
    addresses: list[int]
    sources: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]

    def holds(self, objects: list[Any]) -> bool:
        """Whether the same tensors, with the same memory, are all there is. Plain values may change unseen."""
        return (
            len(self.tensors) == len(objects) == len(self.made_of)
            and all(map(operator.is_, objects, self.made_of))
            and addresses(objects) == self.addresses
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


class FixedShard(Shard):
    """One tensor that exists from the start and keeps its shape. ``holders``: global ranks."""

    def __init__(self, name: str, holders: Sequence[int], tensor: torch.Tensor) -> None:
        self.name = name
        self.holders = tuple(sorted(holders))
        self._tensor = tensor
        self._local = local_tensor(tensor)

    def tensors(self) -> dict[str, torch.Tensor]:
        if addresses([self._tensor]) != [self._local.data_ptr()]:
            self._local = local_tensor(self._tensor)
        return {"data": self._local}

    def watched(self) -> list[torch.Tensor]:
        return _watched([*self.tensors().values()], [self._tensor])

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
        sources: dict[str, torch.Tensor] = {PARAM: parameter}
        layout: dict[str, str] = {}
        others: dict[str, Any] = {}
        places: dict[str, int] = {}
        for (prefix, state), (_, optimizer) in zip(states, self._optimizers, strict=True):
            if state:
                places[prefix] = StateOrder.of(optimizer).place(parameter)
            for key, value in state.items():
                what = f"optimizer state {key!r} of {self._record.fqn!r}"
                if isinstance(value, torch.Tensor):
                    sources[prefix + key] = value
                    layout[prefix + key] = layout_of(parameter, value, what)
                else:
                    others[prefix + key] = plain(value, what)
        order = [prefix + key for prefix, state in states for key in state] if others else []
        parts: dict[str, Any] = {"layout": layout, "plain": others, "order": order, "places": places}
        known = self._seen.locals_of(sources) if self._seen is not None else {}
        tensors = {key: known[key] if key in known else local_tensor(value) for key, value in sources.items()}
        found = [t.data_ptr() for t in tensors.values()]
        return _Seen(made_of, found, sources, tensors, {name: part for name, part in parts.items() if part})

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        """See :meth:`Shard.allocate`.

        Raises:
            RestoreError: the parameter itself has another shape or dtype, or state belongs to no optimizer here.
        """
        parameter = self._record.get()
        live = local_tensor(parameter)
        wanted = spec.tensors.get(PARAM)
        if wanted is None or wanted.shape != tuple(live.shape) or wanted.dtype != live.dtype:
            raise RestoreError(
                f"{self.name}: this rank has {tuple(live.shape)} {live.dtype}, the source has "
                + ("no parameter" if wanted is None else f"{wanted.shape} {wanted.dtype}")
            )
        layouts: dict[str, str] = spec.values.get("layout", {})
        others: dict[str, Any] = spec.values.get("plain", {})
        ordered: list[str] = spec.values.get("order", []) or [k for k in spec.tensors if k != PARAM]
        left = set(ordered)
        for prefix, optimizer in self._optimizers:
            keys = [k for k in ordered if k.startswith(prefix)]
            left.difference_update(keys)
            self._shape_state(optimizer, parameter, prefix, keys, spec.tensors, layouts, others)
            if keys:
                StateOrder.of(optimizer).put(parameter, spec.values["places"][prefix])
        if left:
            raise RestoreError(f"{self.name}: no registered optimizer of this rank keeps {sorted(left)}")
        return self.tensors()

    def _shape_state(
        self,
        optimizer: Optimizer,
        parameter: torch.nn.Parameter,
        prefix: str,
        keys: Sequence[str],
        tensors: Any,
        layouts: dict[str, str],
        others: dict[str, Any],
    ) -> None:
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
            else:
                new[key] = _keep_or_make(old.get(key), parameter, tensors[full], layouts.get(full, "device"), full)
        state = optimizer.state[parameter]
        state.clear()
        state.update(new)


def _prefix(index: int) -> str:
    return "state/" if index == 0 else f"state{index}/"


def _keep_or_make(old: Any, parameter: torch.nn.Parameter, spec: TensorSpec, layout: str, what: str) -> torch.Tensor:
    if (
        isinstance(old, torch.Tensor)
        and layout_of(parameter, old, what) == layout
        and tuple(local_tensor(old).shape) == spec.shape
        and old.dtype == spec.dtype
    ):
        return old
    return new_state_tensor(parameter, spec.shape, spec.dtype, layout)
