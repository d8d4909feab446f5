"""The recovery state machine, as one table.

::

    STARTING -> RUNNING -> QUIESCING -> REPLACING -> REGROUPING -> RESTORING -> VERIFYING -> RUNNING
                              any recovery state -> QUIESCING (a further failure: generation + 1)
                              REPLACING -> FALLBACK (no cut: newest checkpoint) -> REGROUPING
                              QUIESCING, REPLACING -> STARTING (no cut, but only the first step is lost)
                              RUNNING -> FINISHED,  any -> FAILED

A transition that is not in the table is a bug and raises :class:`ProtocolError`.
"""

from __future__ import annotations

from enum import Enum

from flashrecovery.errors import ProtocolError


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


def check_transition(old: State, new: State) -> None:
    """Raises ProtocolError if ``old -> new`` is not in the table."""
    if new not in TRANSITIONS[old]:
        raise ProtocolError(f"state machine: {old.value} -> {new.value} is not a transition")
