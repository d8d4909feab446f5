"""Nodes that a device plugin has warned of are replaced together with what fails next."""

from __future__ import annotations

from flashrecovery import events as ev
from flashrecovery.controller.state.nodes import NodeState
from flashrecovery.plan.membership.placement import Room
from flashrecovery.plan.restore.proactive_replacement import Warned, proactive_replacements
from flashrecovery.plan.restore.types import Holding, Kind, Need
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.unit.test_machine import World
from tests.unit.test_nodes import heir

SPARE = Room("x", "s2", 2, spare=True)
NEEDS = [Need(r, "w", 100) for r in range(4)] + [Need(r, f"capsule@{r}", 5) for r in range(4)]


def held(live: tuple[int, ...], local_states: dict[int, tuple[int, ...]], version: int = 7) -> list[Holding]:
    """``live``: ranks that hold the replicated shard; ``local_states``: whose rank-local states each rank holds."""
    found = [Holding(r, "w", version, Kind.LIVE, 100) for r in live]
    return found + [
        Holding(r, f"capsule@{of}", version, Kind.COPY, 5) for r, owners in local_states.items() for of in owners
    ]


EVERYBODY = {0: (0, 2), 1: (1, 3), 2: (2, 0), 3: (3, 1)}


def test_a_warned_node_moves_to_a_spare_one_as_a_whole() -> None:
    warned = [Warned("b", "s1", (2, 3))]
    assert proactive_replacements(warned, [SPARE], NEEDS, held((0, 1, 2, 3), EVERYBODY)) == {"b": "x"}
    assert proactive_replacements([], [SPARE], NEEDS, held((0, 1, 2, 3), EVERYBODY)) == {}


def test_it_stays_where_no_healthy_spare_node_has_room() -> None:
    warned, all_held = [Warned("b", "s1", (2, 3))], held((0, 1, 2, 3), EVERYBODY)
    for room in (
        Room("x", "s2", 1, spare=True),
        Room("x", "s2", 4),
        Room("x", "s2", 2, spare=True, suspect=True),
    ):
        assert proactive_replacements(warned, [room], NEEDS, all_held) == {}


def test_it_stays_if_it_has_the_only_copy_of_anything() -> None:
    """Rank 0 has died; its rank-local state, and rank 2's own, are left on rank 2's node only."""
    after_death = held((1, 2, 3), {1: (1, 3), 2: (2, 0), 3: (3, 1)})
    assert proactive_replacements([Warned("b", "s1", (2, 3))], [SPARE], NEEDS, after_death) == {}
    # Rank 3 has died, on the warned node itself: what it holds, the others hold, too.
    after_death = held((0, 1, 2), {0: (0, 2), 1: (1, 3), 2: (2, 0)})
    assert proactive_replacements([Warned("b", "s1", (2, 3))], [SPARE], NEEDS, after_death) == {"b": "x"}


def test_it_stays_if_the_others_would_have_to_go_back_further() -> None:
    older = held((0, 1, 2, 3), EVERYBODY, version=6) + held((2, 3), {2: (0, 1, 2, 3)}, version=7)
    assert proactive_replacements([Warned("b", "s1", (2, 3))], [SPARE], NEEDS, older) == {}


def test_of_two_warned_nodes_that_hold_each_others_state_one_moves() -> None:
    spares = [SPARE, Room("y", "s3", 2, spare=True)]
    warned = [Warned("b", "s1", (2, 3)), Warned("a", "s1", (0, 1))]
    assert proactive_replacements(warned, spares, NEEDS, held((0, 1, 2, 3), EVERYBODY)) == {"a": "x"}


def test_the_others_move_if_one_cannot() -> None:
    """The first in order holds too many ranks for the spare node; the second fits."""
    warned = [Warned("a", "s1", (0, 1, 3)), Warned("b", "s1", (2,))]
    assert proactive_replacements(warned, [SPARE], NEEDS, held((0, 1, 2, 3), EVERYBODY)) == {"b": "x"}


def test_it_moves_to_another_domain_if_it_can() -> None:
    """Then to the node that fits best."""
    warned, all_held = [Warned("b", "s2", (2, 3))], held((0, 1, 2, 3), EVERYBODY)
    others = [Room("y", "s3", 4, spare=True), Room("z", "s3", 2, spare=True)]
    assert proactive_replacements(warned, [SPARE, *others], NEEDS, all_held) == {"b": "z"}
    assert proactive_replacements(warned, [SPARE, others[0]], NEEDS, all_held) == {"b": "y"}


# -- the machine ----------------------------------------------------------------------------------


class Copies(World):
    """Every rank keeps the rank-local state of a rank of the node before."""

    def answer(self, rank: int, command: pb.Command) -> None:
        if command.WhichOneof("body") != "stop":
            super().answer(rank, command)
            return
        version, size = self.version[rank], self.config.world_size
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=rank, live_version=version)
        for owner in (rank, (rank - self.config.nproc_per_node) % size):
            reply.held.add(kind="copy", version=version, shards=[f"capsule@{owner}"], nbytes=[5])
        self.machine.on_reply(reply, self.now)


def warned(*nodes: str, size: int = 2) -> Copies:
    world = Copies(size, nnodes=4 // size, spare_nodes=1, controller="h:1", steps=30)
    for name in nodes or ("a", "b", "x"):
        world.join(name)
    while world.machine.job.state is not State.RUNNING or world.version[0] < 3:
        world.step()
    world.machine.job.nodes["b"].suspect = "host: disk: 0.5 GiB free"
    return world


def test_its_ranks_are_further_victims_of_the_next_recovery() -> None:
    world = warned()
    world.kill(3)
    while world.machine.job.state is not State.RUNNING or world.machine.job.recovery is not None:
        assert world.step()
    (finished,) = world.of(ev.RecoveryFinished)
    assert isinstance(finished, ev.RecoveryFinished)
    assert sorted(finished.victims) == [2, 3] and finished.cause == "killed" and finished.resume_step == 3
    assert {r.rank: r.home for r in world.machine.job.ranks.values()} == {0: "a", 1: "a", 2: "x", 3: "x"}
    assert sorted(world.machine.job.ranks[r].local_rank for r in (2, 3)) == [0, 1]
    (notice,) = [e for e in world.of(ev.Notice) if isinstance(e, ev.Notice) and e.kind == "node_replaced"]
    assert "ranks 2 and 3 go to node x" in notice.text and "0.5 GiB free" in notice.text
    assert world.machine.job.nodes["b"].state is NodeState.LOST
    world.join("b", incarnation="second")
    again = world.machine.job.nodes["b"]
    assert again.state is NodeState.SPARE and again.suspect, "back as a spare, and the last one to be taken"
    assert world.run() is State.FINISHED


def test_a_new_controller_hears_of_it_from_the_agents() -> None:
    new = heir(warned())
    assert new.machine.job.state is State.RUNNING and not new.of(ev.RecoveryStarted)
    assert [n.name for n in new.machine.job.nodes.values() if n.suspect] == ["b"]
    new.kill(3)
    assert new.run() is State.FINISHED
    (finished,) = new.of(ev.RecoveryFinished)
    assert isinstance(finished, ev.RecoveryFinished) and sorted(finished.victims) == [2, 3]
    assert [new.machine.job.ranks[r].home for r in range(4)] == ["a", "a", "x", "x"]


def test_without_a_spare_node_it_keeps_its_ranks() -> None:
    world = warned("a", "b")
    world.kill(3)
    assert world.run() is State.FINISHED
    (finished,) = world.of(ev.RecoveryFinished)
    assert isinstance(finished, ev.RecoveryFinished) and finished.victims == [3]
    assert world.machine.job.nodes["b"].state is NodeState.ACTIVE


def test_it_keeps_its_ranks_if_the_dead_rank_leaves_it_with_the_only_copy() -> None:
    world = warned()
    world.kill(0)
    world.machine.job.ranks[0].inventory.local_states = ()
    assert world.run() is State.FINISHED
    (finished,) = world.of(ev.RecoveryFinished)
    assert isinstance(finished, ev.RecoveryFinished) and finished.victims == [0]


def test_a_further_failure_while_they_move() -> None:
    world = warned("a", "b", "c", "d", "x", size=1)
    world.kill(1)
    while not [e for e in world.of(ev.Notice) if isinstance(e, ev.Notice) and e.kind == "node_replaced"]:
        assert world.step()
    world.kill(3)
    assert world.run() is State.FINISHED
    assert [world.machine.job.ranks[r].home for r in range(4)] == ["a", "x", "c", "d"]


def test_a_node_with_a_broken_device_is_warned_of() -> None:
    world = warned()
    world.machine.job.nodes["b"].suspect = ""
    world.kill(2, kind="device")
    assert world.run() is State.FINISHED
    assert {world.machine.job.ranks[r].home for r in (2, 3)} == {"x"}


def test_a_node_that_is_being_left_keeps_its_ranks_until_then() -> None:
    """A recovery on the way is none for its ranks, which are built up elsewhere."""
    world = warned()
    world.machine.job.nodes["b"].leaving = True
    world.kill(1)
    while world.machine.job.state is not State.RUNNING or world.machine.job.recovery is not None:
        assert world.step()
    (finished,) = world.of(ev.RecoveryFinished)
    assert isinstance(finished, ev.RecoveryFinished) and finished.victims == [1]
    assert [world.machine.job.ranks[r].home for r in (2, 3)] == ["b", "b"]
