"""What a script does below its block, killed in the block and below it: files, logs and checkpoints are those of the
run without a kill, survivors keep their processes, and :attr:`Step.committed` tells an attempt that counts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.support import fake_nccl
from tests.support.jobs import ROOT, Job, Layout, check_clean, check_same, run_job
from tests.support.wrappers import FAKE_NCCL

SCRIPT = ROOT / "tests" / "scripts" / "below.py"
EVALUATION = ROOT / "tests" / "scripts" / "evaluation_below.py"


def run(path: Path, flags: Sequence[str] = (), inject: Sequence[str] = ()) -> Job:
    files = path.parent / f"{path.name}.files"
    files.mkdir()
    layout = Layout("below", "", nproc=2)
    return run_job(path, layout, script=SCRIPT, flags=(str(files), *flags), inject=inject)


def files_of(job: Job) -> Path:
    return job.run_dir.parent / f"{job.run_dir.name}.files"


def content(job: Job) -> dict[str, str]:
    """Digests of what was written; not of what has a random number in it (a checkpoint's metadata)."""
    root = files_of(job)
    skipped = (".metadata", "killed")
    files = [p for p in root.rglob("*") if p.is_file() and p.name not in skipped and not p.name.startswith("seen")]
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def seen(job: Job, rank: int) -> list[tuple[int, bool]]:
    """What ``step.committed`` was below each block."""
    lines = (files_of(job) / f"seen.rank{rank}").read_text().split("\n")[:-1]
    return [(int(index), said == "True") for index, said in (line.split() for line in lines)]


def check_whole(job: Job, name: str) -> None:
    dcp.FileSystemReader(files_of(job) / name).read_metadata()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run(tmp_path_factory.mktemp("reference") / "run")


def test_files_and_objects_below_the_block_of_a_void_attempt(tmp_path: Path, reference: Job) -> None:
    job = run(tmp_path / "run", inject=["rank=1,fault=sigkill,at=backward,step=5"])
    check_same(job, reference)
    (finished,) = job.of("recovery_finished")
    assert finished["victims"] == [1] and finished["resume_step"] == 5, job.explain()
    assert content(job) == content(reference), f"{content(job)}\n{content(reference)}\n{job.explain()}"
    assert "best.tmp" not in content(job) and content(job)["best.pt"]
    assert seen(reference, 0) == [(step, True) for step in range(8)]
    assert seen(job, 0) == [*((step, True) for step in range(5)), (5, False), (5, True), (6, True), (7, True)]
    told = {notice["text"] for notice in job.notices("not_saved")}
    assert any("torch.distributed.checkpoint.save to " in text and "below.py:" in text for text in told), told
    check_whole(job, "latest")


def test_scripts_that_leave_their_loops_below_a_void_attempt_do_not_cut_each_others_short(
    tmp_path: Path, reference: Job
) -> None:
    """A replacement whose first attempt is cut short has no ``loss`` below it, and leaves its loop with a NameError."""
    job = run(tmp_path / "run", ["--kill-again", "5:0"], inject=["rank=1,fault=sigkill,at=backward,step=5"])
    check_same(job, reference)
    failed = [(event["rank"], event["kind"]) for event in job.of("failure_detected")]
    assert failed == [(1, "killed"), (0, "killed"), (1, "exception")], job.explain()
    assert content(job) == content(reference), f"{content(job)}\n{content(reference)}\n{job.explain()}"


@pytest.mark.grid
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at", ["forward", "backward", "grad-sync", "optimizer", "commit", "below"])
@pytest.mark.parametrize("flags", [("--framework", "fsdp2"), ("--framework", "fsdp2", "--save", "async"), ()], ids=str)
def test_each_phase(flags: tuple[str, ...], at: str, rank: int, tmp_path: Path) -> None:
    reference = run(tmp_path / "reference", flags)
    job = run(tmp_path / "run", flags, inject=[f"rank={rank},fault=sigkill,at={at},step=5"])
    check_same(job, reference)
    assert [e["victims"] for e in job.of("recovery_finished")] == [[rank]], job.explain()
    if "async" in flags:
        check_whole(job, "3")  # that of step 5 may have been under way
        check_whole(job, "7")
    else:
        assert content(job) == content(reference), job.explain()
        check_whole(job, "latest")


@pytest.mark.grid
@pytest.mark.deepspeed
@pytest.mark.parametrize(("at", "rank"), [("backward", 0), ("backward", 1), ("commit", 1)])
def test_deepspeeds_own_checkpoint(at: str, rank: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    flags = ("--framework", "deepspeed", "--save", "library")
    reference = run(tmp_path / "reference", flags)
    job = run(tmp_path / "run", flags, inject=[f"rank={rank},fault=sigkill,at={at},step=5"])
    check_same(job, reference)
    assert [e["victims"] for e in job.of("recovery_finished")] == [[rank]], job.explain()
    assert {*content(job)} == {*content(reference)}, job.explain()
    assert (files_of(job) / "latest" / "latest").read_text() == "global_step8"


@pytest.mark.grid
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "flags", [("--save", "barrier"), ("--save", "dcp"), ("--framework", "fsdp2"), ("--save", "async")], ids=str
)
def test_a_rank_that_dies_in_the_save(flags: tuple[str, ...], rank: int, tmp_path: Path) -> None:
    """Its peers wait for it outside of any block, and keep their processes."""
    if flags == ("--save", "barrier") and rank:
        pytest.skip("rank 1 saves nothing")
    reference = run(tmp_path / "reference", flags)
    job = run(tmp_path / "run", (*flags, "--kill-in-save", f"5:{rank}"))
    assert (files_of(job) / "killed").exists(), "a fault that did not fire proves nothing"
    assert job.code == 0 and job.digests == reference.digests, job.explain()
    assert [e["victims"] for e in job.of("recovery_finished")] == [[rank]], job.explain()
    check_clean(job)
    if flags != ("--save", "barrier"):
        check_whole(job, "7" if "async" in flags else "latest")


def evaluate(
    path: Path, flags: Sequence[str], inject: Sequence[str] = (), kill: str = "", ranks: int = 2, nccl: bool = False
) -> Job:
    """``nccl``: over the fake of it."""
    files = path.parent / f"{path.name}.files"
    files.mkdir()
    options = (str(files), *flags, *(("--kill", kill) if kill else ()))
    layout = Layout("evaluation", "", nproc=ranks)
    script, env = (FAKE_NCCL.script, FAKE_NCCL.environment(EVALUATION, None)) if nccl else (EVALUATION, {})
    job = run_job(path, layout, script=script, env=env, flags=options, inject=inject)
    assert not kill or (files / "killed").exists(), f"a fault that did not fire proves nothing\n{job.explain()}"
    return job


BETWEEN = ["before", "before-reduce", "after", "in-optimizer"]
PHASES = ["forward", "backward", "grad-sync", "optimizer", "commit", "below"]
WAYS: list[tuple[str, ...]] = [
    (),
    ("--buffers",),
    ("--by", "gather"),
    ("--by", "objects"),
    ("--by", "async"),
    ("--by", "reduce"),
    ("--above",),
    ("--above", "--by", "objects"),
    ("--framework", "fsdp2"),
    ("--framework", "fsdp2", "--above", "--by", "gather"),
]


@pytest.mark.parametrize(
    ("flags", "kill", "ranks"),
    [
        ((), "4:1:before-reduce", 2),
        *(
            pytest.param(("--by", by), f"4:{rank}:before-reduce", ranks, marks=pytest.mark.grid)
            for by, rank, ranks in [
                ("future", 1, 2),
                ("then", 1, 2),
                ("then", 0, 3),
                ("polled", 0, 2),
                ("polled", 1, 3),
                ("sends", 1, 2),
            ]
        ),
        *(
            pytest.param(flags, f"4:{rank}:{place}", 2, marks=pytest.mark.grid)
            for flags in WAYS
            for rank in (0, 1)
            for place in BETWEEN
        ),
        *(
            pytest.param(flags, f"4:{rank}:before-reduce", 3, marks=pytest.mark.grid)
            for flags in WAYS[:6]
            for rank in range(3)
        ),
    ],
    ids=str,
)
def test_an_evaluation_with_collectives_outside_of_the_block(
    flags: tuple[str, ...], kill: str, ranks: int, tmp_path: Path
) -> None:
    """A rank that waits in one when another one dies keeps its process, and the step is done again with its
    evaluation."""
    reference = evaluate(tmp_path / "reference", flags, ranks=ranks)
    job = evaluate(tmp_path / "run", flags, kill=kill, ranks=ranks)
    check_same(job, reference)
    assert [e["victims"] for e in job.of("recovery_finished")] == [[int(kill.split(":")[1])]], job.explain()
    named = {"all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "send"}
    texts = [notice["text"] for notice in reference.notices("communication_outside")]
    if "--above" in flags:
        assert not texts
    else:
        assert texts and all(t.split()[0] in named and "evaluation_below.py:" in t for t in texts), texts


NCCL_WAYS: list[tuple[str, ...]] = [
    *(way for way in WAYS if "--buffers" not in way),
    *(("--by", by) for by in ("synchronize", "polled", "future", "then", "coalesced", "sends")),
]
"""What waits for NCCL's Work orders streams, and learns nothing: with the device's next answer it has what the abort
has left in the tensor."""


@pytest.mark.grid
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("flags", NCCL_WAYS, ids=str)
def test_an_evaluation_with_nccls_collectives_outside_of_the_block(
    flags: tuple[str, ...], rank: int, tmp_path: Path
) -> None:
    fake_nccl.build()
    reference = evaluate(tmp_path / "reference", flags, nccl=True)
    job = evaluate(tmp_path / "run", flags, kill=f"4:{rank}:before-reduce", nccl=True)
    check_same(job, reference)
    assert [e["victims"] for e in job.of("recovery_finished")] == [[rank]], job.explain()


@pytest.mark.grid
@pytest.mark.parametrize("at", PHASES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("flags", WAYS, ids=str)
def test_a_death_in_the_block_of_a_job_that_evaluates_outside_of_it(
    flags: tuple[str, ...], rank: int, at: str, tmp_path: Path
) -> None:
    reference = evaluate(tmp_path / "reference", flags)
    job = evaluate(tmp_path / "run", flags, inject=[f"rank={rank},fault=sigkill,at={at},step=4"])
    check_same(job, reference)
    assert [e["victims"] for e in job.of("recovery_finished")] == [[rank]], job.explain()
