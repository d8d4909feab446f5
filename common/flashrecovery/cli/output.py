"""How the tools print quantities, and where to."""

from __future__ import annotations

from rich.console import Console

from flashrecovery.observe.quantities import count_text, rate_text, seconds_text

__all__ = ["bytes_text", "count_text", "make_console", "rate_text", "seconds_text"]

_PIPE_WIDTH = 110


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
