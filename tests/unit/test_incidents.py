"""Report, metrics and traces are made of one fold of the events: whatever has happened, they tell the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashrecovery import events as ev
from flashrecovery.cli.history import read_history
from flashrecovery.observe.incident import Incidents
from flashrecovery.observe.spans import spans_of
from flashrecovery.observe.tally import LATEST, Tally

RANKS = st.integers(0, 3)
KINDS = st.sampled_from(["killed", "exit", "hang"])


def _made(number: int, event: ev.Event) -> ev.Event:
    return event.model_copy(update={"time": 1e9 + number, "monotonic": float(number)})


HISTORIES = st.lists(
    st.one_of(
        st.builds(ev.JobStarted, world_size=st.just(4)),
        st.builds(ev.FailureDetected, rank=RANKS, kind=KINDS, detect_s=st.sampled_from([0.0, 0.5])),
        st.builds(ev.RecoveryStarted, victims=st.lists(RANKS, max_size=2), cause=KINDS, generation=st.integers(1, 3)),
        st.builds(ev.RecoveryPhase, name=st.sampled_from(["quiesce", "restore"]), seconds=st.sampled_from([0.25, 1.0])),
        st.builds(ev.FallbackStarted, version=st.just(3), path=st.just("c"), reason=st.just("lost")),
        st.builds(
            ev.RecoveryFinished,
            victims=st.lists(RANKS, max_size=2),
            cause=KINDS,
            resume_step=st.integers(0, 9),
            bytes=st.integers(0, 9),
            phases=st.just({"restore": 1.0}),
            total_s=st.sampled_from([1.0, 2.0]),
        ),
        st.builds(ev.Notice, kind=st.sampled_from(["start_again", "redundancy"])),
        st.builds(ev.JobFailed, reason=st.just("no")),
    ),
    max_size=40,
).map(lambda events: [_made(i, event) for i, event in enumerate(events)])


@given(HISTORIES)
def test_report_metrics_and_traces_tell_the_same(events: list[ev.Event]) -> None:
    history, tally = read_history(events), Tally()
    for event in events:
        tally.take(event)
    counts, spans = tally.counts(), spans_of(events)
    over = [r for r in history.recoveries if r.finished]
    assert len(over) == sum(counts.recoveries.values()) and len(counts.latest) == len(spans) <= LATEST
    assert sum(r.bytes for r in over) == counts.bytes
    assert len(history.failures) == sum(counts.failures.values())
    shown = [(r.finished, r.generation, r.victims, r.cause, r.resume_step, r.total_s) for r in counts.latest]
    told = [(r.finished, r.generation, r.victims, r.cause, r.resume_step, r.total_s) for r in history.recoveries]
    assert told[: len(shown)] == shown and len(told) - len(shown) in (0, 1), "the last one may not be over"
    assert [(tuple(s.attributes["flashrecovery.victims"]), bool(s.error)) for s in spans] == [  # type: ignore[arg-type]
        (victims, not finished) for finished, _, victims, *_ in shown
    ]


@given(HISTORIES)
def test_an_incident_is_what_lies_between_its_first_failure_and_its_end(events: list[ev.Event]) -> None:
    """Its end leaves nothing behind: the events after it read as if they were the first."""
    incidents = Incidents()
    found = [incidents.take(event) for event in events]
    for number, incident in enumerate(found):
        if incident is None:
            continue
        ends = [e for e in incident.events if isinstance(e, ev.RecoveryFinished | ev.JobFailed)]
        assert ends == [incident.events[-1]] and not any(isinstance(e, ev.JobStarted) for e in incident.events)
        assert incident.end is events[number]
        fresh = Incidents()
        assert [fresh.take(event) for event in events[number + 1 :]] == found[number + 1 :]
