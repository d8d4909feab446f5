"""Jobs whose scripts have no line of ours: what their ranks have printed, and what they must have in common with the
healthy launch."""

from __future__ import annotations

from tests.support.jobs import Job, check_clean


def output_of(job: Job, rank: int) -> str:
    """Of all processes of a rank, one after the other."""
    logs = sorted((job.run_dir / "logs").glob(f"rank{rank}.gen*.log"), key=lambda log: log.stat().st_mtime)
    return "".join(log.read_text() for log in logs)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("rank=")]


def printed(job: Job, rank: int) -> list[str]:
    return lines(output_of(job, rank))


def check_same(job: Job, reference: Job) -> None:
    """The same digests and the same lines in the same order, each once; and nothing was left unprotected."""
    assert reference.code == job.code == 0, job.explain()
    assert reference.digests and job.digests == reference.digests, job.explain()
    for rank in reference.digests:
        assert printed(job, rank) == printed(reference, rank), job.explain()
    assert not job.notices("not_registered") and not job.notices("unprotected"), job.explain()
    check_clean(job)
