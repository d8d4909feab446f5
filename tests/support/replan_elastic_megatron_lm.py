"""Jobs of Megatron-LM's loop that are elastic, and whose parallel layout may change: in which call a rank is killed,
and what becomes of the job when it loses a replica first, and then a rank of the last one."""

from __future__ import annotations

from tests.support.jobs import Job, check_fired
from tests.support.replan import Saved, Sizes
from tests.support.replan_elastic import stages
from tests.support.replan_megatron_lm import Training, check_loop

FIRST, SECOND = 2, 5
"""Iterations of the two losses."""
ONE = Sizes()


def kill(training: Training, rank: int, phase: str, number: int, kind: str = "train") -> str:
    """In a call of this iteration."""
    return f"rank={rank},fault=sigkill,at={phase},step={training.call(kind, number)}"


def check_two_losses(job: Job, training: Training, saved: Saved, first: int = FIRST, second: int = SECOND) -> None:
    """First a replica has left, and then the layout has changed, to one rank; each around its iteration."""
    check_fired(job, 2)
    found = stages(job, training)
    expected = [(training.sizes.of(1), False), (ONE, True)]
    assert [(stage.sizes, stage.anew) for stage in found] == expected, job.explain()
    assert training.iteration(found[0].step) in (first, first + 1), job.explain()
    assert training.iteration(found[1].step) in (second, second + 1), job.explain()
    assert not job.of("fallback_started"), job.explain()
    check_loop(job, training, saved, found)
