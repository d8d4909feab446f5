"""Ranks on the actors of a real Ray cluster of this machine: a rank is killed, and Ray notices nothing.

Needs the extra `ray`; skipped without it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.jobs import (
    GPT,
    MARKER,
    ROOT,
    SMALL,
    Job,
    check_fired,
    check_recovered,
    check_same,
    marked_processes,
    read_digests,
    read_events,
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
    pytest.mark.ray,
]
STEPS = 12
KILLS = ["rank=1,fault=sigkill,at=backward,step=3", "rank=0,fault=sigkill,at=optimizer,step=6"]


def launched(folder: Path, *options: str, inject: list[str] | None = None) -> Job:
    """The example, on a cluster that it starts itself."""
    folder.mkdir()
    run_dir, marker = folder / "run", uuid.uuid4().hex
    adopt = " ".join(["--standby 1", *(f"--inject {spec}" for spec in inject or [])])
    command = [sys.executable, str(GPT / "train_ray.py"), "--workers", "2", "--cpus-per-worker", "0.5"]
    command += ["--run-dir", str(run_dir), "--options", adopt, *options, *SMALL, "--steps", str(STEPS)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", MARKER: marker, "RAY_AUTH_MODE": "disabled"}
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "PYTHONFAULTHANDLER": "1"}
    env["RAY_TMPDIR"] = f"/tmp/fr-ray-{marker[:6]}"  # a socket's path is 108 bytes at most
    env["PYTHONPATH"] = f"{ROOT / 'common'}:{os.environ.get('PYTHONPATH', '')}"
    began = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT)
    job = Job(
        code=done.returncode,
        output=done.stdout + done.stderr,
        run_dir=run_dir,
        seconds=time.monotonic() - began,
        marker=marker,
        events=read_events(run_dir),
    )
    read_digests(job, (run_dir / "logs").glob("rank*.log"))
    deadline = time.monotonic() + 30  # Ray's own processes end after the driver
    while marked_processes(marker) and time.monotonic() < deadline:
        time.sleep(0.2)
    subprocess.run(["rm", "-rf", env["RAY_TMPDIR"]], check=True)
    return job


@pytest.fixture(scope="module", params=[["--actors"], []], ids=["a placement group's actors", "Ray Train"])
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Job]]:
    """How the ranks are started, and that without a fault."""
    folder = tmp_path_factory.mktemp("reference")
    reference = launched(folder / "job", *request.param)
    assert reference.code == 0, reference.explain()
    yield request.param, reference


def test_ranks_are_killed_and_ray_does_not_notice(way: tuple[list[str], Job], tmp_path: Path) -> None:
    options, reference = way
    job = launched(tmp_path / "job", *options, inject=KILLS)
    check_same(job, reference)
    check_fired(job, 2)
    check_recovered(job, {0, 1})
    if not options:
        assert _reported(job) == _reported(reference), "each report once, not once for each attempt"
        assert [one["step"] for one in _reported(job)] == list(range(1, STEPS, 2))
        checkpoints = [_checkpoints(one) for one in (job, reference)]
        assert checkpoints[0] == checkpoints[1] and len(checkpoints[0]) == STEPS // 2


def _reported(job: Job) -> list[dict[str, float]]:
    found = re.search(r"^reported: (\[.*\])$", job.output, re.MULTILINE)
    assert found is not None, job.explain()
    reports: list[dict[str, float]] = ast.literal_eval(found[1])
    return sorted(reports, key=lambda one: one["step"])


def _checkpoints(job: Job) -> list[dict[str, bytes]]:
    """The weights of each checkpoint that Ray has, in the order of their times."""
    files = sorted((job.run_dir / "ray").rglob("model.pt"))
    states = [torch.load(file) for file in files]
    return [{name: tensor.numpy().tobytes() for name, tensor in state.items()} for state in states]
