"""Event logs as a controller writes them, for the tests of the tools."""

from __future__ import annotations

from flashrecovery import events as ev

START = 1_700_000_000.0


def at(seconds: float, event: ev.Event) -> ev.Event:
    return event.model_copy(update={"time": START + seconds, "monotonic": 100.0 + seconds})


def kill(
    t: float, generation: int, rank: int, resume_step: int, phases: dict[str, float], kind: str = "killed"
) -> list[ev.Event]:
    """One failure at ``t`` and its whole recovery."""
    total = sum(phases.values())
    events = [
        at(
            t + phases["detect"],
            ev.FailureDetected(
                generation=generation - 1,
                rank=rank,
                kind=kind,
                evidence="SIGKILL",
                detect_s=phases["detect"],
                step=resume_step,
            ),
        ),
        at(t + phases["detect"], ev.RecoveryStarted(generation=generation, victims=[rank], cause=kind)),
    ]
    done = 0.0
    for name, seconds in phases.items():
        done += seconds
        if name != "detect":
            events.append(at(t + done, ev.RecoveryPhase(generation=generation, name=name, seconds=seconds)))
    finished = ev.RecoveryFinished(
        generation=generation,
        resume_step=resume_step,
        victims=[rank],
        sources={"0": 2},
        bytes=3 << 20,
        phases=phases,
        total_s=total,
        cause=kind,
        reason=f"every shard exists at {resume_step}, and none at a newer version",
    )
    return [*events, at(t + total, finished)]


FAST = {
    "detect": 0.004,
    "quiesce": 0.02,
    "replace": 0.3,
    "regroup": 0.05,
    "restore": 0.03,
    "verify": 0.01,
    "redo": 0.1,
}
SLOW = {**FAST, "replace": 4.0}


def two_recoveries() -> list[ev.Event]:
    """Rank 3 killed with a standby, rank 1 hung without one; then the end."""
    return [
        at(0, ev.StandbyReady(ready=0, starting=1)),
        at(5, ev.JobStarted(world_size=4, seconds=5.0)),
        at(9, ev.StandbyReady(ready=1)),
        *kill(10, 1, 3, 41, FAST),
        *kill(30, 2, 1, 200, SLOW, kind="hang"),
        at(60, ev.CheckpointSaved(generation=2, version=300, path="ckpt", seconds=1.0)),
        at(70, ev.JobFinished(generation=2, seconds=70.0)),
    ]
