"""What a training process has before its script runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flashrecovery.runtime.channel import Channel
from flashrecovery.runtime.page import Page
from flashrecovery.worker.local_state.fast_forward import Ahead
from flashrecovery.worker.preimport.environment_watch import EnvironmentWatch
from flashrecovery.worker.preimport.import_outcomes import ImportOutcomes
from flashrecovery.worker.preimport.start_profile import StartProfile
from flashrecovery.worker.script_checks.unprotected_steps import UnprotectedSteps
from flashrecovery.worker.setup_replay.replay import SetupReplay


@dataclass(frozen=True)
class Assignment:
    """What a process knows about its rank.

    Attributes:
        place: the rank as which the script runs to its first step; another one where no launch has had this ``rank``.
        generation: in which the process was ordered.
        detached: it runs to its first step without its peers.
        ahead: what it is to draw and count before that.
    """

    rank: int
    place: int
    generation: int = 0
    detached: bool = False
    ahead: Ahead = field(default_factory=Ahead)


class Connection:
    """What the bootstrap has set up before the script runs.

    Attributes:
        detached: this process is not connected to its peers yet.
        at_script_end: functions that are called when the script has ended well.
    """

    def __init__(
        self,
        channel: Channel,
        page: Page,
        assigned: Assignment,
        environment_watch: EnvironmentWatch,
        start_profile: StartProfile,
        unprotected_steps: UnprotectedSteps | None = None,
        setup: SetupReplay | None = None,
        import_outcomes: ImportOutcomes | None = None,
    ) -> None:
        self.channel = channel
        self.page = page
        self.assigned = assigned
        self.detached = assigned.detached
        self.environment_watch = environment_watch
        self.start_profile = start_profile
        self.unprotected_steps = unprotected_steps
        self.setup = setup
        self.import_outcomes = ImportOutcomes() if import_outcomes is None else import_outcomes
        self.at_script_end: list[Callable[[], None]] = []

    def attached(self) -> None:
        """It is connected to its peers from now on."""
        self.detached = False
