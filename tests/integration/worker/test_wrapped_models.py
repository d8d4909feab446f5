"""Which of a wrapper and the module inside of it a script registers: it is found, or refused before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import faults
from tests.support.jobs import ROOT, Job, Layout, RunningJob, check_fired, check_recovered, check_same

pytestmark = [pytest.mark.timeout(600)]
SCRIPT = ROOT / "tests" / "scripts" / "wrapped.py"
LIGHTNING_TRAINER = """
import flashrecovery, lightning, torch
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)))
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=2, logger=False)
trainer.fit(Module(), data)
print("trained")
"""


def _run(path: Path, what: str, **kwargs: object) -> Job:
    layout = Layout(what, "", nproc=2)
    return RunningJob(path, layout, script=SCRIPT, flags=["--what", what], **kwargs).wait(200)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("raw", marks=pytest.mark.grid),
        pytest.param("compiled", marks=pytest.mark.grid),
        *(pytest.param(f"fabric{kind}", marks=pytest.mark.libraries) for kind in ("", "-inner", "-module", "-fsdp2")),
    ],
)
def test_the_wrapper_is_found(what: str, tmp_path: Path) -> None:
    """With deaths in the first epoch, and in the second, whose order is another one."""
    if what.startswith("fabric"):
        pytest.importorskip("lightning")
    kills = (1, "backward", 4), (0, "optimizer", 11)
    job = _run(tmp_path / "run", what, inject=faults(*kills))
    check_same(job, _run(tmp_path / "reference", what, standby=0))
    check_fired(job, 2)
    check_recovered(job, [0, 1])


@pytest.mark.parametrize(
    ("what", "said"),
    [
        pytest.param("part", "the registered Linear lies inside of DistributedDataParallel(Sequential)", id="part"),
        pytest.param("late", "has been wrapped in a DistributedDataParallel afterwards", id="late"),
    ],
)
def test_other_parts_are_refused_by_name(what: str, said: str, tmp_path: Path) -> None:
    job = _run(tmp_path / "run", what, standby=0)
    assert job.code != 0 and said in job.output, job.explain()
    assert "step=0" not in job.output


@pytest.mark.libraries
def test_lightnings_own_trainer_is_refused_without_auto(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING_TRAINER)
    job = RunningJob(tmp_path / "run", Layout("", "", nproc=2), script=script, standby=0).wait(200)
    assert job.code != 0 and "Lightning's Trainer" in job.output and "docs/lightning.md" in job.output, job.explain()
    assert "trained" not in job.output
