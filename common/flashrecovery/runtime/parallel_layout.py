"""The parallel layout of a job, as a script asks for it: that of the launch, or the one that the job has changed to."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from flashrecovery.errors import ConfigError
from flashrecovery.runtime.environment import LAYOUT_ENV

_taken: set[str] = set()


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of tensor, pipeline, data, context and expert parallelism; the ranks are ``tp * pp * cp * dp``.
    ``changed``: it is not what the script has asked for."""

    tp: int
    pp: int
    dp: int
    cp: int = 1
    ep: int = 1
    changed: bool = False


def layout(*, tp: int = 1, pp: int = 1, cp: int | None = None, ep: int | None = None) -> ParallelLayout:
    """The layout that the job has now: call it before ``initialize_model_parallel``, and use what it returns in place
    of what it is given, the layout at the launch::

        sizes = flashrecovery.layout(tp=2, pp=2)
        parallel_state.initialize_model_parallel(sizes.tp, sizes.pp)

    A job that was launched with ``--parallelism`` may change its layout, and restarts its processes for it. In any
    other, and without ``flashrecovery run``, it returns what it is given. Context and expert parallelism stay 1, or
    what the
    script has made them itself, unless it asks for them: one that is given ``cp`` or ``ep``, also as 1, can train with
    other sizes of it, which it takes from what this returns.

    Raises ConfigError if the sizes do not divide the number of ranks.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    _taken.update(name for name, size in (("cp", cp), ("ep", ep)) if size is not None)
    changed = os.environ.get(LAYOUT_ENV, "")
    if changed:
        sizes = layout_sizes(changed)
        found = {name: sizes.get(name, 1) for name in ("cp", "ep")}
        return ParallelLayout(sizes["tp"], sizes["pp"], sizes["dp"], **found, changed=True)
    cp, ep = 1 if cp is None else cp, 1 if ep is None else ep
    if min(tp, pp, cp, ep) < 1 or ranks % (tp * pp * cp):
        raise ConfigError(f"layout(tp={tp}, pp={pp}, cp={cp}): sizes that divide the {ranks} ranks are allowed")
    dp = ranks // (tp * pp * cp)
    if cp * dp % ep:
        raise ConfigError(f"layout(ep={ep}): a size that divides the {cp * dp} ranks of cp x dp is allowed")
    return ParallelLayout(tp, pp, dp, cp, ep)


def take_sizes(*names: str) -> None:
    """A framework's loop takes these sizes, ``cp`` or ``ep``, from what :func:`layout` returns, for its script."""
    _taken.update(names)


def taken() -> frozenset[str]:
    """Which of ``cp`` and ``ep`` the script takes from :func:`layout`, so that they may change."""
    return frozenset(_taken)


def layout_sizes(text: str) -> dict[str, int]:
    """The sizes in ``tp=2,pp=1,dp=2``, as a job that has changed its layout says it; what is left out is 1."""
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}


def layout_ranks(text: str) -> int:
    """How many ranks such a layout has. Experts lie on ranks that are there for the rest."""
    return math.prod(size for name, size in layout_sizes(text).items() if name != "ep")


def layout_replicas(text: str) -> int:
    """How many replicas an elastic job has in such a layout: of what has the whole model, all experts included, which
    may be several data-parallel ranks."""
    sizes = layout_sizes(text)
    context = sizes.get("cp", 1)
    return sizes["dp"] * context // max(context, sizes.get("ep", 1))
