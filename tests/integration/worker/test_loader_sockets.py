"""Workers of a data loader have sockets, in directories of which a job leaves none behind."""

from __future__ import annotations

import tempfile
from multiprocessing import util
from pathlib import Path

import pytest

from flashrecovery.runtime import temp_dir
from tests.support.jobs import Job, Layout, check_clean, check_fired, run_job

SCRIPT = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
"""


def test_a_rank_that_is_killed_with_its_loaders_workers_leaves_no_sockets(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    # The path of a socket may have 107 bytes, and tmp_path has nearly as many.
    with tempfile.TemporaryDirectory(prefix="fr-") as temporary:
        job = run_with(script, tmp_path / "run", temporary)
        left = [*Path(temporary).glob("pymp-*")]
    assert job.code == 0, job.explain()
    check_fired(job, 1)
    check_clean(job)
    assert not left, job.explain()


def run_with(script: Path, run_dir: Path, temporary: str) -> Job:
    """One kill; sockets are in ``temporary``."""
    return run_job(
        run_dir,
        Layout("loader-sockets", "", nproc=2),
        script=script,
        inject=["rank=1,fault=sigkill,at=backward,step=2"],
        options=("--auto",),
        env={"TMPDIR": temporary},
        timeout_s=200,
        standby=1,
    )


def test_one_directory_for_all_that_is_made_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "get_temp_dir", util.get_temp_dir)  # as it is put back
    path = str(tmp_path / "pymp-1")
    temp_dir.use(path)
    temp_dir.remove(path)
    assert not Path(path).exists()
    for _ in range(2):
        assert util.get_temp_dir() == path
    assert Path(path).stat().st_mode & 0o777 == 0o700
    (Path(path) / "listener").touch()
    temp_dir.remove(path)
    assert not Path(path).exists()
