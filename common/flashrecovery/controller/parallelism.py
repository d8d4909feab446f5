"""The parallel layout of a job, as the rest of the controller sees it: of most jobs it never changes.

:class:`.relayout.relayout.ParallelismChange` is that of jobs that may change it, and is imported for these alone.
"""

from __future__ import annotations

from collections.abc import Collection

from flashrecovery.controller.state.history import HistoryEntry
from flashrecovery.controller.state.relayout_outcome import KeepLayout, RelayoutStep
from flashrecovery.controller.state.restore_plan import Decision, NothingLeft
from flashrecovery.plan.transitions import RelayoutState
from flashrecovery.proto import flashrecovery_pb2 as pb

FIXED = "the job's layout is fixed: launch it with --parallelism MIN"


class Parallelism:
    """The parallelism of a job whose layout never changes."""

    def ask(self, text: str, step: int) -> tuple[str, str, tuple[str, ...]]:
        """Have the layout changed from ``step`` on (-1: the next one). ``text``: the sizes; "": the best ones. Returns
        (why not, "" if it will be done; the layout as text; why this one)."""
        return FIXED, "", ()

    def lose(self, lost: Collection[int]) -> bool:
        """These ranks have no process, and get none: choose a layout for those that are left. Returns whether there is
        one; they have left the job then.

        Raises JobFailedError, which says why no layout fits.
        """
        return False

    # -- when -------------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """The layout is to change, and has not yet."""
        return False

    @property
    def state(self) -> RelayoutState:
        """Where a change is."""
        return RelayoutState.STABLE

    @property
    def has_to(self) -> bool:
        """The layout is to change because ranks cannot be replaced."""
        return False

    def may_lose(self, lost: Collection[int]) -> None:
        """These ranks have no process, and perhaps get none: their places are none for a layout that is commanded."""

    def pause(self) -> pb.Pause | None:
        """The pending command, for ranks that continue after a recovery."""
        return None

    def why_paused(self, version: int) -> str:
        """For the ranks that are stopped; "" if the layout does not change."""
        return ""

    # -- the state --------------------------------------------------------------------------------

    def interrupted(self) -> None:
        """A rank has died: what was being written is of no use."""

    def next_step(self, found: Decision | NothingLeft) -> RelayoutStep:
        """All that live are stopped, and this is what they could go on from: what becomes of the change."""
        return KeepLayout()

    def why_not_written(self, step: RelayoutStep) -> str:
        """Why the state cannot be written, if that is the next step: what no rank has; "" if it can."""
        return ""

    def carry_out(self, step: RelayoutStep, now: float) -> None:
        """Do that."""

    @property
    def writing(self) -> bool:
        """State is being written."""
        return False

    def wrote(self, rank: int, reply: pb.Reply) -> str:
        """A rank has written its part. Returns what it has otherwise than another one, though one state of it will be
        everybody's; "" if nothing."""
        return ""

    def could_not(self, rank: int, why: str, now: float, *, differs: bool) -> bool:
        """A rank could not write. ``differs``: it has another state than others where one will be everybody's; which
        rank has the right one is not known, nor whether a checkpoint has it. Returns whether the job can go on in its
        layout; a command is dropped then. If the layout has to change, the recovery starts over with the state that the
        memory has of the change before, or goes back to a checkpoint that any layout reads, or ends."""
        return True

    def go_on(self, now: float) -> None:
        """All have written, or have been asked to: the ranks of the next layout start."""

    # -- another controller -----------------------------------------------------------------------

    def inherit(self, told: pb.StagingKept | None) -> bool:
        """A controller before this one had ranks of a new layout started, and has told so. Returns whether it was about
        those that there are."""
        return False

    def await_confirmation(self, now: float) -> None:
        """All ranks are in their loop, and this controller has just come: what is kept is needed until each of them has
        taken a step."""

    def begin_again(self, now: float) -> bool:
        """No rank of the layout has been let into its loop: it starts over with the state that was kept for it, if this
        controller has heard of that. Returns whether that has been seen to, which may be that the job has failed."""
        return False

    # -- the next layout --------------------------------------------------------------------------

    def on_node_lost(self, lost: Collection[int], now: float) -> bool:
        """A node is lost with these ranks, and perhaps with what ranks of another layout have to read. If they are on
        their way to their first step, the recovery starts over with the state that there is. Returns whether that has
        been seen to, which may be that it has failed."""
        return False

    def begin_otherwise(self, why: str, now: float) -> bool:
        """The script cannot begin in the layout that the job has changed to: it begins in the one before, if there are
        ranks enough, or the next best. Returns whether it does."""
        return False

    def another_job(self, message: pb.Joined) -> str:
        """Why what a rank's script has made is not this job in the layout that it has changed to; "" if it is."""
        return ""

    @property
    def change(self) -> HistoryEntry | None:
        """The recovery in which the layout changes, also if it had to start over."""
        return None

    def restored_from(self) -> Decision | None:
        """All ranks of a new layout have come to their first step: what they go on from. None: there is no new
        layout."""
        return None

    def confirmed(self) -> None:
        """Every rank has taken a step: what the memory has is not needed any more."""
