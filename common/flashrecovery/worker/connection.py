"""What a training process has before its script runs."""

from __future__ import annotations

from collections.abc import Callable

from flashrecovery.runtime.channel import Channel
from flashrecovery.runtime.page import Page
from flashrecovery.worker.local_state.fast_forward import Ahead
from flashrecovery.worker.preimport.environment_watch import EnvironmentWatch
from flashrecovery.worker.preimport.start_profile import StartProfile
from flashrecovery.worker.script_checks.unprotected_steps import UnprotectedSteps
from flashrecovery.worker.setup_replay.replay import SetupReplay


class Connection:
    """What the bootstrap has set up before the script runs. ``at_script_end``: functions that are called when the
    script has ended well. ``place``: the rank as which the script runs to its first step; another one where no launch
    has had this ``rank``."""

    def __init__(
        self,
        channel: Channel,
        page: Page,
        rank: int,
        generation: int,
        detached: bool,
        environment_watch: EnvironmentWatch,
        start_profile: StartProfile,
        place: int | None = None,
        ahead: Ahead = Ahead(),  # noqa: B008 - frozen
        unprotected_steps: UnprotectedSteps | None = None,
        setup: SetupReplay | None = None,
    ) -> None:
        self.channel = channel
        self.page = page
        self.rank = rank
        self.place = rank if place is None else place
        self.generation = generation
        self.detached = detached
        self.environment_watch = environment_watch
        self.start_profile = start_profile
        self.ahead = ahead
        self.unprotected_steps = unprotected_steps
        self.setup = setup
        self.at_script_end: list[Callable[[], None]] = []
