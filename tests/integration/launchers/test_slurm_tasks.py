"""`srun flashrecovery adopt`, one task for each rank, on a real Slurm cluster: ranks and nodes are lost, srun goes on.

`make test-slurm` runs this; without Slurm's packages it is skipped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launchers.test_slurm import KILL_AFTER, SlurmJob, idle
from tests.support import slurm
from tests.support.jobs import GPT, Job, check_recovered, check_same
from tests.support.slurm import Cluster

pytestmark = [
    pytest.mark.skipif(bool(slurm.missing()), reason=f"Slurm: {slurm.missing()}"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
    pytest.mark.slurm,
]
SCRIPT = GPT / "slurm" / "srun.sbatch"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm.cluster(3) as found:
        yield found


def tasks(cluster: Cluster, folder: Path, nodes: int = 2, **env: str) -> SlurmJob:
    """Two tasks on each node, two nodes of which train."""
    chosen = {"SPARE_NODES": str(nodes - 2), **env}
    return SlurmJob(cluster, folder, nodes=nodes, env=chosen, script=SCRIPT)


@pytest.fixture(scope="module")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same launch without a fault."""
    job = tasks(cluster, tmp_path_factory.mktemp("reference")).end()
    idle(cluster)
    assert job.code == 0, job.output
    return job


def test_ranks_of_both_nodes_are_killed(cluster: Cluster, reference: Job, tmp_path: Path) -> None:
    """srun's tasks are guards, which stay. The token is made where no one has given one, and is secret."""
    job = tasks(cluster, tmp_path)
    job.wait_for_step(KILL_AFTER)
    for rank in (1, 2):
        os.kill(job.pid_of(rank), signal.SIGKILL)
        job.wait_for("recovery_finished", count=rank)
    ended = job.end()
    check_same(ended, reference)
    check_recovered(ended, {1, 2})
    assert (ended.run_dir / "token").stat().st_mode & 0o777 == 0o600
    idle(cluster)


def test_a_node_that_crashes(cluster: Cluster, reference: Job, tmp_path: Path) -> None:
    """A spare node's tasks take its ranks."""
    job = tasks(cluster, tmp_path, nodes=3)
    job.wait_for_step(KILL_AFTER)
    cluster.crash(cluster.nodes[1])
    ended = job.end()
    (lost,) = ended.of("node_lost")
    assert lost["node"] == "host2" and lost["ranks"] == [2, 3]
    check_same(ended, reference)
    cluster.start_node(cluster.nodes[1])
    idle(cluster)
