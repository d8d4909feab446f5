"""How quantities are written for people; the page's script does the same."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """``4.1 ms``, ``0.83 s``, ``12.4 s``, ``3 min 05 s``, ``2 h 07 min``, ``12 d 03 h``."""
    if seconds < 0.1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, of_day = divmod(hours, 24)
    if days >= 2:
        return f"{days} d {of_day:02} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def count_text(count: int, one: str, many: str) -> str:
    """``1 failure``, ``2 failures``."""
    return f"{count:,} {one if count == 1 else many}"


def rate_text(per_s: float) -> str:
    """``0.21``, ``54.3``, ``11,036``, ``3.40 million``; the unit follows."""
    if per_s >= 1e6:
        return f"{per_s / 1e6:.3g} million" if per_s < 1e9 else f"{per_s / 1e9:.3g} billion"
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
