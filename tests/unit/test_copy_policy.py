"""Which copies a job has, by what is known of it at its start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrecovery.errors import UnsupportedError
from flashrecovery.plan.elastic.replicas import ReplicaShape
from flashrecovery.plan.parity.copies_or_parity import CopyChoice
from flashrecovery.worker.replication.policy import (
    CopyFacts,
    PeerProtection,
    choose_policy,
    one_node_risk,
    refuse_copies_on_one_node,
    refuse_settings,
)

FIXED = CopyFacts(
    rank=0,
    world=4,
    redundancy="auto",
    elastic=False,
    parallelism=False,
    changed_layout=False,
    sharded=False,
    shape=ReplicaShape(4),
    most_replicas=None,
    nodes=1,
    unique=(),
)
TWO_NODES = replace(FIXED, nodes=2)
ELASTIC = replace(FIXED, elastic=True)
SHARDED = replace(ELASTIC, sharded=True)
ACROSS = replace(ELASTIC, parallelism=True, shape=ReplicaShape(2, 2))
PARITY = CopyChoice(parity=True, fits=True, reason="it is smaller")


@pytest.mark.parametrize(
    ("facts", "copied", "protection", "needs_ring"),
    [
        (FIXED, True, PeerProtection.NEIGHBOUR, True),
        (TWO_NODES, False, PeerProtection.LOCAL_STATE, True),
        (FIXED, False, PeerProtection.NOTHING, True),  # for what may turn out to be each rank's own
        (replace(FIXED, redundancy="replica"), False, PeerProtection.NOTHING, False),
        (replace(FIXED, parallelism=True), False, PeerProtection.NOTHING, False),
        (replace(FIXED, world=1), False, PeerProtection.NOTHING, False),
        (replace(TWO_NODES, redundancy="none"), True, PeerProtection.NOTHING, False),
        (ELASTIC, False, PeerProtection.NOTHING, False),
        (replace(ELASTIC, most_replicas=4), False, PeerProtection.NOTHING, False),
        (replace(ELASTIC, most_replicas=5), False, PeerProtection.LOCAL_STATE, True),  # on nodes to come
        (SHARDED, True, PeerProtection.RING_OF_EACH_SIZE, True),
        (SHARDED, False, PeerProtection.NOTHING, False),
        (ACROSS, False, PeerProtection.RING_OF_EACH_SIZE, True),
    ],
)
def test_who_keeps_what(facts: CopyFacts, copied: bool, protection: PeerProtection, needs_ring: bool) -> None:
    policy = choose_policy(facts, copied)
    assert (policy.protection, policy.needs_ring) == (protection, needs_ring)


def test_parity_is_of_one_size_of_the_job() -> None:
    chosen = choose_policy(TWO_NODES, True, PARITY, ((0, 2), (1, 3)))
    assert (chosen.protection, chosen.needs_ring, chosen.reason) == (PeerProtection.PARITY, False, "it is smaller")
    assert chosen.parity_groups == ((0, 2), (1, 3))
    assert choose_policy(replace(SHARDED, nodes=2), True, PARITY).protection is PeerProtection.RING_OF_EACH_SIZE


def test_copies_that_may_not_fit_are_a_risk_and_no_reason() -> None:
    policy = choose_policy(TWO_NODES, True, CopyChoice(parity=False, fits=False, reason="8 GB of 4"))
    assert policy.reason == ""
    assert policy.risks == ("the copies may not fit into the nodes' memory: 8 GB of 4",)


def test_settings_that_do_not_fit_are_refused() -> None:
    refuse_settings(replace(FIXED, unique=("w",)))
    with pytest.raises(UnsupportedError, match="a world of one rank has no peer"):
        refuse_settings(replace(FIXED, world=1, redundancy="neighbor"))
    with pytest.raises(UnsupportedError, match="the first is 'w'"):
        refuse_settings(replace(FIXED, redundancy="replica", unique=("w", "v")))


def test_state_of_one_node_is_refused_at_the_launch_and_a_risk_afterwards() -> None:
    facts = replace(ELASTIC, shape=ReplicaShape(2, 2))
    with pytest.raises(UnsupportedError, match="one node has all that there is"):
        one_node_risk(facts, True)
    later = replace(facts, changed_layout=True)
    assert "must not be lost" in one_node_risk(later, True) and choose_policy(later, True).risks
    assert not one_node_risk(facts, False) and not one_node_risk(replace(facts, sharded=True), True)
    assert not one_node_risk(replace(facts, parallelism=True, shape=ReplicaShape(1, 4)), True)


def test_a_keeper_on_the_owners_node_is_refused() -> None:
    facts = replace(SHARDED, nodes=2, keepers=(2, 3, 0, 1), domains=("a", "a", "b", "b"))
    refuse_copies_on_one_node(facts)
    with pytest.raises(UnsupportedError, match="rank 1 keeps the copies of what rank 0 has alone, on the same node"):
        refuse_copies_on_one_node(replace(facts, keepers=(1, 0, 3, 2)))
