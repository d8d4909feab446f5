"""A megatron-core job on several hosts that goes on in another parallel layout, on those that are left: from its step
on it is, bit for bit, a job that megatron-core alone has started in that layout from that step's state.

The hosts are network namespaces; nothing that lies in one's memory is found on another but over the network.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts import Network
from tests.support.installed import skip_module_without
from tests.support.nodes import hosts_of_a_test
from tests.support.replan import AT, TIMEOUT_S, Saved, Sizes, Training, check_goes_on, never, replanned
from tests.support.replan_nodes import command, inject, lose, nodes_of, start

skip_module_without("megatron.core")
pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.megatron,
    pytest.mark.grid,
    pytest.mark.timeout(4 * TIMEOUT_S),
]

SHARDED = ("--use-distributed-optimizer", "--bf16")
STAGES = Training("tp2-pp2", Sizes(2, 2, 1), ("--bf16",))
PARTS = Training("tp2-dp2-distributed", Sizes(2, 1, 2), SHARDED)
THREE = Training("pp3-layers3", Sizes(1, 3, 1), ("--layers", "3", "--bf16"))
FOUR = Training("pp2-dp2", Sizes(1, 2, 2), ("--bf16",))
AUTO = {"parallelism": {"min": 1}}

two_hosts, three_hosts, four_hosts = hosts_of_a_test(2), hosts_of_a_test(3), hosts_of_a_test(4)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("replanned-nodes"))


@pytest.mark.parametrize("how", ["killed", "cut"])
@pytest.mark.parametrize("training", [STAGES, PARTS], ids=str)
def test_a_node_is_lost_with_a_stages_only_ranks(
    training: Training, how: str, two_hosts: Network, tmp_path: Path, saved: Saved
) -> None:
    job = start(two_hosts, tmp_path, training, config=never() if how == "killed" else AUTO)
    first, lost = two_hosts.hosts
    job.wait_for_step(AT)
    if how == "killed":
        lose(job, lost)
    else:
        two_hosts.cut(lost)
    ended = job.wait(TIMEOUT_S, of=[first])
    assert ended.code == 0, ended.explain()
    (event,) = ended.of("job_replanned")
    assert event["ranks"] == 2 and event["bytes"] > 0, ended.explain()
    assert set(nodes_of(ended).values()) == {first.name}, ended.explain()
    assert not ended.of("fallback_started") and not ended.notices("waiting_for_node"), ended.explain()
    check_goes_on(ended, training, saved, replanned(ended))


@pytest.mark.parametrize(
    ("training", "sizes", "homes"),
    [
        pytest.param(training, sizes, homes, id=f"{training}-to-{sizes.tp}{sizes.pp}{sizes.dp}")
        for training, sizes, homes in (
            (STAGES, Sizes(1, 2, 2), [0, 0, 1, 1]),
            (STAGES, Sizes(2, 1, 2), [0, 0, 1, 1]),
            (STAGES, Sizes(1, 2, 1), [0, 0]),
            (PARTS, Sizes(1, 2, 2), [0, 0, 1, 1]),
            (PARTS, Sizes(1, 1, 3), [0, 0, 1]),
        )
    ],
)
def test_on_command(
    training: Training, sizes: Sizes, homes: list[int], two_hosts: Network, tmp_path: Path, saved: Saved
) -> None:
    """What a rank needs is in the other host's memory, too; also where none of the new layout is there."""
    job = start(two_hosts, tmp_path, training, config=AUTO)
    job.wait_for("job_started")
    assert command(job, sizes, AT) == ""
    ended = job.wait(TIMEOUT_S)
    check_goes_on(ended, training, saved, [(AT, sizes)])
    assert list(nodes_of(ended).values()) == [two_hosts.hosts[n].name for n in homes], ended.explain()
    assert not ended.of("failure_detected"), ended.explain()


def test_to_one_host_and_back(two_hosts: Network, tmp_path: Path, saved: Saved) -> None:
    """The host without ranks stays in the job, and gets some again."""
    job = start(two_hosts, tmp_path, PARTS, config=AUTO, step_ms=800)
    job.wait_for("job_started")
    assert command(job, Sizes(1, 2, 1), 2) == ""
    job.wait_for("recovery_finished")
    assert command(job, PARTS.sizes) == ""
    ended = job.wait(TIMEOUT_S)
    changes = replanned(ended)
    assert [sizes for _, sizes in changes] == [Sizes(1, 2, 1), PARTS.sizes] and changes[0][0] == 2, ended.explain()
    check_goes_on(ended, PARTS, saved, changes)
    assert len(set(nodes_of(ended).values())) == 2, ended.explain()


@pytest.mark.parametrize("state", ["restoring", "resuming"])
def test_a_rank_dies_while_the_layout_changes(state: str, three_hosts: Network, tmp_path: Path, saved: Saved) -> None:
    """A node is lost, and one of the other ranks before all have gone on: its node's memory is still there."""
    job = start(three_hosts, tmp_path, THREE, "--mode", "late", nnodes=3, config=never())
    job.wait_for_step(AT)
    lose(job, three_hosts.hosts[2])
    job.wait_for("job_replanned")
    inject(job, rank=1, at=f"recovery:{state}")
    ended = job.wait(TIMEOUT_S, of=three_hosts.hosts[:2])
    assert ended.notices("fault_fired"), ended.explain()
    assert ended.code == 0 and not ended.of("fallback_started"), ended.explain()
    changes = replanned(ended)
    assert changes[-1][1].ranks == 1 and len(changes) == 2, ended.explain()
    check_goes_on(ended, THREE, saved, changes)


def test_a_spare_node_takes_the_ranks_of_a_lost_one(three_hosts: Network, tmp_path: Path, saved: Saved) -> None:
    """As in any job; and the next one that is lost, with no room for its ranks, changes the layout."""
    job = start(three_hosts, tmp_path, STAGES, spare=1, config=AUTO, step_ms=250)
    job.wait_for_step(2)
    lose(job, three_hosts.hosts[1])
    job.wait_for("recovery_finished")
    job.wait_for_step(AT)
    lose(job, three_hosts.hosts[2])
    ended = job.wait(TIMEOUT_S, of=three_hosts.hosts[:1])
    assert [e["victims"] for e in ended.of("recovery_finished")] == [[2, 3], [2, 3]], ended.explain()
    (event,) = ended.of("job_replanned")
    assert event["ranks"] == 2, ended.explain()
    check_goes_on(ended, STAGES, saved, replanned(ended))


def test_a_second_node_is_lost_before_the_first_step(four_hosts: Network, tmp_path: Path, saved: Saved) -> None:
    """Stage by stage on hosts 0, 1 and 2, 3, each stage twice. Host 3 is lost; of what host 2 alone has a copy is kept
    nowhere. While the others come to their first step in another layout, a host with what another one has, too, is
    lost: they begin again."""
    job = start(four_hosts, tmp_path, FOUR, "--mode", "late", nnodes=4, config=never())
    job.wait_for_step(AT)
    lose(job, four_hosts.hosts[3])
    job.wait_for("job_replanned")
    lose(job, four_hosts.hosts[1])
    left = [four_hosts.hosts[0], four_hosts.hosts[2]]
    ended = job.wait(TIMEOUT_S, of=left)
    assert ended.code == 0 and not ended.of("fallback_started"), ended.explain()
    changes = replanned(ended)
    assert len(changes) == 2 and changes[1][1].ranks <= 2, ended.explain()
    check_goes_on(ended, FOUR, saved, changes)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_second_node_is_lost_with_what_nobody_else_has(
    checkpoints: bool, four_hosts: Network, tmp_path: Path, saved: Saved
) -> None:
    options = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-interval", "0.2") if checkpoints else ()
    job = start(four_hosts, tmp_path, FOUR, nnodes=4, config=never(), options=options)
    job.wait_for_step(AT)
    lose(job, four_hosts.hosts[3])
    job.wait_for("job_replanned")
    lose(job, four_hosts.hosts[2])
    ended = job.wait(TIMEOUT_S, of=four_hosts.hosts[:2])
    if not checkpoints:
        (failed,) = ended.of("job_failed")
        assert ended.code != 0, ended.explain()
        assert "was in the memory of host2 alone; and there is no checkpoint" in failed["reason"], failed
        return
    (fallback,) = ended.of("fallback_started")
    changes = replanned(ended)
    assert ended.code == 0 and changes[-1][0] == fallback["version"] > 0, ended.explain()
    check_goes_on(ended, FOUR, saved, changes[-1:])


@pytest.mark.parametrize("sizes", [Sizes(1, 2, 1), Sizes(1, 2, 2)], ids=str)
def test_a_controller_that_is_started_again(sizes: Sizes, three_hosts: Network, tmp_path: Path, saved: Saved) -> None:
    """In the layout that the job has changed to: it finds it, and has a rank there replaced that dies."""
    job = start(three_hosts, tmp_path, PARTS, config=AUTO, step_ms=1000, alone=True)
    job.wait_for("job_started")
    assert command(job, sizes, 2) == ""
    job.wait_for("recovery_finished")
    job.kill_node(three_hosts.hosts[0])
    job.start_controller()
    job.wait_for_notice("taken_over")
    job.kill_worker(three_hosts.hosts[1], 1)
    ended = job.wait(TIMEOUT_S, of=three_hosts.hosts[1:])
    assert ended.of("recovery_finished")[-1]["victims"] == [1], ended.explain()
    check_goes_on(ended, PARTS, saved, [(2, sizes)])


def test_the_node_with_the_controller(three_hosts: Network, tmp_path: Path, saved: Saved) -> None:
    """The others elect another controller, and go on without its stage."""
    job = start(three_hosts, tmp_path, THREE, nnodes=3, config=never(), step_ms=400)
    job.wait_for_step(AT)
    lost, second, third = three_hosts.hosts
    lose(job, lost)
    ended = job.wait(TIMEOUT_S, of=[second, third])
    assert ended.code == 0, ended.explain()
    (event,) = ended.of("job_replanned")
    assert event["ranks"] <= 2 and not ended.of("fallback_started"), ended.explain()
    check_goes_on(ended, THREE, saved, replanned(ended))
