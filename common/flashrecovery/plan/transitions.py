"""The states of a job, and of each change of which ranks belong to it, as tables.

A job and its recovery::

    STARTING -> RUNNING -> QUIESCING -> REPLACING -> REGROUPING -> RESTORING -> VERIFYING -> RUNNING
                              any recovery state -> QUIESCING (a further failure: generation + 1)
                              REPLACING -> FALLBACK (no cut: newest checkpoint) -> REGROUPING
                              QUIESCING, REPLACING -> STARTING (no cut, but only the first step is lost)
                              RUNNING -> FINISHED,  any -> FAILED

A job changes its members in four ways, each with its own states. Where a way begins with STABLE or NONE, nothing is
under way. What happens between two states is one event:

==========================  =======================================================================================
a commanded size            STABLE -> ORDERED -> LEAVING -> STABLE. While a node is drained, a command is PUT_ASIDE.
                            LEAVING -> ORDERED: those that leave were taken back, because a rank has died.
processes that join         NONE -> STARTING -> PAUSING -> STARTING (the next generation) -> NONE: they are members.
                            Where they take ranks from living processes: -> TAKING_OVER -> NONE, done or taken back.
                            PAUSING -> STARTING, too: something else has failed; they are called in again.
a node that is drained      NONE -> ASKED -> MOVING -> NONE: it has left, or stays.
another parallel layout     STABLE -> ORDERED (a command) or FORCED (ranks are lost) -> WRITING -> STARTED -> STABLE
                            (every rank has taken a step in it). WRITING -> ORDERED, FORCED: a rank has died.
==========================  =======================================================================================

A transition that is not in its table is a bug and raises :class:`ProtocolError`: those of a job when they are made,
those of a change where :meth:`~flashrecovery.controller.machine.Machine.validate` is called (in all tests).
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

from flashrecovery.errors import ProtocolError


class SizeState(Enum):
    """A commanded number of replicas."""

    STABLE = "stable"
    ORDERED = "ordered"  # ranks pause before a step
    PUT_ASIDE = "put aside"  # until no node is drained any more
    LEAVING = "leaving"  # processes that were given up are there until the others have what they need


class JoinState(Enum):
    """Processes that are built up beside training, to take ranks."""

    NONE = "none"
    STARTING = "starting"
    PAUSING = "pausing"  # all are at their first step, and the members got the command to pause
    TAKING_OVER = "taking over"  # they are members, and those whose ranks they have are still there


class DrainState(Enum):
    """A node that is to leave."""

    NONE = "none"
    ASKED = "asked"
    MOVING = "moving"  # processes that are to take its ranks join, or its ranks are to leave


class RelayoutState(Enum):
    """A change of the parallel layout."""

    STABLE = "stable"
    ORDERED = "ordered"  # by a command
    FORCED = "forced"  # ranks cannot be replaced
    WRITING = "writing"  # state goes to the staging area
    STARTED = "started"  # not every rank has taken a step in the new layout


class State(str, Enum):
    """State of the job."""

    STARTING = "starting"
    RUNNING = "running"
    QUIESCING = "quiescing"
    REPLACING = "replacing"
    REGROUPING = "regrouping"
    RESTORING = "restoring"
    VERIFYING = "verifying"
    FALLBACK = "fallback"
    FINISHED = "finished"
    FAILED = "failed"


RECOVERY_STATES = frozenset(
    {State.QUIESCING, State.REPLACING, State.REGROUPING, State.RESTORING, State.VERIFYING, State.FALLBACK}
)

TRANSITIONS: dict[State, frozenset[State]] = {
    # launch; a failure before the first step restarts everything (nothing is lost); --resume restores a checkpoint
    State.STARTING: frozenset(
        {State.STARTING, State.RUNNING, State.RESTORING, State.QUIESCING, State.FINISHED, State.FAILED}
    ),
    State.RUNNING: frozenset({State.QUIESCING, State.FINISHED, State.FAILED}),
    # survivors stop at a step boundary while the dead process is fenced and its replacement starts
    State.QUIESCING: frozenset({State.QUIESCING, State.REPLACING, State.STARTING, State.FAILED}),
    # survivors are quiet; the replacements run the script up to its first step; then the cut is decided
    State.REPLACING: frozenset({State.QUIESCING, State.REGROUPING, State.FALLBACK, State.STARTING, State.FAILED}),
    State.FALLBACK: frozenset({State.QUIESCING, State.REGROUPING, State.RESTORING, State.FAILED}),
    State.REGROUPING: frozenset({State.QUIESCING, State.RESTORING, State.FAILED}),
    State.RESTORING: frozenset({State.QUIESCING, State.VERIFYING, State.FAILED}),
    # digests agree, or the shard is taken from its next source, or, if it has none left, everything from the checkpoint
    State.VERIFYING: frozenset({State.QUIESCING, State.RESTORING, State.FALLBACK, State.RUNNING, State.FAILED}),
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
}

ChangeState: TypeAlias = SizeState | JoinState | DrainState | RelayoutState

CHANGES: dict[ChangeState, frozenset[ChangeState]] = {
    SizeState.STABLE: frozenset({SizeState.ORDERED, SizeState.LEAVING}),
    SizeState.ORDERED: frozenset({SizeState.STABLE, SizeState.PUT_ASIDE, SizeState.LEAVING}),
    # given up for good, taken up again, or ranks of the node leave first
    SizeState.PUT_ASIDE: frozenset({SizeState.STABLE, SizeState.ORDERED, SizeState.LEAVING}),
    SizeState.LEAVING: frozenset({SizeState.STABLE, SizeState.ORDERED, SizeState.PUT_ASIDE}),
    JoinState.NONE: frozenset({JoinState.STARTING}),
    # given up, at their first step, or in a recovery that has made them members
    JoinState.STARTING: frozenset({JoinState.NONE, JoinState.PAUSING, JoinState.TAKING_OVER}),
    JoinState.PAUSING: frozenset({JoinState.NONE, JoinState.STARTING}),
    JoinState.TAKING_OVER: frozenset({JoinState.NONE}),
    DrainState.NONE: frozenset({DrainState.ASKED, DrainState.MOVING}),
    DrainState.ASKED: frozenset({DrainState.NONE, DrainState.MOVING}),
    DrainState.MOVING: frozenset({DrainState.NONE}),
    # STARTED without an order: a controller that takes over has learned this from the nodes
    RelayoutState.STABLE: frozenset({RelayoutState.ORDERED, RelayoutState.FORCED, RelayoutState.STARTED}),
    # STARTED without WRITING: from a checkpoint
    RelayoutState.ORDERED: frozenset(
        {RelayoutState.STABLE, RelayoutState.FORCED, RelayoutState.WRITING, RelayoutState.STARTED}
    ),
    RelayoutState.FORCED: frozenset({RelayoutState.WRITING, RelayoutState.STARTED}),
    RelayoutState.WRITING: frozenset(
        {RelayoutState.STABLE, RelayoutState.ORDERED, RelayoutState.FORCED, RelayoutState.STARTED}
    ),
    RelayoutState.STARTED: frozenset({RelayoutState.STABLE, RelayoutState.FORCED}),
}

_AT_REST: dict[type, ChangeState] = {
    SizeState: SizeState.STABLE,
    JoinState: JoinState.NONE,
    DrainState: DrainState.NONE,
    RelayoutState: RelayoutState.STABLE,
}


def check_transition(old: State, new: State) -> None:
    """Raises ProtocolError if ``old -> new`` is not in the table."""
    if new not in TRANSITIONS[old]:
        raise ProtocolError(f"state machine: {old.value} -> {new.value} is not a transition")


def at_rest(state: ChangeState) -> ChangeState:
    """The state in which such a change is not under way."""
    return _AT_REST[type(state)]


def wrong_change(old: ChangeState, new: ChangeState) -> str:
    """What is said of it if no event leads from ``old`` to ``new``; "" if one does."""
    if new is old or new in CHANGES[old]:
        return ""
    return f"{type(new).__name__}: {old.value} -> {new.value} is not a transition"
