"""One line on the terminal for each event that a user wants to see as it happens."""

from __future__ import annotations

from flashrecovery import events as ev
from flashrecovery.kinds import FailureKind, NoticeKind
from flashrecovery.plan.words import failed_text, ranks_text, step_text

_OF_THE_SCRIPT = (
    NoticeKind.COMMUNICATION_OUTSIDE,
    NoticeKind.NOT_REGISTERED,
    NoticeKind.NOT_SAVED,
    NoticeKind.OWN_OBJECTS,
    NoticeKind.SILENT_BUFFERS,
    NoticeKind.STEPS_ARE_CALLS,
    NoticeKind.PRE_STEP_COPY_ENABLED,
)
"""Notices that every rank of a script finds itself, with the same text."""


_BRIEF = 160
"""The most characters of an exception's type and message that are printed when it is raised."""
_DONE = {
    str(FailureKind.RESIZE): "resized",
    str(FailureKind.REPLAN): "parallelism changed",
    str(FailureKind.HANDOFF): "handed over",
}


class Console:
    """What has been printed on the terminal."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()
        self._raised: dict[tuple[str, str, int], int] = {}
        self._failed = ("", 0)  # what has become of the last checkpoints, and how often in a row

    def line_of(self, event: ev.Event) -> str | None:
        """The line to print for ``event``; None: print nothing, also if another rank has reported the same."""
        if isinstance(event, ev.Notice) and event.kind in _OF_THE_SCRIPT:
            if (event.kind, event.text) in self._told:
                return None
            self._told.add((event.kind, event.text))
        if isinstance(event, ev.Notice) and event.kind == NoticeKind.CHECKPOINT_FAILED:
            count = self._failed[1] + 1 if event.text == self._failed[0] else 1
            self._failed = (event.text, count)
            if count & (count - 1):
                return None  # it is printed at 1, 2, 4, 8, ... times
            return line_of(event) if count == 1 else f"{line_of(event)} ({count} times now)"
        if isinstance(event, ev.FailureDetected) and event.exception:
            first = self._raised.setdefault((event.exception, event.message, event.step), event.rank)
            if first != event.rank:
                where = step_text(event.step, event.iteration)
                return f"rank {event.rank} failed at {where} ({event.kind}: as on rank {first})"
        return line_of(event)


def _brief(raised: str) -> str:
    """An exception of the script, shortened: its log has all of it, and so has the line that ends the job."""
    text, at, where = raised.rpartition(" (at ")
    if len(text) <= _BRIEF:
        return raised
    return f"{text[:_BRIEF].rpartition(' ')[0]} ...{at}{where}"


def line_of(event: ev.Event) -> str | None:
    """The line to print for ``event``; None: print nothing."""
    if isinstance(event, ev.FailureDetected):
        first = event.evidence.splitlines()[0] if event.evidence else ""
        if event.exception:
            first = _brief(first)
        what = failed_text(event.kind, first)
        return f"rank {event.rank} failed at {step_text(event.step, event.iteration)} ({what})"
    if isinstance(event, ev.RecoveryFinished):
        replaced = ", ".join(str(rank) for rank in event.victims if rank not in event.left)
        done = _DONE.get(event.cause, "recovered")
        who = f"rank {replaced} replaced, " if replaced else ""
        where = step_text(event.resume_step, event.iteration)
        return f"{done} in {event.total_s:.2f} s: {who}training goes on from {where} (generation {event.generation})"
    if isinstance(event, ev.JobResized) and event.only_step:
        return f"the change of size takes place at {step_text(event.step, event.iteration)}"
    if isinstance(event, ev.JobResized):
        sizes = f"{event.replicas} replica{'' if event.replicas == 1 else 's'} instead of {event.before}"
        changes = (("without", event.left), ("with", event.came))
        how = " and ".join(f"{word} {ranks_text(ranks)}" for word, ranks in changes if ranks)
        return f"{sizes}, from {step_text(event.step, event.iteration)} on" + (f", {how}" if how else "")
    if isinstance(event, ev.JobReplanned):
        size = f"{event.ranks} rank{'' if event.ranks == 1 else 's'}"
        where = step_text(event.step, event.iteration)
        return f"{event.layout} instead of {event.before}, on {size}, from {where} on"
    if isinstance(event, ev.NodeLost):
        return f"node {event.node} is lost ({event.evidence})"
    if isinstance(event, ev.FallbackStarted):
        return f"no consistent state in memory ({event.reason}); going back to checkpoint {event.path}"
    if isinstance(event, ev.Notice) and event.kind == NoticeKind.WAITING:
        return f"waiting for rank {event.rank}, for {event.seconds:.0f} s now: {event.text}"
    if isinstance(event, ev.Notice) and event.kind == NoticeKind.RESUMED:
        return event.text
    if isinstance(event, ev.Notice) and event.kind in (
        NoticeKind.REDUNDANCY,
        *_OF_THE_SCRIPT,
        NoticeKind.CHECKPOINT_FAILED,
        NoticeKind.DIGEST_MISMATCH,
        NoticeKind.CHECKPOINT_LAYOUT_MISMATCH,
        NoticeKind.WAITING_FOR_NODE,
        NoticeKind.JOINING_PROCESSES,
        NoticeKind.JOINING_PROCESS_GIVEN_UP,
        NoticeKind.NODE_UNHEARD,
        NoticeKind.NODE_REPLACED,
        NoticeKind.NODE_EXCLUDED,
        NoticeKind.NODE_LEAVES,
        NoticeKind.NODE_LEFT,
        NoticeKind.NODE_FAILURE_LOG,
        NoticeKind.NODE_USED_LAST,
        NoticeKind.DEADLOCK_SUSPECTED,
        NoticeKind.DEADLOCK,
        NoticeKind.STRAGGLER,
        NoticeKind.HEALTH_WARNING,
        NoticeKind.HEALTH_FATAL,
        NoticeKind.HEALTH_PLUGIN,
        NoticeKind.STORE_RESTARTED,
        NoticeKind.OTHER_COMMAND,
        NoticeKind.UNPROTECTED,
        NoticeKind.ALL_ASKED_AGAIN,
        NoticeKind.START_AGAIN,
        NoticeKind.FAULT_IMPOSSIBLE,
        NoticeKind.FAULT_NOT_FIRED,
    ):
        return f"{event.kind.replace('_', ' ')}: {event.text}"
    return None
