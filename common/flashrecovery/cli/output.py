"""How the tools print quantities, and where to."""

from __future__ import annotations

from rich.console import Console

_PIPE_WIDTH = 110


def seconds_text(seconds: float) -> str:
    """``4.1 ms``, ``0.83 s``, ``12.4 s``, ``3 min 05 s``."""
    if seconds < 0.1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def count_text(count: int, one: str, many: str) -> str:
    """``1 failure``, ``2 failures``."""
    return f"{count:,} {one if count == 1 else many}"


def make_console() -> Console:
    """Writes to stdout; a pipe gets wide lines instead of tables folded to 80 columns."""
    console = Console()
    return console if console.is_terminal or console.width >= _PIPE_WIDTH else Console(width=_PIPE_WIDTH)


def bytes_text(count: int) -> str:
    """``0 B``, ``3.2 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
