"""The example's batch script on a real Slurm cluster: nodes die while it trains, and the job ends with the same bits.

`make test-slurm` runs this; without Slurm's packages it is skipped.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import slurm
from tests.support.jobs import GPT, ROOT, SMALL, Job, check_same, read_digests, read_events
from tests.support.slurm import ENDED, Cluster

pytestmark = [
    pytest.mark.skipif(bool(slurm.missing()), reason=f"Slurm: {slurm.missing()}"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
    pytest.mark.slurm,
]
KILL_AFTER = 8
STEPS = 40


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Four nodes: two that train, one spare, and one that is not in the job."""
    with slurm.cluster(4) as found:
        yield found


class SlurmJob:
    """A job of the example's batch script."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *,
        nodes: int = 3,
        env: dict[str, str] | None = None,
        script: Path = GPT / "slurm" / "gpt.sbatch",
    ) -> None:
        """On the first ``nodes``, of which two train."""
        self.cluster = cluster
        self.run_dir = folder / "run"
        self._began = time.monotonic()
        self._output = folder / "output"
        chosen = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONFAULTHANDLER": "1"}
        chosen |= {"RUN_DIR": str(self.run_dir), "NPROC": "2", "SPARE_NODES": str(nodes - 2), "REQUEUES": "0"}
        names = ",".join(n.name for n in cluster.nodes[:nodes])
        command = [f"--nodes={nodes}", f"--nodelist={names}", f"--output={self._output}"]
        command += [str(script), str(GPT / "train_ddp.py"), *SMALL]
        command += ["--steps", str(STEPS), "--step-time", "100"]
        self.number = cluster.submit(command, {**chosen, **(env or {})}, ROOT)

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

    def pid_of(self, rank: int) -> int:
        """The process that fills the rank. (All hosts have the machine's pids.)"""
        table = json.loads((self.run_dir / "ranktable.json").read_text())
        return next(int(entry["pid"]) for entry in table["ranks"] if entry["rank"] == rank)

    def end(self, timeout_s: float = 180) -> Job:
        """How it ended, as Slurm says."""
        try:
            self.cluster.wait(lambda: self.state in ENDED, f"job {self.number} ends", timeout_s)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.explain()}") from e
        code = 0 if self.state == "COMPLETED" else 1
        seconds = time.monotonic() - self._began
        job = Job(
            code=code,
            output=self.explain(),
            run_dir=self.run_dir,
            seconds=seconds,
            marker="no marker",
            events=read_events(self.run_dir),
        )
        read_digests(job, self.logs())
        return job

    def explain(self) -> str:
        output = self._output.read_text(errors="replace")[-6000:] if self._output.exists() else "no output"
        return f"{self.cluster.ask('scontrol', 'show', 'job', str(self.number))}\n{output}\n{self.cluster.logs()}"


def idle(cluster: Cluster) -> None:
    """Every node is free again, with nothing of a job on it."""
    cluster.wait(lambda: all(cluster.state_of(n) == "idle" for n in cluster.nodes), "all nodes are idle", 60)
    for node in cluster.nodes:
        left = [line for line in cluster.pids(node).values() if "flashrecovery" in line or "slurmstepd" in line]
        assert not left, f"left behind on {node.name}: {left}"


def _check_lost(ended: Job, node: str) -> None:
    """This node, and with it ranks 2 and 3, which one recovery has brought back."""
    (lost,) = ended.of("node_lost")
    assert lost["node"] == node and lost["ranks"] == [2, 3]
    (recovery,) = ended.of("recovery_finished")
    assert recovery["victims"] == [2, 3] and recovery["cause"] == "node_lost"


@pytest.fixture(scope="module")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same launch without a fault."""
    job = SlurmJob(cluster, tmp_path_factory.mktemp("reference")).end()
    idle(cluster)
    return job


def test_a_job_without_a_fault(cluster: Cluster, reference: Job) -> None:
    """Its nodes' failure domains are their switches, its token is secret, and it leaves nothing behind."""
    assert reference.code == 0, reference.output
    domains = {e["node"]: e["domain"] for e in reference.of("node_joined")}
    assert domains == {"host1": "core.leaf0", "host2": "core.leaf1", "host3": "core.leaf0"}
    assert (reference.run_dir / "token").stat().st_mode & 0o777 == 0o600
    assert len(reference.digests) == 4


def test_a_step_that_is_killed(cluster: Cluster, reference: Job, tmp_path: Path) -> None:
    """The agent, its workers and Slurm's slurmstepd on one node: the spare node takes its ranks."""
    job = SlurmJob(cluster, tmp_path)
    job.wait_for_step(KILL_AFTER)
    killed = cluster.kill_step(cluster.nodes[1])
    assert any("slurmstepd" in line for line in killed) and any("flashrecovery" in line for line in killed), killed
    ended = job.end()
    _check_lost(ended, "host2")
    check_same(ended, reference)
    idle(cluster)


def test_an_agent_that_is_killed(cluster: Cluster, reference: Job, tmp_path: Path) -> None:
    """Without a spare node: the step is started again on the same node, and gets its ranks back."""
    job = SlurmJob(cluster, tmp_path, nodes=2)
    job.wait_for_step(KILL_AFTER)
    assert cluster.kill(cluster.nodes[1], lambda line: "flashrecovery run" in line)
    ended = job.end()
    _check_lost(ended, "host2")
    assert [e["node"] for e in ended.of("node_joined")][2:] == ["host2"]
    check_same(ended, reference)
    idle(cluster)


def test_a_node_that_crashes(cluster: Cluster, reference: Job, tmp_path: Path) -> None:
    """With its slurmd, and there is no spare node: Slurm takes it from the job, which goes on to exist; another job
    brings a node from outside, which gets the ranks."""
    job = SlurmJob(cluster, tmp_path, nodes=2, env={"REPLACE": f"--output={tmp_path}/spare"})
    job.wait_for_step(KILL_AFTER)
    cluster.crash(cluster.nodes[1])
    ended = job.end()
    _check_lost(ended, "host2")
    (joined,) = ended.of("node_joined")[2:]
    assert joined["node"] in ("host3", "host4")
    assert cluster.job_field(job.number, "NodeList") == "host1"
    check_same(ended, reference)
    cluster.start_node(cluster.nodes[1])
    idle(cluster)


def test_a_controller_that_is_killed(cluster: Cluster, reference: Job, tmp_path: Path) -> None:
    """The batch script starts another one, which takes the job over."""
    job = SlurmJob(cluster, tmp_path)
    job.wait_for_step(KILL_AFTER)
    assert len(cluster.kill(cluster.nodes[0], lambda line: "flashrecovery controller" in line)) == 1
    job.wait(lambda: any(e["kind"] == "taken_over" for e in job.of("notice")), "the controller is taken over")
    ended = job.end()
    assert not ended.of("recovery_started")
    check_same(ended, reference)
    idle(cluster)


def test_the_first_node_crashes(cluster: Cluster, reference: Job, tmp_path: Path) -> None:
    """With it controller and batch script are gone: the job is queued again, and goes on from its checkpoint."""
    job = SlurmJob(cluster, tmp_path, nodes=2, env={"CHECKPOINT_S": "1"})
    job.wait_for("checkpoint_saved")
    job.wait_for_step(KILL_AFTER)
    cluster.crash(cluster.nodes[0])
    cluster.wait(lambda: cluster.job_field(job.number, "Restarts") == "1", "the job is queued again", 120)
    cluster.start_node(cluster.nodes[0])
    ended = job.end()
    check_same(ended, reference, launches=2)
    idle(cluster)
