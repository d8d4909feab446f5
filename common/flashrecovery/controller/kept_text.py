"""Where the state is that the ranks of another layout begin with, in words that agents keep for the next controller.

A controller may be lost while the ranks of a new layout are on their way. The state is in the nodes' memory then; which
ranks have written which shards, on which nodes, and what the job was that has to be made again, only it knew. So it
tells the agents before it has the ranks started.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from flashrecovery.controller.writers import Kept
from flashrecovery.errors import ProtocolError
from flashrecovery.parallel_layout import layout_sizes
from flashrecovery.plan.replan import LayoutFacts, StayingFacts
from flashrecovery.plan.strategy import Strategy
from flashrecovery.proto import flashrecovery_pb2 as pb

_FORMAT = 1


@dataclass(frozen=True)
class KeptWords:
    """``attempt``: of the processes that are started with it. ``before``: the layout that the job had, as text."""

    kept: Kept
    staying: StayingFacts
    before: str
    attempt: int

    @property
    def layout_before(self) -> Strategy:
        """With as many replicas as were left of it: perhaps not one in which a job can begin."""
        return Strategy(**layout_sizes(self.before), micro_batch=self.staying.facts.micro_batch)

    def text(self) -> str:
        kept = self.kept
        return json.dumps(
            {
                "format": _FORMAT,
                "version": kept.version,
                "directory": kept.place.directory,
                "ranks": list(kept.place.ranks),
                "checkpoint": kept.checkpoint,
                "written": kept.written,
                "writers": {shard: list(ranks) for shard, ranks in kept.writers.items()},
                "homes": {str(rank): list(home) for rank, home in kept.homes.items()},
                "facts": self.staying.facts.text(),
                "batches": self.staying.batches,
                "steps": self.staying.steps,
                "before": self.before,
                "attempt": self.attempt,
            }
        )

    @staticmethod
    def parse(text: str) -> KeptWords:
        """Raises ProtocolError if it is not what :meth:`text` gives."""
        try:
            said = json.loads(text)
            if said["format"] != _FORMAT:
                raise ProtocolError(f"where state is kept for another layout, in format {said['format']}")
            place = pb.StashPlace(directory=said["directory"], ranks=said["ranks"])
            kept = Kept(
                said["version"],
                place,
                said["checkpoint"],
                said["written"],
                {shard: tuple(ranks) for shard, ranks in said["writers"].items()},
                {int(rank): (home[0], home[1]) for rank, home in said["homes"].items()},
            )
            staying = StayingFacts(LayoutFacts.parse(said["facts"]), said["batches"], said["steps"])
            words = KeptWords(kept, staying, said["before"], said["attempt"])
            _ = words.layout_before  # it is one
            return words
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise ProtocolError(
                f"where state is kept for another layout cannot be read: {type(e).__name__}: {e}"
            ) from e
