"""Jobs whose process groups behave as NCCL's do (tests/support/fake_nccl).

A rank is killed in every phase of a step, and the end is that of the same launch without a kill, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests import gpu_check
from tests.support import fake_nccl
from tests.support import megatron as mg
from tests.support.jobs import DDP, FSDP, Job, Layout, RunningJob, check_same
from tests.support.nccl_jobs import NEEDS, killed_in_every_phase, options, references, run
from tests.support.soak import SEED
from tests.support.soak import kills as scaled

UNHURRIED = replace(DDP, name="unhurried", flags=("--step-time=30",))
pytestmark = pytest.mark.timeout(500)  # some ten cold starts of a process on two cores


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Job]:
    return references(tmp_path_factory)


def _cases() -> list[object]:
    return [
        pytest.param(
            layout,
            id=layout.name,
            marks=[*([] if layout is DDP else [pytest.mark.grid]), *filter(None, [NEEDS.get(layout.script)])],
        )
        for layout in gpu_check.LAYOUTS.values()
    ]


@pytest.mark.parametrize("layout", _cases())
def test_a_kill_in_every_phase(layout: Layout, tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    inject = killed_in_every_phase(layout)
    job = run(tmp_path / "run", layout, inject=inject, standby=1)
    assert len(job.notices("fault_fired")) == len(inject), "every kill was carried out"
    check_same(job, reference(layout))


@pytest.mark.grid
@pytest.mark.parametrize("layout", _cases())
def test_a_kill_in_every_phase_of_the_newer_backend(layout: Layout, tmp_path: Path) -> None:
    """ProcessGroupNCCL2, torch 2.15's ``nccl``."""
    newer = {fake_nccl.KIND: "nccl2"}
    inject = killed_in_every_phase(layout)
    job = run(tmp_path / "run", layout, inject=inject, standby=1, env=newer)
    assert len(job.notices("fault_fired")) == len(inject), "every kill was carried out"
    assert "nccl2" in {one["name"] for one in job.of("job_started")[0]["backends"]}
    check_same(job, run(tmp_path / "reference", layout, standby=0, env=newer))


@pytest.mark.parametrize("kind", ["nccl-legacy", pytest.param("nccl2", marks=pytest.mark.grid)])
def test_the_time_of_an_abort_is_hidden_behind_the_new_communicators(
    kind: str, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """The survivors answer the stop when their kernels have ended. The fake ends a process that launches something
    before all of its aborts have returned."""
    slow = {fake_nccl.KIND: kind, "FAKE_NCCL_ABORT_MS": "4000"}
    inject = ["rank=1,fault=sigkill,at=backward,step=3", "rank=2,fault=sigkill,at=forward,step=5"]
    job = run(tmp_path / "run", DDP, inject=inject, standby=1, env=slow)
    recoveries = job.of("recovery_finished")
    assert len(recoveries) == 2, job.explain()
    for recovery in recoveries:
        assert recovery["phases"]["quiesce"] < 3.5 < recovery["total_s"], recovery["phases"]
    check_same(job, reference(DDP))


def test_connections_break_and_nobody_has_died(tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """With gloo a rank raises. Of NCCL it has to be asked: otherwise all wait for ``timeouts.hang``."""
    config = {"timeouts": {"peer_error_wait_s": 1.0}}
    job = run(tmp_path / "run", DDP, standby=1, env={"FAKE_NCCL_BREAK": "1:5"}, config=config)
    check_same(job, reference(DDP))
    failures = [event for event in job.of("failure_detected") if "NCCL reports an error" in event["evidence"]]
    assert failures, job.explain()


@pytest.mark.grid
@pytest.mark.mutants
def test_a_kernel_fails_and_the_process_can_never_use_its_device_again(
    tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """It ends by that error, and is replaced like one that has died."""
    job = run(tmp_path / "run", DDP, standby=1, env={"FAKE_NCCL_STICKY": "1:5"})
    check_same(job, reference(DDP))
    (failure,) = job.of("failure_detected")
    assert failure["rank"] == 1 and "illegal memory access" in json.dumps(failure), failure


LOSES = "rank={},fault=device,at=recovery:{}"
STICKY_AT = ("quiescing", "regrouping", "restoring", "verifying", "resuming")


def _taken_along(job: Job, ranks: set[int]) -> None:
    """They are victims of the one recovery, and no script has raised anything."""
    (recovery,) = job.of("recovery_finished")
    assert set(recovery["victims"]) == ranks, job.explain()
    failures = job.of("failure_detected")
    assert [f["kind"] for f in failures] == ["killed", *["context_lost"] * (len(ranks) - 1)], job.explain()
    assert not any(f["exception"] for f in failures), failures


def _losses() -> list[object]:
    cases = [(FSDP, victims, phase) for victims in ((2,), (0, 2, 3)) for phase in STICKY_AT]
    cases += [(DDP, (0, 2), phase) for phase in STICKY_AT]
    return [
        pytest.param(layout, victims, phase, id=f"{layout.name}-{len(victims)}-{phase}", marks=marks)
        for layout, victims, phase in cases
        for marks in [[] if (layout, victims, phase) == (FSDP, (2,), "regrouping") else [pytest.mark.grid]]
    ]


@pytest.mark.parametrize(("layout", "victims", "phase"), _losses())
def test_survivors_lose_their_devices_within_the_recovery(
    layout: Layout, victims: tuple[int, ...], phase: str, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """At the first call to the device after that moment of the recovery. Each is replaced, and no limit counts it."""
    inject = ["rank=1,fault=sigkill,at=backward,step=3", *(LOSES.format(rank, phase) for rank in victims)]
    config = {"max_failures_per_step": 1, "max_kills_per_step": 2}
    job = run(tmp_path / "run", layout, inject=inject, standby=1, config=config)
    check_same(job, reference(layout))
    _taken_along(job, {1, *victims})


@pytest.mark.parametrize("layout", [FSDP, pytest.param(DDP, marks=pytest.mark.grid)], ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    "phase", ["backward", *(pytest.param(p, marks=pytest.mark.grid) for p in ("forward", "commit"))]
)
def test_a_death_takes_its_nvlink_domain_along(
    layout: Layout, phase: str, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """Two domains of two GPUs each. The peer's memory has gone away under the kernels of the other one."""
    job = run(
        tmp_path / "run",
        layout,
        inject=[f"rank=1,fault=sigkill,at={phase},step=3"],
        standby=1,
        env={"FAKE_NCCL_NVLINK": f"2:{tmp_path}/domains"},
        config={"max_failures_per_step": 1, "max_kills_per_step": 2},
    )
    check_same(job, reference(layout))
    _taken_along(job, {0, 1})


def test_all_replicas_go_with_their_nvlink_domain_and_a_label_has_snapshots_kept(
    tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """DDP on one node whose GPUs are joined: no process is left that has anything."""
    job = run(
        tmp_path / "run",
        DDP,
        inject=["rank=1,fault=sigkill,at=backward,step=3"],
        standby=1,
        env={"FAKE_NCCL_NVLINK": f"4:{tmp_path}/domains"},
        config={"gpu_domain": 4, "max_failures_per_step": 1, "max_kills_per_step": 2},
    )
    check_same(job, reference(DDP))
    _taken_along(job, {0, 1, 2, 3})
    said = [notice["text"] for notice in job.notices("redundancy")]
    assert any("survives the loss of a rank, or of the GPUs that share NVLink; not of a node" in t for t in said), said


def _one_domain(folder: Path, **more: str) -> dict[str, str]:
    """The GPUs of all four ranks are joined, and a kernel transfers for a while after its data has come."""
    return {"FAKE_NCCL_NVLINK": f"4:{folder}/domains", "FAKE_NCCL_TRANSFER_MS": "10", **more}


def _let_go_first(folder: Path) -> None:
    """No process has aborted amid a transfer, nor after another one had ended."""
    faulted = [*(folder / "domains" / "0").glob("faulted.*")]
    assert not faulted, faulted


@pytest.mark.parametrize("fault", ["sigstop", pytest.param("hang", marks=pytest.mark.grid)])
@pytest.mark.parametrize("phase", [pytest.param("forward", marks=pytest.mark.grid), "backward"])
def test_a_living_rank_is_killed_when_all_of_its_domain_have_aborted(fault: str, phase: str, tmp_path: Path) -> None:
    """Otherwise the others would be lost with it."""
    config = {"timeouts": {"hang_step_s": 4.0}}
    inject = [f"rank=1,fault={fault},at={phase},step=3"]
    job = run(tmp_path / "run", FSDP, inject=inject, standby=1, env=_one_domain(tmp_path), config=config)
    (recovery,) = job.of("recovery_finished")
    assert recovery["victims"] == [1], job.explain()
    _let_go_first(tmp_path)
    check_same(job, run(tmp_path / "reference", FSDP, standby=0))


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["nccl-legacy", "nccl2"])
@pytest.mark.parametrize("layout", [DDP, FSDP], ids=lambda one: one.name)
def test_a_rank_whose_kernel_never_ends_is_told_from_those_that_wait_for_it(
    layout: Layout, kind: str, tmp_path: Path
) -> None:
    """All ranks have launched the same, so what the hosts say does not tell."""
    env = {**_one_domain(tmp_path), fake_nccl.KIND: kind, "FAKE_NCCL_KERNEL": "2:3"}
    job = run(tmp_path / "run", layout, standby=1, env=env, config={"timeouts": {"hang_step_s": 4.0}})
    (failure,) = job.of("failure_detected")
    assert (failure["rank"], failure["kind"]) == (2, "hang"), job.explain()
    assert "its device does not come to" in failure["evidence"]
    check_same(job, run(tmp_path / "reference", layout, standby=0))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.grid)])
def test_a_job_that_is_told_to_end_lets_go_before_it_kills(number: int, tmp_path: Path) -> None:
    fake_nccl.build()
    slow = replace(FSDP, flags=("--step-time=30",))
    job = RunningJob(tmp_path / "run", FSDP, standby=0, **options(slow, 400, _one_domain(tmp_path)))
    job.wait_for_step(3)
    ranks = job.ranks()
    job.popen.send_signal(number)
    ended = job.wait()
    assert ended.code != 0, ended.explain()
    _let_go_first(tmp_path)
    there = {path.name for path in (tmp_path / "domains" / "0").glob("aborted.*")}
    assert there == {f"aborted.{pid}" for pid in ranks.values()}, ended.explain()


@pytest.mark.grid
@pytest.mark.mutants
def test_a_replica_is_restored_from_device_to_device(tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """All but what lies in host memory: the rank-local state and common state. A bit that is damaged on this way is
    found."""
    inject = ["rank=1,fault=sigkill,at=backward,step=3", "rank=1,fault=corrupt,at=recovery:restoring"]
    # Half a second later: the first recovery is over when the controller hears of a step that all have committed.
    inject += ["rank=2,fault=sigkill,at=optimizer,step=18"]
    job = run(tmp_path / "run", UNHURRIED, inject=inject, standby=1)
    check_same(job, reference(UNHURRIED))
    recoveries = job.of("recovery_finished")
    assert len(recoveries) == 2, job.explain()
    first, second = recoveries
    assert job.notices("digest_mismatch") and first["device_bytes"] > 0, "of the round after it, with the damaged ones"
    assert 0 < second["bytes"] - second["device_bytes"] < 0.1 * second["bytes"], second


def _kill_at_random_moments(job: RunningJob, kills: int, at_once: int) -> None:
    """``at_once``: that many before a recovery is over; with more than one, they also strike in recoveries."""
    chance = random.Random(SEED)
    killed: set[int] = set()
    while len(killed) < kills:
        for _ in range(min(at_once, kills - len(killed))):
            time.sleep(chance.uniform(0.1, 1.5))
            living = {rank: pid for rank, pid in job.ranks().items() if pid and pid not in killed}
            rank = chance.choice(sorted(living))
            with suppress(ProcessLookupError):  # it has just been replaced
                os.kill(living[rank], signal.SIGKILL)
                killed.add(living[rank])
        seconds = _wait_until_recovered(job, len(killed))
        print(f"{len(killed)} of {kills}, the last in {seconds:.2f} s, step {job.newest_step()}", flush=True)


def _wait_until_recovered(job: RunningJob, failures: int) -> float:
    """So many failures are known, and all recoveries are over. Returns what the last one took, in seconds."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and job.popen.poll() is None:
        events = [e for e in job.events() if e["event"] in ("failure_detected", "recovery_finished")]
        detected = sum(e["event"] == "failure_detected" for e in events)
        if detected >= failures and events[-1]["event"] == "recovery_finished":
            return float(events[-1]["total_s"])
        time.sleep(0.05)
    raise AssertionError(f"{failures} kills have not all been recovered from\n{job.wait(1).explain()}")


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("layout", "kills", "at_once"),
    [
        pytest.param(DDP, 250, 2, id="ddp"),
        pytest.param(FSDP, 100, 1, id="fsdp"),
        pytest.param(gpu_check.ZERO2, 75, 1, id="zero2", marks=pytest.mark.deepspeed),
        pytest.param(mg.PP2_DP2, 75, 1, id="pp2-dp2", marks=pytest.mark.megatron),
    ],
)
def test_kills_at_random_moments(layout: Layout, kills: int, at_once: int, tmp_path: Path) -> None:
    """Of the clock, not of the step: also while communicators are made, in a section, and, with several at once, in
    the middle of a recovery."""
    fake_nccl.build()
    kills = scaled(kills)
    slow = replace(layout, flags=(*layout.flags, "--step-time", "100"))
    steps = kills * 15 + 400  # of which many go by until all standbys are there
    reference = run(tmp_path / "reference", slow, steps, limit_s=300 + steps)
    config = {"max_failures_per_step": 1000}
    job = RunningJob(tmp_path / "run", layout, standby=2, config=config, **options(slow, steps, {}))
    job.wait_for("standby_ready", 300, 2)
    _kill_at_random_moments(job, kills, at_once)
    assert job.newest_step() < steps, "the job was over before the last kill"
    ended = job.wait(300 + steps)
    assert len(ended.of("failure_detected")) >= kills, "every kill was noticed"
    check_same(ended, reference)
