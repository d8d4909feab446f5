"""Checkpoints of state that several places of each replica divide together (Megatron's distributed optimizer with
expert or context parallelism), read by another number of the same replicas. Which rank has which part is told here by
hand."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from flashrecovery.errors import DamagedCheckpointError, RestoreError
from flashrecovery.plan.elastic.replicas import ReplicaShape, Sharing
from flashrecovery.plan.reshard.placements import EveryNth
from flashrecovery.plan.reshard.rules import TensorRule, from_plain, to_plain
from flashrecovery.redundancy.checkpoint.contents import contents
from flashrecovery.redundancy.checkpoint.convert import LooseShard
from flashrecovery.redundancy.checkpoint.manifest import manifests_of
from flashrecovery.redundancy.checkpoint.published import newest
from flashrecovery.redundancy.checkpoint.writer import CheckpointFallback
from flashrecovery.state import codec
from flashrecovery.state.spec import ShardSpec, TensorSpec
from tests.support.checkpoints import load
from tests.unit.test_resized_layouts import Dirty, Held, megatron, megatron_rules


@dataclass(frozen=True)
class Kind:
    """``inner``, ``outer``: of a replica. ``model_ranks``: among which the dense state is sharded, one group after
    another. ``each``: of these that many have all experts together; 0: there are none."""

    inner: int
    outer: int
    model_ranks: tuple[tuple[int, ...], ...]
    each: int

    def shape(self, replicas: int) -> ReplicaShape:
        return ReplicaShape(replicas, self.inner, self.outer)

    def group(self, model_rank: int) -> int:
        return next(number for number, group in enumerate(self.model_ranks) if model_rank in group)


KINDS = {
    "experts": Kind(2, 1, ((0, 1),), 2),
    "context": Kind(2, 1, ((0, 1),), 0),
    "experts, tensor": Kind(4, 1, ((0, 2), (1, 3)), 2),
    "experts, stages": Kind(2, 2, ((0, 1), (2, 3)), 2),
    "experts of every other place": Kind(4, 1, ((0, 1, 2, 3),), 2),
    "experts alone": Kind(1, 1, ((0,),), 1),
}
CHANGES = [
    ("experts", 3, 2),
    ("context", 1, 2),
    ("experts, tensor", 1, 2),
    ("experts alone", 2, 3),
    ("experts of every other place", 1, 2),
]
"""Kind, and the numbers of replicas before and after."""


def sharers(kind: Kind, replicas: int, model_rank: int) -> list[int]:
    """The ranks that divide the dense state with those at this place."""
    group = kind.model_ranks[kind.group(model_rank)]
    found = []
    for rank in range(replicas * kind.inner * kind.outer):
        run, within = divmod(rank, kind.inner * replicas)
        if run * kind.inner + within % kind.inner in group:
            found.append(rank)
    return found


def held(kind: Kind, rank: int, replicas: int) -> Held:
    run, within = divmod(rank, kind.inner * replicas)
    model_rank = run * kind.inner + within % kind.inner
    group, ranks = kind.group(model_rank), sharers(kind, replicas, model_rank)
    place = ranks.index(rank)
    found = of(megatron(place, len(ranks)), f"stand={group}" if len(kind.model_ranks) > 1 else "", "", group + 1)
    if kind.each:
        column = ranks[place % kind.each :: kind.each]
        part = megatron(column.index(rank), len(column))
        model_rank = kind.model_ranks[group][place % kind.each]  # the first one of those that have these experts
        found |= of(part, f"stand={model_rank}", "e.", 10 + model_rank)
    return found


def of(one: Held, suffix: str, beginning: str, factor: int) -> Held:
    """The same of another model, of other ranks, and with another optimizer."""
    number = "state1/" if beginning else "state/"
    found: Held = {}
    for name, (tensors, values) in one.items():
        kind, _, rest = name.partition("/")
        whole = f"{kind}/{beginning}{rest}"
        named = whole + (f"{',' if '#' in whole else '#'}{suffix}" if suffix else "")
        scaled = {key.replace("state/", number): tensor * factor for key, tensor in tensors.items()}
        found[named] = scaled, {"places": {number: values["places"]["state/"]}} if values else {}
    return found


def rules_of(kind: Kind, model_rank: int) -> list[TensorRule]:
    group = kind.group(model_rank)
    suffix = f"stand={group}" if len(kind.model_ranks) > 1 else ""
    found = [replace(rule, suffix=suffix) for rule in megatron_rules()]
    for first in range(kind.each):
        for rule in megatron_rules():
            begun, _, rest = rule.shard.partition("/")
            found.append(
                replace(
                    rule,
                    name=f"experts {first}/{rule.name}",
                    shard=f"{begun}/e.{rest}",
                    key=rule.key.replace("state/", "state1/"),
                    pattern=EveryNth(rule.pattern, kind.each, first),
                    suffix=f"stand={kind.model_ranks[group][first]}",
                )
            )
    return found


def model_ranks_of(kind: Kind, model_rank: int) -> tuple[int, ...]:
    group = kind.model_ranks[kind.group(model_rank)]
    return group if len(group) > 1 else ()


def shards_of(kind: Kind, rank: int, replicas: int) -> list[LooseShard]:
    shape = kind.shape(replicas)
    model_rank = shape.model_rank(rank)
    sharing = Sharing(shape, model_ranks_of(kind, model_rank) or (model_rank,))
    assert list(sharing.ranks) == sharers(kind, replicas, model_rank)
    found = {}
    for rule in rules_of(kind, model_rank):
        name = rule.shard_at(sharing.place(rank), sharing.size)
        if name:
            places = [place for place in range(sharing.size) if rule.shard_at(place, sharing.size) == name]
            found[name] = LooseShard(name, tuple(sharing.ranks[place] for place in places))
    return list(found.values())


def save(folder: Path, kind: Kind, replicas: int) -> Path:
    shape = kind.shape(replicas)
    for rank in range(shape.world):
        mine, has = shards_of(kind, rank, replicas), held(kind, rank, replicas)
        assert {shard.name for shard in mine} == has.keys(), (rank, replicas)
        for shard in mine:
            tensors, plain = has[shard.name]
            spec = ShardSpec({k: TensorSpec(tuple(t.shape), t.dtype) for k, t in tensors.items()}, plain)
            for key, live in shard.allocate(spec).items():
                live.copy_(tensors[key])
        model_rank = shape.model_rank(rank)
        writing = CheckpointFallback(
            folder, rank=rank, world=shape.world, keep=100, shape=shape, model_ranks=model_ranks_of(kind, model_rank)
        )
        rules = tuple(rules_of(kind, model_rank))
        writing.commit(7, mine, local_state=b"own", common=b"common", generation=0, rules=rules)
        assert writing.wait(30) and writing.close(5)
    last = newest(folder)
    assert last is not None and last[0] == 7
    return last[1]


def check(path: Path, kind: Kind, replicas: int) -> None:
    """Each rank has what it would have, bit for bit, padding and places included."""
    shape = kind.shape(replicas)
    for rank in range(shape.world):
        model_rank = shape.model_rank(rank)
        mine = [Dirty(shard.name, shard.holders) for shard in shards_of(kind, rank, replicas)]
        options = {
            "rules": rules_of(kind, model_rank),
            "sharing": Sharing.of_rank(shape, rank, model_ranks_of(kind, model_rank)),
        }
        assert load(path, mine, rank=rank, world=shape.world, elastic=True, **options).common == b"common"  # type: ignore[arg-type]
        expected = held(kind, rank, replicas)
        assert {shard.name for shard in mine} == expected.keys()
        for shard in mine:
            tensors, values = expected[shard.name]
            found = shard.tensors()
            assert found.keys() == tensors.keys() and shard.spec().values == values, (shard.name, rank, replicas)
            for key, tensor in tensors.items():
                assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), (shard.name, key, rank)


@pytest.mark.parametrize(("name", "before", "after"), CHANGES)
def test_any_number_of_replicas_reads_it(name: str, before: int, after: int, tmp_path: Path) -> None:
    check(save(tmp_path / "c", KINDS[name], before), KINDS[name], after)


def test_as_many_replicas_read_it(tmp_path: Path) -> None:
    check(save(tmp_path / "c", KINDS["experts"], 1), KINDS["experts"], 1)


def test_boxes_that_are_shown_are_all_of_it(tmp_path: Path) -> None:
    found = contents(save(tmp_path / "c", KINDS["experts, stages"], 1))
    assert found.any_size and found.ranks == 4
    boxes = {tensor.name: tensor.boxes for tensor in found.tensors}
    assert len(boxes) == len(found.tensors) == 2 * 3 * len(megatron_rules())
    assert sum(box.size for some in boxes["e/param#stand=1"].values() for box in some) == 640
    assert {*boxes["experts 1/e/param#stand=3"]} == {3}


def test_every_file_is_checked(tmp_path: Path) -> None:
    """Each rank's part is cut short, missing, and has other bits: that is said, with its name."""
    kind, replicas = KINDS["experts"], 2
    path, dice = save(tmp_path / "c", kind, 1), random.Random(5)
    for rank in range(2):
        part = path / f"part-{rank}"
        (file,) = part.glob("*.distcp")
        content = file.read_bytes()
        damaged = bytearray(content)
        for at in range(0, len(damaged), 64):
            damaged[at] ^= 1 << dice.randrange(8)
        for bad in (bytes(damaged), content[: len(content) // 3]):
            file.write_bytes(bad)
            with pytest.raises(DamagedCheckpointError, match=rf"part-{rank}/"):
                check(path, kind, replicas)
        file.unlink()
        with pytest.raises(DamagedCheckpointError, match=rf"part-{rank}/"):
            check(path, kind, replicas)
        file.write_bytes(content)
    check(path, kind, replicas)
    shutil.rmtree(path / "part-0")
    with pytest.raises(DamagedCheckpointError):
        check(path, kind, replicas)


def loaded(path: Path, kind: Kind, replicas: int, *, of: Kind) -> None:
    """As a job of ``kind`` that has the shards and rules of another one."""
    shape = kind.shape(replicas)
    shards: Sequence[LooseShard] = shards_of(of, 0, replicas)
    rules, sharing = rules_of(of, 0), Sharing.of_rank(shape, 0, model_ranks_of(kind, 0))
    load(path, shards, rank=0, world=shape.world, elastic=True, rules=rules, sharing=sharing)


@pytest.mark.parametrize("replicas", [1, 2])
def test_other_places_that_divide_it_are_refused(replicas: int, tmp_path: Path) -> None:
    """Tensor parallelism of two has replicas of two ranks, too; there each place divides its own."""
    kind = KINDS["context"]
    path = save(tmp_path / "c", kind, 1)
    alone = replace(kind, model_ranks=((0,), (1,)))
    with pytest.raises(RestoreError, match=r"among the model ranks \[0, 1\] together, and this job's"):
        loaded(path, alone, replicas, of=kind)
    with pytest.raises(RestoreError, match="another number of the same replicas"):
        loaded(path, KINDS["experts, stages"], replicas, of=kind)


@pytest.mark.parametrize("replicas", [1, 2])
def test_other_experts_are_refused(replicas: int, tmp_path: Path) -> None:
    path = save(tmp_path / "c", KINDS["experts"], 1)
    with pytest.raises(RestoreError, match="'experts 0/a/param'"):
        loaded(path, KINDS["context"], replicas, of=KINDS["context"])
    saved = save(tmp_path / "d", KINDS["context"], 1)
    with pytest.raises(RestoreError, match="'experts 0/a/param'"):
        loaded(saved, KINDS["experts"], replicas, of=KINDS["experts"])


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    rules = tuple(rules_of(KINDS["experts"], 0))
    assert from_plain(*codec.loads(codec.dumps(to_plain(rules)))) == rules
    manifest = manifests_of(save(tmp_path / "c", KINDS["experts, tensor"], 1), [3])[3]
    assert (manifest.model_ranks, manifest.shape) == ((1, 3), ReplicaShape(1, 4))
    assert manifest.sharing(3).ranks == (1, 3)
