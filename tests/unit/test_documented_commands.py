"""Commands in the pages exist, with their options: `flashrecovery NAME --option` in blocks of shell."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from flashrecovery.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = subprocess.run(
    ["git", "ls-files", "README.md", "docs/*.md", "examples/*.md"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()


def commands(text: str) -> Iterator[list[str]]:
    """The words behind `flashrecovery` of each command in a block of shell, up to what another program takes."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):  # fences come in pairs
        if language not in ("", "sh"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^|[ /&])flashrecovery ((?:[a-z]+)\b.*)", line.partition(" #")[0])
            if found and not line.startswith("flashrecovery:"):
                yield found[1].split()


def own(words: list[str]) -> Iterator[str]:
    """Options before a script, `--` or the end of the command."""
    for word in words:
        if word == "--" or word.endswith((".py", "|", ">", ";", "&")):
            return
        if word.startswith("--"):
            yield word.partition("=")[0]


def options(command: click.Command | None) -> set[str]:
    assert command is not None
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("page", PAGES)
def test_documented_commands_and_their_options_exist(page: str) -> None:
    context = click.Context(cli)
    for words in commands((ROOT / page).read_text()):
        command = cli.get_command(context, words[0])
        assert command is not None, words
        if isinstance(command, click.Group):
            command = command.get_command(context, words.pop(1))
            assert command is not None, words
        known = options(command) | {"--help"}
        if words[0] == "shim":  # what it writes passes these on
            known |= options(cli.get_command(context, "run"))
        assert [option for option in own(words[1:]) if option not in known] == [], words


def test_commands_are_found_in_the_pages() -> None:
    assert sum(len(list(commands((ROOT / page).read_text()))) for page in PAGES) > 60
