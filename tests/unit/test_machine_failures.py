"""Which rank becomes a victim, when, of which recovery; and what ends the job instead. Against the world of
test_machine."""

from __future__ import annotations

import signal

import pytest

from flashrecovery import events as ev
from flashrecovery.controller.state.crashes import Cause, Crashes, cause_of
from flashrecovery.controller.state.rank_record import Place
from flashrecovery.kinds import TRAITS, FailureKind
from flashrecovery.plan.hang import Verdict, VerdictKind
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_machine import World, told


def running(size: int, *, version: int = 2, **config: object) -> World:
    """A job whose ranks have all committed ``version``."""
    world = World(size, steps=30, **config)
    world.launch()
    while world.version[0] < version or world.inbox or world.machine.job.recovery is not None:
        world.step()
    return world


def until(world: World, body: str) -> None:
    """Someone has such a command before them."""
    while not told(world, body):
        assert world.step()


def recovered(world: World) -> ev.RecoveryFinished:
    """The one recovery that there was, once it is over."""
    while world.machine.job.recovery is not None:
        assert world.machine.job.state is not State.FAILED, world.machine.job.failure_reason
        assert world.step()
    (finished,) = world.of(ev.RecoveryFinished)
    assert isinstance(finished, ev.RecoveryFinished)
    return finished


def fill(world: World, rank: int) -> None:
    """Its node starts the process, which is not at its first step yet."""
    index = next(i for i, (r, c) in enumerate(world.inbox) if r == rank and c.HasField("replace"))
    _, command = world.inbox.pop(index)
    world.next_pid += 1
    world.pids[rank] = world.next_pid
    started = pb.WorkerStarted(rank=rank, generation=command.generation, pid=world.next_pid)
    world.machine.on_started(started, world.machine.job.ranks[rank].home, "host")
    world.collect()


def kill_on_the_way(world: World, rank: int, times: int, kind: str, number: int = 0) -> None:
    """The replacement fails so often before its first step."""
    for _ in range(times):
        fill(world, rank)
        world.kill(rank, kind, number)


# -- crash loop, or bad luck ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "number", "cause"),
    [
        ("exception", 0, Cause.OWN),
        ("exit", 0, Cause.OWN),
        ("hang", 0, Cause.OWN),
        ("unresponsive", 0, Cause.OWN),
        ("killed", signal.SIGSEGV, Cause.OWN),
        ("killed", signal.SIGABRT, Cause.OWN),
        ("killed", signal.SIGKILL, Cause.OUTSIDE),
        ("killed", signal.SIGTERM, Cause.OUTSIDE),
        ("stopped", 0, Cause.OUTSIDE),
        ("device", 0, Cause.OWN),
    ],
)
def test_whose_doing_a_failure_is(kind: str, number: int, cause: Cause) -> None:
    assert cause_of(FailureKind(kind), number) is cause


def test_each_kind_says_whose_doing_it_is() -> None:
    """And what it says of the node: both stand with the kind, so another kind needs no other folder."""
    assert set(TRAITS) == set(FailureKind)
    assert {kind for kind, traits in TRAITS.items() if not traits.own} == {
        FailureKind.KILLED,
        FailureKind.STOPPED,
        FailureKind.NODE_LOST,
        FailureKind.CONTEXT_LOST,
    }


def test_failures_count_by_cause_and_by_step() -> None:
    crashes = Crashes()
    assert [crashes.count(Cause.OWN, 4), crashes.count(Cause.OUTSIDE, 4), crashes.count(Cause.OWN, 5)] == [1, 1, 1]
    assert crashes.count(Cause.OWN, 4) == 2 and crashes.count(Cause.OWN, None) == 1
    crashes.arrived()
    assert crashes.count(Cause.OWN, None) == 1 and crashes.count(Cause.OWN, 4) == 3


def test_three_kills_of_a_replacement_on_its_way_are_bad_luck() -> None:
    world = running(3)
    world.kill(1)
    kill_on_the_way(world, 1, 5, "killed", signal.SIGKILL)
    finished = recovered(world)
    assert finished.victims == [1] and finished.resume_step == 2
    assert world.run() is State.FINISHED


@pytest.mark.parametrize(
    ("kind", "number", "times", "option"),
    [
        ("exception", 0, 3, "max_failures_per_step"),
        ("killed", signal.SIGSEGV, 3, "max_failures_per_step"),
        ("killed", signal.SIGKILL, 10, "max_kills_per_step"),
    ],
)
def test_a_replacement_that_never_arrives_ends_the_job_by_cause(
    kind: str, number: int, times: int, option: str
) -> None:
    world = running(3)
    world.kill(1)
    kill_on_the_way(world, 1, times - 1, kind, number)
    assert world.machine.job.state is not State.FAILED
    kill_on_the_way(world, 1, 1, kind, number)
    assert world.machine.job.state is State.FAILED
    reason = world.machine.job.failure_reason
    assert option in reason and f"failed {times} times before its first step" in reason and kind in reason


def test_failures_on_the_way_are_forgotten_when_the_recovery_is_over() -> None:
    world = running(3)
    for _ in range(3):
        world.kill(1)
        kill_on_the_way(world, 1, 2, "exit")
        while world.machine.job.recovery is not None:
            assert world.step()
        world.step()
    assert world.machine.job.state is State.RUNNING


def test_kills_of_a_rank_in_its_loop_at_the_same_step_are_bad_luck_too() -> None:
    world = running(3)
    for _ in range(4):
        world.kill(1, "killed", signal.SIGKILL)
        while world.machine.job.state is not State.RUNNING or world.inbox:
            assert world.step()
    assert world.run() is State.FINISHED


# -- victims of one moment --------------------------------------------------------------------------


@pytest.mark.parametrize("told_before", ["hold", "stop"])
def test_two_victims_of_one_moment_are_one_recovery(told_before: str) -> None:
    world = running(5)
    world.kill(1)
    until(world, told_before)
    world.kill(3)
    finished = recovered(world)
    assert finished.generation == 1 and sorted(finished.victims) == [1, 3] and finished.resume_step == 2
    assert [e.generation for e in world.of(ev.RecoveryStarted)] == [1, 1]
    assert world.run() is State.FINISHED


def test_a_survivor_that_dies_while_a_replacement_is_awaited_joins_too() -> None:
    world = running(4)
    world.kill(1)
    waiting = [(r, c) for r, c in world.inbox if c.HasField("replace")]
    world.inbox = [(r, c) for r, c in world.inbox if not c.HasField("replace")]
    while world.inbox:
        world.step()
    assert world.machine.job.state is State.REPLACING
    world.kill(2)
    world.inbox = waiting + world.inbox
    finished = recovered(world)
    assert finished.generation == 1 and sorted(finished.victims) == [1, 2]


def test_a_replacement_that_dies_on_its_way_begins_a_new_generation() -> None:
    """Its two processes could not be told apart otherwise: the first one's late words would count for the second."""
    world = running(4)
    world.kill(1)
    fill(world, 1)
    first = pb.WorkerStarted(rank=1, generation=1, pid=world.pids[1])
    world.kill(1)
    assert world.machine.job.generation == 2
    world.machine.on_started(first, "node0", "host")
    world.machine.on_joined(pb.Joined(rank=1, generation=1, steps=30), world.now)
    assert world.machine.job.ranks[1].place is Place.EMPTY, "late words of the process that was replaced"
    fill(world, 1)
    world.machine.on_joined(pb.Joined(rank=1, generation=1, steps=30), world.now)
    assert world.machine.job.ranks[1].place is Place.STARTING, "the second one has not come to its first step yet"
    needs = [pb.ShardNeed(name=name, nbytes=5) for name in ("param/w", "common", "capsule@1")]
    held = [pb.Held(kind="page", version=2, shards=["capsule@1"], nbytes=[5])]
    world.machine.on_joined(pb.Joined(rank=1, generation=2, steps=30, needs=needs, held=held), world.now)
    assert recovered(world).generation == 2


def test_a_failure_after_the_decision_begins_a_new_generation() -> None:
    world = running(4)
    world.kill(1)
    until(world, "regroup")
    world.kill(2)
    assert world.machine.job.generation == 2 and world.machine.job.state is State.QUIESCING
    assert sorted(recovered(world).victims) == [1, 2]


def mute(world: World, *ranks: int) -> None:
    """They never hear what they have been told until now."""
    world.inbox = [(r, c) for r, c in world.inbox if r not in ranks]


@pytest.mark.parametrize("asked", ["hold", "stop", "regroup"])
def test_all_who_miss_a_deadline_are_victims_at_once(asked: str) -> None:
    world = running(8)
    world.kill(0)
    until(world, asked)
    before = world.machine.job.generation
    mute(world, 2, 3, 5, 6)
    while world.inbox:
        world.step()
    world.now += 130
    world.machine.on_tick(world.now)
    world.collect()
    late = [f.rank for f in world.of(ev.FailureDetected) if isinstance(f, ev.FailureDetected) and f.rank]
    assert late == [2, 3, 5, 6] and world.machine.job.generation <= before + 1
    assert sorted(recovered(world).victims) == [0, 2, 3, 5, 6]


def test_where_nobody_at_all_answers_everybody_is_asked_once_more() -> None:
    world = running(4)
    world.kill(0)
    mute(world, 1, 2, 3)
    world.now += 11
    world.step()
    assert not [f for f in world.of(ev.FailureDetected) if isinstance(f, ev.FailureDetected) and f.rank]
    assert recovered(world).victims == [0]
    world.kill(0)
    for _ in range(2):
        mute(world, 1, 2, 3)
        world.now += 11
        world.machine.on_tick(world.now)
        world.collect()
    assert world.run() is State.FAILED and "no survivor" in world.machine.job.failure_reason


@pytest.mark.parametrize("left", [True, False])
def test_a_rank_that_waits_for_one_that_has_left_its_loop(left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own accord, before the last step: by a signal, say, that it alone has got. That is said; at the end of the
    steps there is nothing to say."""
    world = running(3)
    for rank in (0, 1):
        world.version[rank] = 30 - left
        generation = world.machine.job.generation
        world.machine.on_done(pb.Done(rank=rank, generation=generation, version=30 - left), world.now)
    world.machine.job.ranks[2].committed = 30 - left
    verdict = Verdict(VerdictKind.CULPRITS, {2: "in no collective\n  File x"})
    monkeypatch.setattr(type(world.machine.watch), "find_hung", lambda *_: verdict)
    world.machine.on_tick(world.now)
    world.collect()
    (failed,) = world.of(ev.FailureDetected)
    assert isinstance(failed, ev.FailureDetected)
    said = "; ranks 0 and 1 have left the loop by then" if left else ""
    assert failed.evidence == f"in no collective{said}\n  File x"


# -- a redo that cannot be right --------------------------------------------------------------------


def stand_still(world: World, monkeypatch: pytest.MonkeyPatch, kind: VerdictKind) -> None:
    text = "#3 in group 0 is not the same on all ranks: ranks 0 and 1: all_reduce; rank 2: broadcast"
    monkeypatch.setattr(type(world.machine.watch), "find_hung", lambda *_: Verdict(kind, text=text))
    world.machine.on_tick(world.now)
    monkeypatch.undo()
    world.collect()


def redoing(world: World) -> None:
    """Everybody is back in the loop, and no rank has committed since."""
    world.kill(1)
    while world.machine.job.state is not State.RUNNING or world.inbox:
        world.step()
    assert world.machine.job.recovery is not None


def test_different_collectives_in_the_redone_step_void_the_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    world = running(3)
    redoing(world)
    stand_still(world, monkeypatch, VerdictKind.UNLIKE)
    assert world.machine.job.state is State.FAILED and not world.of(ev.RecoveryFinished)
    reason = world.machine.job.failure_reason
    assert "recovery of rank 1 is void" in reason and "rank 2: broadcast" in reason and "ranks 0 and 1" in reason


@pytest.mark.parametrize("kind", [VerdictKind.UNLIKE, VerdictKind.STUCK])
def test_a_standstill_without_a_recovery_runs_the_step_again(
    monkeypatch: pytest.MonkeyPatch, kind: VerdictKind
) -> None:
    world = running(3)
    stand_still(world, monkeypatch, kind)
    assert recovered(world).victims == [] and world.run() is State.FINISHED


def test_a_collective_that_does_not_end_in_the_redone_step_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = running(3)
    redoing(world)
    stand_still(world, monkeypatch, VerdictKind.STUCK)
    assert world.machine.job.generation == 2 and recovered(world).victims == [1]


# -- no protected step ------------------------------------------------------------------------------


def started(size: int, **config: object) -> World:
    """Every process is there, and none has come to a protected step."""
    world = World(size, **config)
    world.launch()
    for rank in range(size):
        fill(world, rank)
    return world


def unprotected(size: int) -> World:
    world = started(size)
    world.now += 3601 + 10
    world.machine.on_tick(world.now)
    world.collect()
    (notice,) = world.of(ev.Notice)
    assert isinstance(notice, ev.Notice) and notice.kind == "unprotected"
    assert "startup_s" in notice.text and "recovery.steps()" in notice.text
    return world


def test_a_script_without_a_protected_step_runs_on() -> None:
    world = unprotected(3)
    for _ in range(3):
        world.now += 4000
        world.machine.on_tick(world.now)
    world.collect()
    assert world.machine.job.state is State.STARTING and len(world.of(ev.Notice)) == 1 and not world.inbox
    for rank in range(3):
        world.machine.on_exited(pb.Exited(rank=rank, pid=world.pids[rank]), world.now)
    world.collect()
    assert world.machine.job.state is State.FINISHED and len(world.of(ev.Notice)) == 1


def test_its_failure_ends_the_job_and_starts_nothing_from_zero() -> None:
    world = unprotected(3)
    world.kill(1, "killed", signal.SIGKILL)
    assert world.machine.job.state is State.FAILED and "startup_s" in world.machine.job.failure_reason
    assert "rank 1: killed" in world.machine.job.failure_reason


def test_a_failure_in_the_first_window_starts_again() -> None:
    world = started(3)
    world.kill(1, "killed", signal.SIGKILL)
    assert world.machine.job.state is State.STARTING and told(world, "replace") == {0, 1, 2}
    assert world.run() is State.FINISHED


def test_a_rank_that_does_not_come_while_others_have_is_started_again() -> None:
    world = World(3)
    world.launch()
    fill(world, 2)
    while world.inbox:
        world.step()
    world.now += 3611
    world.machine.on_tick(world.now)
    world.collect()
    assert [n.kind for n in world.of(ev.Notice) if isinstance(n, ev.Notice)] == ["start_again"]
    assert world.run() is State.FINISHED


def test_a_late_first_step_is_protected_after_all() -> None:
    world = unprotected(3)
    for rank in range(3):
        world.machine.on_joined(pb.Joined(rank=rank, generation=0, steps=3), world.now)
        world.collect()
    assert world.machine.job.state is State.RUNNING and len(world.of(ev.JobStarted)) == 1


def test_others_that_do_not_follow_a_late_first_step_are_not_waited_for_for_ever() -> None:
    world = unprotected(3)
    world.machine.on_joined(pb.Joined(rank=0, generation=0, steps=3), world.now)
    world.now += 3601
    world.machine.on_tick(world.now)
    assert world.machine.job.state is State.FAILED and "no answer to 'replace'" in world.machine.job.failure_reason


def test_a_script_that_ends_without_a_protected_step_is_told() -> None:
    world = started(2)
    for rank in range(2):
        world.machine.on_exited(pb.Exited(rank=rank, pid=world.pids[rank]), world.now)
    world.collect()
    (notice,) = world.of(ev.Notice)
    assert isinstance(notice, ev.Notice) and notice.kind == "unprotected" and world.machine.job.state is State.FINISHED


# -- the script's own exception ---------------------------------------------------------------------


def raises(world: World, rank: int, exception: str, step: int = 2, *, refused: bool = False) -> None:
    record = world.machine.job.ranks[rank]
    message = "the loader has no more"
    words = pb.LastWords(exception=exception, message=message, place="train.py:7", refused=refused)
    failure = pb.Failure(
        rank=rank, pid=record.process.pid, kind="exception", evidence=exception, last_words=words, step=step
    )
    mute(world, rank) if record.place is not Place.EMPTY else None
    world.machine.on_failure(failure, world.now)
    world.collect()


def test_an_exception_on_all_ranks_is_named_as_the_cause() -> None:
    world = running(3)
    for rank in range(3):
        raises(world, rank, "StopIteration")
    assert world.machine.job.state is State.FAILED
    reason = world.machine.job.failure_reason
    assert reason.startswith("the script raised StopIteration on ranks 0, 1 and 2, at step 2: the loader has no more")
    assert "train.py" in reason


def test_an_exception_on_all_ranks_in_the_first_step_is_not_tried_again() -> None:
    world = running(3, version=0)
    for rank in range(3):
        raises(world, rank, "ValueError", step=0)
    assert (
        world.machine.job.state is State.FAILED and "the script raised ValueError" in world.machine.job.failure_reason
    )


def test_a_refusal_is_not_tried_again() -> None:
    """Not even on one rank: a replacement has not done what is refused, and would get past it with other numbers."""
    world = running(3)
    raises(world, 1, "UnsupportedError", refused=True)
    assert world.machine.job.state is State.FAILED
    assert world.machine.job.failure_reason.startswith("the script raised UnsupportedError on rank 1, at step 2: ")


@pytest.mark.parametrize("before", ["stop", "regroup", "restore", "resume"])
def test_a_refusal_while_others_are_replaced_is_not_tried_again_either(before: str) -> None:
    """What follows from a stop ends no process like this. Seen with --snapshots always: the rank that had refused the
    step came back with its copies, without what it had refused, and the job went on with other numbers."""
    world = running(3)
    world.kill(0, "killed", signal.SIGKILL)
    until(world, before)
    raises(world, 1, "UnsupportedError", refused=True)
    assert world.machine.job.state is State.FAILED
    assert world.machine.job.failure_reason.startswith("the script raised UnsupportedError on rank 1, at step 2: ")


def test_a_replacement_that_is_refused_before_it_has_come_in_is_tried_again() -> None:
    """Nothing of it has counted yet, and what it refuses is looked at again in the next one."""
    world = running(3)
    world.kill(0, "killed", signal.SIGKILL)
    until(world, "replace")
    fill(world, 0)
    raises(world, 0, "UnsupportedError", refused=True)
    assert world.machine.job.state is not State.FAILED
    recovered(world)


def test_exceptions_that_follow_a_death_are_not_its_cause() -> None:
    world = running(3)
    world.kill(0, "killed", signal.SIGKILL)
    raises(world, 1, "DistBackendError")
    raises(world, 2, "DistBackendError")
    assert world.machine.job.state is State.FAILED
    assert world.machine.job.failure_reason.startswith("no survivor holds any state")


def test_a_drill_that_has_not_struck_is_named_at_the_end() -> None:
    """One failure for each fault: the second one of rank 1 was to strike in a step that the job does not have."""
    world = running(2)
    drills = [pb.InjectRequest(rank=1, fault="sigkill", phase="backward", step=step) for step in (5, 500)]
    world.machine.job.asked.drills += drills
    world.machine.job.asked.fires(1, pb.Fault(fault="sigkill", phase="backward", step=5))
    world.kill(1)
    recovered(world)
    assert world.machine.job.asked.drills == drills[1:]
    while world.machine.job.state is not State.FINISHED:
        assert world.step()
    told_at_end = [e for e in world.of(ev.Notice) if isinstance(e, ev.Notice) and e.kind == "fault_not_fired"]
    assert [(e.rank, e.text.partition(":")[0]) for e in told_at_end] == [(1, "sigkill at backward, step 500")]


def test_a_node_that_comes_to_a_job_that_has_failed_is_told_so_and_starts_nothing() -> None:
    """Ctrl-C in the first moments: the job has ended before its node has come."""
    world = World(2)
    world.machine.job.fail("stopped by SIGINT")
    world.collect()
    world.inbox.clear()
    world.join("a")
    told_there = [command.WhichOneof("body") for _, command in world.inbox]
    assert told_there == ["shutdown"] and world.machine.job.state is State.FAILED
