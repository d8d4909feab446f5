"""Parity between real processes: what is held where, when, and that it is exact."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from flashrecovery.plan.parity.code import StripePart
from flashrecovery.plan.parity.decodable import Decodable, decodable
from flashrecovery.redundancy.memory.peer_exchange import CopyContext
from flashrecovery.redundancy.parity.copies import GroupMember, ParityCopies
from tests.integration.redundancy.test_neighbour import Owned, local_state_of, shards_of
from tests.support.parity_group import naive_parity
from tests.support.ranks import results, run_ranks

BUCKET = 1 << 12


def made(
    rank: int, world: int, ranks: Sequence[int], losses: int, numel: int = 5000, bucket: int | None = BUCKET
) -> tuple[ParityCopies, list[Owned]]:
    mine = shards_of(rank, world, numel)
    member = GroupMember(rank, tuple(ranks), losses, bucket=bucket)
    return ParityCopies(CopyContext(dist.group.WORLD), member, mine), mine


def step(copies: ParityCopies, rank: int, version: int) -> None:
    copies.commit(version, local_state_of(rank, version))
    copies.wait()


def advance(copies: ParityCopies, mine: list[Owned], version: int) -> None:
    """All ranks together go on to ``version``."""
    dist.barrier()
    copies.before_mutation()
    for shard in mine:
        shard.advance(version)


def clean(copies: ParityCopies) -> list[int]:
    """Versions of which this rank holds all of its parity, of any encoding."""
    held = copies.held(-1)
    return sorted({v for e in held.encodings for v in (e.p & e.q if copies.losses == 2 else e.p)})


def check(copies: ParityCopies, version: int) -> None:
    """This rank's parity is that of its group's bytes; it knows what belongs to the version on the members before."""
    everybody: list[tuple[int, bytes]] = [(0, b"")] * dist.get_world_size()
    dist.all_gather_object(everybody, (dist.get_rank(), bytes(copies._flat(version))))
    contents = [dict(everybody)[rank] for rank in copies.ranks]
    (encoding,) = [e for e in copies._encodings if version in e.held()[StripePart.P]]
    assert encoding.layout.sizes == tuple(map(len, contents))
    for (stripe, part), store in encoding.member.stores.items():
        held = b"".join(bytes(store.bucket(version, b)) for b in range(encoding.layout.buckets(stripe)))
        assert held == naive_parity(encoding.layout, stripe, part, contents), (version, stripe, part)
    me = copies.ranks.index(dist.get_rank())
    before = {copies.ranks[(me - i) % len(copies.ranks)] for i in range(1, copies.losses + 1)}
    assert {t.owner for t in copies.held(-1).told if t.version == version} == before
    for owner in before:
        source = copies.source(f"capsule@{owner}", version)
        assert source.tensors[0].numpy().tobytes() == local_state_of(owner, version)
    assert {h.shard for h in copies.holdings() if h.version == version} == {f"capsule@{owner}" for owner in before}


def _steady(rank: int, world: int, losses: int) -> int:
    copies, mine = made(rank, world, range(world), losses)
    memory = 0
    for version in range(6):
        step(copies, rank, version)
        assert clean(copies) == sorted({max(0, version - 1), version})
        check(copies, version)
        if version:
            check(copies, version - 1)  # at version 1 optimizer state has appeared: that of 0 is laid out otherwise
        if version >= 4:
            assert copies.nbytes() == memory  # reused
        memory = copies.nbytes()
        advance(copies, mine, version + 1)
    assert len(copies._encodings) == 1 and "survives" in copies.describe()
    copies.close()
    assert "flashrecovery-parity" not in {t.name for t in threading.enumerate()}
    return memory


@pytest.mark.parametrize(("world", "losses"), [(2, 1), (3, 1), (4, 1), (3, 2), (5, 2)])
def test_two_versions_are_held_exactly(tmp_path: Path, world: int, losses: int) -> None:
    results(run_ranks(_steady, world, tmp_path, losses))


def _large(rank: int, world: int, losses: int) -> None:
    """Several batches to each member, longer than what lies in a socket's buffers."""
    copies, mine = made(rank, world, range(world), losses, numel=2 << 20, bucket=None)
    for version in range(4):
        step(copies, rank, version)
        check(copies, version)
        advance(copies, mine, version + 1)
    copies.close()


@pytest.mark.parametrize(("world", "losses"), [(3, 1), (3, 2)])
def test_batches_do_not_get_into_each_others_memory(tmp_path: Path, world: int, losses: int) -> None:
    results(run_ranks(_large, world, tmp_path, losses))


def _without_one(rank: int, world: int) -> None:
    copies, mine = made(rank, world, range(world), 1)
    for version in range(5):
        whole = version != 2 or rank != 1
        copies.commit(version, local_state_of(rank, version) if whole else None)
        copies.wait()
        assert clean(copies)[-1] == (1 if version == 2 else version)
        check(copies, clean(copies)[-1] if version != 2 else 1)
        advance(copies, mine, version + 1)
    copies.close()


def test_what_one_member_does_not_vouch_for_is_not_made(tmp_path: Path) -> None:
    """Of version 2, which one of them has changed while it was copied; the next ones are made again."""
    results(run_ranks(_without_one, 3, tmp_path))


def _regrouped(rank: int, world: int) -> None:
    first, second = ((0, 1, 2), (3, 4, 5)), ((0, 2, 4), (1, 3, 5))
    (ranks,) = (ranks for ranks in first if rank in ranks)
    copies, mine = made(rank, world, ranks, 1)
    for version in range(3):
        step(copies, rank, version)
        if version < 2:
            advance(copies, mine, version + 1)
    check(copies, 2)
    (ranks,) = (ranks for ranks in second if rank in ranks)
    copies.regroup(ranks)
    assert copies.ranks != ranks and clean(copies) == [1, 2], "not before the resume: the old parity may be needed"
    copies.reset(1, 2)
    assert copies.ranks == ranks and clean(copies) == [] and not copies.holdings()
    step(copies, rank, 2)
    check(copies, 2)
    held = [copies.held(2)] * world
    dist.all_gather_object(held, copies.held(2))
    lost = [one for one in held if one.rank not in (0, 1)]  # one of each new group
    found: list[Decodable] = [one for one in decodable(lost) if one.order.version == 2]
    assert sorted(rank for one in found for rank in (one.order.ranks[m] for m in one.order.lost)) == [0, 1]
    copies.close()


def test_other_groups_from_a_recovery_on(tmp_path: Path) -> None:
    results(run_ranks(_regrouped, 6, tmp_path))


def _again(rank: int, world: int) -> None:
    """The same version again, after a recovery in which rank 1 was replaced: what is whole stays as it is."""
    copies, mine = made(rank, world, range(world), 2)
    for version in range(3):
        step(copies, rank, version)
        if version < 2:
            advance(copies, mine, version + 1)
    if rank == 1:
        copies.close()
        copies, fresh = made(rank, world, range(world), 2)
        mine[:] = fresh
        for shard in mine:
            shard.advance(2)
    copies.reset(1, 2)
    assert clean(copies) == ([] if rank == 1 else [1, 2])
    step(copies, rank, 2)
    check(copies, 2)
    advance(copies, mine, 3)
    step(copies, rank, 3)
    check(copies, 3)
    copies.close()


def test_a_recovery_makes_again_only_what_was_lost(tmp_path: Path) -> None:
    results(run_ranks(_again, 4, tmp_path))
