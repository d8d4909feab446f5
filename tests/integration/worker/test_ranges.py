"""Shards in ranges from several real processes at once: exact bytes, holders that differ, deaths in the middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.worker.transfer import ranges
from flashrecovery.worker.transfer.ranges import RangesToReceive, RangesToSend
from flashrecovery.worker.transfer.transfer import exchange
from tests.integration.worker.test_transfer import DictShard, content, equal, nbytes
from tests.support.ranks import die, managed_control_group, results, run_ranks

LARGE = 24 << 20


def _shards(*, held: bool, strided: bool = False) -> dict[str, DictShard]:
    made = {f"s{i}": DictShard(f"s{i}", content(i) if held else None, strided=strided) for i in range(3)}
    x = torch.arange(LARGE // 4, dtype=torch.int32)
    made["large"] = DictShard("large", {"x": x} if held else None, strided=strided)
    table = torch.arange(LARGE // 4, dtype=torch.int32).view(1024, -1)
    made["table"] = DictShard("table", {"x": table.t() if strided else table} if held else None, strided=strided)
    return made


def _take_part(
    group: dist.ProcessGroup, rank: int, shards: dict[str, DictShard], holders: Sequence[int], dests: Sequence[int]
) -> Any:
    names = sorted(shards)
    out = [RangesToSend(dest, 0, [shards[name].source() for name in names]) for dest in dests if rank in holders]
    into = [RangesToReceive(holders, 0, names)] if rank in dests else []
    return exchange(group, {}, {}, shards, ranges_out=out, ranges_in=into)


def _all_alike(rank: int, world: int, folder: Path, holders: int, strided: bool) -> Any:
    """Some ranks hold everything, and the others get it, at the same time."""
    group = managed_control_group(rank, world, folder)
    shards = _shards(held=rank < holders, strided=strided)
    report = _take_part(group, rank, shards, range(holders), range(holders, world))
    wanted = _shards(held=True, strided=strided)
    assert all(equal(shards[name].content, wanted[name].content) for name in wanted)
    assert not report.mismatched
    whole = sum(nbytes(shard.content) for shard in wanted.values())
    assert report.bytes_received == (whole if rank >= holders else 0)
    return report.bytes_sent, whole, report.sent_digests or report.received_digests


@pytest.mark.parametrize(("holders", "world", "strided"), [(2, 3, False), (2, 3, True), (1, 2, False), (2, 4, False)])
def test_every_byte_comes_once_from_one_of_the_holders(tmp_path: Path, holders: int, world: int, strided: bool) -> None:
    groups.build()
    found = results(run_ranks(_all_alike, world, tmp_path, tmp_path, holders, strided, group=False))
    sent = [count for count, _, _ in found[:holders]]
    assert sum(sent) == (world - holders) * found[0][1] and all(sent)
    assert len({str(sorted(digests.items())) for *_, digests in found}) == 1


def _one_differs(rank: int, world: int, folder: Path, how: str) -> Any:
    group = managed_control_group(rank, world, folder)
    shards = _shards(held=rank < 2)
    if rank == 1:
        if how == "bits":
            shards["large"].content["x"][-1] += 1
        else:
            shards["s1"].extra["step"] = 1
    report = _take_part(group, rank, shards, (0, 1), (2,))
    return sorted(report.mismatched), report.bytes_sent


@pytest.mark.parametrize(("how", "shard"), [("bits", "large"), ("values", "s1")])
def test_ranks_that_do_not_have_the_same_are_found(tmp_path: Path, how: str, shard: str) -> None:
    groups.build()
    found = results(run_ranks(_one_differs, 3, tmp_path, tmp_path, how, group=False))
    assert shard in found[2][0]
    if how == "values":
        assert 0 in (found[0][1], found[1][1]), "what is not the same is not mixed"


def _damaged(rank: int, world: int, folder: Path) -> Any:
    group = managed_control_group(rank, world, folder)
    shards = _shards(held=rank < 2)
    names = sorted(shards)
    out = [RangesToSend(2, 0, [shards[name].source() for name in names])] if rank < 2 else []
    into = [RangesToReceive((0, 1), 0, names)] if rank == 2 else []
    return exchange(group, {}, {}, shards, corrupt={"s2"}, ranges_out=out, ranges_in=into).mismatched


def test_a_bit_that_is_flipped_on_the_way_is_found(tmp_path: Path) -> None:
    groups.build()
    assert results(run_ranks(_damaged, 3, tmp_path, tmp_path, group=False)) == [[], [], ["s2"]]


def _slowly(pause_s: float) -> None:
    """The destination asks late for each range."""
    take = ranges.Ranges.take

    def late(self: ranges.Ranges, holder: int, *, wait: bool) -> int | None:
        time.sleep(pause_s)
        return take(self, holder, wait=wait)

    ranges.Ranges.take = late  # type: ignore[method-assign]


def _one_dies(rank: int, world: int, folder: Path, victim: int) -> Any:
    """In the middle. The others do not wait for it, and leave nothing behind that writes.

    They are told of it a moment later, as by a controller: gloo leaves an operation waiting that begins between a
    connection's end and its being noticed.
    """
    group = managed_control_group(rank, world, folder)
    shards = _shards(held=rank < 2)
    if rank == 2:
        _slowly(0.05)
    if rank == victim:
        threading.Timer(0.4, die).start()
    else:
        threading.Timer(1.5, lambda: groups.abandon("test")).start()
    began = time.monotonic()
    try:
        _take_part(group, rank, shards, (0, 1), (2,))
    except RuntimeError as e:
        assert groups.is_communication_error(e), e
        assert time.monotonic() - began < 20
        assert "flashrecovery-transfer" not in {t.name for t in threading.enumerate()}
        return "raised"
    return "done"


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_of_them_dies_in_the_middle(tmp_path: Path, victim: int) -> None:
    groups.build()
    outcomes = run_ranks(_one_dies, 3, tmp_path, tmp_path, victim, group=False)
    assert outcomes[victim].signal == 9
    found = [outcome.value for place, outcome in enumerate(outcomes) if place != victim]
    assert "raised" in found and (victim == 2 or outcomes[2].value == "raised"), outcomes


def _given_up(rank: int, world: int, folder: Path) -> Any:
    """The control thread of the destination gives up while ranges come; those of the holders do a moment later."""
    group = managed_control_group(rank, world, folder)
    shards = _shards(held=rank < 2)
    if rank == 2:
        _slowly(0.05)
    threading.Timer(0.4 if rank == 2 else 1.5, lambda: groups.abandon("test")).start()
    try:
        _take_part(group, rank, shards, (0, 1), (2,))
    except RuntimeError as e:
        assert groups.is_communication_error(e), e
        if rank == 2:
            assert groups.drain(5.0).quiet
            before = [t.clone() for shard in shards.values() for t in shard.content.values()]
            time.sleep(0.3)
            after = [t for shard in shards.values() for t in shard.content.values()]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return "raised"
    return "done"


def test_ranges_that_are_given_up_touch_nothing_afterwards(tmp_path: Path) -> None:
    groups.build()
    assert results(run_ranks(_given_up, 3, tmp_path, tmp_path, group=False)) == ["raised"] * 3


def _something_else(rank: int, world: int, folder: Path) -> str:
    group = managed_control_group(rank, world, folder)
    shards = _shards(held=rank == 0)
    if rank == 0:  # is asked for nothing, until the controller begins again

        def stop() -> None:
            while not (folder / "over").exists():
                time.sleep(0.01)
            groups.abandon("test")

        threading.Thread(target=stop, daemon=True).start()
    try:
        exchange(
            group,
            {},
            {},
            shards,
            ranges_out=[RangesToSend(1, 0, [shards["s0"].source()])] if rank == 0 else [],
            ranges_in=[RangesToReceive((0,), 0, ["s1"])] if rank == 1 else [],
        )
    except Exception as e:  # noqa: BLE001 - its type is the result
        return type(e).__name__
    finally:
        (folder / "over").touch()
    return "none"


def test_other_shards_than_expected_are_an_error(tmp_path: Path) -> None:
    groups.build()
    assert run_ranks(_something_else, 2, tmp_path, tmp_path, group=False)[1].value == "ProtocolError"
