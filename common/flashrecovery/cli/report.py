"""``flashrecovery report``: every recovery of a job, phase by phase, as a table, as JSON, and as an HTML
timeline."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flashrecovery.cli.course import render_course
from flashrecovery.cli.history import BOUNDS, PHASES, JobHistory, RecoveryRecord, read_history
from flashrecovery.cli.output import bytes_text, count_text, make_console, seconds_text
from flashrecovery.errors import ConfigError
from flashrecovery.events import RunFiles
from flashrecovery.observe.course import Course, course_of, record_of
from flashrecovery.observe.goodput import Goodput
from flashrecovery.observe.picture import pictures, style
from flashrecovery.plan.words import step_text

# Eight hues that stay apart for colour-blind readers (Okabe and Ito), by phase; rich and HTML use the same.
COLOURS: dict[str, str] = dict(
    zip(PHASES, ("#d55e00", "#e69f00", "#0072b2", "#999999", "#56b4e9", "#009e73", "#cc79a7", "#b5a900"), strict=True)
)
_BAR = 64
_LINES = 5
_SLOW_LAUNCH_S = 1.0


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path), default=None, help="Write an HTML timeline to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def report(run_dir: Path, html: Path | None, as_json: bool) -> None:
    """Show every recovery of the job in RUN_DIR, phase by phase."""
    files = RunFiles(run_dir)
    record = record_of(files)
    history, share = read_history(files.events()), record.ledger.look(record.seen_s)
    course = course_of(files, record)
    if html is not None:
        _write_html(html, render_html(history, course, str(run_dir)))
    if as_json:
        click.echo(json.dumps({**as_dict(history, share), "course": course.model_dump()}, indent=2))
        return
    console = make_console()
    console.print(render_text(history, course))
    if html is not None:
        console.print(f"Timeline written to {escape(str(html))}", highlight=False)


def as_dict(history: JobHistory, share: Goodput) -> dict[str, Any]:
    """The history as plain data; each recovery also names its largest phase and what bounds it."""
    plain = dataclasses.asdict(history)
    plain["goodput"] = share.as_dict()
    for record, entry in zip(history.recoveries, plain["recoveries"], strict=True):
        entry["largest_phase"] = record.largest
        entry["largest_phase_bounded_by"] = BOUNDS.get(record.largest, "")
        if record.restore is not None:
            entry["restore"] = record.restore.as_dict()
    return plain


# -- terminal -------------------------------------------------------------------------------------


def render_text(history: JobHistory, course: Course) -> Group:
    """Headline, the course over time, table and one phase bar a recovery."""
    parts: list[Any] = [_headline(history)]
    if course.seconds > 0:
        parts.append(render_course(course))
    parts += _lines("Slowest lines of the script before its first step, at launch:", launch_lines(history))
    if not history.recoveries:
        parts.append(Text("No recovery was needed."))
        return Group(*parts)
    parts.append(_table(history.recoveries))
    longest = max(r.total_s for r in history.recoveries)
    for number, record in enumerate(history.recoveries, 1):
        parts.append(_bar(number, record, longest))
    parts.append(_legend(history.recoveries))
    finished = [r for r in history.recoveries if r.finished and r.phases]
    if finished:
        name, part = largest_phase(finished)
        parts.append(
            Text(f"Largest phase: {name} ({part:.0%} of all recovery time). Bounded by {BOUNDS.get(name, '?')}.")
        )
        parts += [Text(line) for line in restore_lines(history.recoveries)]
        parts += _lines("Slowest lines of the script before its first step, in a replacement:", starts(finished))
    return Group(*parts)


def restore_lines(recoveries: Sequence[RecoveryRecord]) -> list[str]:
    """How fast state came back in each recovery that had more than a little of it, beside what bounds that."""
    lines = []
    for number, record in enumerate(recoveries, 1):
        if (restore := record.restore) is None:
            continue
        text = f"Restore of #{number}: {bytes_text(round(restore.speed))}/s to a rank"
        bound = f"{bytes_text(round(restore.bound))}/s, of which this is {restore.speed / (restore.bound or 1.0):.0%}"
        match restore.bounded_by:
            case "link":
                text += f"; the network link is made for {bound}"
            case "copy":
                text += f"; one thread of the host copies {bound}"
        lines.append(text + ".")
    return lines


def starts(recoveries: Sequence[RecoveryRecord]) -> list[tuple[float, str, str]]:
    """Where replacements spent their time before their first step: median seconds, file and number, text."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for record in recoveries:
        for where, text, once in record.start:
            seconds.setdefault((where, text), []).append(once)
    longest = sorted(seconds.items(), key=lambda item: -sum(item[1]))[:_LINES]
    return [(statistics.median(took), where, text) for (where, text), took in longest]


def launch_lines(history: JobHistory) -> list[tuple[float, str, str]]:
    """The same of the newest launch's slowest rank; none where that was quick."""
    lines = [(took, where, text) for where, text, took in history.start]
    return lines if sum(took for took, *_ in lines) >= _SLOW_LAUNCH_S else []


def _lines(title: str, found: Sequence[tuple[float, str, str]]) -> list[Any]:
    if not found:
        return []
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", no_wrap=True)
    for took, where, text in found:
        table.add_row(seconds_text(took), escape(where), escape(text))
    return [Text(title), table]


def _headline(history: JobHistory) -> Text:
    ranks = f"{history.world_size} ranks, " if history.world_size else ""
    text = Text(f"Job {history.state}: {ranks}generation {history.generation}, {seconds_text(history.seconds)}, ")
    text.append(count_text(len(history.failures), "failure", "failures") + ", ")
    text.append(count_text(len(history.recoveries), "recovery", "recoveries"))
    if history.launches > 1:
        text.append(f", {history.launches} launches in this directory")
    if history.reason:
        text.append(f"\nReason: {history.reason}", style="red")
    return text


def _table(recoveries: Sequence[RecoveryRecord]) -> Table:
    shown = [p for p in PHASES if any(p in r.phases for r in recoveries)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("#", "gen", "victims", "resumed", "bytes"):
        table.add_column(column, justify="left" if column == "victims" else "right", overflow="fold")
    for phase in shown:
        table.add_column(phase, justify="right", style=COLOURS[phase], no_wrap=True)
    table.add_column("total", justify="right", style="bold", no_wrap=True)
    for number, r in enumerate(recoveries, 1):
        number_of = str(r.resume_step) if r.iteration < 0 else f"it. {r.iteration}"
        resumed = number_of + (" (ckpt)" if r.fallback else "") if r.finished else "unfinished"
        table.add_row(
            str(number),
            str(r.generation),
            escape(victims_text(r)),
            resumed,
            bytes_text(r.bytes),
            *(seconds_text(r.phases[p]) if p in r.phases else "-" for p in shown),
            seconds_text(r.total_s),
        )
    finished = [r for r in recoveries if r.finished]
    if len(finished) > 1:
        for name, of in (("median", statistics.median), ("worst", max)):
            cells = [seconds_text(of([r.phases.get(p, 0.0) for r in finished])) for p in shown]
            table.add_row("", "", name, "", "", *cells, seconds_text(of([r.total_s for r in finished])), style="dim")
    return table


def victims_text(record: RecoveryRecord) -> str:
    """``3 (killed), 1 (hang)``: every failed rank with the kind of its last failure."""
    kinds = {f.rank: f.kind for f in record.failures}
    return ", ".join(f"{rank} ({kinds.get(rank) or record.cause})" for rank in record.victims) or record.cause


def _bar(number: int, record: RecoveryRecord, longest: float) -> Text:
    text = Text(f"{number:>3} ")
    done = drawn = 0.0
    for phase, seconds in record.phases.items():
        done += seconds
        cells = round(_BAR * done / longest) - round(drawn) if longest > 0 else 0
        text.append("█" * cells, style=COLOURS.get(phase, "white"))
        drawn += cells
    share = record.phases.get(record.largest, 0.0) / record.total_s if record.total_s > 0 else 0.0
    text.append(f" {seconds_text(record.total_s)}")
    if record.largest:
        text.append(f", mostly {record.largest} ({share:.0%})", style="dim")
    return text


def _legend(recoveries: Sequence[RecoveryRecord]) -> Text:
    text = Text("    ")
    for phase in PHASES:
        if any(phase in r.phases for r in recoveries):
            text.append("█ ", style=COLOURS[phase])
            text.append(f"{phase}  ")
    return text


def largest_phase(recoveries: Sequence[RecoveryRecord]) -> tuple[str, float]:
    """The phase with the largest sum over all recoveries, and its share of all their phases."""
    sums: dict[str, float] = {}
    for r in recoveries:
        for phase, seconds in r.phases.items():
            sums[phase] = sums.get(phase, 0.0) + seconds
    name = max(sums, key=lambda p: sums[p])
    whole = sum(sums.values())
    return name, sums[name] / whole if whole > 0 else 0.0


# -- HTML -----------------------------------------------------------------------------------------


def render_html(history: JobHistory, course: Course, title: str) -> str:
    """One self-contained page: the job over time, and each recovery's phases to a common scale."""
    from jinja2 import Environment
    from markupsafe import Markup

    template = resources.files("flashrecovery.cli").joinpath("templates/report.html").read_text()
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(seconds=seconds_text, bytes=bytes_text, step=step_text)
    finished = [r for r in history.recoveries if r.finished and r.phases]
    name, share = largest_phase(finished) if finished else ("", 0.0)
    return environment.from_string(template).render(
        title=title,
        history=history,
        course=course,
        pictures=Markup(pictures(course)),
        style=Markup(style()),
        started=time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(history.started)) if history.started else "",
        recoveries=[_html_recovery(i, r) for i, r in enumerate(history.recoveries, 1)],
        phases=[p for p in PHASES if any(p in r.phases for r in history.recoveries)],
        colours=COLOURS,
        bounds=BOUNDS,
        longest=max((r.total_s for r in history.recoveries), default=0.0) or 1.0,
        starts=starts(finished),
        restores=restore_lines(history.recoveries),
        launch_lines=launch_lines(history),
        ticks=_ticks(max((r.total_s for r in history.recoveries), default=0.0)),
        largest=name,
        share=share,
        median=statistics.median([r.total_s for r in finished]) if finished else None,
    )


def _html_recovery(number: int, record: RecoveryRecord) -> dict[str, Any]:
    start, segments = 0.0, []
    for phase, seconds in record.phases.items():
        segments.append({"phase": phase, "start": start, "seconds": seconds})
        start += seconds
    return {"number": number, "victims": victims_text(record), "segments": segments, "r": record}


def _ticks(longest: float) -> list[float]:
    """Round values for the time axis, at most seven."""
    if longest <= 0:
        return []
    step = 10.0**-6
    for factor in (m * 10.0**e for e in range(-4, 6) for m in (1, 2, 5)):
        step = factor
        if longest / step <= 6:
            break
    return [round(i * step, 9) for i in range(int(longest / step) + 1)]


def _write_html(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--html {path}: {e.strerror}") from e
