"""What the core has learned about the steps of this script, and what follows for the next step. Pure.

A capsule is sealed when the forward pass ends, long before the step is over. A step that changes a rank's own state
after that (it draws random numbers, fetches data, updates a buffer) is *late*. Before the mutation, sealing once more
and waiting for all ranks makes up for it. After it (in the block or below it) nothing can: the step must be undone if a
rank dies in it, so every rank keeps its own pre-step copy in those steps in which this is to be expected.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_REMEMBERED = 3


@dataclass
class Habits:
    """Common to all ranks, as far as they have heard of each other.

    Attributes:
        known: a first step has shown the rest.
        undo: every step needs an own pre-step copy on every rank.
        changed: the own state changes between the forward pass and the mutation ...
        reseal: ... and that is made up for: it is sealed again there, and a barrier follows. All ranks begin with that
            in the same step.
        touched: tensors of the shards change before the mutation: the own pre-step copy is made when a step is handed
            out.
        late: the newest steps that were late after their mutation, ascending.
        own: registered objects that are not equal on all ranks.
    """

    known: bool = False
    undo: bool = False
    changed: bool = False
    reseal: bool = False
    touched: bool = False
    late: list[int] = field(default_factory=list)
    own: list[str] = field(default_factory=list)

    def expects_late(self, step: int) -> bool:
        """Whether ``step`` will probably be late after its mutation. Scripts evaluate in every n-th step; as long as
        there has been one such step only, any other may be."""
        if not self.late:
            return False
        if len(self.late) == 1:
            return True
        return (step - self.late[-1]) % (self.late[-1] - self.late[-2]) == 0

    def needs_undo(self, step: int) -> bool:
        """Whether an own copy of the state before ``step`` must be kept in it. The first step shows what is needed."""
        return self.undo or self.touched or not self.known or self._unsealed or self.expects_late(step)

    def seals_early(self, step: int) -> bool:
        """Whether what is sealed before the mutation of ``step`` counts, unless a peer says that the step was late."""
        return self.known and not self._unsealed and not self.expects_late(step)

    @property
    def _unsealed(self) -> bool:
        return self.changed and not self.reseal

    def was_late(self, step: int) -> bool:
        """``step`` was late after its mutation. Returns whether that is news: it was not to be expected."""
        if step in self.late:
            return False
        news = not self.expects_late(step) or len(self.late) < 2
        if len(self.late) >= 2 and not self.expects_late(step):
            self.undo = True  # there is no period in it
        self.late = sorted([*self.late, step])[-_REMEMBERED:]
        return news

    def restore(self, version: Habits) -> None:
        """Go back to what all ranks had agreed upon at a version; what this one has learned for itself is not lost."""
        self.known |= version.known
        self.undo |= version.undo
        self.changed |= version.changed
        self.touched |= version.touched
        self.reseal = version.reseal
        self.late = sorted({*self.late, *version.late})[-_REMEMBERED:]
        self.own = list(version.own)
