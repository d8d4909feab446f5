"""What this package says on a terminal. The texts are made elsewhere, as one line each; here they get lines that people
can read. ``events.jsonl`` has them as they are."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import suppress

WIDTH = 140
"""Longest line, in characters, unless one word is longer."""
INDENT = " " * 6
"""What the further lines of a text begin with."""
PREFIX = "flashrecovery: "
_CLAUSE = re.compile(r"[.;] ")


def say(text: str) -> None:
    """Print ``text`` to stderr, with this package's prefix. A closed stderr is ignored."""
    with suppress(OSError):
        print(wrapped(f"{PREFIX}{text}"), file=sys.stderr, flush=True)


def wrapped(text: str) -> str:
    """``text`` in lines of at most :data:`WIDTH` characters: long ones are broken where a clause ends, or else between
    two words. Lines that begin with a space (code in a traceback) are left as they are."""
    return "\n".join(part for line in text.split("\n") for part in _lines(line))


def unwrapped(text: str) -> str:
    """What :func:`wrapped` was given, also where each line has a rank before it."""
    return re.sub(rf"\n(?:\[rank\d+\] )?{INDENT}(?=\S)", " ", text)


def _lines(line: str) -> list[str]:
    found, indent = [], ""
    while len(indent) + len(line) > WIDTH and not line.startswith(" "):  # of a line of code nothing is broken
        at = _break(line, WIDTH - len(indent))
        if at < 0:
            break
        found.append(indent + line[:at].rstrip())
        line, indent = line[at:].strip(), INDENT
    return [*found, indent + line] if line or not found else found


def _break(line: str, width: int) -> int:
    """Where the space is at which the line is broken; -1: it cannot be."""
    clauses = [match.end() - 1 for match in _CLAUSE.finditer(line, width // 3, width + 1)]
    if clauses:
        return clauses[-1]
    at = line.rfind(" ", 0, width + 1)
    return at if at > 0 else line.find(" ", width)


class Handler(logging.Handler):
    """Shows the package's own warnings where no logging is configured."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record).removeprefix(PREFIX))


def show_warnings() -> None:
    """Show the warnings of this process, which is a command of this package's."""
    logger = logging.getLogger("flashrecovery")
    if not any(isinstance(handler, Handler) for handler in logger.handlers):
        handler = Handler(logging.WARNING)
        logger.addHandler(handler)
