"""Jobs for the report of :mod:`tests.gpu_check` that show one thing each, where a layout shows all phases of a step.

``wrapper``: what stands around the script, from the options of the check: GPUs, gloo, or the fake of NCCL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.jobs import DDP, FSDP, GPT, SMALL, Job, Layout, RunningJob
from tests.support.sameness import Printed, differences
from tests.support.wrappers import OPTIMIZER, Wrapper

STEPS = 12


@dataclass(frozen=True)
class Scenario:
    """One job with faults, compared with the same launch without any.

    Attributes:
        inject: its faults, as ``--inject`` takes them.
        victims: of each recovery.
        env: of both launches. needs: a package.
    """

    what: str
    layout: Layout
    inject: tuple[str, ...]
    victims: tuple[tuple[int, ...], ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""

    @property
    def possible(self) -> bool:
        """Whether the package that it needs is there."""
        return not self.needs or find_spec(self.needs.partition(".")[0]) is not None


def _killed(rank: int, phase: str, step: int) -> str:
    return f"rank={rank},fault=sigkill,at={phase},step={step}"


SCENARIOS = {
    "abort-order": Scenario(
        "a rank that lives is killed when the others have aborted, and not amid a transfer",
        FSDP,
        ("rank=1,fault=sigstop,at=backward,step=3", "rank=2,fault=sigstop,at=forward,step=7"),
        ((1,), (2,)),
    ),
    "domain": Scenario(
        "the ranks of an NVLink domain die within 10 ms; their copies are in the other one",
        FSDP,
        (_killed(2, "backward", 4), _killed(3, "backward", 4)),
        ((2, 3),),
        {"gpu_domain": 2, "redundancy": "neighbor"},
    ),
    "fused": Scenario(
        "torch's fused optimizer",
        DDP,
        (_killed(1, "optimizer", 3), _killed(2, "grad-sync", 6), _killed(0, "commit", 9)),
        ((1,), (2,), (0,)),
        env={OPTIMIZER: "fused"},
    ),
    "fused-fsdp": Scenario(
        "torch's fused optimizer on sharded parameters",
        FSDP,
        (_killed(1, "optimizer", 3), _killed(2, "grad-sync", 6)),
        ((1,), (2,)),
        env={OPTIMIZER: "fused"},
    ),
    "parity": Scenario(
        "a shard that only parity has",
        FSDP,
        (_killed(1, "backward", 4), _killed(3, "optimizer", 8)),
        ((1,), (3,)),
        {"redundancy": "parity", "parity": 1, "parity_group": 4},
    ),
    "apex": Scenario(
        "apex's FusedAdam",
        DDP,
        (_killed(1, "optimizer", 3), _killed(2, "grad-sync", 6)),
        ((1,), (2,)),
        env={OPTIMIZER: "apex"},
        needs="apex.optimizers",
    ),
    "transformer-engine": Scenario(
        "Transformer Engine's FusedAdam",
        DDP,
        (_killed(1, "optimizer", 3), _killed(2, "grad-sync", 6)),
        ((1,), (2,)),
        env={OPTIMIZER: "transformer-engine"},
        needs="transformer_engine.pytorch",
    ),
}


def run(scenario: Scenario, directory: Path, wrapper: Wrapper, job_s: float) -> tuple[Job, list[str]]:
    """The job, and what is not as it should be."""
    directory.mkdir(parents=True)
    reference = start(scenario, directory / "reference", wrapper, faults=False).wait(job_s)
    if reference.code != 0:
        return reference, [f"the undisturbed job has ended with code {reference.code}: {directory}/reference.out"]
    job = start(scenario, directory / "killed", wrapper).wait(job_s)
    found = differences(job, reference, Printed.STEPS, 0, 1)
    if (fired := len(job.notices("fault_fired"))) < len(scenario.inject):
        found.append(f"{fired} of {len(scenario.inject)} faults were carried out")
    victims = [tuple(sorted(event["victims"])) for event in job.of("recovery_finished")]
    if victims != [*scenario.victims]:
        found.append(f"victims: {victims}, not {[*scenario.victims]}")
    return job, found


def start(scenario: Scenario, run_dir: Path, wrapper: Wrapper, *, faults: bool = True) -> RunningJob:
    """Its job, or without ``faults`` the one that it is compared with."""
    layout = scenario.layout
    return RunningJob(
        run_dir,
        layout,
        standby=1 if faults else 0,
        inject=scenario.inject if faults else (),
        config=scenario.config,
        script=wrapper.script,
        flags=[*SMALL, "--steps", str(STEPS), *layout.flags],
        env=wrapper.environment(GPT / layout.script, scenario.env),
    )
