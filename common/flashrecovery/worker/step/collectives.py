"""What the script's collectives have done in a step: whether one has failed, and whether there were any after its
mutation had begun."""

from __future__ import annotations

from flashrecovery import groups


class CollectiveWatch:
    """Counts collectives from certain moments of a step on. Each method is called at the moment after which it is
    named."""

    def __init__(self) -> None:
        self._failures = self._raised = self._operations = self._stand_ins = 0
        self._abandonments = self._abandonments_before = 0
        self._answered = False
        self._operations_then = self._abandonments_then = 0

    def step_begins(self) -> None:
        self._failures = groups.failure_count()
        self._abandonments_before = groups.abandonment_count()
        self._raised = groups.raised_count()

    def mutation_begins(self) -> None:
        self._operations = groups.operation_count()
        self._abandonments = groups.abandonment_count()

    def step_is_committed(self) -> None:
        self._stand_ins = groups.stand_in_count()
        self._answered = False
        self._operations_then = groups.operation_count()
        self._abandonments_then = groups.abandonment_count()

    def answered(self) -> None:
        """The script has been given something in the place of what a collective would have given."""
        self._answered = True

    @property
    def failed(self) -> bool:
        """A collective of this step has failed, or may have been aborted on the device: only a thread that waits learns
        that."""
        return groups.failure_count() != self._failures or self.given_up

    @property
    def given_up(self) -> bool:
        """All communication has been given up since the step began."""
        return groups.abandonment_count() != self._abandonments_before

    @property
    def raised(self) -> bool:
        """A collective of this step has failed, and has raised its error in the script."""
        return groups.raised_count() != self._raised

    @property
    def quiet(self) -> bool:
        """No collective was started since the mutation began."""
        return groups.operation_count() == self._operations

    @property
    def abandoned(self) -> bool:
        """The collectives under way have been given up since the mutation began."""
        return groups.abandonment_count() != self._abandonments

    @property
    def abandoned_since_commit(self) -> bool:
        """Whether collectives were started since the commit and abandoned while under way. (On a device the script may
        not have waited for them yet.)"""
        given_up = groups.abandonment_count() != self._abandonments_then
        return given_up and groups.operation_count() != self._operations_then

    @property
    def stood_in_for(self) -> bool:
        """A stand-in has answered a collective since the commit."""
        return self._answered or groups.stand_in_count() != self._stand_ins
