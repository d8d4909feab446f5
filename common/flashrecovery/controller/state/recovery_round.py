"""What belongs to one start, one recovery, and one generation. Each is made new, so nothing has to be set back."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashrecovery.controller.state.restore_plan import Decision, RestoreRound
from flashrecovery.errors import ProtocolError
from flashrecovery.proto import flashrecovery_pb2 as pb


@dataclass
class RecoveryRound:
    """One generation. A further failure begins the next one, and all of this is void then.

    Attributes:
        restoring: what is restored from where; None: that is not decided yet.
        checkpoint: the directory of the checkpoint that it is restored from; "": from memory.
        retry_at: when a failed regroup or restore is tried again, CLOCK_MONOTONIC seconds; None: none has failed.
        retry_for: what has failed last, as text.
        confirmed: how many of the ranks, in order, have committed a step since they were asked to go on.
    """

    restoring: RestoreRound | None = None
    checkpoint: str = ""
    retry_at: float | None = None
    retry_for: str = ""
    confirmed: int = 0

    @property
    def decided(self) -> RestoreRound:
        """What is restored. Raises ProtocolError before that is decided."""
        if self.restoring is None:
            raise ProtocolError("it is not decided yet what is restored")
        return self.restoring

    def restore_from(self, decision: Decision) -> None:
        """This is restored."""
        self.restoring, self.checkpoint = decision.round, decision.checkpoint

    def restore_again(self, restoring: RestoreRound) -> None:
        """Part of it has not arrived intact, and is taken from elsewhere."""
        self.restoring = restoring

    def retry_later(self, why: str, at: float) -> None:
        """A regroup or restore has failed; it is tried again at ``at``, or at the time that was set before."""
        self.retry_for = why
        if self.retry_at is None:
            self.retry_at = at

    def stop_waiting(self) -> None:
        """It is tried again now, or never."""
        self.retry_at = None

    def confirm(self, ranks: int) -> None:
        """So many ranks, in order, have committed a step."""
        self.confirmed = ranks


@dataclass
class StartRound:
    """One start of all processes, from the script's first line, in whatever parallel layout.

    Attributes:
        stores: the TCPStores of the start, the same for all of its ranks.
        needs_known: the generation whose stop has told every rank's needs; 0: none.
    """

    stores: list[pb.StoreServer] = field(default_factory=list)
    needs_known: int = 0

    def use_stores(self, stores: list[pb.StoreServer]) -> None:
        """Its groups are spread over these."""
        self.stores = stores

    def needs_told(self, generation: int) -> None:
        """All ranks have said what they need in this generation; 0: they are to say it again."""
        self.needs_known = generation


@dataclass
class RecoveryTries:
    """One recovery, from its first failure until every rank has committed a step again, or all start from the script's
    first line. A change of the parallel layout goes on with it.

    Attributes:
        failures: those that it is about, in order.
        asked_again: all ranks missed a deadline, and all got the command again.
        retries: how often a failed regroup or restore was tried again.
    """

    failures: list[pb.Failure] = field(default_factory=list)
    asked_again: bool = False
    retries: int = 0

    def ask_again(self) -> None:
        """All are asked once more."""
        self.asked_again = True

    def count_retry(self) -> int:
        """A failed regroup or restore is tried again. Returns how often that was."""
        self.retries += 1
        return self.retries

    def count_from_zero(self) -> None:
        """What failed is not used any more."""
        self.retries = 0
