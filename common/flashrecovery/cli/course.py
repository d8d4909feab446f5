"""The course of a job in the terminal: goodput as a bar, speed as a line of blocks, recoveries marked below."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from flashrecovery.cli.output import count_text, rate_text, seconds_text
from flashrecovery.observe.course import Course, Size, coarser, shows_last_hour
from flashrecovery.observe.goodput import PARTS
from flashrecovery.observe.picture import coming_text
from flashrecovery.observe.timeline import Columns

COLUMNS = 64
_BLOCKS = "▁▂▃▄▅▆▇█"
_MARK = "▲"
_LABEL = 16
_COLOURS = {
    "trained": "#009e73",
    "launch": "#56b4e9",
    "recovery": "#d55e00",
    "checkpoint": "#cc79a7",
    "repeated": "#e69f00",
    "down": "#999999",
}
_NAMES = {
    "trained": "training",
    "launch": "launch",
    "recovery": "recoveries",
    "checkpoint": "checkpoints",
    "repeated": "steps done again",
    "down": "between launches",
}
_SLOWEST = 4


def render_course(course: Course) -> Group:
    """What is known; nothing of a job that has not begun."""
    parts = [_waiting(course), _coming(course), _goodput(course), *_speed(course), _slowest(course)]
    return Group(*(part for part in parts if part is not None))


def goodput_words(goodput: dict[str, float | int | None]) -> str:
    """``Goodput 98.21%: of 2 h 00 min, 1 min 20 s launch, 12.1 s recoveries``."""
    always = ("launch", "recovery")
    lost = []
    for part in PARTS[1:]:
        seconds = goodput[f"{part}_s"]
        if part == "repeated" and goodput["repeated_steps"]:
            again = count_text(int(goodput["repeated_steps"]), "step", "steps") + " done again"
            lost.append(again if seconds is None else f"{seconds_text(seconds)} for {again}")
        elif part != "repeated" and seconds is not None and (seconds or part in always):
            lost.append(f"{seconds_text(seconds)} {_NAMES[part]}")
    return f"Goodput {goodput['share']:.2%}: of {seconds_text(goodput['wall_s'] or 0.0)}, " + ", ".join(lost)


def _goodput(course: Course) -> Text | None:
    wall = course.goodput.get("wall_s")
    if not wall:
        return None
    text = Text(goodput_words(course.goodput) + "\n")
    done = 0.0
    for part in PARTS:
        seconds = course.goodput[f"{part}_s"] or 0.0
        cells = round(COLUMNS * (done + seconds) / wall) - round(COLUMNS * done / wall)
        text.append("█" * cells, style=_COLOURS[part])
        done += seconds
    for part in PARTS:
        if course.goodput[f"{part}_s"]:
            text.append("  █ ", style=_COLOURS[part])
            text.append(_NAMES[part])
    return text


def _speed(course: Course) -> list[Text]:
    recent = shows_last_hour(course)
    columns = coarser(course.recent if recent else course.whole, COLUMNS, course.step_s)
    if columns.empty or not any(columns.steps):
        return []
    first = round(columns.at_s[0] / columns.width_s)
    cells = round(columns.at_s[-1] / columns.width_s) - first + 1
    lines = [
        _line(f"{course.step_word} time", _spread(columns, columns.step_s, first, cells), seconds_text(course.step_s))
    ]
    counts, unit = (columns.tokens, "tokens/s") if any(columns.tokens) else (columns.steps, f"{course.unit}s/s")
    rates = [n / s if s > 0 else None for n, s in zip(counts, columns.seconds, strict=True)]
    now = course.tokens_per_s if unit == "tokens/s" else course.steps_per_s
    lines.append(_line(unit, _spread(columns, rates, first, cells), rate_text(now)))
    if len(course.sizes) > 1:
        begins = [(first + cell) * columns.width_s for cell in range(cells)]
        replicas = [_size_at(course.sizes, begin + columns.width_s) for begin in begins]
        lines.append(_line("replicas", replicas, str(course.sizes[-1].replicas)))
    marks = [" "] * cells
    for mark in course.recoveries:
        cell = int(mark.at_s // columns.width_s) - first
        if 0 <= cell < cells:
            marks[cell] = _MARK
    if _MARK in marks:
        count = count_text(course.recovered, "recovery", "recoveries")
        lines.append(
            Text(f"{'recovered at':<{_LABEL}}") + Text("".join(marks), style=_COLOURS["recovery"]) + f" {count}"
        )
    begin, end = seconds_text(first * columns.width_s) if first else "0", seconds_text(course.seconds)
    between = begin.ljust(max(cells - len(end), len(begin) + 1))  # of a short job there is hardly a cell
    lines.append(Text(f"{'the last hour' if recent else 'since launch':<{_LABEL}}{between}{end}", style="dim"))
    return lines


def _size_at(sizes: Sequence[Size], at: float) -> float:
    """Just before then."""
    return next((float(size.replicas) for size in reversed(sizes) if size.at_s < at), float(sizes[0].replicas))


def _spread(columns: Columns, values: Sequence[float | None], first: int, cells: int) -> list[float | None]:
    """One value per cell, also where nothing was measured."""
    found: list[float | None] = [None] * cells
    for at, value in zip(columns.at_s, values, strict=True):
        found[round(at / columns.width_s) - first] = value
    return found


def _line(name: str, values: Sequence[float | None], now: str) -> Text:
    most = max((v for v in values if v is not None), default=0.0) or 1.0
    blocks = [" " if v is None else _BLOCKS[round(v / most * (len(_BLOCKS) - 1))] for v in values]
    return Text(f"{name:<{_LABEL}}") + Text("".join(blocks), style="#56b4e9") + f" {now}"


def _slowest(course: Course) -> Text | None:
    if len(course.slowest) < 2:
        return None
    ranks = ", ".join(f"rank {s.rank} {seconds_text(s.own_s)}" for s in course.slowest[:_SLOWEST])
    return Text(f"Ranks with most own work in a step: {ranks}")


def _coming(course: Course) -> Text | None:
    if not course.coming:
        return None
    return Text("\n".join(f"Coming in: {coming_text(coming)}" for coming in course.coming[:_SLOWEST]), style="cyan")


def _waiting(course: Course) -> Text | None:
    if not course.waiting:
        return None
    lines = []
    for wait in course.waiting:
        where = f": rank {wait.rank} at {wait.where}" if wait.where else ""
        lines.append(f"Waiting for {wait.what}, for {seconds_text(wait.seconds)}{where}")
    return Text("\n".join(lines), style="yellow")
