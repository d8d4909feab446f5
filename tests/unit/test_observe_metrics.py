"""Facts as Prometheus metrics, read back with Prometheus' own parser; counts from events."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from flashrecovery import events as ev
from flashrecovery.observe.facts import JobFacts
from flashrecovery.observe.metrics import copy_age, exposition, job_metrics
from flashrecovery.observe.tally import BOUNDS_S, LATEST, Tally
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.support.history_samples import FAST, START, at, kill, two_recoveries
from tests.support.observe_samples import job, node

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(text: str) -> Samples:
    found: Samples = {}
    for family in parse(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[(f"flashrecovery_{name}", tuple(sorted(labels.items())))]


@pytest.fixture(scope="module")
def samples() -> Samples:
    body, content_type = exposition("", job(), node())
    assert content_type.startswith("text/plain")
    return scraped(body.decode())


def test_the_state_is_one_of_all_states(samples: Samples) -> None:
    states = {s.value: value(samples, "state", state=s.value) for s in State}
    assert [name for name, number in states.items() if number == 1] == ["replacing"]
    assert sum(states.values()) == 1


def test_what_the_controller_knows(samples: Samples) -> None:
    assert value(samples, "generation") == 3
    assert value(samples, "standbys", state="ready") == 1 and value(samples, "standbys", state="starting") == 2
    assert value(samples, "recovery_in_progress_seconds") == 1.5
    assert value(samples, "node_heartbeat_age_seconds", node="n1", node_rank="1") == 9.0
    assert value(samples, "rank_tag", rank="0", node="n0") == 41
    assert value(samples, "rank_tag", rank="2", node="n1") == -2
    assert value(samples, "rank_committed_version", rank="0", node="n0") == 41
    assert value(samples, "rank_up", rank="0", node="n0") == 1 and value(samples, "rank_up", rank="3", node="") == 0
    assert value(samples, "rank_step_seconds", rank="0", node="n0") == 0.125


def test_what_recovery_costs_and_how_old_copies_are(samples: Samples) -> None:
    assert value(samples, "rank_overhead_seconds", rank="0", node="n0") == 0.005
    assert value(samples, "rank_copy_age_seconds", rank="1", node="n0") == 0.375
    assert value(samples, "rank_copy_age_versions", rank="1", node="n0") == 1
    for name in ("seconds", "versions"):
        assert (f"flashrecovery_rank_copy_age_{name}", (("node", "n1"), ("rank", "2"))) not in samples
    assert copy_age(pb.RankStatus(committed=-1, copied=5)) is None, "the rank has no version yet"
    assert copy_age(pb.RankStatus(committed=3, copied=5)) == 0, "it has gone back, and the copy is on its way out"


def test_an_age_goes_on_while_the_agent_is_silent(samples: Samples) -> None:
    assert value(samples, "rank_progress_age_seconds", rank="0", node="n0") == 0.75
    assert value(samples, "rank_progress_age_seconds", rank="2", node="n1") == 9.25
    assert ("flashrecovery_rank_progress_age_seconds", (("node", ""), ("rank", "3"))) not in samples


def test_counts_and_phases(samples: Samples) -> None:
    for kind in ("killed", "hang"):
        assert value(samples, "recoveries_total", cause=kind) == 1
        assert value(samples, "failures_total", kind=kind) == 1
    assert value(samples, "recovery_seconds_count", phase="replace") == 2
    assert value(samples, "recovery_seconds_sum", phase="replace") == pytest.approx(4.3)
    assert value(samples, "recovery_seconds_bucket", phase="replace", le="0.5") == 1
    assert value(samples, "recovery_seconds_bucket", phase="replace", le="+Inf") == 2
    assert value(samples, "recovery_duration_seconds_count") == 2
    assert value(samples, "recovery_duration_seconds_sum") == pytest.approx(2 * sum(FAST.values()) + 3.7)
    assert value(samples, "recovery_bytes_total") == 2 * (3 << 20)


def test_the_checkpoint_s_age(samples: Samples) -> None:
    assert value(samples, "checkpoint_version") == 30
    assert value(samples, "checkpoint_age_versions") == 11
    assert value(samples, "checkpoint_age_seconds") > 0
    ages = [m for m in job_metrics(job(), START + 65) if m.name == "flashrecovery_checkpoint_age_seconds"]
    assert ages[0].samples[0].value == 5.0


def test_without_a_checkpoint_its_metrics_are_absent() -> None:
    facts = job()
    bare = JobFacts(facts.status, facts.nodes, None, None, Tally().counts())
    text = exposition("", bare, None)[0].decode()
    assert "flashrecovery_checkpoint_version" not in text and "worker_tag" not in text
    assert value(scraped(text), "recovery_in_progress_seconds") == 0


def test_what_the_agent_sees(samples: Samples) -> None:
    assert value(samples, "worker_tag", rank="0", node="n0") == 41
    assert value(samples, "worker_progress_total", rank="0", node="n0") == 900
    assert value(samples, "worker_pid", rank="1", node="n0") == 101
    assert value(samples, "worker_overhead_seconds", rank="0", node="n0") == 0.005
    assert value(samples, "worker_kept_version", rank="0", node="n0") == 40
    assert value(samples, "worker_kept_age_seconds", rank="0", node="n0") == 0.375
    assert ("flashrecovery_worker_kept_version", (("node", "n0"), ("rank", "1"))) not in samples
    assert value(samples, "node_standbys", node="n0", node_rank="0", state="ready") == 1
    assert ("flashrecovery_worker_progress_age_seconds", (("node", "n0"), ("rank", "1"))) not in samples


def test_the_own_cost_is_there(samples: Samples) -> None:
    assert samples[("process_cpu_seconds_total", ())] > 0


def test_open_metrics_is_spoken_to_who_asks_for_it() -> None:
    body, content_type = exposition("application/openmetrics-text; version=1.0.0", job(), node())
    assert content_type.startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(body.decode())}
    assert {"flashrecovery_state", "flashrecovery_recoveries", "flashrecovery_recovery_seconds"} <= names


# -- counts from events -----------------------------------------------------------------------------


def tally_of(events: list[ev.Event]) -> Tally:
    tally = Tally()
    for event in events:
        tally.take(event)
    return tally


def test_the_latest_recoveries_are_kept_and_all_are_counted() -> None:
    many = [e for i in range(LATEST + 5) for e in kill(10.0 + i, i + 1, i % 4, i, FAST)]
    counts = tally_of(many).counts()
    assert len(counts.latest) == LATEST and counts.recoveries == {"killed": LATEST + 5}
    assert counts.latest[-1].generation == LATEST + 5
    assert counts.latest[-1].failures[0].evidence == "SIGKILL"


def test_a_recovery_that_ends_the_job_is_in_the_history_and_not_counted() -> None:
    events = [*kill(10, 1, 2, 41, FAST)[:-1], at(11, ev.JobFailed(generation=1, reason="nothing left"))]
    counts = tally_of(events).counts()
    (last,) = counts.latest
    assert not last.finished and last.reason == "nothing left" and last.victims == (2,)
    assert not counts.recoveries and counts.failures == {"killed": 1}


def test_a_failure_before_the_first_step_belongs_to_no_recovery() -> None:
    early = at(1, ev.FailureDetected(rank=0, kind="exit"))
    counts = tally_of([early, *two_recoveries()]).counts()
    assert counts.failures["exit"] == 1
    assert all(f.kind != "exit" for r in counts.latest for f in r.failures)


def test_fallbacks_checkpoints_and_drills_are_counted() -> None:
    recovery = kill(10, 1, 2, 41, FAST)
    fallback = at(10.1, ev.FallbackStarted(generation=1, version=30, path="c"))
    drill = at(9, ev.FaultInjected(rank=2, fault="sigkill"))
    counts = tally_of([drill, *recovery[:3], fallback, *recovery[3:], *two_recoveries()]).counts()
    assert (counts.fallbacks, counts.faults_injected, counts.checkpoints) == (1, 1, 1)
    assert counts.checkpoint_saved_at == START + 60
    assert [r.fallback for r in counts.latest] == [True, False, False]


def test_counts_stay_as_they_are() -> None:
    tally = tally_of(two_recoveries())
    before = tally.counts()
    tally.take(at(80, ev.FailureDetected(rank=0, kind="killed")))
    assert before.failures == {"killed": 1, "hang": 1} and tally.counts().failures["killed"] == 2


def test_bounds_go_up() -> None:
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))
