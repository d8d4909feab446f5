"""Jobs with the megatron-core example: layouts by Megatron's flag names, and how they are run on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flashrecovery.config import PHASES
from tests.support.jobs import SMALL, Job, Layout, References, RunningJob

STEPS = 22
TIMEOUT_S = 400
ENVIRONMENT = {"FR_MEGATRON_CPU": "1", "PYTHONWARNINGS": "ignore"}
CONFIG = {"timeouts": {"stopped_s": 0.3}}
GATHERING = {"--use-distributed-optimizer", "--use-torch-fsdp2", "--use-megatron-fsdp"}
"""Flags with which parameters are all-gathered."""


def gpt(name: str, *flags: str, nproc: int = 4) -> Layout:
    """One layout of the example."""
    return Layout(name, "pretrain_gpt.py", flags, nproc=nproc)


TP = ("--tensor-model-parallel-size", "2")
PP = ("--pipeline-model-parallel-size", "2")
VPP = (*PP, "--num-virtual-stages-per-pipeline-rank", "2", "--layers", "4")
DISTRIBUTED = ("--use-distributed-optimizer",)
OVERLAPS = (*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "5000")
CP = ("--context-parallel-size", "2")
EXPERTS = ("--num-experts", "4", "--expert-model-parallel-size", "2")
EXPERT_BIAS = (*EXPERTS, "--moe-router-enable-expert-bias")
LATENT = ("--multi-latent-attention", *DISTRIBUTED, "--bf16")
SHARDING = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy")

DP2 = gpt("dp2", nproc=2)
DP2_FP16 = gpt("dp2-fp16", "--fp16", nproc=2)
TP2_DP2 = gpt("tp2-dp2", *TP)
TP2_DP2_SP = gpt("tp2-dp2-sp", *TP, "--sequence-parallel")
PP2_DP2 = gpt("pp2-dp2", *PP)
PP2_DP2_VPP2 = gpt("pp2-dp2-vpp2", *VPP)
TP2_PP2_DP2 = gpt("tp2-pp2-dp2", *TP, *PP, nproc=8)
DP2_DISTRIBUTED = gpt("dp2-distributed", *DISTRIBUTED, "--bf16", nproc=2)
DP4_DISTRIBUTED = gpt("dp4-distributed", *DISTRIBUTED, "--bf16")
DP4_INSTANCES = gpt("dp4-instances2", *DISTRIBUTED, "--num-distributed-optimizer-instances", "2", "--bf16")
EP2_DP2 = gpt("ep2-dp2", *EXPERTS)
EP2_DP2_ALLTOALL = gpt("ep2-dp2-alltoall", *EXPERTS, "--moe-token-dispatcher-type", "alltoall", *DISTRIBUTED)
EP2_DP2_BIAS = gpt("ep2-dp2-bias", *EXPERT_BIAS)
EP2_DP2_BIAS_BF16 = gpt("ep2-dp2-bias-bf16", *EXPERT_BIAS, *DISTRIBUTED, "--bf16")
DP2_LATENT = gpt("dp2-latent", *LATENT, nproc=2)
TP2_DP2_LATENT = gpt("tp2-dp2-latent", *TP, *LATENT)
TP2_DP2_SP_LATENT = gpt("tp2-dp2-sp-latent", *TP, "--sequence-parallel", *LATENT)
PP2_DP2_LATENT = gpt("pp2-dp2-latent", *PP, *LATENT)
CP2_DP2_LATENT = gpt("cp2-dp2-latent", *CP, *LATENT)
CP2_DP2 = gpt("cp2-dp2", *CP, *DISTRIBUTED)
DP2_OVERLAPS = gpt("dp2-overlaps", *OVERLAPS, nproc=2)
TP2_DP2_OVERLAPS = gpt("tp2-dp2-overlaps", *TP, *OVERLAPS, "--bf16")
FSDP2 = gpt("fsdp2", "--use-torch-fsdp2", nproc=2)
FSDP2_DP4 = gpt("fsdp2-dp4", "--use-torch-fsdp2", "--bf16")
MEGATRON_FSDP = gpt("megatron-fsdp", "--use-megatron-fsdp", "--bf16", nproc=2)
MEGATRON_FSDP_DP4 = gpt("megatron-fsdp-dp4", "--use-megatron-fsdp")
MEGATRON_FSDP_GRADS = gpt("megatron-fsdp-grads", *SHARDING, "optim_grads", "--bf16", nproc=2)
MEGATRON_FSDP_OPTIM = gpt("megatron-fsdp-optim", *SHARDING, "optim", "--overlap-grad-reduce", nproc=2)


def phases(layout: Layout) -> list[str]:
    """Those that a step of the layout has."""
    return [p for p in PHASES if p != "param-gather" or not GATHERING.isdisjoint(layout.flags)]


def start(
    run_dir: Path, layout: Layout, *, script: Path | None = None, flags: Sequence[str] = (), **kwargs: Any
) -> RunningJob:
    """One job of the example, or of a ``script`` with the example's flags."""
    if script is not None:
        flags = [*SMALL, "--steps", str(STEPS), *layout.flags, *flags]
    return RunningJob(run_dir, layout, steps=STEPS, script=script, flags=flags, env=ENVIRONMENT, **kwargs)


def run(run_dir: Path, layout: Layout, **kwargs: Any) -> Job:
    """The same to its end."""
    return start(run_dir, layout, **kwargs).wait(TIMEOUT_S)


def references(factory: pytest.TempPathFactory) -> References:
    """The same launches without a fault, each made once."""
    return References(lambda: factory.mktemp("reference"), lambda path, layout: run(path, layout, standby=0))
