"""Megatron-LM's unmodified loop on several hosts (network namespaces) that goes on in another parallel layout, on those
that are left: from its iteration on it is, bit for bit, a job of one host that was started so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import hosts
from tests.support.hosts import Network
from tests.support.installed import skip_module_without
from tests.support.jobs import Layout
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import TIMEOUT_S, loop_environment
from tests.support.nodes import NodesJob, hosts_of_a_test
from tests.support.replan import Saved, Sizes, replanned
from tests.support.replan_megatron_lm import SCRIPT, Training, check_goes_on
from tests.support.replan_nodes import command, lose, nodes_of

skip_module_without("megatron.core")
pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.megatron,
    pytest.mark.grid,
    pytest.mark.timeout(5 * TIMEOUT_S),
    needs_checkout,
]
STAGES = Training("tp2-pp2-bf16", Sizes(2, 2, 1), ("--bf16",))
PARTS = Training("tp2-dp2-distributed", Sizes(2, 1, 2), ("--use-distributed-optimizer", "--bf16"))

two_hosts = hosts_of_a_test(2)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("replanned-nodes-lm"))


def start(net: Network, folder: Path, training: Training, replan: Mapping[str, Any]) -> NodesJob:
    file = folder / "job.json"
    file.write_text(json.dumps({"parallelism": replan}))
    return NodesJob(
        net,
        folder / "run",
        Layout("replan", str(SCRIPT), nproc=training.sizes.ranks),
        steps=training.iterations,
        step_ms=300,
        options=["--standby", "0"],
        config=file,
        flags=training.arguments(training.sizes),
        env=loop_environment(),
        small=(),
    )


@pytest.mark.parametrize("training", [STAGES, PARTS], ids=str)
def test_a_node_is_lost(training: Training, two_hosts: Network, tmp_path: Path, saved: Saved) -> None:
    """With a stage's only ranks, or with parts of the distributed optimizer."""
    job = start(two_hosts, tmp_path, training, {"min": 1, "replace": "never"})
    first, lost = two_hosts.hosts
    job.wait_for_step(training.call("train", 3))
    lose(job, lost)
    ended = job.wait(TIMEOUT_S, of=[first])
    assert ended.code == 0, ended.explain()
    (event,) = ended.of("job_replanned")
    assert event["ranks"] == 2 and event["bytes"] > 0, ended.explain()
    assert set(nodes_of(ended).values()) == {first.name}, ended.explain()
    check_goes_on(ended, training, saved, replanned(ended))


@pytest.mark.parametrize(
    ("training", "sizes"),
    [
        pytest.param(training, sizes, id=f"{training}-to-{sizes.tp}{sizes.pp}{sizes.dp}")
        for training, sizes in ((STAGES, Sizes(1, 2, 2)), (PARTS, Sizes(1, 1, 3)))
    ],
)
def test_on_command(training: Training, sizes: Sizes, two_hosts: Network, tmp_path: Path, saved: Saved) -> None:
    job = start(two_hosts, tmp_path, training, {"min": 1})
    job.wait_for("job_started")
    at = training.call("train", 3)
    assert command(job, sizes, at) == ""
    ended = job.wait(TIMEOUT_S)
    check_goes_on(ended, training, saved, [(at, sizes)])
    assert not ended.of("failure_detected"), ended.explain()
