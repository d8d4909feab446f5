"""State as boxes of logical tensors: from any layout to any other through a node's memory, and what is refused."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from flashrecovery.errors import RestoreError
from flashrecovery.plan.reshard.boxes import Box, flat_boxes
from flashrecovery.plan.reshard.logical import DATA, PARAM, LogicalPart, ShardParts, fitted
from flashrecovery.redundancy.memory.staged_files import Index, StagedFiles, Wanted, forms, write
from flashrecovery.state.shard import ShardSource
from flashrecovery.state.spec import ShardSpec, TensorSpec

STATE = "optimizer.state.{}."
SHAPES = {"rows": (12, 4), "columns": (4, 12), "norm": (8,), "deep": (4, 6, 2)}


def whole(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = [*SHAPES, *(f"optimizer.state.exp_avg.{name}" for name in SHAPES)]
    return {name: torch.randn(SHAPES[name.rpartition(".")[2]], generator=generator) for name in names}


def boxes_of(name: str, rank: int, ranks: int, dim: int) -> list[Box]:
    """A rank's part: a range of one dimension, or of the flattened tensor; everything of a norm."""
    full = Box.whole(SHAPES[name])
    if name == "norm":
        return [full]
    if dim < 0:
        size = -(-full.size // ranks)
        return flat_boxes(full, rank * size, min((rank + 1) * size, full.size))
    length = SHAPES[name][dim]
    return [full.narrowed(dim, rank * length // ranks, (rank + 1) * length // ranks)]


def shard(
    name: str, rank: int, ranks: int, dim: int, values: dict[str, torch.Tensor]
) -> tuple[ShardSource, ShardParts]:
    """A rank's parameter, its moment, and its number of steps, as flat tensors."""
    parts, at = [], 0
    for box in boxes_of(name, rank, ranks, dim):
        parts.append(LogicalPart(name, SHAPES[name], box, at))
        at += box.size

    def flat(prefix: str) -> torch.Tensor:
        cut = [values[prefix + name][p.box.within(Box.whole(SHAPES[name]))].reshape(-1) for p in parts]
        return torch.cat(cut) if cut else torch.zeros(0)

    tensors = {PARAM: flat(""), "state/exp_avg": flat("optimizer.state.exp_avg."), "state/step": torch.tensor(7.0)}
    spec = ShardSpec(
        {key: TensorSpec(tuple(t.shape), t.dtype) for key, t in tensors.items()},
        {"layout": {"state/exp_avg": "device", "state/step": "host"}},
    )
    source = ShardSource(f"param/{name}#{rank}/{ranks}", spec, list(tensors.values()))
    return source, ShardParts("", STATE, tuple(parts))


def written(
    folder: Path, ranks: int, dims: dict[str, int], values: dict[str, torch.Tensor], version: int = 3
) -> StagedFiles:
    for rank in range(ranks):
        made = [shard(name, rank, ranks, dims[name], values) for name in SHAPES]
        described = {source.name: parts for source, parts in made}
        write(folder, rank, version, [source for source, _ in made], described, b"common")
    return StagedFiles(folder, range(ranks), version)


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_is_read_in_any_other(seed: int, tmp_path: Path) -> None:
    """And back: the same bits. In pieces of a few elements, so that they end within rows."""
    choose = random.Random(seed)
    values, folder = whole(seed), tmp_path / "0"
    before = {name: choose.choice([-1, *range(len(SHAPES[name]))]) for name in SHAPES}
    staging = written(folder, choose.choice([1, 2, 3, 4]), before, values)
    for turn in range(1, 3):
        ranks = choose.choice([1, 2, 3, 4])
        after = {name: choose.choice([-1, *range(len(SHAPES[name]))]) for name in SHAPES}
        for rank in range(ranks):
            made = [shard(name, rank, ranks, after[name], {n: v * 0 for n, v in values.items()}) for name in SHAPES]
            wanted = [
                Wanted(tensor, tuple(parts.of(key, tuple(tensor.shape), tuple(source.tensors[0].shape))))
                for source, parts in made
                for key, tensor in zip(source.spec.tensors, source.tensors, strict=True)
            ]
            staging.fill(wanted, limit=choose.choice([4, 20, 1 << 20]))
            for (source, _), name in zip(made, SHAPES, strict=True):
                expected, _ = shard(name, rank, ranks, after[name], values)
                for mine, theirs in zip(source.tensors, expected.tensors, strict=True):
                    assert torch.equal(mine, theirs), (name, rank, ranks)
            described = {source.name: parts for source, parts in made}
            write(tmp_path / str(turn), rank, 3, [source for source, _ in made], described, b"common")
        staging = StagedFiles(tmp_path / str(turn), range(ranks), 3)
    assert staging.common == b"common"


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    values = whole()
    staging = written(tmp_path, 2, dict.fromkeys(SHAPES, 0), values)
    into = torch.zeros(3, 4)
    nbytes = staging.fill([Wanted(into, (LogicalPart("rows", (12, 4), Box((5, 0), (8, 4)), 0),))])
    assert torch.equal(into, values["rows"][5:8]) and nbytes == into.nbytes


def test_what_optimizer_state_there_is(tmp_path: Path) -> None:
    found = forms(written(tmp_path, 2, dict.fromkeys(SHAPES, -1), whole()))
    assert found == {"state/exp_avg": ("float32", "device", False), "state/step": ("float32", "host", True)}


def test_a_part_that_nobody_has_is_named(tmp_path: Path) -> None:
    staging = written(tmp_path, 2, dict.fromkeys(SHAPES, 0), whole())
    alone = StagedFiles(tmp_path, [0], 3)
    with pytest.raises(RestoreError, match=r"no live rank holds \[6:12, 0:4\] of tensor 'rows'"):
        alone.fill([Wanted(torch.zeros(12, 4), (LogicalPart("rows", (12, 4), Box.whole((12, 4)), 0),))])
    with pytest.raises(RestoreError, match="no rank has written logical tensor 'other'"):
        staging.fill([Wanted(torch.zeros(2), (LogicalPart("other", (2,), Box.whole((2,)), 0),))])


def test_another_kind_or_shape_is_refused(tmp_path: Path) -> None:
    staging = written(tmp_path, 2, dict.fromkeys(SHAPES, 0), whole())
    with pytest.raises(RestoreError, match=r"is float32 in the state, and torch\.bfloat16 here"):
        staging.fill([Wanted(torch.zeros(8, dtype=torch.bfloat16), (LogicalPart("norm", (8,), Box.whole((8,)), 0),))])
    with pytest.raises(RestoreError, match=r"shape \(9,\) here and \(8,\) there"):
        staging.fill([Wanted(torch.zeros(9), (LogicalPart("norm", (9,), Box.whole((9,)), 0),))])
    with pytest.raises(RestoreError, match="not contiguous"):
        staging.fill([Wanted(torch.zeros(4, 12).t(), (LogicalPart("rows", (12, 4), Box.whole((12, 4)), 0),))])


def test_numbers_that_differ_are_refused(tmp_path: Path) -> None:
    """A parameter that has not been stepped on as often as the others."""
    made = [shard(name, 0, 1, 0, whole()) for name in ("rows", "norm")]
    made[1][0].tensors[2].fill_(6.0)
    for rank, (source, parts) in enumerate(made):
        write(tmp_path, rank, 1, [source], {source.name: parts}, b"c")
    number = LogicalPart("optimizer.state.step", (), Box((), ()), 0)
    with pytest.raises(RestoreError, match=r"'optimizer\.state\.step' differs between parameters"):
        StagedFiles(tmp_path, [0, 1], 1).fill([Wanted(torch.zeros(()), (number,))])


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Of what no other rank has written: what lies in the index that is damaged lies nowhere then."""
    for what, said in (("rank1.data", "digest"), ("rank0.index", "no live rank holds")):
        folder = tmp_path / what
        written(folder, 2, dict.fromkeys(SHAPES, 0), whole())
        data = bytearray((folder / what).read_bytes())
        data[3 if what.endswith("data") else -9] ^= 4
        (folder / what).write_bytes(bytes(data))
        with pytest.raises(RestoreError, match=said):
            staging = StagedFiles(folder, range(2), 3)
            for name, shape in SHAPES.items():
                for prefix in ("", "optimizer.state.exp_avg."):
                    part = LogicalPart(prefix + name, shape, Box.whole(shape), 0)
                    staging.fill([Wanted(torch.zeros(shape), (part,))])
            number = LogicalPart("optimizer.state.step", (), Box((), ()), 0)
            staging.fill([Wanted(torch.zeros(()), (number,))])


def test_half_of_it_or_another_version_is_noticed(tmp_path: Path) -> None:
    written(tmp_path, 2, dict.fromkeys(SHAPES, 0), whole())
    rows = [Wanted(torch.zeros(12, 4), (LogicalPart("rows", (12, 4), Box.whole((12, 4)), 0),))]
    with pytest.raises(RestoreError, match="of rank 0 and version 3, not of 4"):
        StagedFiles(tmp_path, range(2), 4)
    StagedFiles(tmp_path, range(3), 3).fill(rows)  # what a third one should have written, the others have, too
    (tmp_path / "rank1.data").write_bytes(b"")
    with pytest.raises(RestoreError):
        StagedFiles(tmp_path, range(2), 3).fill(
            [Wanted(torch.zeros(12, 4), (LogicalPart("rows", (12, 4), Box.whole((12, 4)), 0),))]
        )


def test_padding_may_be_another_one(tmp_path: Path) -> None:
    """A vocabulary of 6 rows, padded to 8 by the one and to 7 or 10 by the other."""
    table = torch.arange(16.0).view(8, 2)
    parts = ShardParts("", STATE, (LogicalPart("words", (8, 2), Box.whole((8, 2)), 0, padded=True),))
    source = ShardSource("weights", ShardSpec({DATA: TensorSpec((16,), torch.float32)}), [table.reshape(-1)])
    write(tmp_path, 0, 1, [source], {"weights": parts}, b"")
    staging = StagedFiles(tmp_path, [0], 1)
    for rows in (7, 8, 10):
        into = torch.full((rows, 2), torch.nan)
        staging.fill([Wanted(into, (LogicalPart("words", (rows, 2), Box.whole((rows, 2)), 0, padded=True),))])
        assert torch.equal(into[: min(rows, 8)], table[:rows]) and bool((into[8:] == 0).all())
    lower = torch.full((5, 2), torch.nan)
    staging.fill([Wanted(lower, (LogicalPart("words", (10, 2), Box((5, 0), (10, 2)), 0, padded=True),))])
    assert torch.equal(lower[:3], table[5:]) and bool((lower[3:] == 0).all())


def test_what_is_not_known_is_not_written(tmp_path: Path) -> None:
    source, parts = shard("rows", 0, 1, 0, whole())
    with pytest.raises(RestoreError, match="which part of the model it is in another layout is not known"):
        write(tmp_path, 0, 1, [source], {}, b"")
    plain = ShardSource(source.name, ShardSpec(source.spec.tensors, {"plain": {"state/count": 3}}), source.tensors)
    with pytest.raises(RestoreError, match=r"optimizer state \['state/count'\]"):
        write(tmp_path, 0, 1, [plain], {source.name: parts}, b"")
    odd = {PARAM: (4, 3), "state/row": (4,)}
    with pytest.raises(RestoreError, match=r"optimizer state 'row' of the shape \(4,\)"):
        parts.of("state/row", odd["state/row"], odd[PARAM])
    assert not list(tmp_path.glob("*.index"))


def test_descriptions_travel_as_json() -> None:
    _, parts = shard("deep", 1, 3, -1, whole())
    assert ShardParts.from_plain(parts.plain()) == parts and len(parts.parts) > 1
    assert sum(part.box.size for part in parts.parts) == math.prod(SHAPES["deep"]) // 3
    index = Index(1, 2, (), {"a": b"b"}, b"c")
    assert Index.decode(index.encode()) == index


def test_what_lies_beyond_the_padding_is_nothing() -> None:
    part = LogicalPart("words", (10, 2), Box((8, 0), (10, 2)), 0, padded=True)
    assert fitted(part, (8, 2)) is None and fitted(part, (10, 2)) is part
