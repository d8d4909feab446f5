"""Snapshots under DeepSpeed, Megatron and HSDP: all ranks die at once, or everything does and a new launch goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import megatron as mg
from tests.support.jobs import HSDP, Job, Layout, References, RunningJob, check_same, run_job
from tests.support.unique_state import FRAMEWORKS, TIMEOUT_S, environment, marks

STEPS = 30
ALWAYS = ("--snapshots", "always")
REPLICATED = mg.gpt("tp2-dp2", *mg.TP)
pytestmark = pytest.mark.timeout(TIMEOUT_S)


def _cases() -> list[object]:
    return [
        pytest.param(
            layout,
            options,
            id=layout.name,
            marks=marks(layout, quick=False),
        )
        for layout, options in [*((layout, ()) for layout in FRAMEWORKS), (REPLICATED, ALWAYS), (HSDP, ALWAYS)]
    ]


def start(run_dir: Path, layout: Layout, *options: str) -> RunningJob:
    return RunningJob(run_dir, layout, steps=STEPS, standby=0, options=options, env=environment(layout))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Job]:
    def launch(folder: Path, layout: Layout) -> Job:
        return run_job(folder, layout, steps=STEPS, standby=0, env=environment(layout), timeout_s=TIMEOUT_S)

    return References(lambda: tmp_path_factory.mktemp("reference"), launch)


@pytest.mark.parametrize("launcher", [False, True], ids=["ranks", "launcher"])
@pytest.mark.parametrize(("layout", "options"), _cases())
def test_everybody_dies_at_once(
    layout: Layout, options: tuple[str, ...], launcher: bool, tmp_path: Path, reference: Callable[[Layout], Job]
) -> None:
    """All ranks, or the launcher, too: then the next one goes on."""
    running = start(tmp_path / "run", layout, *options)
    running.wait_for_step(6, TIMEOUT_S)
    pids = [*running.ranks().values(), *([running.popen.pid] if launcher else [])]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    job = running.wait(TIMEOUT_S)
    if launcher:
        job = start(tmp_path / "run", layout, *options, "--resume").wait(TIMEOUT_S)
        (version,) = job.gone_on_from_snapshots()
        assert version >= 6
    else:
        victims = {v for e in job.of("recovery_finished") for v in e["victims"]}
        assert victims == {*range(layout.nproc)}, job.explain()
    check_same(job, reference(layout), launches=1 + launcher)
