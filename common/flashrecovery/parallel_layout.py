"""The parallel layout of a job, as a script asks for it: that of the launch, or the one that the job has changed to."""

from __future__ import annotations

import os
from dataclasses import dataclass

from flashrecovery.errors import ConfigError
from flashrecovery.runtime.environment import LAYOUT_ENV


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of tensor, pipeline and data parallelism. ``changed``: it is not what the script has asked for."""

    tp: int
    pp: int
    dp: int
    changed: bool = False


def layout(*, tp: int = 1, pp: int = 1, cp: int = 1) -> ParallelLayout:
    """The layout that the job has now: call it before ``initialize_model_parallel``, and use what it returns in place
    of what it is given, the layout at the launch::

        sizes = flashrecovery.layout(tp=2, pp=2)
        parallel_state.initialize_model_parallel(sizes.tp, sizes.pp)

    A job that was launched with ``--replan`` may change its layout, and starts its processes anew for it. In any other,
    and without ``flashrecovery run``, it returns what it is given. ``cp``: of context parallelism, which stays.

    Raises ConfigError if the sizes do not divide the number of ranks.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    changed = os.environ.get(LAYOUT_ENV, "")
    if changed:
        sizes = layout_sizes(changed)
        return ParallelLayout(sizes["tp"], sizes["pp"], sizes["dp"], changed=True)
    if min(tp, pp, cp) < 1 or ranks % (tp * pp * cp):
        raise ConfigError(f"layout(tp={tp}, pp={pp}, cp={cp}): sizes that divide the {ranks} ranks are allowed")
    return ParallelLayout(tp, pp, ranks // (tp * pp * cp))


def layout_sizes(text: str) -> dict[str, int]:
    """The sizes in ``tp=2,pp=1,dp=2``, as a job that has changed its layout says it."""
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}
