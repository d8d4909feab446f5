"""After the ranks have come apart: what is suspected, and what is left to go on from."""

from __future__ import annotations

from collections.abc import Iterable

from flashrecovery.controller.state.job_state import JobState
from flashrecovery.plan.divergence import from_before
from flashrecovery.plan.words import ranks_text
from flashrecovery.proto import flashrecovery_pb2 as pb


def way_on(job: JobState, words: pb.LastWords) -> str:
    """``words``: of the process whose error ends the job."""
    known = words.HasField("diverged")
    said = f". Said before: {job.not_registered.rstrip('.')}" if job.not_registered else ""
    if known and words.diverged.suspects:
        said += f". If it is not the script, suspect {_nodes_text(job, words.diverged.suspects)}"
    left = job.checkpoints[-job.config.checkpoint.keep :]  # older ones have been removed
    good = from_before(left, max(words.diverged.alike, job.start_version)) if known else left
    doubtful = [one for one in left if one not in good]
    if doubtful and good:
        it = "it" if len(doubtful) == 1 else "them"
        said += (
            f". Checkpoints that may hold what differs: {' and '.join(_named(job, o) for o in doubtful)}; remove {it}"
        )
    command = _command(job)
    if good:
        part = " (a part of each tensor was compared then)" if words.diverged.partly else ""
        which = f"the newest checkpoint{' from before' if known else ''}{part}, of {_named(job, good[-1])}"
        return f"{said}. Fix it; {command} goes on from {which}"
    if doubtful:
        which = f"{_named(job, doubtful[-1])}, which may hold what differs"
        return (
            f"{said}. No checkpoint from before is left. Fix it, and start again without --resume; {command} goes on "
            f"from {which}"
        )
    if job.start_version > 0:
        begun, listing = job.counting.text(job.start_version), f"`flashrecovery checkpoints {job.where}`"
        return (
            f"{said}. This launch has left no checkpoint. Fix it; if {listing} still lists {begun}, with which it "
            f"has begun, {command} goes on from there; otherwise start again without --resume"
        )
    return f"{said}. No checkpoint is left: fix it, and start again without --resume"


def _named(job: JobState, checkpoint: tuple[int, str]) -> str:
    version, path = checkpoint
    return f"{job.counting.text(version)} ({path})"


def _command(job: JobState) -> str:
    options = "--resume" if job.config.several_nodes else f"--run-dir {job.where} --resume"
    return f"the same command line with `{options}`"


def _nodes_text(job: JobState, places: Iterable[int]) -> str:
    """``node a (rank 1)``. ``places``: of ranks, as process groups count them."""
    members = job.members
    on: dict[str, list[int]] = {}
    for place in places:
        if place < len(members):
            rank = members[place]
            on.setdefault(job.ranks[rank].home, []).append(rank)
    return " and ".join(f"node {node} ({ranks_text(ranks)})" for node, ranks in on.items())
