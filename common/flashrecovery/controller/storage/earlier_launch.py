"""What a run directory shows of an earlier launch: how far it had come, if at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from flashrecovery.events import RunFiles

_TELL_STEPS = (b'"job_started"', b'"job_failed"', b'"job_finished"', b'"recovery_finished"', b'"checkpoint_saved"')
_STEP_IN = ("step", "resume_step", "version")


def earlier_step(files: RunFiles) -> int:
    """The newest step that the last launch in this run directory is known to have come to; 0: there was none, or it has
    taken no step. One that was killed in its first seconds has come to step 1 at least, as far as is known."""
    try:
        lines = files.events_path.read_bytes().split(b"\n")
    except OSError:
        return 0
    found = [event for line in lines if any(name in line for name in _TELL_STEPS) for event in _parsed(line)]
    step = step_of(found)
    return max(step, _newest_in_timeline(files)) if step else 0


def step_of(events: Iterable[Mapping[str, Any]]) -> int:
    """The same, of these events."""
    step, begun, ended = 0, False, False
    for event in events:
        kind = event.get("event")
        if kind == "job_started":
            step, begun, ended = 0, True, False
        if begun:
            step = max(step, *(int(event.get(name, 0)) for name in _STEP_IN))
            ended = ended or kind in ("job_failed", "job_finished")
    return max(step, 1) if begun and not ended else step


def _newest_in_timeline(files: RunFiles) -> int:
    """The file is written every few seconds."""
    try:
        versions = json.loads(files.timeline_path.read_text())["whole"]["version"]
        return max((int(version) for version in versions[-1:]), default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _parsed(line: bytes) -> list[Mapping[str, Any]]:
    """Nothing if it is not whole: its writer was killed."""
    try:
        event = json.loads(line)
    except ValueError:
        return []
    return [event] if isinstance(event, dict) else []
