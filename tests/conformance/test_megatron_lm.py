"""An unmodified checkout of Megatron-LM with ``--flash-recovery``; ``MEGATRON_LM`` in the environment says where it is.

Evaluations and checkpoints in the middle. Versions count protected calls: in each iteration a training step and a log,
an evaluation every fourth, a checkpoint every fifth.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.faults import faults
from tests.jobs import Job, Layout, References, check_fired, check_recovered, check_same, run_job

pytest.importorskip("megatron.core")

CHECKOUT = os.environ.get("MEGATRON_LM", "")
ITERATIONS = 12
TIMEOUT_S = 500
MODEL = (
    "--num-layers=2 --hidden-size=64 --num-attention-heads=4 --seq-length=32 --max-position-embeddings=32 "
    "--micro-batch-size=2 --global-batch-size=8 --lr=3e-3 --min-lr=1e-4 --lr-warmup-iters=1 --lr-decay-style=cosine "
    "--hidden-dropout=0.1 --attention-dropout=0.1 --position-embedding-type=rope --disable-bias-linear --mock-data "
    "--tokenizer-type=NullTokenizer --vocab-size=127 --use-cpu-initialization --distributed-backend=gloo "
    "--transformer-impl=local --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm --log-interval=1 --num-workers=0 "
    f"--train-iters={ITERATIONS} --flash-recovery --flash-recovery-digest"
).split()
QUIET = ("--eval-iters", "0", "--eval-interval", "1000")
EVALUATED = ("--eval-iters", "2", "--eval-interval", "4")
TP = ("--tensor-model-parallel-size", "2")
PP = ("--pipeline-model-parallel-size", "2")
DISTRIBUTED = ("--use-distributed-optimizer", "--bf16")
OVERLAPS = ("--overlap-grad-reduce", "--overlap-param-gather")

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.grid,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM does not say where a checkout of Megatron-LM is"),
]
Reference = Callable[[Layout], Job]


def lm(name: str, *flags: str, nproc: int = 2) -> Layout:
    """Flags of ``pretrain_gpt.py``."""
    return Layout(f"lm-{name}", "", flags, nproc=nproc)


LAYOUTS = (
    lm("dp2", *QUIET),
    lm("dp2-evaluated", *EVALUATED),
    lm("dp2-distributed", *DISTRIBUTED, *EVALUATED),
    lm("tp2-dp2", *TP, *QUIET, nproc=4),
    lm("pp2-dp2", *PP, *EVALUATED, nproc=4),
    lm("tp2-dp2-overlaps", *TP, *DISTRIBUTED, *OVERLAPS, *EVALUATED, nproc=4),
)


def _run(run_dir: Path, layout: Layout, inject: Sequence[str] = ()) -> Job:
    path = os.pathsep.join([CHECKOUT, *filter(None, [os.environ.get("PYTHONPATH")])])
    return run_job(
        run_dir,
        layout,
        standby=1 if inject else 0,
        inject=inject,
        script=Path(CHECKOUT) / "pretrain_gpt.py",
        flags=[*MODEL, *layout.flags],
        timeout_s=TIMEOUT_S,
        env={
            "FR_MEGATRON_CPU": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONPATH": path,
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        },
    )


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
    check_same(job, reference(layout))
    check_fired(job, len(inject))
    check_recovered(job, [0, last])


def test_deaths_in_evaluation_and_checkpoint(tmp_path: Path) -> None:
    """Iterations 1 to 4 are calls 0 to 7, the evaluation is call 8; 9 and 10 the fifth iteration, 11 its checkpoint."""
    jobs = []
    inject = faults((1, "forward", 8), (0, "commit", 8), (1, "between", 11), (0, "commit", 11))
    for name in ("reference", "run"):
        flags = ("--save", str(tmp_path / f"{name}-saved"), "--save-interval", "5", *EVALUATED)
        jobs.append(_run(tmp_path / name, lm("saved", *flags), inject if name == "run" else ()))
    check_same(jobs[1], jobs[0])
    check_fired(jobs[1], len(inject))
    saved = [sorted(p.name for p in (tmp_path / f"{name}-saved").rglob("*")) for name in ("reference", "run")]
    assert saved[0] and saved[0] == saved[1]
