"""Jobs with a checkout of Megatron-LM, which ``MEGATRON_LM`` in the environment names: a tiny model on a CPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, Job, Layout, run_job

CHECKOUT = os.environ.get("MEGATRON_LM", "")
needs_checkout = pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM does not say where a checkout of Megatron-LM is")
_TINY = (
    "--num-layers=2 --hidden-size=64 --num-attention-heads=4 --seq-length=32 --max-position-embeddings=32 "
    "--micro-batch-size=2 --global-batch-size=8 --lr=3e-3 --min-lr=1e-4 --lr-warmup-iters=1 --lr-decay-style=cosine "
    "--hidden-dropout=0.1 --attention-dropout=0.1 --position-embedding-type=rope --disable-bias-linear --mock-data "
    "--tokenizer-type=NullTokenizer --vocab-size=127 --use-cpu-initialization --distributed-backend=gloo "
    "--transformer-impl=local --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm --log-interval=1 --num-workers=0"
)
MODEL = (*_TINY.split(), "--train-iters=4", "--eval-iters=0", "--eval-interval=1000")
"""A later flag of the same name takes the place of an earlier one."""
FLAGS = ("--flash-recovery", "--flash-recovery-digest")
TIMEOUT_S = 400


def environment(checkout: Path) -> dict[str, str]:
    """In which Megatron-LM in ``checkout`` runs on a CPU, with this repository."""
    path = [str(checkout), str(ROOT / "common"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "FR_MEGATRON_CPU": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }


def run_lm(
    run_dir: Path,
    checkout: Path,
    flags: Sequence[str] = FLAGS,
    *,
    model: Sequence[str] = MODEL,
    nproc: int = 2,
    inject: Sequence[str] = (),
    script: Path | None = None,
    script_flags: Sequence[str] = (),
) -> Job:
    """``pretrain_gpt.py`` of ``checkout``, or ``script`` with flags of its own before Megatron's."""
    return run_job(
        run_dir,
        Layout("megatron-lm", "", nproc=nproc),
        standby=1 if inject else 0,
        inject=inject,
        options=() if inject else ("--max-restarts", "0"),
        script=script or checkout / "pretrain_gpt.py",
        flags=[*script_flags, *model, *flags],
        timeout_s=TIMEOUT_S,
        env=environment(checkout),
    )


def copied(checkout: Path, place: Path) -> Path:
    """What a job needs of a checkout, to be changed."""
    place.mkdir(parents=True, exist_ok=True)
    shutil.copytree(checkout / "megatron", place / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for script in checkout.glob("*.py"):
        shutil.copy(script, place)
    return place
