"""Random histories of elastic jobs that grow beyond their launch (:func:`tests.simulation.elastic.draw_beyond`)."""

from __future__ import annotations

import os
import re

import pytest

from tests.simulation.elastic import draw_beyond
from tests.simulation.history import quiet, run, simulated

SEEDS = range(int(os.environ.get("BEYOND_SEEDS", "40")))
pytestmark = [pytest.mark.grid, pytest.mark.timeout(60 + 10 * len(SEEDS))]


@pytest.mark.parametrize("several", [False, True], ids=["one rank", "several ranks"])
def test_no_history_of_a_job_that_grows_beyond_its_launch_breaks_a_law(several: bool) -> None:
    grown, found = 0, []
    with quiet(), simulated():
        for seed in SEEDS:
            history = draw_beyond(seed, several=several)
            outcome = run(history)
            sizes = re.findall(r"job_resized .*replicas=(\d+)", "\n".join(outcome.trace))
            grown += any(int(size) > history.shape.replicas.replicas for size in sizes)
            if outcome.violation is not None:
                found.append(f"seed {seed}: {outcome.violation}")
    assert not found
    assert grown >= len(SEEDS) // (8 if several else 5), "hardly any job has grown beyond its launch"
