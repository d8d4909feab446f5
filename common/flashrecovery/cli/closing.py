"""The last line of a run: how far it has come, what was lost on the way, and where more of it stands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashrecovery import events as ev
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.words import step_text


def closing_line(events: Sequence[ev.Event], path: Path) -> str:
    """The closing line for the ``events`` of one launch, whose run directory is ``path``; "" if it has not come to its
    first step."""
    started = next((event for event in events if isinstance(event, ev.JobStarted)), None)
    ends = [event for event in events if isinstance(event, (ev.JobFinished, ev.JobFailed))]
    if started is None or not ends:
        return ""
    end = ends[-1]
    recoveries = [event for event in events if isinstance(event, ev.RecoveryFinished)]
    saved = [event.step for event in events if isinstance(event, ev.Notice) and event.kind == NoticeKind.LAST_SAVE]
    step = max([end.step, started.step, *saved, *(event.resume_step for event in recoveries)])
    steps = step - started.step
    lost_s = sum(event.total_s for event in recoveries)
    how = "finished" if isinstance(end, ev.JobFinished) else "ended"
    unit = "step" if end.iteration < 0 else "call"
    what = f"{steps:,} {unit}{'' if steps == 1 else 's'} in {end.monotonic - started.monotonic:.1f} s"
    count = len(recoveries)
    lost = f"{count or 'no'} recover{'ies' if count > 1 else 'y'}" + (f" ({lost_s:.1f} s lost)" if count else "")
    where = step_text(step, end.iteration if step == end.step else -1)
    return f"{how} at {where}: {what}, {lost}; flashrecovery report {path} says more"
