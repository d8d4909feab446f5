"""A failure takes the devices of living ranks along: they are replaced in the same recovery, and no one is blamed."""

from __future__ import annotations

from itertools import product

import pytest

from flashrecovery import events as ev
from flashrecovery.config import FaultSpec
from flashrecovery.controller.state.crashes import taken_along
from flashrecovery.groups import accelerator, lost_context
from flashrecovery.kinds import FailureKind, NoticeKind
from flashrecovery.plan.transitions import RECOVERY_STATES, State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.worker.control.fault_injection import Faults
from tests.unit.test_machine import World

CONTAINED = "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error (code 226)"
NVIDIA_KINDS = ("torch.AcceleratorError", "torch.distributed.DistBackendError", "flashrecovery.errors.RegroupError")
STATES = sorted({*RECOVERY_STATES, State.RUNNING} - {State.FALLBACK, State.REPLACING}, key=str)


class Fabric(World):
    """Devices fail along with a rank."""

    def lose_context(self, rank: int, exception: str = NVIDIA_KINDS[0], *, step: int = 0) -> None:
        record = self.machine.job.ranks[rank]
        self.inbox = [(r, c) for r, c in self.inbox if r != rank or c.HasField("replace")]
        words = pb.LastWords(exception=exception, message="CUDA error", device=CONTAINED, traceback="Traceback ...")
        failure = pb.Failure(rank=rank, pid=record.process.pid, kind="exception", evidence="raised", step=step)
        failure.last_words.CopyFrom(words)
        self.machine.on_failure(failure, self.now)
        self.machine.validate()
        self.collect()

    def until(self, state: State) -> bool:
        """Go on until the recovery is there; False if it has been passed in one event."""
        job = self.machine.job
        while job.state is not state:
            if job.recovery is None or not self.step():
                return False
        return True


def training(size: int = 4, **config: object) -> Fabric:
    world = Fabric(size, steps=12, **config)
    world.launch()
    while world.version[0] < 2:
        world.step()
    return world


def failures(world: World) -> list[ev.FailureDetected]:
    return [e for e in world.of(ev.FailureDetected) if isinstance(e, ev.FailureDetected)]


@pytest.mark.parametrize(("state", "lost", "exception"), list(product(STATES, (1, 2), NVIDIA_KINDS)))
def test_in_every_state_they_are_victims_of_the_same_recovery(state: State, lost: int, exception: str) -> None:
    """Limits are such that a second failure of anybody would end the job, had it been counted."""
    world = training(max_failures_per_step=1, max_kills_per_step=2)
    world.kill(0)
    assert world.until(state), f"{state} was not reached"
    for rank in range(1, 1 + lost):
        world.lose_context(rank, exception)
    assert world.run() is State.FINISHED, world.machine.job.failure_reason
    (finished,) = world.of(ev.RecoveryFinished)
    assert isinstance(finished, ev.RecoveryFinished)
    assert finished.victims == list(range(lost + 1)) and finished.resume_step == 2
    assert [f.kind for f in failures(world)] == ["killed", *["context_lost"] * lost]
    started = [e.cause for e in world.of(ev.RecoveryStarted) if isinstance(e, ev.RecoveryStarted)]
    assert started[0] == "killed" and set(started[1:]) == {"context_lost"} and finished.cause == "killed"
    assert all("226" in f.evidence and "rank 0: killed" in f.evidence for f in failures(world)[1:])
    assert not any(f.exception or f.traceback for f in failures(world)), "the script is not blamed"


@pytest.mark.parametrize("state", STATES)
def test_one_after_the_other_in_each_recovery_that_follows(state: State) -> None:
    world = training(6, max_failures_per_step=1, max_kills_per_step=2)
    world.kill(0)
    for rank in range(1, 4):
        assert world.until(state)
        world.lose_context(rank)
    assert world.run() is State.FINISHED, world.machine.job.failure_reason
    assert len(world.of(ev.RecoveryFinished)) == 1


def test_its_node_is_the_next_to_be_replaced() -> None:
    world = training()
    world.kill(0)
    world.lose_context(1)
    assert "226" in world.machine.job.nodes["node0"].suspect


def test_a_rank_that_raises_so_without_another_failure_is_the_scripts() -> None:
    """An index out of range in a kernel is an error of the script."""
    world = training(max_failures_per_step=1)
    world.lose_context(1)
    assert world.machine.job.state is State.FAILED
    assert [f.kind for f in failures(world)] == ["exception"] and failures(world)[0].exception


def test_what_a_replacement_meets_is_its_own() -> None:
    """Else a script whose kernel fails in each attempt would go on for ever."""
    world = training(max_failures_per_step=2)
    world.lose_context(1)
    assert world.until(State.RUNNING) and world.machine.job.recovery is not None
    world.lose_context(2)  # a survivor, once
    assert failures(world)[-1].kind == FailureKind.CONTEXT_LOST
    assert world.until(State.RUNNING) and world.machine.job.recovery is not None
    world.lose_context(1)
    assert world.machine.job.state is State.FAILED and "rank 1 failed 2 times" in world.machine.job.failure_reason


def test_each_rank_is_taken_along_once() -> None:
    """A kernel of the script's own that fails on another rank in each attempt: the second time it is counted."""
    world = training(3, max_failures_per_step=1)
    world.kill(0)
    for rank in (1, 2):
        assert world.until(State.RUNNING) and world.machine.job.recovery is not None
        world.lose_context(rank)
        assert world.machine.job.state is State.QUIESCING
    assert world.until(State.RUNNING) and world.machine.job.recovery is not None
    world.lose_context(0)
    assert world.machine.job.state is State.FAILED and "rank 0 failed 1 times" in world.machine.job.failure_reason


def test_all_survivors_at_once_leave_what_no_process_holds() -> None:
    world = training()
    world.kill(0)
    for rank in (1, 2, 3):
        world.lose_context(rank)
    assert world.machine.job.state is State.FAILED
    assert "no survivor holds any state" in world.machine.job.failure_reason
    assert "the script raised" not in world.machine.job.failure_reason


def test_a_rank_that_is_told_so_before_its_death_is_known_is_filled_once() -> None:
    world = training()
    world.kill(0)
    pid = world.machine.job.ranks[1].process.pid
    world.lose_context(1)
    failure = pb.Failure(rank=1, pid=pid, kind="killed", evidence="SIGKILL")
    world.machine.on_failure(failure, world.now)
    assert len(failures(world)) == 2
    assert world.run() is State.FINISHED


def test_what_the_script_has_raised_at_it_is_not_kept() -> None:
    words = pb.LastWords(exception="ValueError", refused=True, fatal=True, device=CONTAINED)
    along = taken_along(pb.Failure(rank=3, pid=7, kind="exception", last_words=words), "rank 1: killed\nby whom")
    assert not along.HasField("last_words") and along.rank == 3 and along.pid == 7
    assert along.evidence == f"every call to its device fails: {CONTAINED}; after rank 1: killed"


class Device:
    """``errors``: of the next calls; None: the call succeeds."""

    def __init__(self, *errors: RuntimeError | None, used: bool = True) -> None:
        self.errors, self.used, self.calls = list(errors), used, 0

    def in_use(self) -> bool:
        return self.used

    def check(self) -> None:
        self.calls += 1
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error


def error(text: str, code: int | None = None) -> RuntimeError:
    made = RuntimeError(text)
    if code is not None:
        made.error_code = code  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (Device(used=False), ""),
        (Device(), ""),
        (Device(error("out of memory", 2), None), ""),
        (Device(error("a"), error("illegal address\nmore", 700)), "illegal address (code 700)"),
        (Device(error("a"), error("an older torch has no code")), "an older torch has no code"),
    ],
)
def test_the_device_itself_says_whether_all_calls_fail(
    device: Device, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "_accelerator", device)
    assert lost_context() == said and device.calls <= 2


def test_a_drill_of_it_is_impossible_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_accelerator", Device(used=False))
    said: list[tuple[NoticeKind, str]] = []
    faults = Faults(lambda kind, text, fault: said.append((kind, text)))
    faults.arm(pb.Fault(fault="device", phase="recovery:restoring", step=-1))
    assert FaultSpec.model_validate({"rank": 1, "fault": "device", "at": "recovery:restoring"}).fault == "device"
    faults.hit("recovery:restoring", 3)
    assert said == [(NoticeKind.FAULT_IMPOSSIBLE, "this process uses no device")]
