"""The state does not fit into the node's memory while the layout changes: said before the first step, and where that
comes later, the job goes back to a checkpoint."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.installed import skip_module_without
from tests.support.jobs import RunningJob, check_clean
from tests.support.replan import TIMEOUT_S, Saved, Sizes, Training, check_goes_on, replanned, start
from tests.support.replan_scenarios import SLOWLY, wait_for_version

skip_module_without("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(4 * TIMEOUT_S)]

STAGES = Training("tp2-pp2", Sizes(2, 2, 1), ("--bf16",))
PAGE = 4096


def in_memory_of(nbytes: int) -> Sequence[str]:
    """What is started so has a ``/dev/shm`` of its own. Skips the test where that is not allowed."""
    command = f'mount -t tmpfs -o size={nbytes} tmpfs /dev/shm && exec "$@"'
    within = ["unshare", "--mount", "sh", "-c", command, "sh"]
    if subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    return within


def fill(running: RunningJob, left: int) -> None:
    """So many bytes stay free in the job's memory."""
    memory = Path(f"/proc/{running.popen.pid}/root/dev/shm")
    free = os.statvfs(memory).f_bavail * PAGE
    (memory / "other").write_bytes(bytes(free - left))


def test_it_is_refused_before_the_first_step(tmp_path: Path) -> None:
    job = start(tmp_path / "run", STAGES, within=in_memory_of(10 * PAGE)).wait(TIMEOUT_S)
    assert job.code != 0 and not job.of("job_started"), job.explain()
    assert "the state is in the nodes' memory (/dev/shm)" in job.output and "--shm-size" in job.output, job.explain()
    check_clean(job)


def test_what_optimizers_will_make_is_warned_of(tmp_path: Path) -> None:
    job = start(tmp_path / "run", STAGES, within=in_memory_of(20 * PAGE)).wait(TIMEOUT_S)
    assert job.code == 0, job.explain()
    (notice,) = job.notices("unprotected")
    assert "(/dev/shm)" in notice["text"], job.explain()
    check_clean(job)


@pytest.mark.parametrize("checkpoints", [True, False])
def test_there_is_no_more_room(checkpoints: bool, tmp_path: Path, saved: Saved) -> None:
    """Something else has taken it since."""
    options = ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-interval", "0.2"]
    running = start(
        tmp_path / "run", STAGES, *SLOWLY, options=options if checkpoints else (), within=in_memory_of(16 << 20)
    )
    if checkpoints:
        running.wait_for("checkpoint_saved", TIMEOUT_S)
    wait_for_version(running, 2)
    fill(running, PAGE)
    running.kill(1)
    job = running.wait(TIMEOUT_S)
    if not checkpoints:
        assert job.code != 0 and "No space left on device" in job.output, job.explain()
        assert not replanned(job), job.explain()
        return
    (fallback,) = job.of("fallback_started")
    assert "No space left on device" in fallback["reason"], job.explain()
    (change,) = replanned(job)
    assert change[0] == fallback["version"] > 0, job.explain()
    check_goes_on(job, STAGES, saved, [change])


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("replanned"))
