"""The picture of a plan: how long state survives, and what is lost of a day. matplotlib draws it, and is optional."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashrecovery.errors import ConfigError
from flashrecovery.plan.estimates.copy_holders import Protection
from flashrecovery.plan.estimates.reliability import Conditions, Outlook

FORMATS = (".svg", ".png", ".pdf")
_POINTS = 160

# Hues that stay apart for colour-blind readers (Okabe and Ito).
_COLOURS = {
    Protection.CHECKPOINT: "#000000",
    Protection.REPLICA: "#0072b2",
    Protection.NEIGHBOUR: "#0072b2",
    Protection.PARITY_1: "#d55e00",
    Protection.PARITY_2: "#009e73",
}
_PARTS = {
    "recovery_s": ("recovery", "#56b4e9"),
    "restart_s": ("restart", "#d55e00"),
    "rework_s": ("steps done again", "#e69f00"),
    "checkpoint_s": ("checkpoints", "#cc79a7"),
    "copies_s": ("waiting for copies", "#009e73"),
    "waiting_s": ("no node", "#999999"),
}


def days_text(days: float) -> str:
    """``11 min``, ``9.8 h``, ``16.2 days``, ``3.4 years``."""
    if days == math.inf:
        return "> 270 years"
    for unit, size in (("min", 1 / 1440), ("h", 1 / 24), ("days", 1.0)):
        limit = {"min": 1 / 24, "h": 2.0, "days": 730.0}[unit]
        if days < limit:
            return f"{days / size:.3g} {unit}"
    return f"{days / 365.25:.3g} years"


def write_figure(path: Path, title: str, found: Sequence[Outlook], given: Conditions) -> None:
    """Raises ConfigError if ``path`` has another ending than :data:`FORMATS`, cannot be written, or matplotlib is
    missing."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--figure {path}: a file that ends in {', '.join(FORMATS)} is allowed")
    try:
        import matplotlib
    except ImportError as e:
        raise ConfigError(
            f"--figure {path}: matplotlib is needed, which is not installed: pip install 'flashrecovery[plot]'"
        ) from e
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",  # text stays text: small files, and found by a search
        "svg.hashsalt": "flashrecovery",  # the same plan gives the same file
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
        spares = found[0].with_spares[-1].spares
        alone = {o.protection: o.without_repair for o in found}
        _survival(left, "nothing replaced (REFT)", alone, [o.safe_days for o in found], given)
        mended = {o.protection: o.with_repair for o in found}
        safe = [o.with_spares[-1].safe_days for o in found]
        _survival(middle, f"replaced, {spares} spare node{'' if spares == 1 else 's'}", mended, safe, given)
        _lost(right, found, spares)
        metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
        try:
            figure.savefig(path, metadata=metadata, dpi=150)
        except OSError as e:
            raise ConfigError(f"--figure {path}: {e.strerror}") from e


def _survival(
    axes: Any,
    title: str,
    curves: dict[Protection, Callable[[float], float]],
    safe: Sequence[float],
    given: Conditions,
) -> None:
    known = [day for day in safe if 1e-6 < day < math.inf]
    first = 10 ** math.floor(math.log10(min(known, default=1.0)) - 0.5)
    last = 10 ** math.ceil(math.log10(max([given.days, *known])) + 0.5)
    days = [first * (last / first) ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    axes.set_xscale("log")
    axes.axhline(given.threshold, color="#999999", linewidth=0.8, linestyle=":")
    for protection, curve in curves.items():
        axes.plot(days, [curve(day) for day in days], color=_COLOURS[protection], linewidth=1.8)
    best_first = sorted(zip(safe, curves, strict=True), key=lambda pair: -pair[0])
    for row, (until, protection) in enumerate(best_first):  # beside the axes, where no line is
        words = f"{protection.value}\n{days_text(until)}"
        where = {"x": 1.03, "y": 0.94 - 0.14 * row, "transform": axes.transAxes}
        axes.text(s=words, color=_COLOURS[protection], va="center", fontweight="bold", fontsize=8.5, **where)
    axes.set_xlim(first, last)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("days (logarithmic)")
    axes.set_ylabel("probability that no state was lost")
    axes.set_title(f"{title}: time until {given.threshold:g}")


def _lost(axes: Any, found: Sequence[Outlook], spares: int) -> None:
    names = [o.protection.value for o in found]
    totals = [0.0] * len(found)
    longest = max(o.with_spares[-1].losses.lost_s for o in found) / 60 or 1.0
    for part, (label, colour) in _PARTS.items():
        values = [getattr(o.with_spares[-1].losses, part) / 60 for o in found]
        if max(values) > 0.005 * longest:
            axes.barh(names, values, left=totals, color=colour, label=label, height=0.6)
        totals = [a + b for a, b in zip(totals, values, strict=True)]
    for row, (one, total) in enumerate(zip(found, totals, strict=True)):
        ettr = one.with_spares[-1].losses.ettr
        axes.text(total + 0.01 * longest, row, f"{total:.3g} min, ETTR {ettr:.4f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.55 * longest)
    axes.set_xlabel("minutes lost of a day")
    axes.set_title(f"lost time, {spares} spare node{'' if spares == 1 else 's'}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False, fontsize=8)
