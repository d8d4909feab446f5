"""For frameworks in which a step is one call (``engine.train_batch(data)``): the state of the loop around them.

Nothing else needs it: a script that takes its steps from ``recovery.steps()`` has no such loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from flashrecovery.contract.adapter import Adapter, StepHooks
from flashrecovery.errors import RegistrationError
from flashrecovery.state.shard import Shard

__all__ = ["LoopAdapter", "LoopState", "PlacedLoop"]


class LoopState(Protocol):
    """State of the script's own loop that calls read and change. With an attribute ``counted``, users are informed at
    the start what one call is: there are others than a framework's steps. A method ``iteration_of(kind)`` gives the
    number under which the framework logs the iteration of the call of this kind that is about to be made."""

    def save(self) -> Any:
        """A copy of the state as a call begins. It stays in this process."""

    def load(self, saved: Any) -> None:
        """Go back to what :meth:`save` gave, before a call that is made again."""

    def restored(self, saved: Any) -> None:
        """Called in a replacement with what :meth:`save` gave in the dead process, at the version from which it goes
        on."""

    def resume(self) -> None:
        """Called in a replacement when the last skipped call returns: adopt what :meth:`restored` has brought."""


@runtime_checkable
class PlacedLoop(LoopState, Protocol):
    """A :class:`LoopState` whose calls can be made again from any version on: :meth:`restored`, which is called in
    survivors, too, has brought the end of the call before, and the rest is the script's own."""

    def place(self) -> Any:
        """What the script has set before the call that it is about to make, and done since the call before; it stays in
        this process. Asked once for each call, also for those that are skipped, in their order."""

    def go_back(self, place: Any, *, restored: bool) -> None:
        """The call that had this place is made again. ``restored``: its state was restored; else it is what the call
        before it, which was made again, too, has left."""

    def forget(self, place: Any) -> None:
        """No call before the one with this place is made again."""


class LoopAdapter(Adapter):
    """Carries the state of a loop whose steps are the framework's own calls, and has no shard.

    Register it beside the framework's own adapter.
    """

    name = "loop"

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop
        self._hooks: StepHooks | None = None

    def watch(self, hooks: StepHooks) -> None:
        self._hooks = hooks

    def sealed(self) -> None:
        """Called at the end of a call, when what :meth:`LoopState.save` gives is what the loop has."""
        self._reports.sealed()

    def mutating(self) -> None:
        """What follows in this call may change parameters."""
        self._reports.mutating()

    @property
    def _reports(self) -> StepHooks:
        if self._hooks is None:
            raise RegistrationError(
                f"adapter {self.name!r} reports a moment of a step before it is registered: call recovery.register() "
                "with it before the first call"
            )
        return self._hooks

    def shards(self) -> Sequence[Shard]:
        return ()

    def sync_spans_world(self) -> bool:
        return True  # the framework's adapter says what is so

    def reset(self) -> None:
        """Nothing is half-finished: see :meth:`LoopState.load`."""

    def capture_rank(self) -> Any:
        return self._loop.save()

    def restore_rank(self, state: Any) -> None:
        self._loop.restored(state)

    def makes_any_call_again(self) -> bool:
        """Whether the framework's own calls can be made again as they were also where they lie far back, at a fallback
        checkpoint. Asked where steps are such calls."""
        return isinstance(self._loop, PlacedLoop)
