"""When a rank's own state is sealed, and what that shows of the script's steps.

*Version i is everything as it is when step i is yielded.* What only this rank has of it is written down (sealed) at
the end of the forward pass of the step before, again before its mutation if it has changed since, and at the
yield if it has changed after that. A rank that dies in between leaves what was sealed last: an *early* rank-local
state. It is right unless the step was *late*, which its peers know of theirs
(:mod:`flashrecovery.worker.local_state.step_profile`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from flashrecovery.state.version import VERSIONS_KEPT
from flashrecovery.worker.local_state.step_profile import StepProfile

Mark = TypeVar("Mark")


class LocalStates(Protocol[Mark]):
    """Where rank-local states are kept, and where a replacement finds them. A protocol, as the simulation has its
    own."""

    def drawn(self) -> Mark:
        """Equal to an earlier one if nothing of this rank's own state has changed since."""

    def write(self, version: int, drawn: Mark, *, early: bool) -> None:
        """Capture this rank's own state as that of ``version``."""

    def finish(self, version: int) -> None:
        """What was written early for ``version`` is final."""


@dataclass(frozen=True)
class Shown(Generic[Mark]):
    """What a complete step has shown of the script; see
    :meth:`flashrecovery.worker.local_state.step_profile.StepProfile.learn`. ``at_end``: this rank's own state then."""

    at_end: Mark
    late: bool
    changed: bool


class Sealing(Generic[Mark]):
    """Seals one rank's own state. Each method is called at the moment of a step after which it is named.

    Attributes:
        late: of each recent version, whether its rank-local state was another one in the end than it had been early.
    """

    def __init__(self, habits: StepProfile, local_states: LocalStates[Mark]) -> None:
        self.late: dict[int, bool] = {}
        self._habits = habits
        self._local_states = local_states
        self._written: Mark | None = None  # what has been written, in this step
        self._at_seal: Mark | None = None
        self._at_mutation: Mark | None = None

    def start(self) -> None:
        """Seal version 0: what the script has set up."""
        self._write(0, self._local_states.drawn(), early=False)

    def step_begins(self) -> None:
        self._written = self._at_seal = self._at_mutation = None

    def forward_ends(self, version: int, *, recheck: bool = False) -> None:
        """Seal early. ``version``: which the step makes. ``recheck``: no forward pass has ended since the last call."""
        now = self._local_states.drawn()
        if recheck and now == self._at_seal:
            return
        self._at_seal = now
        if self._habits.seals_early:
            self._write(version, now, early=True)

    def mutation_begins(self, version: int) -> bool:
        """Returns whether rank-local state of ``version`` is written, which counts if this rank dies in the
        mutation."""
        now = self._at_mutation = self._local_states.drawn()
        sealed = self._habits.seals_early
        if sealed and self._written != now:
            self._write(version, now, early=True)
        return sealed

    def more_belongs(self, version: int, *, sealed: bool) -> None:
        """Called between the two: more has turned out to belong to the rank-local state. ``sealed``: what
        :meth:`mutation_begins` returned."""
        unchanged = self._at_seal == self._at_mutation
        now = self._at_mutation = self._local_states.drawn()
        if unchanged:
            self._at_seal = now
        if sealed:
            self._write(version, now, early=True)

    def shown(self, version: int) -> Shown[Mark]:
        """The step that has made ``version`` is over, with all that the script has done below it."""
        now = self._local_states.drawn()
        before = self._at_mutation if self._habits.reseal else self._at_seal
        self.late = {v: late for v, late in self.late.items() if v > version - VERSIONS_KEPT}
        self.late[version] = now != before
        return Shown(now, late=now != self._at_mutation, changed=self._at_mutation != self._at_seal)

    def complete(self, version: int, shown: Shown[Mark]) -> None:
        """Called with what :meth:`shown` returned, when the common state of ``version`` has been captured: writes the
        last rank-local state."""
        if self._written == shown.at_end:
            self._local_states.finish(version)
        else:
            self._write(version, shown.at_end, early=False)

    def _write(self, version: int, drawn: Mark, *, early: bool) -> None:
        self._local_states.write(version, drawn, early=early)
        self._written = drawn
