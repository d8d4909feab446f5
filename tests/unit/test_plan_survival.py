"""How long state survives: REFT's figure 8, closed formulas against enumeration and against simulated failures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecovery.plan.estimates.copy_holders import Guard, domains, neighbour_ring, parity_groups, replica_sets
from flashrecovery.plan.estimates.survival import (
    Failures,
    Hazard,
    checkpoint_survival,
    days_until,
    first_below,
    more_lost,
    reft_survival,
    repaired,
    ring_loses,
    unrepaired,
    weibull_survival,
)

# -- REFT's figure 8 ----------------------------------------------------------------------------------

NODES, GROUP, HARDWARE, SOFTWARE = 3072, 6, 1e-4, 1e-5
"""The caption's numbers: each of the 3,072 GPUs is a "node", and a group is the 6 data-parallel paths."""
PLOTTED = np.linspace(0, 100, 1000).tolist()


def reft(shape: float) -> Callable[[float], float]:
    return lambda days: reft_survival(days, NODES, GROUP, HARDWARE, shape)


def checkpoints(shape: float) -> Callable[[float], float]:
    return lambda days: checkpoint_survival(days, NODES, HARDWARE, SOFTWARE, shape)


def test_figure_8_of_reft_as_it_is_printed() -> None:
    """16.22 and 0.5 days are the first points of a plotted line (1,000 points from 0 to 100) that are below 0.9."""
    assert first_below(reft(1.3), 0.9, PLOTTED) == pytest.approx(16.216, abs=5e-4)
    assert first_below(checkpoints(1.3), 0.9, PLOTTED) == pytest.approx(0.5005, abs=5e-5)


@pytest.mark.parametrize(
    ("shape", "with_parity", "without"),
    [(1.0, 37.29, 0.312), (1.3, 16.178, 0.408), (1.5, 11.16, 0.460), (2.0, 6.11, 0.558)],
)
def test_figure_8_of_reft_as_its_equations_say(shape: float, with_parity: float, without: float) -> None:
    assert days_until(reft(shape), 0.9) == pytest.approx(with_parity, abs=5e-3)
    assert days_until(checkpoints(shape), 0.9) == pytest.approx(without, abs=5e-4)


@pytest.mark.parametrize(("nodes", "with_parity", "without"), [(384, 36.34, 2.02), (768, 27.72, 1.185)])
def test_figure_8_of_reft_with_machines_for_nodes(nodes: int, with_parity: float, without: float) -> None:
    """Of 8 GPUs, and of 4: what the same rates would mean if they were those of machines."""
    assert days_until(lambda t: reft_survival(t, nodes, 6, 1e-4, 1.3), 0.9) == pytest.approx(with_parity, abs=5e-3)
    assert days_until(lambda t: checkpoint_survival(t, nodes, 1e-4, 1e-5, 1.3), 0.9) == pytest.approx(without, abs=5e-3)


def test_the_general_formula_is_reft_s_where_that_holds() -> None:
    failures = alike(NODES, HARDWARE, shape=1.3)
    groups = parity_groups(failures.domain_of, NODES, GROUP, 1)
    assert len(groups) == 512
    for days in (0.1, 16.178, 60.0):
        assert unrepaired(days, groups, failures) == pytest.approx(reft(1.3)(days), rel=1e-9)
    assert reft_survival(16.0, NODES, GROUP, HARDWARE, 1.3, keeper=1e-9) < reft(1.3)(16.0)


# -- exact parts --------------------------------------------------------------------------------------


def alike(nodes: int, rate: float, shape: float = 1.0, domain_nodes: int = 0, domain_rate: float = 0.0) -> Failures:
    return Failures((rate,) * nodes, domains(nodes, domain_nodes), domain_rate, shape=shape)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_ring_by_the_number_of_arrangements(size: int) -> None:
    """No two of f that follow each other in a ring of d: d/(d-f) C(d-f,f) of C(d,f) arrangements; d = 2 is a pair."""
    q = 0.17
    kept = sum(
        (1 if f == 0 else size / (size - f) * math.comb(size - f, f)) * q**f * (1 - q) ** (size - f)
        for f in range(size // 2 + 1)
        if size > 2 or f < 2
    )
    assert ring_loses([q] * size) == pytest.approx(1 - kept, rel=1e-12)


def test_a_ring_of_nodes_that_differ_by_enumeration() -> None:
    lost = [0.1, 0.4, 0.05, 0.3, 0.2, 0.6]
    total = 0.0
    for states in itertools.product((False, True), repeat=len(lost)):
        if any(states[i] and states[i - 1] for i in range(len(states))):
            total += math.prod(q if down else 1 - q for q, down in zip(lost, states, strict=True))
    assert ring_loses(lost) == pytest.approx(total, rel=1e-12)


def test_small_probabilities_keep_their_digits() -> None:
    assert ring_loses([1e-9] * 100) == pytest.approx(100e-18, rel=1e-6)
    assert more_lost((((1e-7,) * 6, 0.0),), 2) == pytest.approx(20e-21, rel=1e-5)


@given(
    st.lists(st.tuples(st.lists(st.floats(0, 1), min_size=1, max_size=3), st.floats(0, 1)), min_size=1, max_size=3),
    st.integers(0, 3),
)
def test_losses_of_one_guard_by_enumeration(blocks: list[tuple[list[float], float]], allowed: int) -> None:
    total = 0.0
    for fallen in itertools.product((False, True), repeat=len(blocks)):
        chance = math.prod(q if down else 1 - q for (_, q), down in zip(blocks, fallen, strict=True))
        members = [1.0 if down else q for (own, _), down in zip(blocks, fallen, strict=True) for q in own]
        for states in itertools.product((False, True), repeat=len(members)):
            if sum(states) > allowed:
                total += chance * math.prod(q if down else 1 - q for q, down in zip(members, states, strict=True))
    assert more_lost(tuple((tuple(own), q) for own, q in blocks), allowed) == pytest.approx(total, abs=1e-12)


# -- simulated failures -------------------------------------------------------------------------------


def broken(lost: set[int], guards: Sequence[Guard]) -> bool:
    return any(sum(node in lost for node in guard.nodes) > guard.losses for guard in guards)


def simulate(guards: Sequence[Guard], failures: Failures, days: float, window: float | None, trials: int) -> float:
    """Part of the trials in which no state is lost by ``days``; ``window`` None: nothing is repaired. Failures come as
    a Poisson process in ``days**shape``; one that finds its node down, being repaired, begins its repair again."""
    random = np.random.default_rng(7)
    whole = days**failures.shape
    causes = [({node}, rate) for node, rate in enumerate(failures.node_rates)]
    for domain in sorted(set(failures.domain_of)):
        members = {node for node, d in enumerate(failures.domain_of) if d == domain}
        causes.append((members, failures.domain_rate))
    rates = np.array([rate for _, rate in causes])
    kept = 0
    for _ in range(trials):
        times = np.sort(random.uniform(0, whole, random.poisson(rates.sum() * whole))) ** (1 / failures.shape)
        chosen = random.choice(len(causes), size=len(times), p=rates / rates.sum())
        down: dict[int, float] = {}
        for time, cause in zip(times.tolist(), chosen.tolist(), strict=True):
            down.update(dict.fromkeys(causes[cause][0], time))
            if window is not None:
                down = {node: since for node, since in down.items() if time - since < window}
            if broken(set(down), guards):
                break
        else:
            kept += 1
    return kept / trials


WORSE = replace(alike(12, 0.02), node_rates=(0.02,) * 9 + (0.1,) * 3)
IN_RACKS = alike(12, 0.02, domain_nodes=3, domain_rate=0.006)


def ring(failures: Failures) -> tuple[Guard, ...]:
    return neighbour_ring(failures.domain_of)


def parity(losses: int, size: int = 6) -> Callable[[Failures], tuple[Guard, ...]]:
    return lambda failures: parity_groups(failures.domain_of, 12, size, losses)


@pytest.mark.parametrize(
    ("guarding", "failures", "days", "exact"),
    [
        (ring, alike(12, 0.02), 8.0, True),
        (ring, WORSE, 6.0, True),
        (ring, IN_RACKS, 7.0, False),
        (parity(1), alike(12, 0.02, shape=1.4), 4.0, True),
        (parity(1), WORSE, 4.0, True),
        (parity(1, 4), IN_RACKS, 5.0, False),
        (parity(2), alike(12, 0.02), 14.0, True),
        (parity(2, 4), IN_RACKS, 16.0, False),
        (lambda f: parity_groups(f.domain_of, 6, 6, 1), alike(12, 0.02, domain_nodes=6, domain_rate=0.006), 5.0, True),
        (lambda _: replica_sets(12, 3), alike(12, 0.05), 10.0, True),
    ],
)
def test_without_repair_against_simulated_failures(
    guarding: Callable[[Failures], tuple[Guard, ...]], failures: Failures, days: float, exact: bool
) -> None:
    guards, trials = guarding(failures), 6000
    seen, said = simulate(guards, failures, days, None, trials), unrepaired(days, guards, failures)
    error = 4 * math.sqrt(seen * (1 - seen) / trials)
    assert 0.3 < said < 0.97, "a case that shows something"
    assert said <= seen + error, "never more than there is"
    assert said >= seen - error if exact else math.log(said) >= 1.4 * math.log(seen - error)


@pytest.mark.parametrize(
    ("guarding", "failures", "window", "days"),
    [
        (ring, alike(12, 0.05), 0.2, 12.0),
        (ring, replace(WORSE, node_rates=(0.03,) * 9 + (0.15,) * 3), 0.2, 12.0),
        (ring, alike(12, 0.03, domain_nodes=3, domain_rate=0.03), 0.15, 20.0),
        (ring, alike(12, 0.01, shape=1.6), 0.2, 12.0),
        (parity(1), alike(12, 0.05), 0.1, 10.0),
        (parity(1), alike(12, 0.08, shape=0.7), 0.3, 10.0),
        (parity(1, 4), alike(12, 0.03, domain_nodes=3, domain_rate=0.03), 0.1, 12.0),
        (parity(2), alike(12, 0.06), 0.5, 15.0),
        (parity(2, 4), alike(12, 0.05, domain_nodes=3, domain_rate=0.03), 0.5, 12.0),
        # A domain takes two of a group: parity 1 is lost at once, with every one of them.
        (lambda f: parity_groups(f.domain_of, 12, 6, 1), alike(12, 0.01, domain_nodes=3, domain_rate=0.01), 0.1, 10.0),
    ],
)
def test_with_repair_against_simulated_failures(
    guarding: Callable[[Failures], tuple[Guard, ...]], failures: Failures, window: float, days: float
) -> None:
    guards, trials = guarding(failures), 6000
    seen, said = simulate(guards, failures, days, window, trials), repaired(days, guards, failures, window)
    error = 4 * math.sqrt(seen * (1 - seen) / trials)
    assert 0.3 < said < 0.97, "a case that shows something"
    assert said <= seen + error, "the errors that the formula makes are on the safe side"
    assert -math.log(said) <= 1.25 * -math.log(seen - error), "and small"


def test_the_integral_over_a_changing_hazard() -> None:
    failures = alike(8, 0.01, shape=0.6)
    guards = ring(failures)
    hazard, window, days, pieces = Hazard(guards, failures), 0.05, 30.0, 20_000
    whole = days**0.6
    fine = sum(hazard.rate((whole * (i + 0.5) / pieces) ** (1 / 0.6), window) for i in range(pieces)) * whole / pieces
    assert hazard.expected(days, window) == pytest.approx(fine, rel=0.01)


# -- what always holds --------------------------------------------------------------------------------

RATES = st.floats(1e-6, 0.05)
SHAPES = st.sampled_from([0.7, 1.0, 1.3, 2.0])


@settings(max_examples=60, deadline=None)
@given(RATES, RATES, SHAPES, st.floats(0.1, 50), st.floats(1e-4, 1.0), st.sampled_from([0, 3]))
def test_more_protection_never_survives_less(
    rate: float, domain_rate: float, shape: float, days: float, window: float, domain_nodes: int
) -> None:
    failures = alike(12, rate, shape, domain_nodes, domain_rate if domain_nodes else 0.0)
    nothing = tuple(Guard((node,), 0) for node in range(12))
    chosen = [nothing, parity(1, 4)(failures), parity(2, 4)(failures)]
    alone = [unrepaired(days, guards, failures) for guards in chosen]
    mended = [repaired(days, guards, failures, window) for guards in chosen]
    for values in (alone, mended):
        assert values[0] <= values[1] * (1 + 1e-9) and values[1] <= values[2] * (1 + 1e-9)
    assert unrepaired(days, nothing, failures) <= unrepaired(days, ring(failures), failures) * (1 + 1e-9)
    if not domain_nodes:
        assert alone[0] == pytest.approx(math.exp(-failures.all_events * days**shape), rel=1e-9)
        assert mended[0] == pytest.approx(alone[0], rel=1e-9), "without copies there is nothing to repair"


@settings(max_examples=60, deadline=None)
@given(RATES, st.floats(1, 3), SHAPES, st.floats(0.1, 50), st.floats(1e-4, 1.0), st.integers(1, 2))
def test_worse_is_worse(rate: float, worse: float, shape: float, days: float, window: float, losses: int) -> None:
    def both(failures: Failures, at: float = days, mended_after: float = window, size: int = 6) -> tuple[float, float]:
        guards = parity(losses, size)(failures)
        return unrepaired(at, guards, failures), repaired(at, guards, failures, mended_after)

    as_it_is, slack = both(alike(12, rate, shape)), 1 + 1e-9
    assert all(a <= b * slack for a, b in zip(both(alike(12, rate * worse, shape)), as_it_is, strict=True))
    assert all(a <= b * slack for a, b in zip(both(alike(12, rate, shape), at=days * worse), as_it_is, strict=True))
    assert both(alike(12, rate, shape), mended_after=window * worse)[1] <= as_it_is[1] * slack
    wide = both(alike(12, rate, shape), size=12)
    assert all(a <= b * slack for a, b in zip(wide, as_it_is, strict=True)), "the same over a larger group"
    one_worse = replace(alike(12, rate, shape), node_rates=(rate * worse, *(rate,) * 11))
    assert all(a <= b * slack for a, b in zip(both(one_worse), as_it_is, strict=True))


@given(RATES, SHAPES)
def test_at_the_beginning_everything_is_there(rate: float, shape: float) -> None:
    failures = alike(12, rate, shape, 3, rate)
    for guards in (ring(failures), parity(1)(failures), parity(2)(failures)):
        assert unrepaired(0.0, guards, failures) == repaired(0.0, guards, failures, 0.1) == 1.0
    assert weibull_survival(0.0, rate, shape) == reft_survival(0.0, 12, 6, rate, shape) == 1.0


def test_until_when() -> None:
    assert days_until(lambda t: math.exp(-t), 0.9) == pytest.approx(-math.log(0.9), rel=1e-8)
    assert days_until(lambda _: 0.95, 0.9) == math.inf
    assert first_below(lambda t: 1 - t, 0.5, [0.0, 0.25, 0.5, 0.75]) == 0.75, "at the threshold it is not below it"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node_rates": (0.1,)}, "1 node rates: one for each of 12 nodes is allowed"),
        ({"node_rates": (-0.1,) * 12}, "node failures = -0.1: 0 or more is allowed"),
        ({"process_rate": math.nan}, "process failures = nan: 0 or more is allowed"),
        ({"domain_rate": math.inf}, "domain failures = inf: 0 or more is allowed"),
        ({"shape": 0.0}, "shape = 0: more than 0 and at most 10 is allowed"),
    ],
)
def test_rates_that_cannot_be(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(alike(12, 0.1), **change)  # type: ignore[arg-type]


# -- who protects whom --------------------------------------------------------------------------------


def test_groups_are_nearly_equal_and_in_different_domains() -> None:
    racks = domains(24, 4)
    groups = parity_groups(racks, 24, 6, 1)
    assert sorted(node for g in groups for node in g.nodes) == list(range(24))
    assert [len({racks[node] for node in g.nodes}) for g in groups] == [6, 6, 6, 6]
    uneven = parity_groups(domains(10, 0), 10, 4, 2)
    assert sorted(len(g.nodes) for g in uneven) == [3, 3, 4] and all(g.losses == 2 for g in uneven)
    stages = parity_groups(domains(8, 0), 4, 8, 1)
    assert [g.nodes for g in stages] == [(0, 1, 2, 3), (4, 5, 6, 7)], "none reaches beyond a stage"
    with pytest.raises(ValueError, match="parity 2 over groups of 2 nodes: at least 3 nodes that hold"):
        parity_groups(domains(4, 0), 2, 8, 2)


def test_neighbours_are_in_different_domains_where_there_are_some() -> None:
    racks = domains(12, 3)
    assert all(racks[a] != racks[b] for a, b in (g.nodes for g in neighbour_ring(racks)))
    assert [g.nodes for g in neighbour_ring(domains(3, 0))] == [(0, 1), (1, 2), (2, 0)]
    assert [g.nodes for g in neighbour_ring(domains(3, 3))] == [(0, 1), (1, 2), (2, 0)], "one rack is as good as none"
    assert neighbour_ring((0,)) == ()
    assert [(g.nodes, g.losses) for g in replica_sets(5, 2)] == [((0, 1), 1), ((2, 3), 1), ((4,), 0)]
