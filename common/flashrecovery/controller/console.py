"""One line on the terminal for each event that a user wants to see as it happens."""

from __future__ import annotations

from flashrecovery import events as ev

_OF_THE_SCRIPT = ("communication_outside", "own_objects", "silent_buffers", "undo_enabled")
"""What every rank of a script finds out for itself, in the same words."""


class Console:
    """What has been said on the terminal."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def line_of(self, event: ev.Event) -> str | None:
        """What to print for ``event``; None for the others, and for what another rank has said already."""
        if isinstance(event, ev.Notice) and event.kind in _OF_THE_SCRIPT:
            if (event.kind, event.text) in self._told:
                return None
            self._told.add((event.kind, event.text))
        return line_of(event)


def line_of(event: ev.Event) -> str | None:
    """What to print for ``event``; None for the others."""
    if isinstance(event, ev.FailureDetected):
        first = event.evidence.splitlines()[0] if event.evidence else ""
        return f"rank {event.rank} failed at step {event.step} ({event.kind}: {first})"
    if isinstance(event, ev.RecoveryFinished):
        victims = ", ".join(map(str, event.victims))
        return (
            f"recovered in {event.total_s:.2f} s: rank {victims} replaced, training goes on from step "
            f"{event.resume_step} (generation {event.generation})"
        )
    if isinstance(event, ev.NodeLost):
        return f"node {event.node} is lost ({event.evidence})"
    if isinstance(event, ev.FallbackStarted):
        return f"no consistent state in memory ({event.reason}); going back to checkpoint {event.path}"
    if isinstance(event, ev.Notice) and event.kind in (
        "redundancy",
        *_OF_THE_SCRIPT,
        "checkpoint_failed",
        "digest_mismatch",
        "other_layout",
        "waiting_for_node",
        "node_unheard",
        "node_replaced",
        "standstill",
        "deadlock",
        "straggler",
        "health_warning",
        "health_fatal",
        "health_plugin",
        "store_restarted",
        "other_command",
        "unprotected",
        "all_asked_again",
        "start_again",
    ):
        return f"{event.kind.replace('_', ' ')}: {event.text}"
    return None
