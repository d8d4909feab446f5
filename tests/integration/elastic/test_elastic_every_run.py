"""One job of each kind of change whose other tests are all in the grid: a replica of several ranks leaves, or a node
with state that is sharded among such replicas, another parallel layout, a framework's state read from a checkpoint in
another size."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import elastic_nodes, elastic_replicas, hosts, replan
from tests.support.elastic_checkpoints import dead_job, launched
from tests.support.elastic_sharded import END, resized_by_command, zero
from tests.support.hosts import Network
from tests.support.jobs import check_clean, check_fired
from tests.support.nodes import hosts_of_a_test

pytestmark = pytest.mark.timeout(400)
AT = 9
SHORT = 14
"""Steps of the job on two hosts, where each takes longest."""
two_hosts = hosts_of_a_test(2)


def test_a_rank_takes_its_replica_with_it(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """HSDP, two replicas of two ranks (test_elastic_replicas.py)."""
    job = elastic_replicas.start(tmp_path / "run", replicas=2, inject=[f"rank=1,fault=sigkill,at=backward,step={AT}"])
    ended = job.wait(180)
    check_fired(ended)
    elastic_replicas.check_ends_as_resized(ended, elastic_replicas.resized_once(tmp_path_factory), 2, [1])


@pytest.mark.megatron
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron.core is not installed")
@pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN")
def test_a_node_takes_its_replica_with_it(
    two_hosts: Network, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tensor 2 x data 2 with the distributed optimizer, a replica on each of two hosts (test_nodes_elastic_sharded.py,
    test_elastic_megatron_replicas_sharded.py)."""
    kind, (first, lost) = elastic_nodes.TP2_DISTRIBUTED, two_hosts.hosts
    faults = [f"rank=3,fault=sigstop,at=backward,step={AT}"]
    job = elastic_nodes.launch(two_hosts, tmp_path, kind, faults=faults, steps=SHORT)
    elastic_nodes.wait_until_frozen(job, lost)
    job.kill_node(lost)
    ended = job.wait(of=[first])
    sizes = elastic_nodes.check_as_commanded(kind, ended, 2, elastic_nodes.resized_once(tmp_path_factory), end=SHORT)
    assert [size for _, size in sizes] == [1] and ended.of("node_lost"), ended.explain()


@pytest.mark.megatron
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron.core is not installed")
def test_another_layout_where_a_stage_is_lost(tmp_path: Path) -> None:
    """Tensor 2 x pipeline 2 loses a rank, and goes on in what the planner chooses for three (test_replan.py)."""
    training = replan.Training("tp2-pp2", replan.Sizes(2, 2, 1), ("--bf16",))
    faults = [f"rank=1,fault=sigkill,at=backward,step={replan.AT}"]
    job = replan.start(tmp_path / "run", training, inject=faults).wait(replan.TIMEOUT_S)
    check_fired(job)
    assert job.code == 0, job.explain()
    ((_, sizes),) = changes = replan.replanned(job)
    assert sizes.tp * sizes.pp * sizes.dp <= 3, changes
    (tmp_path / "saved").mkdir()
    replan.check_goes_on(job, training, replan.Saved(tmp_path / "saved"), changes)


@pytest.mark.deepspeed
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.grid
def test_zero_2_read_in_another_size(tmp_path: Path) -> None:
    """All processes are killed, and three ranks go on from the checkpoint of four
    (test_elastic_checkpoints_frameworks.py)."""
    kind = zero(2)
    version, _ = dead_job(tmp_path, begin=kind.start)[-1]
    job = launched(tmp_path, "smaller", 3, begin=kind.start)
    assert job.code == 0 and job.of("job_started")[0]["step"] == version, job.explain()
    kind.goes_on_alike(job, resized_by_command(kind, tmp_path / "resized", [(version, 3)]), version, 3, END)
    check_clean(job)
