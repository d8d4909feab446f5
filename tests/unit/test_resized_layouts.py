"""Checkpoints of ZeRO's and the distributed optimizer's layouts, read by another number of ranks. What each rank has is
cut here by hand, as the frameworks do it, and not by the product's own counting."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from flashrecovery.cli.checkpoint import checkpoint as command
from flashrecovery.errors import DamagedCheckpointError, RestoreError
from flashrecovery.plan.reshard.boxes import Box
from flashrecovery.plan.reshard.placements import (
    BufferRange,
    EqualRanges,
    FlatBuffer,
    InBuffer,
    Pattern,
    Slices,
    WithRange,
)
from flashrecovery.plan.reshard.placements import Whole as Everywhere
from flashrecovery.plan.reshard.rules import Naming, TensorRule, from_plain, shards_at, to_plain
from flashrecovery.redundancy.checkpoint import blocks
from flashrecovery.redundancy.checkpoint.contents import contents
from flashrecovery.redundancy.checkpoint.convert import LooseShard, convert
from flashrecovery.redundancy.checkpoint.keys import writer_of
from flashrecovery.redundancy.checkpoint.manifest import manifests_of
from flashrecovery.redundancy.checkpoint.published import newest
from flashrecovery.redundancy.checkpoint.writer import CheckpointFallback
from flashrecovery.state import codec
from flashrecovery.state.spec import ShardSpec, TensorSpec
from tests.support.checkpoints import load

Held = dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]
"""By shard: its tensors by key, and its values."""
MOMENT = "state/exp_avg"


def values(seed: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


# -- ZeRO-1 and 2 -----------------------------------------------------------------------------------

LENGTHS = (37, 3)


def zero2(rank: int, size: int) -> Held:
    """Two groups; of the second one most ranks have nothing but padding."""
    found: Held = {}
    for group, length in enumerate(LENGTHS):
        padding = -length % (2 * size)

        def part(seed: int, length: int = length, padding: int = padding) -> torch.Tensor:
            return torch.cat([values(seed, length), torch.zeros(padding)]).chunk(size)[rank].clone()

        found[f"partition/{group}#dp={rank}/{size}"] = (
            {"param": part(group), MOMENT: part(10 + group), "state/step": torch.tensor(7.0)},
            {"layout": {MOMENT: "device"}, "places": {"state/": group}},
        )
        found[f"weights/{group}#dp={size}"] = {"data": values(group, length).bfloat16()}, {}
    return found


def zero2_rules() -> list[TensorRule]:
    found = []
    for group, length in enumerate(LENGTHS):
        cut, beginning = EqualRanges(2), f"partition/{group}#dp="
        found += [
            TensorRule(f"{group}/param", (length,), 4, cut, beginning, "param", content=f"names {group}"),
            TensorRule(f"{group}/{MOMENT}", (length,), 4, cut, beginning, MOMENT, content=f"names {group}"),
            TensorRule(f"{group}/step", (), 4, Everywhere(), beginning, "state/step"),
            TensorRule(f"{group}/w", (length,), 2, Everywhere(), f"weights/{group}#dp=", "data", Naming.SIZE),
        ]
    return found


# -- ZeRO-3 -----------------------------------------------------------------------------------------

NUMELS, FROZEN = (13, 1, 8, 5), 9


def zero3(rank: int, size: int) -> Held:
    def part(seed: int, numels: Sequence[int]) -> torch.Tensor:
        parameters = values(seed, sum(numels)).split(list(numels))
        padded = [torch.cat([p, torch.zeros(-p.numel() % size)]) for p in parameters]
        return torch.cat([p.chunk(size)[rank] for p in padded])

    partition = {"param": part(1, NUMELS), MOMENT: part(2, NUMELS), "state/step": torch.tensor(7.0)}
    return {
        f"partition/0#dp={rank}/{size}": (partition, {"places": {"state/": 0}}),
        f"param/frozen#dp={rank}/{size}": ({"data": part(3, (FROZEN,)).bfloat16()}, {}),
    }


def zero3_rules() -> list[TensorRule]:
    total, cut, beginning = (sum(NUMELS),), Slices(NUMELS), "partition/0#dp="
    return [
        TensorRule("0/param", total, 4, cut, beginning, "param"),
        TensorRule(f"0/{MOMENT}", total, 4, cut, beginning, MOMENT),
        TensorRule("0/step", (), 4, Everywhere(), beginning, "state/step"),
        TensorRule("frozen", (FROZEN,), 2, Slices((FROZEN,)), "param/frozen#dp=", "data"),
    ]


# -- the distributed optimizer ----------------------------------------------------------------------

PARAMETERS = {"a": (0, 0, 200), "b": (0, 256, 70), "c": (1, 0, 300), "d": (1, 320, 5), "e": (1, 384, 640)}
"""By name: bucket, first element in it, elements."""
BUCKETS, ORDER = (326, 1024), ("c", "a", "e", "b", "d")
"""Elements of the buckets without padding at their ends; and how the optimizer counts parameters."""


def megatron(rank: int, size: int) -> Held:
    multiple = math.lcm(128, size)
    lengths = [-(-elements // multiple) * multiple for elements in BUCKETS]
    flat = torch.zeros(sum(lengths), dtype=torch.bfloat16)
    found: Held = {}
    ranges = {}
    for number, (name, (bucket, start, numel)) in enumerate(PARAMETERS.items()):
        share = lengths[bucket] // size
        mine = torch.zeros(lengths[bucket], dtype=torch.bool)
        mine[rank * share : (rank + 1) * share] = True
        ranges[name] = number, mine[start : start + numel]
        at = sum(lengths[:bucket]) + start
        flat[at : at + numel] = values(number, numel).bfloat16()
    places = [name for name in ORDER if ranges[name][1].any()]
    for name, (number, mine) in ranges.items():
        numel = mine.numel()
        if mine.any():
            shard = f"param/{name}" if size == 1 else f"param/{name}#part={rank}/{size}"
            tensors = {"param": values(number, numel)[mine], MOMENT: values(10 + number, numel)[mine]}
            found[shard] = {**tensors, "state/step": torch.tensor(7.0)}, {"places": {"state/": places.index(name)}}
    found[f"weights/0#dp={size}"] = {"data": flat}, {}
    return found


def megatron_rules() -> list[TensorRule]:
    buffer, found = FlatBuffer(BUCKETS, 128), []
    for name, (bucket, start, numel) in PARAMETERS.items():
        cut, turn = BufferRange(buffer, bucket, start), ORDER.index(name)
        for key, shape, lies in (
            ("param", (numel,), cut),
            (MOMENT, (numel,), cut),
            ("state/step", (), WithRange(cut, numel)),
        ):
            naming = Naming.PLACE_UNLESS_ALONE
            found.append(TensorRule(f"{name}/{key}", shape, 4, lies, f"param/{name}#part=", key, naming, turn))
        whole = InBuffer(buffer, bucket, start)
        found.append(TensorRule(f"{name}/w", (numel,), 2, whole, "weights/0#dp=", "data", Naming.SIZE))
    return found


LAYOUTS: dict[str, tuple[Callable[[int, int], Held], Callable[[], list[TensorRule]]]] = {
    "zero2": (zero2, zero2_rules),
    "zero3": (zero3, zero3_rules),
    "megatron": (megatron, megatron_rules),
}
SIZES = [(4, 3), (3, 4), (4, 1), (1, 4), (2, 7), (7, 3), (5, 2)]


def shards_of(rules: Sequence[TensorRule], rank: int, size: int) -> list[LooseShard]:
    everybody = tuple(range(size))
    return [LooseShard(n, everybody if shared else (rank,)) for n, shared in shards_at(rules, rank, size).items()]


def save(folder: Path, name: str, size: int) -> Path:
    held, rules = LAYOUTS[name][0], tuple(LAYOUTS[name][1]())
    for rank in range(size):
        mine = shards_of(rules, rank, size)
        has = held(rank, size)
        assert {shard.name for shard in mine} == has.keys()
        for shard in mine:
            tensors, plain = has[shard.name]
            spec = ShardSpec({k: TensorSpec(tuple(t.shape), t.dtype) for k, t in tensors.items()}, plain)
            for key, live in shard.allocate(spec).items():
                live.copy_(tensors[key])
        writing = CheckpointFallback(folder, rank=rank, world=size, keep=100)
        writing.commit(7, mine, local_state=b"own", common=b"common", generation=0, rules=rules)
        assert writing.wait(30) and writing.close(5)
    last = newest(folder)
    assert last is not None and last[0] == 7
    return last[1]


class Dirty(LooseShard):
    """What it allocates is not 0."""

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        live = super().allocate(spec)
        for tensor in live.values():
            tensor.fill_(5)
        return live


def check(path: Path, name: str, size: int) -> None:
    """Each rank has what it would have, bit for bit, padding and places included."""
    held, rules = LAYOUTS[name][0], LAYOUTS[name][1]()
    for rank in range(size):
        mine = [Dirty(shard.name, shard.holders) for shard in shards_of(rules, rank, size)]
        plain = load(path, mine, rank=rank, world=size, elastic=True, rules=rules)
        assert plain.common == b"common"
        expected = held(rank, size)
        assert {shard.name for shard in mine} == expected.keys()
        for shard in mine:
            tensors, values_ = expected[shard.name]
            found = shard.tensors()
            assert found.keys() == tensors.keys() and shard.spec().values == values_, (shard.name, rank, size)
            for key, tensor in tensors.items():
                assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), (shard.name, key, rank)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("before", "after"), SIZES)
def test_any_size_reads_what_any_other_has_written(name: str, before: int, after: int, tmp_path: Path) -> None:
    path = save(tmp_path / "c", name, before)
    check(path, name, after)
    check(path, name, before)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("before", "after"), [(4, 3), (1, 4), (5, 1)])
def test_converted_it_is_what_that_size_would_have_written(name: str, before: int, after: int, tmp_path: Path) -> None:
    there = convert(save(tmp_path / "c", name, before), tmp_path / "there", after)
    written = save(tmp_path / "written", name, after)
    for rank in range(after):
        one, other = manifests_of(there, [rank])[rank], manifests_of(written, [rank])[rank]
        assert (one.entries, one.rules, one.ranks) == (other.entries, other.rules, after)
    check(there, name, after)
    check(there, name, before)


@pytest.mark.parametrize("name", LAYOUTS)
def test_boxes_that_are_shown_are_all_of_it(name: str, tmp_path: Path) -> None:
    found = contents(save(tmp_path / "c", name, 4))
    assert found.any_size and found.ranks == 4
    rules = {rule.name: rule for rule in LAYOUTS[name][1]()}
    assert {tensor.name for tensor in found.tensors} == rules.keys()
    for tensor in found.tensors:
        rule = rules[tensor.name]
        sizes = [sum(box.size for box in boxes) for boxes in tensor.boxes.values()]
        if rule.pattern.divides:
            assert sum(sizes) == math.prod(tensor.shape)
        else:
            assert {*sizes} == {math.prod(tensor.shape)} and (len(sizes) == 1 or not rule.shared)
    shown = CliRunner().invoke(command, ["show", str(tmp_path / "c")], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "readable by any number of ranks" in shown.output, shown.output


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensors_bytes_are_checked(name: str, tmp_path: Path) -> None:
    """A bit of any file is another one: some rank says so, whatever it was a bit of."""
    path = save(tmp_path / "c", name, 4)
    dice = random.Random(4)
    noticed = 0
    for file in path.glob("part-*/*.distcp"):
        content = file.read_bytes()
        for shard in [s for r in range(4) for s in shards_of(LAYOUTS[name][1](), r, 4) if writer_of(s) == r]:
            rank = shard.holders[0] if len(shard.holders) == 1 else 0
            for tensor in LAYOUTS[name][0](rank, 4)[shard.name][0].values():
                data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                if len(data) < 16 or content.count(data) != 1:
                    continue
                damaged = bytearray(content)
                damaged[content.index(data) + dice.randrange(len(data))] ^= 1
                file.write_bytes(damaged)
                with pytest.raises(DamagedCheckpointError, match="digests"):
                    check(path, name, 3)
                noticed += 1
        file.write_bytes(content)
    assert noticed > 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_model_is_refused(name: str, tmp_path: Path) -> None:
    path = save(tmp_path / "c", name, 4)
    rules = LAYOUTS[name][1]()
    with pytest.raises(RestoreError, match="another model"):
        load(path, shards_of(rules, 0, 3)[1:], rank=0, world=3, elastic=True)
    more = [*shards_of(rules, 0, 3), LooseShard("new", (0, 1, 2))]
    with pytest.raises(RestoreError, match="another model: it lacks shards 'new'"):
        load(path, more, rank=0, world=3, elastic=True)


def of_numels(*numels: int) -> list[TensorRule]:
    return [
        rule if rule.pattern != Slices(NUMELS) else replace(rule, shape=(sum(numels),), pattern=Slices(numels))
        for rule in zero3_rules()
    ]


def moved(name: str, start: int) -> list[TensorRule]:
    """One parameter lies elsewhere in its bucket."""
    found = []
    for rule in megatron_rules():
        cut = rule.pattern.range if isinstance(rule.pattern, WithRange) else rule.pattern
        if rule.name.startswith(f"{name}/"):
            assert isinstance(cut, BufferRange | InBuffer)
            other = replace(cut, start=start)
            whole = isinstance(other, InBuffer) or cut is rule.pattern
            rule = replace(rule, pattern=other if whole else WithRange(other, rule.pattern.length))  # type: ignore
        found.append(rule)
    return found


LIE_ALIKE = {
    "one element more": ("zero3", of_numels(14, 1, 8, 5)),
    "another order": ("zero3", of_numels(1, 13, 8, 5)),
    "other names": ("zero2", [replace(rule, content=rule.content and "other") for rule in zero2_rules()]),
    "elsewhere": ("megatron", moved("d", 325)),
}
"""Models whose shards have the same names and shapes in every size in which they are read."""


@pytest.mark.parametrize("case", LIE_ALIKE)
@pytest.mark.parametrize("size", [4, 3])
def test_another_model_that_lies_alike_is_refused(case: str, size: int, tmp_path: Path) -> None:
    name, rules = LIE_ALIKE[case]
    path = save(tmp_path / "c", name, 4)
    for rank in range(size):
        own, others = (
            {rule.name: (rule.shard_at(rank, size), rule.stored(rank, size)) for rule in some}
            for some in (rules, LAYOUTS[name][1]())
        )
        assert own == others, "its shards tell that it is another one"
        shards = shards_of(rules, rank, size)
        with pytest.raises(RestoreError, match="of another model, or of one whose state is sharded otherwise"):
            load(path, shards, rank=rank, world=size, elastic=True, rules=rules)
        fresh = [rule for rule in LAYOUTS[name][1]() if not rule.of_optimizer]
        load(path, shards, rank=rank, world=size, elastic=True, rules=fresh)  # it has taken no step yet


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tensor_that_only_one_of_them_has_is_named(name: str, tmp_path: Path) -> None:
    """Unless it is optimizer state: one of them has taken no step."""
    path, rules = save(tmp_path / "c", name, 4), LAYOUTS[name][1]()
    gone = next(rule for rule in rules if rule.key == "param")
    shards = shards_of(rules, 0, 3)
    with pytest.raises(RestoreError, match=f"tensors '{gone.name}' differ"):
        load(path, shards, rank=0, world=3, elastic=True, rules=[rule for rule in rules if rule is not gone])
    with pytest.raises(RestoreError, match="tensors 'new' differ"):
        load(path, shards, rank=0, world=3, elastic=True, rules=[*rules, replace(gone, name="new")])


def test_many_small_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of their slices is a piece: it is found at once, and its block is not read for it alone."""
    monkeypatch.setitem(globals(), "NUMELS", tuple(100 + number % 7 for number in range(800)))
    path = save(tmp_path / "c", "zero3", 4)
    compared, read = 0, 0
    meet, original = Box.__and__, blocks.StoredTensors._read

    def counted(one: Box, other: Box) -> Box | None:
        nonlocal compared
        compared += 1
        return meet(one, other)

    def noted(self: Any, key: str, start: int, stop: int, total: int, known: bytes) -> bytearray:
        nonlocal read
        read += 1
        return original(self, key, start, stop, total, known)

    monkeypatch.setattr(Box, "__and__", counted)
    monkeypatch.setattr(blocks.StoredTensors, "_read", noted)
    for rank in range(3):
        load(path, shards_of(zero3_rules(), rank, 3), rank=rank, world=3, elastic=True)
    assert read < 3 * 4 * 4 * 2, "tensors, of each of which at most four ranks have a block"
    assert compared < 3 * 2 * 1200 * 4, compared


@pytest.mark.parametrize("name", LAYOUTS)
def test_rules_come_back_from_plain_values(name: str) -> None:
    rules = tuple(LAYOUTS[name][1]())
    table, rows = codec.loads(codec.dumps(to_plain(rules)))
    assert from_plain(table, rows) == rules
    with pytest.raises(KeyError):
        from_plain([("unknown", 3)], [])
    with pytest.raises(KeyError):
        from_plain(table[:-1], rows)


@pytest.mark.parametrize("seed", range(30))
def test_each_element_is_at_one_place(seed: int) -> None:
    """Of any cut that divides; and parts do not overlap where they are stored, nor reach past it."""
    dice = random.Random(seed)
    numels = tuple(dice.randrange(1, 40) for _ in range(dice.randrange(1, 6)))
    buffer = FlatBuffer((sum(numels) + 64,), dice.choice((1, 8, 128)))
    cuts: Mapping[Pattern, int] = {
        EqualRanges(dice.choice((1, 2, 8))): sum(numels),
        Slices(numels): sum(numels),
        BufferRange(buffer, 0, dice.randrange(64)): sum(numels),
    }
    for pattern, length in cuts.items():
        for size in range(1, 9):
            seen: list[int] = []
            for place in range(size):
                parts, stored = pattern.parts((length,), place, size), pattern.stored((length,), place, size)
                assert stored is not None or not parts
                taken = [i for part in parts for i in range(part.at, part.at + part.box.size)]
                assert [part.box.low for part in parts] == sorted(part.box.low for part in parts)
                assert len({*taken}) == len(taken) and all(0 <= i < math.prod(stored or ()) for i in taken)
                seen += [i for part in parts for i in range(part.box.low[0], part.box.high[0])]
                assert pattern.placement((length,), size) is not None
            assert sorted(seen) == list(range(length)), (pattern, size)
