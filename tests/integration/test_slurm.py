"""The example's batch script on a real Slurm cluster: nodes die while it trains, and the job ends with the same bits.

`make test-slurm` runs this; without Slurm's packages it is skipped.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import slurm
from tests.jobs import GPT, ROOT, SMALL, Job, check_same, read_digests, read_events
from tests.slurm import ENDED, NODE_TIMEOUT_S, Cluster

pytestmark = [
    pytest.mark.skipif(bool(slurm.missing()), reason=f"Slurm: {slurm.missing()}"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
    pytest.mark.slurm,
]
KILL_AFTER = 8
STEPS = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Four nodes: two that train, one spare, and one that is not in the job."""
    with slurm.cluster(4) as found:
        yield found


class SlurmJob:
    """A job of the example's batch script."""

    def __init__(
        self, cluster: Cluster, folder: Path, *, steps: int = STEPS, env: dict[str, str] | None = None
    ) -> None:
        self.cluster = cluster
        self.run_dir = folder / "run"
        self._began = time.monotonic()
        self._output = folder / "output"
        programs = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        chosen = {"RUN_DIR": str(self.run_dir), "NPROC": "2", "REQUEUES": "0", "PYTHONFAULTHANDLER": "1"}
        script = [str(GPT / "train_ddp.py"), *SMALL, "--steps", str(steps), "--step-time", "100"]
        slurm_options = ["--nodes=3", "--nodelist=host1,host2,host3", f"--output={self._output}"]
        self.number = cluster.submit(
            [*slurm_options, str(GPT / "slurm" / "gpt.sbatch"), *script], {**programs, **chosen, **(env or {})}, ROOT
        )

    @property
    def state(self) -> str:
        return self.cluster.job_field(self.number, "JobState")

    def of(self, name: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run_dir) if e["event"] == name]

    def logs(self) -> list[Path]:
        return sorted(self.run_dir.glob("nodes/*/logs/rank*.log"))

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
        def reached() -> bool:
            assert condition() or self.state not in ENDED, f"{what} has not come\n{self.explain()}"
            return condition()

        try:
            self.cluster.wait(reached, what, timeout_s)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.explain()}") from e

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: any(f"step={step} " in log.read_text() for log in self.logs()), f"step {step}")

    def wait_for(self, event: str, count: int = 1) -> None:
        self.wait(lambda: len(self.of(event)) >= count, f"event {event}")

    def end(self, timeout_s: float = 180) -> Job:
        """How it ended, as Slurm says."""
        try:
            self.cluster.wait(lambda: self.state in ENDED, f"job {self.number} ends", timeout_s)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.explain()}") from e
        code = 0 if self.state == "COMPLETED" else 1
        seconds = time.monotonic() - self._began
        job = Job(code, self.explain(), self.run_dir, seconds, "no marker", read_events(self.run_dir))
        read_digests(job, self.logs())
        return job

    def explain(self) -> str:
        output = self._output.read_text(errors="replace")[-6000:] if self._output.exists() else "no output"
        return f"{self.cluster.ask('scontrol', 'show', 'job', str(self.number))}\n{output}\n{self.cluster.logs()}"


def _idle(cluster: Cluster) -> None:
    """Every node is free again, with nothing of a job on it."""
    cluster.wait(lambda: all(cluster.state_of(n) == "idle" for n in cluster.nodes), "all nodes are idle", 60)
    for node in cluster.nodes:
        left = [line for line in cluster.pids(node).values() if "flashrecovery" in line or "slurmstepd" in line]
        assert not left, f"left behind on {node.name}: {left}"


@pytest.fixture(scope="module")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same launch without a fault."""
    job = SlurmJob(cluster, tmp_path_factory.mktemp("reference")).end()
    _idle(cluster)
    return job


def test_a_job_without_a_fault(cluster: Cluster, reference: Job) -> None:
    """Its nodes' failure domains are their switches, its token is secret, and it leaves nothing behind."""
    assert reference.code == 0, reference.output
    domains = {e["node"]: e["domain"] for e in reference.of("node_joined")}
    assert domains == {"host1": "core.leaf0", "host2": "core.leaf1", "host3": "core.leaf0"}
    assert (reference.run_dir / "token").stat().st_mode & 0o777 == 0o600
    assert len(reference.digests) == 4


def test_a_step_that_is_killed(cluster: Cluster, reference: Job, tmp_path: Path) -> None:
    """The agent, its workers and Slurm's slurmstepd on one node: the spare node takes its ranks, the step is started
    again, and its agent joins as a spare one."""
    job = SlurmJob(cluster, tmp_path)
    job.wait_for_step(KILL_AFTER)
    killed = cluster.kill_step(cluster.nodes[1])
    assert any("slurmstepd" in line for line in killed) and any("flashrecovery" in line for line in killed), killed
    job.wait_for("node_joined", 4)
    ended = job.end()
    (lost,) = ended.of("node_lost")
    assert lost["node"] == "host2" and lost["ranks"] == [2, 3]
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == [2, 3] and recovery["cause"] == "node_lost"
    assert ended.of("node_joined")[3]["node"] == "host2"
    check_same(ended, reference)
    _idle(cluster)


def test_a_node_that_crashes(cluster: Cluster, reference: Job, tmp_path: Path) -> None:
    """With its slurmd: Slurm takes the node from the job, which goes on; another job brings a node in its place."""
    steps = STEPS + 20 * NODE_TIMEOUT_S  # Slurm has to find the failure, and to start the other job
    undisturbed = SlurmJob(cluster, tmp_path / "undisturbed", steps=steps).end()
    job = SlurmJob(cluster, tmp_path / "disturbed", steps=steps, env={"REPLACE": f"--output={tmp_path}/spare"})
    job.wait_for_step(KILL_AFTER)
    cluster.crash(cluster.nodes[1])
    job.wait_for("node_joined", 4)
    ended = job.end()
    assert [e["node"] for e in ended.of("node_lost")] == ["host2"]
    assert ended.of("node_joined")[3]["node"] == "host4"
    check_same(ended, undisturbed)
    cluster.start_node(cluster.nodes[1])
    _idle(cluster)


def test_a_controller_that_is_killed(cluster: Cluster, reference: Job, tmp_path: Path) -> None:
    """The batch script starts another one, which takes the job over."""
    job = SlurmJob(cluster, tmp_path)
    job.wait_for_step(KILL_AFTER)
    assert len(cluster.kill(cluster.nodes[0], lambda line: "flashrecovery controller" in line)) == 1
    job.wait(lambda: any(e["kind"] == "taken_over" for e in job.of("notice")), "the controller is taken over")
    ended = job.end()
    assert not ended.of("recovery_started")
    check_same(ended, reference)
    _idle(cluster)
