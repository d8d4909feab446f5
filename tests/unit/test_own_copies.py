"""An own pre-step copy is made beside the step, of what the version was when it was yielded."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import torch

from flashrecovery.plan import Kind
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec
from flashrecovery.worker.replication.copies import Copies


class Weights(Shard):
    name = "w"
    holders = (0,)

    def __init__(self) -> None:
        self.w = torch.zeros(4)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"w": self.w}

    def values(self) -> dict[str, Any]:
        return {}

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        return self.tensors()


def _copies(weights: Weights) -> Copies:
    registry, settings = MagicMock(), MagicMock()
    registry.world_size, registry.rank, registry.adapters = 1, 0, []
    settings.elastic = None
    registry.unique_shards.return_value, registry.tensor_shards.return_value = [weights], [weights]
    settings.redundancy, settings.pre_step_copy, settings.checkpoint.dir = "none", "always", None
    settings.timeouts.drain_s = 10.0
    return Copies(registry, settings, *[MagicMock()] * 5)


def test_it_is_begun_at_the_hand_out_and_not_when_the_mutation_is_about_to_begin() -> None:
    weights = Weights()
    copies = _copies(weights)
    weights.w.fill_(5)
    copies.start(5)
    copies.stop()  # returns when none is under way
    weights.w.fill_(-1)  # what shows when the copy was made
    copies.before_mutation(5)
    (source,) = copies.source(Kind.UNDO, "w", 5).tensors
    assert source.tolist() == [5.0] * 4
    copies.close()


def test_where_none_was_begun_it_is_made_before_the_mutation() -> None:
    """The first step in which a copy is kept."""
    weights = Weights()
    copies = _copies(weights)
    weights.w.fill_(5)
    copies.before_mutation(5)
    weights.w.fill_(-1)
    (source,) = copies.source(Kind.UNDO, "w", 5).tensors
    assert source.tolist() == [5.0] * 4
    copies.close()
