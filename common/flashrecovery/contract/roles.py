"""What the adapters of a job can do. The only place in which the core asks which class of the contract an adapter is.

An adapter's number is its place in the order of registration. It is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from flashrecovery.contract.adapter import Adapter, InspectableAdapter
from flashrecovery.contract.elastic_adapter import ElasticAdapter
from flashrecovery.contract.loop_adapter import LoopAdapter
from flashrecovery.contract.relayout_adapter import RelayoutAdapter
from flashrecovery.contract.shard_layout import ShardLayout

if TYPE_CHECKING:
    from flashrecovery.contract.logical_state import LogicalState


def inspectable(adapters: Sequence[Adapter]) -> dict[int, InspectableAdapter]:
    """Those that let the core look into their framework, by number."""
    return {number: one for number, one in enumerate(adapters) if isinstance(one, InspectableAdapter)}


def touch_mark(adapter: Adapter) -> Any:
    """See :meth:`InspectableAdapter.touch_mark`; None of others: touches cannot be seen."""
    return adapter.touch_mark() if isinstance(adapter, InspectableAdapter) else None


def elastic(adapters: Sequence[Adapter]) -> list[ElasticAdapter]:
    """Those whose job may be resized."""
    return [one for one in adapters if isinstance(one, ElasticAdapter)]


def tied_to_size(adapters: Iterable[Adapter]) -> list[str]:
    """What of them keeps the job from being resized, by name."""
    tied: list[str] = []
    for one in adapters:
        tied += one.tied_to_size() if isinstance(one, ElasticAdapter) else [f"{one.name}, which is no ElasticAdapter"]
    return tied


def shard_layouts(adapters: Sequence[Adapter]) -> dict[int, ShardLayout]:
    """How their state is sharded among the ranks, by number; without those whose state is on all ranks.

    Raises UnsupportedError, by name, where it is sharded in a way that cannot be changed."""
    asked = ((n, one.shard_layout()) for n, one in enumerate(adapters) if isinstance(one, ElasticAdapter))
    return {number: shard_layout for number, shard_layout in asked if shard_layout is not None}


def in_any_layout(adapter: Adapter) -> bool:
    """See :meth:`RelayoutAdapter.in_any_layout`."""
    return isinstance(adapter, RelayoutAdapter) and adapter.in_any_layout()


def logical(adapter: Adapter) -> LogicalState | None:
    """See :meth:`RelayoutAdapter.logical`."""
    return adapter.logical() if isinstance(adapter, RelayoutAdapter) else None


def make_any_call_again(adapters: Iterable[Adapter]) -> bool:
    """Whether the steps are calls of a framework that can be made again from a fallback checkpoint on."""
    return any(isinstance(one, LoopAdapter) and one.makes_any_call_again() for one in adapters)
