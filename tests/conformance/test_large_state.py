"""A second rank dies while much state comes back, in every phase of the recovery.

In each job of three ranks, all of which hold everything, one rank is killed in its step and another one, or the first
one's replacement, in the recovery from that. So the source of a transfer dies, or its target, and the last rank has
all there is. In the end every rank has the bits of the same launch without a fault. And no process has needed more than
a tenth of the state beyond what it needs in training.

``FLASHRECOVERY_LARGE_STATE`` is the size in MB (of parameters and both moments), ``FLASHRECOVERY_LARGE_STATE_KILLS``
the number of second deaths in each phase, ``FLASHRECOVERY_SOAK_SEED`` changes the choice.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashrecovery.cli.inject import inject
from tests.support.jobs import Job, Layout, References, RunningJob, check_fired, check_same, run_job
from tests.support.soak import SEED, kill_now, whole_again

MEGABYTES = int(os.environ.get("FLASHRECOVERY_LARGE_STATE", "1000"))
KILLS = int(os.environ.get("FLASHRECOVERY_LARGE_STATE_KILLS", "20"))
RANKS = 3
STEPS_A_KILL, MORE_STEPS = 4, 12
LIMIT_S = 3000
MORE_MEMORY, MODULES = 0.1, 32 << 20
"""Of the state; and in bytes, what a replacement's interpreter may have more than that of the first process."""
_BYTES_OF_PARAMETER = 12
_LAYERS = 2
_WIDTH = round((MEGABYTES * 1e6 / _BYTES_OF_PARAMETER / (12 * _LAYERS)) ** 0.5 / 2) * 2
LAYOUT = Layout(
    "ddp-large", "train_ddp.py", (f"--width={_WIDTH}", f"--layers={_LAYERS}", "--context=8", "--batch-size=1"), RANKS
)
CONFIG = {"max_failures_per_step": 10}
STATES = ("quiescing", "replacing", "regrouping", "restoring", "verifying", "resuming")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same launch without a fault."""

    def launch(path: Path, layout: Layout) -> Job:
        return run_job(path, layout, steps=KILLS * STEPS_A_KILL + MORE_STEPS, standby=0, timeout_s=LIMIT_S)

    return References(lambda: tmp_path_factory.mktemp("reference"), launch)(LAYOUT)


class _Attacked:
    """A job that loses two ranks at a time."""

    def __init__(self, run_dir: Path) -> None:
        self.steps = KILLS * STEPS_A_KILL + MORE_STEPS
        self.job = RunningJob(run_dir, LAYOUT, steps=self.steps, standby=1, config=CONFIG)
        self.job.wait_for_step(2, 300)
        self._usual = max(_peak_memory(pid) for pid in self.job.ranks().values())
        self._more = 0, "at no time"

    def arm(self, rank: int, phase: str) -> None:
        """``rank`` is killed when it next comes to ``phase``."""
        assert self.job.newest_step() < self.steps - 4, "the job has overtaken its faults"
        args = ["--run-dir", str(self.job.run_dir), "--rank", str(rank), "--fault", "sigkill", "--at", phase]
        armed = CliRunner().invoke(inject, args, catch_exceptions=False)
        assert armed.exit_code == 0, armed.output

    def wait_until_whole(self, last_kill: float) -> None:
        """Until the job goes on; then look at the memory of all ranks."""
        whole_again(self.job, last_kill)
        for rank, pid in self.job.ranks().items():
            found = _peak_memory(pid) - self._usual, f"rank {rank}, pid {pid}, by step {self.job.newest_step()}"
            self._more = max(self._more, found)

    def check(self, reference: Job) -> None:
        ended = self.job.wait(LIMIT_S)
        check_same(ended, reference)
        more, where = self._more
        text = f"peaks: {self._usual >> 20} MiB in training, at most {more / 2**20:+.0f} MiB in recoveries ({where})"
        print(text, flush=True)
        assert more <= MORE_MEMORY * MEGABYTES * 1e6 + MODULES, f"{text}\n{ended.explain()}"
        self.ended = ended


def _peak_memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.mark.soak
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("state", STATES)
def test_second_death_at_a_point_of_the_recovery(state: str, tmp_path: Path, reference: Job) -> None:
    attacked, rng = _Attacked(tmp_path / "run"), random.Random(SEED)
    for number in range(KILLS):
        first, second = rng.sample(range(RANKS), 2)
        if state == "replacing" or (state != "quiescing" and number % 2):
            second = first  # its replacement
        attacked.arm(second, f"recovery:{state}")
        attacked.arm(first, "backward")
        died = attacked.job.wait_for("failure_detected", 120, 2 * number + 2)
        attacked.wait_until_whole(died["monotonic"])
    attacked.check(reference)
    check_fired(attacked.ended, 2 * KILLS)


@pytest.mark.soak
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("whole", [True, False], ids=["of-the-recovery", "of-the-transfers"])
def test_second_death_at_a_random_moment(whole: bool, tmp_path: Path, reference: Job) -> None:
    attacked, rng = _Attacked(tmp_path / "run"), random.Random(SEED)
    attacked.arm(1, "backward")
    phases = attacked.job.wait_for("recovery_finished", 120)["phases"]
    length = sum(phases.values()) - phases["redo"] if whole else phases["restore"]
    for number in range(KILLS):
        first, second = rng.sample(range(RANKS), 2)
        if number % 4 == 3:
            second = first
        before = len(attacked.job.events())
        attacked.arm(first, "backward")
        began = _when(attacked.job, before, whole)
        time.sleep(max(0.0, began + rng.uniform(0.0, length) - time.monotonic()))
        attacked.wait_until_whole(kill_now(attacked.job, second))
    attacked.check(reference)
    died = len(attacked.ended.of("failure_detected"))
    assert died > 2 * KILLS, attacked.ended.explain()


def _when(job: RunningJob, before: int, whole: bool) -> float:
    """When the next recovery begins, or its transfers. ``before``: events that are known."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for event in job.events()[before:]:
            begins = event["event"] == "recovery_started" if whole else event.get("name") == "regroup"
            if begins:
                return float(event["monotonic"])
        time.sleep(0.005)
    raise AssertionError(f"no recovery\n{job.wait(1).explain()}")
