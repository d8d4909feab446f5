"""As ``test_nodes_handoff.py``, where steps are a framework's own calls, and the script has its own loop: Megatron-LM's
unmodified one with ``--flash-recovery``, the Hugging Face Trainer, DeepSpeed's ``train_batch``."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.nodes.test_nodes_handoff import told_to_leave
from tests.support import hosts
from tests.support.elastic_megatron_lm import SCRIPT as ELASTIC
from tests.support.elastic_megatron_lm import Resized, Training, check_goes_on_alike, resized_once
from tests.support.hosts import Host, Network
from tests.support.jobs import ROOT, SMALL, Job, Layout, References, check_clean, check_fired, check_same
from tests.support.megatron_lm import CHECKOUT, FLAGS, MODEL, environment
from tests.support.megatron_lm_loop import SMALL as SMALL_LM
from tests.support.nodes import NodesJob, hosts_of_a_test, network
from tests.support.sameness import Printed

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.grid,
]
net, two_hosts, five_hosts = hosts_of_a_test(3), hosts_of_a_test(2), hosts_of_a_test(5)
SCRIPTS = ROOT / "tests" / "scripts"
PATIENCE_S = 400


@dataclass(frozen=True)
class Calls:
    """A job whose steps are calls, on two nodes. ``made``: what to give a script besides, by the job's directory."""

    layout: Layout
    marks: tuple[pytest.MarkDecorator, ...]
    small: Sequence[str] = tuple(SMALL)
    steps: int = 100
    step_ms: int = 150
    printed: Printed = Printed.LOGS
    env: Callable[[], dict[str, str]] = dict
    made: Callable[[Path], Sequence[str]] = lambda folder: ()

    def start(self, net: Network, run_dir: Path, *options: str, alone: bool = False, slow: bool = True) -> NodesJob:
        return NodesJob(
            net,
            run_dir,
            self.layout,
            steps=self.steps,
            step_ms=self.step_ms if slow else 0,
            small=self.small,
            flags=self.made(run_dir.parent / f"{run_dir.name}-written"),
            options=options,
            env=self.env(),
            alone=alone,
        )

    def __str__(self) -> str:
        return self.layout.name


Reference = Callable[[Calls], Job]
needs_megatron = (
    pytest.mark.megatron,
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM does not say where a checkout of Megatron-LM is"),
)
_MISSING = [name for name in ("deepspeed", "transformers", "accelerate") if importlib.util.find_spec(name) is None]
needs_deepspeed = (pytest.mark.deepspeed, pytest.mark.skipif(bool(_MISSING), reason=f"needs {_MISSING}"))


def lm(name: str, *flags: str, nproc: int = 4, steps: int = 100, step_ms: int = 150, saves: int = 0) -> Calls:
    return Calls(
        Layout(f"lm-{name}", str(SCRIPTS / "paced_megatron_lm.py"), (*FLAGS, *flags), nproc=nproc),
        needs_megatron,
        small=MODEL,
        steps=steps,
        step_ms=step_ms,
        printed=Printed.LAST_RANK,
        env=lambda: environment(Path(CHECKOUT)),
        made=lambda folder: (f"--save={folder}", f"--save-interval={saves}") if saves else (),
    )


def trainer(name: str, *flags: str) -> Calls:
    return Calls(
        Layout(f"hf-{name}", "train_hf.py", flags),
        needs_deepspeed,
        steps=300,
        made=lambda folder: ("--output", str(folder)),
    )


PIPELINE = ("--pipeline", "2", "--tie-head", "--num-workers", "1")
PLAIN = lm("dp4")
DP2 = lm("dp2", nproc=2)
DISTRIBUTED = lm("distributed", "--use-distributed-optimizer", "--bf16")
ALL = (
    PLAIN,
    DISTRIBUTED,
    lm("pp2", "--pipeline-model-parallel-size=2"),
    lm("tp2", "--tensor-model-parallel-size=2"),
    lm("workers", "--num-workers=2"),
    # most of the time is spent in evaluations and in Megatron's checkpoints; with data-loader workers
    lm(
        "evaluated-saved",
        *("--use-distributed-optimizer", "--num-workers=2", "--eval-iters=2", "--eval-interval=2"),
        *("--evaluation-time=1200", "--save-time=1200"),
        steps=30,
        saves=3,
    ),
    trainer("ddp", "--by", "ddp"),
    trainer("zero2", "--zero", "2"),
    Calls(Layout("pipeline", str(SCRIPTS / "deepspeed_own_loop.py"), PIPELINE), needs_deepspeed, steps=250),
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launches without a fault."""
    known = {}

    def launch(run_dir: Path, layout: Layout) -> Job:
        with network(3) as net:
            return known[layout.name].start(net, run_dir, slow=False).wait(PATIENCE_S)

    made = References(lambda: tmp_path_factory.mktemp("reference"), launch)

    def of(calls: Calls) -> Job:
        known[calls.layout.name] = calls
        return made(calls.layout)

    return of


def check_handed_over(ended: Job, *left: Host) -> None:
    """In one go each, without a failure."""
    assert ended.code == 0, ended.explain()
    recoveries = ended.of("recovery_finished")
    assert len(recoveries) == len(left), ended.explain()
    for recovery in recoveries:
        assert recovery["cause"] == "handoff" and recovery["victims"] == [], ended.explain()
        print(f"pause: {recovery['total_s']:.2f} s; {recovery['phases']}")
        assert recovery["total_s"] < 2.0, ended.explain()
    assert not ended.of("failure_detected") and not ended.of("node_lost"), ended.explain()
    said = [notice["text"] for notice in ended.notices("node_left")]
    assert said == [f"node {host.name} has left the job" for host in left], ended.explain()


def each(*chosen: Calls) -> Callable[..., object]:
    params = [pytest.param(calls, marks=calls.marks, id=str(calls)) for calls in chosen]
    return pytest.mark.parametrize("calls", params)


def armed(job: NodesJob, rank: int, phase: str) -> None:
    """``flashrecovery inject``: the process that fills the rank now dies at that moment."""
    command = [*job.net.hosts[0].command, sys.executable, "-m", "flashrecovery.cli.main", "inject", "--run-dir"]
    command += [str(job.directory()), "--rank", str(rank), "--fault", "sigkill", "--at", phase]
    subprocess.run(command, check=True, capture_output=True)


@each(*ALL)
def test_drained(calls: Calls, net: Network, tmp_path: Path, reference: Reference) -> None:
    job = calls.start(net, tmp_path / "run")
    job.wait_for_step(6, timeout_s=240)
    first, left, spare = net.hosts
    assert told_to_leave(job, left) == ""
    job.wait_for_notice("node_left", timeout_s=120)
    assert set(job.rank_hosts().values()) == {first, spare}
    assert job.popens[left.name].wait(20) == 0, "its agent has ended well"
    ended = job.wait(PATIENCE_S, of=[first])
    check_handed_over(ended, left)
    check_same(ended, reference(calls), printed=calls.printed)


LONG = lm("long", nproc=2, steps=1500, step_ms=0)


@each(LONG)
def test_drained_after_many_calls(calls: Calls, net: Network, tmp_path: Path, reference: Reference) -> None:
    """The new processes skip them before the pause, which takes no longer than in a short job."""
    job = calls.start(net, tmp_path / "run")
    job.wait_for_step(900, timeout_s=240)
    first, left, _ = net.hosts
    assert told_to_leave(job, left) == ""
    job.wait_for_notice("node_left", timeout_s=120)
    ended = job.wait(PATIENCE_S, of=[first])
    check_handed_over(ended, left)
    check_same(ended, reference(calls), printed=calls.printed)


@each(PLAIN)
def test_its_agent_is_told_to_end(calls: Calls, net: Network, tmp_path: Path, reference: Reference) -> None:
    job = calls.start(net, tmp_path / "run")
    job.wait_for_step(6, timeout_s=240)
    first, left, _ = net.hosts
    job.signal_agent(left, signal.SIGTERM)
    assert job.popens[left.name].wait(120) == 0, "its agent has ended well"
    ended = job.wait(PATIENCE_S, of=[first])
    check_handed_over(ended, left)
    check_same(ended, reference(calls), printed=calls.printed)


@each(DISTRIBUTED)
def test_it_dies_before(calls: Calls, net: Network, tmp_path: Path, reference: Reference) -> None:
    """While its ranks are built up elsewhere: an ordinary loss."""
    job = calls.start(net, tmp_path / "run")
    job.wait_for_step(6, timeout_s=240)
    first, left, _ = net.hosts
    assert told_to_leave(job, left) == ""
    job.wait_for_notice("node_leaves")
    job.kill_node(left)
    ended = job.wait(PATIENCE_S, of=[first])
    assert ended.code == 0 and ended.notices("joining_process_given_up"), ended.explain()
    assert [e["cause"] for e in ended.of("recovery_finished")] == ["node_lost"], ended.explain()
    check_same(ended, reference(calls), printed=calls.printed)


@each(PLAIN, DISTRIBUTED)
def test_it_dies_in_the_pause(calls: Calls, net: Network, tmp_path: Path, reference: Reference) -> None:
    job = calls.start(net, tmp_path / "run")
    job.wait_for_step(6, timeout_s=240)
    first, left, spare = net.hosts
    assert told_to_leave(job, left) == ""
    job.wait_for("recovery_started")
    job.kill_node(left)
    ended = job.wait(PATIENCE_S, of=[first])
    assert ended.code == 0 and ended.of("recovery_started")[0]["cause"] == "handoff", ended.explain()
    assert ended.of("node_lost") or ended.notices("node_left"), ended.explain()
    assert set(job.rank_hosts().values()) == {first, spare}
    check_same(ended, reference(calls), printed=calls.printed)


@each(PLAIN)
@pytest.mark.parametrize(("rank", "phase"), [(2, "recovery:quiescing"), (0, "recovery:regrouping"), (0, "between")])
def test_a_rank_dies_in_the_pause(
    calls: Calls, rank: int, phase: str, net: Network, tmp_path: Path, reference: Reference
) -> None:
    """One that is to leave, when it stops; one that stays, when the new ones are members, and right after it."""
    job = calls.start(net, tmp_path / "run")
    job.wait_for_step(6, timeout_s=240)
    first, left, _ = net.hosts
    assert told_to_leave(job, left) == ""
    job.wait_for_notice("node_leaves")
    if phase.startswith("recovery:"):
        armed(job, rank, phase)
    else:
        job.wait_for("recovery_started")
        armed(job, rank, phase)
    ended = job.wait(PATIENCE_S, of=[first])
    check_fired(ended)
    assert ended.code == 0 and ended.of("recovery_started")[0]["cause"] == "handoff", ended.explain()
    check_same(ended, reference(calls), printed=calls.printed)


@each(DP2)
def test_the_joining_processes_die_in_the_pause(
    calls: Calls, five_hosts: Network, tmp_path: Path, reference: Reference
) -> None:
    """With their node: the rank that was to leave goes on, and moves to the other spare node. Or they have their state
    already: then that is where they are replaced."""
    job = calls.start(five_hosts, tmp_path / "run", alone=True)
    job.wait_for_step(6, timeout_s=240)
    controller, first, left, *spares = five_hosts.hosts
    assert told_to_leave(job, left) == ""
    job.wait_for_notice("node_leaves")
    said = next(e["text"] for e in job.of("notice") if e["kind"] == "node_leaves")
    chosen, other = sorted(spares, key=lambda host: f"move to {host.name}," not in said)
    doomed: list[int] = []
    began = looked_at = time.monotonic()
    while not job.of("recovery_started"):
        now = time.monotonic()
        assert now < began + 120, job.stop().explain()
        if now > looked_at + 2.0:  # which takes longer than the pause
            doomed, looked_at = job.pids(chosen), now
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.kill_node(chosen)
    ended = job.wait(PATIENCE_S, of=[controller])
    assert ended.code == 0 and ended.of("node_lost"), ended.explain()
    assert ended.of("recovery_started")[0]["cause"] == "handoff" and len(ended.of("recovery_started")) > 1
    assert set(job.rank_hosts().values()) == {first, other}
    check_same(ended, reference(calls), printed=calls.printed)


@each(DP2)
def test_two_nodes_are_drained(calls: Calls, five_hosts: Network, tmp_path: Path, reference: Reference) -> None:
    """All ranks move, one node after the other; the controller is elsewhere."""
    job = calls.start(five_hosts, tmp_path / "run", alone=True)
    job.wait_for_step(6, timeout_s=240)
    controller, *members = five_hosts.hosts
    for host in members[:2]:
        assert told_to_leave(job, host) == ""
    for host in members[:2]:
        assert job.popens[host.name].wait(150) == 0
    ended = job.wait(PATIENCE_S, of=[controller])
    check_handed_over(ended, *members[:2])
    check_same(ended, reference(calls), printed=calls.printed)


@each(lm("last", steps=14, step_ms=2500))
@pytest.mark.parametrize("at", [5, 7, 9, 11, 13])
def test_in_the_last_calls(calls: Calls, at: int, net: Network, tmp_path: Path, reference: Reference) -> None:
    """They move, or it is too late for that: then nothing has happened."""
    job = calls.start(net, tmp_path / "run")
    job.wait_for_step(at, timeout_s=240)
    first, left, _ = net.hosts
    assert told_to_leave(job, left) == ""
    ended = job.wait(PATIENCE_S, of=[first])
    if ended.of("recovery_started"):
        check_handed_over(ended, left)
    else:
        assert "ranks have taken their last step" in ended.notices("joining_process_given_up")[0]["text"], (
            ended.explain()
        )
    check_same(ended, reference(calls), printed=calls.printed)


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    return resized_once(tmp_path_factory)


@pytest.mark.megatron
@needs_megatron[1]
def test_without_room_an_elastic_job_shrinks(two_hosts: Network, tmp_path: Path, resized: Resized) -> None:
    training = Training("drained", iterations=20)
    job = NodesJob(
        two_hosts,
        tmp_path / "run",
        Layout("elastic", str(ELASTIC), nproc=4),
        steps=training.iterations,
        step_ms=400,
        options=("--elastic", "2:4"),
        small=(*MODEL, *SMALL_LM, f"--global-batch-size={training.batch}", "--flash-recovery"),
        env=environment(Path(CHECKOUT)),
    )
    job.wait_for_step(4, timeout_s=240)
    first, left = two_hosts.hosts
    assert told_to_leave(job, left) == ""
    job.wait_for_notice("node_left", timeout_s=90)
    assert job.popens[left.name].wait(20) == 0
    ended = job.wait(PATIENCE_S, of=[first])
    (event,) = ended.of("job_resized")
    assert (event["ranks"], event["left"]) == ([0, 1], [2, 3]) and ended.code == 0, ended.explain()
    assert not ended.of("failure_detected") and not ended.of("node_lost"), ended.explain()
    check_goes_on_alike(ended, resized(training, event["step"], 2), event["step"], 2, training)
    check_clean(ended)


@each(PLAIN)
def test_without_room_a_checkpoint_is_taken(calls: Calls, two_hosts: Network, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"checkpoint: {{dir: {tmp_path / 'checkpoints'}, interval_s: 1000}}\n")
    job = calls.start(two_hosts, tmp_path / "run", "--config", str(config))
    job.wait_for_step(6, timeout_s=240)
    assert told_to_leave(job, two_hosts.hosts[1]) == ""
    job.wait_for("checkpoint_saved", timeout_s=60)
    ended = job.wait(PATIENCE_S)
    assert ended.code == 0 and "a checkpoint is taken" in ended.notices("node_leaves")[0]["text"], ended.explain()
    check_clean(ended)
