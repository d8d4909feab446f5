"""When the ranks show each other that they agree, after a recovery (see :mod:`.proof`, which does it)."""

from __future__ import annotations

from dataclasses import replace

from flashrecovery.plan.divergence import Past
from flashrecovery.worker import proof
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.stops import Stops


class Proving:
    """Decides when one rank proves that it agrees with its peers.

    Args:
        tensors: whether tensors are compared, too (``verify``).
        replacement: this process fills the place of one that has died.
    """

    def __init__(self, registry: Registry, stops: Stops, *, tensors: bool, replacement: bool) -> None:
        self._registry = registry
        self._stops = stops
        self._tensors = tensors
        self._replacement = replacement
        self._past = Past()
        self._since = -1  # the version at which the job went on the last time; -1: there was no recovery
        self.due = False
        """The next step is the first one after a recovery."""

    def resumed(self, version: int, generation: int) -> None:
        """The generation decides whether the next step is proved, for it is equal on all ranks. How a rank came here is
        not: a recovery may find one rank in its first step, and another one still waiting for the word to begin."""
        self.due = generation > 0
        self._since = version if self.due else -1
        self._past = self._past.resumed(version, replacement=self._replacement)

    def before_commit(self, version: int) -> proof.Unequal | None:
        """``version`` is about to be committed. Returns what is said to be equal and is not; None if another rank has
        died before that was known. Raises DivergedError.

        In the step after a recovery a replacement has what another rank has, so all must have the same; but at version
        1 all have made the script's first step.
        """
        after = not self.due and self._since >= 0 and proof.goes_on(version, self._since)
        unequal: proof.Unequal | None = proof.Unequal()
        compared = whole = False
        if version == 1 or after or (not self.due and proof.is_due(version)):
            unequal = self._compare_replicas(version)
            if unequal is None or unequal:
                return unequal
            compared, whole = True, proof.looks_at_all(version)
        shown = True
        if self.due:
            shown = self._show_equal(version)
            whole = whole or self._tensors
            compared = compared or whole
        elif after:
            shown = self._show_equal(version, self._since)
        if compared and shown:
            self._past = replace(self._past, alike=version, whole=version if whole else self._past.whole)
        return unequal

    def _compare_replicas(self, version: int) -> proof.Unequal | None:
        try:
            return proof.compare_replicas(self._registry, version, self._past)
        except RuntimeError as e:
            if not self._stops.explain(e):
                raise
            return None

    def committed(self) -> None:
        self.due = False

    def after_the_last_step(self, version: int) -> None:
        """Raises DivergedError."""
        if self._since >= 0:
            self._show_equal(version, self._since)

    def _show_equal(self, version: int, since: int | None = None) -> bool:
        """Show that the ranks agree. False if another rank dies meanwhile: then it is done after the next recovery."""
        try:
            proof.show_equal(self._registry, version, self._past, tensors=self._tensors, since=since)
        except RuntimeError as e:
            if not self._stops.explain(e):
                raise
            return False
        return True
