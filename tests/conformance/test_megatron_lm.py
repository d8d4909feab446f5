"""An unmodified checkout of Megatron-LM with ``--flash-recovery``; ``MEGATRON_LM`` in the environment says where it is.

Evaluations and checkpoints in the middle. Versions count protected calls: in each iteration a training step and a log,
an evaluation every fourth, a checkpoint every fifth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.faults import faults
from tests.support.installed import skip_module_without
from tests.support.jobs import Job, Layout, References, check_fired, check_recovered, check_same, tokens_per_step
from tests.support.megatron_lm import CHECKOUT, FLAGS, MODEL, TIMEOUT_S, needs_checkout, run_lm
from tests.support.sameness import Printed

skip_module_without("megatron.core")

ITERATIONS = ("--train-iters", "12")
EVALUATED = ("--eval-iters", "2", "--eval-interval", "4")
TP = ("--tensor-model-parallel-size", "2")
PP = ("--pipeline-model-parallel-size", "2")
CP = ("--context-parallel-size", "2")
DISTRIBUTED = ("--use-distributed-optimizer", "--bf16")
MOE = ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01", "--moe-router-topk", "2")
OVERLAPS = ("--overlap-grad-reduce", "--overlap-param-gather")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
RANKS = ("--q-lora-rank", "16", "--kv-lora-rank", "16")
HEADS = ("--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "12")
LATENT = ("--multi-latent-attention", *RANKS, *HEADS, "--qk-layernorm")
UP_PROJECTIONS = ("--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj")
BY_SAMPLES = [flag for flag in MODEL if not flag.startswith(("--train-iters", "--lr-warmup-iters"))]
RAMP_UP = ("--train-samples", "80", "--lr-warmup-samples", "8", "--rampup-batch-size", "4", "4", "24")
"""Six iterations of four samples, then seven of eight."""

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.grid,
    pytest.mark.timeout(3 * TIMEOUT_S),
    needs_checkout,
]
Reference = Callable[[Layout], Job]


def lm(name: str, *flags: str, nproc: int = 2) -> Layout:
    """Flags of ``pretrain_gpt.py``."""
    return Layout(f"lm-{name}", "", flags, nproc=nproc)


LAYOUTS = (
    lm("dp2"),
    lm("dp2-evaluated", *EVALUATED),
    lm("dp2-distributed", *DISTRIBUTED, *EVALUATED),
    lm("tp2-dp2", *TP, nproc=4),
    lm("pp2-dp2", *PP, *EVALUATED, nproc=4),
    lm("ep2-dp2", "--num-experts", "4", "--expert-model-parallel-size", "2", *MOE, nproc=4),
    lm("dp2-latent", *LATENT, *DISTRIBUTED, *EVALUATED),
    lm("tp2-dp2-latent", *TP, *LATENT, *DISTRIBUTED, *EVALUATED, nproc=4),
    lm("pp2-dp2-latent", *PP, *LATENT, *DISTRIBUTED, *EVALUATED, nproc=4),
    lm("cp2-dp2-latent", *CP, *LATENT, *DISTRIBUTED, *EVALUATED, nproc=4),
    lm("dp2-workers", "--num-workers", "2", *EVALUATED),
    lm("dp2-no-rerun", "--rerun-mode", "disabled"),
    lm("tp2-dp2-recompute", *TP, *RECOMPUTE, nproc=4),
    lm("tp2-dp2-overlaps", *TP, *DISTRIBUTED, *OVERLAPS, *EVALUATED, nproc=4),
)


def _run(run_dir: Path, layout: Layout, inject: Sequence[str] = ()) -> Job:
    flags = [*FLAGS, *ITERATIONS, *layout.flags]
    return run_lm(run_dir, Path(CHECKOUT), flags, nproc=layout.nproc, inject=inject)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch without a fault, once a layout."""
    return References(lambda: tmp_path_factory.mktemp("reference"), _run)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_deaths_in_training(layout: Layout, tmp_path: Path, reference: Reference) -> None:
    """In backward, in the optimizer, in a log and at the end of a step, of the first and the last rank."""
    last = layout.nproc - 1
    inject = faults((last, "backward", 2), (0, "optimizer", 4), (last, "between", 7), (0, "commit", 10))
    job = _run(tmp_path / "run", layout, inject)
    check_same(job, reference(layout), printed=Printed.LAST_RANK)
    check_fired(job, len(inject))
    check_recovered(job, [0, last])
    assert tokens_per_step(job) == 8 * 32, "the wrapper has reported them"


def test_deaths_with_latent_attention_that_is_recomputed(tmp_path: Path) -> None:
    """Queries, keys and values are projected up again in the backward pass, and only there: a death in a forward
    pass leaves them half-made."""
    layout = lm("latent-recompute", *LATENT, *DISTRIBUTED, *UP_PROJECTIONS)
    inject = faults((1, "forward", 2), (0, "optimizer", 6))
    jobs = [_run(tmp_path / name, layout, armed) for name, armed in (("reference", ()), ("run", inject))]
    check_same(jobs[1], jobs[0], printed=Printed.LAST_RANK)
    check_fired(jobs[1], len(inject))
    check_recovered(jobs[1], [0, 1])


@pytest.mark.parametrize("flags", [(), DISTRIBUTED], ids=["fp32", "distributed"])
def test_the_norm_of_the_parameters(flags: tuple[str, ...], tmp_path: Path) -> None:
    """It is reduced in each iteration, and logged after three. Of iterations 0 to 5 the calls are 0 and 1, 2, 3 and 4,
    5, 6, 7 and 8."""
    layout = lm("norms", *TP, *flags, "--log-params-norm", "--log-interval", "3", nproc=4)
    inject = faults((2, "commit", 3), (3, "backward", 5), (1, "commit", 6), (0, "between", 8))
    jobs = [_run(tmp_path / name, layout, armed) for name, armed in (("reference", ()), ("run", inject))]
    check_same(jobs[1], jobs[0], printed=Printed.LAST_RANK)
    check_fired(jobs[1], len(inject))
    norms = [_norms(job) for job in jobs]
    assert len(norms[0]) == 5 and norms[0] == norms[1], norms  # after the first iteration, and four times


def _norms(job: Job) -> dict[str, set[str]]:
    """What is logged of each iteration."""
    found: dict[str, set[str]] = {}
    for log in job.run_dir.rglob("rank*.log"):
        for line in log.read_text().splitlines():
            if "params norm:" in line:
                number = line.partition(" iteration ")[2].partition("/")[0].strip()
                kept = [part for part in line.split("|") if "norm" in part or "loss" in part]
                found.setdefault(number, set()).add("|".join(kept))
    return found


def test_deaths_while_the_batch_size_ramps_up(tmp_path: Path) -> None:
    """It changes between calls 11 and 12, in the seventh iteration."""
    layout, inject = (
        lm("rampup"),
        faults((1, "backward", 4), (0, "commit", 11), (1, "forward", 12), (0, "backward", 14)),
    )
    jobs = [
        run_lm(tmp_path / name, Path(CHECKOUT), [*FLAGS, *RAMP_UP], model=BY_SAMPLES, nproc=layout.nproc, inject=armed)
        for name, armed in (("reference", ()), ("run", inject))
    ]
    check_same(jobs[1], jobs[0], printed=Printed.LAST_RANK)
    check_fired(jobs[1], len(inject))
    check_recovered(jobs[1], [0, 1])
    assert "iteration       13/" in jobs[0].explain()


def test_deaths_after_a_checkpoint_of_megatrons_was_loaded(tmp_path: Path) -> None:
    """Calls are counted from the first iteration after it."""
    saved = str(tmp_path / "saved")
    first = _run(tmp_path / "first", lm("first", "--save", saved, "--save-interval", "5"))
    assert first.code == 0, first.explain()
    layout, inject = lm("loaded", "--load", saved, "--ckpt-step", "5"), faults((1, "backward", 2), (0, "optimizer", 6))
    reference, job = (_run(tmp_path / name, layout, inject if name == "run" else ()) for name in ("reference", "run"))
    check_same(job, reference, printed=Printed.LAST_RANK)
    check_fired(job, len(inject))
    check_recovered(job, [0, 1])


def test_deaths_in_evaluation_and_checkpoint(tmp_path: Path) -> None:
    """Iterations 1 to 4 are calls 0 to 7, the evaluation is call 8; 9 and 10 the fifth iteration, 11 its checkpoint."""
    jobs = []
    inject = faults((1, "forward", 8), (0, "commit", 8), (1, "between", 11), (0, "commit", 11))
    for name in ("reference", "run"):
        flags = ("--save", str(tmp_path / f"{name}-saved"), "--save-interval", "5", *EVALUATED)
        jobs.append(_run(tmp_path / name, lm("saved", *flags), inject if name == "run" else ()))
    check_same(jobs[1], jobs[0], printed=Printed.LAST_RANK)
    check_fired(jobs[1], len(inject))
    saved = [sorted(p.name for p in (tmp_path / f"{name}-saved").rglob("*")) for name in ("reference", "run")]
    assert saved[0] and saved[0] == saved[1]


def test_deaths_in_the_checkpoint_after_the_last_iteration(tmp_path: Path) -> None:
    """Which ``pretrain()`` writes when the loop is over. Twelve iterations are calls 0 to 25 with the checkpoints after
    the fifth and the tenth one, 26 is what says that training is done, and 27 this checkpoint."""
    jobs = []
    inject = faults((1, "between", 27), (0, "commit", 27))
    for name in ("reference", "run"):
        flags = ("--save", str(tmp_path / f"{name}-saved"), "--save-interval", "5")
        jobs.append(_run(tmp_path / name, lm("saved", *flags), inject if name == "run" else ()))
    check_same(jobs[1], jobs[0], printed=Printed.LAST_RANK)
    check_fired(jobs[1], len(inject))
    check_recovered(jobs[1], [0, 1])
    saved = [sorted(p.name for p in (tmp_path / f"{name}-saved").rglob("*")) for name in ("reference", "run")]
    assert "iter_0000012" in saved[0] and saved[0] == saved[1]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_in_an_evaluation(victim: int, tmp_path: Path, reference: Reference) -> None:
    """While it computes, Megatron validates no results. Afterwards all ranks do so again: that communicates."""
    layout = lm("dp2-evaluated", *EVALUATED)
    job = _run(tmp_path / "run", layout, faults((victim, "forward", 8)))
    check_same(job, reference(layout), printed=Printed.LAST_RANK)
    check_fired(job)
    check_recovered(job, [victim])


@pytest.mark.parametrize("call", [10, 0])
def test_others_have_hooks_that_gather_again(call: int, tmp_path: Path, reference: Reference) -> None:
    """The first iteration and an evaluation (call 10: in 8 it gathers, 9 starts a timer) are computed without hooks
    that gather parameters. A rank that has committed it has them again, and makes it again with a replacement, which
    has none."""
    layout = lm("dp2-overlaps", *DISTRIBUTED, *OVERLAPS, *EVALUATED)
    job = _run(tmp_path / "run", layout, faults((1, "commit", call)))
    check_same(job, reference(layout), printed=Printed.LAST_RANK)
    check_fired(job)
    check_recovered(job, [1])
