"""The prose of the documents: sentences of at most 20 words on average, no paragraph in a cell of a table.

Line lengths are PyMarkdown's (`make lint`). Code blocks and headings are no prose, inline code counts as one word. A
paragraph, an item of a list and a cell of a table each end a sentence. A name or a number alone is none.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
WORDS, CELL = 20, 40
"""Words of a sentence on average, and of a cell at most."""
LARGER: Mapping[str, int] = {
    "docs/versions.md": 60,
}
"""Pages that are not rewritten yet, and what their cells keep to until they are. None is added."""
_FRAGMENT = 5
"""Up to that many words are a name or a number, and no sentence."""
_FEW = 10
"""Pages of fewer sentences are taken together."""


def _plain(inline: Token) -> str:
    """The text of a block; inline code becomes one word, and links are their text."""
    parts = []
    for token in inline.children or []:
        if token.type == "code_inline":
            parts.append("code")
        elif token.type in ("softbreak", "hardbreak"):
            parts.append(" ")
        elif token.type == "text":
            parts.append(token.content)
    return " ".join("".join(parts).split())


def blocks(text: str) -> list[tuple[str, str]]:
    """Kind and text of each block of a Markdown page: a paragraph (also of a list), or a cell; headings left out."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    return [
        ("cell" if before.type in ("td_open", "th_open") else "paragraph", _plain(token))
        for before, token in pairwise(tokens)
        if token.type == "inline" and before.type != "heading_open"
    ]


def sentences(text: str) -> list[str]:
    segment = pytest.importorskip("sentencex").segment  # in the extra `test`
    return [found.strip() for _, block in blocks(text) if block for found in segment("en", block) if found.strip()]


def words(text: str) -> int:
    return sum(re.search(r"\w", word) is not None for word in text.split())


def lengths(text: str) -> list[int]:
    """Words of each sentence."""
    return [count for count in map(words, sentences(text)) if count > _FRAGMENT]


@cache
def _pages() -> Mapping[str, str]:
    command = ["git", "ls-files", "*.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {name: (ROOT / name).read_text() for name in names}


def test_sentences_are_found_in_paragraphs_lists_and_tables() -> None:
    page = "# A title\n\nOne `a b c`. Two, e.g. three\nwords (see [a page](x.md)).\n\n* an item\n\n```\nno prose\n```\n"
    table = "\n| head | of it |\n|---|---|\n| a cell | another one. And more. |\n"
    assert sentences(page + table) == [
        "One code.",
        "Two, e.g. three words (see a page).",
        "an item",
        *("head", "of it", "a cell", "another one.", "And more."),
    ]
    assert lengths("One two three four five six. Seven.\n\n```\ncode\n```\n") == [6]
    assert [words(text) for kind, text in blocks(table) if kind == "cell"] == [1, 2, 2, 4]


def test_sentences_are_short() -> None:
    """On each page, on average; small pages taken together."""
    found = {name: lengths(text) for name, text in _pages().items()}
    few = [count for counts in found.values() if len(counts) < _FEW for count in counts]
    assert mean(few) <= WORDS
    means = {name: mean(counts) for name, counts in found.items() if len(counts) >= _FEW}
    wrong = {name: round(n, 1) for name, n in means.items() if n > WORDS}
    assert wrong == {}


def test_no_cell_is_a_paragraph() -> None:
    cells = {
        name: max((words(block) for kind, block in blocks(text) if kind == "cell"), default=0)
        for name, text in _pages().items()
    }
    assert {name: n for name, n in cells.items() if n > LARGER.get(name, CELL)} == {}
    assert {name: n for name, n in LARGER.items() if n <= CELL or name not in cells} == {}
