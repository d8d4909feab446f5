"""What the processes of another layout begin with, as agents keep it for the next controller. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from flashrecovery.controller.state.saved_state import SavedState
from flashrecovery.errors import ProtocolError
from flashrecovery.plan.strategy.relayout import LayoutFacts, StayingFacts
from flashrecovery.plan.strategy.strategy import Strategy
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.parallel_layout import layout_sizes

_FORMAT = 1


@dataclass(frozen=True)
class StagedLayout:
    """What the processes of another layout begin with. Agents keep it as text, for the next controller.

    Attributes:
        kept: the state that they read.
        staying: what the job was before its layout changed, and has to stay.
        before: the layout that the job had, as text.
        attempt: the number of the start with it.
    """

    kept: SavedState
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
    def parse(text: str) -> StagedLayout:
        """Raises ProtocolError if it is not what :meth:`text` gives."""
        try:
            said = json.loads(text)
            if said["format"] != _FORMAT:
                raise ProtocolError(f"where state is kept for another layout, in format {said['format']}")
            place = pb.StagingPlace(directory=said["directory"], ranks=said["ranks"])
            kept = SavedState(
                said["version"],
                place,
                said["checkpoint"],
                said["written"],
                {shard: tuple(ranks) for shard, ranks in said["writers"].items()},
                {int(rank): (home[0], home[1]) for rank, home in said["homes"].items()},
            )
            staying = StayingFacts(LayoutFacts.parse(said["facts"]), said["batches"], said["steps"])
            words = StagedLayout(kept, staying, said["before"], said["attempt"])
            _ = words.layout_before  # it is one
            return words
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise ProtocolError(
                f"where state is kept for another layout cannot be read: {type(e).__name__}: {e}"
            ) from e
