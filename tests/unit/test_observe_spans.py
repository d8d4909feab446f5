"""A trace of each recovery: spans from events, and as OpenTelemetry records them."""

from __future__ import annotations

import builtins
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flashrecovery import events as ev
from flashrecovery.config import ObserveSettings, load_run_config
from flashrecovery.errors import ConfigError
from flashrecovery.events import EventLog
from flashrecovery.observe import Observer
from flashrecovery.observe.incident import Incident
from flashrecovery.observe.spans import Span, span_of, spans_of
from tests.support.history_samples import FAST, SLOW, START, at, kill, two_recoveries


def check_times(span: Span, expected: dict[str, tuple[float, float]]) -> None:
    found = {child.name: (child.start_s, child.end_s) for child in span.children}
    assert list(found) == list(expected)
    for name, (start, end) in expected.items():
        assert found[name] == pytest.approx((start, end), abs=1e-6), name


def test_one_span_a_recovery_and_one_a_phase() -> None:
    first, second = spans_of(two_recoveries())
    assert (first.start_s, first.end_s) == pytest.approx((START + 10, START + 10 + sum(FAST.values())), abs=1e-6)
    expected, t = {}, START + 10
    for name, seconds in FAST.items():
        expected[name] = (t, t + seconds)
        t += seconds
    # the sample log has a redo event, too; a controller writes none for the last phase
    without_redo = [e for e in kill(10, 1, 3, 41, FAST) if getattr(e, "name", "") != "redo"]
    check_times(span_of(Incident(tuple(without_redo))), expected)
    assert first.attributes["flashrecovery.victims"] == [3]
    assert first.attributes["flashrecovery.resume_step"] == 41
    assert first.attributes["flashrecovery.bytes"] == 3 << 20
    assert first.attributes["flashrecovery.cause"] == "killed" and first.attributes["flashrecovery.generation"] == 1
    assert second.end_s - second.start_s == pytest.approx(sum(SLOW.values()))
    assert not first.error and [m.name for m in first.moments] == ["failure_detected", "recovery_started"]


def test_a_failure_in_the_middle_is_in_the_same_trace() -> None:
    one, two = kill(10, 1, 3, 41, FAST), kill(10.2, 2, 0, 41, FAST)
    events = one[:3] + two[:-1] + [two[-1].model_copy(update={"victims": [3, 0]})]
    (span,) = spans_of(events)
    assert [c.name for c in span.children].count("quiesce") == 2
    assert span.start_s == pytest.approx(START + 10)
    assert span.attributes["flashrecovery.victims"] == [3, 0] and span.attributes["flashrecovery.generation"] == 2


def test_a_step_of_the_clock_bends_nothing() -> None:
    events = kill(10, 1, 3, 41, FAST)
    bent = [e.model_copy(update={"time": e.time + 3600}) for e in events[:2]] + events[2:]
    assert spans_of(bent) == spans_of(events)


def test_a_recovery_that_ends_the_job_is_an_error() -> None:
    events = [*kill(10, 1, 2, 41, FAST)[:-2], at(12, ev.JobFailed(generation=1, reason="nothing left"))]
    (span,) = spans_of(events)
    assert span.error == "nothing left" and span.children[-1].name == "given up"
    assert span.end_s == pytest.approx(START + 12)


def test_failures_without_a_recovery_make_no_span() -> None:
    early = at(1, ev.FailureDetected(rank=0, kind="exit"))
    again = at(1.1, ev.Notice(kind="start_again", text="exit"))
    spans = spans_of([early, again, *two_recoveries()])
    assert len(spans) == 2 and spans[0].start_s == pytest.approx(START + 10)
    assert spans_of([early, at(2, ev.JobFailed(reason="no"))]) == []


def test_spans_as_open_telemetry_has_them(tmp_path: Path) -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from flashrecovery.observe.otel import RecoveryTracer

    exporter = InMemorySpanExporter()
    tracer = RecoveryTracer(SimpleSpanProcessor(exporter), "/runs/a")
    with EventLog(tmp_path / "events.jsonl") as log:
        log.subscribe(tracer.take)
        for event in two_recoveries():
            log.write(event)  # with the present time
        tracer.take(at(0, ev.JobStarted()))
    for event in two_recoveries():
        tracer.take(event)
    spans = exporter.get_finished_spans()
    roots = [s for s in spans if s.parent is None]
    assert [r.name for r in roots] == ["recovery"] * 4 and len({r.context.trace_id for r in roots}) == 4
    root = roots[2]
    children = [s for s in spans if s.parent is not None and s.parent.span_id == root.context.span_id]
    assert [c.name for c in children][: len(FAST)] == list(FAST)
    assert root.start_time / 1e9 == pytest.approx(START + 10, abs=1e-3)
    (replace,) = [c for c in children if c.name == "replace"]
    assert (replace.end_time - replace.start_time) / 1e9 == pytest.approx(FAST["replace"], abs=1e-3)
    assert replace.context.trace_id == root.context.trace_id
    assert root.attributes["flashrecovery.victims"] == (3,)
    assert root.resource.attributes["service.name"] == "flashrecovery"
    assert root.events[0].name == "failure_detected" and root.events[0].attributes["flashrecovery.kind"] == "killed"
    assert tracer.close()


def test_nobody_answers_and_the_end_does_not_wait() -> None:
    from flashrecovery.observe.otel import RecoveryTracer, otlp_processor

    tracer = RecoveryTracer(otlp_processor("http://127.0.0.1:9"), "/runs/a")
    for event in two_recoveries():
        tracer.take(event)
    began = time.monotonic()
    tracer.close()
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_the_collector_s_base_url_is_enough(endpoint: str, url: str) -> None:
    from flashrecovery.observe.otel import traces_url

    assert traces_url(endpoint) == url


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    for name in [n for n in sys.modules if n.startswith("opentelemetry") or n == "flashrecovery.observe.otel"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with EventLog(tmp_path / "e") as log:
        observer = Observer(ObserveSettings(otlp_endpoint="http://c:4318"), log=log)
        with pytest.raises(ConfigError, match=r"otlp_endpoint.*flashrecovery\[otel\]"):
            asyncio.run(observer.start())


@pytest.mark.parametrize("wrong", [{"port": 70000}, {"port": -1}, {"host": ""}, {"otlp_endpoint": "collector:4318"}])
def test_wrong_settings_are_named(wrong: dict[str, Any]) -> None:
    (key,) = wrong
    with pytest.raises(ConfigError, match=f"observe.{key}"):
        load_run_config(None, {"observe": wrong})
