"""Checkpoints of one number of ranks, read by another one: the right boxes, only the bytes that are needed, each of
them checked; and converted without a job."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from click.testing import CliRunner

from flashrecovery.cli.checkpoint import checkpoint as command
from flashrecovery.errors import ConfigError, DamagedCheckpointError, RestoreError
from flashrecovery.plan.elastic.replicas import ReplicaShape, Sharing
from flashrecovery.plan.reshard.boxes import Box
from flashrecovery.plan.reshard.placements import Rows, Whole
from flashrecovery.plan.reshard.rules import TensorRule
from flashrecovery.redundancy.checkpoint import blocks, resharded_reader
from flashrecovery.redundancy.checkpoint import writer as fallback
from flashrecovery.redundancy.checkpoint.contents import contents
from flashrecovery.redundancy.checkpoint.convert import LooseShard, convert
from flashrecovery.redundancy.checkpoint.dcp import read_whole
from flashrecovery.redundancy.checkpoint.keys import tensor_prefix
from flashrecovery.redundancy.checkpoint.manifest import Manifest, StoredCheckpoint, manifests_of
from flashrecovery.redundancy.checkpoint.published import newest
from flashrecovery.redundancy.checkpoint.writer import CheckpointFallback
from flashrecovery.state import codec
from flashrecovery.state.shard import ShardSource
from flashrecovery.state.spec import ShardSpec, TensorSpec, decode_spec
from tests.support.checkpoints import load

COMMON, VERSION = b"common state", 7
Model = dict[str, tuple[torch.Tensor, bool]]
"""By shard and key (``weight/param``): a tensor without any sharding, and whether its rows are sharded."""


def model(seed: int = 0, big: int = 0) -> Model:
    """Rows that divide by nothing, fewer rows than ranks, numbers; ``big``: rows of one that has several blocks."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    found: Model = {}
    for name, shape in {"up": (13, 3, 2), "one": (1, 5), "bias": (7,), "big": (big, 1000)}.items():
        if shape[0]:
            found[f"{name}/param"] = values(*shape), True
            found[f"{name}/state/avg"] = values(*shape).to(torch.bfloat16), True
            found[f"{name}/state/step"] = torch.tensor(float(VERSION)), False
    return found


def rules_of(whole: Model) -> tuple[TensorRule, ...]:
    found = []
    for name, (tensor, rows) in whole.items():
        shard, _, key = name.partition("/")
        found.append(
            TensorRule(name, tuple(tensor.shape), tensor.itemsize, Rows() if rows else Whole(), f"{shard}#shard=", key)
        )
    return tuple(found)


def shards_of(rules: Sequence[TensorRule], rank: int, world: int, everywhere: bool = True) -> list[LooseShard]:
    names = dict.fromkeys(rule.shard_at(rank, world) for rule in rules)
    plain = [LooseShard("mask", tuple(range(world)))] if everywhere else []
    return [*(LooseShard(name, (rank,)) for name in names), *plain]


def part(whole: Model, rule: TensorRule, rank: int, world: int) -> torch.Tensor:
    """By numpy's own counting, and not by that of the product."""
    tensor, rows = whole[rule.name]
    chunk = -(-tensor.shape[0] // world) if rows else 0
    return tensor[rank * chunk : (rank + 1) * chunk] if rows else tensor


def mask() -> torch.Tensor:
    return torch.arange(40) % 3


def filled(whole: Model, rank: int, world: int, *, transposed: bool = False) -> list[LooseShard]:
    """All that a rank has."""
    found = rules_of(whole)
    mine = shards_of(found, rank, world)
    for shard in mine:
        parts = {
            rule.key: part(whole, rule, rank, world) for rule in found if rule.shard_at(rank, world) == shard.name
        } or {"data": mask()}
        spec = ShardSpec({k: TensorSpec(tuple(t.shape), t.dtype) for k, t in parts.items()}, {"layout": "x"})
        for key, live in shard.allocate(spec).items():
            live.copy_(parts[key])
            if transposed and live.ndim == 2:  # lies column by column, as a framework may have it
                shard._tensors[key] = live.t().contiguous().t()
    return mine


def save(
    folder: Path, whole: Model, world: int, *, rules: bool = True, transposed: bool = False, local_state: bytes = b"own"
) -> Path:
    """Written by each of the ranks in turn."""
    for rank in range(world):
        mine = filled(whole, rank, world, transposed=transposed)
        writing = CheckpointFallback(folder, rank=rank, world=world, keep=100)
        told = rules_of(whole) if rules else None
        writing.commit(VERSION, mine, local_state=local_state, common=COMMON, generation=0, rules=told)
        assert writing.wait(30) and writing.close(5)
    last = newest(folder)
    assert last is not None and last[0] == VERSION
    return last[1]


def check(path: Path, whole: Model, world: int, **options: Any) -> None:
    """Each of ``world`` ranks reads its part of it."""
    rules = rules_of(whole)
    for rank in range(world):
        mine = shards_of(rules, rank, world)
        plain = load(path, mine, rank=rank, world=world, elastic=True, **options)
        assert plain.common == COMMON
        by_name = {shard.name: shard for shard in mine}
        for rule in rules:
            shard = by_name[rule.shard_at(rank, world)]
            found, expected = shard.tensors()[rule.key], part(whole, rule, rank, world)
            assert found.dtype == expected.dtype and torch.equal(found, expected), (rule.name, rank, world)
            assert shard.spec().values == {"layout": "x"}
            assert list(shard.tensors()) == [r.key for r in rules if r.shard == rule.shard]
        assert torch.equal(by_name["mask"].tensors()["data"], mask())


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (4, 1), (1, 4), (2, 7), (7, 3)])
def test_any_size_reads_what_any_other_has_written(before: int, after: int, tmp_path: Path) -> None:
    whole = model(before)
    check(save(tmp_path / "c", whole, before), whole, after)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("dead", [None, 1])
def test_a_change_of_size_while_the_parts_are_written(
    dead: int | None, copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are still parts of a checkpoint of as many ranks as there were, which is complete with all of them."""
    whole, going_on = model(), [rank for rank in range(4) if rank != (3 if dead is None else dead)]
    write_part = fallback.write_part
    for rank in range(4):
        mine = filled(whole, rank, 4)
        writing = CheckpointFallback(tmp_path, rank=rank, world=4)

        def resized_meanwhile(
            *args: Any, rank: int = rank, mine: list[LooseShard] = mine, writing: CheckpointFallback = writing
        ) -> None:
            if rank in going_on:
                place = going_on.index(rank)
                writing.resize(place, ReplicaShape(3))
                for shard, other in zip(mine, shards_of(rules_of(whole), place, 3), strict=True):
                    shard.name, shard.holders = other.name, other.holders
            write_part(*args)

        monkeypatch.setattr(fallback, "write_part", resized_meanwhile)
        plain = {"local_state": b"own", "common": COMMON, "generation": 0, "rules": rules_of(whole)}
        if rank == dead:
            continue
        if copied:
            content = {s.name: ShardSource(s.name, s.spec(), list(s.tensors().values())) for s in mine}
            writing.commit_copy(VERSION, mine, lambda content=content: content.__getitem__, lambda: None, **plain)
        else:
            writing.commit(VERSION, mine, **plain)
        assert writing.wait(30) and writing.close(5)
        assert rank == 3 or newest(tmp_path) is None
    if dead is not None:
        assert newest(tmp_path) is None
        return
    last = newest(tmp_path)
    assert last is not None and contents(last[1]).ranks == 4
    check(last[1], whole, 3)
    check(last[1], whole, 4)


def test_tensors_that_lie_in_another_order_in_memory(tmp_path: Path) -> None:
    whole = model()
    path = save(tmp_path / "c", whole, 4, transposed=True)
    check(path, whole, 3)
    check(path, whole, 4)


def test_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pieces than blocks, and more blocks than pieces, in every way of lying across each other."""
    whole = model(big=9)
    defaults = resharded_reader.read_sharded.__defaults__
    for limit, content in ((4, model()), (1000, whole), (6000, whole)):
        monkeypatch.setattr(resharded_reader.read_sharded, "__defaults__", (limit,))
        check(save(tmp_path / f"l{limit}", content, 4), content, 3)
    monkeypatch.setattr(resharded_reader.read_sharded, "__defaults__", defaults)
    for block in (8, 4096):
        monkeypatch.setattr(blocks, "BLOCK", block)
        check(save(tmp_path / f"c{block}", whole, 4), whole, 3)


def test_runs_are_where_the_elements_lie() -> None:
    dice = random.Random(3)
    for _ in range(300):
        low = tuple(dice.randrange(3) for _ in range(dice.randrange(4)))
        outer = Box(low, tuple(lo + dice.randrange(1, 6) for lo in low))
        inner_low = tuple(dice.randrange(lo, hi) for lo, hi in zip(outer.low, outer.high, strict=True))
        box = Box(
            inner_low, tuple(dice.randrange(lo + 1, hi + 1) for lo, hi in zip(inner_low, outer.high, strict=True))
        )
        numbers = np.arange(outer.size).reshape(outer.shape)
        found = [n for start, stop in blocks.runs(box, outer) for n in range(start, stop)]
        assert found == numbers[box.within(outer)].reshape(-1).tolist(), (box, outer)


def read_by(path: Path, whole: Model, rank: int, world: int) -> int:
    """What this rank reads of tensors, in bytes."""
    rules = rules_of(whole)
    mine = shards_of(rules, rank, world, everywhere=False)
    checkpoint = StoredCheckpoint.open(path)
    return resharded_reader.read_sharded(checkpoint, mine, checkpoint.first, rank, world)


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """And the files of others are not even looked at."""
    whole = model(big=4000)
    path = save(tmp_path / "c", whole, 4)
    for rank in range(3):
        needed = sum(part(whole, rule, rank, 3).nbytes for rule in rules_of(whole))
        read = read_by(path, whole, rank, 3)
        assert needed <= read <= needed + 2 * 2 * blocks.BLOCK, (needed, read)  # two large tensors, two files each
    for other in (2, 3):  # rank 0 of 3 reads of ranks 0 and 1
        (path / f"part-{other}" / "__0_0.distcp").unlink()
    read_by(path, whole, 0, 3)
    with pytest.raises(DamagedCheckpointError, match=r"part-2/__0_0\.distcp"):
        read_by(path, whole, 1, 3)


def test_no_more_than_the_limit_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model(big=4000)
    path = save(tmp_path / "c", whole, 4)
    most, original = 0, blocks.StoredTensors.read

    def seen(self: Any, key: str, start: int, stop: int, total: int, known: bytes) -> bytearray:
        nonlocal most
        most = max(most, stop - start)
        return original(self, key, start, stop, total, known)

    monkeypatch.setattr(blocks.StoredTensors, "read", seen)
    monkeypatch.setattr(resharded_reader.read_sharded, "__defaults__", (1 << 20,))
    check(path, whole, 3)
    assert 0 < most <= 1 << 20


def place_of(path: Path, key: str) -> tuple[Path, int, int]:
    stored = blocks.StoredTensors(StoredCheckpoint.open(path).index)
    place = stored._place(key)
    return place.file, place.start, place.nbytes


@pytest.mark.parametrize("at", [0, 0.3, 0.999999])
def test_every_byte_is_checked(at: float, tmp_path: Path) -> None:
    """One bit of it is another one, wherever it is: someone reads it, and says where it was."""
    whole = model(big=1500)
    path = save(tmp_path / "c", whole, 4)
    file, start, nbytes = place_of(path, "rank1/big#shard=1/4/param")
    content = bytearray(file.read_bytes())
    content[start + int(nbytes * at)] ^= 16
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"rank1/big#shard=1/4/param.*part-1/__0_0\.distcp.*digests"):
        check(path, whole, 3)


@pytest.mark.parametrize("world", [4, 3])
def test_every_bit_of_what_a_rank_says_is_checked(world: int, tmp_path: Path) -> None:
    """Common state, rank-local state, values and digests stand in the manifest."""
    whole = model()
    path = save(tmp_path / "c", whole, 4)
    file, start, nbytes = place_of(path, "manifest/0")
    content = file.read_bytes()
    assert content.count(COMMON) == 1
    for at in (*range(start, start + nbytes, 97), content.index(COMMON)):
        damaged = bytearray(content)
        damaged[at] ^= 1
        file.write_bytes(damaged)
        with pytest.raises((DamagedCheckpointError, RestoreError)):
            load(path, shards_of(rules_of(whole), 0, world), rank=0, world=world, elastic=True)
    damaged = bytearray(content)
    damaged[content.index(COMMON)] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(DamagedCheckpointError, match=r"manifest/0.*|the manifest does not have the digest"):
        load(path, shards_of(rules_of(whole), 0, world), rank=0, world=world, elastic=True)


@pytest.mark.parametrize("world", [4, 3])
def test_an_index_that_has_changed_is_not_read(world: int, tmp_path: Path) -> None:
    """It is a pickle: of a few hundred bits one or two would have taken all of the host's memory."""
    whole = model()
    path = save(tmp_path / "c", whole, 4)
    index = path / ".metadata"
    content = bytearray(index.read_bytes())
    content[content.index(b"manifest/3")] ^= 1
    index.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata does not have the digest"):
        load(path, shards_of(rules_of(whole), 0, world), rank=0, world=world, elastic=True)
    index.unlink()
    with pytest.raises(DamagedCheckpointError, match="FileNotFoundError"):
        load(path, shards_of(rules_of(whole), 0, world), rank=0, world=world, elastic=True)


def test_the_format_before_is_read(tmp_path: Path) -> None:
    """By as many ranks as have written it; how its state is sharded in another size is not known."""
    whole = model()
    path = save(tmp_path / "c", whole, 4)
    for rank, manifest in manifests_of(path, range(4)).items():
        entries = {name: (entry.shared, entry.spec, entry.digest) for name, entry in manifest.entries.items()}
        old = codec.dumps((4, VERSION, 4, entries, b"own", COMMON, "", ""))
        found = Manifest.decode(old, path)
        assert (found.ranks, found.local_state, found.common, found.rules) == (4, b"own", COMMON, None), rank
        assert all(not entry.blocks for entry in found.entries.values())
    with pytest.raises(RestoreError, match="has format 3"):
        Manifest.decode(codec.dumps((3, VERSION)), path)
    with pytest.raises(ValueError, match="unpack"):
        Manifest.decode(codec.dumps((4, *codec.loads(manifest.encode())[1:])), path)  # a bit of the number


def test_rules_of_rows_as_they_were_written_before_are_read(tmp_path: Path) -> None:
    whole = model()
    path = save(tmp_path / "c", whole, 4)
    for manifest in manifests_of(path, range(4)).values():
        entries = {n: (e.shared, e.spec, e.digest, dict(e.blocks)) for n, e in manifest.entries.items()}
        rules = [
            (r.name, r.shape, r.itemsize, isinstance(r.pattern, Rows), r.shard, r.key) for r in manifest.rules or ()
        ]
        content = codec.dumps((VERSION, 4, entries, b"own", COMMON, "", "", rules))
        old = codec.dumps((5, xxhash.xxh3_128_digest(content), content))
        assert rules and Manifest.decode(old, path) == manifest


def test_files_that_are_cut_short_or_missing_are_named(tmp_path: Path) -> None:
    whole = model()
    path = save(tmp_path / "c", whole, 4)
    file, start, _ = place_of(path, "rank2/up#shard=2/4/param")
    content = file.read_bytes()
    file.write_bytes(content[: start + 3])
    with pytest.raises(DamagedCheckpointError, match=r"part-2/__0_0\.distcp"):
        check(path, whole, 3)
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"part-2/__0_0\.distcp"):
        check(path, whole, 3)
    (path / ".metadata").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match="cannot be read"):
        check(path, whole, 3)


def test_what_is_refused(tmp_path: Path) -> None:
    whole = model()
    path = save(tmp_path / "c", whole, 4)
    rules = rules_of(whole)
    with pytest.raises(RestoreError, match="written by 4 ranks, this job has 3"):
        load(path, shards_of(rules, 0, 3), rank=0, world=3)
    more = rules_of({**whole, "new/param": (torch.ones(4, 4), True)})
    with pytest.raises(RestoreError, match=r"another model: it lacks shards 'new#shard=0/3' of rank 0"):
        load(path, shards_of(more, 0, 3), rank=0, world=3, elastic=True)
    fewer = rules_of({name: one for name, one in whole.items() if not name.startswith("up")})
    with pytest.raises(RestoreError, match=r"another model: this job has no shards 'up#shard=0/3' of rank 0"):
        load(path, shards_of(fewer, 0, 3), rank=0, world=3, elastic=True)
    unknown = save(tmp_path / "without", whole, 4, rules=False)
    with pytest.raises(RestoreError, match="has not been written down"):
        load(unknown, shards_of(rules, 0, 3), rank=0, world=3, elastic=True)
    with pytest.raises(RestoreError, match="no elastic job has written it"):
        convert(unknown, tmp_path / "out", 3)
    with pytest.raises(ConfigError, match="is one of 4 ranks"):
        convert(path, tmp_path / "out", 4)
    with pytest.raises(ConfigError, match="is not empty"):
        convert(path, tmp_path / "without", 3)


def everything(path: Path) -> dict[str, Any]:
    """All that a checkpoint has, but each rank's own state."""
    found: dict[str, Any] = {}
    for rank, manifest in manifests_of(path, range(contents(path).ranks)).items():
        found[f"{rank}"] = (manifest.version, manifest.ranks, manifest.common, manifest.form, manifest.rules)
        for name, entry in manifest.entries.items():
            found[f"{rank}/{name}"] = (entry.shared, entry.spec, entry.digest, dict(entry.blocks))
            prefix = tensor_prefix(name, entry.shared, rank)
            keys = [f"{prefix}{key}" for key in decode_spec(entry.spec).tensors]
            tensors = read_whole(keys, path)
            found |= {key: (t.dtype, t.shape, t.view(-1).view(torch.uint8).tolist()) for key, t in tensors.items()}
    return found


@pytest.mark.parametrize(("before", "between"), [(4, 3), (1, 4)])
def test_there_and_back_again_is_the_same(before: int, between: int, tmp_path: Path) -> None:
    whole = model()
    path = save(tmp_path / "c", whole, before)
    there = convert(path, tmp_path / "there", between)
    assert everything(there) == everything(save(tmp_path / "written", whole, between))
    check(there, whole, between)
    check(there, whole, before)
    back = convert(there, tmp_path / "back", before)
    assert everything(back) == everything(path)


def test_a_converted_one_has_no_ranks_own_state(tmp_path: Path) -> None:
    whole = model()
    there = convert(save(tmp_path / "c", whole, 4), tmp_path / "there", 3)
    assert load(there, shards_of(rules_of(whole), 1, 3), rank=1, world=3, elastic=True).local_state is None
    with pytest.raises(RestoreError, match="has been converted from another number of ranks"):
        load(there, shards_of(rules_of(whole), 1, 3), rank=1, world=3)


def test_damage_is_not_converted(tmp_path: Path) -> None:
    whole = model()
    path = save(tmp_path / "c", whole, 4)
    file, start, _ = place_of(path, "rank3/up#shard=3/4/state/avg")
    content = bytearray(file.read_bytes())
    content[start] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"part-3/__0_0\.distcp"):
        convert(path, tmp_path / "out", 3)
    assert newest(tmp_path / "out") is None


def test_the_command(tmp_path: Path) -> None:
    whole = model()
    save(tmp_path / "c", whole, 4)
    done = CliRunner().invoke(
        command, ["convert", str(tmp_path / "c"), "--to-ranks", "3", "--out", str(tmp_path / "o")]
    )
    assert done.exit_code == 0 and "for 3 ranks" in done.output, done.output
    shown = CliRunner().invoke(command, ["show", str(tmp_path / "o")], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "version 7, of 3 ranks, without random number states" in shown.output, shown.output
    assert "0: [0:5, 0:3, 0:2], 1: [5:10, 0:3, 0:2] and 2: [10:13, 0:3, 0:2]" in shown.output, shown.output
    assert "readable by any number of ranks" in shown.output and "all 3 ranks" in shown.output
    told = CliRunner().invoke(command, ["show", "--json", str(tmp_path / "c")])
    assert told.exit_code == 0 and '"ranks": 4' in told.output
    nothing = CliRunner().invoke(command, ["show", str(tmp_path)])
    assert isinstance(nothing.exception, ConfigError)


@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 1), (1, 3)])
def test_a_ranks_own_state_may_be_that_of_one_that_stood_where_it_does(
    before: int, after: int, inner: int, tmp_path: Path
) -> None:
    """Of replicas of two ranks, which are counted in either order."""
    there, here = (ReplicaShape(number, inner, 2 // inner) for number in (before, after))
    for rank in range(there.world):
        writing = CheckpointFallback(tmp_path, rank=rank, world=there.world, shape=there)
        writing.commit(
            VERSION, [], local_state=f"is model rank {there.model_rank(rank)}".encode(), common=COMMON, generation=0
        )
        assert writing.wait(30) and writing.close(5)
    found = newest(tmp_path)
    assert found is not None
    for rank in range(here.world):
        more: dict[str, Any] = {"rank": rank, "world": here.world, "elastic": True, "rules": ()}
        more["sharing"] = Sharing.of_rank(here, rank)
        assert load(found[1], [], **more).lent is None
        read = load(found[1], [], **more, lend=True)
        assert (read.local_state, read.lent) == (None, f"is model rank {here.model_rank(rank)}".encode())


def test_the_oldest_version_that_a_job_may_go_back_to(tmp_path: Path) -> None:
    """Not beyond what it has on disk, and not beyond what it has written of late: others may still be writing that."""
    writing = CheckpointFallback(tmp_path, rank=0, world=1, keep=2)
    assert writing.oldest == 0
    (tmp_path / "step-0000009000").mkdir()  # another run's
    seen = []
    for version in (10, 20, 30, 40, 50, 60, 70):
        writing.commit(version, [], local_state=b"", common=COMMON, generation=0)
        assert writing.wait(30)
        seen.append(writing.oldest)
    assert seen == [10, 10, 10, 10, 20, 30, 40]
    slow = CheckpointFallback(tmp_path, rank=0, world=2, keep=2)  # no one publishes these
    for version in (80, 90, 100, 110, 120, 130):
        slow.commit(version, [], local_state=b"", common=COMMON, generation=0)
        assert slow.wait(30)
    assert slow.oldest == 60
    assert writing.close(5) and slow.close(5)
