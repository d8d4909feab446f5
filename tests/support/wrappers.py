"""Scripts that run another script in other surroundings: over the fake of NCCL, or on GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.jobs import ROOT
from tests.support.megatron import ENVIRONMENT

_SCRIPTS = ROOT / "tests" / "scripts"
OPTIMIZER = "TEST_OPTIMIZER"
"""Environment variable: which optimizer a script gets in place of AdamW (tests/support/optimizers.py)."""


@dataclass(frozen=True)
class Wrapper:
    """One of them.

    Attributes:
        variable: of the environment, which names the script to be run.
        env: further ones.
        on_cpus: the script computes there; otherwise Megatron needs no stand-ins.
    """

    script: Path
    variable: str
    env: tuple[tuple[str, str], ...] = ()
    on_cpus: bool = True

    def environment(self, script: Path, env: Mapping[str, str] | None) -> dict[str, str]:
        """For a ``script`` that has ``env`` without a wrapper."""
        without = () if self.on_cpus else ENVIRONMENT
        kept = {name: value for name, value in (env or {}).items() if name not in without}
        return {**kept, self.variable: str(script), **dict(self.env)}


FAKE_NCCL = Wrapper(_SCRIPTS / "fake_nccl.py", "FAKE_NCCL_SCRIPT")


def on_gpus(gpus: int, ranks: int) -> Wrapper:
    """With kernels that repeat bitwise. Fewer GPUs than ranks: all share the first one; none: on CPUs, over gloo."""
    shared = (("FLASHRECOVERY_SHARED_GPU", "1"),) if 0 < gpus < ranks else ()
    quiet = ("PYTHONWARNINGS", "ignore")
    return Wrapper(_SCRIPTS / "one_gpu.py", "ONE_GPU_SCRIPT", (quiet, *shared), on_cpus=not gpus)
