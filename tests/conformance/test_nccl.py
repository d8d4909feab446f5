"""Jobs whose process groups behave as NCCL's do (tests/support/fake_nccl).

A rank is killed in every phase of a step, and the end is that of the same launch without a kill, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import gpu_check
from tests.support import fake_nccl
from tests.support import megatron as mg
from tests.support.faults import in_every_phase
from tests.support.jobs import DDP, GPT, ROOT, SMALL, Job, Layout, References, check_same, run_job

WRAPPER = ROOT / "tests" / "scripts" / "fake_nccl.py"
NEEDS = {"train_deepspeed.py": pytest.mark.deepspeed, "pretrain_gpt.py": pytest.mark.megatron}

pytestmark = pytest.mark.timeout(500)  # some ten cold starts of a process on two cores


def _run(directory: Path, layout: Layout, steps: int = gpu_check.STEPS, **more: object) -> Job:
    flags = [str(GPT / layout.script), *SMALL, "--steps", str(steps), *layout.flags]
    megatron = mg.ENVIRONMENT if layout.script == "pretrain_gpt.py" else {}  # the others need not have it
    env = {**megatron, **more.pop("env", {})}  # type: ignore[dict-item]
    return run_job(directory, layout, timeout_s=400, script=WRAPPER, flags=flags, env=env, **more)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Job]:
    fake_nccl.build()
    return References(lambda: tmp_path_factory.mktemp("reference"), lambda path, layout: _run(path, layout))


def _cases() -> list[object]:
    return [
        pytest.param(
            layout,
            id=layout.name,
            marks=[*([] if layout is DDP else [pytest.mark.grid]), *filter(None, [NEEDS.get(layout.script)])],
        )
        for layout in gpu_check.LAYOUTS.values()
    ]


@pytest.mark.parametrize("layout", _cases())
def test_a_kill_in_every_phase(layout: Layout, tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    phases = gpu_check.phases_of(layout)
    inject = in_every_phase(phases, (0, layout.nproc // 2, layout.nproc - 1), 0, "sigkill")
    job = _run(tmp_path / "run", layout, inject=inject, standby=1)
    assert len(job.notices("fault_fired")) == len(inject), "every kill was carried out"
    check_same(job, reference(layout))


def test_connections_break_and_nobody_has_died(tmp_path: Path, reference: Callable[[Layout], Job]) -> None:
    """With gloo somebody raises. Of NCCL it has to be asked: otherwise all wait for ``timeouts.hang``."""
    config = {"timeouts": {"peer_error_wait_s": 1.0}}
    job = _run(tmp_path / "run", DDP, standby=1, env={"FAKE_NCCL_BREAK": "1:5"}, config=config)
    check_same(job, reference(DDP))
    failures = [event for event in job.of("failure_detected") if "NCCL reports an error" in event["evidence"]]
    assert failures, job.explain()
