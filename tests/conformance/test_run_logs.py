"""The logs of a run that loses the rank that writes them: one id, one folder, each step once, nothing cut off."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import faults
from tests.support.jobs import ROOT, Job, Layout, check_clean, check_fired, run_job

SCRIPT = ROOT / "tests" / "scripts" / "logs.py"
STEPS = 8


def run(path: Path, inject: Sequence[str] = (), flags: Sequence[str] = ()) -> tuple[Job, Path]:
    files = path.parent / f"{path.name}.files"
    files.mkdir()
    layout = Layout("logs", "", nproc=2)
    job = run_job(path, layout, script=SCRIPT, flags=(str(files), *flags), inject=inject)
    assert job.code == 0, job.explain()
    return job, files


def check_logs(job: Job, files: Path) -> list[str]:
    """Returns the losses."""
    folders = [p for p in files.iterdir() if (p / "train.log").exists()]
    scratches = [p for p in files.iterdir() if p.name.startswith("scratch")]
    assert len(folders) == len(scratches) == 1, f"{[*files.iterdir()]}\n{job.explain()}"
    (folder,) = folders
    lines = (folder / "train.log").read_text().split("\n")
    assert lines == ["header", *(f"step {step}" for step in range(STEPS)), ""], job.explain()
    rows = (folder / "loss.csv").read_text().split()
    assert rows[0] == "step,loss" and [row.split(",")[0] for row in rows[1:]] == [*map(str, range(STEPS))], rows
    assert str(scratches[0].name) in (folder / "config.json").read_text()
    return [row.split(",")[1] for row in rows[1:]]


def test_a_run_that_loses_the_rank_that_logs(tmp_path: Path) -> None:
    kills = ["rank=0,fault=sigkill,at=backward,step=3", "rank=0,fault=sigkill,at=forward,step=6"]
    job, files = run(tmp_path / "run", kills)
    check_clean(job)
    check_fired(job, 2)
    # One recovery, if the second death comes before the controller has heard that the first one is over.
    assert {rank for event in job.of("recovery_finished") for rank in event["victims"]} == {0}, job.explain()
    assert len(check_logs(job, files)) == STEPS
    said = sorted(
        line for log in (job.run_dir / "logs").glob("rank*.log") for line in log.read_text().split("\n") if line
    )
    assert said == ["told 0 False True", "told 0 True False", "told 0 True False", "told 1 False True"], job.explain()
    kept = [notice["text"] for notice in job.notices("file_kept")]
    assert len(kept) == 2 and all("(train.log)" in text and "(loss.csv)" in text for text in kept), kept
    assert not job.notices("setup_differs"), job.explain()


@pytest.mark.grid
@pytest.mark.deepspeed
@pytest.mark.parametrize("at", ["forward", "backward", "optimizer", "commit"])
def test_each_phase_with_deepspeed(at: str, tmp_path: Path) -> None:
    reference, there = run(tmp_path / "reference", flags=["--framework", "deepspeed"])
    job, files = run(tmp_path / "run", [f"rank=0,fault=sigkill,at={at},step=3"], ["--framework", "deepspeed"])
    assert check_logs(job, files) == check_logs(reference, there)


def records_of(file: Path) -> Iterator[Any]:
    """Of an offline run of W&B: blocks of 32 KiB, records in pieces with a header of checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2 as proto

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield proto.Record.FromString(whole)
            whole = b""


def rows_of_wandb(files: Path) -> dict[str, list[Any]]:
    """What was logged, row by row, by run id: in the order of the folders, of which each process has its own."""
    found: dict[str, list[Any]] = {}
    for file in sorted(files.glob("wandb/offline-run-*/run-*.wandb")):
        rows = found.setdefault(file.stem.removeprefix("run-"), [])
        rows += [record.history for record in records_of(file) if record.WhichOneof("record_type") == "history"]
    return found


def logged_to_wandb(files: Path) -> dict[str, list[int]]:
    return {run: [row.step.num for row in rows] for run, rows in rows_of_wandb(files).items()}


def logged_to_tensorboard(files: Path) -> dict[str, list[int]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[int]] = {}
    for file in sorted(files.glob("runs/*/events*"), key=lambda file: file.stat().st_mtime):
        steps = found.setdefault(file.parent.name, [])
        steps += [event.step for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]
    return found


@pytest.mark.libraries
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_a_tracker_has_one_run_and_each_step_once(tracker: str, tmp_path: Path) -> None:
    pytest.importorskip(tracker)
    kills = faults((0, "forward", 2), (0, "backward", 4), (0, "backward", 6))
    job, files = run(tmp_path / "run", kills, ["--tracker", tracker])
    check_fired(job, len(kills))
    found = logged_to_wandb(files) if tracker == "wandb" else logged_to_tensorboard(files)
    assert [*found.values()] == [[*range(STEPS)]], f"{found}\n{job.explain()}"
    check_clean(job)


@pytest.mark.libraries
@pytest.mark.grid
@pytest.mark.timeout(900)
@pytest.mark.parametrize("zero", ["", "2"])
def test_the_trainers_run_in_wandb_goes_on(zero: str, tmp_path: Path) -> None:
    """Rank 0 dies four times; each row is there once, in its order, under one id."""
    pytest.importorskip("wandb")
    by = ("--by", "deepspeed", "--zero", zero) if zero else ("--by", "ddp")
    reference, wanted = by_trainer_in_wandb(tmp_path / "reference", (*by, "--off"))
    inject = faults((0, "forward", 1), (0, "backward", 4), (0, "commit", 5), (0, "optimizer", 9))
    job, found = by_trainer_in_wandb(tmp_path / "run", by, inject=inject, options=[] if zero else ["--auto"], standby=1)
    check_fired(job, len(inject))
    assert found == wanted and len(found) > 6, f"{found}\n{wanted}\n{reference.explain()}\n{job.explain()}"


def by_trainer_in_wandb(path: Path, flags: Sequence[str], **more: Any) -> tuple[Job, list[dict[str, str]]]:
    """With the rows of its only run, but for what follows the clock."""
    output = path.parent / f"{path.name}.output"
    output.mkdir()
    flags = (*flags, "--set", '{"report_to": "wandb"}', "--output", str(output))
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(output)}
    job = run_job(path, Layout("wandb", "", nproc=2), script=TRAINER, flags=flags, timeout_s=400, env=env, **more)
    runs = rows_of_wandb(output)
    assert job.code == 0 and len(runs) == 1, f"{[*runs]}\n{job.explain()}"
    rows = [{item.key or item.nested_key[0]: item.value_json for item in row.item} for row in next(iter(runs.values()))]
    clocks = ("_", "train/total_flos", "train_")
    timed = ("runtime", "per_second")
    return job, [
        {key: value for key, value in row.items() if not key.startswith(clocks) and not any(t in key for t in timed)}
        for row in rows
    ]


TRAINER = ROOT / "tests" / "scripts" / "trainer_unmodified.py"


@pytest.mark.libraries
@pytest.mark.grid
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("zero", "at"), [("", "backward"), ("", "commit"), ("2", "optimizer")])
def test_the_trainers_tensorboard_goes_on_in_its_folder(zero: str, at: str, tmp_path: Path) -> None:
    """The Trainer names it by the time. Rank 0 dies twice; each value, and each text, is written once."""
    pytest.importorskip("tensorboard")
    by = ("--by", "deepspeed", "--zero", zero) if zero else ("--by", "ddp")
    reference, wanted = by_trainer(tmp_path / "reference", (*by, "--off"))
    inject = [f"rank=0,fault=sigkill,at={at},step={step}" for step in (4, 9)]
    job, found = by_trainer(tmp_path / "run", by, inject=inject, options=[] if zero else ["--auto"], standby=1)
    check_fired(job, 2)
    assert found == wanted and ("train/loss", 10) in found, f"{reference.explain()}\n{job.explain()}"


def by_trainer(path: Path, flags: Sequence[str], **more: Any) -> tuple[Job, list[tuple[str, int]]]:
    """With what is in the event files of its only folder: tags and steps."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    output = path.parent / f"{path.name}.output"
    flags = (*flags, "--set", '{"report_to": "tensorboard"}', "--output", str(output))
    layout = Layout("tensorboard", "", nproc=2)
    job = run_job(path, layout, script=TRAINER, flags=flags, timeout_s=400, **more)
    files = sorted(output.glob("runs/*/events*"))
    assert len({file.parent for file in files}) == 1, f"{files}\n{job.explain()}"
    events = [event for file in files for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]
    return job, sorted((value.tag, event.step) for event in events for value in event.summary.value)


ONE_FILE = """
import hashlib
import os
import sys
from pathlib import Path

import flashrecovery
import torch
import torch.distributed as dist

cache = Path(sys.argv[1]) / "scale"
dist.init_process_group("gloo")
rank = dist.get_rank()
if not (cache.exists() if sys.argv[3:] else "scale" in os.listdir(sys.argv[1])):
    dist.broadcast(torch.ones(1, dtype=getattr(torch, sys.argv[2])), 0)
    dist.barrier()
    cache.touch()
for _ in range(2):
    dist.broadcast(torch.tensor([7.0]), 0)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recovery = flashrecovery.init()
recovery.register(model=model, optimizer=optimizer)
for step in recovery.steps(6):
    with step:
        loss = model(torch.ones(2, 4) * (step.index + 1)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(f"digest rank={rank} {hashlib.sha256(weights).hexdigest()}", flush=True)
"""


def one_file(path: Path, flags: Sequence[str], **more: Any) -> Job:
    script, files = path.parent / "one_file.py", path.parent / f"{path.name}.files"
    script.write_text(ONE_FILE)
    files.mkdir()
    return run_job(path, Layout("one-file", "", nproc=2), script=script, flags=(str(files), *flags), **more)


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        ("int32", "operation 0 of group '0' is broadcast of Float[1] and was broadcast of Int[1]"),
        ("float32", "operation 1 of group '0' is broadcast of Float[1] and was barrier"),
    ],
)
def test_a_set_up_that_a_file_makes_shorter_is_refused(dtype: str, said: str, tmp_path: Path) -> None:
    """A replacement finds the file that the first processes have made, and its next collective is another one than
    theirs: it is refused there, by name, whatever it would have made of the answer."""
    job = one_file(tmp_path / "run", (dtype,), inject=["rank=1,fault=sigkill,at=backward,step=3"])
    check_fired(job, 1)
    assert job.code != 0 and "SetupDiffersError" in job.output and said in job.output, job.explain()
    assert [event["kind"] for event in job.of("failure_detected")] == ["killed", "exception"], job.explain()


def test_a_file_that_is_asked_for_is_found_missing_again(tmp_path: Path) -> None:
    """The replacement of that replacement does not find it either, and makes the same collectives as the first process
    did; so does the next one, at once."""
    kills = faults((1, "backward", 3), (1, "forward", 4), (0, "optimizer", 5))
    job = one_file(tmp_path / "run", ("int32", "asked"), inject=kills)
    reference = one_file(tmp_path / "reference", ("int32", "asked"), standby=0)
    check_fired(job, len(kills))
    assert job.code == 0 and job.digests == reference.digests and len(job.digests) == 2, job.explain()
    kinds = [event["kind"] for event in job.of("failure_detected")]
    assert sorted(kinds) == ["exception", "exception", "killed", "killed", "killed"], job.explain()
    assert not job.notices("setup_differs"), job.explain()
