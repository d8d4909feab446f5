"""``flashrecovery run`` from outside: exit codes, clear errors, clean ends, misbehaving scripts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flashrecovery.terminal import unwrapped
from tests.support.jobs import (
    Job,
    Layout,
    References,
    RunningJob,
    check_clean,
    check_fired,
    check_recovered,
    marked_processes,
    run_job,
)

TINY = Path(__file__).parents[2] / "scripts" / "tiny.py"
TWO = Layout("two", "tiny.py", nproc=2)
LONG = Layout("plain", "", ("--steps", "30"))
STORE = "flashrecovery.agent.stores.store_server"
EXIT_HANDLER = """
import atexit

@atexit.register
def sum_up():
    ones = torch.ones(1)
    dist.all_reduce(ones)
    print("summed up", ones.item(), flush=True)

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
"""
_END = re.compile(r"end rank=(\d+) version-sum=(\S+) settings=(\S+) rng=(\S+)")


def tiny(run_dir: Path, *flags: str, nproc: int = 2, **kwargs: Any) -> Job:
    kwargs.setdefault("standby", 0)
    return run_job(run_dir, Layout("tiny", "", nproc=nproc), script=TINY, flags=flags, **kwargs)


def ends(job: Job) -> dict[int, tuple[str, str]]:
    """Rank -> (end state, random number) as printed last."""
    text = "\n".join(p.read_text() for p in sorted((job.run_dir / "logs").glob("rank*.log")))
    return {int(m[1]): (m[2], m[4]) for m in _END.finditer(text)}


def run_cli(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "flashrecovery.cli.main", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **(env or {})},
    )
    done.stderr = unwrapped(done.stderr)
    return done


# -- bad input: refused before any process starts ---------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["run", "nowhere.py"], ["nowhere.py", "does not exist"]),
        (["run", "--redundancy", "replcia", str(TINY)], ["redundancy", "replcia", "replica"]),
        (["run", "--redundancy", "neighbor", str(TINY)], ["redundancy", "world size is 1"]),
        (["run", "--nproc-per-node", "two", str(TINY)], ["--nproc-per-node", "two", "gpu"]),
        (["run", "--checkpoint-interval", "soon", str(TINY)], ["--checkpoint-interval", "soon", "auto"]),
        (["run", "--inject", "rank=0,at=bakward", str(TINY)], ["bakward", "backward"]),
        (["run", "--inject", "rank=9,at=backward", str(TINY)], ["rank 9", "world"]),
        (["run", "--nnodes", "2", str(TINY)], ["nnodes = 2", "--controller"]),
        (["run", "--nnodes", "2", "--master_addr", "no.such.host", str(TINY)], ["no.such.host", "resolved"]),
        (["run", "--run-dir", "/proc/nowhere", str(TINY)], ["/proc/nowhere", "cannot be written"]),
        (["run", "--config", "missing.yaml", str(TINY)], ["missing.yaml", "No such file"]),
    ],
)
def test_wrong_options_are_named(args: list[str], expected: list[str]) -> None:
    done = run_cli(*args)
    assert done.returncode == 2, done.stderr
    for text in expected:
        assert text in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--standalone", "--nproc_per_node=1"], marks=[pytest.mark.grid, pytest.mark.mutants]),
        ["--rdzv_backend=c10d", "--rdzv_id=7", "--master_addr", "localhost", "--master_port", "0", "--nnodes=1"],
    ],
)
def test_torchruns_options_are_taken(options: list[str], tmp_path: Path) -> None:
    done = run_cli("run", *options, "--run-dir", str(tmp_path / "run"), str(TINY), "--steps", "2")
    assert done.returncode == 0, done.stderr


def test_unknown_config_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("timeouts: {heartbeet_s: 1}\nstandby: many\n")
    done = run_cli("run", "--config", str(tmp_path / "c.yaml"), str(TINY))
    assert done.returncode == 2
    for text in ("timeouts.heartbeet_s", "heartbeat_s", "standby", "many"):
        assert text in done.stderr


def test_port_in_use(tmp_path: Path) -> None:
    import socket

    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        port = s.getsockname()[1]
        done = run_cli("run", "--master-port", str(port), "--run-dir", str(tmp_path / "r"), str(TINY))
    assert done.returncode == 2 and str(port) in done.stderr


FORGOTTEN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def test_a_script_that_takes_no_protected_step_is_told_in_its_first_steps(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FORGOTTEN)
    job = run_job(tmp_path / "run", Layout("forgotten", "", nproc=2), script=tmp_path / "script.py", standby=0)
    assert job.code == 0, job.explain()
    first, last = job.notices("unprotected")
    assert f"{tmp_path / 'script.py'}:8, and none of them is protected" in first["text"], first
    assert "has ended without a protected step" in last["text"]
    check_clean(job)


# -- misbehaving scripts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("raise-before", "no such data set"),
        pytest.param("unregistered", "no model is registered", marks=pytest.mark.grid),
        pytest.param("twice", "registered already", marks=pytest.mark.grid),
        pytest.param("not-iterable", "DataSourceError", marks=pytest.mark.grid),
        ("unequal", "not equal on all ranks"),
        ("uneven-steps", "needs the same number on every rank, but there is steps(8) on rank 0; steps(9) on rank 1"),
        pytest.param("no-world", "torch.distributed is not initialised", marks=pytest.mark.grid),
        pytest.param(
            "second-loop", "recovery.steps() can be run through only once in a process", marks=pytest.mark.grid
        ),
        ("late-data", "recovery.data() after the first step"),
    ],
)
def test_wrong_use_ends_the_job_with_its_reason(mode: str, expected: str, tmp_path: Path) -> None:
    job = tiny(tmp_path / "run", "--mode", mode)
    assert job.code == 1, job.explain()
    assert expected in job.output, job.explain()
    check_clean(job)


def test_an_exception_of_all_ranks_is_the_scripts_own_and_ends_the_job(tmp_path: Path) -> None:
    """Starting again from the first line would only raise it again."""
    job = tiny(tmp_path / "run", "--mode", "not-entered")
    assert job.code == 1 and "with step:" in job.output and "the script raised" in job.output, job.explain()
    assert not [e for e in job.of("notice") if e["kind"] == "start_again"], job.explain()
    assert {e["exception"] for e in job.of("failure_detected")} == {"flashrecovery.errors.RegistrationError"}
    check_clean(job)


def test_a_step_that_always_fails_ends_the_job(tmp_path: Path) -> None:
    job = tiny(tmp_path / "run", "--mode", "always-raise", standby=1)
    assert job.code == 1 and "failed 3 times at step 3" in job.output, job.explain()
    assert all(e["exception"] == "ValueError" and "bad sample" in e["traceback"] for e in job.of("failure_detected"))
    check_clean(job)


def test_unstable_data_is_refused_and_never_resumed_wrongly(tmp_path: Path) -> None:
    job = tiny(tmp_path / "run", "--mode", "unstable-data", inject=["rank=1,at=backward,step=4"])
    assert job.code == 1 and "DataSourceError" in job.output, job.explain()
    check_clean(job)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Job]:
    """The launch without a fault, once a mode (the layout's name) and its flags."""
    return References(
        lambda: tmp_path_factory.mktemp("undisturbed"),
        lambda path, layout: tiny(path, "--mode", layout.name, *layout.flags),
    )


MODES = ("plain", "swallow", "reduce-after", "swallow-after", "poll-after", "future-after", "evaluate-after")
MODES += ("random-after", "idle-steps", "calls")
QUICK_CASES = {("calls", "commit")}


def _marks(mode: str, phase: str) -> list[pytest.MarkDecorator]:
    if (mode, phase) in QUICK_CASES:
        return []
    return [pytest.mark.grid, *([pytest.mark.mutants] if (mode, phase) == ("random-after", "optimizer") else [])]


@pytest.mark.parametrize(
    ("mode", "phase"),
    [
        pytest.param(mode, phase, marks=_marks(mode, phase))
        for mode in MODES
        for phase in ("backward", "optimizer", "commit")
    ],
)
def test_bitwise_whatever_the_body_does(
    mode: str, phase: str, tmp_path: Path, undisturbed: Callable[[Layout], Job]
) -> None:
    """A body that swallows the error, or goes on communicating, evaluating or drawing numbers after the optimizer."""
    reference = undisturbed(Layout(mode, ""))
    job = tiny(tmp_path / "run", "--mode", mode, inject=[f"rank=1,at={phase},step=4"])
    assert job.code == 0, job.explain()
    check_fired(job)
    assert len(ends(reference)) == 2
    assert ends(job) == ends(reference), job.explain()
    if mode.endswith("-after"):
        assert job.notices("pre_step_copy_enabled"), job.explain()
    check_clean(job)


@pytest.mark.parametrize("phase", ["data", pytest.param("commit", marks=pytest.mark.grid)])
def test_a_rank_dies_in_a_step_without_an_optimizer_step(
    phase: str, tmp_path: Path, undisturbed: Callable[[Layout], Job]
) -> None:
    """No one is through with such a step before all have come to its end."""
    job = tiny(tmp_path / "run", "--mode", "idle-steps", inject=[f"rank=1,at={phase},step=5"])
    assert job.code == 0, job.explain()
    check_fired(job)
    assert ends(job) == ends(undisturbed(Layout("idle-steps", ""))), job.explain()
    check_clean(job)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.grid), 1])
def test_a_rank_dies_in_the_last_call_while_the_other_destroys_its_groups(
    rank: int, tmp_path: Path, undisturbed: Callable[[Layout], Job]
) -> None:
    """Eight steps and two evaluations, then the end of the script: the survivor waits there with its groups alive."""
    reference = undisturbed(Layout("calls", ""))
    job = tiny(tmp_path / "run", "--mode", "calls", inject=[f"rank={rank},at=commit,step=9"])
    assert job.code == 0, job.explain()
    check_fired(job)
    assert ends(job) == ends(reference), job.explain()
    check_clean(job)


def test_a_rank_dies_in_its_first_step_while_the_other_has_not_heard_that_it_may_begin(tmp_path: Path) -> None:
    """Both ranks prove the redone step, though only one of them had begun it."""
    flags = ["--mode", "slow-to-begin", "--steps", "4"]
    reference = tiny(tmp_path / "reference", *flags)
    job = tiny(tmp_path / "run", *flags, inject=["rank=1,at=forward,step=0"])
    assert job.code == 0, job.explain()
    check_fired(job)
    check_recovered(job, [1])
    log = (job.run_dir / "logs" / "rank0.gen0.log").read_text()
    assert "was busy" in log and len(job.of("recovery_finished")) == 1, log
    assert ends(job) == ends(reference), job.explain()
    check_clean(job)


def test_a_survivor_whose_collective_fails_before_it_hears_why_is_not_lost(
    tmp_path: Path, undisturbed: Callable[[Layout], Job]
) -> None:
    """The launcher, with agent and controller, stands still while a rank dies."""
    reference = undisturbed(LONG)
    running = RunningJob(tmp_path / "run", TWO, script=TINY, flags=[*LONG.flags, "--sleep", "0.1"], standby=0)
    running.wait_for("job_started")
    os.kill(running.popen.pid, signal.SIGSTOP)
    running.kill(1)
    time.sleep(0.5)
    os.kill(running.popen.pid, signal.SIGCONT)
    job = running.wait()
    assert job.code == 0, job.explain()
    check_recovered(job, [1])
    assert ends(job) == ends(reference), job.explain()
    check_clean(job)


def test_the_store_dies_and_then_a_rank(tmp_path: Path, undisturbed: Callable[[Layout], Job]) -> None:
    """The groups meet in the store that has been restarted, at the same address."""
    reference = undisturbed(LONG)
    running = RunningJob(tmp_path / "run", TWO, script=TINY, flags=[*LONG.flags, "--sleep", "0.1"], standby=0)
    running.wait_for("job_started")
    (store,) = (p for p in psutil.Process(running.popen.pid).children() if STORE in p.cmdline())
    store.kill()
    running.kill(1)
    job = running.wait()
    assert job.code == 0, job.explain()
    assert job.notices("store_restarted"), job.explain()
    check_recovered(job, [1])
    assert ends(job) == ends(reference), job.explain()
    check_clean(job)


@pytest.mark.grid
def test_the_store_of_a_job_on_one_node_listens_there_only(tmp_path: Path) -> None:
    """Also where the controller is asked to listen on an address that others reach; the store asks for no secret."""
    addresses = [a for of in psutil.net_if_addrs().values() for a in of if a.family == socket.AF_INET]
    outside = [a.address for a in addresses if not a.address.startswith("127.")]
    if not outside:
        pytest.skip("this host has no address but loopback")
    with socket.socket() as free:
        free.bind((outside[0], 0))
        options = ["--nnodes", "1", "--controller", f"{outside[0]}:{free.getsockname()[1]}"]
    flags = ["--steps", "30", "--sleep", "0.1"]
    env = {"FLASHRECOVERY_TOKEN": "the-token-of-this-test-job"}
    running = RunningJob(tmp_path / "run", TWO, script=TINY, options=options, flags=flags, standby=0, env=env)
    running.wait_for("job_started")
    (store,) = (p for p in psutil.Process(running.popen.pid).children() if STORE in p.cmdline())
    listens = [c.laddr.ip for c in store.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    controller = psutil.Process(running.popen.pid).net_connections("tcp")
    controls = {c.laddr.ip.removeprefix("::ffff:") for c in controller if c.status == psutil.CONN_LISTEN}
    running.kill(1)
    job = running.wait()
    assert job.code == 0, job.explain()
    check_recovered(job, [1])
    assert listens == ["127.0.0.1"] and outside[0] in controls, (listens, controls)
    check_clean(job)


@pytest.mark.grid
@pytest.mark.mutants
def test_break_on_all_ranks_ends_the_job_well(tmp_path: Path) -> None:
    job = tiny(tmp_path / "run", "--mode", "break")
    assert job.code == 0 and len(ends(job)) == 2, job.explain()
    check_clean(job)


def test_a_deadlocked_rank_is_found_and_replaced(tmp_path: Path, undisturbed: Callable[[Layout], Job]) -> None:
    reference = undisturbed(Layout("plain", ""))
    job = tiny(tmp_path / "run", "--mode", "deadlock", options=["--hang-timeout", "1.5"])
    assert job.code == 0, job.explain()
    (failure,) = job.of("failure_detected")
    assert failure["kind"] == "hang" and failure["rank"] == 1, failure
    assert "tiny.py" in failure["evidence"] and "1 rank waits for it in flashrecovery's own " in failure["evidence"]
    assert failure["detect_s"] >= 1.5
    assert ends(job) == ends(reference)
    check_clean(job)


@pytest.mark.grid
def test_ranks_that_wait_for_each_other_are_told_apart_from_ranks_that_loop(
    tmp_path: Path, undisturbed: Callable[[Layout], Job]
) -> None:
    reference = undisturbed(Layout("plain", ""))
    job = tiny(tmp_path / "run", "--mode", "crossed", options=["--hang-timeout", "1.5"])
    assert job.code == 0, job.explain()
    (failure,) = job.of("failure_detected")
    assert failure["kind"] == "hang" and "deadlock of ranks 0 and 1" in failure["evidence"], failure
    assert len(job.notices("deadlock")) == 1
    assert ends(job) == ends(reference)
    check_clean(job)


@pytest.mark.grid
def test_a_slow_rank_is_reported_and_nothing_else_happens(tmp_path: Path) -> None:
    job = tiny(tmp_path / "run", "--mode", "slow", "--steps", "60", nproc=3)
    assert job.code == 0 and not job.of("recovery_started"), job.explain()
    slow = job.notices("straggler")
    assert {n["rank"] for n in slow} == {1} and "own work" in slow[0]["text"], job.explain()
    check_clean(job)


def test_an_exception_between_two_steps_is_a_failure_like_any_other(
    tmp_path: Path, undisturbed: Callable[[Layout], Job]
) -> None:
    reference = undisturbed(Layout("plain", ""))
    job = tiny(tmp_path / "run", "--mode", "raise-between")
    assert job.code == 0, job.explain()
    (failure,) = job.of("failure_detected")
    assert failure["exception"] == "ValueError" and failure["rank"] == 1
    assert ends(job) == ends(reference)
    check_clean(job)


@pytest.mark.grid
def test_exit_handlers_communicate(tmp_path: Path) -> None:
    """Also one that the script registers before it imports torch: ours comes last all the same."""
    script = tmp_path / "train.py"
    script.write_text(EXIT_HANDLER)
    two = Layout("two", "", nproc=2)  # in interpreters that have imported nothing of torch
    job = run_job(tmp_path / "run", two, script=script, standby=0, options=["--start-method", "spawn"])
    assert job.code == 0, job.explain()
    logs = [p.read_text() for p in (job.run_dir / "logs").glob("rank*.log")]
    assert [log.count("summed up 2.0") for log in logs] == [1, 1], job.explain()
    check_clean(job)


def test_exit_code_of_a_script_is_a_failure(tmp_path: Path) -> None:
    job = tiny(tmp_path / "run", "--mode", "exit-3")
    assert job.code == 1 and "after its last step" in job.output, job.explain()
    check_clean(job)


def test_a_replacement_gets_the_set_up_values_of_its_predecessor(tmp_path: Path) -> None:
    """Rank 0 broadcasts its pid at start; its replacement, with another pid, must see the first one's value."""
    job = tiny(tmp_path / "run", inject=["rank=0,at=backward,step=4"])
    assert job.code == 0, job.explain()
    text = "\n".join(p.read_text() for p in (job.run_dir / "logs").glob("rank*.log"))
    assert len({m[3] for m in _END.finditer(text)}) == 1, text
    check_recovered(job)


# -- ends -----------------------------------------------------------------------------------------------


def _ends_within_five_seconds(job: RunningJob, number: signal.Signals) -> None:
    began = time.monotonic()
    job.popen.send_signal(number)
    ended = job.wait(10)
    assert time.monotonic() - began < 5.0
    _has_ended_by(ended, number)


def _has_ended_by(ended: Job, number: signal.Signals) -> None:
    assert ended.code == 1 and number.name in ended.output, ended.explain()
    check_clean(ended)


@pytest.mark.grid
def test_ctrl_c_ends_everything_within_five_seconds(tmp_path: Path) -> None:
    job = RunningJob(tmp_path / "run", TWO, script=TINY, flags=["--steps", "5000"], standby=1)
    job.wait_for("standby_ready")
    _ends_within_five_seconds(job, signal.SIGINT)


def test_a_live_job_keeps_its_directory_replenishes_its_standby_and_ends_at_a_signal(tmp_path: Path) -> None:
    job = RunningJob(tmp_path / "run", TWO, script=TINY, flags=["--steps", "5000"], standby=1)
    job.wait_for("standby_ready")
    done = run_cli("run", "--run-dir", str(tmp_path / "run"), str(TINY))
    assert done.returncode == 2 and "live job" in done.stderr
    before = job.ranks()
    os.kill(before[1], signal.SIGKILL)
    job.wait_for("recovery_finished")
    after = job.ranks()
    assert after[0] == before[0] and after[1] != before[1]
    job.wait_for("standby_ready", generation=1, ready=1)
    job.popen.send_signal(signal.SIGTERM)
    _has_ended_by(job.wait(), signal.SIGTERM)  # how soon: in the grid, where nothing else runs


def test_ctrl_c_in_the_first_moment_of_a_launch_ends_it_in_order(tmp_path: Path) -> None:
    """While libraries are imported and the controller starts: none of them prints a traceback."""
    job = RunningJob(tmp_path / "run", TWO, script=TINY, flags=["--steps", "5000"], standby=0)
    deadline = time.monotonic() + 60
    while "run directory" not in Path(job._out.name).read_text():
        assert time.monotonic() < deadline and job.popen.poll() is None
    job.popen.send_signal(signal.SIGINT)
    ended = job.wait(60)
    assert ended.code == 1 and "stopped by SIGINT" in ended.output and "Traceback" not in ended.output, ended.explain()
    assert not ended.of("job_started"), ended.explain()
    check_clean(ended)


def test_a_killed_launcher_takes_its_processes_with_it(tmp_path: Path) -> None:
    options = ["--snapshots", "never"]  # a snapshot waits for the next launch
    job = RunningJob(tmp_path / "run", TWO, script=TINY, flags=["--steps", "5000"], standby=1, options=options)
    job.wait_for("standby_ready")
    job.popen.kill()
    ended = job.wait()
    deadline = time.monotonic() + 15
    while marked_processes(job.marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    check_clean(ended)


def test_all_ranks_killed_at_once_is_a_clear_error(tmp_path: Path) -> None:
    options = ["--snapshots", "never"]
    job = RunningJob(tmp_path / "run", TWO, script=TINY, flags=["--steps", "5000"], standby=0, options=options)
    job.wait_for("job_started")
    job.wait_until_committed(2)
    for pid in job.ranks().values():
        os.kill(pid, signal.SIGKILL)
    ended = job.wait()
    assert ended.code == 1 and "no survivor" in ended.output, ended.explain()
    check_clean(ended)


def test_the_same_script_under_python_and_torchrun(tmp_path: Path, undisturbed: Callable[[Layout], Job]) -> None:
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    alone = {**env, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, str(TINY)], capture_output=True, text=True, timeout=60, env=alone, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("recovery is off") == 1
    # A file for each rank: on one pipe torchrun's ranks write into each other's lines.
    files = ["--log-dir", str(tmp_path / "torchrun"), "--redirects", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *files]
    done = subprocess.run([*command, str(TINY)], capture_output=True, text=True, timeout=90, env=env, check=False)
    assert done.returncode == 0 and done.stderr.count("recovery is off") == 1, done.stderr
    ours = undisturbed(Layout("plain", ""))
    outputs = [file.read_text() for file in (tmp_path / "torchrun").rglob("stdout.log")]
    torchrun = {int(m[1]): (m[2], m[4]) for output in outputs for m in _END.finditer(output)}
    assert ends(ours) == torchrun  # recovery changes nothing of a healthy run
