"""What is shown of a job over time: the same on the page, in the terminal and in the report."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from flashrecovery import events as ev
from flashrecovery.cli.course import render_course
from flashrecovery.cli.history import read_history
from flashrecovery.cli.report import render_html, report
from flashrecovery.observe.course import LATEST, Coming, Course, Record, RecoveryMark, Wait, course_of, slowest_of
from flashrecovery.observe.picture import picture_of, pictures, standalone
from flashrecovery.observe.timeline import Sample, Timeline, band_of
from tests.support.history_samples import FAST, at, kill, two_recoveries
from tests.support.observe_samples import lived

CLASSES = re.compile(r'class="([^"]+)"')


def svgs(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in html.split("<svg")[1:]]


def text_of(course: Course) -> str:
    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_course(course))
    return console.export_text()


def test_everybody_says_the_same(tmp_path: Path) -> None:
    record = lived()
    live = record.course(70.0, "finished")
    events = [at(0, ev.ControllerStarted(world_size=4)), *two_recoveries()]
    (tmp_path / "events.jsonl").write_text("".join(e.model_dump_json() + "\n" for e in events))
    (tmp_path / "timeline.json").write_text(record.timeline.file().model_dump_json())
    left = course_of(ev.RunFiles(tmp_path))
    assert left == live == Course.model_validate_json(live.model_dump_json())
    history = read_history(events)
    assert [m.at_s for m in left.recoveries] == pytest.approx([r.at_s for r in history.recoveries], abs=1e-6)
    assert [m.total_s for m in left.recoveries] == [r.total_s for r in history.recoveries]
    parts = [v for k, v in left.goodput.items() if k.endswith("_s") and k != "wall_s"]
    assert sum(v or 0.0 for v in parts) == pytest.approx(left.goodput["wall_s"])
    text, page = text_of(left), render_html(history, left, "x")
    assert "Goodput 86.10%" in text and "Goodput 86.10 %" in page and "86.10 %</b>goodput" in page
    assert "2 recoveries" in text and text.count("▲") == 2 and "20,480" in text and "0.20 s" in text
    for mark in left.recoveries:
        assert f"resumed at step {mark.resume_step}" in page
    result = CliRunner().invoke(report, [str(tmp_path)], catch_exceptions=False)
    assert all(line in result.output for line in text.splitlines() if line.strip())


def test_the_picture_is_well_formed_named_and_needs_nothing_from_elsewhere() -> None:
    course = lived().course(70.0)
    found = svgs(pictures(course))
    assert len(found) == 2
    for svg in found:
        title = svg.find("title")
        assert title is not None and title.text and title.get("id") in str(svg.get("aria-labelledby"))
        assert "style" not in svg.attrib and not list(svg.iter("script")) and not list(svg.iter("image"))
    described = found[1].find("desc")
    assert described is not None and "resumed at step 41" in str(described.text)
    assert "http" not in pictures(course)
    paths = [p for p in found[1].iter("path") if p.get("class") != "flag"]
    assert {p.get("class") for p in paths} == {"band", "line", "rank r0", "rank r1", "rank r2", "rank r3"}
    for path in paths:
        numbers = [float(n) for n in re.findall(r"-?\d+\.?\d*", path.get("d") or "")]
        assert numbers and all(0 <= n <= 1000 for n in numbers), path.get("d")
    alone = ElementTree.fromstring(standalone(course))
    assert alone.tag == "{http://www.w3.org/2000/svg}svg"


def test_eighteen_thousand_ranks_are_a_band() -> None:
    course = lived(ranks=18_000).course(70.0)
    assert course.whole.ranks == [] and set(course.whole.own_most_rank) == {17_999}
    assert "rank r" not in pictures(course) and len(pictures(course)) < 60_000
    assert len(course.model_dump_json()) < 60_000
    slow = slowest_of(dict.fromkeys(range(18000), 0.1) | {7: 0.5, 8: 0.4}, {7: 1.0})
    assert [(s.rank, s.own_s, s.step_s) for s in slow[:2]] == [(7, 0.5, 1.0), (8, 0.4, 0.0)] and len(slow) == 8


def test_a_thousand_recoveries_are_counted_and_the_newest_drawn() -> None:
    record = Record()
    record.take(at(0, ev.JobStarted(world_size=4)))
    for i in range(1000):
        for event in kill(10.0 * (i + 1), i + 1, i % 4, i, FAST):
            record.take(event)
    course = record.course(10_100.0)
    assert course.recovered == 1000 and len(course.recoveries) == LATEST
    assert course.goodput["recovery_s"] == pytest.approx(1000 * sum(FAST.values()))
    assert len(picture_of(course).marks) <= LATEST and len(pictures(course)) < 300_000


def test_what_is_going_on_now_is_drawn_to_its_end() -> None:
    record = Record()
    record.take(at(0, ev.ControllerStarted()))
    (launch,) = record.course(7.0).idle
    assert (launch.kind, launch.begin_s, launch.end_s) == ("launch", 0.0, 7.0)
    record.take(at(10, ev.JobStarted()))
    for event in kill(20, 1, 3, 41, FAST)[:3]:
        record.take(event)
    course = record.course(25.0)
    (mark,) = course.recoveries
    assert (mark.at_s, mark.total_s, mark.victims) == (pytest.approx(20.0), pytest.approx(5.0), [3])
    assert course.goodput["recovery_s"] == pytest.approx(5.0) and course.recovered == 0
    assert "not over" in pictures(course)


def test_a_job_without_a_step_and_one_without_anything() -> None:
    record = Record()
    assert text_of(record.course(0.0)).strip() == "" and "<svg" not in pictures(record.course(0.0))
    record.take(at(0, ev.ControllerStarted(world_size=2)))
    record.take(at(30, ev.JobFailed(reason="no")))
    course = record.course(30.0)
    assert course.goodput["launch_s"] == 30.0 and course.version == -1 and course.state == "failed"
    assert "Goodput 0.00%: of 30.0 s, 30.0 s launch" in text_of(course) and len(svgs(pictures(course))) == 2


def test_a_job_of_any_length_is_drawn() -> None:
    """From its first second on, also where little of it has been looked at."""
    for seconds in (*range(1, 130), 1000, 3599, 3601, 7300):
        for looked_from in (0, seconds // 2, seconds - 1):
            record = Record()
            record.take(at(0, ev.ControllerStarted(world_size=1)))
            record.take(at(0.5, ev.JobStarted()))
            for at_s in range(looked_from, seconds):
                record.timeline.add(Sample(float(at_s), 1.0, at_s, 0, band_of({0: 0.1})))
            course = record.course(float(seconds))
            drawn = "since launch" in text_of(course) or "the last hour" in text_of(course)
            assert drawn or looked_from or seconds < 5
            svgs(pictures(course))


def test_a_long_job_shows_its_last_hour_apart() -> None:
    record = Record()
    record.take(at(0, ev.JobStarted()))
    for at_s in range(0, 20_000, 10):
        record.timeline.add(Sample(float(at_s), 10.0, at_s, 0, band_of({0: 1.0})))
    course = record.course(20_000.0)
    assert [p.get("viewBox") is not None for p in svgs(pictures(course))] == [True] * 3
    assert "The last hour" in pictures(course) and "the last hour" in text_of(course)
    assert picture_of(course, recent=True).ticks[0][1] != "0"


def test_one_long_step_does_not_flatten_the_others() -> None:
    timeline = Timeline()
    for second in range(200):
        timeline.add(Sample(float(second), 1.0, second, 0, band_of({0: 60.0 if second == 3 else 0.5})))
    record = Record(timeline)
    record.take(at(0, ev.JobStarted()))
    panel = picture_of(record.course(200.0)).panels[0]
    assert panel.note == "highest 60.0 s" and panel.ticks[-1][1] in ("0.75 s", "0.80 s", "1.00 s")


def test_what_is_waited_for_is_said_and_escaped() -> None:
    wait = Wait(what="3 of 4 ranks to come to their first step", seconds=75.0, ranks=3, rank=1, where="<b>x.py:3")
    course = lived().course(70.0).model_copy(update={"waiting": [wait]})
    assert "3 of 4 ranks to come to their first step, for 75.0 s: rank 1 at &lt;b&gt;x.py:3" in pictures(course)
    assert "Waiting for 3 of 4 ranks to come to their first step, for 75.0 s: rank 1 at <b>x.py:3" in text_of(course)


def test_a_name_of_a_script_is_no_markup() -> None:
    mark = RecoveryMark(at_s=1.0, total_s=1.0, victims=[1], cause="<script>alert(1)</script>")
    course = lived().course(70.0).model_copy(update={"recoveries": [mark]})
    assert "<script>" not in pictures(course) and "<script>" not in standalone(course)


def test_every_class_has_a_colour() -> None:
    course = lived().course(70.0)
    styles = standalone(course)
    used = {name for text in CLASSES.findall(pictures(course)) for name in text.split()}
    missing = {name for name in used - {"course", "rank"} if f".{name}" not in styles}
    assert missing == set()


def elastic(seconds: float = 100.0) -> Record:
    """Four replicas, three from 20 s on, two from 30 s on, four again from 70 s on; looked at each second."""
    record = Record()
    record.take(at(0, ev.ControllerStarted(world_size=4)))
    record.take(at(0, ev.JobStarted(world_size=4)))
    changes = {
        20: ev.JobResized(step=20, before=4, replicas=3, ranks=[0, 2, 3], left=[1]),
        30: ev.JobResized(step=30, before=3, replicas=2, ranks=[0, 2], left=[3]),
        70: ev.JobResized(step=70, before=2, replicas=4, ranks=[0, 1, 2, 3], came=[1, 3]),
    }
    for second in range(int(seconds)):
        if second in changes:
            record.take(at(second, changes[second]))
        record.timeline.add(Sample(float(second), 1.0, second, 0, band_of({0: 0.1})))
    return record


def test_a_job_that_changes_its_size_shows_it_over_time(tmp_path: Path) -> None:
    record = elastic()
    course = record.course(100.0)
    assert [(s.at_s, s.step, s.replicas) for s in course.sizes] == [(0, -1, 4), (20, 20, 3), (30, 30, 2), (70, 70, 4)]
    assert course.world_size == 4 and Course.model_validate_json(course.model_dump_json()) == course
    page, text = pictures(course), text_of(course)
    assert "at 20.0 s: 3 replicas from step 20 on, without rank 1" in page
    assert "at 70.0 s: 4 replicas from step 70 on, with ranks 1 and 3" in page
    assert "replicas 4, then 3, then 2, then 4" in page
    panel = picture_of(course).panels[-1]
    assert panel.title == "data-parallel replicas" and [text for _, text in panel.ticks] == ["0", "2", "4"]
    corners = re.findall(r"[ML]([\d.]+) ([\d.]+)", panel.lines[0].path)
    heights = [float(y) for _, y in corners]
    full, none = panel.ticks[2][0], panel.ticks[0][0]
    assert heights == pytest.approx([none + (full - none) * n / 4 for n in (4, 4, 3, 3, 2, 2, 4, 4)], abs=0.06)
    assert [float(x) for x, _ in corners[1::2]] == [float(x) for x, _ in corners[2::2]] + [float(corners[-1][0])]
    line = next(line for line in text.splitlines() if line.startswith("replicas"))
    assert line.endswith(" 4")
    cells = line.removeprefix("replicas").strip().split(" ")[0]
    assert list(dict.fromkeys(cells)) == ["█", "▆", "▅"] and cells[-1] == "█"


def test_a_change_that_takes_place_at_another_step_than_was_said() -> None:
    """The checkpoint for it was damaged, and the one before it was read."""
    record = elastic()
    record.take(at(101, ev.JobResized(step=40, before=4, replicas=4, ranks=[0, 1, 2, 3])))
    sizes = record.course(102.0).sizes
    assert [(s.at_s, s.step, s.replicas) for s in sizes] == [(0, -1, 4), (20, 20, 3), (30, 30, 2), (70, 40, 4)]
    assert sizes[-1].came == [1, 3]


def test_the_last_hour_begins_with_the_size_that_the_job_had_then() -> None:
    record = Record()
    record.take(at(0, ev.JobStarted(world_size=4)))
    record.take(at(50, ev.JobResized(step=5, before=4, replicas=3, ranks=[0, 1, 2], left=[3])))
    for at_s in range(0, 20_000, 10):
        record.timeline.add(Sample(float(at_s), 10.0, at_s, 0, band_of({0: 1.0})))
    recent = picture_of(record.course(20_000.0), recent=True).panels[-1]
    heights = {float(y) for _, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", recent.lines[0].path)}
    assert recent.title == "data-parallel replicas" and len(heights) == 1 and recent.ticks[-1][1] == "3"


def test_a_job_that_keeps_its_size_has_no_word_of_it() -> None:
    record = lived()
    assert len(record.course(70.0).sizes) == 1
    record.take(at(71, ev.ControllerStarted(world_size=4)))  # one that takes over
    record.take(at(72, ev.JobStarted(world_size=4)))  # or the next launch
    course = record.course(73.0)
    assert len(course.sizes) == 1 and "replicas" not in pictures(course) + text_of(course)


def test_another_launch_in_the_directory_may_have_another_size() -> None:
    record = lived()
    record.take(at(80, ev.ControllerStarted(world_size=3)))
    record.take(at(82, ev.JobStarted(world_size=3)))
    course = record.course(90.0)
    assert [size.replicas for size in course.sizes] == [4, 3] and "3 replicas at the launch" in pictures(course)


def test_a_layout_with_experts_has_replicas_of_several_data_parallel_ranks() -> None:
    record = Record()
    record.take(at(0, ev.JobStarted(world_size=4, replicas=4)))
    changed = ev.JobReplanned(step=5, before="tp=1,pp=1,dp=4", layout="tp=1,pp=1,ep=2,dp=4", ranks=4, bytes=1, why=[])
    record.take(at(5, changed))
    record.take(at(9, ev.JobResized(step=9, before=2, replicas=1, ranks=[0, 1], left=[2, 3])))
    assert [size.replicas for size in record.course(10.0).sizes] == [4, 2, 1]


def test_a_controller_that_takes_over_does_not_bring_back_who_has_left() -> None:
    record = elastic(60)
    record.take(at(61, ev.ControllerStarted(world_size=4)))
    record.take(at(61, ev.Notice(kind="taken_over")))
    assert record.course(62.0).world_size == 2


def test_who_is_on_the_way_is_named() -> None:
    coming = [Coming(rank=1, node="n2", here=False, left_s=12.0), Coming(rank=3, node="n1", here=True, left_s=3.0)]
    course = elastic(60).course(60.0).model_copy(update={"coming": coming})
    for shown in (pictures(course), text_of(course)):
        assert "rank 1 on n2: it has 12.0 s to get to its first step" in shown
        assert "rank 3 on n1: it waits for the others" in shown


@pytest.mark.parametrize(("state", "expected"), [("running", 7 * 20 / 25), ("finished", 7.0)])
def test_a_rate_is_what_was_committed_by_the_time_that_passed(state: str, expected: float) -> None:
    """Not one by the time of a step: here a step takes 21 ms, and 0.12 s lie between two. A launch of 40 s does not
    count; a standstill does, unless the job has ended since."""
    record = Record()
    record.timeline.serve(0.0, 0.0)
    record.timeline.went_to(0)
    for second in range(65):
        version = 7 * min(max(second - 39, 0), 20)
        record.timeline.add(Sample(float(second), 1.0, version, 100, band_of({0: 0.021})))
    course = record.course(65.0, state)
    assert course.steps_per_s == pytest.approx(expected)
    assert course.tokens_per_s == pytest.approx(100 * expected)
    assert Course().steps_per_s == 0.0
