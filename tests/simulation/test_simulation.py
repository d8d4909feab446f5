"""Histories of faults, found by chance and kept: the real controller, agents, elections and gate on a virtual clock."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from unittest.mock import patch

import pytest

from flashrecovery.agent.controller_link.lease import ControllerLease
from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.process_manager import ProcessManager
from flashrecovery.agent.processes.providers import ProcessOrder
from flashrecovery.controller.elastic.resizing import Resizing
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state import custody
from flashrecovery.controller.state.crashes import Crashes
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.rank_record import Place
from tests.simulation import content, patches
from tests.simulation.content import Script
from tests.simulation.elastic import draw_elastic
from tests.simulation.history import Fault, History, Outcome, draw, quiet, run, simulated
from tests.simulation.network import Firewall, Weather
from tests.simulation.removed import BREAKS, REMOVED, instead
from tests.simulation.world import Shape

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "150"))
PROCESSES = 2
_PART = 50
_BY_ITSELF = 150
"""So many histories are run in this process: an import costs as much as ten of them."""

OPEN: dict[int, str] = {}
"""Seeds, and the laws that they break: a defect that is known and not mended yet (docs/testing.md)."""


def broken(first: int, count: int) -> tuple[int, list[str]]:
    """How many recoveries there were in these histories, and the laws that were broken."""
    recoveries, found = 0, []
    with quiet(), simulated():
        for seed in range(first, first + count):
            outcome = run(draw(seed))
            recoveries += outcome.recoveries
            if outcome.violation is not None and OPEN.get(seed) != outcome.violation.law:
                found.append(f"seed {seed}: {outcome.violation}")
    return recoveries, found


def of_all(look: Callable[[int, int], tuple[int, list[str]]], seeds: int, part: int) -> list[tuple[int, list[str]]]:
    """What is found in that many histories, in parts that begin with these seeds."""
    parts = range(0, seeds, part)
    if seeds <= _BY_ITSELF:
        return [look(first, part) for first in parts]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(look, parts, [part] * len(parts)))


@pytest.mark.timeout(1800)
def test_no_history_breaks_a_law() -> None:
    """``python -m tests.simulation --seed N --shrink`` shows what has happened in one."""
    results = of_all(broken, SEEDS, _PART)
    assert not [text for _, found in results for text in found]
    assert sum(recoveries for recoveries, _ in results) >= SEEDS // 10, "hardly anything was recovered"


OPEN_ELASTIC: dict[int, str] = {}
"""As :data:`OPEN`."""
ELASTIC_SEEDS = SEEDS // 6


def broken_elastic(first: int, count: int) -> tuple[int, list[str]]:
    """How often elastic jobs have changed their size in these histories, and the laws that were broken."""
    resized, found = 0, []
    with quiet(), simulated():
        for seed in range(first, first + count):
            outcome = run(draw_elastic(seed))
            resized += sum(" job_resized " in line for line in outcome.trace)
            if outcome.violation is not None and OPEN_ELASTIC.get(seed) != outcome.violation.law:
                found.append(f"elastic seed {seed}: {outcome.violation}")
    return resized, found


@pytest.mark.timeout(600)
def test_no_history_of_an_elastic_job_breaks_a_law() -> None:
    """``python -m tests.simulation --elastic --seed N --shrink`` shows what has happened in one."""
    results = of_all(broken_elastic, ELASTIC_SEEDS, _PART // 2)
    assert not [text for _, found in results for text in found]
    assert sum(resized for resized, _ in results) >= ELASTIC_SEEDS // 2, "hardly any job has changed its size"


@pytest.mark.parametrize("seed", [179, 219, 289, 304])
def test_whoever_alone_has_the_state_does_not_leave(seed: int) -> None:
    """A user has commanded a smaller size, and those that would have stayed die before it has come."""
    with quiet(), simulated():
        outcome = run(draw_elastic(seed))
    assert outcome.violation is None and outcome.state == "finished"
    with quiet(), simulated(), patch.object(custody, "have", lambda records, version: True):
        violation = run(draw_elastic(seed)).violation
    assert violation is not None and violation.law == "unjustified"


@pytest.mark.parametrize("seed", [76, 1041, 1106])
def test_a_local_state_that_is_lost_is_another_ranks_in_an_elastic_job(seed: int) -> None:
    with quiet(), simulated():
        assert run(draw_elastic(seed)).state == "finished"


def test_a_division_that_leaves_something_out_is_noticed() -> None:
    def less(script: Script, place: int, size: int) -> range:
        return range(place, script.micro_batches - (size == 3), size)

    with quiet(), simulated(), patch.object(content, "batch_split", less):
        violation = run(calm_elastic(Fault(0.5, "resize", (3, -1)))).violation
    assert violation is not None and violation.law == "batch_split"


def calm_elastic(*faults: Fault, nodes: int = 1, nproc: int = 4) -> History:
    shape = Shape(nodes, nproc, elastic=1)
    return History(1, shape, Script(steps=40, micro_batches=6), Weather(), faults)


def test_an_elastic_job_goes_down_and_up_again() -> None:
    with quiet(), simulated():
        outcome = run(calm_elastic(*(Fault(0.3 + 0.8 * i, "resize", (n, -1)) for i, n in enumerate((2, 4, 1, 3)))))
    sizes = re.findall(r"job_resized .*replicas=(\d)", "\n".join(outcome.trace))
    assert outcome.violation is None and outcome.state == "finished" and sizes == ["2", "4", "1", "3"]


def test_a_node_that_comes_back_is_filled_and_one_that_is_drained_ends() -> None:
    """The job shrinks for a lost node, grows with it, and hands over what another one has."""
    with quiet(), simulated():
        faults = (Fault(0.3, "power", ("n1", 2.0)), Fault(5.0, "drain", ("n2", 10.0)))
        script = Script(steps=120, micro_batches=6)
        outcome = run(History(1, Shape(3, 1, elastic=1), script, Weather(), faults))
    text = "\n".join(outcome.trace)
    sizes = re.findall(r"job_resized .*replicas=(\d)", text)
    assert outcome.violation is None and outcome.state == "finished" and sizes == ["2", "3", "2"]
    assert "kind=node_left" in text


def of(history: History) -> Outcome:
    with quiet(), simulated():
        return run(history)


@pytest.mark.parametrize("mistake", BREAKS)
def test_a_law_can_fail(mistake: str) -> None:
    """Each of these mistakes is noticed by its law, soon."""
    law, made = BREAKS[mistake]
    with quiet(), simulated(), made():
        violations = (run(draw(seed)).violation for seed in range(100))
        found = next((violation for violation in violations if violation is not None), None)
    assert found is not None and found.law == law, found


@pytest.mark.parametrize("name", [*REMOVED, *BREAKS])
def test_what_is_taken_out_is_replaced_by_what_can_be_called_alike(name: str) -> None:
    made = REMOVED[name] if name in REMOVED else BREAKS[name][1]
    with made():
        pass


def test_a_stand_in_that_cannot_be_called_alike_is_refused() -> None:
    with pytest.raises(TypeError, match=r"_is_lost.*the stand-in takes"):
        instead(Machine, "_is_lost", lambda self, message, now: False)


@pytest.mark.parametrize("handler", ["on_reply", "on_tick", "on_heartbeat", "on_register"])
def test_an_error_in_the_controller_is_seen_as_such(handler: str) -> None:
    """It ends the job, and no process waits for what would have followed."""

    def raises(self: Machine, *_: object) -> None:
        raise KeyError(f"in {handler}")

    history = calm(Shape(2, 1), Fault(0.5, "kill", (1,)))
    with patch.object(Machine, handler, raises):
        found = of(history)
        with quiet(), simulated():
            tolerated = run(history, frozenset({"handler"}))
    assert found.violation is not None and found.violation.law == "handler"
    assert tolerated.violation is not None and tolerated.violation.law == "unjustified"
    assert re.match(r"an error in the controller \(.+\): KeyError", tolerated.violation.text)


def test_a_controller_that_contradicts_itself_decides_no_recovery() -> None:
    """Also where not every event is looked at, as in production."""
    counted = JobState.move

    def forgets_to_count(self: JobState, rank: int, place: Place) -> None:
        if place is Place.EMPTY:
            self.ranks[rank].place = place
        else:
            counted(self, rank, place)

    history = calm(Shape(2, 1), Fault(0.5, "kill", (1,)))
    not_validated = patch.object(Machine, "validate", lambda self: None)
    with quiet(), simulated(), not_validated, patch.object(JobState, "move", forgets_to_count):
        found = run(history)
    assert found.violation is not None and found.violation.law == "unjustified"
    assert "no recovery is decided on what contradicts itself: ranks are in" in found.violation.text


@pytest.mark.parametrize("seed", [4901])
def test_a_history_that_was_found_later(seed: int) -> None:
    assert of(draw(seed)).violation is None


@pytest.mark.parametrize("seed", [7014])
def test_a_node_that_was_cut_off_goes_on_once_all_have_been_gathered(seed: int) -> None:
    """Also where the new controller may decide nothing for as long as it gathers: it tells nothing in that time."""
    assert of(draw_elastic(seed)).violation is None


def calm(shape: Shape, *faults: Fault, steps: int = 40) -> History:
    """One that has been found, without what does not matter."""
    return History(1, shape, Script(steps=steps, forward_s=0.05, backward_s=0.05), Weather(), faults)


def test_a_seed_is_one_history() -> None:
    first, second = of(draw(7)), of(draw(7))
    assert first.trace == second.trace and first.handled == second.handled > 0


DIES_IN_TAKEOVER = calm(
    Shape(3, 1, external=True),
    Fault(0.5, "controller", (0.4,)),
    Fault(0.5, "cut", (("n2",), ("ctl",), 3.0, Firewall.DROP, False)),
    Fault(1.5, "kill", (1,)),
)


def test_a_rank_that_dies_while_a_new_controller_gathers_starts_nothing_from_the_beginning() -> None:
    outcome = of(DIES_IN_TAKEOVER)
    assert outcome.violation is None and outcome.state == "finished" and outcome.recoveries == 1
    with REMOVED["failures before the take-over"]():
        violation = of(DIES_IN_TAKEOVER).violation
    assert violation is not None and violation.law == "start again"


def test_a_rank_that_dies_while_a_new_controller_gathers_keeps_its_node() -> None:
    """Its node's room is its own: it needs no other one, and neither does the rank of the lost node that is back."""
    outcome = of(calm(Shape(4, 1), Fault(0.5, "power", ("n0", 3.0)), Fault(2.0, "kill", (2,))))
    assert outcome.violation is None and outcome.state == "finished" and outcome.recoveries == 1


def test_a_node_that_has_come_to_one_that_waits_itself_finds_the_elected_controller() -> None:
    """n0 begins again as the job's first controller, n2 comes to it, and n0 goes to the one elected later."""
    lost = Fault(0.55, "power", ("n0", 0.5)), Fault(0.55, "agent", ("n2", 1.0))
    outcome = of(calm(Shape(5, 1), Fault(0.5, "freeze host", ("n1", 6.0)), *lost))
    assert outcome.violation is None and outcome.state == "finished" and outcome.recoveries == 1
    assert sum("[n0] node_joined node=n2" in line for line in outcome.trace) == 2, "it has come to n0 again"


def test_a_node_with_all_ranks_halts_before_they_are_given_away() -> None:
    """It is refused by the controller, which it could take for dead, and by the spare node, of which it knows."""
    cut = Fault(0.5, "reset+cut", (("n0",), ("ctl", "n1"), 3.0, Firewall.REJECT, False))
    history = calm(Shape(1, 2, spares=1, external=True), cut)
    outcome = of(history)
    assert outcome.violation is None and outcome.state == "failed", "no other rank has any state"
    with REMOVED["a node with all ranks knows of others"]():
        violation = of(history).violation
    assert violation is not None and violation.law == "given away"


def test_ranks_of_an_agent_that_has_stood_still_wait_for_the_controllers_word() -> None:
    """They were given away meanwhile, and any process that asks finds the controller's door open."""
    history = calm(Shape(3, 1, spares=1), Fault(0.5, "freeze agent", ("n1", 4.0)))
    outcome = of(history)
    assert outcome.violation is None and outcome.state == "finished" and outcome.recoveries == 1
    with REMOVED["an open door is no excuse after a standstill"]():
        violation = of(history).violation
    assert violation is not None and violation.law == "given away"


def test_ranks_that_were_given_away_before_the_controller_died_wait_for_the_next_one() -> None:
    """Their agent has stood still, and finds a dead controller, without which training may go on: others know of a
    newer generation."""
    faults = (Fault(0.5, "freeze agent", ("n1", 3.0)), Fault(3.0, "controller", (3.0,)))
    history = calm(Shape(3, 1, spares=1, external=True), *faults, steps=80)
    outcome = of(history)
    assert outcome.violation is None and outcome.state == "finished" and outcome.recoveries == 1
    with REMOVED["a newer generation is no excuse after a standstill"]():
        violation = of(history).violation
    assert violation is not None and violation.law == "given away"


def test_a_lost_job_does_not_begin_again_because_those_who_are_left_came_last() -> None:
    """An elastic job has two ranks on one node; the other node's have come, and have got no state yet, when it loses
    power, and the controller with it. What was lost is said."""
    with quiet(), simulated():
        outcome = run(draw_elastic(2258))
    assert "start_again" not in "\n".join(outcome.trace) and "no survivor holds any state" in "\n".join(outcome.trace)


def test_a_joining_process_that_is_given_up_while_its_set_up_log_is_asked_for() -> None:
    """No one had it, and its page was gone already: the agent ended."""
    with quiet(), simulated():
        assert run(draw_elastic(6034)).violation is None


@pytest.mark.parametrize("seed", [2186, 2258])
def test_no_generation_is_used_twice_when_all_who_knew_of_it_have_lost_power(seed: int) -> None:
    """Its number is on the disk of the node that led."""
    with quiet(), simulated():
        assert run(draw_elastic(seed)).violation is None
    with quiet(), simulated(), patch.object(patches._GenerationFile, "read", lambda self: {}):
        violation = run(draw_elastic(2186)).violation
    assert violation is not None and violation.law == "growth"


@pytest.mark.grid
@pytest.mark.parametrize("elastic", [False, True])
def test_no_history_breaks_a_law_where_disks_are_slow(elastic: bool) -> None:
    """What the controller has decided waits for the number of its generation, and other things happen meanwhile."""
    with quiet(), simulated(), patches.slow_disks():
        found = [(seed, run(draw_elastic(seed) if elastic else draw(seed)).violation) for seed in range(60)]
    assert not [(seed, violation) for seed, violation in found if violation is not None]


@pytest.mark.grid
@pytest.mark.parametrize("elastic", [False, True])
def test_no_history_breaks_a_law_where_processes_come_late(elastic: bool) -> None:
    """Their ranks are filled again meanwhile, or leave, or their node is fenced."""
    start, unwanted = ProcessManager._start, 0

    async def counted(self: ProcessManager, order: ProcessOrder, wanted: Callable[[], bool]) -> WorkerProcess | None:
        nonlocal unwanted
        process = await start(self, order, wanted)
        unwanted += process is None
        return process

    with quiet(), simulated(), patches.slow_starts(), patch.object(ProcessManager, "_start", counted):
        found = [(seed, run(draw_elastic(seed) if elastic else draw(seed)).violation) for seed in range(120)]
    assert not [(seed, violation) for seed, violation in found if violation is not None]
    assert unwanted, "all have come in time"


def test_nodes_that_are_all_started_again_begin_another_job() -> None:
    with quiet(), simulated():
        assert run(draw_elastic(1001, several=True)).violation is None


def test_a_controller_that_gathers_gives_no_word_after_a_standstill() -> None:
    """The one before has given the ranks away, and is cut off since."""
    with quiet(), simulated():
        assert run(draw_elastic(1500, several=True)).violation is None
    heard = ControllerLease.heard

    def any_answer(self: ControllerLease, when: float, *, gathering: bool = False) -> None:
        heard(self, when)

    with quiet(), simulated(), patch.object(ControllerLease, "heard", any_answer):
        violation = run(draw_elastic(1500, several=True)).violation
    assert violation is not None and violation.law == "given away"


def test_nor_to_a_node_that_was_cut_off() -> None:
    """The one before has given its rank away, lost its electors then, and it is that node that is elected."""
    assert of(draw(2093)).violation is None
    with patch.object(ControllerLease, "cut_off", lambda self: None):
        violation = of(draw(2093)).violation
    assert violation is not None and violation.law == "given away"


def test_what_was_lent_without_a_controller_ends_in_time_for_the_next_one() -> None:
    """A node has found its controller dead, comes to another one, and stands still then."""
    with quiet(), simulated():
        assert run(draw_elastic(5235, several=True)).violation is None
    with quiet(), simulated(), patch.object(ControllerLease, "registers", lambda self: None):
        violation = run(draw_elastic(5235, several=True)).violation
    assert violation is not None and violation.law == "given away"


def test_a_job_whose_node_has_left_for_good_and_whose_other_one_is_started_again_ends() -> None:
    with quiet(), simulated():
        outcome = run(draw_elastic(5069))
    assert outcome.violation is None and outcome.state == "failed"


def test_two_ranks_that_miss_one_deadline_are_found_together() -> None:
    history = calm(Shape(1, 4), Fault(0.5, "mute", (0, 1)), Fault(0.6, "kill", (2,)))
    outcome = of(history)
    assert outcome.violation is None and outcome.state == "finished" and outcome.recoveries == 1
    with REMOVED["victims of one moment together"]():
        violation = of(history).violation
    assert violation is not None and violation.law == "together", "the second has had its own deadline"


def test_a_rank_that_fails_once_at_each_of_several_steps_is_no_crash_loop() -> None:
    history = calm(Shape(1, 2, limits=True), *(Fault(at, "crash", (1,)) for at in (0.5, 2.0, 3.5)))
    outcome = of(history)
    assert outcome.violation is None and outcome.state == "finished" and outcome.recoveries == 3

    def at_any_step(count: Callable[..., int]) -> Callable[..., int]:
        return lambda crashes, cause, step: count(crashes, cause, None if step is None else 0)

    with patch.object(Crashes, "count", at_any_step(Crashes.count)):
        violation = of(history).violation
    assert violation is not None and violation.law == "unjustified"


def test_survivors_wait_as_long_as_no_controller_could_stop_them() -> None:
    history = calm(Shape(3, 1, external=True), Fault(0.5, "controller", (22.0,)), Fault(0.6, "kill", (2,)))
    outcome = of(history)
    assert outcome.violation is None and outcome.state == "finished" and outcome.recoveries == 1
    with REMOVED["the clock stands without a controller"]():
        violation = of(history).violation
    assert violation is not None and violation.law == "unjustified"


def of_replicas(*faults: Fault, inner: int) -> History:
    shape = Shape(1, 6, elastic=1, replace="never", each=2, inner=inner)
    return History(1, shape, Script(steps=60, micro_batches=5), Weather(), faults)


@pytest.mark.parametrize("inner", [1, 2])
def test_a_replica_leaves_and_comes_as_a_whole(inner: int) -> None:
    faults = (Fault(0.4, "kill", (3,)), Fault(0.9, "resize", (3, -1)), Fault(1.8, "kill", (0,)))
    with quiet(), simulated():
        outcome = run(of_replicas(*faults, inner=inner))
    assert outcome.violation is None and outcome.state == "finished"
    sizes = [line.split("replicas=")[1].split()[0] for line in outcome.trace if " job_resized " in line]
    assert sizes == ["2", "3", "2"], outcome.trace


def test_a_replica_that_leaves_in_part_is_noticed() -> None:
    with quiet(), simulated(), patch.object(Resizing, "dissolve_replicas", lambda self: None):
        violation = run(of_replicas(Fault(0.4, "kill", (3,)), inner=2)).violation
    assert violation is not None and violation.law == "replicas"


@pytest.mark.grid
@pytest.mark.timeout(1800)
def test_no_history_of_replicas_breaks_a_law() -> None:
    """``python -m tests.simulation --replicas --seed N --shrink`` shows what has happened in one."""
    with quiet(), simulated():
        outcomes = [(seed, run(draw_elastic(seed, several=True)).violation) for seed in range(300)]
    assert not [f"seed {seed}: {violation}" for seed, violation in outcomes if violation is not None]
