"""Fallback checkpoints of elastic jobs on Megatron-LM's unmodified loop: gone back to, and begun with, in another
number of replicas than that in which they were written. Bit for bit as a job that was resized by command at that call,
which goes on as one that was started in that size from that iteration's state: losses and the whole state of every
later iteration, what is logged of it, and evaluations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.elastic_checkpoints import dead_job, launched, started
from tests.support.elastic_megatron_lm import (
    DISTRIBUTED,
    Resized,
    Training,
    check_goes_on_alike,
    resized_once,
)
from tests.support.elastic_megatron_lm_checkpoints import (
    check_alike,
    check_goes_back,
    fell_far_back,
    held,
    lost,
)
from tests.support.jobs import check_clean, check_fired
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import TIMEOUT_S

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(4 * TIMEOUT_S), needs_checkout]

TP, PP = ("--tensor-model-parallel-size=2",), ("--pipeline-model-parallel-size=2",)
PLAIN = Training("plain")
SHARDS = Training("distributed", (*DISTRIBUTED, "--bf16"))
LOOP = Training("distributed-loop", SHARDS.flags, evaluates=4, logs=3)
"""In which losses are summed up outside of calls, and evaluations are made."""
TP_PARTS = Training("tp-distributed", (*TP, *DISTRIBUTED, "--bf16"), each=2)
PP_PARTS = Training("pp-distributed", (*PP, *DISTRIBUTED, "--bf16"), each=2, logs=3)
TP_PLAIN = Training("tp", (*TP, "--bf16"), each=2)
NEIGHBOURS = (1, 2)
"""Rank 2 keeps the copies of rank 1."""


@pytest.fixture(scope="session")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


@pytest.mark.parametrize("victims", [NEIGHBOURS, (0, 3), (0, 1)])
@pytest.mark.parametrize("training", [LOOP, SHARDS], ids=str)
def test_the_others_go_back(training: Training, victims: tuple[int, ...], tmp_path: Path, resized: Resized) -> None:
    """No rank has what one of them had. The newer checkpoints are gone, so the first one is taken."""
    job = lost(held(training, tmp_path), *victims)
    check_goes_back(job, training, 2, resized)


@pytest.mark.parametrize("training", [TP_PARTS, PP_PARTS, TP_PLAIN], ids=str)
def test_with_replacements(training: Training, tmp_path: Path) -> None:
    """All that stand at the same place in their replicas are lost, and replaced; the others go back with them."""
    victims = (1, 3) if TP[0] in training.flags else (2, 3)
    job = lost(held(training, tmp_path, elastic={"replace": "auto", "min": 2}, standby=2), *victims)
    call = fell_far_back(job, training, 2)
    other = training.start(tmp_path / "other", config={"elastic": {"min": 1, "max": 2}}).wait(TIMEOUT_S)
    check_alike(job, other, call, 2, training)


def test_in_a_job_of_fixed_size(tmp_path: Path) -> None:
    """All that had something are replaced, and the other one makes calls again that lie far back."""
    training = replace(LOOP, name="fixed", launched=3)
    job = lost(held(training, tmp_path, elastic=None, standby=2), *NEIGHBOURS)
    call = fell_far_back(job, training, 3)
    other = training.start(tmp_path / "other", config={}).wait(TIMEOUT_S)
    check_alike(job, other, call, 3, training)


@pytest.mark.parametrize("state", ["regrouping", "restoring", "verifying", "resuming"])
def test_one_more_dies_while_they_go_back(state: str, tmp_path: Path) -> None:
    """Three of five are left, and then two, as if the job had been started so."""
    training = replace(SHARDS, name="distributed-5", launched=5, batch=60)
    fault = f"rank=4,fault=sigkill,at=recovery:{state}"
    job = lost(held(training, tmp_path, inject=[fault]), *NEIGHBOURS)
    check_fired(job)
    call = fell_far_back(job, training, 2)
    other = started(tmp_path, 5, training.iteration(call), 2, begin=training.start)
    check_goes_on_alike(job, other, call, 2, training)
    check_clean(job)


@pytest.mark.parametrize("size", [3, 2])
@pytest.mark.parametrize("training", [SHARDS, LOOP, PLAIN], ids=str)
def test_a_job_that_died_whole_goes_on_smaller(training: Training, size: int, tmp_path: Path, resized: Resized) -> None:
    version, _ = dead_job(tmp_path, checkpoints=2, begin=training.start)[-1]
    job = launched(tmp_path, "smaller", size, begin=training.start)
    assert job.code == 0 and job.of("job_started")[0]["step"] == version, job.explain()
    check_alike(job, resized(training, version, size), version, size, training)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (3, 4), (2, 3)])
@pytest.mark.parametrize("training", [SHARDS, PLAIN], ids=str)
def test_a_job_that_died_whole_goes_on_larger(training: Training, before: int, after: int, tmp_path: Path) -> None:
    version, _ = dead_job(tmp_path, nproc=before, checkpoints=2, begin=training.start)[-1]
    job = launched(tmp_path, "larger", after, begin=training.start)
    assert job.code == 0 and job.of("job_started")[0]["step"] == version, job.explain()
    other = started(tmp_path, before, training.iteration(version), after, begin=training.start)
    check_goes_on_alike(job, other, version, after, training)
    check_clean(job)


def test_a_launch_that_has_come_elsewhere_ends(tmp_path: Path) -> None:
    """With other intervals the calls that lie behind the state are others."""
    version, _ = dead_job(tmp_path, checkpoints=3, begin=PLAIN.start)[-1]
    job = launched(tmp_path, "other", 3, "--log-interval=5", begin=PLAIN.start)
    assert job.code != 0 and version > 3, job.explain()
    assert "another place in Megatron-LM's loop" in job.of("job_failed")[0]["reason"], job.explain()
    check_clean(job)
