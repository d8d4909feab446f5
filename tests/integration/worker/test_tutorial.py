"""The script of docs/tutorial.md, as the page has it: a killed rank, and the same bits as without."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, Job, Layout, check_clean, check_fired, check_recovered, run_job


def script(folder: Path, steps: int) -> Path:
    """The page's script, with fewer steps."""
    (text,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "tutorial.md").read_text(), re.M | re.S)
    text, changed = re.subn(r"^STEPS = \d+$", f"STEPS = {steps}", text, flags=re.M)
    assert changed == 1
    path = folder / "train.py"
    path.write_text(text)
    return path


def digests(job: Job) -> dict[str, str]:
    """Rank -> what it has printed at its end."""
    logs = "\n".join(log.read_text() for log in (job.run_dir / "logs").glob("rank*.log"))
    return dict(re.findall(r"^rank (\d+): ([0-9a-f]{16})$", logs, re.M))


@pytest.mark.slow
def test_the_script_of_the_tutorial_survives_a_kill_with_the_same_bits(tmp_path: Path) -> None:
    path = script(tmp_path, 12)

    def run(name: str, inject: Sequence[str] = ()) -> Job:
        return run_job(tmp_path / name, Layout("tutorial", "", (), 2), standby=0, script=path, inject=inject)

    calm, killed = run("calm"), run("killed", ["rank=1,fault=sigkill,at=backward,step=6"])
    for job in (calm, killed):
        assert job.code == 0, job.explain()
        check_clean(job)
    check_fired(killed)
    check_recovered(killed, {1})
    assert len(digests(calm)) == 2 and digests(calm) == digests(killed), killed.explain()
