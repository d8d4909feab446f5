"""What is asked of a job's parallel layout wherever ranks are placed; of a job that has a fixed one nothing follows."""

from __future__ import annotations

from collections.abc import Collection

from flashrecovery.controller.state.job_state import JobState
from flashrecovery.plan.transitions import State


def fits_without(job: JobState, lost: Collection[int]) -> bool:
    """Whether there is a parallel layout for a job without these ranks, which cannot be replaced."""
    settings = job.config.parallelism
    if settings is None or not job.parallel.facts or not lost or job.state is State.STARTING:
        return False
    from flashrecovery.controller.membership.relayout_slots import a_layout_fits

    return a_layout_fits(job, lost, settings.min)


def divides_sequences(job: JobState) -> bool:
    """Whether ranks of the layout that the job has changed to divide each sample's sequence among themselves."""
    if not job.parallel.text:
        return False
    from flashrecovery.plan.strategy.relayout import divides_sequences as of_facts

    return of_facts(job.parallel.facts)
