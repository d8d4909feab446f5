"""Nodes as the controller sees them: which begin, which takes the place of a lost one, which is lost at all."""

from __future__ import annotations

import re

import pytest

from flashrecovery import events as ev
from flashrecovery.agent.peers.client import neighbours
from flashrecovery.config import Timeouts, load_run_config
from flashrecovery.controller.membership.admission import refusal
from flashrecovery.controller.service.status import job_status
from flashrecovery.controller.state.rank_record import Place
from flashrecovery.controller.state.rank_table import Parts, RankTable, affected
from flashrecovery.errors import ConfigError
from flashrecovery.plan.membership.electors import Elector
from flashrecovery.plan.membership.leases import LOOK_S, decides_for_s, halts_after_s
from flashrecovery.plan.membership.liveness import Ask, Liveness, Lost, Unheard
from flashrecovery.plan.membership.membership import NodeStatus, Port, Reach, Seen, lost, node_status, reach
from flashrecovery.plan.membership.placement import Room, neighbour_stride, place
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.link import Link
from tests.unit.test_machine import World

LIMITS = Timeouts()


# -- placement ------------------------------------------------------------------------------------


def test_a_spare_node_takes_all_ranks_of_a_lost_one() -> None:
    rooms = [Room("a", "s1", 4), Room("b", "s2", 2, spare=True), Room("c", "s1", 2, spare=True)]
    assert place([2, 3], rooms, lost_domain="s1") == {2: "b", 3: "b"}
    assert place([2, 3], rooms, lost_domain="s2") == {2: "c", 3: "c"}


def test_without_a_spare_free_slots_are_used_on_one_node_if_possible() -> None:
    assert place([0, 1], [Room("a", "a", 1), Room("b", "b", 2), Room("c", "c", 1)]) == {0: "b", 1: "b"}
    assert place([0, 1], [Room("a", "a", 1), Room("b", "b", 1), Room("c", "c", 0)]) == {0: "a", 1: "b"}
    assert place([0, 1, 2], [Room("a", "a", 1), Room("b", "b", 1)]) is None


def test_a_node_with_a_warning_comes_last() -> None:
    assert place([0], [Room("a", "a", 4, spare=True, suspect=True), Room("b", "b", 1)]) == {0: "b"}


def test_copies_go_to_another_domain() -> None:
    assert neighbour_stride(["a"], 8) == 1
    assert neighbour_stride(["a", "b"], 8) == 8
    assert neighbour_stride(["s1", "s1", "s2", "s2"], 4) == 8
    assert neighbour_stride(["s1", "s1", "s1"], 2) == 2  # no other domain: at least another node


def test_each_agent_gets_its_part_of_the_rank_table() -> None:
    entries = [pb.RankEntry(rank=r, node=f"n{r // 2}", peer=f"n{r // 2}:1") for r in range(10)]
    parts = Parts(RankTable(tuple(entries), stride=2))
    assert {e.rank for e in parts.part_for("n1").ranks} == {2, 3, 4, 5, 6, 7}  # itself, its keepers
    assert {e.rank for e in parts.part_for("n4").ranks} == {8, 9, 0, 1, 2, 3}
    assert {e.rank for e in parts.part_for("spare").ranks} == {0, 2}


def test_a_node_that_has_all_ranks_is_told_of_others() -> None:
    """Else it would know of no one by whom it could tell that it is cut off."""
    others = tuple((name, f"{name}:1") for name in ("b", "c", "d"))
    all_on_c = [pb.RankEntry(rank=r, node="c0", peer="c0:1") for r in range(2)]
    parts = Parts(RankTable(tuple(all_on_c), 1, others))
    assert neighbours(parts.part_for("c0"), "c0") == ["d:1", "b:1"]
    assert neighbours(parts.part_for("d"), "d") == ["c0:1"]
    fewer = Parts(RankTable(tuple(all_on_c), 1, others[1:]))
    assert affected(parts, fewer) == {"c0"} and affected(parts, parts) == set()
    on_two = [*all_on_c[:1], pb.RankEntry(rank=1, node="a", peer="a:1")]
    two = Parts(RankTable(tuple(on_two), 1, others))
    assert neighbours(two.part_for("c0"), "c0") == ["a:1"], "which shares the ranks"
    assert affected(two, Parts(RankTable(tuple(on_two), 1, ()))) == set()


def test_a_node_that_has_all_ranks_hears_of_others_as_they_come_and_go() -> None:
    world = running("a", "x", nproc=2, nnodes=1, spare_nodes=1)
    assert world.tables[-1].others == (("x", "x:1"),)
    world.join("y")
    assert world.tables[-1].others == (("x", "x:1"), ("y", "y:1"))
    world.machine.on_node_lost("x", "silent", 1.0, world.now)
    world.collect()
    assert world.tables[-1].others == (("y", "y:1"),)
    world.machine.on_node_lost("a", "silent", 1.0, world.now)
    world.collect()
    assert {r.home for r in world.machine.job.ranks.values()} == {"y"}
    world.run()
    assert world.tables[-1].others == ()


def test_where_ranks_are_on_several_nodes_no_table_is_sent_for_a_spare_one() -> None:
    world = running("a", "b", nproc=1, spare_nodes=1)
    tables = len(world.tables)
    world.join("x")
    assert len(world.tables) == tables


def test_a_new_controller_tells_of_the_others_though_it_has_to_recover() -> None:
    """It begins no process, for none is missing."""
    old = running("a", "x", nnodes=1, spare_nodes=1)
    old.machine.job.nodes = {name: old.machine.job.nodes[name] for name in ("x", "a")}  # the order in which they come
    world = heir(old, stepping=False)
    assert world.machine.job.state is State.QUIESCING and not any(c.HasField("replace") for _, c in world.inbox)
    assert [table.others for table in world.tables] == [(("x", "x:1"),)]


@pytest.mark.parametrize(("only", "refused"), [("", False), ("a", False), ("b", True)])
def test_a_job_of_one_node_takes_no_other_one(only: str, refused: bool) -> None:
    """That node has no lease, as it reckons with no one."""
    found = refusal(pb.Register(node="a"), {}, None, there=False, only=only)
    assert (found is not None) is refused
    assert found is None or "spare_nodes = 1" in found.text


# -- liveness -------------------------------------------------------------------------------------


def heard(*names: str, at: float = 0.0) -> Liveness:
    liveness = Liveness(LIMITS)
    for name in names:
        liveness.heard(name, at)
    return liveness


def run(liveness: Liveness, begin: float, end: float, alive: tuple[str, ...]) -> list[tuple[float, object]]:
    """Look every 50 ms while ``alive`` go on to be heard; what is found, and when."""
    found: list[tuple[float, object]] = []
    now = begin
    while now <= end:
        for name in alive:
            liveness.heard(name, now)
        found += [(now, f) for f in liveness.check(now)]
        now = round(now + 0.05, 3)
    return found


def test_a_silent_node_that_nobody_reaches_is_lost_within_a_second() -> None:
    liveness = heard("a", "b", "c")
    (asked_at, first), (_, second), (lost_at, lost) = run(liveness, 0.0, 2.0, ("a", "c"))
    assert {first, second} == {Ask("c", "b"), Ask("a", "b")} and asked_at == LIMITS.node_silence_s
    assert isinstance(lost, Lost) and lost.node == "b" and lost_at <= 1.0
    assert "c (no answer)" in lost.evidence


def test_a_short_silence_is_none() -> None:
    liveness = heard("a", "b")
    assert run(liveness, 0.0, 0.6, ("a",)) == []
    assert run(liveness, 0.65, 1.2, ("a", "b")) == []


def test_a_node_that_another_one_reaches_keeps_its_ranks() -> None:
    liveness = heard("a", "b", "c")
    found: list[object] = []
    now = 0.0
    while now < 10.0:
        for name in ("a", "c"):
            liveness.heard(name, now)
        new = liveness.check(now)
        for ask in new:
            if isinstance(ask, Ask):
                liveness.answered(ask.observer, ask.suspect, ask.observer == "c", "refused")
        found += new
        now += 0.05
    assert not any(isinstance(f, Lost) for f in found)
    assert [f for f in found if isinstance(f, Unheard)] == [f for f in found if isinstance(f, Unheard)][:1]


def test_a_controller_that_hears_nobody_is_cut_off_itself() -> None:
    liveness = heard("a", "b", "c")
    found = [f for _, f in run(liveness, 0.0, 60.0, ())]
    assert [f for f in found if isinstance(f, Unheard)] == found and {f.node for f in found} == {"a", "b", "c"}
    later = [f for _, f in run(liveness, 60.05, 63.0, ("a", "c"))]
    assert [f.node for f in later if isinstance(f, Lost)] == ["b"], "now there is someone to ask"


def test_the_node_of_the_controllers_process_is_never_lost() -> None:
    liveness = Liveness(LIMITS, own="a")
    liveness.heard("a", 0.0)
    liveness.disconnected("a")
    assert run(liveness, 0.0, 9.0, ()) == []


def test_a_broken_connection_is_asked_about_at_once_and_lost_after_the_silence() -> None:
    """That the others are refused proves nothing: a firewall may have answered for a node whose ranks take steps."""
    liveness = heard("a", "b")
    liveness.check(0.0)
    liveness.disconnected("b")
    assert liveness.check(0.05) == [Ask("a", "b")]
    found: list[tuple[float, object]] = []
    for now in [0.1 + 0.05 * i for i in range(20)]:
        liveness.heard("a", now)
        liveness.answered("a", "b", False, "refused")
        found += [(now, f) for f in liveness.check(now)]
    (lost_at, lost), *asks = sorted(found, key=lambda f: not isinstance(f[1], Lost))
    assert isinstance(lost, Lost) and "refused" in lost.evidence
    assert LIMITS.node_silence_s <= lost_at <= LIMITS.node_silence_s + 0.051, "nothing is added for what is dead"
    asked_at = [at for at, ask in asks if ask == Ask("a", "b")]
    assert len(asked_at) == len(asks) and lost_at - max(asked_at) <= LIMITS.node_probe_s + 0.051, "and asked again"


def test_a_node_that_another_one_vouches_for_is_not_lost() -> None:
    """It counts the controller as heard then, and its ranks take steps; also if no process reaches it from outside."""
    liveness = heard("a", "b", "c")
    found: list[tuple[float, object]] = []
    for now in [0.05 * i for i in range(100)]:
        liveness.heard("a", now)
        liveness.heard("c", now)
        if now < 3.0:
            liveness.vouches("c", "b", now)
        for observer in "ac":
            liveness.answered(observer, "b", False, "refused")
        found += [(now, f) for f in liveness.check(now) if not isinstance(f, Ask)]
    (_, unheard), (lost_at, lost) = found
    assert isinstance(unheard, Unheard) and unheard.observer == "c"
    assert isinstance(lost, Lost) and lost_at >= 2.95 + LIMITS.node_silence_s


def test_an_agent_that_connects_again_in_time_has_lost_nothing() -> None:
    liveness = heard("a", "b")
    liveness.check(0.0)
    liveness.disconnected("b")
    liveness.check(0.05)
    liveness.heard("b", 0.08)
    assert liveness.check(0.1) == []


def test_after_a_pause_of_its_own_the_controller_suspects_nobody() -> None:
    liveness = heard("a", "b")
    liveness.check(0.0)
    assert liveness.check(5.0) == []
    assert run(liveness, 5.05, 5.3, ("a", "b")) == []


# -- lease ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("port", "enough", "vouched", "silent_s", "expected"),
    [
        (Port.SILENT, False, False, 0.4, NodeStatus.CUT_OFF),
        (Port.SILENT, True, False, 0.4, NodeStatus.CUT_OFF),  # they may have been cut off with us
        (Port.SILENT, False, True, 9.0, NodeStatus.MEMBER),
        (Port.ACCEPTS, False, False, 0.5, NodeStatus.MEMBER),  # busy
        (Port.ACCEPTS, True, False, 9.0, NodeStatus.MEMBER),
        (Port.ACCEPTS, False, False, 0.8, NodeStatus.CUT_OFF),  # or its host's kernel, and the others have another one
        (Port.REFUSES, True, False, 0.4, NodeStatus.ORPHANED),
        (Port.REFUSES, False, False, 0.4, NodeStatus.CUT_OFF),  # a firewall says so
        (Port.REFUSES, False, True, 0.4, NodeStatus.MEMBER),
    ],
)
def test_standing(port: Port, enough: bool, vouched: bool, silent_s: float, expected: NodeStatus) -> None:
    assert node_status(port, Reach(enough, vouched), silent_s, LIMITS) is expected


@pytest.mark.parametrize(
    ("electors", "seen", "enough"),
    [
        ("", "", True),  # there is no other node
        ("", "x", False),
        ("", "x Y", True),
        ("ABC", "b c", False),
        ("ABC", "B c", True),
        ("ABC", "X Y", False),  # others that elect no one
        ("BCD", "B c d", False),
        ("BCD", "B C d", True),
    ],
)
def test_who_is_reached(electors: str, seen: str, enough: bool) -> None:
    """From node a. Upper case: it has answered."""
    named = [Elector(e.lower(), f"{e.lower()}:1", "") for e in electors]
    answers = [Seen(f"{s.lower()}:1", s.isupper()) for s in seen.split()]
    assert reach(answers, named, "a") == Reach(enough, vouched=False)


@pytest.mark.parametrize(
    ("found", "port", "silent_s", "expected"),
    [
        (NodeStatus.ORPHANED, Port.REFUSES, 0.4, True),
        (NodeStatus.CUT_OFF, Port.SILENT, 0.8, False),
        (NodeStatus.CUT_OFF, Port.SILENT, 1.0, True),
        (NodeStatus.MEMBER, Port.SILENT, 10.0, False),  # a neighbour hears it
        (NodeStatus.MEMBER, Port.ACCEPTS, 2.0, False),  # busy
        (NodeStatus.MEMBER, Port.ACCEPTS, 3.0, True),  # it stands still
    ],
)
def test_when_a_controller_is_lost(found: NodeStatus, port: Port, silent_s: float, expected: bool) -> None:
    assert lost(found, port, silent_s, LIMITS) is expected


def test_a_node_halts_before_its_ranks_are_given_away() -> None:
    """The sums behind the defaults, in seconds. The node counts from the sending of its last answered heartbeat, the
    controller from its arrival, which is later."""
    assert halts_after_s(LIMITS.lease_s, LIMITS.node_probe_s) <= 0.9 * LIMITS.node_silence_s
    # A node that another one has vouched for counts from the sending of its question, and asks as often.
    assert LIMITS.lease_s + LOOK_S < LIMITS.node_silence_s
    # An elector votes a lease after it has received something; the controller decides from the sending of that.
    assert decides_for_s(LIMITS.node_silence_s) <= LIMITS.lease_s


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lease_s": 0.5}, "lease_s = 0.5, node_probe_s = 0.25, node_silence_s = 0.75: a node that is cut off"),
        ({"node_probe_s": 0.5}, "would halt after 0.75 s"),
        ({"node_silence_s": 0.6}, "= 0.54"),
        ({"lease_s": 0.3}, "allowed: lease_s of at least 0.5 * node_silence_s = 0.375"),
    ],
)
def test_time_outs_with_which_a_rank_could_live_twice_are_refused(given: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_run_config(None, {"timeouts": given})
    load_run_config(None, {"timeouts": {"node_silence_s": 3.0, "lease_s": 1.6, "node_probe_s": 1.0}})


# -- the machine ----------------------------------------------------------------------------------


def test_the_job_begins_when_all_nodes_are_there() -> None:
    world = World(2, nnodes=2, spare_nodes=1, controller="h:1")
    world.join("b", node_rank=1)
    assert not world.inbox
    world.join("x", spare=True)
    world.join("a", node_rank=0)
    homes = {r.rank: r.home for r in world.machine.job.ranks.values()}
    assert homes == {0: "a", 1: "a", 2: "b", 3: "b"} and world.machine.job.stride == 2
    assert world.run() is State.FINISHED


def test_nodes_that_never_come_are_not_waited_for_for_ever() -> None:
    """From the first one's coming on; one that has left an elastic job, and is to be there when all of it starts again,
    is named like any other that is missing. No one who waits for a first node waits for less."""
    world = World(2, nnodes=2, spare_nodes=1, controller="h:1", timeouts={"rendezvous_s": 30.0})
    world.machine.on_tick(1000.0)
    world.join("a")
    world.join("x", spare=True)
    for now in (1000.0, 1029.9):
        world.machine.on_tick(now)
        assert world.machine.job.state is State.STARTING
    world.machine.on_tick(1030.0)
    assert world.machine.job.state is State.FAILED
    assert (
        "1 of 2 nodes have come within 30 s (timeouts.rendezvous_s): a; and spare ones: x."
        in world.machine.job.failure_reason
    )


def test_who_has_come_is_said_while_others_are_waited_for() -> None:
    """Not of nodes that come one right after another, and once for each that has come."""
    world = World(2, nnodes=3, controller="h:1", timeouts={"rendezvous_s": 900.0})
    for name, now in (("a", 0.0), ("b", 100.0)):
        world.join(name)
        for passed in (0.0, 2.9, 3.0, 4.0, 50.0):
            world.machine.on_tick(now + passed)
            world.collect()
    texts = [e.text for e in world.of(ev.Notice) if isinstance(e, ev.Notice) and e.kind == "waiting_for_node"]
    assert texts == [
        "1 of 3 nodes have come (a); waiting for the others, for at most 897 s more (timeouts.rendezvous_s)",
        "2 of 3 nodes have come (a and b); waiting for the others, for at most 797 s more (timeouts.rendezvous_s)",
    ]


def test_a_job_that_has_begun_or_runs_already_waits_as_ever() -> None:
    world = World(2, nnodes=2, controller="h:1", timeouts={"rendezvous_s": 30.0})
    world.join("a")
    world.machine.on_tick(0.0)
    world.join("b")
    world.machine.on_tick(1000.0)
    assert world.machine.job.state is not State.FAILED


def test_a_lost_node_is_replaced_as_a_whole_in_one_recovery() -> None:
    world = World(2, nnodes=2, spare_nodes=1, controller="h:1")
    for name in ("a", "b", "x"):
        world.join(name)
    while world.machine.job.state is not State.RUNNING:
        world.step()
    world.inbox = [(r, c) for r, c in world.inbox if r not in (2, 3)]
    world.machine.on_node_lost("b", "silent", 1.0, world.now)
    world.collect()
    (lost,) = world.of(ev.NodeLost)
    assert isinstance(lost, ev.NodeLost) and lost.ranks == [2, 3]
    assert {r.home for r in world.machine.job.ranks.values() if r.rank > 1} == {"x"}
    assert world.machine.job.generation == 1
    replaces = [c.replace for r, c in world.inbox if c.HasField("replace")]
    assert [r.local_rank for r in replaces] == [0, 1] and all(r.node_rank == 1 for r in replaces)


def replacement_that_starts() -> World:
    """Node "a", whose store it is asked to use, can be lost while the replacement of rank 2 is on its way."""
    world = running("a", "b", "c", "x", nproc=1, nnodes=3, spare_nodes=1)
    world.kill(2)
    (replace,) = [c.replace for _, c in world.inbox if c.HasField("replace")]
    assert replace.store_host == "a"
    world.inbox.clear()
    world.machine.on_started(pb.WorkerStarted(rank=2, generation=1, pid=77), "c", "c")
    return world


def test_a_replacement_whose_store_is_lost_is_started_again() -> None:
    world = replacement_that_starts()
    world.machine.on_node_lost("a", "silent", 1.0, world.now)
    world.collect()
    replaces = {r: c.replace.store_host for r, c in world.inbox if c.HasField("replace")}
    assert replaces == {0: "x", 2: "x"}
    assert world.run() is State.FINISHED


def test_a_replacement_goes_on_when_another_node_is_lost() -> None:
    world = replacement_that_starts()
    world.machine.on_node_lost("b", "silent", 1.0, world.now)
    world.collect()
    assert [r for r, c in world.inbox if c.HasField("replace")] == [1]
    assert world.machine.job.ranks[2].place is Place.STARTING


def test_who_keeps_the_copies_of_whom_and_how_old_they_are() -> None:
    world = running()
    ranks = list(world.machine.job.ranks.values())
    health = [
        pb.RankHealth(rank=r.rank, pid=r.process.pid, committed=9, kept=9 - r.rank, kept_age_s=0.5) for r in ranks[:3]
    ]
    world.machine.on_heartbeat(pb.Heartbeat(ranks=health), world.now)
    found = job_status(world.machine, Liveness(LIMITS), (0, 0), world.now + 2, world.now + 2).ranks
    assert [(r.copied, r.copied_by, r.copy_age_s) for r in found] == [(7, 2, 2.5), (0, 0, 0), (9, 0, 2.5), (8, 1, 2.5)]
    world.kill(1)
    found = job_status(world.machine, Liveness(LIMITS), (0, 0), world.now, world.now).ranks
    assert not found[3].copied, "gone with its keeper"


def test_ranks_wait_for_a_node_and_the_job_fails_when_none_comes() -> None:
    world = World(1, nnodes=2, controller="h:1", timeouts={"node_wait_s": 10})
    world.join("a")
    world.join("b")
    while world.machine.job.state is not State.RUNNING:
        world.step()
    world.machine.on_node_lost("b", "silent", 1.0, world.now)
    world.collect()
    assert world.machine.job.ranks[1].home == "" and world.machine.job.state is not State.FAILED
    world.machine.on_tick(world.now + 11)
    assert world.machine.job.state is State.FAILED and "no node with room" in world.machine.job.failure_reason


def test_ranks_that_wait_get_the_node_that_comes() -> None:
    world = World(1, nnodes=2, controller="h:1")
    world.join("a")
    world.join("b")
    while world.machine.job.state is not State.RUNNING:
        world.step()
    world.machine.on_node_lost("b", "silent", 1.0, world.now)
    world.collect()
    world.join("c")
    assert world.machine.job.ranks[1].home == "c" and world.machine.job.ranks[1].place is Place.EMPTY
    assert any(r == 1 and c.HasField("replace") and c.replace.detached for r, c in world.inbox)


def test_a_lost_node_that_speaks_again_is_fenced_and_comes_back_as_a_spare() -> None:
    world = World(1, nnodes=2, spare_nodes=1, controller="h:1")
    for name in ("a", "b", "x"):
        world.join(name)
    world.machine.on_node_lost("b", "silent", 1.0, world.now)
    world.collect()
    world.inbox.clear()
    world.join("b")
    assert [c.HasField("fence") for _, c in world.inbox] == [True]
    world.join("b", incarnation="second")
    assert world.machine.job.nodes["b"].alive and world.machine.job.nodes["b"].state.value == "spare"


def test_a_node_that_is_told_to_run_something_else_is_named() -> None:
    world = World(1, nnodes=3, controller="h:1")
    for node, flags in enumerate((["--tp", "2", "--flash-recovery"], ["--tp", "2"], ["--tp", "4", "--flash-recovery"])):
        world.join(f"node{node}", command=["train.py", *flags])
    texts = [e.text for e in world.of(ev.Notice) if isinstance(e, ev.Notice) and e.kind == "other_command"]
    assert texts == [
        "only node node0 has --flash-recovery",
        "only node node2 has 4; only node node0 has 2",
    ]


def test_two_nodes_of_one_rank_are_refused() -> None:
    world = World(1, nnodes=2, controller="h:1")
    world.join("a", node_rank=1)
    world.join("b", node_rank=1)
    assert world.machine.job.state is State.FAILED and "--node-rank 1" in world.machine.job.failure_reason


# -- a new controller -----------------------------------------------------------------------------


def heir(world: World, *, missing: tuple[int, ...] = (), **states: object) -> World:
    """The same workers under a new controller, which hears of all but the ``missing`` ones. ``states``: of every
    worker, in place of being in its loop."""
    config = world.config
    new = type(world)(
        config.nproc_per_node,
        nnodes=config.nnodes,
        spare_nodes=config.spare_nodes,
        steps=world.steps,
        controller="h:1",
        timeouts={"takeover_s": 5},
    )
    new.version, new.pids, new.next_pid, new.now = world.version, world.pids, world.next_pid, world.now
    old = world.machine.job
    for node in old.nodes.values():
        workers = [
            pb.WorkerState(
                rank=r.rank,
                pid=r.process.pid,
                local_rank=r.local_rank,
                joined=pb.Joined(
                    rank=r.rank,
                    steps=r.steps,
                    needs=[pb.ShardNeed(name=n, nbytes=b) for n, b in r.inventory.needs.items()],
                ),
                **{"resumed": True, "stepping": True, **states},  # type: ignore[arg-type]
            )
            for r in old.ranks.values()
            if r.home == node.name and r.rank not in missing
        ]
        new.join(node.name, workers=workers, generation=old.generation, stride=old.stride, suspect=node.suspect)
    return new


def running(*nodes: str, nproc: int = 2, **config: object) -> World:
    """On two nodes, or on ``nodes``."""
    world = World(nproc, **{"nnodes": 2, "controller": "h:1", **config})  # type: ignore[arg-type]
    for name in nodes or ("a", "b"):
        world.join(name)
    while world.machine.job.state is not State.RUNNING or world.inbox:
        world.step()
    return world


def test_a_new_controller_goes_on_where_everybody_steps() -> None:
    new = heir(running())
    assert new.machine.job.state is State.RUNNING and new.machine.job.generation == 0
    assert new.run() is State.FINISHED and not new.of(ev.RecoveryStarted)


def test_a_new_controller_starts_nothing_though_a_spare_node_comes_first() -> None:
    """No one has said that it is a spare one; that the job runs, it knows by its rank table."""
    old = running("a", "x", nnodes=1, spare_nodes=1)
    old.machine.job.nodes = {name: old.machine.job.nodes[name] for name in ("x", "a")}  # the order in which they come
    world = heir(old)
    assert not any(c.HasField("replace") or c.HasField("fence") for _, c in world.inbox)
    assert world.run() is State.FINISHED and not world.of(ev.RecoveryStarted)


def test_a_new_controller_still_recovers() -> None:
    new = heir(running())
    new.kill(1)
    assert new.run() is State.FINISHED
    (finished,) = new.of(ev.RecoveryFinished)
    assert finished.generation == 1


def test_a_new_controller_ends_the_recovery_that_the_old_one_had_begun() -> None:
    new = heir(running(), stepping=False)
    assert new.machine.job.state is State.QUIESCING and new.machine.job.generation == 1
    assert new.run() is State.FINISHED


def test_a_new_controller_replaces_who_died_meanwhile() -> None:
    new = heir(running(), missing=(2, 3))
    assert new.machine.job.state is State.STARTING
    new.machine.on_tick(new.now + 6)
    new.collect()
    assert new.machine.job.generation == 1 and new.machine.job.ranks[3].home == "b"  # which has room for them
    assert new.run() is State.FINISHED


@pytest.mark.parametrize("store", ["a", "lost"])
def test_a_new_controller_starts_replacements_again_whose_store_is_lost(store: str) -> None:
    world = running()
    new = World(2, nnodes=2, controller="h:1", timeouts={"takeover_s": 5})
    new.version, new.pids = world.version, world.pids
    for name, ranks in (("a", (0, 1)), ("b", (2, 3))):
        states = [pb.WorkerState(rank=r, pid=world.pids[r], local_rank=r % 2, store_host=store) for r in ranks]
        for state in states:
            if state.rank != 3:
                state.resumed = True
                state.joined.CopyFrom(pb.Joined(rank=state.rank, steps=3, needs=[pb.ShardNeed(name="w", nbytes=1)]))
        new.join(name, workers=states, generation=1, stride=2)
    assert new.machine.job.state is State.QUIESCING
    assert [r for r, c in new.inbox if c.HasField("replace")] == ([3] if store == "lost" else [])


def test_a_stale_node_is_fenced_by_a_new_controller() -> None:
    world = running()
    new = heir(world)
    new.inbox.clear()
    stale = pb.WorkerState(rank=2, pid=9, resumed=True)
    new.join("z", workers=[stale], generation=0)
    assert [c.HasField("fence") for _, c in new.inbox] == [True]
    assert new.machine.job.ranks[2].home == "b"


# -- configuration and link -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"nnodes": 2}, "--controller"),
        ({"nnodes": 2, "controller": "h:1", "node_rank": 2}, "node_rank = 2"),
        ({"nproc_per_node": 4, "slots": 2}, "slots = 2"),
    ],
)
def test_wrong_keys_about_nodes(values: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_run_config(None, values)


async def _take(link: Link[pb.Command, pb.AgentMessage], number: int) -> list[pb.Command]:
    out = link.outgoing()
    return [await anext(out) for _ in range(number)]


def test_the_controller_has_torchruns_port_by_default() -> None:
    assert load_run_config(None, {"nnodes": 2, "controller": "node0"}).controller == "node0:29400"
    assert load_run_config(None, {"nnodes": 2, "controller": "node0:1"}).controller == "node0:1"


def test_a_broken_connection_loses_nothing_and_repeats_nothing() -> None:
    import asyncio

    async def main() -> None:
        here: Link[pb.Command, pb.AgentMessage] = Link()
        there: Link[pb.AgentMessage, pb.Command] = Link()
        for serial in (1, 2, 3):
            here.send(pb.Command(serial=serial))
        first = await _take(here, 3)
        assert [there.accept(c) for c in first[:2]] == [True, True]  # the third is lost with the connection
        again = await _take(here, 3)
        assert [there.accept(c) for c in again] == [False, False, True]
        there.send(pb.AgentMessage())
        out = there.outgoing()
        here.accept(await anext(out))
        assert here.settled()

    asyncio.run(main())
