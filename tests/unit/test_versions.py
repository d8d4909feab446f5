"""Version i is everything as it is when step i is yielded, wherever a loop changes it: a step that is stopped and
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
ROOT = SCRIPT.parents[2]
FURTHER_BACK = "tests.scripts.further_back"  # which imports its neighbours
pytestmark = pytest.mark.xdist_group("versions")  # one run of the script for all of them
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
        assert ("pre_step_copy_enabled" in results[loop, place, moment]["notices"]) is kept, moment


def test_a_loop_that_counts_the_steps_itself_is_refused_before_the_first_one(results: Results) -> None:
    refused = results["count_along", "", ""]["refused"]
    assert "for ... in enumerate(agent.recovery.steps(STEPS))" in refused and "enumerate() knows nothing" in refused


def further_back(source: str) -> dict[str, Any]:
    job = subprocess.run(
        [sys.executable, "-m", FURTHER_BACK, source], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert job.returncode == 0, job.stderr[-3000:]
    found: dict[str, Any] = json.loads(job.stdout)
    return found


def test_a_replacement_goes_back_to_before_it_came() -> None:
    """It has what is left of the process before it in its page, and reads its data again."""
    assert further_back("loader") == {"odd_steps": [], "same_end": True, "in_page": [3, 4]}


def test_a_replacement_whose_data_cannot_be_read_again_does_not_offer_to_go_back() -> None:
    """If it is asked to all the same, it refuses."""
    assert further_back("iterator") == {"error": "DataSourceError", "in_page": []}
