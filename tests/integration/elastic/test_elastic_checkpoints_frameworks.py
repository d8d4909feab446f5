"""Fallback checkpoints of elastic jobs with DeepSpeed and megatron-core, read in another size than that in which they
were written: bit for bit as a job that was resized by command at that step, or that was started in that size from the
state that an undisturbed one has had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flashrecovery.cli.checkpoint import checkpoint as checkpoint_command
from tests.support.elastic import command
from tests.support.elastic_checkpoints import dead_job, fell_back, launched, of_ranks, saving, spoil, started
from tests.support.elastic_sharded import END, Kind, megatron, needing, resized_by_command, zero
from tests.support.jobs import Job, RunningJob, check_clean, check_fired

DISTRIBUTED = ("--use-distributed-optimizer", "--bf16")
ZERO = [zero(stage) for stage in range(4)]
MEGATRON = [megatron("megatron-plain"), megatron("megatron-distributed", *DISTRIBUTED)]
SHARDED = [*ZERO[1:], MEGATRON[1]]
OTHERS = [
    zero(2, "--precision", "fp16"),
    zero(2, "--precision", "fp32"),
    zero(3, "--precision", "fp32"),
    zero(2, "--set", "optimizer.params.torch_adam=false"),
    megatron("megatron-fp32", "--use-distributed-optimizer"),
    megatron("megatron-buckets", *DISTRIBUTED, "--overlap-grad-reduce", "--ddp-bucket-size", "700", "--tie-head"),
]

pytestmark = [pytest.mark.timeout(600), pytest.mark.grid]


def kinds(*found: Kind) -> list[Any]:
    """As parameters of a test."""
    return [pytest.param(kind, id=kind.name, marks=needing(kind)) for kind in found]


def check_launched(kind: Kind, job: Job, other: Job, version: int, size: int) -> None:
    """It has begun with this version, and goes on as the other one."""
    assert job.code == 0 and job.of("job_started")[0]["step"] == version, job.explain()
    assert not job.of("failure_detected"), job.explain()
    kind.goes_on_alike(job, other, version, size, END)
    check_clean(job)


@pytest.mark.parametrize("size", [3, 2])
@pytest.mark.parametrize("kind", kinds(*ZERO, *MEGATRON))
def test_a_job_that_died_whole_goes_on_smaller(kind: Kind, size: int, tmp_path: Path) -> None:
    version, _ = dead_job(tmp_path, begin=kind.start)[-1]
    job = launched(tmp_path, "smaller", size, begin=kind.start)
    check_launched(kind, job, resized_by_command(kind, tmp_path / "resized", [(version, size)]), version, size)


@pytest.mark.parametrize(("before", "after"), [(3, 4), (2, 3), (2, 4)])
@pytest.mark.parametrize("kind", kinds(*ZERO, *MEGATRON))
def test_a_job_that_died_whole_goes_on_larger(kind: Kind, before: int, after: int, tmp_path: Path) -> None:
    version, _ = dead_job(tmp_path, nproc=before, begin=kind.start)[-1]
    other = started(tmp_path, before, version, after, begin=kind.start)
    check_launched(kind, launched(tmp_path, "larger", after, begin=kind.start), other, version, after)


@pytest.mark.parametrize("kind", kinds(*OTHERS))
def test_other_trainings(kind: Kind, tmp_path: Path) -> None:
    version, _ = dead_job(tmp_path, begin=kind.start)[-1]
    job = launched(tmp_path, "smaller", 3, begin=kind.start)
    check_launched(kind, job, resized_by_command(kind, tmp_path / "resized", [(version, 3)]), version, 3)


@pytest.mark.parametrize("kind", kinds(*SHARDED))
def test_converted_it_is_the_same(kind: Kind, tmp_path: Path) -> None:
    """Written again for three ranks without a job, and read by a job of three."""
    version, path = dead_job(tmp_path, begin=kind.start)[-1]
    job = launched(tmp_path, "smaller", 3, begin=kind.start)
    done = CliRunner().invoke(
        checkpoint_command, ["convert", str(path), "--to-ranks", "3", "--out", str(tmp_path / "new" / "checkpoints")]
    )
    assert done.exit_code == 0, done.output
    shown = CliRunner().invoke(checkpoint_command, ["show", "--json", str(tmp_path / "new" / "checkpoints")])
    facts = json.loads(shown.output)
    assert (facts["version"], facts["ranks"], facts["any_size"], facts["own_state"]) == (version, 3, True, False)
    other = launched(tmp_path / "new", "converted", 3, begin=kind.start)
    check_launched(kind, other, job, version, 3)


@pytest.mark.parametrize("damage", ["missing", "bit", "short", "metadata"])
@pytest.mark.parametrize("kind", kinds(*SHARDED))
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_taken(kind: Kind, damage: str, tmp_path: Path) -> None:
    *_, (older, _), (_, newest) = dead_job(tmp_path, checkpoints=2, begin=kind.start)
    named = spoil(newest, damage)
    job = launched(tmp_path, "smaller", 3, begin=kind.start)
    assert any(named in notice["text"] for notice in job.notices("checkpoint_damaged")), job.explain()
    assert job.code == 0, job.explain()
    kind.goes_on_alike(job, resized_by_command(kind, tmp_path / "resized", [(older, 3)]), older, 3, END)
    check_clean(job)


def running_job(kind: Kind, tmp_path: Path, nproc: int, **options: Any) -> RunningJob:
    """A job that has a checkpoint; no rank is replaced."""
    elastic = {"elastic": {"min": 2, "max": nproc, "replace": "never"}, "timeouts": {"node_wait_s": 3}}
    config = {**elastic, **saving(tmp_path / "checkpoints")}
    running = kind.start(tmp_path / "run", "--step-time", "300", config=config, nproc=nproc, **options)
    running.wait_for("checkpoint_saved", 120)
    return running


@pytest.mark.parametrize("victims", [(1, 2), (0, 3), (0, 1)])
@pytest.mark.parametrize("kind", kinds(*SHARDED))
def test_too_many_are_lost_at_once(kind: Kind, victims: tuple[int, ...], tmp_path: Path) -> None:
    """No rank has what one of them had: the others go back to a checkpoint of all four."""
    running = running_job(kind, tmp_path, 4)
    running.kill(*victims)
    job = running.wait(120)
    version = fell_back(job, 4, 2, END)
    other = resized_by_command(kind, tmp_path / "resized", [(version, 2)])
    kind.goes_on_alike(job, other, version, 2, END)
    check_clean(job)


@pytest.mark.parametrize("state", ["quiescing", "regrouping", "restoring", "verifying", "resuming"])
@pytest.mark.parametrize("kind", kinds(ZERO[2], ZERO[3], MEGATRON[1]))
def test_one_more_dies_while_they_go_back(kind: Kind, state: str, tmp_path: Path) -> None:
    running = running_job(kind, tmp_path, 4, inject=[f"rank=3,fault=sigkill,at=recovery:{state}"])
    running.kill(1, 2)
    job = running.wait(120)
    check_fired(job)
    assert job.code != 0 and "fewer than elastic.min" in job.of("job_failed")[0]["reason"], job.explain()
    check_clean(job)


@pytest.mark.parametrize("state", ["regrouping", "restoring", "verifying", "resuming"])
@pytest.mark.parametrize("kind", kinds(ZERO[2], ZERO[3], MEGATRON[1]))
def test_the_last_one_goes_back_once_more(
    kind: Kind, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two go back to a checkpoint of four, and one of them dies on the way: the other one has state that is sharded
    among two, half of it read, and goes on alone."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as a job of several ranks has it
    config = {"elastic": {"min": 1, "max": 4, "replace": "never"}, **saving(tmp_path / "checkpoints")}
    fault = f"rank=3,fault=sigkill,at=recovery:{state}"
    running = kind.start(tmp_path / "run", "--step-time", "300", config=config, inject=[fault])
    running.wait_for("checkpoint_saved", 120)
    running.kill(1, 2)
    job = running.wait(240)
    check_fired(job)
    version = fell_back(job, 4, 1, END)
    kind.goes_on_alike(job, started(tmp_path, 4, version, 1, begin=kind.start), version, 1, END)
    check_clean(job)


@pytest.mark.parametrize("kind", kinds(*ZERO[1:]))
def test_all_of_it_is_read(kind: Kind, tmp_path: Path) -> None:
    """Frozen parameters, too: the script begins with other weights, and has evaluated with them."""
    version, _ = dead_job(tmp_path, begin=kind.start)[-1]
    job = launched(tmp_path, "smaller", 3, begin=kind.start)
    other = launched(tmp_path, "other", 3, "--seed", "6", "--evaluate", begin=kind.start)
    check_launched(kind, other, job, version, 3)


@pytest.mark.parametrize("size", [4, 3])
@pytest.mark.parametrize("kind", kinds(*ZERO[1:]))
def test_another_order_of_parameters_is_refused(kind: Kind, size: int, tmp_path: Path) -> None:
    """It would be as long, and lie alike."""
    dead_job(tmp_path, begin=kind.start)
    job = launched(tmp_path, "again", size, "--reverse", begin=kind.start)
    assert job.code != 0 and not job.of("recovery_finished"), job.explain()
    assert "of another model, or of one whose state is sharded otherwise" in job.of("job_failed")[0]["reason"]
    check_clean(job)


@pytest.mark.parametrize("kind", kinds(*SHARDED, ZERO[0], MEGATRON[0]))
def test_all_die_in_a_smaller_size_before_it_has_a_checkpoint(kind: Kind, tmp_path: Path) -> None:
    """All are replaced, and go back to a checkpoint of more ranks than they are."""
    config = {"elastic": {"min": 2, "max": 4}, **saving(tmp_path / "checkpoints", 6.0)}
    running = kind.start(tmp_path / "run", "--step-time", "500", config=config)
    running.wait_for("checkpoint_saved", 120)
    assert command(running, 3) == ""
    running.wait_for("recovery_finished", 60)
    running.kill(0, 1, 2)
    job = running.wait(120)
    fallback = job.of("fallback_started")[0]
    assert job.code == 0 and of_ranks(Path(fallback["path"])) == 4, job.explain()
    assert job.of("recovery_finished")[-1]["victims"] and not job.of("recovery_finished")[-1]["left"], job.explain()
    for log in job.run_dir.rglob("rank*.gen0.log"):
        log.unlink()  # with three ranks from a later step on: steps of that size had another past
    version = fallback["version"]
    other = resized_by_command(kind, tmp_path / "resized", [(version, 3)])
    kind.goes_on_alike(job, other, version, 3, END)
    check_clean(job)
