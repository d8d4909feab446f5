"""Time that failures cost: FlashRecovery's equations (1) to (5), waiting for nodes, and what is left for training.

With d seconds of training in which m failures happen, checkpoints every t seconds that hold training up for k0 each, s0
to be training again and s1 to be where it was:

    F(t) = m (s0 + t/2) + (d/t) k0        (1)
    t*   = sqrt(2 d k0 / m)               (3)
    F*   = m s0 + sqrt(2 d k0 m)          (4)
    F    = m (s0' + s1')                  (5), recovery from memory; s1' at most a step

The paper counts t in steps and adds it to seconds; here all of them are seconds, and a number of steps is t divided by
a step's time. The equations are of first order: they know of no failure during the way back from another one. Where
failures cost more than a fifth of the time they are too low, and :attr:`Losses.first_order` is set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashrecovery.plan.checkpoint_interval import DAY_S, checkpoint_interval

_FEW = 0.2
"""Up to this part of the time the equations may say is lost."""


def overhead(d_s: float, t_s: float, k0_s: float, failures: float, s0_s: float) -> float:
    """Equation (1): seconds lost to ``failures`` and to checkpoints every ``t_s``, in ``d_s`` seconds of training."""
    if not (d_s > 0 and t_s > 0 and min(k0_s, failures, s0_s) >= 0):
        raise ValueError(
            f"overhead: d={d_s} s and t={t_s} s must be positive, k0={k0_s} s, m={failures}, s0={s0_s} s not negative"
        )
    return failures * (s0_s + t_s / 2) + d_s / t_s * k0_s


def least_overhead(d_s: float, k0_s: float, failures: float, s0_s: float) -> float:
    """Equation (4): the same with the interval of equation (3)."""
    if not (d_s > 0 and min(k0_s, failures, s0_s) >= 0):
        raise ValueError(
            f"overhead: d={d_s} s must be positive, k0={k0_s} s, m={failures} and s0={s0_s} s not negative"
        )
    return failures * s0_s + math.sqrt(2 * d_s * k0_s * failures)


@dataclass(frozen=True)
class Costs:
    """Seconds.

    Attributes:
        restart_s: s0 of a way back to a checkpoint: detection, new processes, loading.
        recovery_s: s0' of a recovery from memory.
        step_s: of a step; half of one is done again on average (s1').
        k0_s: by which a checkpoint holds training up.
        copy_wait_s: by which copies hold training up in each step.
        write_s: k1, until a checkpoint is on storage; it holds nothing up, but the next one cannot begin sooner.
    """

    restart_s: float
    recovery_s: float
    step_s: float
    k0_s: float
    copy_wait_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True)
class Losses:
    """Seconds of a day (24 hours) that are not training, by what takes them.

    Attributes:
        recovery_s: recoveries from memory, with the half step that is done again.
        restart_s: ways back to a checkpoint.
        rework_s: steps since that checkpoint.
        checkpoint_s: writing checkpoints.
        copies_s: copies for which training waits.
        waiting_s: no node is there.
        interval_s: of checkpoints, equation (3), but no less than a checkpoint takes to be written; inf if nothing ever
            needs one.
        first_order: whether the equations may be believed.
    """

    recovery_s: float
    restart_s: float
    rework_s: float
    checkpoint_s: float
    copies_s: float
    waiting_s: float
    interval_s: float
    first_order: bool

    @property
    def lost_s(self) -> float:
        """Seconds lost per day."""
        parts = (self.recovery_s, self.restart_s, self.rework_s, self.checkpoint_s, self.copies_s, self.waiting_s)
        return math.fsum(parts)

    @property
    def ettr(self) -> float:
        """Effective training time ratio: the part of a day in which training gets on."""
        return 1 - self.lost_s / DAY_S


def losses(failures: float, fatal: float, blocked: float, costs: Costs, interval_s: float | None = None) -> Losses:
    """What a day of a job loses.

    Args:
        failures: a day of training, of all kinds.
        fatal: those of them that no copy in memory helps against.
        blocked: part of all time in which the job waits for a node (:mod:`~.spares`).
        interval_s: of checkpoints; None: equation (3), or ``write_s`` if that is more.
    """
    fatal = min(fatal, failures)
    if interval_s is None:
        best = checkpoint_interval(DAY_S, costs.k0_s, fatal) if fatal > 0 else math.inf
        interval_s = max(best, costs.write_s)
    recovery = (failures - fatal) * (costs.recovery_s + costs.step_s / 2)
    restart, rework = fatal * costs.restart_s, fatal * interval_s / 2 if math.isfinite(interval_s) else 0.0
    writing = DAY_S / interval_s * costs.k0_s if interval_s > 0 else 0.0
    copies = DAY_S * costs.copy_wait_s / costs.step_s
    lost = recovery + restart + rework + writing + copies
    # These belong to a day of training, which takes so much longer by the clock; of what is left the job waits for
    # nodes.
    part = (1 - blocked) / (1 + lost / DAY_S)
    failing = recovery + restart + rework
    return Losses(
        recovery_s=recovery * part,
        restart_s=restart * part,
        rework_s=rework * part,
        checkpoint_s=writing * part,
        copies_s=copies * part,
        waiting_s=blocked * DAY_S,
        interval_s=interval_s,
        first_order=failing + writing <= _FEW * DAY_S,
    )
