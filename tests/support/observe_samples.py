"""Facts of a small job, for the tests of what is shown of it."""

from __future__ import annotations

from flashrecovery import events as ev
from flashrecovery.observe.course import Record
from flashrecovery.observe.facts import CheckpointFacts, JobFacts, NodeFacts, NodeWorkers, RecoveryFacts, WorkerFacts
from flashrecovery.observe.tally import Tally
from flashrecovery.observe.timeline import Sample, band_of
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.support.history_samples import START, at, two_recoveries

NASTY = 'a<b>"\\\n</script><img src=x onerror=alert(1)>'
"""Text as a user's exception may have it."""


def rank(number: int, state: str = "running", node: str = "n0", age_s: float = 0.25) -> pb.RankStatus:
    return pb.RankStatus(
        rank=number,
        pid=100 + number,
        node=node if state != "empty" else "",
        state=state,
        tag=41 if state == "running" else -2,
        progress_age_s=age_s,
        generation=1,
        committed=41,
        step_s=0.125,
        overhead_s=0.005,
        copied=0 if number == 2 else 41,
        copied_by=(number + 1) % 4,
        copy_age_s=0.375,
    )


def job() -> JobFacts:
    """Four ranks on two nodes in the middle of a recovery, after two others."""
    tally = Tally()
    for event in two_recoveries():
        tally.take(event)
    status = pb.JobStatus(
        state="replacing",
        generation=3,
        ranks=[rank(0), rank(1, age_s=99.0), rank(2, "recovering", "n1"), rank(3, "empty")],
        standby_ready=1,
        standby_starting=2,
        last_failure=NASTY,
        failure_reason=NASTY,
        run_dir="/runs/a",
        uptime_s=12.0,
    )
    return JobFacts(
        status=status,
        nodes=(NodeFacts(0, "n0", "10.0.0.1", (0, 1), 0.5), NodeFacts(1, "n1", "10.0.0.2", (2, 3), 9.0)),
        recovery=RecoveryFacts(3, (3,), "killed", 1.5, {"detect": 0.25, "quiesce": 0.25}, "replace", 1.0),
        checkpoint=CheckpointFacts(30, START + 60),
        counts=tally.counts(),
    )


def node() -> NodeWorkers:
    """What one agent sees."""
    workers = (
        WorkerFacts(0, 100, 1, 41, 41, 900, 0.25, 0.125, 0.005, 40, 0.375),
        WorkerFacts(1, 101, 1, -2, -1, 0, None, 0.0),
    )
    return NodeWorkers("n0", 0, workers, 1, 2)


def big_job(ranks: int) -> JobFacts:
    """Eight ranks a node, all well but a few."""
    odd = {17: "recovering", 40: "empty", 41: "stopped"}
    facts = job()
    status = pb.JobStatus(
        state="running",
        generation=2,
        ranks=[rank(i, odd.get(i, "running"), f"n{i // 8}", 60.0 if i == 100 else 0.2) for i in range(ranks)],
        standby_ready=4,
        run_dir="/runs/big",
        uptime_s=86400.0,
    )
    nodes = tuple(NodeFacts(n, f"n{n}", "h", tuple(range(8 * n, 8 * n + 8)), 0.1) for n in range(ranks // 8))
    return JobFacts(status, nodes, None, facts.checkpoint, facts.counts)


def lived(ranks: int = 4, seconds: int = 70, tokens: int = 4096) -> Record:
    """A job of :func:`two_recoveries` that was looked at once a second."""
    record = Record()
    events = [at(0, ev.ControllerStarted(world_size=ranks)), *two_recoveries()]
    record.timeline.serve(START, 0.0)
    for event in events[:-1]:
        record.take(event)
    record.timeline.went_to(0)
    own = {rank: 0.1 + rank / 1e4 for rank in range(ranks)}
    for second in range(5, seconds):
        few = tuple(own.values()) if ranks <= 16 else ()
        record.timeline.add(Sample(float(second), 1.0, second * 5, tokens, band_of({0: 0.2}), band_of(own), few))
    record.take(events[-1])
    return record
