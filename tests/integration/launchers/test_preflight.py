"""Before a job starts, each rank computes and communicates what is known; what is bad is named. Real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flashrecovery.cli import preflight
from flashrecovery.errors import PreflightError
from tests.support.jobs import GPT, PROGRAM, ROOT, SMALL

SCRIPT = ROOT / "tests" / "scripts" / "preflight_fault.py"


def _check(fault: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFLIGHT_FAULT": fault, "GLOO_SOCKET_IFNAME": "lo"}
    return preflight.check(2, environment, (sys.executable, str(SCRIPT)))


def test_two_ranks_that_compute_what_they_should() -> None:
    """One of them prints more than a pipe holds, as NCCL does with NCCL_DEBUG=INFO."""
    said = _check("1:talk")
    assert "CPU rank 0 of" in said and "CPU rank 1 of" in said and "GEMM and all-reduce are right" in said


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("gemm", "CPU rank 1 of .*: 1 of 65536 numbers of a torch.float32 product are wrong \\(GEMM number 0\\)"),
        ("sum", "CPU rank 1 of .*: 1 of 262144 sums over 2 ranks are wrong \\(all-reduce number 0\\)"),
        ("exit", "the device of local rank 1: ended with code 1 \\(the device is gone\\), in stage start"),
    ],
)
def test_a_bad_one_is_named(fault: str, said: str) -> None:
    with pytest.raises(PreflightError, match=f"^preflight: {said}$"):
        _check(f"1:{fault}")


def test_one_that_stands_still_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "START_S", 15.0)
    began = time.monotonic()
    with pytest.raises(PreflightError, match=r"local rank 1: has not ended within 15 s, in stage start$"):
        _check("1:hang")
    assert time.monotonic() - began < 40


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _wait_until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_is_left_of_one_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from flashrecovery.cli import preflight\n"
        f"preflight.check(1, os.environ, (sys.executable, {str(SCRIPT)!r}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFLIGHT_FAULT": "0:stay", "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as launcher:
        _wait_until(lambda: any("start" in path.read_text() for path in tmp_path.glob("*/out.0")))
        ranks = _children(launcher.pid)
        assert ranks
        launcher.kill()
    _wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (preflight.RankReport(1, "GPU 1", ["start"]), "GPU 1: has not ended within 60 s, in stage gemm"),
        (preflight.RankReport(1, "GPU 1", [], ended="ended with code 1"), "GPU 1: ended with code 1, in stage start"),
        (
            preflight.RankReport(1, "GPU 1", ["start"], ended="ended with code 1"),
            "GPU 1: ended with code 1, in stage gemm",
        ),
    ],
)
def test_healthy_ones_that_wait_for_it_are_not_named(one: preflight.RankReport, said: str) -> None:
    slow = preflight.RankReport(2, "GPU 2", [])
    waits = preflight.RankReport(0, "GPU 0", ["start", "gemm"])
    assert preflight.verdict([waits, one, *([slow] if one.ended else [])], 60.0) == said


def test_a_job_starts_behind_it(tmp_path: Path) -> None:
    command = [*PROGRAM, "run", "--preflight", "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run")]
    command += [str(GPT / "train_ddp.py"), *SMALL, "--steps", "2"]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "GEMM and all-reduce are right" in ended.stdout + ended.stderr
