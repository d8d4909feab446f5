"""What the core has learned about the steps of this script, and what follows for the next step. Pure.

Rank-local state is sealed when the forward pass ends, long before the step is over. A step that changes a rank's own
state after that (it draws random numbers, fetches data, updates a buffer) is *late*. Before the mutation, sealing once
more and waiting for all ranks makes up for it. After it (in the block or below it) nothing can: the step must be undone
if a rank dies in it, so every rank keeps its own pre-step copy from then on: it is not known which step will be the
next late one, and a wrong guess would lose the job.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

IN_ALL_STEPS, UNTIL_RESEALED, TOUCHED = -1, -2, -3
"""Why peers are to keep own pre-step copies, if not because a certain step was late."""


@dataclass
class StepProfile:
    """Common to all ranks, as far as they have heard of each other.

    Attributes:
        known: a first step has shown the rest.
        undo: every step needs an own pre-step copy on every rank.
        changed: the own state changes between the forward pass and the mutation ...
        reseal: ... and that is made up for: it is sealed again there, and a barrier follows. All ranks begin with that
            in the same step.
        touched: tensors of the shards change before the mutation: the own pre-step copy is made when a step is handed
            out.
        late: a step was late after its mutation.
        own: registered objects that are not equal on all ranks.
        own_settings: the same of settings of a model (hyper-parameters, ...), as :meth:`.Registry.settings` names them.
        own_shards: shards that were said to be equal on several ranks and are not, by the names that they had.
        silent: rank-only state that changes in a way that is not seen without a close look, by name.
    """

    known: bool = False
    undo: bool = False
    changed: bool = False
    reseal: bool = False
    touched: bool = False
    late: bool = False
    own: list[str] = field(default_factory=list)
    own_settings: list[str] = field(default_factory=list)
    own_shards: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)

    @property
    def needs_undo(self) -> bool:
        """Whether an own copy of the state before a step must be kept in it. The first step shows what is needed."""
        return self.undo or self.late or self.touched or not self.known or self._unsealed

    @property
    def seals_early(self) -> bool:
        """Whether what is sealed before the mutation of a step counts, unless a peer says that the step was late."""
        return self.known and not self.late and not self._unsealed

    @property
    def _unsealed(self) -> bool:
        return self.changed and not self.reseal

    def learn(self, step: int, *, quiet: bool, late: bool, changed: bool) -> list[int]:
        """What ``step`` has shown on this rank.

        Args:
            quiet: nothing was communicated after the mutation had begun.
            late: this rank's own state has changed after that.
            changed: it has changed between the forward pass and the mutation. Until all ranks seal again there, such
                steps are late, too.

        Returns:
            What is new, for the peers to :meth:`hear`.
        """
        self.known = True
        news = []
        if not quiet and not self.undo:
            self.undo = True
            news.append(IN_ALL_STEPS)
        if changed and not self.reseal and not self.changed:
            self.changed = True
            news.append(UNTIL_RESEALED)
        if late and not self.late:
            self.late = True
            news.append(step)
        return news

    def hear(self, reason: int) -> None:
        """Take in what a peer has learned: the step that was late there, or one of the reasons above."""
        if reason == IN_ALL_STEPS:
            self.undo = True
        elif reason == UNTIL_RESEALED:
            self.changed = True
        elif reason == TOUCHED:
            self.touched = True
        else:
            self.late = True

    def agree(self, *, undo: bool, reseal: bool, late: bool, own: Collection[str]) -> None:
        """All ranks have told each other; what one has learned for itself since is not lost. ``own``: objects that have
        turned out not to be equal."""
        self.undo |= undo
        self.reseal = reseal
        self.changed |= reseal
        self.late |= late
        self.add_own(own)

    def add_own(self, names: Collection[str]) -> None:
        """These objects are each rank's own."""
        self.own = sorted({*self.own, *names})

    def begin_with_own_settings(self, names: list[str]) -> None:
        """Which are each rank's own when the first step begins."""
        self.own_settings = names

    def add_own_settings(self, names: Collection[str]) -> None:
        """These have turned out to be each rank's own."""
        self.own_settings = sorted({*self.own_settings, *names})

    def add_own_shards(self, names: Collection[str]) -> None:
        """These have turned out to be each rank's own."""
        self.own_shards = sorted({*self.own_shards, *names})

    def add_silent(self, names: Collection[str]) -> None:
        """These change in a way that is not seen without a close look."""
        self.silent = sorted({*self.silent, *names})

    def restore(self, version: StepProfile) -> None:
        """Go back to what all ranks had agreed upon at a version; what this one has learned for itself is not lost."""
        self.known |= version.known
        self.undo |= version.undo
        self.changed |= version.changed
        self.touched |= version.touched
        self.reseal = version.reseal
        self.late |= version.late
        self.own = list(version.own)
        self.own_settings = list(version.own_settings)
        self.own_shards = sorted({*self.own_shards, *version.own_shards})
        self.silent = sorted({*self.silent, *version.silent})
