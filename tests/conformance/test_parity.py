"""Parity in running jobs, layout by layout: ranks die, what only they held is decoded, and the end is the same, bit for
bit. Snapshots are off: a replacement on the same node would find everything there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.jobs import FSDP, HSDP, Job, Layout, References, RunningJob, check_fired, check_same, run_job
from tests.support.unique_state import FRAMEWORKS, TIMEOUT_S, environment, marks

STEPS = 16
PHASES = ("between", "forward", "backward", "optimizer", "commit")
pytestmark = pytest.mark.timeout(TIMEOUT_S)


def _cases() -> list[object]:
    quick = {("fsdp", 2)}
    return [
        pytest.param(
            *(layout, losses),
            id=f"{layout.name}-{losses}",
            marks=marks(layout, quick=(layout.name, losses) in quick),
        )
        for layout in (FSDP, *FRAMEWORKS)
        for losses in (1, 2)
    ]


def run(run_dir: Path, layout: Layout, *options: str, inject: list[str] | None = None) -> Job:
    return run_job(
        run_dir,
        layout,
        steps=STEPS,
        inject=inject or [],
        options=options,
        env=environment(layout),
        timeout_s=TIMEOUT_S,
        standby=1 if inject else 0,
    )


def kill_together(run_dir: Path, layout: Layout, *options: str, ranks: tuple[int, int]) -> Job:
    """Kill both ranks at once amid the training. Of two injected faults the second may strike when the first is
    recovered."""
    job = RunningJob(run_dir, layout, steps=STEPS, standby=1, options=options, flags=["--step-time", "100"])
    job.wait_for_step(6)
    pids = job.ranks()
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    return job.wait()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Job]:
    return References(lambda: tmp_path_factory.mktemp("reference"), run)


def check(job: Job, expected: Job, losses: int, failures: int) -> None:
    """What the victims held alone came out of parity each time. Of several faults of a step a later one may strike
    after the recovery of an earlier one."""
    check_fired(job, failures * losses)
    finished = job.of("recovery_finished")
    assert sum(len(e["victims"]) for e in finished) == failures * losses, job.explain()
    assert len(finished) >= failures and all(e["decoded_bytes"] > 0 for e in finished), job.explain()
    assert not job.of("fallback_started")
    check_same(job, expected)


@pytest.mark.parametrize(("layout", "losses"), _cases())
def test_what_ranks_hold_alone_is_decoded(
    layout: Layout, losses: int, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """First one set of ranks, which follow each other, then another one; in their first step, too. Of a pipeline with
    DeepSpeed the second set is a whole stage."""
    inject = []
    for first, step, phase in ((1, 1, "backward"), (2, 8, "forward")):
        ranks = [(first + i) % 4 for i in range(losses)]
        inject += [f"rank={rank},fault=sigkill,at={phase},step={step}" for rank in ranks]
    options = ("--redundancy", "parity", "--parity", str(losses), "--snapshots", "never")
    check(run(tmp_path / "run", layout, *options, inject=inject), reference(layout), losses, 2)


@pytest.mark.grid
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("losses", [1, 2])
def test_in_every_phase(phase: str, losses: int, tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    inject = [f"rank={rank},fault=sigkill,at={phase},step=6" for rank in range(losses)]
    options = ("--redundancy", "parity", "--parity", str(losses), "--snapshots", "never")
    check(run(tmp_path / "run", FSDP, *options, inject=inject), reference(FSDP), losses, 1)


@pytest.mark.grid
@pytest.mark.parametrize("state", ["quiescing", "regrouping", "restoring", "verifying"])
def test_a_second_rank_dies_while_the_first_is_recovered(
    state: str, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    inject = ["rank=1,fault=sigkill,at=backward,step=6", f"rank=3,fault=sigkill,at=recovery:{state}"]
    options = ("--redundancy", "parity", "--parity", "2", "--snapshots", "never")
    job = run(tmp_path / "run", FSDP, *options, inject=inject)
    check_fired(job, 2)
    check_same(job, reference(FSDP))


@pytest.mark.grid
def test_a_bit_that_flips_on_the_way_is_noticed_and_asked_for_again(
    tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    inject = ["rank=1,fault=sigkill,at=backward,step=6", "rank=1,fault=corrupt,at=recovery:restoring"]
    job = run(tmp_path / "run", FSDP, "--redundancy", "parity", "--snapshots", "never", inject=inject)
    check_fired(job, 2)
    assert any("did not arrive with its digest" in e["text"] for e in job.notices("restore_failed")), job.explain()
    check_same(job, reference(FSDP))


@pytest.mark.grid
@pytest.mark.parametrize("pair", [pytest.param((1, 3), id="replicas"), pytest.param((1, 2), id="others")])
def test_two_ranks_that_hold_a_shard_together(
    pair: tuple[int, int], tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """Of a shard with two replicas there is parity, too, if two ranks may be lost; one rank decodes it for both."""
    options = ("--redundancy", "parity", "--parity", "2", "--snapshots", "never")
    ended = kill_together(tmp_path / "run", HSDP, *options, ranks=pair)
    (recovery,) = ended.of("recovery_finished")
    assert sorted(recovery["victims"]) == sorted(pair)
    assert (recovery["decoded_bytes"] > 0) is (pair == (1, 3)), recovery
    assert not ended.of("fallback_started")
    check_same(ended, reference(HSDP))


@pytest.mark.grid
def test_where_every_shard_has_a_replica_there_is_nothing_to_do(
    tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    inject = ["rank=1,fault=sigkill,at=backward,step=6"]
    job = run(tmp_path / "run", HSDP, "--redundancy", "parity", inject=inject)
    assert [e["decoded_bytes"] for e in job.of("recovery_finished")] == [0]
    check_same(job, reference(HSDP))


def test_more_than_parity_covers_ends_the_job_and_says_what_is_lost(tmp_path: Path) -> None:
    job = kill_together(tmp_path / "run", FSDP, "--redundancy", "parity", "--snapshots", "never", ranks=(1, 2))
    assert job.code != 0
    (reason,) = (e["reason"] for e in job.of("job_failed"))
    assert "no version exists for every shard" in reason, job.explain()
    assert "the parity group of ranks 0, 1, 2 and 3: version" in reason and "lacks the shards of members 1, 2" in reason
