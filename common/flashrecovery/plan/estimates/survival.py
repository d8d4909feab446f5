"""How long state in memory survives: REFT's equations (1) to (3), and the same with repair.

Lifetimes are Weibull's with one shape c for all, as in REFT: a node with the rate ``lam`` lives longer than t days with
the probability ``exp(-lam * t**c)``. Rates are per day**c; with c = 1 they are failures a day.

There are two readings, and they differ by orders of magnitude:

* **without repair** (REFT's equation (2), :func:`unrepaired`): a lost node stays lost. It is the probability that the
  state kept at day 0 still exists at day t without any repair.
* **with repair** (:func:`repaired`): a lost node is replaced, and after ``window`` days the redundancy is whole again.
  State is lost only if too many nodes of one guard are lost within one window. This is what a job with replacements
  sees.

With repair, a replacement has the hazard of a node of the job's age (*as bad as old*: for c > 1 that errs on the safe
side), windows do not lengthen each other, and losses in different guards after one event count as independent. The
error of each is of the order of ``failures within a window``, which is small where the formula is useful;
``tests/unit/test_plan_survival.py`` compares it with simulated failures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashrecovery.plan.estimates.copy_holders import Guard

_PIECES = 64
"""Pieces of the integral over the hazard where it is not constant."""

Block = tuple[tuple[float, ...], float]
"""Members that share a failure domain: a value for each of them (a rate, or a probability), and that of the domain."""
Signature = tuple[Block, ...]
"""A guard as it is calculated with: which node is which does not matter."""


# -- REFT ---------------------------------------------------------------------------------------------


def weibull_survival(days: float, rate: float, shape: float) -> float:
    """REFT's equation (1): the probability that something with this rate (per day**shape) lives longer than
    ``days``."""
    return math.exp(-rate * days**shape)


def reft_survival(days: float, nodes: int, group: int, hardware: float, shape: float, keeper: float = 0.0) -> float:
    """REFT's equation (2): at most one node has failed in each of ``nodes / group`` groups of ``group`` nodes.

    ``hardware``: rate of a node; ``keeper``: rate at which the process fails that keeps the snapshots (REFT takes it
    for 0).
    """
    alive = weibull_survival(days, hardware, shape)
    whole = alive**group + group * (1 - alive) * alive ** (group - 1)
    return float(whole ** (nodes / group) * weibull_survival(days, nodes * keeper, shape))


def checkpoint_survival(days: float, nodes: int, hardware: float, software: float, shape: float) -> float:
    """REFT's equation (3): nothing has failed at all, on any of ``nodes``, neither hardware nor software."""
    return weibull_survival(days, nodes * (hardware + software), shape)


def days_until(survival: Callable[[float], float], threshold: float, longest: float = 1e5) -> float:
    """The day on which a falling ``survival`` comes down to ``threshold``; ``math.inf`` if not within ``longest``
    days."""
    if survival(longest) > threshold:
        return math.inf
    low, high = 0.0, longest
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if survival(middle) > threshold else (low, middle)
    return high


def first_below(survival: Callable[[float], float], threshold: float, days: Sequence[float]) -> float:
    """The first of ``days`` on which ``survival`` is below ``threshold``, as it is read from a plotted line; else
    inf."""
    return next((day for day in days if survival(day) < threshold), math.inf)


# -- all kinds of guards ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failures:
    """What fails, and how often.

    Attributes:
        node_rates: of each node of the job, per day**shape.
        process_rate: of each training process, the same; it takes no node with it.
        processes: in the whole job.
        domain_of: failure domain of each node (:func:`~.copy_holders.domains`).
        domain_rate: of each domain; it takes all of its nodes at once.
        shape: Weibull's c. Less than 1: early failures; 1: constant; more than 1: wear.
    """

    node_rates: tuple[float, ...]
    domain_of: tuple[int, ...]
    domain_rate: float = 0.0
    process_rate: float = 0.0
    processes: int = 0
    shape: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError, which names the value and what is allowed."""
        if not self.node_rates or len(self.node_rates) != len(self.domain_of):
            raise ValueError(
                f"{len(self.node_rates)} node rates: one for each of {len(self.domain_of)} nodes is allowed"
            )
        rates = {"domain failures": self.domain_rate, "process failures": self.process_rate}
        for name, value in {"node failures": min(self.node_rates), **rates}.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} = {value:g}: 0 or more is allowed")
        if not 0 < self.shape <= 10:
            raise ValueError(f"shape = {self.shape:g}: more than 0 and at most 10 is allowed")

    @property
    def node_events(self) -> float:
        """Rate at which single nodes fail, of the whole job."""
        return math.fsum(self.node_rates)

    @property
    def domain_events(self) -> float:
        """Rate at which whole domains fail, of the whole job."""
        return self.domain_rate * len(set(self.domain_of))

    @property
    def process_events(self) -> float:
        """Rate at which processes fail, of the whole job."""
        return self.process_rate * self.processes

    @property
    def all_events(self) -> float:
        return self.node_events + self.domain_events + self.process_events

    def a_day(self, rate: float, days: float) -> float:
        """Events a day at ``rate``, on average over the first ``days``."""
        return rate * float(days ** (self.shape - 1))


def _log_kept(blocks: Signature, losses: int) -> float:
    """The logarithm of the probability that at most ``losses`` are lost; -inf for none."""
    *kept, lost = _losses(blocks, losses)
    if lost < 0.5:
        return math.log1p(-lost)
    whole = math.fsum(kept)
    return math.log(whole) if whole > 0 else -math.inf


def more_lost(blocks: Signature, losses: int) -> float:
    """The probability that more than ``losses`` are lost. ``blocks``: probabilities that each member fails by itself,
    and that its domain takes them all. Only sums of positive terms: also 1e-15 is exact to many digits."""
    return _losses(blocks, losses)[-1]


def _losses(blocks: Signature, losses: int) -> list[float]:
    """The distribution of the number of losses; all that are more than ``losses`` in the last place."""
    found = [1.0] + [0.0] * (losses + 1)  # the last one: more than allowed
    for members, together in blocks:
        alone = [1.0] + [0.0] * (losses + 1)
        for q in members:
            alone = _add(alone, [1 - q, q] + [0.0] * losses)
        taken = [0.0] * (losses + 2)
        taken[min(len(members), losses + 1)] = together
        found = _add(found, [(1 - together) * a + t for a, t in zip(alone, taken, strict=True)])
    return found


def _add(one: list[float], other: list[float]) -> list[float]:
    """The distribution of the sum of two numbers of losses, all that is too many in the last place."""
    last = len(one) - 1
    found = [0.0] * (last + 1)
    few = [(j, b) for j, b in enumerate(other) if b]
    for i, a in enumerate(one):
        if a:
            for j, b in few:
                found[min(i + j, last)] += a * b
    return found


def _signature(guard_nodes: Sequence[int], failures: Failures) -> Signature:
    blocks: dict[int, list[float]] = {}
    for node in guard_nodes:
        blocks.setdefault(failures.domain_of[node], []).append(failures.node_rates[node])
    return tuple(sorted((tuple(sorted(rates)), failures.domain_rate) for rates in blocks.values()))


def _lost_within(signature: Signature, hazard: float) -> Signature:
    """Rates become the probabilities of a failure while ``day**shape`` grows by ``hazard``."""
    return tuple(
        (tuple(-math.expm1(-rate * hazard) for rate in rates), -math.expm1(-domain * hazard))
        for rates, domain in signature
    )


def unrepaired(days: float, guards: Sequence[Guard], failures: Failures) -> float:
    """The probability that no guard has lost more than it may by ``days``, if nothing is repaired: REFT's equation (2),
    for nodes that differ, for rings, and with domains.

    Exact for guards that share neither nodes nor domains, and for a ring of neighbours without domains. Otherwise a
    lower bound: losses that have a cause in common come together, so surviving one guard makes surviving another one
    likelier (Harris's inequality).
    """
    hazard = days**failures.shape
    if _is_ring(guards) and failures.domain_rate == 0:
        return math.exp(math.fsum(math.log1p(-min(q, _ALMOST)) for q in _rings_lost(guards, failures, hazard)))
    found = 0.0
    for (signature, losses), count in Counter((_signature(g.nodes, failures), g.losses) for g in guards).items():
        found += count * _log_kept(_lost_within(signature, hazard), losses)
    return math.exp(found)


_ALMOST = 1 - 1e-16
"""The logarithm of 0 is not needed to more digits than this."""


def _is_ring(guards: Sequence[Guard]) -> bool:
    return (
        len(guards) > 1
        and all(len(g.nodes) == 2 and g.losses == 1 for g in guards)
        and len({g.nodes[0] for g in guards}) == len(guards)
    )


def _rings_lost(guards: Sequence[Guard], failures: Failures, hazard: float) -> list[float]:
    """For each cycle of neighbours the probability that two which follow each other are lost."""
    following = {g.nodes[0]: g.nodes[1] for g in guards}
    left = set(following)
    found = []
    while left:
        start = min(left)
        cycle = [start]
        while (node := following.get(cycle[-1], start)) != start:
            cycle.append(node)
        left -= set(cycle)
        found.append(ring_loses([-math.expm1(-failures.node_rates[n] * hazard) for n in cycle]))
    return found


def ring_loses(lost: Sequence[float]) -> float:
    """The probability that two that follow each other in a ring are lost, each with its own probability.

    For f losses in a ring of d equal nodes the share of arrangements without such a pair is d/(d-f) C(d-f,f) / C(d,f);
    this is their sum over all f, also for nodes that differ, counted along the ring.
    """
    total = 0.0
    first = lost[0]
    for start, weight in ((False, 1 - first), (True, first)):
        kept = [0.0, 0.0]
        kept[start] = weight
        for q in lost[1:]:
            total += kept[True] * q
            kept = [(kept[False] + kept[True]) * (1 - q), kept[False] * q]
        if start:
            total += kept[True]  # the last one and the first one
    return min(total, 1.0)


# -- with repair --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Event:
    """Something fails: ``rate`` of all events of this kind together; the ``rest`` of each guard that it touches, with
    what that may still lose (less than 0: it is over), and how many such guards."""

    rate: float
    rest: tuple[tuple[tuple[Signature, int], int], ...]


class Hazard:
    """Loss of state with repair, for given guards. Kinds of events are collected once."""

    def __init__(self, guards: Sequence[Guard], failures: Failures) -> None:
        self._shape = failures.shape
        touching: dict[int, list[Guard]] = {}
        for guard in guards:
            for node in guard.nodes:
                touching.setdefault(node, []).append(guard)
        kinds: Counter[tuple[float, tuple[tuple[tuple[Signature, int], int], ...]]] = Counter()
        for node, rate in enumerate(failures.node_rates):
            kinds[rate, _rest({node}, touching.get(node, ()), failures)] += 1
        if failures.domain_rate > 0:
            for domain in sorted(set(failures.domain_of)):
                members = {i for i, d in enumerate(failures.domain_of) if d == domain}
                touched = {g for node in members for g in touching.get(node, ())}
                kinds[failures.domain_rate, _rest(members, touched, failures)] += 1
        self._events = [_Event(rate * count, rest) for (rate, rest), count in kinds.items()]

    def rate(self, day: float, window: float) -> float:
        """Losses per day**shape at ``day``: a failure, and within ``window`` days more of one guard than it may
        lose."""
        grown = (day + window) ** self._shape - day**self._shape
        return math.fsum(event.rate * self._fatal(event, grown) for event in self._events)

    @staticmethod
    def _fatal(event: _Event, grown: float) -> float:
        survives = 0.0
        for (signature, losses), count in event.rest:
            if losses < 0:
                return 1.0
            survives += count * _log_kept(_lost_within(signature, grown), losses)
        return -math.expm1(survives)

    def expected(self, days: float, window: float) -> float:
        """Expected number of losses of state within ``days``."""
        whole = float(days**self._shape)
        if self._shape == 1:
            return whole * self.rate(0.0, window)
        pieces = [whole * (i + 0.5) / _PIECES for i in range(_PIECES)]
        return whole / _PIECES * math.fsum(self.rate(v ** (1 / self._shape), window) for v in pieces)


def _rest(
    lost: set[int], guards: Sequence[Guard] | set[Guard], failures: Failures
) -> tuple[tuple[tuple[Signature, int], int], ...]:
    """What is left of ``guards`` that have lost some of their nodes."""
    found: Counter[tuple[Signature, int]] = Counter()
    for guard in guards:
        left = [n for n in guard.nodes if n not in lost]
        found[_signature(left, failures), guard.losses - (len(guard.nodes) - len(left))] += 1
    return tuple(sorted(found.items()))


def repaired(days: float, guards: Sequence[Guard], failures: Failures, window: float) -> float:
    """The probability that no state is lost by ``days``, if what fails is whole again ``window`` days later."""
    return math.exp(-Hazard(guards, failures).expected(days, window))
