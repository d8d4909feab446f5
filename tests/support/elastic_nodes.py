"""Elastic jobs on several hosts (:mod:`tests.support.hosts`) whose state is sharded, or whose replicas have several
ranks, and what they are compared with: a job of one host that was resized by command at the same steps."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support import elastic, elastic_fsdp2, elastic_replicas
from tests.support.elastic import command
from tests.support.elastic_sharded import needing_framework_of
from tests.support.hosts import Host, Network
from tests.support.jobs import ROOT, Job, Layout, check_clean
from tests.support.megatron import ENVIRONMENT
from tests.support.nodes import NodesJob

SCRIPTS = ROOT / "tests" / "scripts"
STEPS = 24
"""Steps of jobs that only become smaller."""
LONG = 90
"""Steps of jobs in which processes are built up meanwhile."""


@dataclass(frozen=True)
class Kind:
    """A framework and its configuration. ``each``: ranks of a replica; ``env``: of its processes."""

    name: str
    script: Path
    flags: tuple[str, ...]
    steps_alike: Callable[[Job, Job, int, int, int], None]
    each: int = 1
    env: Mapping[str, str] | None = field(default=None, hash=False)

    def __str__(self) -> str:
        return self.name

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Of tests that need its framework."""
        return needing_framework_of(self.script)


def _zero(stage: int) -> Kind:
    flags = ("--zero", str(stage))
    script = SCRIPTS / "elastic_deepspeed.py"
    return Kind(f"zero{stage}", script, flags, elastic.check_steps_alike)


def _megatron(name: str, *flags: str, each: int = 1) -> Kind:
    script = SCRIPTS / "elastic_megatron.py"
    return Kind(name, script, flags, elastic.check_steps_alike, each, ENVIRONMENT)


DDP = Kind("ddp", elastic.SCRIPT, (), elastic.check_steps_alike)
FSDP2 = Kind("fsdp2", elastic_fsdp2.SCRIPT, (), elastic_fsdp2.check_steps_alike)
ZERO1, ZERO2, ZERO3 = _zero(1), _zero(2), _zero(3)
DISTRIBUTED = _megatron("distributed-optimizer", "--use-distributed-optimizer", "--bf16")
HSDP = Kind("hsdp", elastic_replicas.SCRIPT, (), elastic_fsdp2.check_steps_alike, each=2)
TENSOR = Kind("tensor", elastic_replicas.SCRIPT, ("--kind", "tensor"), elastic_fsdp2.check_steps_alike, each=2)
_TP2 = ("--tensor-model-parallel-size", "2")
TP2 = _megatron("megatron-tp2", *_TP2, each=2)
TP2_DISTRIBUTED = _megatron("megatron-tp2-distributed", *_TP2, "--use-distributed-optimizer", "--bf16", each=2)
SHARDED = (FSDP2, ZERO1, ZERO2, ZERO3, DISTRIBUTED)
REPLICAS = (HSDP, TP2, TP2_DISTRIBUTED)


def of_kinds(*kinds: Kind) -> list[Any]:
    """Parameters of a test."""
    return [pytest.param(kind, id=kind.name, marks=kind.marks) for kind in kinds]


def launch(
    net: Network,
    folder: Path,
    kind: Kind,
    *,
    per_node: int = 2,
    spare: int = 0,
    nodes: int | None = None,
    least: int = 1,
    steps: int = STEPS,
    step_ms: int = 200,
    faults: Sequence[str] = (),
    elastic: Mapping[str, Any] | None = None,
    timeouts: Mapping[str, float] | None = None,
    flags: Sequence[str] = (),
) -> NodesJob:
    """A job of this kind on all hosts of ``net``, of which the last ``spare`` ones are spare (``nodes``: on that many
    of them). It has as many replicas as they hold, and may have as few as ``least``."""
    nnodes = len(net.hosts) - spare if nodes is None else nodes
    ranks = nnodes * per_node
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    block = {"min": least, "max": ranks // kind.each, **(elastic or {})}
    config.write_text(f"elastic: {block}\ntimeouts: {dict(timeouts or {})}\n".replace("'", ""))
    return NodesJob(
        net,
        folder / "run",
        Layout(kind.name, str(kind.script), kind.flags, nproc=ranks),
        nnodes=nnodes,
        spare=None if nodes is None else 0,
        steps=steps,
        step_ms=step_ms,
        config=config,
        options=[word for fault in faults for word in ("--inject", fault)],
        flags=flags,
        env=kind.env,
        small=(),
    )


# -- what happens to it ----------------------------------------------------------------------------


def cli(job: NodesJob, name: str, *args: str) -> str:
    """A command of ``flashrecovery`` about the job, from one of its hosts; returns what it has refused, "" if nothing.
    It takes the run directory first."""
    host = job.controller_host()
    line = [*host.command, sys.executable, "-m", "flashrecovery.cli.main", name, *args]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr + done.stdout


def inject(job: NodesJob, rank: int, at: str, step: int | None = None, fault: str = "sigstop") -> None:
    """``flashrecovery inject``."""
    args = ["--run-dir", str(job.directory()), "--rank", str(rank), "--fault", fault, "--at", at]
    refused = cli(job, "inject", *args, *(() if step is None else ("--step", str(step))))
    assert not refused, refused


def resize(job: NodesJob, replicas: int, step: int | None = None) -> str:
    """``flashrecovery resize``; returns what it has refused."""
    at = () if step is None else ("--at-step", str(step))
    return cli(job, "resize", str(job.directory()), "--to", str(replicas), *at)


def drain(job: NodesJob, host: Host, within_s: float = 90.0) -> str:
    """``flashrecovery drain``; returns what it has refused."""
    return cli(job, "drain", str(job.directory()), "--node", host.name, "--within", str(within_s))


def wait_until_frozen(job: NodesJob, host: Host, timeout_s: float = 120.0) -> None:
    """Until a fault ``sigstop`` has struck on this host: a process of the job stands still where it was to."""
    deadline = time.monotonic() + timeout_s
    while not any(_is_stopped(pid) for pid in job.pids(host)):
        if time.monotonic() > deadline or all(p.poll() is not None for p in job.popens.values()):
            raise AssertionError(f"nothing has struck on {host.name}\n{job.stop().explain()}\n{job.output()}")
        time.sleep(0.02)


def lose(job: NodesJob, host: Host, how: str = "killed") -> None:
    """The node is lost: killed, with all of its processes, or cut off."""
    if how == "killed":
        job.kill_node(host)
    else:
        job.net.cut(host)


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


# -- what it is compared with ----------------------------------------------------------------------

Sizes = tuple[tuple[int, int], ...]
"""(step, replicas): from that step on the job has so many."""


def resized_by_command(kind: Kind, folder: Path, launched: int, sizes: Sizes, end: int) -> Job:
    """A job of one host with that many replicas that is resized by command at these steps, undisturbed. (That it goes
    on as a job that was started in its last size: the tests of the kind on one host.)"""
    config = {"elastic": {"min": 1, "max": launched}}
    growing = any(after > before for (_, before), (_, after) in pairwise(sizes))
    flags = ["--steps", str(end), "--step-time", "200" if growing else "100", *kind.flags]
    running = elastic.start(folder, config, *flags, nproc=launched * kind.each, script=kind.script, env=kind.env)
    running.wait_for("job_started", 180)
    for number, (step, size) in enumerate(sizes, 1):
        refused = command(running, size, step)
        assert not refused, f"{refused}\n{running.wait(1).explain()}"
        event = running.wait_for("job_resized", 120, count=number)
        assert (event["step"], event["replicas"]) == (step, size), running.wait(240).explain()
        running.wait_for("recovery_finished", count=number)
    job = running.wait(300)
    assert job.code == 0 and not job.of("failure_detected"), job.explain()
    check_clean(job)
    return job


Resized = Callable[[Kind, int, Sizes, int], Job]


def resized_once(factory: pytest.TempPathFactory) -> Resized:
    """:func:`resized_by_command`, each made once."""

    @cache
    def job(kind: Kind, launched: int, sizes: Sizes, end: int) -> Job:
        return resized_by_command(kind, factory.mktemp("resized") / "run", launched, sizes, end)

    return job


def sizes_of(job: Job, kind: Kind) -> Sizes:
    """The steps from which the job had other numbers of replicas. What was decided and then not done is left out: a
    further loss can take the newest copies with it, and the change comes a step earlier."""
    found: list[tuple[int, int]] = []
    for event in job.of("job_resized"):
        while found and found[-1][0] >= event["step"]:
            found.pop()
        size = len(event["ranks"]) // kind.each
        if not found or found[-1][1] != size:
            found.append((event["step"], size))
    return tuple(found)


def check_as_commanded(kind: Kind, job: Job, launched: int, resized: Resized, *, end: int = STEPS) -> Sizes:
    """In all its sizes the job went the way of one that was resized by command at the same steps, bit for bit."""
    assert job.code == 0, job.explain()
    sizes = sizes_of(job, kind)
    assert sizes, job.explain()
    other = resized(kind, launched, sizes, end)
    for (step, size), (until, _) in zip(sizes, [*sizes[1:], (end, 0)], strict=True):
        kind.steps_alike(job, other, step, until, size * kind.each)
    check_clean(job)
    return sizes
