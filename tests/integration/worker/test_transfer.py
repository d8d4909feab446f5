"""Shards between real processes: exact bytes, several sources and destinations at once, faults."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.errors import RestoreError
from flashrecovery.runtime import process_memory
from flashrecovery.state.digest import shard_digest
from flashrecovery.state.shard import Shard, ShardSource
from flashrecovery.state.spec import ShardSpec
from flashrecovery.worker.transfer import direct_reads
from flashrecovery.worker.transfer.chunks import DIRECT_BYTES, PACK_BYTES
from flashrecovery.worker.transfer.direct_reads import PIECE
from flashrecovery.worker.transfer.transfer import exchange, within
from tests.support.ranks import die, managed_control_group, results, run_ranks


class DictShard(Shard):
    """A shard in a dictionary; ``strided`` makes room in a transposed, hence non-contiguous, layout."""

    def __init__(self, name: str, content: dict[str, torch.Tensor] | None = None, *, strided: bool = False) -> None:
        self.name = name
        self.holders = (0,)
        self.content = content or {}
        self.extra: dict[str, Any] = {"step": 0}
        self.strided = strided

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.content

    def values(self) -> dict[str, Any]:
        return self.extra

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        self.extra = dict(spec.values)
        self.content = {k: self._room(t.shape, t.dtype) for k, t in spec.tensors.items()}
        return self.content

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.strided and len(shape) == 2:
            return torch.zeros(shape[::-1], dtype=dtype).t()
        return torch.zeros(shape, dtype=dtype)

    def source(self) -> ShardSource:
        return ShardSource(self.name, self.spec(), list(self.tensors().values()))


def content(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "param": torch.randn(300, 70, generator=g).requires_grad_(),
        "strided": torch.randn(64, 48, generator=g).t(),
        "large": torch.randn(DIRECT_BYTES // 4 + 5, generator=g),
        "strided large": torch.randn(1024, 600, generator=g).t(),
        "half": torch.randn(33, generator=g).to(torch.bfloat16),
        "step": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "flags": torch.rand(7, generator=g) > 0.5,
    }


def nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def _two_victims(rank: int, world: int, strided: bool) -> Any:
    """Ranks 0 and 1 restore ranks 2 and 3; both destinations get from both sources; the rank-local state too."""
    group = dist.group.WORLD
    mine = {f"s{i}": DictShard(f"s{i}", content(i) if rank < 2 else None, strided=strided) for i in range(4)}
    mine["big"] = DictShard("big", {"x": torch.arange(PACK_BYTES // 4 + 1000)} if rank == 0 else None, strided=strided)
    names = {(0, 2): ["s0", "big"], (1, 2): ["s1"], (0, 3): ["s2", "s0"], (1, 3): ["s3"]}
    outgoing = {d: [mine[n].source() for n in ns] for (s, d), ns in names.items() if s == rank}
    incoming = {s: ns for (s, d), ns in names.items() if d == rank}
    if rank < 2:
        mine["s0"].extra["step"] = 17
    report = exchange(group, outgoing, incoming, mine)
    got = {n for ns in incoming.values() for n in ns}
    for name in got - {"big"}:
        assert equal(mine[name].content, content(int(name[1]))), name
        assert report.received_digests[name] == shard_digest(mine[name].content.values(), mine[name].spec())
    if "big" in got:
        assert torch.equal(mine["big"].content["x"], torch.arange(PACK_BYTES // 4 + 1000))
    if "s0" in got:
        assert mine["s0"].extra == {"step": 17}
    assert set(report.received_digests) == got and not report.mismatched
    lost = sum(nbytes(mine[n].content) for ns in incoming.values() for n in ns)
    sent = sum(nbytes(mine[s.name].content) for ss in outgoing.values() for s in ss)
    assert (report.bytes_received, report.bytes_sent) == (lost, sent)
    return report.sent_digests, report.received_digests


@pytest.mark.parametrize("strided", [False, True])
def test_two_sources_and_two_destinations_at_once(tmp_path: Path, strided: bool) -> None:
    reports = results(run_ranks(_two_victims, 4, tmp_path, strided))
    sent = {**reports[0][0], **reports[1][0]}
    assert {**reports[2][1], **reports[3][1]} == sent


def _corrupted(rank: int, world: int) -> Any:
    group = dist.group.WORLD
    mine = {n: DictShard(n, content(i) if rank < 2 else None) for i, n in enumerate(["a", "b"])}
    first = {2: [mine["a"].source(), mine["b"].source()]} if rank == 0 else {}
    report = exchange(group, first, {0: ["a", "b"]} if rank == 2 else {}, mine, corrupt={"a"})
    wrong = report.mismatched
    if rank == 2:
        assert wrong == ["a"]
        assert not equal(mine["a"].content, content(0)) and equal(mine["b"].content, content(1))
    # The controller would now name the next source.
    again = exchange(group, {2: [mine["a"].source()]} if rank == 1 else {}, {1: ["a"]} if rank == 2 else {}, mine)
    assert not again.mismatched
    return equal(mine["a"].content, content(0))


def test_a_corrupted_shard_is_reported_and_can_be_taken_from_the_next_source(tmp_path: Path) -> None:
    assert results(run_ranks(_corrupted, 3, tmp_path)) == [True] * 3


def _unexpected(rank: int, world: int) -> str:
    shards = {"a": DictShard("a", content(0))}
    try:
        exchange(
            dist.group.WORLD,
            {1: [shards["a"].source()]} if rank == 0 else {},
            {0: ["b"]} if rank == 1 else {},
            shards,
        )
    except Exception as e:  # noqa: BLE001 - its type is the result
        return type(e).__name__
    return "none"


def test_other_shards_than_expected_are_an_error(tmp_path: Path) -> None:
    # The sender may end well or see its peer leave: its large tensors were never received.
    assert run_ranks(_unexpected, 2, tmp_path)[1].value == "ProtocolError"


def _slowly(pause_s: float, begun: Path | None = None, over: Callable[[int], bool] = lambda _: True) -> None:
    """Every read of this process takes as long. ``begun`` is made when there has been one of a piece, after which there
    is no other one until ``over`` (of the source's pid)."""
    real = process_memory.read

    def read(pid: int, ranges: Any) -> None:
        real(pid, ranges)
        time.sleep(pause_s)
        if begun is not None and len(ranges) == 1:
            begun.touch()
            while not over(pid):
                time.sleep(0.005)

    process_memory.read = read


def _held(rank: int, world: int) -> int:
    """The source overwrites everything as soon as its exchange is over; its destination reads slowly."""
    large = torch.arange(5 * PIECE // 4 + 1000, dtype=torch.int32)
    shards = {"big": DictShard("big", {"x": large} if rank == 0 else None)}
    shards |= {f"s{i}": DictShard(f"s{i}", content(i) if rank == 0 else None) for i in range(3)}
    if rank == 1:
        _slowly(0.02)
    outgoing = {1: [shard.source() for shard in shards.values()]} if rank == 0 else {}
    report = exchange(dist.group.WORLD, outgoing, {0: list(shards)} if rank == 1 else {}, shards)
    for shard in shards.values():
        for tensor in shard.content.values():
            if rank == 0:
                tensor.detach().zero_()
    if rank == 1:
        assert not report.mismatched
        assert torch.equal(shards["big"].content["x"], large)
        assert all(equal(shards[f"s{i}"].content, content(i)) for i in range(3))
    return report.bytes_read


def test_a_source_is_read_directly_and_holds_its_memory_meanwhile(tmp_path: Path) -> None:
    _, read = results(run_ranks(_held, 2, tmp_path))
    strided = sum(nbytes({k: t for k, t in content(0).items() if not t.is_contiguous()}) for _ in range(3))
    assert read == 5 * PIECE + 4000 + 3 * nbytes(content(0)) - strided


def _another_user(rank: int, world: int) -> Any:
    shard = DictShard("s0", content(0) if rank == 0 else None)
    if rank == 1:
        os.setuid(65534)
    outgoing = {1: [shard.source()]} if rank == 0 else {}
    report = exchange(dist.group.WORLD, outgoing, {0: ["s0"]} if rank == 1 else {}, {"s0": shard})
    return report.bytes_read, report.mismatched, equal(shard.content, content(0))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_a_source_of_another_user_sends(tmp_path: Path) -> None:
    assert results(run_ranks(_another_user, 2, tmp_path))[1] == (0, [], True)


def _unreadable(rank: int, world: int, code: int) -> Any:
    """Its memory had looked readable."""
    shard = DictShard("big", {"x": torch.arange(PIECE // 2)} if rank == 0 else None)
    real = process_memory.read

    def read(pid: int, ranges: Any) -> None:
        if len(ranges) == 1:  # not the first look
            raise OSError(code, "not any more")
        real(pid, ranges)

    process_memory.read = read
    try:
        outgoing = {1: [shard.source()]} if rank == 0 else {}
        exchange(dist.group.WORLD, outgoing, {0: ["big"]} if rank == 1 else {}, {"big": shard})
    except (RuntimeError, RestoreError) as e:
        return type(e).__name__, direct_reads.refused()
    return "none"


@pytest.mark.parametrize(("code", "error"), [(errno.EFAULT, "RestoreError"), (errno.ESRCH, "DistBackendError")])
def test_a_source_that_cannot_be_read_any_more_raises(tmp_path: Path, code: int, error: str) -> None:
    outcome = run_ranks(_unreadable, 2, tmp_path, code)[1].value
    assert outcome == (error, code == errno.EFAULT)


def _killed_while_read(rank: int, world: int, folder: Path, victim: int) -> Any:
    """One of the two dies when some of the pieces have been read."""
    shard = DictShard("big", {"x": torch.ones(12 * PIECE, dtype=torch.uint8)} if rank == 0 else None)
    began, begun = time.monotonic(), folder / "begun"

    def die_then() -> None:
        while not begun.exists():
            time.sleep(0.005)
        die()

    if rank == 1:
        _slowly(0.05, begun, lambda source: victim == 0 and not psutil.pid_exists(source))
    if rank == victim:
        threading.Thread(target=die_then, daemon=True).start()
    try:
        exchange(
            dist.group.WORLD,
            {1: [shard.source()]} if rank == 0 else {},
            {0: ["big"]} if rank == 1 else {},
            {"big": shard},
        )
    except RuntimeError as e:
        assert time.monotonic() - began < 20
        assert "flashrecovery-transfer" not in {t.name for t in threading.enumerate()}
        return type(e).__name__
    return "none"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_memory_is_read_raises_at_the_other(tmp_path: Path, victim: int) -> None:
    outcomes = run_ranks(_killed_while_read, 2, tmp_path, tmp_path, victim)
    assert outcomes[victim].signal == 9
    other = outcomes[1 - victim]
    assert other.error is None and other.value not in ("none", None)


def _abandoned_while_read(rank: int, world: int, folder: Path, who: int) -> Any:
    """One of the two gives up while its memory is read, and the source goes on to change it."""
    group = managed_control_group(rank, world, folder)
    shard = DictShard("big", {"x": torch.ones(12 * PIECE, dtype=torch.uint8)} if rank == 0 else None)
    if rank == 1:
        _slowly(0.05, folder / "begun", lambda _: (folder / "given up").exists())

    def abandon() -> None:
        while not (folder / "begun").exists():
            time.sleep(0.005)
        groups.abandon("test")
        (folder / "given up").touch()

    if rank == who:
        threading.Thread(target=abandon, daemon=True).start()
    try:
        with within(10.0):
            exchange(
                group, {1: [shard.source()]} if rank == 0 else {}, {0: ["big"]} if rank == 1 else {}, {"big": shard}
            )
        return "none"
    except (RuntimeError, RestoreError) as e:
        found = type(e).__name__
    if rank == 1:
        before = shard.content["x"].clone()
        time.sleep(0.3)
        assert torch.equal(shard.content["x"], before)  # nothing writes any more
    else:
        shard.content["x"].zero_()
        while who == 1 and not (folder / "over").exists():
            time.sleep(0.01)
    (folder / "over").touch()
    assert "flashrecovery-transfer" not in {t.name for t in threading.enumerate()}
    return found


@pytest.mark.parametrize("who", [0, 1])
def test_an_exchange_that_is_abandoned_while_memory_is_read_raises(tmp_path: Path, who: int) -> None:
    """What has been read of a source that goes on is never taken for whole."""
    groups.build()
    outcomes = results(run_ranks(_abandoned_while_read, 2, tmp_path, tmp_path, who, group=False))
    assert outcomes[who] == "DistBackendError" and "none" not in outcomes


def _source_dies(rank: int, world: int) -> str:
    dist.barrier()  # its end would be an error of a peer's init_process_group
    big = {"x": torch.zeros(8 * PACK_BYTES, dtype=torch.uint8)}
    shard = DictShard("big", big if rank == 0 else None)
    began = time.monotonic()
    if rank == 0:
        threading.Timer(0.02, die).start()
    try:
        for _ in range(100):
            exchange(
                dist.group.WORLD,
                {1: [shard.source()]} if rank == 0 else {},
                {0: ["big"]} if rank == 1 else {},
                {"big": shard},
            )
    except RuntimeError as e:
        assert time.monotonic() - began < 20
        return type(e).__name__
    return "none"


def test_a_dying_source_raises_at_its_destination(tmp_path: Path) -> None:
    outcomes = run_ranks(_source_dies, 2, tmp_path)
    assert outcomes[0].signal == 9
    assert outcomes[1].error is None and outcomes[1].value != "none"


def _abandoned(rank: int, world: int, folder: Path) -> Any:
    """Rank 0 sends half and stops; the control thread of rank 1 gives up in the middle of a large shard."""
    group = managed_control_group(rank, world, folder)
    numel = 6 * PACK_BYTES
    shard = DictShard("big", {"x": torch.ones(numel, dtype=torch.uint8)} if rank == 0 else None)
    if rank == 0:
        slow: Any = _Stuck(shard.content["x"], folder / "over")
        half = ShardSource("big", shard.spec(), [slow])
        try:
            exchange(group, {1: [half]}, {}, {})
        except RuntimeError as e:
            return type(e).__name__
        return "none"

    def abandon() -> None:
        while "x" not in shard.content:  # made when the first message has come
            time.sleep(0.01)
        time.sleep(0.3)
        groups.abandon("test")

    threading.Thread(target=abandon, daemon=True).start()
    try:
        exchange(group, {}, {0: ["big"]}, {"big": shard}, from_memory=False)
    except RuntimeError as e:
        assert groups.is_communication_error(e)
        assert groups.drain(5.0).quiet
        before = shard.content["x"].clone()
        time.sleep(0.3)
        assert torch.equal(shard.content["x"], before)  # nothing writes any more
        assert "flashrecovery-transfer" not in {t.name for t in threading.enumerate()}
        (folder / "over").touch()
        return "abandoned"
    return "none"


def _overdue(rank: int, world: int, folder: Path) -> Any:
    """Rank 0 never sends. Rank 1 does not wait for it for longer than it was asked to."""
    group = managed_control_group(rank, world, folder)
    if rank == 0:
        while not (folder / "over").exists():
            time.sleep(0.01)
        return "silent"
    with within(60.0):
        pass  # what is over in time leaves nothing behind
    try:
        with within(0.5):
            exchange(group, {}, {0: ["big"]}, {"big": DictShard("big")})
    except RestoreError as e:
        return str(e)
    finally:
        (folder / "over").touch()
        assert "flashrecovery-restore-deadline" not in {t.name for t in threading.enumerate() if t.is_alive()}
    return "none"


def test_a_silent_source_is_not_waited_for_longer_than_the_deadline(tmp_path: Path) -> None:
    """The controller waits half as long again: this rank says first that it has not got its shards, so that only the
    source is found to stand still."""
    groups.build()
    outcomes = results(run_ranks(_overdue, 2, tmp_path, tmp_path, group=False))
    assert "more than 0.5 s (timeouts.restore_s)" in outcomes[1]


class _Stuck:
    """A tensor whose sender pauses in the middle: its fourth part comes when ``over`` is there."""

    def __init__(self, tensor: torch.Tensor, over: Path) -> None:
        self.tensor, self.over = tensor, over

    def detach(self) -> _Stuck:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def as_strided(self, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        self.looks = getattr(self, "looks", 0) + 1
        while self.looks >= 4 and not self.over.exists():
            time.sleep(0.01)
        return self.tensor.as_strided(size, stride)


def test_an_abandoned_exchange_raises_and_touches_nothing_afterwards(tmp_path: Path) -> None:
    groups.build()
    outcomes = results(run_ranks(_abandoned, 2, tmp_path, tmp_path, group=False))
    assert outcomes[1] == "abandoned"


def test_nothing_to_do_needs_no_group() -> None:
    report = exchange(None, {}, {}, {})  # type: ignore[arg-type]
    assert (report.bytes_sent, report.bytes_received, report.received_digests) == (0, 0, {})
