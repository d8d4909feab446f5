"""docs/versions.md says what docs/versions.json has, and which capabilities no one has looked up there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import matrix


def test_the_page_is_written_from_the_results() -> None:
    results = json.loads(matrix.RESULTS.read_text())
    assert matrix.page(results, matrix.declared_now()) == matrix.PAGE.read_text()


def test_a_capability_that_was_declared_since_is_said_to_be_unknown() -> None:
    """Not to be alike in all versions."""
    name = "torch==2.13.0"
    results = {name: {"when": "now", "selections": {}, "inside": {"torch: groups": "there"}}}
    assert "not looked up" not in matrix.page(results, ["torch: groups", "megatron-core: timers"])
    assert f"| torch: stores | {name} |" in matrix.page(results, ["torch: groups", "torch: stores"])


def test_an_interpreter_that_does_not_run_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a version manager's shim, whose version is not chosen."""
    version = ".".join(map(str, sys.version_info[:2]))
    for folder, script in (
        ("shims", "echo 'no version is set' >&2; exit 127"),
        ("real", f'exec {sys.executable} "$@"'),
    ):
        interpreter = tmp_path / folder / f"python{version}"
        interpreter.parent.mkdir()
        interpreter.write_text(f"#!/bin/sh\n{script}\n")
        interpreter.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:{tmp_path / 'real'}")
    assert matrix.find_python(version) == str(tmp_path / "real" / f"python{version}")
    monkeypatch.setattr(matrix, "MANAGED", ())
    with pytest.raises(RuntimeError, match=r"no python3\.1 that runs here"):
        matrix.find_python("3.1")
