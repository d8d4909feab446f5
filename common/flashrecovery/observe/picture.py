"""The course of a job as pictures: SVG without anything from elsewhere, in which colours are classes, so that page and
report show it light or dark. Every picture has a title and a text description."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from flashrecovery.observe.course import HOUR_S, Coming, Course, RecoveryMark, Size, coarser, shows_last_hour
from flashrecovery.observe.goodput import PARTS
from flashrecovery.observe.quantities import count_text, rate_text, seconds_text
from flashrecovery.observe.timeline import Columns
from flashrecovery.plan.words import ranks_text, step_text

WIDTH, LEFT, RIGHT = 1000.0, 74.0, 14.0
_TOP, _PANEL, _GAP, _STRIP = 20.0, 92.0, 26.0, 14.0
_NEAR = 3.0
"""Recoveries that would be so close to each other in the picture are drawn as one."""
_NAMED = 10
_COLUMNS = 240

PART_TEXT = {
    "trained": "training that led to committed steps",
    "launch": "launch: from the start to the first step",
    "recovery": "recoveries",
    "checkpoint": "held up by checkpoints",
    "repeated": "steps done again after going back to a checkpoint",
    "down": "between launches",
}
_ROUND_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)


@dataclass(frozen=True)
class Line:
    """A path in the picture, and the class that colours it."""

    kind: str
    path: str


@dataclass(frozen=True)
class Panel:
    """One diagram over time. ``top``: its upper edge; ``ticks``: (y, text); ``note``: what does not fit."""

    title: str
    top: float
    lines: tuple[Line, ...]
    ticks: tuple[tuple[float, str], ...]
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """Something that lasted for a time: x, width, CSS class, and the text shown on hover."""

    x: float
    width: float
    kind: str
    text: str


@dataclass(frozen=True)
class Picture:
    """Panels over one time axis, with a strip of what was going on below."""

    name: str
    title: str
    text: str
    panels: tuple[Panel, ...]
    strip: tuple[Bar, ...]
    marks: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]

    @property
    def strip_top(self) -> float:
        return _TOP + len(self.panels) * (_PANEL + _GAP)

    @property
    def height(self) -> float:
        return self.strip_top + _STRIP + 20


@dataclass(frozen=True)
class _Scale:
    """The scale of the time axis: from ``begin`` to ``end`` in seconds of the job's clock."""

    begin: float
    end: float

    def x(self, at: float) -> float:
        share = (min(max(at, self.begin), self.end) - self.begin) / max(self.end - self.begin, 1e-9)
        return LEFT + share * (WIDTH - LEFT - RIGHT)


def picture_of(course: Course, *, recent: bool = False) -> Picture:
    """The picture of the whole job, or of its last hour."""
    scale = _Scale(max(course.seconds - HOUR_S, 0.0) if recent else 0.0, max(course.seconds, 1e-3))
    columns = course.recent if recent else course.whole
    panels: list[Panel] = []
    for diagram in (*_diagrams(columns, course), *_size_diagram(course, scale)):
        top = _TOP + len(panels) * (_PANEL + _GAP)
        panels.append(_panel(diagram, top, scale))
    name = "recent" if recent else "whole"
    title = "The last hour" if recent else "The whole job"
    marks = [m for m in course.recoveries if m.at_s + m.total_s >= scale.begin]
    strip = [Bar(LEFT, WIDTH - LEFT - RIGHT, "trained", "training")]
    strip += [
        _bar(scale, i.begin_s, i.end_s - i.begin_s, i.kind, f"{i.kind} {seconds_text(i.end_s - i.begin_s)}")
        for i in course.idle
        if i.end_s > scale.begin
    ]
    strip += [_bar(scale, m.at_s, m.total_s, "recovery", mark_text(m)) for m in _together(scale, marks)]
    return Picture(
        name,
        title,
        _alternative_text(course, marks),
        tuple(panels),
        tuple(strip),
        tuple(_lines(scale, marks)),
        _times(scale),
    )


def mark_text(mark: RecoveryMark) -> str:
    """``at 12.0 s: rank 1 (killed), 0.42 s, resumed at step 30``."""
    shown = ", ".join(map(str, mark.victims[:4])) + (f" and {len(mark.victims) - 4} more" if mark.victims[4:] else "")
    ranks = f"rank {shown} ({mark.cause})" if mark.victims else mark.cause
    end = f"resumed at {step_text(mark.resume_step, mark.iteration)}" if mark.resume_step >= 0 else "not over"
    end = "the job failed" if mark.failed else end
    return f"at {seconds_text(mark.at_s)}: {ranks}, {seconds_text(mark.total_s)}, {end}"


def size_text(size: Size) -> str:
    """``at 12.0 s: 3 replicas from step 30 on, without rank 1``."""
    changes = (("without", size.left), ("with", size.came))
    how = " and".join(f" {word} {ranks_text(ranks)}" for word, ranks in changes if ranks)
    since = f"from step {size.step} on" if size.step >= 0 else "at the launch"
    replicas = count_text(size.replicas, "replica", "replicas")
    return f"at {seconds_text(size.at_s)}: {replicas} {since}" + (f",{how}" if how else "")


def coming_text(coming: Coming) -> str:
    """``rank 3 on n2: it has 12.0 s to get to its first step``."""
    doing = "waits for the others" if coming.here else f"has {seconds_text(coming.left_s)} to get to its first step"
    return f"rank {coming.rank} on {coming.node}: it {doing}"


def goodput_bars(goodput: dict[str, float | int | None]) -> tuple[Bar, ...]:
    """The parts of the job's time side by side."""
    wall = goodput.get("wall_s") or 0.0
    bars, x = [], 0.0
    for part in PARTS:
        seconds = goodput.get(f"{part}_s") or 0.0
        if seconds > 0 and wall > 0:
            width = WIDTH * seconds / wall
            bars.append(Bar(x, width, part, f"{PART_TEXT[part]}: {seconds_text(seconds)} ({seconds / wall:.2%})"))
            x += width
    return tuple(bars)


def pictures(course: Course) -> str:
    """All of a course as a piece of HTML, without styles."""
    return str(_environment().get_template("course.html").render(**_parts(course)))


def standalone(course: Course) -> str:
    """The picture of the whole job as a separate file."""
    picture = picture_of(course)
    template = _environment().get_template("picture.svg")
    return str(template.render(picture=picture, style=style(), alone=True, **_SIZES))


@cache
def style() -> str:
    """CSS for :func:`pictures`, light and dark."""
    return _text("picture.css")


def _parts(course: Course) -> dict[str, Any]:
    found = [picture_of(course)] if course.seconds > 0 else []
    if shows_last_hour(course):
        found.insert(0, picture_of(course, recent=True))
    return {
        "course": course,
        "pictures": found,
        "goodput": goodput_bars(course.goodput),
        "speed": speed_text(course),
        "sizes": [size_text(size) for size in course.sizes[-_NAMED:]] if len(course.sizes) > 1 else [],
        "coming": [coming_text(coming) for coming in course.coming[:_NAMED]],
        **_SIZES,
    }


def speed_text(course: Course) -> str:
    """``0.21 s a step, 11,036 tokens/s``; "" if nothing is known."""
    if course.step_s <= 0:
        return ""
    tokens = f", {rate_text(course.tokens_per_s)} tokens/s" if course.tokens_per_step else ""
    return f"{seconds_text(course.step_s)} a {course.step_word}{tokens}"


_SIZES = {"width": WIDTH, "left": LEFT, "right": WIDTH - RIGHT, "strip": _STRIP}


# -- diagrams -------------------------------------------------------------------------------------

Values = Sequence[tuple[float, float | None]]
"""(seconds of the job's clock, value) of one line; None: not known there."""


@dataclass(frozen=True)
class _Diagram:
    """What a panel shows: the classes of its lines, and their values; the first two of class ``band`` are its edges.
    ``text``: how a value is said."""

    title: str
    kinds: tuple[str, ...]
    values: Sequence[Values]
    text: Callable[[float], str]


def _size_diagram(course: Course, scale: _Scale) -> list[_Diagram]:
    """The number of replicas, of a job that has not kept it."""
    if len(course.sizes) < 2:
        return []
    ends = [size.at_s for size in course.sizes[1:]] + [course.seconds]
    corners = [
        (max(at, scale.begin), float(size.replicas))
        for size, end in zip(course.sizes, ends, strict=True)
        for at in (size.at_s, end)
        if end >= scale.begin
    ]
    return [_Diagram("data-parallel replicas", ("line",), [corners], "{:g}".format)]


def _diagrams(columns: Columns, course: Course) -> list[_Diagram]:
    if columns.empty:
        return []
    middle = [a + columns.width_s / 2 for a in columns.at_s]

    def line(values: Sequence[float | None], at: Sequence[float] = middle) -> Values:
        return _with_gaps(list(zip(at, values, strict=True)), columns.width_s)

    found: list[_Diagram] = []
    if any(columns.step_s):
        band = [line(columns.step_low_s), line(columns.step_high_s), line(columns.step_s)]
        title = f"{course.step_word} time (the median of the ranks, and 10 to 90 %)"
        found.append(_Diagram(title, ("band", "line"), band, seconds_text))
    rates = coarser(columns, _COLUMNS, course.step_s)
    counts = rates.tokens if any(rates.tokens) else rates.steps
    what = "tokens a second" if any(rates.tokens) else f"{course.unit}s a second"
    if any(counts):
        speeds = [n / s if s > 0 else None for n, s in zip(counts, rates.seconds, strict=True)]
        at = [a + rates.width_s / 2 for a in rates.at_s]
        lines = [_with_gaps(list(zip(at, speeds, strict=True)), rates.width_s)]
        found.append(_Diagram(what, ("line",), lines, rate_text))
    if columns.ranks:
        lines = [line(values) for values in columns.ranks]
        kinds = tuple(f"rank r{i % 8}" for i in range(len(lines)))
        found.append(_Diagram("own work in a step, each rank", kinds, lines, seconds_text))
    elif any(columns.own_s):
        band = [line(columns.own_low_s), line(columns.own_high_s), line(columns.own_s), line(columns.own_most_s)]
        title = "own work in a step (the median of the ranks, 10 to 90 %, and the slowest)"
        found.append(_Diagram(title, ("band", "line", "most"), band, seconds_text))
    return found


def _with_gaps(values: Sequence[tuple[float, float | None]], width: float) -> Values:
    """Insert an unknown value wherever nothing was measured for a while."""
    found: list[tuple[float, float | None]] = []
    for at, value in values:
        if found and at - found[-1][0] > 2.5 * width:  # a look may come a little late, into the next bucket
            found.append((found[-1][0] + width, None))
        found.append((at, value))
    return found


def _panel(diagram: _Diagram, top: float, scale: _Scale) -> Panel:
    text = diagram.text
    known = [v for line in diagram.values for at, v in line if v is not None and at >= scale.begin]
    limit, higher = _limit(known)
    note = f"highest {text(max(known))}" if higher else ""

    def y(value: float) -> float:
        return top + _PANEL * (1 - min(value / limit, 1.0))

    lines = []
    rest = list(diagram.values)
    for kind in diagram.kinds:
        if kind == "band":
            lines.append(Line(kind, _area(rest[0], rest[1], scale, y)))
            rest = rest[2:]
        else:
            lines.append(Line(kind, _path(rest.pop(0), scale, y)))
    ticks = tuple((y(share * limit), text(share * limit) if share else "0") for share in (0.0, 0.5, 1.0))
    return Panel(diagram.title, top, tuple(lines), ticks, note)


def _limit(known: Sequence[float]) -> tuple[float, bool]:
    """Upper end of the axis, and whether single values are above it: one long first step must not flatten the rest."""
    most = max(known, default=0.0)
    usual = sorted(known)[round(0.98 * (len(known) - 1))] if known else 0.0
    limit = most if most <= 2 * usual else 1.5 * usual
    return _round_up(limit) or 1.0, most > 2 * usual > 0


def _round_up(value: float) -> float:
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if m * power >= value * (1 - 1e-9))


def _path(values: Values, scale: _Scale, y: Any) -> str:
    parts, pen = [], "M"
    for at, value in values:
        if value is None or at < scale.begin:
            pen = "M"
            continue
        parts.append(f"{pen}{scale.x(at):.1f} {y(value):.1f}")
        if pen == "M":
            parts.append("h.1")  # a single point is seen, too
        pen = "L"
    return "".join(parts)


def _area(low: Values, high: Values, scale: _Scale, y: Any) -> str:
    parts: list[str] = []
    run: list[tuple[float, float, float]] = []
    for (at, below), (_, above) in [*zip(low, high, strict=True), ((0.0, None), (0.0, None))]:
        if below is not None and above is not None and at >= scale.begin:
            run.append((scale.x(at), y(below), y(above)))
            continue
        if run:
            points = [f"{x:.1f} {up:.1f}" for x, _, up in run] + [f"{x:.1f} {down:.1f}" for x, down, _ in reversed(run)]
            parts.append("M" + "L".join(points) + "Z")
        run = []
    return "".join(parts)


# -- what has happened ----------------------------------------------------------------------------


def _bar(scale: _Scale, at: float, seconds: float, kind: str, text: str) -> Bar:
    x = scale.x(at)
    return Bar(x, max(scale.x(at + seconds) - x, 1.0), kind, text)


def _groups(scale: _Scale, marks: Sequence[RecoveryMark]) -> list[list[RecoveryMark]]:
    groups: list[list[RecoveryMark]] = []
    for mark in sorted(marks, key=lambda m: m.at_s):
        if groups and scale.x(mark.at_s) - scale.x(groups[-1][0].at_s) < _NEAR:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return groups


def _together(scale: _Scale, marks: Sequence[RecoveryMark]) -> list[RecoveryMark]:
    """The longest of those that are too close to each other to be drawn."""
    return [max(group, key=lambda m: m.total_s) for group in _groups(scale, marks)]


def _lines(scale: _Scale, marks: Sequence[RecoveryMark]) -> list[Bar]:
    found = []
    for group in _groups(scale, marks):
        text = "\n".join(mark_text(m) for m in group[:_NAMED])
        if group[1:]:
            text = f"{count_text(len(group), 'recovery', 'recoveries')}\n{text}"
        found.append(Bar(scale.x(group[0].at_s), 0.0, "mark", text))
    return found


def _times(scale: _Scale) -> tuple[tuple[float, str], ...]:
    span = scale.end - scale.begin
    if span < 1:
        return ((scale.x(scale.begin), "0"), (scale.x(scale.end), seconds_text(scale.end)))
    step = next((s for s in _ROUND_S if span / s <= 8), 0) or math.ceil(span / 8 / 86_400) * 86_400
    first = math.ceil(scale.begin / step)
    return tuple((scale.x(i * step), _time_text(i * step)) for i in range(first, int(scale.end // step) + 1))


def _time_text(seconds: int) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds and seconds % size == 0:
            return f"{seconds // size:,} {unit}"
    return "0"


def _alternative_text(course: Course, marks: Sequence[RecoveryMark]) -> str:
    """The text alternative of the picture, for screen readers."""
    parts = [f"{course.state or 'A job'} after {seconds_text(course.seconds)}"]
    if course.version >= 0:
        parts.append(f"{course.version:,} {course.step_word}s committed")
    steps = [s for s in course.whole.step_s if s]
    if steps:
        parts.append(f"median {course.step_word} time {seconds_text(statistics.median(steps))}")
    if course.tokens_per_step:
        parts.append(f"{rate_text(course.tokens_per_s)} tokens a second")
    parts.append(count_text(len(marks), "recovery", "recoveries"))
    if len(course.sizes) > 1:
        parts.append("replicas " + ", then ".join(str(size.replicas) for size in course.sizes[-_NAMED:]))
    more = [f"and {len(marks) - _NAMED} more"] if len(marks) > _NAMED else []
    return "; ".join([", ".join(parts), *(mark_text(m) for m in marks[:_NAMED]), *more]) + "."


@cache
def _text(name: str) -> str:
    return resources.files("flashrecovery.observe").joinpath(f"templates/{name}").read_text("utf-8")


@cache
def _environment() -> Any:
    from jinja2 import Environment, FunctionLoader

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(_text))
    environment.filters.update(seconds=seconds_text, step=step_text, part=lambda part: PART_TEXT[part])
    return environment
