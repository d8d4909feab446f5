"""A node is asked to leave while it works: its ranks are handed over at a step boundary, no step is lost, and the job
ends with the bits of the same launch without a warning. The hosts are network namespaces."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import hosts, warner
from tests.support.elastic import SCRIPT, check_goes_on_alike, resized_by_command
from tests.support.hosts import Host, Network
from tests.support.jobs import DDP, FSDP, Job, Layout, References, check_same
from tests.support.nodes import NodesJob, hosts_of_a_test, references_of_a_module

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(500),
    pytest.mark.slow,
]
STEPS, STEP_MS = 80, 150
WARN_AFTER = 8
ZERO2 = Layout("zero2", "train_deepspeed.py", ("--zero", "2"))
LAYOUTS = (DDP, FSDP, ZERO2)
net, two_hosts = hosts_of_a_test(3), hosts_of_a_test(2)
reference = references_of_a_module(STEPS, spare=1)


def told_to_leave(job: NodesJob, host: Host, within_s: float = 60.0) -> str:
    """``flashrecovery drain``; returns what it has refused, "" if nothing."""
    command = [*job.net.hosts[0].command, sys.executable, "-m", "flashrecovery.cli.main", "drain"]
    command += [str(job.directory()), "--node", host.name, "--within", str(within_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr


def started(net: Network, run_dir: Path, layout: Layout, **more: Any) -> NodesJob:
    job = NodesJob(net, run_dir, layout, steps=STEPS, step_ms=STEP_MS, **more)
    job.wait_for_step(WARN_AFTER, timeout_s=180)
    return job


def check_handed_over(ended: Job, left: Host) -> None:
    """In one go, without a failure, and nothing was done twice."""
    assert ended.code == 0, ended.explain()
    (recovery,) = ended.of("recovery_finished")
    assert recovery["cause"] == "handoff" and recovery["victims"] == [], ended.explain()
    assert not ended.of("failure_detected") and not ended.of("node_lost"), ended.explain()
    assert ended.notices("node_left")[0]["text"] == f"node {left.name} has left the job", ended.explain()
    assert recovery["total_s"] < 2.0, ended.explain()
    for log in ended.run_dir.rglob("rank0.*.log"):
        steps = [line.split()[0] for line in log.read_text().splitlines() if line.startswith("step=")]
        assert len(steps) == len(set(steps)), f"done twice: {log}\n{ended.explain()}"
    print(f"pause: {recovery['total_s']:.2f} s; {recovery['phases']}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_drained(layout: Layout, net: Network, tmp_path: Path, reference: References) -> None:
    job = started(net, tmp_path / "run", layout)
    first, left, spare = net.hosts
    assert told_to_leave(job, left) == ""
    job.wait_for_notice("node_left", timeout_s=90)
    assert set(job.rank_hosts().values()) == {first, spare}
    assert job.popens[left.name].wait(20) == 0, "its agent has ended well"
    ended = job.wait(of=[first])
    check_handed_over(ended, left)
    check_same(ended, reference(layout))


def test_a_device_plugin_warns(net: Network, tmp_path: Path, reference: References) -> None:
    """Where that counts as a notice, the ranks move before anything has failed; else with the next failure."""
    config = tmp_path / "config.yaml"
    config.write_text("notice: {warnings: true, poll_s: 0.1, within_s: 60}\ntimeouts: {health_s: 0.1}\n")
    env = warner.installed(tmp_path / "site")
    job = started(net, tmp_path / "run", FSDP, options=("--health", "warner"), config=config, env=env)
    first, left, spare = net.hosts
    (job.run_dir / "nodes" / left.name / warner.FILE).touch()
    job.wait_for_notice("node_left", timeout_s=90)
    assert set(job.rank_hosts().values()) == {first, spare}
    ended = job.wait(of=[first])
    assert "a device plugin warns: " in ended.notices("node_leaves")[0]["text"], ended.explain()
    check_handed_over(ended, left)
    check_same(ended, reference(FSDP))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_it_dies_before(layout: Layout, net: Network, tmp_path: Path, reference: References) -> None:
    """While its ranks are built up elsewhere: an ordinary loss."""
    job = started(net, tmp_path / "run", layout)
    first, left, _ = net.hosts
    assert told_to_leave(job, left) == ""
    job.wait_for_notice("node_leaves")
    job.kill_node(left)
    ended = job.wait(of=[first])
    assert ended.code == 0 and ended.notices("joining_process_given_up"), ended.explain()
    assert [e["cause"] for e in ended.of("recovery_finished")] == ["node_lost"], ended.explain()
    check_same(ended, reference(layout))


def test_the_other_node_loses_a_rank_meanwhile(net: Network, tmp_path: Path, reference: References) -> None:
    job = started(net, tmp_path / "run", FSDP)
    first, left, _ = net.hosts
    assert told_to_leave(job, left) == ""
    job.wait_for_notice("node_leaves")
    job.kill_worker(first, 1)
    job.wait_for_notice("node_left", timeout_s=90)
    ended = job.wait(of=[first])
    causes = [e["cause"] for e in ended.of("recovery_finished")]
    assert causes in (["killed"], ["killed", "handoff"]), "in the same recovery if they were there already"
    assert next(e["victims"] for e in ended.of("recovery_finished")) == [1], ended.explain()
    check_same(ended, reference(FSDP))


def test_the_spare_node_is_lost_meanwhile(net: Network, tmp_path: Path, reference: References) -> None:
    """No rank moves, and the job trains on undisturbed, and says so. Or they have just moved: then they come back to
    the node that was to leave, because there is no other."""
    job = started(net, tmp_path / "run", DDP)
    first, left, spare = net.hosts
    assert told_to_leave(job, left) == ""
    job.wait_for_notice("node_leaves")
    job.kill_node(spare)
    ended = job.wait(of=[first, left])
    said = ended.notices("node_leaves")[-1]["text"]
    if ended.of("recovery_started"):
        assert "it has the only room" in said and ended.of("node_lost")[0]["ranks"] == [2, 3], ended.explain()
    else:
        assert "could not be handed over" in said and ended.notices("joining_process_given_up"), ended.explain()
    assert ended.code == 0 and not ended.notices("node_left"), ended.explain()
    check_same(ended, reference(DDP))


def test_without_room_an_elastic_job_shrinks(two_hosts: Network, tmp_path: Path) -> None:
    job = NodesJob(
        two_hosts,
        tmp_path / "run",
        Layout("elastic", str(SCRIPT), nproc=4),
        steps=STEPS,
        step_ms=STEP_MS,
        options=("--elastic", "2:4"),
    )
    job.wait_for_step(WARN_AFTER)
    first, left = two_hosts.hosts
    assert told_to_leave(job, left) == ""
    job.wait_for_notice("node_left", timeout_s=90)
    assert job.popens[left.name].wait(20) == 0
    ended = job.wait(of=[first])
    (event,) = ended.of("job_resized")
    assert (event["ranks"], event["left"]) == ([0, 1], [2, 3]) and ended.code == 0, ended.explain()
    assert not ended.of("failure_detected") and not ended.of("node_lost"), ended.explain()
    sizes = [(event["step"], 2)]
    check_goes_on_alike(ended, resized_by_command(tmp_path / "reference", sizes, end=STEPS), event["step"], 2, STEPS)


def test_without_room_a_checkpoint_is_taken(two_hosts: Network, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"checkpoint: {{dir: {tmp_path / 'checkpoints'}, interval_s: 1000}}\n")
    job = started(two_hosts, tmp_path / "run", DDP, config=config)
    assert told_to_leave(job, two_hosts.hosts[1]) == ""
    job.wait_for("checkpoint_saved", timeout_s=30)
    ended = job.wait()
    assert ended.code == 0 and "a checkpoint is taken" in ended.notices("node_leaves")[0]["text"], ended.explain()


def test_what_is_refused(two_hosts: Network, tmp_path: Path) -> None:
    job = started(two_hosts, tmp_path / "run", DDP)
    first, second = two_hosts.hosts
    assert "runs the job's controller" in told_to_leave(job, first)
    assert "no other node has room for ranks 2 and 3, the job is not elastic" in told_to_leave(job, second)
    ended = job.wait()
    assert ended.code == 0 and not ended.of("recovery_started"), ended.explain()


# -- SIGTERM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [DDP, FSDP], ids=lambda layout: layout.name)
def test_its_agent_is_told_to_end(layout: Layout, net: Network, tmp_path: Path, reference: References) -> None:
    job = started(net, tmp_path / "run", layout)
    first, left, spare = net.hosts
    job.signal_agent(left, signal.SIGTERM)
    assert job.popens[left.name].wait(60) == 0, "its agent has ended well"
    assert set(job.rank_hosts().values()) == {first, spare}
    ended = job.wait(of=[first])
    check_handed_over(ended, left)
    check_same(ended, reference(layout))


def test_told_twice_it_ends_at_once(net: Network, tmp_path: Path, reference: References) -> None:
    job = started(net, tmp_path / "run", DDP)
    first, left, _ = net.hosts
    job.signal_agent(left, signal.SIGTERM)
    job.wait_for_notice("node_leaves")
    job.signal_agent(left, signal.SIGTERM)
    assert job.popens[left.name].wait(10) == 1
    ended = job.wait(of=[first])
    assert [e["cause"] for e in ended.of("recovery_finished")] == ["node_lost"], ended.explain()
    check_same(ended, reference(DDP))


def test_without_room_it_ends_at_once(two_hosts: Network, tmp_path: Path) -> None:
    """As if no one had asked: its ranks wait for another node."""
    config = tmp_path / "config.yaml"
    config.write_text("timeouts: {node_wait_s: 3}\n")
    job = started(two_hosts, tmp_path / "run", DDP, config=config)
    first, left = two_hosts.hosts
    job.signal_agent(left, signal.SIGTERM)
    assert job.popens[left.name].wait(10) == 1
    assert "its ranks cannot be handed over: no other node has room" in job.output_of(left)
    ended = job.wait(of=[first])
    assert ended.of("node_lost") and ended.notices("waiting_for_node") and ended.code == 1, ended.explain()


def test_all_nodes_are_told_to_end(net: Network, tmp_path: Path) -> None:
    """The job ends, within 5 s."""
    job = started(net, tmp_path / "run", DDP)
    began = time.monotonic()
    for host in reversed(net.hosts):
        job.signal_agent(host, signal.SIGTERM)
    for host in net.hosts:
        job.popens[host.name].wait(10)
    assert time.monotonic() - began < 6.0
    ended = job.wait()
    assert "stopped by SIGTERM" in ended.of("job_failed")[0]["reason"], ended.explain()


# -- a notice -----------------------------------------------------------------------------------------


def test_a_command_says_that_it_is_taken_away(net: Network, tmp_path: Path, reference: References) -> None:
    """On the second node only: all have the same configuration, as in a pod's template."""
    first, left, spare = net.hosts
    notice = tmp_path / "notice"
    config = tmp_path / "config.yaml"
    looks = f"test -e {notice} && ip -o address | grep -q {left.address}/"
    config.write_text(f"notice: {{command: [sh, -c, '{looks}'], poll_s: 0.2}}\n")
    job = started(net, tmp_path / "run", FSDP, config=config)
    notice.touch()
    assert job.popens[left.name].wait(60) == 0
    assert set(job.rank_hosts().values()) == {first, spare}
    ended = job.wait(of=[first])
    check_handed_over(ended, left)
    check_same(ended, reference(FSDP))


def test_a_file_says_so_to_all_nodes(two_hosts: Network, tmp_path: Path) -> None:
    """No rank can go anywhere: each says so, and the job trains on."""
    config = tmp_path / "config.yaml"
    config.write_text(f"notice: {{file: {tmp_path / 'notice'}, poll_s: 0.2}}\n")
    job = started(two_hosts, tmp_path / "run", DDP, config=config)
    (tmp_path / "notice").touch()
    ended = job.wait()
    said = "\n".join(notice["text"] for notice in ended.notices("node_leaves"))
    assert "it runs the job's controller" in said and "no other node has room for ranks 2 and 3" in said
    assert len(ended.notices("node_leaves")) == 2 and "notice is there (notice.file)" in said
    assert ended.code == 0 and not ended.of("recovery_started"), ended.explain()
