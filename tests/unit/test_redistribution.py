"""State that is sharded otherwise: several ranks in threads of one process, over a gloo group each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from flashrecovery.contract.shard_layout import LocalBox
from flashrecovery.errors import RestoreError
from flashrecovery.plan.reshard.boxes import NoHolderError, Space
from flashrecovery.plan.reshard.layouts import Placement, Share, chunked, replicated, sharded
from flashrecovery.worker.reshard.redistribution import Change, Moved, redistribute


def in_threads(size: int, work: Callable[[dist.ProcessGroup, int], Moved]) -> list[Moved | Exception]:
    store = dist.HashStore()
    found: list[Moved | Exception] = [RuntimeError("not run")] * size

    def run(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))  # type: ignore[attr-defined]
            found[rank] = work(group, rank)
        except Exception as e:  # noqa: BLE001  # it is the result of that rank
            found[rank] = e

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    return found


WHOLE = {
    "rows": torch.arange(23 * 5, dtype=torch.float32).view(23, 5),
    "half": torch.arange(7 * 3, dtype=torch.float32).view(7, 3).to(torch.bfloat16),
    "one": torch.arange(4, dtype=torch.float64).view(1, 4),
    "number": torch.tensor(3.0),
}


def layout(size: int, places: Sequence[Sequence[int]]) -> dict[str, Placement]:
    """As FSDP2 divides; ``places``: which rank serves each place."""
    found: dict[str, Placement] = {}
    for name, tensor in WHOLE.items():
        shape = tuple(tensor.shape)
        if not shape:
            found[name] = replicated(shape, sorted({rank for ranks in places for rank in ranks}))
        else:
            found[name] = sharded(shape, 0, chunked(shape[0], size), places)
    return found


def boxes_of(placements: Mapping[str, Placement], rank: int, *, content: bool) -> dict[str, list[LocalBox]]:
    found = {}
    for name, placement in placements.items():
        boxes = [share.box for share in placement if rank in share.ranks]
        data = [WHOLE[name][tuple(map(slice, box.low, box.high))].clone() for box in boxes]
        found[name] = [LocalBox(b, d if content else torch.full_like(d, -1)) for b, d in zip(boxes, data, strict=True)]
    return found


SPACES = [Space(name, tuple(t.shape), t.itemsize) for name, t in WHOLE.items()]


@pytest.mark.parametrize("limit", [8, 40, 1 << 20])
@pytest.mark.parametrize(
    ("before", "servers", "after"),
    [
        (4, [(0,), (1,), (1,), (2,)], 3),  # the third one of four has left, and the second one keeps its copies
        (4, [(0,), (0,), (1,), (1,)], 2),
        (2, [(0,), (1,)], 4),  # two come that have nothing
        (4, [(0,), (0,), (0,), (0,)], 1),
    ],
)
def test_everything_comes_to_its_place(before: int, servers: list[tuple[int, ...]], after: int, limit: int) -> None:
    old, new = layout(before, servers), layout(after, [(rank,) for rank in range(after)])
    targets = [boxes_of(new, rank, content=False) for rank in range(after)]

    def work(group: dist.ProcessGroup, rank: int) -> Moved:
        held = boxes_of(old, rank, content=True)
        return redistribute(group, rank, Change(SPACES, old, new), held, targets[rank], limit=limit)

    found = in_threads(after, work)
    assert all(isinstance(moved, Moved) for moved in found), found
    moves = [moved for moved in found if isinstance(moved, Moved)]
    for rank in range(after):
        wanted = boxes_of(new, rank, content=True)
        for name, boxes in targets[rank].items():
            for got, want in zip(boxes, wanted[name], strict=True):
                assert torch.equal(got.data, want.data), (name, rank)
    assert all(moved.received == moved.lacking for moved in moves)
    assert {moved.total for moved in moves} == {sum(moved.received for moved in moves)}


def test_what_is_damaged_on_the_way_is_noticed() -> None:
    old, new = layout(3, [(0,), (1,), (0,)]), layout(2, [(0,), (1,)])
    targets = [boxes_of(new, rank, content=False) for rank in range(2)]

    def work(group: dist.ProcessGroup, rank: int) -> Moved:
        held = boxes_of(old, rank, content=True)
        return redistribute(group, rank, Change(SPACES, old, new), held, targets[rank], corrupt=rank == 1)

    good, bad = in_threads(2, work)
    assert isinstance(good, Moved) and isinstance(bad, RestoreError) and "as it was sent" in str(bad)


def test_what_is_nowhere_is_named() -> None:
    old = layout(3, [(0,), (), (1,)])
    new = layout(2, [(0,), (1,)])

    def work(group: dist.ProcessGroup, rank: int) -> Moved:
        return redistribute(group, rank, Change(SPACES, old, new), {}, boxes_of(new, rank, content=False))

    assert all(isinstance(error, NoHolderError) and "'rows'" in str(error) for error in in_threads(2, work))


def test_a_box_that_its_holder_does_not_have() -> None:
    """The layout says that rank 0 has it."""
    change = Change(SPACES[:1], {"rows": layout(1, [(0,)])["rows"]}, {"rows": layout(1, [(0,)])["rows"]})
    with pytest.raises(RestoreError, match="is not here"):
        redistribute(None, 0, change, {}, boxes_of(change.new, 0, content=False))


def test_memory_that_the_plan_does_not_fill() -> None:
    """More is prepared than the layout says."""
    half = (Share(sharded((23, 5), 0, [(0, 11)], [(0,)])[0].box, (0,)),)
    whole = {"rows": layout(1, [(0,)])["rows"]}
    into = boxes_of(whole, 0, content=False)
    with pytest.raises(RestoreError, match="55 elements have come, and 115 are needed"):
        redistribute(None, 0, Change(SPACES[:1], whole, {"rows": half}), boxes_of(whole, 0, content=True), into)
