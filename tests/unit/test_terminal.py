"""Lines on the terminal: whatever the code may say, none is long, and none loses a word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrecovery.terminal import INDENT, WIDTH, say, unwrapped, wrapped

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    *(ROOT / "common").rglob("*.py"),
    *(ROOT / "fr_deepspeed").rglob("*.py"),
    *(ROOT / "fr_megatron").rglob("*.py"),
]
OF_A_TERMINAL = 160


def _text(node: ast.expr) -> str | None:
    """What a string or an f-string of the code says, with a name in the place of each value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "a_value_of_some_length" for part in node.values
        )
    return None


def _texts() -> Iterator[str]:
    """All that the code can say in more than a line, without docstrings."""
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        loose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = _text(node) if isinstance(node, ast.expr) and id(node) not in loose else None
            if text and len(text) > 100 and "\n" not in text and " " in text:
                yield text


def test_no_text_of_the_code_makes_a_long_line() -> None:
    texts = {f"flashrecovery: error: a_model/train.py:17: {text}" for text in _texts()}
    assert len(texts) > 300, "the code's texts have not been found"
    joined = " ".join(sorted(texts))
    for text in (*texts, joined[:5000]):
        lines = wrapped(text).split("\n")
        assert max(map(len, lines)) <= OF_A_TERMINAL, lines
        assert all(line.startswith(INDENT) and line.strip() for line in lines[1:])
        assert unwrapped("\n".join(lines)).split() == text.split()


def test_where_lines_are_broken() -> None:
    short = "rank 1 failed at step 3 (killed: killed by SIGKILL)"
    assert wrapped(short) == short
    what, why, do = (f"{word} " + word[:1] * 60 for word in ("what", "why", "do"))
    assert wrapped(f"{what}; {why}; {do}") == f"{what}; {why};\n{INDENT}{do}"
    path = "/" + "x" * 300
    assert wrapped(f"cannot write {path} now") == f"cannot write\n{INDENT}{path}\n{INDENT}now"
    code = "    " + "call(argument, " * 20
    assert wrapped(f"Traceback\n{code}\nValueError: no") == f"Traceback\n{code}\nValueError: no"


def test_what_is_said_begins_with_who_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    say("word " * 60 + "end\nEvidence is kept in runs/x")
    first, second, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("flashrecovery: word") and second.startswith(INDENT + "word") and len(first) <= WIDTH
    assert last == "Evidence is kept in runs/x"


def test_nothing_else_prints_for_this_package() -> None:
    """Markers that programs look for, and standard output, are something else."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"(print|echo)\(f?\"flashrecovery: ", line)
    ]
    assert not found
