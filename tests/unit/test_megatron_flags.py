"""The flags of ``patches/megatron/0001-*.patch`` are those that our wrapper adds to an unmodified Megatron-LM."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from fr_megatron.lm.arguments import with_flags
from tests.support.jobs import ROOT

(PATCH,) = sorted((ROOT / "patches" / "megatron").glob("0001-*.patch"))


def _added(parser: argparse.ArgumentParser) -> dict[str, tuple[object, ...]]:
    """What each of our flags takes."""
    ours = (a for a in parser._actions if a.dest.startswith("flash_recovery"))
    return {a.dest: (type(a), a.option_strings, a.type or str, a.choices and tuple(a.choices), a.default) for a in ours}


def test_the_patch_has_all_flags() -> None:
    added = [line[1:] for line in PATCH.read_text().splitlines() if line.startswith("+") and line[1:2] != "+"]
    begin = added.index("def _add_flash_recovery_args(parser):")
    source = "\n".join(added[begin : added.index("    return parser", begin) + 1])
    names: dict[str, Any] = {"argparse": argparse}
    exec(textwrap.dedent(source), names)
    patched, wrapped = argparse.ArgumentParser(), argparse.ArgumentParser()
    names["_add_flash_recovery_args"](patched)
    with_flags(None)(wrapped)
    assert _added(patched) == _added(wrapped)
    assert len(_added(patched)) > 8
