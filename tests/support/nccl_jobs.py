"""Jobs of the examples whose process groups are the fake of NCCL's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import gpu_check
from tests.support import fake_nccl
from tests.support import megatron as mg
from tests.support.faults import in_every_phase
from tests.support.jobs import GPT, SMALL, Job, Layout, References, run_job
from tests.support.wrappers import FAKE_NCCL

NEEDS = {"train_deepspeed.py": pytest.mark.deepspeed, "pretrain_gpt.py": pytest.mark.megatron}
"""By script."""


def options(layout: Layout, steps: int, env: dict[str, str]) -> dict[str, Any]:
    """For ``run_job`` and ``RunningJob``."""
    flags = [*SMALL, "--steps", str(steps), *layout.flags]
    megatron = mg.ENVIRONMENT if layout.script == "pretrain_gpt.py" else {}  # the others need not have it
    env = FAKE_NCCL.environment(GPT / layout.script, {**megatron, **env})
    return {"script": FAKE_NCCL.script, "flags": flags, "env": env}


def run(
    directory: Path,
    layout: Layout,
    steps: int = gpu_check.STEPS,
    env: dict[str, str] | None = None,
    limit_s: float = 400,
    **more: Any,
) -> Job:
    """One job, up to its end."""
    return run_job(directory, layout, timeout_s=limit_s, **options(layout, steps, env or {}), **more)


def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Job]:
    """The same launches without a fault, each layout's made once."""
    fake_nccl.build()
    return References(lambda: tmp_path_factory.mktemp("reference"), lambda path, layout: run(path, layout, standby=0))


def killed_in_every_phase(layout: Layout) -> list[str]:
    """One kill in each phase of a step; the first, a middle and the last rank take turns."""
    return in_every_phase(gpu_check.phases_of(layout), (0, layout.nproc // 2, layout.nproc - 1), 0, "sigkill")
