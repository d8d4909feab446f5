"""docs/versions.md says what docs/versions.json has, and which capabilities nobody has looked up there."""

from __future__ import annotations

import json

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
