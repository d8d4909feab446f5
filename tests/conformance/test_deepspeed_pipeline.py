"""DeepSpeed's pipeline engine: tied weights, activation checkpointing, and scripts with their own loop.

Two stages, alone and by two data-parallel ranks. The scripts of the own loop call ``train_batch`` and ``eval_batch``
without ``recovery.steps()``; each call is its own version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.faults import faults
from tests.support.installed import skip_module_without
from tests.support.jobs import (
    ROOT,
    SMALL,
    Job,
    Layout,
    References,
    check_clean,
    check_fired,
    check_recovered,
    check_same,
    run_job,
)
from tests.support.sameness import Printed

skip_module_without("deepspeed")

STEPS = 10
TIMEOUT_S = 400
CONFIG = {"timeouts": {"stopped_s": 0.3}}
EXAMPLE = "train_deepspeed.py"
OWN_LOOP = ROOT / "tests" / "scripts" / "deepspeed_own_loop.py"

TIED = ("--pipeline", "2", "--tie-head", "--num-workers", "1")
RECOMPUTED = ("--set", "pipeline.activation_checkpoint_interval=1")
NOT_REENTRANT = (*RECOMPUTED, "--set", "pipeline.use_reentrant=false")
LAYOUTS = (
    Layout("tied-pp2", EXAMPLE, ("--zero", "1", *TIED), nproc=2),
    Layout("tied-recomputed-pp2-dp2", EXAMPLE, ("--zero", "1", *TIED, *RECOMPUTED)),
    Layout("tied-not-reentrant-fp32", EXAMPLE, ("--zero", "0", "--precision", "fp32", *TIED, *NOT_REENTRANT)),
)
TRACKER = Layout("own-loop-tracker", EXAMPLE, (*TIED, *RECOMPUTED, "--mode", "tracker"))
TRACKER_PP2 = Layout("own-loop-pp2", EXAMPLE, (*TIED, *RECOMPUTED, "--mode", "tracker"), nproc=2)
EVALUATIONS = (3, 7, 11)
"""Calls of the own loop that are an ``eval_batch``: one after every third step."""
CALLS = STEPS + len(EVALUATIONS)

Reference = Callable[[Layout], Job]
pytestmark = [pytest.mark.timeout(3 * TIMEOUT_S), pytest.mark.deepspeed]


def run(run_dir: Path, layout: Layout, inject: Sequence[str] = (), options: Sequence[str] = ()) -> Job:
    """The example, or the own loop for layouts with a mode."""
    own = "--mode" in layout.flags
    return run_job(
        run_dir,
        layout,
        steps=STEPS,
        standby=1 if inject else 0,
        inject=inject,
        options=options,
        config=CONFIG,
        script=OWN_LOOP if own else None,
        flags=[*SMALL, "--steps", str(STEPS), *layout.flags] if own else [],
        timeout_s=TIMEOUT_S,
    )


def in_grid(name: str, *values: object) -> object:
    """A case that is not part of the fast suite."""
    return pytest.param(*values, id=name, marks=pytest.mark.grid)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch without a fault, once a layout."""
    return References(lambda: tmp_path_factory.mktemp("reference"), run)


def check(job: Job, reference: Job, inject: Sequence[str], printed: Printed = Printed.LOGS) -> None:
    """``printed``: an own loop has lines for its evaluations, too."""
    check_same(job, reference, printed=printed)
    check_fired(job, len(inject))
    check_recovered(job, [int(i.partition(",")[0].removeprefix("rank=")) for i in inject])


@pytest.mark.grid
def test_what_has_ended_the_loops_is_not_known_to_a_replacement(tmp_path: Path) -> None:
    """It would make another call, and wait in it for those whose scripts have come to their end."""
    stops = tmp_path / "stops"
    stops.touch()
    layout = Layout("own-loop-stops", EXAMPLE, (*TIED, *RECOMPUTED, "--mode", "stops"), nproc=2)
    flags = [*SMALL, "--steps", str(STEPS), *layout.flags]
    job = run_job(
        *(tmp_path / "run", layout),
        steps=STEPS,
        standby=1,
        script=OWN_LOOP,
        flags=flags,
        env={"STOPS": str(stops)},
        config=CONFIG,
        timeout_s=TIMEOUT_S,
    )
    assert job.code == 1 and not stops.exists(), job.explain()
    (failed,) = job.of("job_failed")
    assert "come to their end after 5 calls, and this one makes another" in failed["reason"], job.explain()
    assert {e["rank"] for e in job.of("failure_detected")} == {1}, job.explain()


@pytest.mark.grid
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_tied_weights(layout: Layout, tmp_path: Path, reference: Reference) -> None:
    inject = faults((0, "backward", 2), (1, "grad-sync", 4))
    if layout.nproc > 2:
        inject += faults((2, "optimizer", 6), (3, "forward", STEPS - 1))
    check(run(tmp_path / "run", layout, inject), reference(layout), inject, Printed.STEPS)


@pytest.mark.parametrize(
    ("layout", "inject"),
    [
        pytest.param(TRACKER, faults((1, "backward", 5), (0, "commit", CALLS - 1)), id="sigkill"),
        in_grid("sigkill-two-more-phases", TRACKER, faults((3, "forward", 3), (2, "param-gather", 6))),
        in_grid(
            "sigkill-other-phases",
            TRACKER,
            faults((0, "between", 7), (2, "optimizer", 9), (3, "forward", 11), (1, "commit", 12)),
        ),
        in_grid("sigstop", TRACKER, faults((1, "forward", 7), (2, "backward", 8), fault="sigstop")),
        in_grid("raise", TRACKER, faults((3, "backward", 2), (0, "forward", 3), fault="raise")),
        in_grid("pp2", TRACKER_PP2, faults((1, "forward", 3), (0, "backward", CALLS - 1))),
    ],
)
def test_own_loop(layout: Layout, inject: list[str], tmp_path: Path, reference: Reference) -> None:
    """Deaths in training steps and in evaluations, of the first rank, and in the last call."""
    check(run(tmp_path / "run", layout, inject), reference(layout), inject)


@pytest.mark.grid
def test_own_loop_that_saves_and_gives_its_data_to_initialize(tmp_path: Path) -> None:
    """The save is call 6, between two steps and after an evaluation; the job dies in it, and in its neighbours."""
    jobs = []
    inject = faults((2, "commit", 5), (0, "between", 6), (1, "commit", 6), (3, "backward", 9))
    for name in ("reference", "run"):
        flags = (*TIED, "--mode", "training-data", "--save", str(tmp_path / f"{name}-saved"))
        jobs.append(run(tmp_path / name, Layout(name, EXAMPLE, flags), inject if name == "run" else ()))
    check(jobs[1], jobs[0], inject)
    files = [sorted(p.name for p in (tmp_path / f"{name}-saved").rglob("*.pt")) for name in ("reference", "run")]
    assert files[0] and files[0] == files[1]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("no-data", "train_batch() without a data iterator on rank 0, stage 0 of 2"),
        ("other-data", "train_batch() was given another data iterator than before"),
        ("eval-first", "train_batch() was given its data after another call of the engine"),
    ],
)
def test_refused(mode: str, words: str, tmp_path: Path) -> None:
    layout = Layout(mode, EXAMPLE, (*TIED, "--mode", mode), nproc=2)
    job = run(tmp_path / "run", layout, options=["--max-restarts", "0"])
    assert job.code != 0 and not job.digests, job.explain()
    assert words in job.output, job.explain()
    check_clean(job)
