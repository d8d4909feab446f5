"""What a job survives, for how long, and what it loses: all of the plan's parts together, for each protection.

What the parts say: :mod:`~.footprint` (memory and traffic), :mod:`~.copy_holders` (which
protects which), :mod:`~.survival` (how long that lasts), :mod:`~.spares` (waiting
for nodes), :mod:`~.ettr` (lost time).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flashrecovery.plan.checkpoint_interval import DAY_S
from flashrecovery.plan.estimates import footprint as fp
from flashrecovery.plan.estimates.copy_holders import Guard, Protection, neighbour_ring, parity_groups, replica_sets
from flashrecovery.plan.estimates.ettr import Costs, Losses, losses
from flashrecovery.plan.estimates.spares import Waiting, waiting
from flashrecovery.plan.estimates.survival import Failures, Hazard, days_until, unrepaired
from flashrecovery.plan.model_state import OPTIMIZER_BYTES, WEIGHT_BYTES, Sharding


@dataclass(frozen=True)
class Conditions:
    """What a plan assumes of failures and of the way back.

    Attributes:
        days: horizon; where rates change with time (shape other than 1) they are averaged over it.
        threshold: until survival is less than this, state is said to be safe.
        restart_s: s0 of a way back to a checkpoint, without loading it.
        storage_bytes_s: of the storage for checkpoints, for the whole job, in both directions.
        recovery_s: s0' of a recovery from memory, without the transfer of the lost state.
        repair_days: until a failed node is back as a spare one.
        k0_s: by which a checkpoint holds training up; None: what its way to the host takes.
        parity_group: nodes of a group with parity, at most.
        host_memory_bytes: what copies may take of a node; None: not looked at.
        copies_die_with_processes: copies are in the training processes. A process that fails then counts as if its
            node's copies were lost, which is an upper bound.
    """

    days: float = 30.0
    threshold: float = 0.9
    restart_s: float = 900.0
    storage_bytes_s: float = 10e9
    recovery_s: float = 30.0
    repair_days: float = 1.0
    k0_s: float | None = None
    parity_group: int = 8
    host_memory_bytes: float | None = None
    copies_die_with_processes: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError, which names the value and what is allowed."""
        positive = {
            "days": self.days,
            "restart": self.restart_s,
            "recovery": self.recovery_s,
            "storage bandwidth": self.storage_bytes_s,
        }
        for name, value in positive.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} = {value:g}: more than 0 is allowed")
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold = {self.threshold:g}: a probability between 0 and 1 is allowed")
        if not 0 <= self.repair_days < math.inf:
            raise ValueError(f"repair = {self.repair_days:g} days: 0 or more is allowed")
        if self.k0_s is not None and not 0 <= self.k0_s < math.inf:
            raise ValueError(f"k0 = {self.k0_s:g} s: 0 or more is allowed")
        if self.parity_group < 2:
            raise ValueError(f"parity group = {self.parity_group}: 2 nodes or more are allowed")
        if self.host_memory_bytes is not None and not self.host_memory_bytes > 0:
            raise ValueError(f"host memory = {self.host_memory_bytes:g} bytes: more than 0 is allowed")


@dataclass(frozen=True)
class WithSpares:
    """Estimates for a job with a given number of spare nodes.

    Attributes:
        fatal: failures a day of training that need the checkpoint: ``checkpoint.failures_per_day``.
        interval_steps: of checkpoints; inf if nothing ever needs one.
        safe_days: until the probability that no state was lost is less than the threshold, with repair.
        survival: that probability at the horizon.
    """

    spares: int
    fatal: float
    interval_steps: float
    safe_days: float
    survival: float
    losses: Losses


@dataclass(frozen=True)
class Outlook:
    """The outlook of one protection.

    Attributes:
        group: nodes of its smallest group; 2 for neighbours, 0 for none.
        fits: into the host memory; None: not known how much there is.
        safe_days, survival: as in :class:`WithSpares`, without repair (REFT's reading).
        window_s: from a failure until all is protected again, with a spare node.
        without_repair, with_repair: survival by day; the latter with all the spare nodes.
    """

    protection: Protection
    group: int
    footprint: fp.Footprint
    fits: bool | None
    safe_days: float
    survival: float
    window_s: float
    with_spares: tuple[WithSpares, ...]
    without_repair: Callable[[float], float] = field(repr=False, compare=False)
    with_repair: Callable[[float], float] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Unavailable:
    """A protection that this job cannot have, and why."""

    protection: Protection
    reason: str


def protections(job: fp.JobShape) -> tuple[Protection, ...]:
    """Those that are worth comparing: replicas need no copies."""
    if fp.footprint(job).unique_bytes == 0:
        return Protection.CHECKPOINT, Protection.REPLICA
    return Protection.CHECKPOINT, Protection.NEIGHBOUR, Protection.PARITY_1, Protection.PARITY_2


def guards(job: fp.JobShape, protection: Protection, failures: Failures, parity_group: int) -> tuple[Guard, ...]:
    """What must not be lost together. Raises ValueError if the job is too small for it."""
    if protection is Protection.CHECKPOINT or job.nodes == 1:
        return tuple(Guard((node,), 0) for node in range(job.nodes))
    if protection is Protection.REPLICA:
        return replica_sets(job.nodes, job.span)
    if protection is Protection.NEIGHBOUR:
        return neighbour_ring(failures.domain_of)
    return parity_groups(failures.domain_of, job.span, parity_group, protection.parity)


def checkpoint_bytes(job: fp.JobShape) -> float:
    """The checkpoint's bytes of the whole job's state, each shard once."""
    weights = 0 if job.sharding is Sharding.FULL else WEIGHT_BYTES
    return (OPTIMIZER_BYTES + weights) * job.parameters


def k0_s(job: fp.JobShape) -> float:
    """Seconds that each GPU's part of a checkpoint takes to host memory: the least that it can hold training up."""
    return checkpoint_bytes(job) / job.gpus / job.pcie_bytes_s


def outlook(
    job: fp.JobShape, protection: Protection, failures: Failures, given: Conditions, spares: int
) -> Outlook | Unavailable:
    """For 0 to ``spares`` spare nodes."""
    try:
        guarding = guards(job, protection, failures, given.parity_group)
        group = min(len(g.nodes) for g in guarding)
        cost = fp.footprint(job, protection, group)
    except ValueError as e:
        return Unavailable(protection, str(e))
    fits = None if given.host_memory_bytes is None else cost.node_memory_bytes <= given.host_memory_bytes
    write_s = checkpoint_bytes(job) / given.storage_bytes_s
    costs = Costs(
        restart_s=given.restart_s + write_s,  # it is read at the speed at which it was written
        write_s=write_s,
        recovery_s=given.recovery_s + cost.restore_s,
        step_s=job.step_s,
        k0_s=k0_s(job) if given.k0_s is None else given.k0_s,
        copy_wait_s=max(0.0, cost.copy_s - cost.window_s),
    )
    window_s = costs.recovery_s + costs.step_s  # the copies are whole again after a step
    kept = _kept(job, protection, failures, given)
    alone = _alone(protection, guarding, kept)
    rows, expected = [], []
    for count in range(spares + 1):
        wait = _waiting(count, failures, given)
        expected.append(_expected(protection, guarding, kept, window_s, wait))
        rows.append(_with_spares(count, expected[-1], failures, given, costs, wait))
    return Outlook(
        protection=protection,
        group=0 if protection is Protection.CHECKPOINT else group,
        footprint=cost,
        fits=fits,
        safe_days=days_until(alone, given.threshold),
        survival=alone(given.days),
        window_s=window_s,
        with_spares=tuple(rows),
        without_repair=alone,
        with_repair=lambda days: math.exp(-expected[-1](days)),
    )


def _alone(protection: Protection, guarding: tuple[Guard, ...], failures: Failures) -> Callable[[float], float]:
    """Survival without repair, by day. Without copies the first failure of any kind is one too many (REFT's equation
    (3))."""
    if protection is Protection.CHECKPOINT:
        return lambda days: math.exp(-failures.all_events * days**failures.shape)
    return lambda days: unrepaired(days, guarding, failures)


def _kept(job: fp.JobShape, protection: Protection, failures: Failures, given: Conditions) -> Failures:
    """What takes copies with it."""
    if not given.copies_die_with_processes or protection is Protection.CHECKPOINT:
        return failures
    local = failures.processes / job.nodes * failures.process_rate
    return replace(failures, node_rates=tuple(rate + local for rate in failures.node_rates))


def _waiting(count: int, failures: Failures, given: Conditions) -> Waiting:
    """For a node, with ``count`` spare ones."""
    largest = max(Counter(failures.domain_of).values()) if failures.domain_rate else 0
    nodes = failures.a_day(failures.node_events, given.days)
    return waiting(count, given.repair_days, nodes, failures.a_day(failures.domain_events, given.days), largest)


def _expected(
    protection: Protection, guarding: tuple[Guard, ...], failures: Failures, window_s: float, wait: Waiting
) -> Callable[[float], float]:
    """Losses of state until a day, with repair."""
    if protection is Protection.CHECKPOINT:
        return lambda days: failures.all_events * days**failures.shape
    hazard, window = Hazard(guarding, failures), window_s / DAY_S

    def expected(days: float) -> float:
        # What finds no spare node is protected again only when a node has been repaired.
        short = hazard.expected(days, window)
        if wait.unlucky == 0:
            return short
        return (1 - wait.unlucky) * short + wait.unlucky * hazard.expected(days, window + wait.wait_days)

    return expected


def _with_spares(
    count: int,
    expected: Callable[[float], float],
    failures: Failures,
    given: Conditions,
    costs: Costs,
    wait: Waiting,
) -> WithSpares:
    all_failures = failures.a_day(failures.all_events, given.days)
    fatal = min(expected(given.days) / given.days, all_failures)
    lost = losses(all_failures, fatal, wait.blocked, costs)
    steps = lost.interval_s / costs.step_s
    return WithSpares(
        spares=count,
        fatal=fatal,
        interval_steps=steps if math.isinf(steps) else math.ceil(steps),
        safe_days=days_until(lambda days: math.exp(-expected(days)), given.threshold),
        survival=math.exp(-expected(given.days)),
        losses=lost,
    )
