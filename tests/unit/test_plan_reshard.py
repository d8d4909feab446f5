"""From any layout to any other: the messages are applied to arrays, and compared with cutting the layout directly."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecovery.plan.reshard.boxes import Box, NoHolderError, Space, chunks, flat_boxes, left_of, part_with
from flashrecovery.plan.reshard.layouts import (
    Placement,
    RankGrid,
    RankLayout,
    Section,
    Share,
    chunked,
    end_to_end,
    even,
    flat_partitions,
    fused,
    padded,
    replicated,
    sharded,
    together,
)
from flashrecovery.plan.reshard.overlay import Boxes, meeting
from flashrecovery.plan.reshard.plan import Portion, Reshard, plan_reshard
from flashrecovery.plan.reshard.schedule import timetable

RANKS = 6


# -- layouts ---------------------------------------------------------------------------------------


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(e[0] for e in ends), tuple(e[1] for e in ends))


@st.composite
def partitions(draw: st.DrawFn, box: Box, depth: int = 3) -> list[Box]:
    """The box cut at random, again and again."""
    if depth == 0 or not box.low or draw(st.booleans()):
        return [box]
    dim = draw(st.integers(0, len(box.low) - 1))
    at = draw(st.integers(box.low[dim], box.high[dim]))
    found = []
    for start, stop in ((box.low[dim], at), (at, box.high[dim])):
        found += draw(partitions(box.narrowed(dim, start, stop), depth - 1))
    return found


@st.composite
def placements(draw: st.DrawFn, shape: tuple[int, ...], ranks: int = RANKS) -> Placement:
    """Each kind of layout, and random ones; every element is on some rank, and no rank has one twice."""
    kind = draw(st.sampled_from(["replicated", "sharded", "flat", "random", "fused"]))
    some = draw(st.lists(st.integers(0, ranks - 1), min_size=1, unique=True))
    parts = draw(st.sampled_from([n for n in range(1, len(some) + 1) if len(some) % n == 0]))
    groups = [tuple(some[i::parts]) for i in range(parts)]
    if kind == "sharded" and shape:
        dim = draw(st.integers(0, len(shape) - 1))
        return sharded(shape, dim, chunked(shape[dim], parts), groups)
    if kind == "flat":
        segments, end = end_to_end([("t", Box.whole(shape))], 1)
        return tuple(flat_partitions(segments, padded(end, parts, draw(st.integers(1, 3))), groups).get("t", ()))
    if kind == "fused" and shape and shape[0] and shape[0] % (2 * parts) == 0:
        return fused(shape, 0, [Section(shape[0] // 2)] * 2, groups)
    if kind == "random":
        return tuple(
            Share(box, tuple(draw(st.lists(st.integers(0, ranks - 1), min_size=1, unique=True))))
            for box in draw(partitions(Box.whole(shape)))
        )
    return replicated(shape, tuple(some))


SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Space], RankLayout, RankLayout]:
    spaces: list[Space] = []
    old: dict[str, Placement] = {}
    new: dict[str, Placement] = {}
    for kind in range(draw(st.integers(1, 3))):
        shape, itemsize = draw(SHAPES), draw(st.sampled_from([1, 2, 4]))
        mine, theirs = draw(placements(shape)), draw(placements(shape))
        for copy in range(draw(st.integers(1, 3))):  # of one class
            spaces.append(Space(f"t{kind}.{copy}", shape, itemsize))
            old[spaces[-1].name], new[spaces[-1].name] = mine, theirs
        if draw(st.booleans()):  # copies for others, cut in another way
            old[spaces[-1].name] = mine + draw(placements(shape))
    return spaces, old, new


def contents(space: Space) -> np.ndarray:
    """Each element of each tensor is another one."""
    base = int.from_bytes(space.name.encode(), "little") % 1_000_003
    return base * 1000 + np.arange(math.prod(space.shape)).reshape(space.shape)


class Memory:
    """What each rank has, box by box."""

    def __init__(self, spaces: list[Space], layout: RankLayout) -> None:
        self.held: dict[tuple[int, str], list[tuple[Box, np.ndarray]]] = defaultdict(list)
        for space in spaces:
            whole = Box.whole(space.shape)
            for part in layout.get(space.name, ()):
                for rank in part.ranks:
                    data = contents(space)[part.box.within(whole)].copy()
                    self.held[rank, space.name].append((part.box, data))

    def read(self, rank: int, tensor: str, box: Box) -> np.ndarray:
        """From one of the boxes, as a sender does it."""
        for outer, data in self.held[rank, tensor]:
            if box - outer == []:
                return data[box.within(outer)]
        raise AssertionError(f"rank {rank} does not have {box} of {tensor}")


def compare(
    spaces: list[Space],
    old: RankLayout,
    new: RankLayout,
    arrived: list[Portion],
    plan: Reshard,
    origin: dict[int, int],
) -> None:
    """Every rank of the new layout has exactly its boxes. ``origin``: the old rank of a new one."""
    memory, by_dest = Memory(spaces, old), defaultdict(list)
    for portion in arrived:
        by_dest[portion.dest, portion.tensor].append(portion)
    for rank in sorted({r for placement in new.values() for part in placement for r in part.ranks}):
        kept = defaultdict(list)
        for tensor, box in plan.kept(rank):
            kept[tensor].append(box)
        for space in spaces:
            whole = Box.whole(space.shape)
            got = np.full(space.shape, -1)
            wanted = np.full(space.shape, -1)
            for part in new[space.name]:
                if rank in part.ranks:
                    wanted[part.box.within(whole)] = contents(space)[part.box.within(whole)]
            times = np.zeros(space.shape, int)
            for box in kept[space.name]:
                got[box.within(whole)] = memory.read(origin[rank], space.name, box)
                times[box.within(whole)] += 1
            for portion in by_dest[rank, space.name]:
                got[portion.box.within(whole)] = memory.read(portion.source, space.name, portion.box)
                times[portion.box.within(whole)] += 1
                assert portion.nbytes == portion.box.size * space.itemsize
            assert (got == wanted).all() and times.max(initial=0) <= 1


def bytes_to_move(spaces: list[Space], old: RankLayout, new: RankLayout, origin: dict[int, int]) -> int:
    """Element by element: what a rank needs and does not have."""
    total = 0
    for space in spaces:
        whole = Box.whole(space.shape)
        for rank in sorted({r for part in new[space.name] for r in part.ranks}):
            lacks = np.zeros(space.shape, bool)
            for part in new[space.name]:
                if rank in part.ranks:
                    lacks[part.box.within(whole)] = True
            for part in old[space.name]:
                if origin.get(rank) in part.ranks:
                    lacks[part.box.within(whole)] = False
            total += int(lacks.sum()) * space.itemsize
    return total


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(4, 40))
def test_every_rank_gets_its_boxes_exactly_once(case: tuple[list[Space], RankLayout, RankLayout], limit: int) -> None:
    spaces, old, new = case
    plan = plan_reshard(spaces, old, new)
    table = timetable(plan, limit)
    origin = {r: r for r in range(RANKS)}
    everything = [line for r in range(RANKS) for line in table.messages(dest=r)]
    compare(spaces, old, new, [portion for _, portion in everything], plan, origin)
    assert plan.moved_bytes == bytes_to_move(spaces, old, new, origin) == sum(p.nbytes for _, p in everything)
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    for number, portion in everything:
        sent[number, portion.source] += portion.nbytes
        received[number, portion.dest] += portion.nbytes
    assert max([0, *sent.values(), *received.values()]) <= limit
    assert {r: int(b) for r, b in enumerate(plan.sent) if b} == dict(
        sum((Counter({p.source: p.nbytes}) for _, p in everything), Counter())
    )


@settings(max_examples=75, deadline=None)
@given(cases(), st.integers(4, 40))
def test_nobody_waits_for_ever_even_if_a_send_blocks(
    case: tuple[list[Space], RankLayout, RankLayout], limit: int
) -> None:
    """Each process does its messages one after the other, and a send ends only when it is received."""
    spaces, old, new = case
    table = timetable(plan_reshard(spaces, old, new), limit)
    queues = {r: [(p.tensor, p.box, p.source, p.dest) for _, p in table.messages(r, r)] for r in range(RANKS)}
    rounds = {r: [number for number, _ in table.messages(r, r)] for r in range(RANKS)}
    assert all(numbers == sorted(numbers) for numbers in rounds.values())
    while any(queues.values()):
        ready = [q[0] for r, q in queues.items() if q and q[0][2] == r and queues[q[0][3]][:1] == [q[0]]]
        assert ready, "everybody waits"
        for line in ready:
            queues[line[2]].pop(0)
            queues[line[3]].pop(0)


@settings(max_examples=200, deadline=None)
@given(cases(), st.sets(st.integers(0, RANKS - 1), min_size=1), st.randoms(use_true_random=False))
def test_survivors_with_new_numbers(
    case: tuple[list[Space], RankLayout, RankLayout], alive: set[int], chance: object
) -> None:
    """Some ranks are gone, the others get any numbers."""
    spaces, old, new = case
    numbers = list(range(RANKS))
    chance.shuffle(numbers)  # type: ignore[attr-defined]
    becomes = dict(zip(sorted(alive), numbers, strict=False))
    origin = {new_rank: old_rank for old_rank, new_rank in becomes.items()}
    lacking = []
    for space in spaces:
        held = [p.box for p in old[space.name] if alive & set(p.ranks)]
        for part in new[space.name]:
            lacking += [(space.name, box) for box in left_of(part.box, held)]
    try:
        plan = plan_reshard(spaces, old, new, alive=alive, becomes=becomes)
    except NoHolderError as e:
        assert lacking
        name, box = e.missing[0]
        assert repr(name) in str(e) and str(box) in str(e)
        held = [p.box for p in old[name] if alive & set(p.ranks)]
        assert all(box & other is None for other in held)
        return
    assert not lacking
    table = timetable(plan, 64)
    everything = [p for r in range(RANKS) for _, p in table.messages(dest=r)]
    assert all(p.source in alive for p in everything)
    compare(spaces, old, new, everything, plan, origin)
    assert plan.moved_bytes == bytes_to_move(spaces, old, new, origin)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_files_are_a_layout_like_any(case: tuple[list[Space], RankLayout, RankLayout]) -> None:
    """A checkpoint's files become no rank's, so everything that is needed is read."""
    spaces, old, new = case
    plan = plan_reshard(spaces, old, new, becomes={})
    assert plan.held_bytes == 0 and plan.moved_bytes == bytes_to_move(spaces, old, new, {})
    table = timetable(plan, 1 << 20)
    everything = [p for r in range(RANKS) for _, p in table.messages(dest=r)]
    compare(spaces, old, new, everything, plan, {})


class Fresh(Mapping[str, Placement]):
    """A layout that makes its placements when it is asked."""

    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout

    def __getitem__(self, name: str) -> Placement:
        return (*self._layout[name],)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)


@pytest.mark.parametrize("columns", [1, 3])
def test_the_part_with_a_box_is_found_whichever_way_it_is_cut(columns: int) -> None:
    """In rows the one before it in order is looked at first; in columns that may be another one."""
    whole, found = Box.whole((12, 9)), []
    for row in range(0, 12, 4):
        for column in range(0, 9, 9 // columns):
            box = whole.narrowed(0, row, row + 4).narrowed(1, column, column + 9 // columns)
            found.append(Share(box, (len(found),)))
    found.sort(key=lambda share: share.box.low)
    for share in found:
        for inner in (share.box, *chunks(share.box, 2)):
            assert part_with(found, inner) is share
    assert part_with(found, whole.narrowed(0, 3, 5)) is None and part_with([], whole) is None


def test_of_thousands_of_parts_not_all_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Share(Box((at,), (at + 3,)), (0,)) for at in range(0, 6000, 3)]
    looked, meet = 0, Box.__and__

    def counted(one: Box, other: Box) -> Box | None:
        nonlocal looked
        looked += 1
        return meet(one, other)

    monkeypatch.setattr(Box, "__and__", counted)
    assert all(part_with(parts, Box((at + 1,), (at + 2,))) is parts[at // 3] for at in range(0, 6000, 3))
    assert looked == len(parts)


def test_placements_may_be_made_on_demand() -> None:
    spaces = [Space(f"t{i}", (6,), 1) for i in range(200)]
    old = {s.name: replicated((6,), (i % 4,)) for i, s in enumerate(spaces)}
    new = {s.name: replicated((6,), ((i + 1) % 4,)) for i, s in enumerate(spaces)}
    table = timetable(plan_reshard(spaces, Fresh(old), Fresh(new)), 64)
    for rank in range(4):
        found = {portion.tensor: portion.source for _, portion in table.messages(dest=rank)}
        assert found == {f"t{i}": i % 4 for i in range(200) if (i + 1) % 4 == rank}


# -- where boxes meet --------------------------------------------------------------------------------


def columns(rows: list[tuple[int, Box]]) -> Boxes:
    return Boxes(
        np.array([group for group, _ in rows], np.int64),
        np.array([box.low for _, box in rows], np.int64).reshape(-1, 2),
        np.array([box.high for _, box in rows], np.int64).reshape(-1, 2),
        np.zeros(len(rows), np.int64),
    )


GROUPED = st.lists(st.tuples(st.integers(0, 2), boxes((30, 30)).filter(lambda b: b.size > 0)), max_size=12)


@settings(max_examples=200, deadline=None)
@given(GROUPED, GROUPED)
def test_all_boxes_that_meet_are_found(old: list[tuple[int, Box]], new: list[tuple[int, Box]]) -> None:
    found = list(zip(*(rows.tolist() for rows in meeting(columns(old), columns(new))), strict=True))
    expected = [(i, j) for j, (g, b) in enumerate(new) for i, (h, a) in enumerate(old) if g == h and a & b]
    assert sorted(found) == sorted(expected) and [j for _, j in found] == sorted(j for _, j in found)


def test_a_long_box_among_short_ones_is_found() -> None:
    old = [(0, Box((0, 0), (10, 1))), (0, Box((1, 1), (2, 2))), (0, Box((3, 1), (4, 2)))]
    i, _ = meeting(columns(old), columns([(0, Box((5, 0), (6, 1)))]))
    assert i.tolist() == [0]


# -- balance ---------------------------------------------------------------------------------------


def test_a_replacement_is_served_by_all_replicas_alike() -> None:
    spaces = [Space(f"layer{i}", (64, 64), 4) for i in range(30)]
    shared = replicated((64, 64), range(4))
    plan = plan_reshard(
        spaces, dict.fromkeys((s.name for s in spaces), shared), {s.name: shared for s in spaces}, alive={0, 1, 3}
    )
    assert plan.moved_bytes == 30 * 64 * 64 * 4
    assert plan.sent.tolist() == [10 * 64 * 64 * 4] * 2 + [0] + [10 * 64 * 64 * 4]


def test_who_alone_can_send_something_sends_less_of_the_rest() -> None:
    """Rank 0 alone has ``own``; ``all`` comes from the others."""
    spaces = [Space("own", (100,), 1)] + [Space(f"all{i}", (10,), 1) for i in range(20)]
    common = replicated((10,), range(3))
    old = {"own": replicated((100,), (0,)), **dict.fromkeys((f"all{i}" for i in range(20)), common)}
    new = {name: replicated((100,) if name == "own" else (10,), (9,)) for name in old}
    plan = plan_reshard(spaces, old, new)
    assert plan.sent[0] == 100 and sorted(plan.sent[1:3].tolist()) == [100, 100]


def test_a_round_is_bounded_also_where_a_deck_is_uneven() -> None:
    """Rank 0 has its own things to send, so rank 1 serves both requests for some tensors, but not for the first."""
    spaces = [Space("own", (40,), 1)] + [Space(f"all{i}", (10,), 1) for i in range(4)]
    common, wanted = replicated((10,), (0, 1)), replicated((10,), (8, 9))
    old = {s.name: common for s in spaces} | {"own": replicated((40,), (0,))}
    new = {s.name: wanted for s in spaces} | {"own": replicated((40,), (9,))}
    table = timetable(plan_reshard(spaces, old, new), 10)
    sent: Counter[tuple[int, int]] = Counter()
    for dest in (8, 9):
        for number, portion in table.messages(dest=dest):
            sent[number, portion.source] += portion.nbytes
    assert max(sent.values()) <= 10


@settings(max_examples=75, deadline=None)
@given(st.integers(1, 7), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=6))
def test_equal_replicas_send_equally_within_a_piece_of_each_size(replicas: int, kinds: list[tuple[int, int]]) -> None:
    spaces = [Space(f"{k}.{i}", (size,), 8) for k, (size, count) in enumerate(kinds) for i in range(count)]
    old = {s.name: replicated(s.shape, range(replicas)) for s in spaces}
    new = {s.name: replicated(s.shape, (replicas,)) for s in spaces}
    plan = plan_reshard(spaces, old, new)
    assert plan.sent.max() - plan.sent.min() <= 8 * sum({size for size, _ in kinds})


# -- what is missing or wrong ------------------------------------------------------------------------


def test_the_error_names_the_tensor_and_the_box() -> None:
    space = Space("decoder.mlp", (8, 4), 2)
    old = {space.name: sharded(space.shape, 0, even(8, 4), [(r,) for r in range(4)])}
    new = {space.name: sharded(space.shape, 0, even(8, 2), [(0,), (1,)])}
    with pytest.raises(NoHolderError, match=r"\[4:6, 0:4\] of tensor 'decoder.mlp'; in all 1 of 1 tensors") as caught:
        plan_reshard([space], old, new, alive={0, 1, 3})
    assert caught.value.missing == (("decoder.mlp", Box((4, 0), (6, 4))),)
    with pytest.raises(NoHolderError, match=r"\[0:4, 0:4\]"):
        plan_reshard([space], {}, new)


def test_overlapping_copies_do_not_hide_a_gap() -> None:
    """As many elements are held as are needed, but two of them twice."""
    space = Space("w", (6,), 1)
    old = {"w": (Share(Box((0,), (4,)), (0,)), Share(Box((2,), (4,)), (1,)))}
    with pytest.raises(NoHolderError, match=r"\[4:6\]"):
        plan_reshard([space], old, {"w": replicated((6,), (2,))})


def test_what_cannot_be_is_refused() -> None:
    space = Space("w", (6,), 1)
    fine = {"w": replicated((6,), (0,))}
    with pytest.raises(ValueError, match=r"tensor 'w': rank 1 would have boxes \[0:4\] and \[3:6\]"):
        twice = (Share(Box((0,), (4,)), (0, 1)), Share(Box((3,), (6,)), (1, 2)))
        plan_reshard([space], fine, {"w": twice})
    with pytest.raises(ValueError, match=r"box \[0:7\]: a part of shape \(6,\)"):
        plan_reshard([space], fine, {"w": replicated((7,), (0,))})
    with pytest.raises(ValueError, match="1 dimensions are needed"):
        plan_reshard([space], fine, {"w": replicated((2, 3), (0,))})
    with pytest.raises(ValueError, match=r"without their own space: \['v'\]"):
        plan_reshard([space], fine, {"v": replicated((6,), (0,))})
    with pytest.raises(ValueError, match="each rank once"):
        plan_reshard([space], fine, {"w": replicated((6,), (0, 0))})
    with pytest.raises(ValueError, match="limit = 1 bytes: 4 or more"):
        timetable(plan_reshard([Space("w", (6,), 4)], fine, {"w": replicated((6,), (1,))}), 1)


# -- boxes -----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_a_flat_range_is_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    found = flat_boxes(Box.whole(shape), start, stop)
    numbers = np.arange(size).reshape(shape)
    flat = [n for box in found for n in numbers[box.within(Box.whole(shape))].ravel().tolist()]
    assert flat == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.integers(1, 30))
def test_chunks_are_contiguous_and_small_enough(shape: tuple[int, ...], limit: int) -> None:
    numbers, whole = np.arange(math.prod(shape)).reshape(shape), Box.whole(shape)
    found = chunks(whole, limit)
    flat = [numbers[box.within(whole)].ravel().tolist() for box in found]
    assert [n for one in flat for n in one] == list(range(math.prod(shape)))
    assert all(len(one) <= limit for one in flat)


@settings(deadline=None)
@given(SHAPES, st.data())
def test_what_is_left_of_a_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    box, others = data.draw(boxes(shape)), data.draw(st.lists(boxes(shape), max_size=4))
    whole = Box.whole(shape)
    expected = np.zeros(shape, int)
    expected[box.within(whole)] = 1
    for other in others:
        expected[other.within(whole)] = 0
    found = np.zeros(shape, int)
    for rest in left_of(box, others):
        found[rest.within(whole)] += 1
    assert (found == expected).all()


# -- layouts of the frameworks -----------------------------------------------------------------------


def test_chunks_of_fsdp2_are_those_of_torch() -> None:
    import torch

    for size in range(20):
        for parts in range(1, 9):
            sizes = [len(c) for c in torch.arange(size).chunk(parts)] if size else []
            mine = [stop - start for start, stop in chunked(size, parts) if start < stop]
            assert mine == sizes


def test_fused_heads() -> None:
    """Four query heads and two heads each for keys and values, of two rows, over four ranks: pairs share a key head."""
    sections = [Section(8, 2), Section(4, 2), Section(4, 2)]
    found = fused((16, 3), 0, sections, [(0,), (1,), (2,), (3,)])
    rows = [(part.box.low[0], part.box.high[0], tuple(part.ranks)) for part in found]
    assert rows[:4] == [(0, 2, (0,)), (2, 4, (1,)), (4, 6, (2,)), (6, 8, (3,))]
    assert rows[4:] == [(8, 10, (0, 1)), (10, 12, (2, 3)), (12, 14, (0, 1)), (14, 16, (2, 3))]
    with pytest.raises(ValueError, match="units of 2 over 3 parts"):
        fused((16, 3), 0, sections, [(0,), (1,), (2,)])
    with pytest.raises(ValueError, match="10 rows in units of 4 over 2 parts"):
        fused((10, 3), 0, [Section(10, 4)], [(0,), (1,)])
    with pytest.raises(ValueError, match="16 are needed"):
        fused((16, 3), 0, sections[:1], [(0,)])


def test_flat_partitions_of_several_groups() -> None:
    """Two pipeline stages with flat buffers of their own; padding is on no rank."""
    first, end = end_to_end([("a", Box.whole((2, 3))), ("b", Box.whole((5,)))], align=4)
    assert [s.start for s in first] == [0, 8] and end == 13
    assert padded(end, 2, 4) == [(0, 8), (8, 16)] and padded(end, 3) == [(0, 5), (5, 10), (10, 15)]
    layout = together(
        flat_partitions(first, padded(end, 3), [(0,), (1,), (2,)]),
        flat_partitions(end_to_end([("c", Box.whole((4,)))])[0], padded(4, 2), [(3,), (4,)]),
    )
    assert {name: sum(part.box.size for part in parts) for name, parts in layout.items()} == {"a": 6, "b": 5, "c": 4}
    assert [(str(p.box), tuple(p.ranks)) for p in layout["a"]] == [
        ("[0:1, 0:3]", (0,)),
        ("[1:2, 0:2]", (0,)),
        ("[1:2, 2:3]", (1,)),
    ]
    assert [(str(p.box), tuple(p.ranks)) for p in layout["b"]] == [("[0:2]", (1,)), ("[2:5]", (2,))]


def test_ranks_are_counted_as_megatron_does() -> None:
    grid = RankGrid(tp=2, cp=2, dp=3, pp=2)
    assert grid.size == 24 and grid.rank(tp=1, cp=1, dp=2, pp=1) == 23
    assert list(grid.peers(tp=1, pp=0)) == [1, 3, 5, 7, 9, 11] and list(grid.stage(1)) == list(range(12, 24))
    assert grid.replica(1) == [4, 5, 6, 7, 16, 17, 18, 19]
    everybody = sorted(r for dp in range(3) for r in grid.replica(dp))
    assert everybody == list(range(24))
    for pp in range(2):
        assert sorted(r for group in grid.shards(pp) for r in group) == list(grid.stage(pp))


# -- size ------------------------------------------------------------------------------------------


def megatron(grid: RankGrid, layers: int) -> tuple[list[Space], dict[str, Placement]]:
    """A dense model of tensor and pipeline parallelism, its weights on all data-parallel ranks."""
    spaces: list[Space] = []
    layout: dict[str, Placement] = {}
    for pp in range(grid.pp):
        groups, everybody = grid.shards(pp), grid.stage(pp)
        kinds = {
            "qkv": sharded((10240, 8192), 0, even(10240, grid.tp), groups),
            "proj": sharded((8192, 8192), 1, even(8192, grid.tp), groups),
            "up": fused((57344, 8192), 0, [Section(28672), Section(28672)], groups),
            "down": sharded((8192, 28672), 1, even(28672, grid.tp), groups),
            "norm1": replicated((8192,), everybody),
            "norm2": replicated((8192,), everybody),
        }
        shapes = {
            "qkv": (10240, 8192),
            "proj": (8192, 8192),
            "up": (57344, 8192),
            "down": (8192, 28672),
            "norm1": (8192,),
            "norm2": (8192,),
        }
        for layer in range(pp * layers // grid.pp, (pp + 1) * layers // grid.pp):
            for kind, placement in kinds.items():
                for state in ("weight", "exp_avg"):
                    spaces.append(Space(f"{layer}.{kind}.{state}", shapes[kind], 4))
                    layout[spaces[-1].name] = placement
    return spaces, layout


def test_a_large_job_that_changes_its_shape() -> None:
    """18,432 ranks; planned in numbers, so that this is a matter of a second (no time is asserted here)."""
    spaces, old = megatron(RankGrid(tp=8, dp=144, pp=16), 96)
    _, new = megatron(RankGrid(tp=4, dp=288, pp=16), 96)
    plan = plan_reshard(spaces, old, new)
    assert plan.needed_bytes > plan.held_bytes > 0
    assert plan.sent.max() <= 1.2 * plan.sent.mean()
    _, fewer = megatron(RankGrid(tp=8, dp=143, pp=16), 96)
    before, after = RankGrid(tp=8, dp=144, pp=16), RankGrid(tp=8, dp=143, pp=16)
    lost = set(before.replica(77))
    becomes = {
        before.rank(tp=tp, dp=dp, pp=pp): after.rank(tp=tp, dp=dp - (dp > 77), pp=pp)
        for pp in range(16)
        for dp in range(144)
        if dp != 77
        for tp in range(8)
    }
    shrunk = plan_reshard(spaces, old, fewer, alive=set(range(before.size)) - lost, becomes=becomes)
    assert shrunk.moved_bytes == 0 and shrunk.explain()[-1] == "Nothing has to be sent."


def test_it_says_what_moves() -> None:
    space = Space("w", (8,), 4)
    old = {"w": sharded((8,), 0, even(8, 4), [(r,) for r in range(4)])}
    plan = plan_reshard([space], old, {"w": sharded((8,), 0, even(8, 2), [(0,), (1,)])})
    assert plan.explain() == [
        "The new layout has 32 bytes on 2 ranks; 8 of them (25.0%) are already where they are needed.",
        "24 bytes are sent, each once to each rank that lacks it: by ranks 1, 2 and 3 of the old layout, to ranks 0 "
        "and 1 of the new one.",
        "The busiest sender is rank 1 with 8 bytes (on average 8); rank 1 receives the most, 16 bytes.",
    ]
    assert timetable(plan, 16).explain()[-1] == (
        "That takes 1 rounds, in each of which no rank sends or receives more than 16 bytes; 1 tensors move in one "
        "round each, 0 in chunks."
    )
    assert timetable(plan, 8).rounds == 2


def test_nothing_at_all() -> None:
    plan = plan_reshard([], {}, {})
    assert plan.moved_bytes == 0 and timetable(plan, 8).messages(0, 0) == []
