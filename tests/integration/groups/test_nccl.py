"""What recovery must do because NCCL is not gloo: each rule of its behaviour, with the fake of it.

The fake (tests/support/fake_nccl) ends the process where a real one would crash, and lets wait for ever what would. The
numbers are those of the table in docs/groups.md.
"""

from __future__ import annotations

import datetime
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.errors import RegroupError
from flashrecovery.groups import native_build, torch_private
from flashrecovery.runtime.nccl_env import LAUNCH_DEFAULTS
from flashrecovery.worker.control.control_thread import hang_report
from flashrecovery.worker.control.device_sync import DeviceClock
from tests.support import fake_nccl
from tests.support.groups_ranks import RankFunction, run_ranks

RECORDED_ON = 1
LEGACY, NCCL2 = torch_private.LEGACY, torch_private.NCCL2
legacy = pytest.mark.parametrize("kind", [LEGACY], indirect=True)
"""Of ProcessGroupNCCL alone: it waits with a communicator for the first operation, and its Works never raise."""


@pytest.fixture(params=[LEGACY, NCCL2], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of torch's NCCL backends the ranks of a test have."""
    monkeypatch.setenv(fake_nccl.KIND, request.param)
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    groups.build()  # here, not within a deadline of ranks
    fake_nccl.build()


def _start(rank: int, size: int, store: Any, recorded: bool = False, **environment: str) -> tuple[Any, list[Any]]:
    """The fake's module, and the inner backends in the order in which they are made."""
    os.environ.update(LAUNCH_DEFAULTS, **environment)
    module = fake_nccl.install()
    if recorded:  # the fake has to be informed of it, whether this process has loaded the extension already or not
        groups.start_setup_log()
    made: list[Any] = []
    make = torch_private.nccl_backend

    def nccl_backend(*arguments: Any) -> Any:
        made.append(make(*arguments))
        return made[-1]

    torch_private.nccl_backend = nccl_backend
    groups.install()
    dist.init_process_group(fake_nccl.backend_name(), store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    return module, made


def _again(store: Any, generation: int) -> None:
    report = groups.drain(5.0)
    assert report.quiet, report
    groups.detach_all()
    _attach(store, generation)


def _attach(store: Any, generation: int) -> None:
    groups.attach(store, generation, 20.0)
    _together(store, f"attached {generation}", dist.get_rank(), dist.get_world_size())


def _together(store: Any, key: str, rank: int, size: int) -> None:
    """A rank that abandons its groups closes connections that a peer may still be making."""
    store.set(f"{key} {rank}", "")
    store.wait([f"{key} {r}" for r in range(size)])


def _soon(call: Callable[[], object], seconds: float) -> threading.Thread:
    def later() -> None:
        time.sleep(seconds)
        call()

    thread = threading.Thread(target=later)
    thread.start()
    return thread


def _section(*, async_ops: bool = False) -> Any:
    """What is launched within is launched at its end. Without a device torch opens none: it hands over all collectives
    at once, and sends one by one."""
    return dist.distributed_c10d._coalescing_manager(dist.group.WORLD, torch.device("cpu"), async_ops=async_ops)


def _told(work: dist.Work) -> object:
    """Its exception, as far as Python can have it."""
    try:
        return work.exception()
    except TypeError:  # torch 2.11 has no way to hand it over
        return None


def _sum(rank: int, size: int) -> None:
    dist.all_reduce(t := torch.full((3,), float(rank + 1)))
    assert t.tolist() == [size * (size + 1) / 2] * 3


# -- row 1: null work counts as succeeded ---------------------------------------------------------


def _set_up(rank: int) -> list[object]:
    """Synchronous collectives, as a script makes them before its first step."""
    dist.broadcast(flags := torch.full((2,), 10.0 + rank), 0)
    dist.all_reduce(seed := torch.tensor([float(rank + 1)]))
    dist.broadcast_object_list(configuration := [{"made by": rank}], 0)
    dist.all_gather_into_tensor(everyone := torch.zeros(2), torch.tensor([float(rank)]))
    with dist.distributed_c10d._coalescing_manager(dist.group.WORLD):
        dist.all_reduce(one := torch.tensor([2.0 + rank]))
        dist.all_reduce(two := torch.tensor([3.0 + rank]))
    with _section():
        dist.all_reduce(three := torch.tensor([4.0 + rank]))
        dist.all_reduce(four := torch.tensor([5.0 + rank]))
    coalesced = [t.item() for t in (one, two, three, four)]
    return [flags.tolist(), seed.tolist(), configuration, everyone.tolist(), coalesced]


EXPECTED = [[10.0, 10.0], [3.0], [{"made by": 0}], [0.0, 1.0], [5.0, 7.0, 9.0, 11.0]]


def test_a_replacement_gets_what_synchronous_set_up_collectives_gave(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def original(rank: int, size: int, store: Any) -> None:
        _start(rank, size, store, recorded=True)
        assert _set_up(rank) == EXPECTED
        if rank == RECORDED_ON:
            log.write_bytes(groups.take_setup_log())

    def replacement(rank: int, size: int, store: Any) -> None:
        groups.install()
        groups.set_detached(True)
        groups.replay_setup_log(log.read_bytes())
        fake_nccl.install()
        dist.init_process_group(fake_nccl.backend_name(), store=dist.HashStore(), rank=RECORDED_ON, world_size=2)
        assert _set_up(RECORDED_ON) == EXPECTED

    run_ranks(2, original)
    run_ranks(1, replacement)


def test_a_replacements_groups_of_one_rank_answer_with_its_own_data(tmp_path: Path) -> None:
    """As those of gloo do: an object that was too large for the log is no matter there."""
    log = tmp_path / "log"

    def set_up(value: float) -> float:
        alone = [dist.new_group([r]) for r in range(2)][RECORDED_ON]
        dist.broadcast(t := torch.tensor([value]), RECORDED_ON, group=alone)
        dist.broadcast(everywhere := torch.tensor([value]), RECORDED_ON)
        assert everywhere.item() == 3.0
        return float(t.item())

    def original(rank: int, size: int, store: Any) -> None:
        _start(rank, size, store, recorded=True)
        if rank == RECORDED_ON:
            assert set_up(3.0) == 3.0
            log.write_bytes(groups.take_setup_log())
        else:
            [dist.new_group([r]) for r in range(2)]
            dist.broadcast(torch.zeros(1), RECORDED_ON)

    def replacement(rank: int, size: int, store: Any) -> None:
        groups.set_detached(True)
        groups.replay_setup_log(log.read_bytes())
        _start(RECORDED_ON, 2, dist.HashStore())
        assert set_up(4.0) == 4.0

    run_ranks(2, original)
    run_ranks(1, replacement)


# -- row 2: no section stays open -----------------------------------------------------------------


def _fails_in_a_section(collective: bool) -> RankFunction:
    def body(rank: int, size: int, store: Any) -> None:
        module, _ = _start(rank, size, store)
        peer = 1 - rank
        with pytest.raises(dist.DistBackendError, match="a drill"):
            if collective:
                with _section():
                    dist.all_reduce(torch.ones(3))
                    assert module.group_depth() == 1
                    _together(store, "connected", rank, size)
                    groups.abandon("a drill")
                    dist.all_reduce(torch.ones(3))
            else:
                with _section(async_ops=True):
                    dist.isend(torch.ones(3), peer)
                    assert module.group_depth() == 1
                    _together(store, "connected", rank, size)
                    groups.abandon("a drill")
                    dist.irecv(torch.ones(3), peer)
        assert module.group_depth() == 0, "nothing that this thread launches would ever run"
        _again(store, 1)
        _sum(rank, size)

    return body


def test_an_abort_waits_for_the_end_of_a_section() -> None:
    """Its end launches what it holds, on communicators that the abort frees."""

    def body(rank: int, size: int, store: Any) -> None:
        module, _ = _start(rank, size, store)
        _sum(rank, size)
        with pytest.raises(dist.DistBackendError, match="a drill"), _section(async_ops=True):
            dist.isend(torch.ones(3), 1 - rank)
            assert module.group_depth() == 1
            groups.abandon("a drill")
            time.sleep(0.5)
            dist.irecv(torch.ones(3), 1 - rank)
        _again(store, 1)
        _sum(rank, size)

    run_ranks(2, body)


@pytest.mark.parametrize("collective", [True, False], ids=["collectives", "sends"])
def test_a_failure_within_a_section_ends_it(collective: bool) -> None:
    run_ranks(2, _fails_in_a_section(collective))


def test_a_section_that_another_thread_leaves_open_is_reported() -> None:
    def body(rank: int, size: int, store: Any) -> None:
        _start(rank, size, store)
        _sum(rank, size)
        outer = groups.groups()[0].outer()
        thread = threading.Thread(target=outer._start_coalescing)
        thread.start()
        thread.join()
        groups.abandon("a drill")
        report = groups.drain(0.5)
        assert not report.quiet and report.open_sections == ("0",), report

    run_ranks(2, body)


# -- row 3: the tag follows the device ------------------------------------------------------------


def test_a_commit_waits_for_what_the_device_has_not_done() -> None:
    def body(rank: int, size: int, store: Any) -> None:
        _start(rank, size, store)
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)
        work = dist.all_gather_into_tensor(gathered := torch.zeros(2), torch.tensor([float(rank)]), async_op=True)
        DeviceClock().before_commit()
        assert work is not None and work.is_completed() and gathered.tolist() == [0.0, 1.0]

    run_ranks(2, body)


@legacy
def test_an_abort_tears_what_is_under_way_and_nobody_is_told() -> None:
    """Of the fake: without it the other tests here would prove nothing."""

    def body(rank: int, size: int, store: Any) -> None:
        _, made = _start(rank, size, store)
        _sum(rank, size)
        if rank == 1:
            time.sleep(1.0)
            return
        work = made[0].allreduce([t := torch.ones(3)])
        made[0].abort()
        assert work.wait() and t.isnan().all() and _told(work) is None

    run_ranks(2, body)


# -- row 4: groups are connected in attach --------------------------------------------------------


@legacy
def test_attach_connects_groups_that_nobody_has_used_yet() -> None:
    def body(rank: int, size: int, store: Any) -> None:
        module, made = _start(rank, size, store)
        unused = dist.new_group([0, 1])
        pair = dist.new_group([0, 2])
        assert [module.connected(backend) for backend in made] == [0] * len(made)
        groups.abandon("a drill")
        del made[:]
        _again(store, 1)
        assert len(made) == (3 if rank in (0, 2) else 2) - (rank == 2)
        assert [module.connected(backend) for backend in made] == [1] * len(made)
        assert unused is not None and pair is not None
        _sum(rank, size)

    run_ranks(3, body)


@legacy
def test_a_communicator_that_hangs_in_its_creation_is_not_aborted_under_its_creator() -> None:
    """No one can interrupt it. The process is replaced."""

    def body(rank: int, size: int, store: Any) -> None:
        _start(rank, size, store)
        if rank == 1:
            store.set("started", "")
            store.wait(["seen"])
            return
        store.wait(["started"])
        stuck = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)), daemon=True)
        before = store.num_keys()
        stuck.start()
        while store.num_keys() == before:  # it has said where it is to be reached
            time.sleep(0.01)
        groups.abandon("a drill")
        report = groups.drain(1.0)
        assert not report.quiet and report.stuck_aborts == ("0",), report
        store.set("seen", "")
        os._exit(0)

    run_ranks(2, body)


# -- row 6: an abort never meets a launch ---------------------------------------------------------


def test_an_abort_waits_for_who_is_launching() -> None:
    rounds, launch_us = 8, 40_000

    def body(rank: int, size: int, store: Any) -> None:
        chance = random.Random(rank)
        _start(rank, size, store, FAKE_NCCL_LAUNCH_US=str(launch_us))
        _sum(rank, size)  # the making of a communicator is reached by no abort
        for generation in range(1, rounds + 1):
            control = _soon(lambda: groups.abandon("a drill"), 0.1 + chance.random() * 0.1)
            with pytest.raises(RuntimeError, match=r"a drill|aborted after a previous error"):  # the peer was first
                while True:
                    dist.all_reduce(torch.ones(10), async_op=True)
            control.join()
            _again(store, generation)
        _sum(rank, size)  # rank 0 has the communicators' addresses, and must not end before all are connected

    run_ranks(2, body)


# -- row 17: in a replacement no group comes before the default group -----------------------------


@legacy
def test_a_replacements_groups_of_one_rank_come_after_the_default_group() -> None:
    def body(rank: int, size: int, store: Any) -> None:
        survives = rank == 0
        groups.set_detached(not survives)
        module, made = _start(rank, size, store)
        alone = [dist.new_group([r]) for r in range(size)][rank]
        dist.all_reduce(t := torch.full((2,), 3.0), group=alone)
        dist.barrier(group=alone)
        assert t.tolist() == [3.0, 3.0]
        if survives:
            groups.abandon("a drill")
            assert groups.drain(5.0).quiet
            groups.detach_all()
        else:
            assert not made and module.global_rank() == -1
        _attach(store, 1)
        assert module.global_rank() == rank, "torch would choose another rank's GPU"
        dist.all_reduce(t := torch.full((2,), 5.0), group=alone)
        dist.barrier(group=alone)
        assert t.tolist() == [5.0, 5.0] and not [g.name for g in groups.groups() if g.detached]
        before = len(made)
        groups.abandon("another drill")
        _again(store, 2)
        assert len(made) == before + 1, "what no one can break stays"
        dist.all_reduce(t := torch.full((2,), 7.0), group=alone)
        assert t.tolist() == [7.0, 7.0]
        _sum(rank, size)

    run_ranks(2, body)


# -- a dead peer ----------------------------------------------------------------------------------


def test_a_rank_that_waits_for_a_dead_peer_is_freed_by_the_abort_alone() -> None:
    def body(rank: int, size: int, store: Any) -> None:
        _start(rank, size, store)
        _sum(rank, size)
        if rank == 1:
            os._exit(9)
        ended = threading.Event()

        def wait() -> None:
            with suppress(dist.DistBackendError):
                dist.all_reduce(torch.ones(3))
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        while not groups.reported_errors():  # the other process is ending
            time.sleep(0.01)
        assert groups.reported_errors() == ["0"]
        assert not ended.wait(0.5), "a real kernel waits for ever"
        groups.abandon("a drill")
        assert ended.wait() and groups.drain(5.0).quiet

    run_ranks(2, body, allowed={1: 9})


# -- nccl2: a Work has a bare pointer to its backend ----------------------------------------------


def test_a_work_that_has_ended_may_be_asked_when_its_backend_is_gone() -> None:
    """A script that keeps the handle of a step that is complete."""

    def body(rank: int, size: int, store: Any) -> None:
        _, made = _start(rank, size, store)
        work = dist.all_reduce(t := torch.full((3,), rank + 1.0), async_op=True)
        assert work is not None
        work.wait()
        groups.abandon("a drill")
        _again(store, 1)
        _sum(rank, size)
        del made[:]
        assert native_build.native().wait_buried(datetime.timedelta(seconds=20))
        assert work.is_completed() and work.is_success() and work.wait() and _told(work) is None
        assert work.get_future().done()
        assert t.tolist() == [3.0] * 3

    run_ranks(2, body)


# -- row 30: new communicators are made while the old ones are aborted ----------------------------


def _attach_beside_aborts(store: Any, generation: int) -> tuple[float, float]:
    """Seconds from an abandonment until its operations have let go, and until the groups are attached again."""
    groups.abandon("a drill")
    began = time.monotonic()
    assert groups.drain(5.0, aborts=not groups.may_connect_beside_aborts()).quiet
    drained_s = time.monotonic() - began
    groups.detach_all()
    _attach(store, generation)
    return drained_s, time.monotonic() - began


def test_communicators_are_made_while_others_are_aborted() -> None:
    """ncclCommAbort waits for a thread that looks every 0.5 s. The fake ends a process that launches something before
    all aborts have returned: the memory that they free and a kernel that waits for a peer may block each other."""

    def body(rank: int, size: int, store: Any) -> None:
        _start(rank, size, store, FAKE_NCCL_ABORT_MS="2000")
        for generation in (1, 2):
            _sum(rank, size)
            drained_s, attached_s = _attach_beside_aborts(store, generation)
            assert drained_s < 1.5 and attached_s >= 2.0, (drained_s, attached_s)
        _sum(rank, size)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("variable", "value"), [("FAKE_NCCL_FREE_MIB", "100"), ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "1")]
)
def test_without_room_or_with_registered_tensors_the_aborts_come_first(variable: str, value: str) -> None:
    def body(rank: int, size: int, store: Any) -> None:
        _start(rank, size, store, FAKE_NCCL_ABORT_MS="500", **{variable: value})
        _sum(rank, size)
        drained_s, _ = _attach_beside_aborts(store, 1)
        assert drained_s >= 0.4
        _sum(rank, size)

    run_ranks(2, body)


def test_an_abort_that_does_not_return_is_named() -> None:
    """By the attach, and then by the next stop, which is how such a process comes to be replaced."""

    def body(rank: int, size: int, store: Any) -> None:
        _start(rank, size, store, FAKE_NCCL_ABORT_MS="4000")
        _sum(rank, size)
        groups.abandon("a drill")
        assert groups.drain(5.0, aborts=False).quiet
        groups.detach_all()
        with pytest.raises(RegroupError, match="the aborts of 0 have not returned"):
            groups.attach(store, 1, 1.0)
        groups.abandon("another drill")
        assert "0" in groups.drain(0.1).stuck_aborts
        assert groups.drain(20.0).quiet
        assert groups.stuck_aborts() == ()

    run_ranks(2, body)


def test_communicators_that_were_made_in_vain_are_aborted_before_anything_is_launched() -> None:
    """A rank dies while the others wait for their aborts: what was made meanwhile is given up."""

    def body(rank: int, size: int, store: Any) -> None:
        _start(rank, size, store, FAKE_NCCL_ABORT_MS="1500")
        _sum(rank, size)
        groups.abandon("a drill")
        assert groups.drain(5.0, aborts=False).quiet
        groups.detach_all()
        threading.Timer(1.0, groups.abandon, ["another one"]).start()
        began = time.monotonic()
        with pytest.raises(RegroupError):
            groups.attach(store, 1, 30.0)
        gave_up_s = time.monotonic() - began
        assert gave_up_s < 1.4, "a newer recovery waits for the aborts of an older one"
        assert groups.drain(5.0, aborts=False).quiet
        groups.detach_all()
        _attach(store, 2)
        assert time.monotonic() - began >= gave_up_s + 1.4
        _sum(rank, size)

    run_ranks(2, body)


# -- row 31: a rank has come to what its device has come to ---------------------------------------


def test_what_a_device_has_not_come_to_is_only_launched() -> None:
    """A kernel of rank 0 keeps its device; both hosts have launched the same."""

    def body(rank: int, size: int, store: Any) -> None:
        module, _ = _start(rank, size, store)
        _sum(rank, size)
        world = groups.groups()[0]
        before = world.progress
        assert before.ahead == 0 and before.collectives > 0
        if rank == 0:
            module.launch_kernel(3.0)
        works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]
        time.sleep(0.5)
        report = hang_report(rank, threading.main_thread())
        told = report.groups[0]
        (newest,) = (operation for operation in report.operations if operation.group == told.group)
        come = 0 if rank == 0 else 2
        assert (told.collectives, told.ahead) == (before.collectives + come, 2 - come)
        assert newest.number == told.collectives - 1 and not newest.certain
        for work in works:
            work.wait()
        assert world.progress.collectives == before.collectives + 2

    run_ranks(2, body)


# -- 32: how long a device computes in a step, and how long it waits ---------------------------------


def _begin_to_measure() -> None:
    """After some steps that are not."""
    module = native_build.native()
    for _ in range(10):
        assert module.device_committed() == 0
        if module.device_measures():
            return
    raise AssertionError("no step is measured")


def _own_s(step: Callable[[], object]) -> float:
    """Own work of the device in a step, in seconds; 0: nothing is said of it."""
    module = native_build.native()
    _begin_to_measure()
    step()
    assert module.device_committed() == 0 and not module.device_measures()
    own_ns = module.device_committed()
    while own_ns == 0 and not module.device_measures():  # its events have yet to come, or there are none
        time.sleep(0.01)
        own_ns = module.device_committed()
    module.device_restart()
    return float(own_ns) / 1e9


def _of_a_future() -> None:
    dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()


def _at_the_end_of_backward() -> None:
    """As DDP waits."""
    work = dist.all_reduce(torch.ones(3), async_op=True)
    native_build.native().backward_ended()
    work.get_future().wait()
    native_build.native().gradients_whole()


def _in_a_section() -> None:
    with _section():
        dist.all_reduce(torch.ones(3))


def _on_another_stream(module: Any) -> None:
    with fake_nccl.FakeStream(module).current():
        dist.all_reduce(torch.ones(3))
    module.synchronize()


def test_a_slow_device_is_told_from_one_that_waits_for_it() -> None:
    """Rank 0 has a kernel of 0.6 s in each step, and no host waits for it. What holds up the other one is known."""

    def body(rank: int, size: int, store: Any) -> None:
        module, _ = _start(rank, size, store)
        assert groups.device_own_ns() is None, "no NCCL has been used"
        _sum(rank, size)
        waits: tuple[Callable[[], object], ...] = (
            lambda: dist.all_reduce(torch.ones(3)),
            lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
            _in_a_section,
            _at_the_end_of_backward,
        )
        for number, wait in enumerate(waits):
            _together(store, f"step {number}", rank, size)

            def step(wait: Callable[[], object] = wait) -> None:
                if rank == 0:
                    module.launch_kernel(0.6)
                wait()
                module.catch_up()

            own_s = _own_s(step)
            assert (own_s > 0.55) if rank == 0 else (0 < own_s < 0.3), (number, own_s)

    run_ranks(2, body)


def test_a_step_with_a_wait_that_is_not_seen_says_nothing() -> None:
    """A future of the script's, and another stream than that which computes."""

    def body(rank: int, size: int, store: Any) -> None:
        module, _ = _start(rank, size, store)
        _sum(rank, size)
        assert _own_s(_of_a_future) == 0
        assert _own_s(lambda: _on_another_stream(module)) == 0
        assert _own_s(lambda: time.sleep(0.05)) >= 0.05

    run_ranks(2, body)


def test_events_that_have_not_come_say_nothing_and_are_not_waited_for() -> None:
    def body(rank: int, size: int, store: Any) -> None:
        module, _ = _start(rank, size, store)
        _sum(rank, size)
        native = native_build.native()
        _begin_to_measure()
        module.launch_kernel(0.5)
        assert [native.device_committed() for _ in range(20)] == [0] * 20 and not native.device_measures()
        module.synchronize()
        assert native.device_committed() / 1e9 > 0.45
        _begin_to_measure()
        groups.device_restart()
        assert not native.device_measures()

    run_ranks(2, body)
