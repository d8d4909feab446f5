"""Lost time: FlashRecovery's equations and every number that it prints of them, waiting for nodes, simulated jobs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrecovery.plan.checkpoint_interval import DAY_S, checkpoint_interval
from flashrecovery.plan.estimates.ettr import Costs, least_overhead, losses, overhead
from flashrecovery.plan.estimates.spares import waiting
from flashrecovery.plan.estimates.survival import more_lost

# -- FlashRecovery ------------------------------------------------------------------------------------


@given(st.floats(1e3, 1e7), st.floats(1e-2, 1e3), st.floats(1e-3, 1e2), st.floats(0, 1e4), st.floats(0.2, 5))
def test_the_interval_of_equation_3_costs_what_equation_4_says(
    d: float, k0: float, m: float, s0: float, other: float
) -> None:
    best = checkpoint_interval(d, k0, m)
    assert overhead(d, best, k0, m, s0) == pytest.approx(least_overhead(d, k0, m, s0), rel=1e-9)
    assert overhead(d, best * other, k0, m, s0) >= least_overhead(d, k0, m, s0) * (1 - 1e-9)
    # equation (2): there the derivative m/2 - d k0 / t^2 is 0
    assert m / 2 == pytest.approx(d * k0 / best**2, rel=1e-9)
    assert d / best * k0 == pytest.approx(m * best / 2, rel=1e-9), "redone steps and checkpoints cost the same"


def test_an_interval_with_the_numbers_of_the_papers_authors() -> None:
    """The paper prints no example of an interval. With what its authors measured of 175 billion parameters on 5,472
    devices (answer to the reviewers, table 4: k0 = 30 s; 1,800 + 7.2 + 58 + 120 + 60 s to restart), and five failures
    a day."""
    s0 = 1800 + 7.2 + 58 + 120 + 60
    assert checkpoint_interval(DAY_S, 30, 5) == pytest.approx(1018.23, abs=0.01)
    assert least_overhead(DAY_S, 30, 5, s0) == pytest.approx(5 * 2045.2 + 5091.17, abs=0.01)
    found = losses(5, 5, 0.0, Costs(restart_s=s0, recovery_s=1.0, step_s=49.0, k0_s=30))
    assert found.interval_s == pytest.approx(1018.23, abs=0.01)
    assert found.ettr == pytest.approx(1 / (1 + (5 * 2045.2 + 5091.17) / DAY_S), rel=1e-6) and found.first_order


@pytest.mark.parametrize(
    ("detect", "restart", "step", "total"),
    [
        (6, 88, 6, 97),
        (6, 92, 6, 101),
        (4, 84, 4, 90),
        (9, 92, 20, 111),
        (8, 78, 24, 98),
        (11, 90, 39, 120.5),
        (10, 90, 79, 139.5),
        (7, 116, 49, 147.5),
    ],
)
def test_table_3_of_the_paper_is_equation_5(detect: float, restart: float, step: float, total: float) -> None:
    costs = Costs(restart_s=1e9, recovery_s=detect + restart, step_s=step, k0_s=1.0)
    found = losses(1, 0, 0.0, costs)
    assert found.recovery_s == pytest.approx(total / (1 + total / DAY_S), rel=1e-12)
    assert found.lost_s == found.recovery_s and found.interval_s == math.inf


def test_the_papers_probabilities() -> None:
    """Section II: 100 devices with a fault rate of 0.001 and 1,000 with 0.0001; section III-A: all four replicas."""
    for devices, rate, printed in ((100, 0.001, 0.90479), (1000, 0.0001, 0.90483)):
        assert 1 - more_lost((((rate,) * devices, 0.0),), 0) == pytest.approx(printed, abs=5e-6)
    assert more_lost((((0.001,) * 4, 0.0),), 3) == pytest.approx(1e-12)


# -- a day --------------------------------------------------------------------------------------------

COSTS = Costs(restart_s=600, recovery_s=20, step_s=4, k0_s=2, copy_wait_s=0.04)


def test_a_day_adds_up() -> None:
    found = losses(4, 1, 0.01, COSTS)
    day = 3 * 22 + least_overhead(DAY_S, 2, 1, 600) + DAY_S * 0.01
    assert found.ettr == pytest.approx(0.99 / (1 + day / DAY_S), rel=1e-9)
    assert found.waiting_s == 0.01 * DAY_S and found.lost_s == pytest.approx(DAY_S * (1 - found.ettr))
    assert found.rework_s == pytest.approx(found.checkpoint_s)


def test_the_next_checkpoint_waits_until_one_is_written() -> None:
    slow = Costs(restart_s=600, recovery_s=20, step_s=4, k0_s=2, write_s=1e4)
    assert losses(4, 4, 0.0, slow).interval_s == 1e4 > losses(4, 4, 0.0, COSTS).interval_s
    assert losses(4, 4, 0.0, slow).rework_s > losses(4, 4, 0.0, COSTS).rework_s


def test_no_more_is_fatal_than_fails() -> None:
    assert losses(2, 5, 0.0, COSTS) == losses(2, 2, 0.0, COSTS)


def test_nothing_fails() -> None:
    assert losses(0, 0, 0.0, Costs(600, 20, 4, 2)).ettr == 1.0
    assert losses(4, 4, 0.0, Costs(600, 20, 4, 0.0)).checkpoint_s == 0.0, "what costs nothing is done all the time"


@given(st.floats(0, 100), st.floats(0, 1), st.floats(1, 3), st.floats(0, 0.5))
def test_more_failures_never_leave_more_time(failures: float, share: float, more: float, blocked: float) -> None:
    as_it_is = losses(failures, share * failures, blocked, COSTS)
    assert 0 < as_it_is.ettr <= 1
    assert losses(failures * more, share * failures * more, blocked, COSTS).ettr <= as_it_is.ettr + 1e-12
    assert losses(failures, min(1.0, share * more) * failures, blocked, COSTS).ettr <= as_it_is.ettr + 1e-12
    assert losses(failures, share * failures, min(1.0, blocked * more), COSTS).ettr <= as_it_is.ettr + 1e-12


@pytest.mark.parametrize("fatal_share", [1.0, 0.1])
def test_ettr_against_simulated_jobs(fatal_share: float) -> None:
    """Training with checkpoints at the interval of equation (3), failures at any moment of it, and ways back."""
    costs, failures = Costs(restart_s=300, recovery_s=20, step_s=5, k0_s=3), 6.0
    said = losses(failures, failures * fatal_share, 0.0, costs)
    random = np.random.default_rng(3)
    clock = done = since = 0.0  # done: seconds of training that count; since: those after the newest checkpoint
    while done < 4000 * DAY_S:
        gap = random.exponential(DAY_S / failures)
        # a whole interval of training and its checkpoint take interval + k0
        into = since + gap
        wholes, rest = divmod(into, said.interval_s + costs.k0_s)
        trained = min(rest, said.interval_s)
        clock += gap
        done += wholes * said.interval_s + trained - min(since, said.interval_s)
        if random.random() < fatal_share:
            clock += costs.restart_s
            done -= trained
            since = 0.0
        else:
            again = min(random.uniform(0, costs.step_s), trained)
            clock += costs.recovery_s
            done -= again
            since = rest - again if rest <= said.interval_s else rest
    assert done / clock == pytest.approx(said.ettr, abs=2e-3)


def test_where_the_equations_say_too_little_they_say_so() -> None:
    assert losses(4, 4, 0.0, COSTS).first_order
    assert not losses(200, 200, 0.0, COSTS).first_order


@pytest.mark.parametrize(
    "arguments", [(0, 1, 1, 1, 0), (1, 0, 1, 1, 0), (1, 1, -1, 1, 0), (1, 1, 1, -1, 0), (1, 1, 1, 1, -1)]
)
def test_senseless_values_are_refused(arguments: tuple[float, float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        overhead(*arguments)


# -- spare nodes --------------------------------------------------------------------------------------


def erlang_b(servers: int, load: float) -> float:
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked


@pytest.mark.parametrize("spares", [0, 1, 2, 5])
@pytest.mark.parametrize("load", [1e-4, 0.3, 2.0])
def test_waiting_for_a_node_is_erlang_s_formula(spares: int, load: float) -> None:
    found = waiting(spares, 2.0, load / 2.0)
    assert found.blocked == pytest.approx(erlang_b(spares + 1, load), rel=1e-6, abs=1e-15)
    assert found.wait_days == pytest.approx(2.0 / (spares + 1), rel=1e-6)
    reached = [load**i / math.factorial(i) for i in range(spares + 1)]
    assert found.unlucky == pytest.approx(reached[-1] / sum(reached), rel=1e-6)


def test_waiting_for_nodes_of_whole_racks_against_simulation() -> None:
    spares, repair, single, batched, batch = 3, 1.0, 0.4, 0.2, 3
    said = waiting(spares, repair, single, batched, batch)
    random = np.random.default_rng(5)
    now, stood, busy, events, unlucky, stays = 0.0, 0.0, 0, 0, 0, 0
    for _ in range(200_000):
        running = busy <= spares
        rate = busy / repair + (single + batched if running else 0.0)
        step = random.exponential(1 / rate)
        now += step
        stood += 0.0 if running else step
        draw = random.uniform(0, rate)
        if draw < busy / repair:
            busy -= 1
            continue
        busy += 1 if draw < busy / repair + single else batch
        events += 1
        unlucky += busy > spares
        stays += busy > spares
    assert said.blocked == pytest.approx(stood / now, rel=0.04)
    assert said.unlucky == pytest.approx(unlucky / events, rel=0.04)
    assert said.wait_days == pytest.approx(stood / stays, rel=0.04)


@given(st.integers(0, 6), st.floats(0, 5), st.floats(0, 2), st.floats(0, 1), st.integers(1, 6))
def test_another_spare_node_never_hurts(spares: int, repair: float, single: float, batched: float, batch: int) -> None:
    fewer, more = (waiting(count, repair, single, batched, batch) for count in (spares, spares + 1))
    assert 0 <= more.blocked <= fewer.blocked + 1e-12 and 0 <= fewer.blocked < 1
    assert 0 <= more.unlucky <= fewer.unlucky + 1e-9 and fewer.unlucky <= 1 + 1e-9


def test_nothing_to_wait_for() -> None:
    assert waiting(0, 0.0, 1.0).blocked == waiting(0, 1.0, 0.0).blocked == 0.0
    with pytest.raises(ValueError, match=r"spares = -1, .*: 0 or more is allowed"):
        waiting(-1, 1.0, 1.0)
