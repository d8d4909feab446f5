"""Ranks that another launcher has started, one task each: a rank is killed, and the launcher notices nothing.

With mpirun where Open MPI is installed, else with a stand-in that does what mpirun does; what mpirun cannot be asked
for (a task that never comes, tasks of which each reaches something else) with the stand-in only.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.jobs import (
    Job,
    Layout,
    RunningJob,
    check_clean,
    check_fired,
    check_recovered,
    check_same,
    marked_processes,
    run_job,
)
from tests.support.tasks import MPIRUN_ENV, is_open_mpi, mpirun, stand_in

pytestmark = pytest.mark.timeout(300)
LAUNCHERS = [
    pytest.param(mpirun, id="mpirun", marks=pytest.mark.skipif(not is_open_mpi(), reason="Open MPI is not installed")),
    pytest.param(stand_in, id="stand-in"),
]
TWO = Layout("two", "train_ddp.py", nproc=2)


def adopted(folder: Path, layout: Layout, launcher: list[str], **options: object) -> RunningJob:
    """A job whose ranks are tasks of the launcher."""
    folder.mkdir(exist_ok=True)
    env = {**MPIRUN_ENV, **options.pop("env", {})}  # type: ignore[dict-item]
    return RunningJob(folder / "run", layout, launcher=launcher, env=env, **options)  # type: ignore[arg-type]


def guards(job: RunningJob) -> dict[int, psutil.Process]:
    """The tasks of the stand-in, by rank."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        text = (job.run_dir.parent / "run.out").read_text()
        found = {int(rank): int(pid) for rank, pid in re.findall(r"^task (\d+) has pid (\d+)$", text, re.MULTILINE)}
        if len(found) > 1:
            return {rank: psutil.Process(pid) for rank, pid in found.items()}
        time.sleep(0.05)
    raise AssertionError(f"the tasks have not come: {text}")


def agent_of(job: RunningJob) -> psutil.Process:
    (agent,) = [
        p for p in map(psutil.Process, marked_processes(job.marker)) if "flashrecovery.adopt.daemon" in p.cmdline()
    ]
    return agent


def codes(job: Job) -> list[int]:
    """Of the stand-in's tasks."""
    return [int(code) for code in re.findall(r"^task \d+ has ended with (-?\d+)$", job.output, re.MULTILINE)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two ranks, 12 steps, without a fault, started by ourselves."""
    job = run_job(tmp_path_factory.mktemp("reference") / "run", TWO, steps=12, standby=0)
    assert job.code == 0, job.explain()
    check_clean(job)
    return job


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_are_killed_and_the_launcher_does_not_notice(launcher, reference: Job, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """One is replaced by a standby, one before another is there. Each rank's output is its task's."""
    inject = ["rank=1,fault=sigkill,at=backward,step=3", "rank=0,fault=sigkill,at=optimizer,step=4"]
    done = adopted(tmp_path / "job", TWO, launcher(2), steps=12, standby=1, inject=inject).wait()
    check_same(done, reference)
    check_fired(done, 2)
    check_recovered(done, {0, 1})
    for rank, digest in reference.digests.items():
        assert f"digest rank={rank} {digest}" in done.output, "what a rank prints comes out of its task"
    assert len(reference.digests) == 2


@pytest.mark.grid
def test_a_killed_rank_is_replaced_from_the_zygote(reference: Job, tmp_path: Path) -> None:
    """SIGKILL from outside, twice the same rank. The first process is the task's child, the others the agent's."""
    job = adopted(tmp_path, TWO, stand_in(2), steps=12, standby=0, flags=["--step-time", "200"])
    job.wait_for_step(2)
    (task,) = [task for rank, task in guards(job).items() if rank == 1]
    pids = [job.ranks()[1]]
    assert psutil.Process(pids[0]).ppid() == task.pid
    for count in (1, 2):
        job.kill(1)
        job.wait_for("recovery_finished", count=count)
        pids.append(job.ranks()[1])
        assert psutil.Process(pids[-1]).ppid() == agent_of(job).pid
    assert len(set(pids)) == 3
    done = job.wait()
    check_same(done, reference)
    check_recovered(done, {1})
    assert codes(done) == [0, 0]


def test_a_rank_outlives_its_task_and_its_first_process_does_not(reference: Job, tmp_path: Path) -> None:
    """With a launcher that lets the others go on: the rank is killed with its task, and replaced."""
    job = adopted(tmp_path, TWO, stand_in(2, "--keep-going"), steps=12, standby=0, flags=["--step-time", "300"])
    job.wait_for_step(2)
    tasks = guards(job)
    before = job.ranks()[1]
    tasks[1].kill()
    job.wait_for("recovery_finished")
    assert not psutil.pid_exists(before) or psutil.Process(before).status() == psutil.STATUS_ZOMBIE
    done = job.wait()
    assert codes(done) == [0, -signal.SIGKILL]
    done.code = 0
    check_same(done, reference)
    check_recovered(done, {1})


@pytest.mark.grid
def test_a_task_keeps_its_cpus_and_variables(reference: Job, tmp_path: Path) -> None:
    """The replacement of a rank has those of the rank's task."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one CPU")
    first, second, *_ = sorted(os.sched_getaffinity(0))
    bound = ["--cpus", f"0={first}", "--cpus", f"1={second}", "--set", "0=OWN=zero", "--set", "1=OWN=one"]
    job = adopted(tmp_path, TWO, stand_in(2, *bound), steps=12, standby=1, flags=["--step-time", "700"])
    job.wait_for("standby_ready")
    job.wait_for_step(2)
    assert agent_of(job).cpu_affinity() == [first, second]
    job.kill(1)
    job.wait_for("recovery_finished")
    replacement = psutil.Process(job.ranks()[1])
    assert {tuple(os.sched_getaffinity(thread.id)) for thread in replacement.threads()} == {(second,)}
    done = job.wait()
    check_same(done, reference)


@pytest.mark.grid
def test_where_the_agent_does_not_reach_the_task_starts_the_replacement(reference: Job, tmp_path: Path) -> None:
    """A task in its own namespace, as others may have their own devices."""
    launcher = stand_in(2, "--before", "1=unshare --uts")
    if os.geteuid() != 0:
        pytest.skip("a namespace of its own needs root")
    job = adopted(tmp_path, TWO, launcher, steps=12, standby=1, flags=["--step-time", "700"])
    job.wait_for("standby_ready")
    job.wait_for_step(2)
    job.kill(1)
    job.wait_for("recovery_finished")
    replacement = psutil.Process(job.ranks()[1])
    assert replacement.ppid() == guards(job)[1].pid
    assert os.readlink(f"/proc/{replacement.pid}/ns/uts") != os.readlink("/proc/self/ns/uts")
    done = job.wait()
    check_same(done, reference)
    check_recovered(done, {1})


@pytest.mark.grid
def test_two_jobs_at_once_on_a_node(reference: Job, tmp_path: Path) -> None:
    jobs = []
    for name, victim in (("one", 0), ("two", 1)):
        inject = [f"rank={victim},fault=sigkill,at=backward,step=4"]
        jobs.append(adopted(tmp_path / name, TWO, stand_in(2), steps=12, standby=0, inject=inject))
    for job, victim in zip(jobs, (0, 1), strict=True):
        done = job.wait()
        check_same(done, reference)
        check_recovered(done, {victim})


# -- ends ---------------------------------------------------------------------------------------------


def test_a_task_that_never_comes(tmp_path: Path) -> None:
    """All others end with an error that names it."""
    launcher = stand_in(3, "--keep-going", "--start", "0", "--start", "1")
    config = {"timeouts": {"rendezvous_s": 2.0}}
    done = adopted(tmp_path, Layout("three", "train_ddp.py", nproc=3), launcher, standby=0, config=config).wait()
    assert codes(done) == [2, 2], done.explain()
    assert "the tasks of ranks [2] have not come" in done.output
    check_clean(done)


def test_the_first_task_never_comes(tmp_path: Path) -> None:
    launcher = stand_in(2, "--keep-going", "--start", "1")
    done = adopted(tmp_path, TWO, launcher, standby=0, config={"timeouts": {"rendezvous_s": 2.0}}).wait()
    assert codes(done) == [2] and "the task with local rank 0, which starts it, has not come" in done.output
    check_clean(done)


def test_a_task_with_other_options(tmp_path: Path) -> None:
    """It is refused, and so the launcher ends the others."""
    (tmp_path / "other.sh").write_text('#!/bin/sh\nexec "$@" --seed 7\n')
    (tmp_path / "other.sh").chmod(0o755)
    done = adopted(tmp_path, TWO, stand_in(2, "--before", f"1={tmp_path}/other.sh"), standby=0).wait()
    assert done.code != 0 and 2 in codes(done), done.explain()
    assert "has another command or other options" in done.output, done.explain()
    check_clean(done)


@pytest.mark.grid
def test_a_job_that_fails_ends_every_task_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nraise ValueError('own')\n"
    )
    launcher = stand_in(2, "--keep-going")
    done = adopted(tmp_path, TWO, launcher, script=tmp_path / "script.py", standby=0, config={"max_restarts": 0}).wait()
    assert codes(done) == [1, 1], done.explain()
    assert "ValueError: own" in done.output and "the job failed" in done.output
    check_clean(done)


@pytest.mark.grid
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_that_is_told_to_end(launcher, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    job = adopted(tmp_path, TWO, launcher(2), steps=500, flags=["--step-time", "100"])
    job.wait_for_step(2)
    job.popen.send_signal(signal.SIGTERM)
    began = time.monotonic()
    done = job.wait(30)
    assert done.code not in (0, -1000) and time.monotonic() - began < 15
    deadline = time.monotonic() + 10  # a snapshot is written before the agent ends
    while marked_processes(job.marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    check_clean(done)


def test_tasks_that_are_killed_leave_nothing(tmp_path: Path) -> None:
    """No one has told the agent of it."""
    job = adopted(tmp_path, TWO, stand_in(2), steps=500, flags=["--step-time", "100"])
    job.wait_for_step(2)
    for task in guards(job).values():
        task.kill()
    done = job.wait(30)
    deadline = time.monotonic() + 15
    while marked_processes(job.marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    check_clean(done)


SIGNALLED = """
import signal, time
import torch, torch.distributed as dist
import flashrecovery

seen, warned = [], False
signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
dist.init_process_group("gloo")
recovery = flashrecovery.init()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recovery.register(model=model, optimizer=optimizer)
for step in recovery.steps(1000):
    with step:
        told = torch.tensor([len(seen)])
        dist.all_reduce(told, op=dist.ReduceOp.MIN)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
    print(f"step={step.index}", flush=True)
    if told.item() and not warned:
        print(f"warned rank={dist.get_rank()}", flush=True)
        warned = True
"""


def test_a_warning_of_the_launcher_reaches_every_rank_and_an_agent_that_is_killed_ends_the_tasks(
    tmp_path: Path,
) -> None:
    """As Slurm's --signal does it."""
    (tmp_path / "script.py").write_text(SIGNALLED)
    launcher, options = stand_in(2, "--keep-going"), ["--snapshots", "never"]
    job = adopted(tmp_path, TWO, launcher, script=tmp_path / "script.py", standby=0, options=options)
    job.wait_for_step(2)
    job.popen.send_signal(signal.SIGUSR1)
    deadline, wanted = time.monotonic() + 30, {"warned rank=0", "warned rank=1"}
    while not wanted <= set((tmp_path / "run.out").read_text().splitlines()) and time.monotonic() < deadline:
        time.sleep(0.05)
    agent_of(job).kill()
    done = job.wait(30)
    assert wanted <= set(done.output.splitlines()), done.explain()
    assert codes(done) == [1, 1] and "the agent of this node has ended" in done.output, done.explain()
    check_clean(done)
