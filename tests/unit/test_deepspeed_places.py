"""An engine takes on the sharding that its peers have, whatever the size of its process groups is by then."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.jobs import ROOT

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_division_need_not_be_that_of_the_groups(stage: int) -> None:
    script = ROOT / "tests" / "scripts" / "deepspeed_places.py"
    command = [sys.executable, str(script), str(stage)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.endswith("DONE\n"), done.stderr
