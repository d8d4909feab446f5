"""``flashrecovery report``: what the log says is what the table, the JSON and the HTML say."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashrecovery import events as ev
from flashrecovery.cli.history import BOUNDS, PHASES, read_history
from flashrecovery.cli.output import bytes_text, count_text, seconds_text
from flashrecovery.cli.report import COLOURS, as_dict, render_html, report
from flashrecovery.errors import ConfigError
from flashrecovery.observe.course import Record
from flashrecovery.observe.goodput import goodput
from tests.support.history_samples import FAST, SLOW, at, kill, two_recoveries


def write_log(run_dir: Path, events: list[ev.Event]) -> Path:
    (run_dir / "events.jsonl").write_text("".join(e.model_dump_json() + "\n" for e in events))
    return run_dir


def test_history_of_a_finished_job() -> None:
    history = read_history(two_recoveries())
    assert (history.state, history.world_size, history.generation) == ("finished", 4, 2)
    assert history.seconds == 70.0 and history.checkpoints == 1 and history.launches == 1
    assert [r.victims for r in history.recoveries] == [(3,), (1,)]
    first, second = history.recoveries
    assert first.phases == FAST and list(first.phases) == [p for p in PHASES if p != "fallback"]
    assert first.at_s == pytest.approx(10.0) and first.total_s == pytest.approx(sum(FAST.values()))
    assert first.largest == second.largest == "replace"
    assert first.failures[0].kind == "killed" and first.failures[0].at_s == pytest.approx(10.0)
    assert second.cause == "hang" and second.phases == SLOW


def test_a_second_failure_belongs_to_the_same_recovery() -> None:
    events = kill(10, 1, 3, 41, FAST)
    again = [
        at(10.1, ev.FailureDetected(generation=1, rank=2, kind="killed", detect_s=0.01)),
        at(10.1, ev.RecoveryStarted(generation=2, victims=[3, 2], cause="killed")),
    ]
    end = events[-1]
    assert isinstance(end, ev.RecoveryFinished)
    events = [*events[:3], *again, *events[3:-1], end.model_copy(update={"generation": 2, "victims": [3, 2]})]
    (recovery,) = read_history(events).recoveries
    assert recovery.victims == (3, 2) and recovery.generation == 2
    assert [f.rank for f in recovery.failures] == [3, 2]


def test_a_job_that_failed_in_a_recovery_shows_it_unfinished() -> None:
    events = [
        at(0, ev.JobStarted(world_size=2)),
        *kill(10, 1, 1, 7, FAST)[:-3],
        at(11, ev.FallbackStarted(generation=1, version=3, path="ckpt/3", reason="no cut")),
        at(12, ev.JobFailed(generation=1, reason="checkpoint unreadable")),
        at(12, ev.StandbyReady(generation=1)),
    ]
    history = read_history(events)
    assert history.state == "failed" and history.reason == "checkpoint unreadable"
    assert history.launches == 1
    (recovery,) = history.recoveries
    assert not recovery.finished and recovery.resume_step == -1 and recovery.victims == (1,)
    assert recovery.fallback == "checkpoint of step 3: no cut"


def test_a_killed_launcher_leaves_a_running_state_and_the_open_recovery() -> None:
    history = read_history([at(0, ev.JobStarted(world_size=2)), *kill(10, 1, 1, 7, FAST)[:3]])
    assert history.state == "recovering"
    assert len(history.recoveries) == 1 and not history.recoveries[0].finished


def test_a_resumed_job_in_the_same_directory_counts_as_a_second_launch() -> None:
    events = [*two_recoveries(), at(100, ev.JobStarted(world_size=2)), *kill(110, 1, 0, 9, FAST)]
    history = read_history(events)
    assert history.launches == 2 and history.state == "running" and history.world_size == 2
    assert len(history.recoveries) == 3


def test_the_terminal_names_every_fact(tmp_path: Path) -> None:
    result = CliRunner().invoke(report, [str(write_log(tmp_path, two_recoveries()))], catch_exceptions=False)
    assert result.exit_code == 0
    for text in (
        "Job finished: 4 ranks, generation 2",
        "2 failures, 2 recoveries",
        "3 (killed)",
        "1 (hang)",
        "3.0 MiB",
        "0.51 s",
        "4.21 s",
        "median",
        "mostly replace",
        "Largest phase: replace",
        "--standby",
    ):
        assert text in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 110


def test_json_has_the_facts_and_the_bound(tmp_path: Path) -> None:
    result = CliRunner().invoke(report, [str(write_log(tmp_path, two_recoveries())), "--json"])
    found = json.loads(result.output)
    history = read_history(two_recoveries())
    share = goodput(two_recoveries())
    course = found.pop("course")
    assert found == json.loads(json.dumps(as_dict(history, share)))
    assert found["goodput"]["share"] == share.share and course["goodput"] == found["goodput"]
    assert [m["victims"] for m in course["recoveries"]] == [[3], [1]]
    assert found["recoveries"][1]["largest_phase"] == "replace"
    assert found["recoveries"][1]["largest_phase_bounded_by"] == BOUNDS["replace"]
    assert found["recoveries"][0]["sources"] == {"0": 2}


def test_no_recovery_and_no_event_are_fine(tmp_path: Path) -> None:
    for events in ([], [at(0, ev.JobStarted(world_size=2))]):
        result = CliRunner().invoke(
            report, [str(write_log(tmp_path, events)), "--html", str(tmp_path / "r.html")], catch_exceptions=False
        )
        assert "No recovery was needed" in result.output
        assert "No recovery was needed" in (tmp_path / "r.html").read_text()


class Page(HTMLParser):
    """Collects the inline pictures, and complains about tags that are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line"):
            assert self.open.pop() == tag


def test_html_is_well_formed_and_draws_every_phase(tmp_path: Path) -> None:
    page_file = tmp_path / "out.html"
    run_dir = write_log(tmp_path, two_recoveries())
    CliRunner().invoke(report, [str(run_dir), "--html", str(page_file)], catch_exceptions=False)
    page = page_file.read_text()
    parser = Page()
    parser.feed(page)
    assert parser.open == []
    pictures = [ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in page.split("<svg")[1:]]
    assert len(pictures) == 3  # goodput, the job over time, and phases
    assert all(p.find("title") is not None or p.get("aria-label") for p in pictures)
    bars = list(pictures[2].iter("rect"))
    assert len(bars) == len(FAST) + len(SLOW)
    assert {r.get("fill") for r in bars} == {COLOURS[p] for p in FAST}
    for bar in bars:
        assert float(bar.get("x", "-1")) >= 0 and float(bar.get("x", "0")) + float(bar.get("width", "0")) <= 1000
    assert "The largest phase is <b>replace</b>" in page and "http" not in page.replace("http-equiv", "")


def test_html_escapes_what_a_worker_said() -> None:
    events = kill(1, 1, 0, 1, FAST)
    first = events[0].model_copy(update={"evidence": "<script>alert(1)</script>"})
    history = read_history([first, *events[1:]])
    record = Record()
    for event in [first, *events[1:]]:
        record.take(event.model_copy(update={"cause": "<script>x"}) if hasattr(event, "cause") else event)
    page = render_html(history, record.course(9.0), "<b>dir</b>")
    assert "<script>" not in page and "<b>dir</b>" not in page


def test_a_directory_without_a_job_and_an_unwritable_html_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        CliRunner().invoke(report, [str(tmp_path)], catch_exceptions=False)
    write_log(tmp_path, two_recoveries())
    with pytest.raises(ConfigError, match="--html"):
        CliRunner().invoke(report, [str(tmp_path), "--html", str(tmp_path / "no" / "x")], catch_exceptions=False)


def test_every_phase_is_explained_and_coloured() -> None:
    assert set(BOUNDS) == set(PHASES) == set(COLOURS)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0041, "4.1 ms"), (0.83, "0.83 s"), (12.44, "12.4 s"), (185, "3 min 05 s"), (7200, "2 h 00 min")],
)
def test_seconds_text(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")])
def test_bytes_text(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_count_text() -> None:
    assert [count_text(n, "failure", "failures") for n in (0, 1, 2)] == ["0 failures", "1 failure", "2 failures"]
