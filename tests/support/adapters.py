"""Adapters without a framework, for tests of what the core asks of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flashrecovery.contract.adapter import InspectableAdapter, Shard, StepHooks
from flashrecovery.contract.elastic_adapter import ElasticAdapter


class AdapterStandIn(InspectableAdapter, ElasticAdapter):
    """Has no state. ``methods`` take the place of the methods of these names."""

    def __init__(self, name: str = "stand-in", **methods: Callable[..., Any]) -> None:
        self.name = name
        vars(self).update(methods)

    def watch(self, hooks: StepHooks) -> None: ...

    def shards(self) -> Sequence[Shard]:
        return ()

    def sync_spans_world(self) -> bool:
        return True

    def reset(self) -> None: ...
