"""Which rank keeps whose copies: workers and the controller come to the same by themselves, in every size and shape of
a job, from what the environment of any process says, however late it was started."""

from __future__ import annotations

from itertools import combinations

import pytest

from flashrecovery.config import RunConfig
from flashrecovery.controller.state.job_state import JobState
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.plan.membership.placement import neighbour_stride, shared_domains
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.environment import common_env, rank_env
from flashrecovery.worker.replication.policy import neighbour_of, ring_among

SHAPES = [ReplicaShape(4), ReplicaShape(6), ReplicaShape(4, 2), ReplicaShape(4, 1, 2), ReplicaShape(3, 2, 2)]

DOMAINS = ["a", "ab", "aa", "abcd", "aabb", "aaab"]
"""Of each node."""


def job_of(shape: ReplicaShape, nodes: int, domains: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> JobState:
    """As it was launched, in the environment of its processes."""
    per_node = shape.world // nodes
    elastic = {"min": 1, "max": shape.replicas}
    job = JobState(
        RunConfig.model_validate({"nproc_per_node": per_node, "nnodes": nodes, "controller": "h:1", "elastic": elastic})
    )
    job.stride, job.domains = neighbour_stride(domains, per_node), shared_domains(domains)
    replace = pb.Replace(stride=job.stride, domains=job.domains)
    for name, value in {**common_env(job.config), **rank_env(job.config, 0, 3, replace)}.items():
        monkeypatch.setenv(name, value)
    return job


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("shape", "domains"),
    [(shape, tuple(domains)) for shape in SHAPES for domains in DOMAINS if shape.world % len(domains) == 0],
    ids=str,
)
def test_both_come_to_the_same_ring(
    shape: ReplicaShape, domains: tuple[str, ...], sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = len(domains)
    for size in range(2, shape.replicas + 1):
        for replicas in combinations(range(shape.replicas), size):
            job = job_of(shape, nodes, domains, monkeypatch)
            members = sorted(rank for replica in replicas for rank in shape.ranks(replica))
            for record in job.in_order:
                record.shape = shape
                record.inventory.sharded = frozenset(["part"]) if sharded else frozenset()
            for rank in set(job.ranks).difference(members):
                job.remove_member(rank)
            job.settle_layout()
            ring = ring_among(members, shape if sharded else None)
            keepers = {rank: members[place] for rank, place in zip(members, ring, strict=True)}
            assert job.keepers_of_copies() == keepers
            if sharded:
                assert job.keepers_of_parts() == keepers
            elif len(members) == shape.world:  # as a process has it that has seen no change
                assert keepers == {rank: neighbour_of(rank, shape.world) for rank in members}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.each > 1], ids=str)
def test_beyond_the_launch_too(shape: ReplicaShape, sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no rank keeps its own: with replicas that the launch did not have, whichever of it are left."""
    for replicas in ((0, shape.replicas), (*range(shape.replicas), shape.replicas + 1), (shape.replicas, 0, 1)):
        job = job_of(shape, 1, ("a",), monkeypatch)
        for record in job.in_order:
            record.shape = shape
            record.inventory.sharded = frozenset(["part"]) if sharded else frozenset()
        wanted = {rank for replica in replicas for rank in shape.ranks(replica)}
        for rank in wanted.difference(job.ranks):
            record = RankRecord(rank)
            record.shape, record.inventory.sharded = shape, frozenset(["part"]) if sharded else frozenset()
            job.enrol(record)
        for rank in set(job.ranks).difference(wanted):
            job.remove_member(rank)
        job.settle_layout()
        members = job.members
        assert job.membership.sharded_among == members == tuple(shape.in_order(wanted)), "as process groups count them"
        job.membership.sharded_among = tuple(
            sorted(members)
        )  # of a controller that does not know yet what they make up
        assert job.elastic_layout() == members
        ring = ring_among(members, shape if sharded else None)
        keepers = {rank: members[place] for rank, place in zip(members, ring, strict=True)}
        assert job.keepers_of_copies() == keepers and all(rank != keeper for rank, keeper in keepers.items())
        assert not sharded or all(
            shape.model_rank(rank) == shape.model_rank(keeper) for rank, keeper in keepers.items()
        )


def test_two_replicas_that_both_lack_a_rank() -> None:
    """Copies are where they were made: the job is not smaller by a replica yet."""
    shape = ReplicaShape(4, 2)
    job = JobState(RunConfig.model_validate({"nproc_per_node": 8, "elastic": {"min": 1, "max": 4}}))
    for record in job.in_order:
        record.shape, record.inventory.sharded = shape, frozenset(["part"])
    before = job.keepers_of_copies()
    for rank in (0, 3):
        job.remove_member(rank)
    assert job.keepers_of_copies() == {rank: before[rank] for rank in job.ranks}
