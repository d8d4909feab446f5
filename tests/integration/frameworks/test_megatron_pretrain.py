"""``fr_megatron.pretrain``: as ``megatron.training.pretrain`` with ``--flash-recovery``."""

from __future__ import annotations

from pathlib import Path

import pytest

import fr_megatron
from flashrecovery.errors import ConfigError
from tests.support.jobs import ROOT, check_fired, check_recovered, check_same
from tests.support.megatron_lm import CHECKOUT, FLAGS, TIMEOUT_S, needs_checkout, run_lm
from tests.support.sameness import Printed

SCRIPT = ROOT / "tests" / "scripts" / "megatron_own_pretrain.py"


def test_another_launcher_is_refused() -> None:
    with pytest.raises(ConfigError, match="start the script with `flashrecovery run` in place of torchrun"):
        fr_megatron.pretrain()


@needs_checkout
@pytest.mark.megatron
@pytest.mark.grid
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_a_job_recovers(tmp_path: Path) -> None:
    """Without the flag, and bit for bit as with it."""
    checkout = Path(CHECKOUT)
    reference = run_lm(tmp_path / "reference", checkout)
    flags = [flag for flag in FLAGS if flag != "--flash-recovery"]
    job = run_lm(tmp_path / "run", checkout, flags, inject=["rank=1,fault=sigkill,at=backward,step=4"], script=SCRIPT)
    check_same(job, reference, printed=Printed.LAST_RANK)
    check_fired(job, 1)
    check_recovered(job, [1])
