"""TRL's trainers under ``protect``: models, references that follow, generated batches, metrics and the logged history
end as without a fault, bit for bit, after deaths in each phase of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.faults import faults
from tests.support.jobs import ROOT, Job, Layout, RunningJob, check_fired, check_same
from tests.support.sameness import Printed

pytest.importorskip("trl")
pytest.importorskip("peft")

SCRIPT = ROOT / "tests" / "scripts" / "trl_trainers.py"
TIMEOUT_S = 400  # TRL imports much, in each process
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
KILLS = (1, "forward", 3), (0, "backward", 6), (1, "optimizer", 7), (0, "between", 9)
"""Each third call is a log."""
FOLLOWING = (1, "forward", 2), (0, "commit", 6), (1, "optimizer", 10), (0, "backward", 12), (1, "between", 14)
"""With a call after each step, in which a reference may follow the model: it does in the one with number 6."""

pytestmark = [pytest.mark.libraries, pytest.mark.timeout(3 * TIMEOUT_S)]


def _run(
    path: Path, kind: str, kills: tuple[tuple[int, str, int], ...] = (), *more: str, options: tuple[str, ...] = ()
) -> Job:
    output = path.parent / f"{path.name}-output"
    output.mkdir()
    flags = ["--kind", kind, "--steps", "8", "--output", str(output), *more]
    if kind == "dpo-precomputed":
        rows = [{name: f"w{i} w{i + j} " for j, name in enumerate(("prompt", "chosen", "rejected"))} for i in range(67)]
        (output / "data.json").write_text("\n".join(json.dumps(row) for row in rows))
    layout = Layout(kind, "", nproc=2)
    standby, inject = int(bool(kills)), faults(*kills)
    job = RunningJob(
        path, layout, script=SCRIPT, flags=flags, env=ENVIRONMENT, standby=standby, inject=inject, options=options
    )
    return job.wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        *((kind, KILLS) for kind in ("sft", "sft-lora", "zero3-lora", "kto", "reward", "rloo")),
        *((kind, FOLLOWING) for kind in ("dpo", "grpo")),
    ],
)
def test_after_deaths_in_each_phase(kind: str, kills: tuple[tuple[int, str, int], ...], tmp_path: Path) -> None:
    job = _run(tmp_path / "run", kind, kills)
    check_same(job, _run(tmp_path / "reference", kind), printed=Printed.LOGS)
    check_fired(job, len(kills))
    assert not job.notices("not_registered"), job.explain()


@pytest.mark.deepspeed
@pytest.mark.parametrize("kind", ["zero3-lora", "zero2-dpo"])
def test_by_deepspeeds_key_alone(kind: str, tmp_path: Path) -> None:
    """Without a line of ours."""
    job = _run(tmp_path / "run", kind, KILLS, "--unmodified")
    check_same(job, _run(tmp_path / "reference", kind), printed=Printed.LOGS)
    check_fired(job, len(KILLS))
    assert not job.notices("not_registered") and not job.notices("unprotected"), job.explain()


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        *((kind, sharding) for kind in ("sft-lora", "dpo-lora") for sharding in ((), ("--fsdp",))),
        ("sft-packed", ()),
    ],
)
def test_by_auto(kind: str, sharding: tuple[str, ...], tmp_path: Path) -> None:
    """Without a line of ours, adapters as people train them, and rows of several texts."""
    more = ("--unmodified", *sharding)
    job = _run(tmp_path / "run", kind, KILLS, *more, options=("--auto",))
    check_same(job, _run(tmp_path / "reference", kind, (), *more, options=("--auto",)), printed=Printed.LOGS)
    check_fired(job, len(KILLS))
    assert not job.notices("not_registered") and not job.notices("unprotected"), job.explain()


def test_what_is_computed_before_training_and_kept_in_a_file(tmp_path: Path) -> None:
    """A replacement finds that file, and is refused for the collectives that it leaves out; the next one does not find
    it, computes the same as the first process of its rank, and goes on."""
    flags = ("--unmodified",)
    job = _run(tmp_path / "run", "dpo-precomputed", KILLS, *flags, options=("--auto",))
    check_same(
        job, _run(tmp_path / "reference", "dpo-precomputed", (), *flags, options=("--auto",)), printed=Printed.LOGS
    )
    check_fired(job, len(KILLS))
    kinds = [event["kind"] for event in job.of("failure_detected")]
    assert kinds.count("killed") == len(KILLS) and 1 <= kinds.count("exception") <= 2, job.explain()
