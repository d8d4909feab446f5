"""Shards that travel from device to device, with the fake of NCCL: its messages run beside the host, an abort leaves
NaN in what is under way, and a dead peer is not reported."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.errors import DrainError, RestoreError
from flashrecovery.groups import torch_private
from flashrecovery.runtime.nccl_env import LAUNCH_DEFAULTS
from flashrecovery.state import fingerprint
from flashrecovery.state.digest import shard_digest
from flashrecovery.state.shard import Shard, ShardSource
from flashrecovery.state.spec import ShardSpec, TensorSpec
from flashrecovery.worker.control.device_sync import DeviceClock
from flashrecovery.worker.transfer import chunks, device_lanes, transfer
from flashrecovery.worker.transfer.device_lanes import Patience
from flashrecovery.worker.transfer.transfer import TransferReport, exchange, within
from tests.support import fake_nccl
from tests.support.groups_ranks import run_ranks

PACK, DIRECT = 1 << 14, 1 << 11
Content = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    groups.build()  # here, not within a deadline of ranks
    fake_nccl.build()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same in memory that the fake takes for the host's."""
    copy = torch.frombuffer(
        bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()), dtype=torch.uint8
    )
    return copy.view(tensor.dtype).view(tensor.shape)


class DictShard(Shard):
    """In a dictionary. ``room``: makes a tensor for (key, shape, dtype) where it is received."""

    def __init__(self, name: str, content: Content | None, room: Callable[..., torch.Tensor] | None = None) -> None:
        self.name, self.holders, self.content = name, (0,), content or {}
        self.room = room or (lambda key, shape, dtype: torch.zeros(shape, dtype=dtype))

    def tensors(self) -> Content:
        return self.content

    def allocate(self, spec: ShardSpec) -> Content:
        self.content = {k: self.room(k, t.shape, t.dtype) for k, t in spec.tensors.items()}
        return self.content

    def source(self) -> ShardSource:
        return ShardSource(self.name, self.spec(), list(self.content.values()))


def content(seed: int, elements: int = 9000) -> Content:
    """Of unequal sizes, in some of which the rounds of one lane end long before those of another."""
    g = torch.Generator().manual_seed(seed)
    return {
        "param": torch.randn(30, 70, generator=g).requires_grad_(),
        "step": on_host(torch.tensor(float(seed))),
        "strided": torch.randn(64, 48, generator=g).t(),
        "large": torch.randn(elements * (1 + seed), generator=g),
        "empty": torch.empty(0, 3),
        "half": torch.randn(4 * PACK + 33, generator=g).to(torch.bfloat16),
        "flags": torch.rand(7, generator=g) > 0.5,
        "odd": torch.arange(DIRECT + 5, dtype=torch.uint8)[3:],
        "host": on_host(torch.randn(2 * PACK, generator=g)),
    }


def device_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(t.nbytes for key, t in tensors.items() if key not in ("step", "host"))


def equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def room_like(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if key in ("step", "host"):
        return on_host(torch.zeros(shape, dtype=dtype))
    if key == "param":  # strided where it arrives
        return torch.zeros(shape[::-1], dtype=dtype).t()
    return torch.zeros(shape, dtype=dtype)


def start(rank: int, size: int, store: Any) -> tuple[Any, Any, groups.DeviceGroup]:
    """The fake's module, the control group and the devices' one."""
    os.environ.update(LAUNCH_DEFAULTS)
    chunks.PACK_BYTES, chunks.DIRECT_BYTES = PACK, DIRECT
    cut = list(chunks.messages([TensorSpec((3 * PACK,), torch.uint8)]))
    assert len(cut) == 3, "in fewer rounds, nothing would happen in the middle"
    fingerprint.PAGE_WORDS, fingerprint.SMALL_BYTES = 1 << 10, 256
    module = fake_nccl.install()
    groups.install()
    dist.init_process_group(fake_nccl.backend_name(), store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    dist.barrier()
    link = groups.device_group()
    assert link is not None
    return module, groups.control_group(), link


def between(
    rank: int, names: Mapping[tuple[int, int], list[str]], shards: Mapping[str, DictShard], group: Any, **more: Any
) -> TransferReport:
    outgoing = {d: [shards[n].source() for n in ns] for (s, d), ns in names.items() if s == rank}
    incoming = {s: ns for (s, d), ns in names.items() if d == rank}
    return exchange(group, outgoing, incoming, shards, **more)


# -- what arrives ---------------------------------------------------------------------------------


def test_several_sources_and_destinations_at_once() -> None:
    names = {(0, 2): ["s0"], (1, 2): ["s1"], (0, 3): ["s2", "s0"], (1, 3): ["s3", "s1"]}

    def body(rank: int, size: int, store: Any) -> None:
        _, group, link = start(rank, size, store)
        shards = {f"s{i}": DictShard(f"s{i}", content(i) if rank < 2 else None, room_like) for i in range(4)}
        before = groups.operation_count(), [g.progress for g in groups.groups() if not g.request.sparse]
        report = between(rank, names, shards, group, device=link)
        got = [n for (_, d), ns in names.items() if d == rank for n in ns]
        for name in got:
            assert equal(shards[name].content, content(int(name[1]))), name
        assert sorted(report.received_digests) == sorted(got) and not report.mismatched
        assert report.bytes_on_device == sum(device_bytes(shards[n].content) for n in got)
        assert report.bytes_received == sum(t.nbytes for n in got for t in shards[n].content.values())
        sent = [n for (s, _), ns in names.items() if s == rank for n in ns]
        assert report.bytes_sent == sum(t.nbytes for n in sent for t in shards[n].content.values())
        print(sorted({**report.sent_digests, **report.received_digests}.items()))
        after = groups.operation_count(), [g.progress for g in groups.groups() if not g.request.sparse]
        assert before == after, "none of the script's"
        dist.all_reduce(t := torch.ones(3))
        assert t.tolist() == [size] * 3

    texts = run_ranks(4, body)
    digests: dict[str, str] = {}
    for text in texts:
        for name, digest in eval(text.splitlines()[-1]):  # what this test has printed
            assert digests.setdefault(name, digest) == digest


def test_everybody_sends_to_everybody() -> None:
    """No order of rounds makes two ranks wait for each other, however unequal the lanes are."""
    size = 4
    names = {(s, d): [f"{s}{d}"] for s in range(size) for d in range(size) if s != d}

    def body(rank: int, size: int, store: Any) -> None:
        module, group, link = start(rank, size, store)
        shards = {
            f"{s}{d}": DictShard(f"{s}{d}", content((3 * s + d) % 7) if s == rank else None, room_like)
            for s, d in names
        }
        for _ in range(3):
            report = between(rank, names, shards, group, device=link)
            assert not report.mismatched and len(report.received_digests) == size - 1
            assert report.bytes_on_device == sum(
                device_bytes(shards[f"{s}{rank}"].content) for s, d in names if d == rank
            )
        for s, d in names:
            if d == rank:
                assert equal(shards[f"{s}{d}"].content, content((3 * s + d) % 7))
        inner = [g for g in groups.groups() if g.request.kind == "nccl"]
        assert len(inner) == 1 and module.group_depth() == 0

    run_ranks(size, body)


def test_the_host_waits_for_the_device_before_it_touches_what_arrives() -> None:
    """The source is slow: any process that does not wait reads, unpacks or packs over what is under way."""

    def body(rank: int, size: int, store: Any) -> None:
        _, group, link = start(rank, size, store)
        if rank == 0:
            begin = groups.DeviceGroup.start

            def slow(*arguments: Any) -> None:
                time.sleep(0.02)
                begin(*arguments)

            groups.DeviceGroup.start = slow  # type: ignore[method-assign]
        small = {f"t{i}": torch.full((DIRECT // 4 - 1,), float(i)) for i in range(60)}
        shards = {
            "small": DictShard("small", dict(small) if rank == 0 else None),
            "all": DictShard("all", content(2) if rank == 0 else None, room_like),
        }
        report = between(rank, {(0, 1): ["small", "all"]}, shards, group, device=link)
        if rank == 1:
            assert not report.mismatched
            assert equal(shards["small"].content, small) and equal(shards["all"].content, content(2))
            assert report.bytes_on_device == sum(device_bytes(s.content) for s in shards.values())

    run_ranks(2, body)


def test_what_lies_in_host_memory_on_one_side_goes_through_it() -> None:
    """Also where another destination of the same shard has it on its device: a shard has one digest."""

    def body(rank: int, size: int, store: Any) -> None:
        _, group, link = start(rank, size, store)

        def room(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if rank == 2:
                time.sleep(0.3)  # the other destination is not told anything before
            made = torch.zeros(shape, dtype=dtype)
            return on_host(made) if key == "large" and rank == 2 else made

        names = {(0, 1): ["a", "copy"], (0, 2): ["a"]}
        shards = {n: DictShard(n, {k: content(1)[k].detach() for k in ("large", "half")}, room) for n in ("a", "copy")}
        if rank == 0:
            shards["copy"].content = {k: on_host(t) for k, t in shards["copy"].content.items()}
        report = between(rank, names, shards, group, device=link)
        assert not report.mismatched
        if rank == 0:
            assert report.sent_digests["copy"] == shard_digest(shards["copy"].content.values(), shards["copy"].spec())
            return
        assert report.bytes_on_device == content(1)["half"].nbytes
        for name in report.received_digests:
            assert equal(shards[name].content, {k: content(1)[k] for k in ("large", "half")})
        print(report.received_digests["a"])

    texts = run_ranks(3, body)
    assert texts[1].splitlines()[-1] == texts[2].splitlines()[-1]


def test_a_rank_without_the_devices_group_takes_the_hosts_way() -> None:
    def body(rank: int, size: int, store: Any) -> None:
        _, group, link = start(rank, size, store)
        for source_has, dest_has in ((True, False), (False, True), (False, False)):
            has = source_has if rank == 0 else dest_has
            shards = {"a": DictShard("a", content(1) if rank == 0 else None, room_like)}
            report = between(rank, {(0, 1): ["a"]}, shards, group, device=link if has else None)
            assert not report.mismatched and report.bytes_on_device == 0
            assert equal(shards["a"].content, content(1))
            digest = (report.received_digests or report.sent_digests)["a"]
            assert digest == shard_digest(shards["a"].content.values(), shards["a"].spec()), "of all bytes"

    run_ranks(2, body)


def test_a_corrupted_shard_is_reported_and_can_be_taken_from_the_next_source() -> None:
    def body(rank: int, size: int, store: Any) -> None:
        _, group, link = start(rank, size, store)
        shards = {n: DictShard(n, content(i) if rank < 2 else None, room_like) for i, n in enumerate("ab")}
        if rank < 2:  # its first tensor, which is damaged, lies in host memory
            step = {"step": content(2)["step"]}
            shards["c"] = DictShard("c", step | content(2))
        else:
            shards["c"] = DictShard("c", None, room_like)
        corrupt = frozenset("ac") if rank == 2 else frozenset[str]()
        report = between(rank, {(0, 2): ["c", "a", "b"]}, shards, group, device=link, corrupt=corrupt)
        if rank == 2:
            assert report.mismatched == ["c", "a"] and report.bytes_on_device > 0
            assert not equal(shards["a"].content, content(0)) and equal(shards["b"].content, content(1))
            assert shards["c"].content["step"] != 2.0 and torch.equal(shards["c"].content["large"], content(2)["large"])
        again = between(rank, {(1, 2): ["a"]}, shards, group, device=link)
        assert not again.mismatched
        assert equal(shards["a"].content, content(0))

    run_ranks(3, body)


@pytest.mark.parametrize("where", ["first", "last"])
def test_damage_on_the_way_is_seen(where: str) -> None:
    """One bit of what a message brings, wherever it is."""

    def body(rank: int, size: int, store: Any) -> None:
        _, group, link = start(rank, size, store)
        shards = {"a": DictShard("a", content(1) if rank == 0 else None, room_like)}
        if rank == 1:
            take = device_lanes.Lanes._take

            def damaged(self: Any, part: Any) -> None:
                ends = {p.start + p.nbytes for p in part.message.pieces}
                if where == "first" or (where == "last" and 18000 * 4 in ends):
                    part.buffer[-1] ^= 0x80
                take(self, part)

            device_lanes.Lanes._take = damaged  # type: ignore[method-assign]
        report = between(rank, {(0, 1): ["a"]}, shards, group, device=link)
        assert report.mismatched == (["a"] if rank == 1 else [])

    run_ranks(2, body)


# -- what does not --------------------------------------------------------------------------------


def _big(rank: int) -> dict[str, DictShard]:
    return {"big": DictShard("big", {"x": torch.ones(60 * PACK // 4)} if rank == 0 else None)}


def _after_rounds(rounds: int, what: Callable[[], object]) -> None:
    """Before this rank's next round."""
    begin, count = groups.DeviceGroup.start, iter(range(1000))

    def start_round(*arguments: Any) -> None:
        if next(count) == rounds:
            what()
        begin(*arguments)

    groups.DeviceGroup.start = start_round  # type: ignore[method-assign]


def _abandon_after(store: Any, key: str) -> threading.Thread:
    """Beside the caller, soon after someone has set ``key``."""

    def wait() -> None:
        while not store.check([key]):  # not a wait, which would keep the store's one connection
            time.sleep(0.01)
        time.sleep(0.3)
        groups.abandon("a drill")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Also of what is not a number, in any layout."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _ends_quietly(shards: Mapping[str, DictShard]) -> None:
    """Nothing of an exchange goes on, and nothing touches a tensor any more."""
    assert groups.drain(5.0).quiet
    before = [t.clone() for s in shards.values() for t in s.content.values()]
    time.sleep(0.3)
    after = [t for s in shards.values() for t in s.content.values()]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, after, strict=True))
    assert "flashrecovery-transfer" not in {t.name for t in threading.enumerate()}


def test_a_source_that_dies_in_the_middle() -> None:
    def body(rank: int, size: int, store: Any) -> None:
        module, group, link = start(rank, size, store)
        if rank == 0:
            _after_rounds(5, lambda: os._exit(9))
        shards = _big(rank)
        began = time.monotonic()
        with pytest.raises(RestoreError, match="more than 2 s"), within(2.0):
            between(rank, {(0, 1): ["big"]}, shards, group, device=link)
        assert 1.9 < time.monotonic() - began < 20, "NCCL tells no one: only the deadline ends it"
        _ends_quietly(shards)
        assert module.group_depth() == 0

    run_ranks(2, body, allowed={0: 9})


def test_a_source_that_dies_before_anything_of_it_is_known() -> None:
    """What comes from the other one has its lane already, and no lane ever begins."""

    def body(rank: int, size: int, store: Any) -> None:
        _, group, link = start(rank, size, store)
        if rank == 0:
            store.wait(["planned"])
            store.set("dead", "")
            os._exit(9)
        names = {(0, 2): ["s0"], (1, 2): ["s1"]}
        shards = {f"s{i}": DictShard(f"s{i}", content(i) if rank < 2 else None, room_like) for i in range(2)}
        plan = transfer._Exchange._plan

        def planned(*arguments: Any, **more: Any) -> Any:
            lane = plan(*arguments, **more)
            if rank == 2:
                assert lane is not None
                store.set("planned", "")
            return lane

        transfer._Exchange._plan = planned  # type: ignore[method-assign]
        _abandon_after(store, "dead")
        with pytest.raises(dist.DistBackendError):
            between(rank, names, shards, group, device=link)
        _ends_quietly(shards)

    run_ranks(3, body, allowed={0: 9})


def test_a_destination_that_dies_in_the_middle() -> None:
    def body(rank: int, size: int, store: Any) -> None:
        _, group, link = start(rank, size, store)

        def die() -> None:
            store.set("dead", "")
            os._exit(9)

        shards = _big(rank)
        if rank == 1:
            _after_rounds(5, die)
        else:
            _abandon_after(store, "dead")
        with pytest.raises(dist.DistBackendError) as raised:
            between(rank, {(0, 1): ["big"]}, shards, group, device=link)
        assert groups.is_communication_error(raised.value)
        _ends_quietly(shards)

    run_ranks(2, body, allowed={1: 9})


def test_an_abort_in_the_middle_never_gives_a_digest_that_agrees() -> None:
    """Both sides are aborted at some moment. Whatever has arrived then, no report comes of it; and the same exchange
    goes well in the next generation."""

    def body(rank: int, size: int, store: Any) -> None:
        _, group, link = start(rank, size, store)
        for generation in range(1, 7):
            shards, before = _big(rank), groups.abandonment_count()

            def hold(generation: int = generation, before: int = before) -> None:
                store.set(f"in the middle of {generation}", "")
                while groups.abandonment_count() == before:
                    time.sleep(0.01)

            if rank == 0:
                _after_rounds(10 * generation - 9, hold)
            told = _abandon_after(store, f"in the middle of {generation}")
            with pytest.raises(dist.DistBackendError):
                between(rank, {(0, 1): ["big"]}, shards, group, device=link)
            told.join()
            groups.DeviceGroup.start = begin  # type: ignore[method-assign]
            _ends_quietly(shards)
            groups.detach_all()
            assert groups.device_group() is None
            groups.attach(store, generation, 20.0)
            again = groups.device_group()
            assert again is not None
            link, group = again, groups.control_group()
            report = between(rank, {(0, 1): ["big"]}, shards, group, device=link)
            assert not report.mismatched
            if rank == 1:
                assert report.bytes_on_device == 60 * PACK and shards["big"].content["x"].sum() == 15 * PACK
            dist.barrier()  # a rank that has sent abandons its groups no sooner than they have been received

    begin = groups.DeviceGroup.start
    run_ranks(2, body, deadline_s=120)


def test_a_device_that_hangs_is_not_waited_for_once_communication_is_abandoned() -> None:
    """Also if the abort does not free it: such a process is replaced, and has to say so."""

    class Mark:
        def done(self) -> bool:
            return False

    def body(rank: int, size: int, store: Any) -> None:
        patience = Patience()
        threading.Timer(0.3, lambda: groups.abandon("a drill")).start()
        with pytest.raises(dist.DistBackendError, match="a drill"):
            patience.wait(Mark())

    run_ranks(1, body, deadline_s=20)


def test_the_torn_end_of_an_abort_is_not_taken_for_an_arrival() -> None:
    """The device comes to the mark because of the abort alone."""

    class Mark:
        def done(self) -> bool:
            groups.abandon("a drill")
            return True

    def body(rank: int, size: int, store: Any) -> None:
        with pytest.raises(dist.DistBackendError, match="a drill"):
            Patience().wait(Mark())

    run_ranks(1, body)


def test_a_device_that_fails_in_the_middle_ends_it_with_its_own_error() -> None:
    """No error of communication, which would be tried again: this process cannot go on, and is replaced."""

    def body(rank: int, size: int, store: Any) -> None:
        module, group, link = start(rank, size, store)
        if rank == 1:
            _after_rounds(5, module.fail_kernels)
        else:
            _abandon_after(store, "lost")
        with pytest.raises(RuntimeError) as raised:
            between(rank, {(0, 1): ["big"]}, _big(rank), group, device=link)
        assert groups.is_communication_error(raised.value) == (rank == 0)
        if rank == 1:
            store.set("lost", "")
            with pytest.raises(DrainError, match="cannot go on: CUDA error"):
                DeviceClock().settle(5.0)

    run_ranks(2, body)


def test_nobody_waits_longer_than_for_the_abandonment() -> None:
    """An abort may be held up, or the device may hang in it."""

    class Never:
        def done(self) -> bool:
            return False

    def body(rank: int, size: int, store: Any) -> None:
        patience = Patience()
        threading.Timer(0.2, lambda: groups.abandon("a drill")).start()
        with pytest.raises(dist.DistBackendError, match="a drill"):
            patience.wait(Never())

    run_ranks(1, body)


def test_what_is_just_being_abandoned_is_not_quiet() -> None:
    """Any process that polls knows of an abandonment before it has come to every group."""

    def body(rank: int, size: int, store: Any) -> None:
        start(rank, size, store)
        outer = groups.ManagedGroup.outer

        def slow(self: groups.ManagedGroup) -> Any:
            if threading.current_thread() is control:
                time.sleep(0.3)
            return outer(self)

        groups.ManagedGroup.outer = slow  # type: ignore[method-assign]
        control = threading.Thread(target=lambda: groups.abandon("a drill"))
        control.start()
        while groups.abandonment_count() == 0:
            time.sleep(0.001)
        assert groups.drain(5.0).quiet
        with pytest.raises(dist.DistBackendError, match="a drill"):
            dist.barrier()
        assert not groups.groups()[0].detached and len(groups.groups()) == 2

    run_ranks(2, body)


@pytest.mark.parametrize(("error", "ends"), [(ValueError("misuse"), 1), (dist.DistBackendError("abandoned"), 0)])
def test_no_section_stays_open(error: Exception, ends: int) -> None:
    """What is no failure of communication ends it here; of the others our backend has ended it, and not twice."""

    class Group:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def _start_coalescing(self, device: torch.device) -> None:
            self.calls.append("start")

        def _end_coalescing(self, device: torch.device) -> None:
            self.calls.append("end")

        def send(self, *message: Any) -> None:
            raise error

    group = Group()
    with pytest.raises(type(error)):
        torch_private.send_and_receive(group, torch.device("cpu"), [(torch.ones(1), 1)], [])
    assert group.calls == ["start"] + ["end"] * ends


def test_stand_ins_do_not_answer_it() -> None:
    def body(rank: int, size: int, store: Any) -> None:
        _, group, link = start(rank, size, store)
        groups.stand_in(True)
        shards = _big(rank)
        report = between(rank, {(0, 1): ["big"]}, shards, group, device=link)
        assert not report.mismatched and groups.stand_in_count() == 0
        assert shards["big"].content["x"].sum() == 15 * PACK
        dist.all_reduce(t := torch.ones(3))
        assert t.tolist() == [1.0] * 3 and groups.stand_in_count() == 1, "they do answer the script"

    run_ranks(2, body)


def test_a_job_on_hosts_has_no_devices_group() -> None:
    def body(rank: int, size: int, store: Any) -> None:
        groups.install()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        assert groups.device_group() is None

    run_ranks(2, body)
