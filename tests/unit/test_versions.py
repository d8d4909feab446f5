"""Version i is everything as it is when step i is handed out, wherever a loop changes it: a step that is stopped and
done again leaves no trace. Of a survivor, in one process (tests/scripts/one_session.py); tests/conformance has jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.one_session import LOOPS, MOMENTS, PLACES

SCRIPT = Path(__file__).parents[1] / "scripts" / "one_session.py"
Results = dict[tuple[str, str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    job = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=170, check=False)
    assert job.returncode == 0, job.stderr[-3000:]
    lines = [json.loads(line) for line in job.stdout.splitlines()]
    return {(line["loop"], line["place"], line["moment"]): line for line in lines}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_step_that_is_done_again_leaves_no_trace(loop: str, place: str, results: Results) -> None:
    for moment in MOMENTS:
        found = results[loop, place, moment]
        assert found["odd_steps"] == [] and found["same_end"], moment


@pytest.mark.parametrize(
    ("loop", "place", "kept"),
    [
        ("scheduler", "below", False),
        ("counted", "below", False),
        ("evaluation", "above", False),
        ("evaluation", "below", True),
        ("evaluation", "in the block", True),
        ("prefetched", "below", True),
        ("own_generator", "below", True),
        ("averaged", "below", True),
        ("averaged", "above", True),
        ("momentum_reset", "below", False),
        ("momentum_reset", "above", True),
    ],
)
def test_own_copies_are_kept_only_where_a_step_may_have_to_be_undone(
    loop: str, place: str, kept: bool, results: Results
) -> None:
    for moment in MOMENTS:
        assert ("undo_enabled" in results[loop, place, moment]["notices"]) is kept, moment
