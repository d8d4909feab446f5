"""Where steps are calls of a framework's loop: to which of its iterations they belong, as its own log numbers them."""

from __future__ import annotations

from collections.abc import Iterable

from flashrecovery import events as ev
from flashrecovery.plan.words import step_text
from flashrecovery.proto import flashrecovery_pb2 as pb

_KEPT = 64
"""Number of newest steps whose iteration is kept."""


class Counting:
    """What the agents have told of it: nothing, where steps are steps."""

    def __init__(self) -> None:
        self._iterations: dict[int, int] = {}

    @property
    def used(self) -> bool:
        """Whether steps are calls."""
        return bool(self._iterations)

    def hear(self, counted: Iterable[pb.Counted]) -> None:
        """Take in what an agent says."""
        found = {one.step: one.iteration for one in counted}
        if not found.keys() <= self._iterations.keys():
            known = self._iterations | found
            self._iterations = {step: known[step] for step in sorted(known)[-_KEPT:]}

    def iteration(self, step: int) -> int:
        """The iteration of this step, or, if that has not begun, of the one before it; -1: not known."""
        return self._iterations.get(step, self._iterations.get(step - 1, -1))

    def text(self, step: int) -> str:
        """The step as text."""
        return step_text(step, self.iteration(step))

    def told(self, event: ev.Event) -> ev.Event:
        """``event`` with the iteration of its step, if it is of one."""
        step = event.resume_step if isinstance(event, ev.RecoveryFinished) else getattr(event, "step", -1)
        if not self._iterations or "iteration" not in type(event).model_fields:
            return event
        return event.model_copy(update={"iteration": self.iteration(step)})
