"""Facts as Prometheus metrics. Nothing is counted here: a collector is made for one scrape and thrown away."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from flashrecovery.observe.facts import Counts, Durations, JobFacts, NodeWorkers
from flashrecovery.observe.tally import BOUNDS_S
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb

_Labels = Sequence[str]
_RANK = ("rank", "node")
_NODE = ("node", "node_rank")


def exposition(accept: str, job: JobFacts | None, node: NodeWorkers | None) -> tuple[bytes, str]:
    """The text of one scrape, and its content type, in the format that the ``Accept`` header asks for."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(FactsCollector(job, node))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class FactsCollector(Collector):
    """One look at a controller, an agent, or both."""

    def __init__(self, job: JobFacts | None, node: NodeWorkers | None) -> None:
        self._job = job
        self._node = node

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry has only one of these."""
        return ()

    def collect(self) -> Iterator[Metric]:
        if self._job is not None:
            yield from job_metrics(self._job, time.time())
        if self._node is not None:
            yield from node_metrics(self._node)


def _gauge(name: str, text: str, samples: Iterable[tuple[_Labels, float]], labels: _Labels = ()) -> Metric:
    family = GaugeMetricFamily(f"flashrecovery_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, samples: Iterable[tuple[_Labels, float]], labels: _Labels = ()) -> Metric:
    family = CounterMetricFamily(f"flashrecovery_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _histogram(name: str, text: str, samples: Iterable[tuple[_Labels, Durations]], labels: _Labels = ()) -> Metric:
    family = HistogramMetricFamily(f"flashrecovery_{name}", text, labels=labels)
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    for values, durations in samples:
        cumulative = itertools.accumulate(durations.counts)
        family.add_metric(values, list(zip(bounds, map(float, cumulative), strict=True)), durations.sum_s)
    return family


def job_metrics(job: JobFacts, now: float) -> Iterator[Metric]:
    """What the controller knows. ``now``: Unix seconds."""
    status, recovery = job.status, job.recovery
    states = [((state.value,), float(state.value == status.state)) for state in State]
    yield _gauge("state", "1 for the state that the job is in.", states, ("state",))
    yield _gauge("generation", "Goes up by one at every recovery.", [((), status.generation)])
    yield _gauge("uptime_seconds", "Since the controller was started.", [((), status.uptime_s)])
    standbys = [(("ready",), status.standby_ready), (("starting",), status.standby_starting)]
    yield _gauge("standbys", "Pre-warmed processes.", standbys, ("state",))
    running = 0.0 if recovery is None else recovery.seconds
    yield _gauge(
        "recovery_in_progress_seconds", "Since the failure that is being recovered from; 0: none.", [((), running)]
    )
    ages = [((n.name, str(n.node_rank)), n.heartbeat_age_s) for n in job.nodes]
    yield _gauge("node_heartbeat_age_seconds", "Since the last message of the node's agent.", ages, _NODE)
    yield from _rank_metrics(job)
    yield from _checkpoint_metrics(job, now)
    yield from _count_metrics(job.counts)


def _rank_metrics(job: JobFacts) -> Iterator[Metric]:
    ranks = [((str(r.rank), r.node), r) for r in job.status.ranks]
    late = {rank: node.heartbeat_age_s for node in job.nodes for rank in node.ranks}
    yield _gauge(
        "rank_up",
        "1 if a process fills the rank.",
        ((labels, float(r.state != "empty")) for labels, r in ranks),
        _RANK,
    )
    yield _gauge(
        "rank_tag",
        "Step tag: the step the rank is in, -1: changing its state, -2: not in a step yet.",
        ((labels, r.tag) for labels, r in ranks),
        _RANK,
    )
    yield _gauge(
        "rank_committed_version", "Newest committed version, -1: none.", ((la, r.committed) for la, r in ranks), _RANK
    )
    yield _gauge(
        "rank_progress_age_seconds",
        "Since the rank's last sign of progress.",
        ((labels, r.progress_age_s + late.get(r.rank, 0.0)) for labels, r in ranks if r.state != "empty"),
        _RANK,
    )
    yield _gauge(
        "rank_step_seconds", "Mean time of the last steps, 0: unknown.", ((la, r.step_s) for la, r in ranks), _RANK
    )
    yield _gauge(
        "rank_own_work_seconds",
        "Part of a step without any collective under way, 0: unknown.",
        ((la, r.own_s) for la, r in ranks),
        _RANK,
    )
    yield _gauge(
        "rank_straggler",
        "1 if the rank works longer itself in each step than the others.",
        ((la, float(r.straggler)) for la, r in ranks),
        _RANK,
    )
    yield _gauge(
        "rank_overhead_seconds",
        "Part of a step that recovery takes of the training thread, 0: unknown.",
        ((la, r.overhead_s) for la, r in ranks),
        _RANK,
    )
    yield _gauge(
        "rank_copy_age_seconds",
        "Since the newest whole copy of the rank's state that another rank keeps was complete.",
        ((la, r.copy_age_s) for la, r in ranks if r.copied),
        _RANK,
    )
    yield _gauge(
        "rank_copy_age_versions",
        "Steps that the rank has committed since the version of that copy.",
        ((la, behind) for la, r in ranks if (behind := copy_age(r)) is not None),
        _RANK,
    )


def copy_age(rank: pb.RankStatus) -> int | None:
    """How many versions the copy is behind its owner; None if there is no copy, or the owner has no version."""
    return max(rank.committed - (rank.copied - 1), 0) if rank.copied and rank.committed >= 0 else None


def _checkpoint_metrics(job: JobFacts, now: float) -> Iterator[Metric]:
    """Absent while there is no checkpoint: 0 would read as a fresh one."""
    saved = job.checkpoint
    if saved is None:
        return
    committed = max((r.committed for r in job.status.ranks), default=-1)
    behind = max(committed - saved.version, 0)
    yield _gauge("checkpoint_version", "Version of the newest complete checkpoint.", [((), saved.version)])
    yield _gauge("checkpoint_age_versions", "Steps committed since then.", [((), behind)])
    if saved.saved_at is not None:
        age = max(now - saved.saved_at, 0.0)
        yield _gauge("checkpoint_age_seconds", "Since the newest checkpoint was complete.", [((), age)])


def _count_metrics(counts: Counts) -> Iterator[Metric]:
    failures = [((kind,), n) for kind, n in sorted(counts.failures.items())]
    yield _counter("failures_total", "Detected failures.", failures, ("kind",))
    recoveries = [((cause,), n) for cause, n in sorted(counts.recoveries.items())]
    yield _counter("recoveries_total", "Finished recoveries, by their first failure.", recoveries, ("cause",))
    phases = [((name,), d) for name, d in counts.phases.items()]
    yield _histogram("recovery_seconds", "Time of finished recoveries in each phase.", phases, ("phase",))
    whole = [] if counts.recovery is None else [((), counts.recovery)]
    yield _histogram("recovery_duration_seconds", "From the failure to the first newly committed step.", whole)
    for name, text, value in (
        ("recovery_bytes_total", "Bytes of state that ranks got from other ranks in recoveries.", counts.bytes),
        ("fallbacks_total", "Recoveries that had to go back to a checkpoint.", counts.fallbacks),
        ("checkpoints_total", "Complete checkpoints saved.", counts.checkpoints),
        ("faults_injected_total", "Drills.", counts.faults_injected),
    ):
        yield _counter(name, text, [((), value)])


def node_metrics(node: NodeWorkers) -> Iterator[Metric]:
    """What an agent sees in its workers' pages at this moment."""
    workers = [((str(w.rank), node.node), w) for w in node.workers]
    yield _gauge("worker_tag", "As rank_tag, from the worker's own page.", ((la, w.tag) for la, w in workers), _RANK)
    yield _gauge(
        "worker_committed_version",
        "As rank_committed_version, from the worker's own page.",
        ((la, w.committed) for la, w in workers),
        _RANK,
    )
    yield _counter(
        "worker_progress_total", "Signs of progress of this process.", ((la, w.progress) for la, w in workers), _RANK
    )
    yield _gauge(
        "worker_progress_age_seconds",
        "Since the last of them.",
        ((la, w.progress_age_s) for la, w in workers if w.progress_age_s is not None),
        _RANK,
    )
    yield _gauge(
        "worker_overhead_seconds", "As rank_overhead_seconds.", ((la, w.overhead_s) for la, w in workers), _RANK
    )
    kept = [(la, w) for la, w in workers if w.kept >= 0]
    yield _gauge(
        "worker_kept_version",
        "Newest version of which the worker keeps a whole copy for another rank.",
        ((la, w.kept) for la, w in kept),
        _RANK,
    )
    yield _gauge("worker_kept_age_seconds", "Since it was complete.", ((la, w.kept_age_s) for la, w in kept), _RANK)
    yield _gauge("worker_pid", "Process that fills the rank.", ((la, w.pid) for la, w in workers), _RANK)
    own = (node.node, str(node.node_rank))
    standbys = [((*own, "ready"), node.standby_ready), ((*own, "starting"), node.standby_starting)]
    yield _gauge("node_standbys", "Pre-warmed processes of this node.", standbys, (*_NODE, "state"))
