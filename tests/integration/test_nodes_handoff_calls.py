"""As ``test_nodes_handoff.py``, where steps are a framework's own calls, and the script has its own loop: Megatron-LM's
unmodified one with ``--flash-recovery``, the Hugging Face Trainer, DeepSpeed's ``train_batch``."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.test_nodes_handoff import told_to_leave
from tests.support import hosts
from tests.support.hosts import Host, Network
from tests.support.jobs import MARKER, ROOT, SMALL, Job, Layout, References, check_clean, check_same, marked_processes
from tests.support.megatron_lm import CHECKOUT, FLAGS, MODEL, environment
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


PLAIN = lm("dp4")
DISTRIBUTED = lm("distributed", "--use-distributed-optimizer", "--bf16")
ALL = (
    PLAIN,
    DISTRIBUTED,
    lm("pp2", "--pipeline-model-parallel-size=2"),
    lm("tp2", "--tensor-model-parallel-size=2"),
    lm("workers", "--num-workers=2"),
    # most of the time is spent in evaluations, and in Megatron's checkpoints
    lm("evaluated", "--eval-iters=2", "--eval-interval=2", "--evaluation-time=1200", steps=30),
    lm("saved", "--use-distributed-optimizer", "--save-time=1200", steps=30, saves=2),
    trainer("ddp", "--by", "ddp"),
    trainer("zero2", "--zero", "2"),
    Calls(Layout("pipeline", str(SCRIPTS / "deepspeed_own_loop.py")), needs_deepspeed, printed=Printed.STEPS),
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Calls], Job]:
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


@each(*ALL)
def test_drained(calls: Calls, net: Network, tmp_path: Path, reference: Callable[[Calls], Job]) -> None:
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
