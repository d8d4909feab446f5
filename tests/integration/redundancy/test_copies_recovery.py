"""A small job whose state no two ranks share is killed at random moments, again and again, and goes on
exactly.

A parent in the controller's place stops the survivors, plans the cut with ``plan``, and has the lost shards
sent from the neighbours' copies, or decoded from parity. Real processes, real SIGKILL, real process groups.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import queue
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.errors import RestoreError, StepInterrupted
from flashrecovery.plan import Cut, Holding, Kind, Need, NoCut, newest_cut, plan_restore
from flashrecovery.plan.parity.decodable import DecodeOrder, ParityHeld, decodable, needed
from flashrecovery.redundancy.memory.neighbor_copy import NeighbourCopies, Ring
from flashrecovery.redundancy.memory.own_copy import write_back
from flashrecovery.redundancy.memory.peer_exchange import CopyContext, PeerCopies
from flashrecovery.redundancy.parity.copies import GroupMember, ParityCopies
from flashrecovery.snapshot import memory
from flashrecovery.state.object_shard import ObjectShard
from flashrecovery.state.shard import ShardSource
from flashrecovery.worker.transfer.transfer import exchange
from tests.integration.redundancy.test_neighbour import local_state_of, shards_of

WORLD = 5
WHOLE = 2
"""A version at which every rank has copies; before the first ones are whole nothing can be survived."""
NUMEL = 1 << 19
NEIGHBOUR, NEIGHBOUR_APART, PARITY_1, PARITY_2 = "neighbour", "neighbour-apart", "parity-1", "parity-2"


class Rank:
    """One training process: its step, its stop, its part of a recovery."""

    def __init__(self, rank: int, pipe: Any, folder: Path, generation: int, how: str) -> None:
        self.rank, self.pipe, self.folder, self.generation = rank, pipe, folder, generation
        self.fresh = generation > 0
        groups.install()
        groups.set_detached(self.fresh)
        dist.init_process_group("gloo", store=self.store(generation), rank=rank, world_size=WORLD)
        group = groups.create_control_group("copies")
        assert group is not None
        context = CopyContext(group, generation)
        self.shards = shards_of(rank, WORLD, NUMEL)
        self.local_state = ObjectShard(f"capsule@{rank}", (rank,))
        self.parity: ParityCopies | None = None
        if how in (PARITY_1, PARITY_2):
            losses = 1 if how == PARITY_1 else 2
            member = GroupMember(rank, tuple(range(WORLD)), losses, bucket=1 << 16)
            self.parity = ParityCopies(context, member, self.shards)
        ring = Ring.of_world(rank, WORLD)
        self.copies: PeerCopies = self.parity or NeighbourCopies(context, ring, self.shards)
        self.live = -1 if self.fresh else 0
        self.target = 1 << 60
        self.stopped = threading.Event()
        self.stops = 0
        self.asked = False
        self.spoil = ""
        self.inbox: queue.Queue[tuple[Any, ...]] = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()

    def store(self, generation: int) -> dist.Store:
        return dist.FileStore(str(self.folder / f"generation-{generation}"), WORLD)

    def listen(self) -> None:
        while True:
            message = self.pipe.recv()
            if message[0] == "whole?":
                self.asked = True
                continue
            if message[0] == "spoil":
                self.spoil = message[1]
                continue
            if message[0] == "target":
                self.target = message[1]
                continue
            if message[0] == "stop":
                self.stops += 1
                groups.abandon("stop")
                self.stopped.set()  # the waiter detaches the groups, which must not be abandoned then
            self.inbox.put(message)

    def run(self) -> str:
        if self.fresh:
            self.recover()
        else:
            self.commit()
        while self.live < self.target:
            try:
                self.step()
                if self.asked and self.live >= WHOLE:
                    self.asked = False
                    self.pipe.send(("whole",))
            except (RuntimeError, StepInterrupted):
                assert self.stopped.wait(20), "a step failed, but no stop came"
                self.recover()
        self.copies.wait()
        self.check(self.live)
        return f"ok at {self.live}"

    def commit(self) -> None:
        local_state = local_state_of(self.rank, self.live)
        self.local_state.keep(self.live, local_state)
        self.copies.commit(self.live, local_state)

    def step(self) -> None:
        self.copies.wait()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert self.stopped.is_set() or total.item() == WORLD
        self.copies.before_mutation()
        if self.stopped.is_set():
            raise StepInterrupted
        version, self.live = self.live, -1
        for shard in self.shards:
            shard.advance(version + 1)
        self.live = version + 1
        self.commit()

    def recover(self) -> None:
        stops = self.stops
        self.copies.halt(10.0)
        assert groups.drain(5.0).quiet
        groups.detach_all()
        self.do_spoil()
        held = None if self.parity is None else self.parity.held(self.live)
        self.pipe.send(("held", self.live, self.holdings(), held))
        _, generation, version, transfers, local, orders = self.inbox_until("restore")
        groups.attach(self.store(generation), generation, 30.0)
        mine = {s.name: s for s in self.shards}
        for order in orders:
            assert self.parity is not None
            try:
                self.parity.decode(groups.control_group(), order, self.live, groups.abandon)
            except (RestoreError, RuntimeError) as e:  # the other ranks hear that one has ended
                self.pipe.send(("refused", f"{type(e).__name__}: {e}"))
                os._exit(1)
        for name in local:
            if name != self.local_state.name:
                decoded = None if self.parity is None else self.parity.decoded(name, version)
                if decoded is not None:
                    write_back(decoded, mine[name])
                else:
                    self.copies.undo.restore(version, mine[name])
        outgoing: dict[int, list[ShardSource]] = {}
        incoming: dict[int, list[str]] = {}
        for t in transfers:
            if t.source == self.rank:
                outgoing.setdefault(t.dest, []).append(self.source(t, version))
            if t.dest == self.rank:
                incoming.setdefault(t.source, []).append(t.shard)
        report = exchange(groups.control_group(), outgoing, incoming, {**mine, self.local_state.name: self.local_state})
        assert not report.mismatched
        self.local_state.adopt(version)
        self.local_state.drop_after(version)
        self.check(version)
        self.pipe.send(("restored", report.bytes_received))
        self.inbox_until("resume")
        self.stopped.clear()
        if self.stops > stops:
            self.stopped.set()  # the next one has come already
        groups.set_detached(False)
        self.live = version
        self.copies.reset(generation, version)
        self.commit()

    def do_spoil(self) -> None:
        """Change one byte of what this rank holds: of its parity, or of its own copies."""
        assert not self.spoil or self.parity is not None
        if self.spoil == "parity" and self.parity is not None:
            for encoding in self.parity._encodings:
                for store in encoding.member.stores.values():
                    for slot in (0, 1):
                        store._content(slot, 0)[10] ^= 1
        elif self.spoil == "own" and self.parity is not None:
            for version in self.parity.undo.versions():
                slot = self.parity.undo.slot(version)
                assert slot is not None
                slot.buffer[:: 1 << 12] ^= 1

    def inbox_until(self, kind: str) -> tuple[Any, ...]:
        while (message := self.inbox.get(timeout=30))[0] != kind:
            pass
        return message

    def holdings(self) -> list[Holding]:
        held = []
        for s in self.shards:
            held += [Holding(self.rank, s.name, v, Kind.UNDO, 0) for v in self.copies.undo.versions()]
            if self.live >= 0:
                held.append(Holding(self.rank, s.name, self.live, Kind.LIVE, 0))
        held += [Holding(self.rank, self.local_state.name, v, Kind.UNDO, 0) for v in self.local_state.versions()]
        held += [Holding(self.rank, h.shard, h.version, Kind.COPY, 0) for h in self.copies.holdings()]
        return held

    def source(self, t: Any, version: int) -> ShardSource:
        if t.kind is Kind.COPY:
            return self.copies.source(t.shard, version)
        if t.kind is Kind.UNDO:
            return self.copies.undo.source(t.shard, version)
        shard = next(s for s in self.shards if s.name == t.shard)
        return ShardSource(t.shard, shard.spec(), list(shard.tensors().values()))

    def check(self, version: int) -> None:
        for shard in self.shards:
            expected = shard.expected(version)
            assert list(shard.live) == list(expected), shard.name
            assert all(torch.equal(shard.live[k], v) for k, v in expected.items()), (shard.name, version)
            assert shard.extra == {"count": version}
        assert self.local_state.at(version) == local_state_of(self.rank, version)


def _rank_main(rank: int, pipe: Any, folder: Path, generation: int, how: str) -> None:
    if how == NEIGHBOUR_APART:
        memory.host_id = lambda: rank  # copies are sent, as between hosts
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        pipe.send(("ended", Rank(rank, pipe, folder, generation, how).run()))
        pipe.recv()  # stay until all have ended
    except EOFError:
        pass
    except BaseException:  # noqa: BLE001 - shown, then the parent sees the pipe closed
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(0)


class Job:
    """The parent's side: processes, pipes, and a recovery in the controller's words."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder = folder
        self.how = how
        self.context = multiprocessing.get_context("fork")
        self.processes: dict[int, Any] = {}
        self.pipes: dict[int, Any] = {}
        self.generation = 0
        for rank in range(WORLD):
            self.start(rank)

    def start(self, rank: int) -> None:
        mine, theirs = self.context.Pipe()
        process = self.context.Process(target=_rank_main, args=(rank, theirs, self.folder, self.generation, self.how))
        process.start()
        theirs.close()
        self.processes[rank], self.pipes[rank] = process, mine

    def wait_whole(self) -> None:
        """Until all copies are whole: every rank has taken a step, which waits for them."""
        for pipe in self.pipes.values():
            pipe.send(("whole?",))
        for rank in range(WORLD):
            self.receive(rank, "whole")

    def kill(self, victims: list[int]) -> None:
        for rank in victims:
            os.kill(self.processes[rank].pid, signal.SIGKILL)
        for rank in victims:
            self.processes[rank].join()
            self.processes[rank].close()
            self.pipes[rank].close()

    def recover(self, victims: list[int], steps: int | None = None) -> Cut | NoCut:
        """``steps``: that many more are taken then, and the ranks end."""
        self.generation += 1
        for rank in set(range(WORLD)) - set(victims):
            self.pipes[rank].send(("stop",))
        for rank in victims:
            self.start(rank)
        said = [self.receive(rank, "held") for rank in range(WORLD)]
        parity = decodable([held for *_, held in said if isinstance(held, ParityHeld)])
        holdings = [h for _, _, held, _ in said for h in held] + [h for one in parity for h in one.holdings]
        names = {r: [*(s.name for s in shards_of(r, WORLD, 1)), f"capsule@{r}"] for r in range(WORLD)}
        needs = [Need(r, name, 0) for r, mine in names.items() for name in mine]
        cut = newest_cut(needs, holdings)
        if isinstance(cut, NoCut):
            return cut
        plan = plan_restore(needs, holdings, cut.version)
        orders = needed(parity, cut.version, {(i.rank, i.shard) for i in plan.local if i.kind is Kind.PARITY})
        for rank in range(WORLD):
            transfers = [t for t in plan.transfers if rank in (t.source, t.dest)]
            local = [i.shard for i in plan.local if i.rank == rank]
            mine: list[DecodeOrder] = [order for order in orders if rank in order.ranks]
            self.pipes[rank].send(("restore", self.generation, cut.version, transfers, local, mine))
        waiting = {self.pipes[rank]: rank for rank in range(WORLD)}
        while waiting:  # a rank that refuses says so at once; others may wait for it until they are asked to stop
            ready = multiprocessing.connection.wait(list(waiting), 40)
            assert ready, f"ranks {sorted(waiting.values())} have not been restored"
            for pipe in ready:
                kind, what = self.receive(waiting.pop(pipe), "restored", "refused")
                if kind == "refused" and "digest" in what:
                    raise RestoreError(what)
        for rank in range(WORLD):
            if steps is not None:  # before they go on: they might have passed it
                self.pipes[rank].send(("target", cut.version + steps))
            self.pipes[rank].send(("resume",))
        return cut

    def receive(self, rank: int, kind: str, other: str = "") -> tuple[Any, ...]:
        assert self.pipes[rank].poll(40), f"rank {rank}: no {kind!r}"
        try:
            message: tuple[Any, ...] = self.pipes[rank].recv()
        except EOFError:
            raise AssertionError(f"rank {rank} ended before {kind!r}") from None
        assert message[0] in (kind, other), message
        return message

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
            process.close()
        for pipe in self.pipes.values():
            pipe.close()


@contextmanager
def job(folder: Path, how: str = NEIGHBOUR) -> Iterator[Job]:
    running = Job(folder, how)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module", autouse=True)
def _backend() -> None:
    groups.build()


# What is killed together, and what is killed before the loss before it is whole again.
ONE = ([[1], [3], [0], [4], [2], [1]], 0.3)
SOME = ([[1], [3], [0], [0, 2], [2], [1, 3]], 0.3)
ANY_TWO = ([[1, 2], [3], [0, 1], [2, 4], [4, 0], [1, 3]], 0.3)
# Again before what the first loss has cost is whole again: what is left must stay whole.
AGAIN = ([[1], [1], [3], [1], [1], [3], [3], [1]], 0.01)
TWO_AGAIN = ([[1, 2], [1, 2], [3, 4], [3], [0, 1], [1], [4]], 0.01)
SELDOM = (pytest.mark.grid, pytest.mark.mutants)


@pytest.mark.parametrize(
    ("how", "series"),
    [
        (NEIGHBOUR, AGAIN),
        (NEIGHBOUR_APART, SOME),
        (PARITY_1, AGAIN),
        (PARITY_2, TWO_AGAIN),
        pytest.param(NEIGHBOUR, SOME, marks=SELDOM),
        pytest.param(NEIGHBOUR_APART, AGAIN, marks=SELDOM),
        pytest.param(PARITY_1, ONE, marks=SELDOM),
        pytest.param(PARITY_2, ANY_TWO, marks=SELDOM),
    ],
)
def test_kills_at_random_moments_are_survived_exactly(
    tmp_path: Path, how: str, series: tuple[list[list[int]], float]
) -> None:
    losses, longest_s = series
    chance = random.Random(len(losses))
    with job(tmp_path, how) as running:
        last, before = 0, list[int]()
        for number, victims in enumerate(losses, 1):
            if not {*victims} <= {*before}:
                # The loss of a rank whose own copies are not whole again is not survived.
                running.wait_whole()
            before = victims
            time.sleep(chance.uniform(0, longest_s))
            running.kill(victims)
            cut = running.recover(victims, 20 if number == len(losses) else None)
            assert isinstance(cut, Cut), cut
            assert cut.version >= last
            last = cut.version
        assert len({running.receive(rank, "ended")[1] for rank in range(WORLD)}) == 1


@pytest.mark.parametrize(("how", "victims"), [(NEIGHBOUR, [1, 2]), (PARITY_1, [1, 3]), (PARITY_2, [0, 2, 3])])
def test_more_losses_than_are_protected_are_not_survived_and_it_says_so(
    tmp_path: Path, how: str, victims: list[int]
) -> None:
    with job(tmp_path, how) as running:
        running.wait_whole()
        running.kill(victims)
        cut = running.recover(victims)
        assert isinstance(cut, NoCut)
        first = victims[0]
        assert {(first, f"w#{first}"), (first, f"bias#{first}")} <= set(cut.missing), cut


@pytest.mark.parametrize("what", ["parity", "own"])
def test_what_does_not_have_its_digest_is_refused(tmp_path: Path, what: str) -> None:
    """A byte is wrong on one of those that are left: nothing that comes out of it is taken for the lost rank's."""
    with job(tmp_path, PARITY_1) as running:
        running.wait_whole()
        for rank in (2, 3):
            running.pipes[rank].send(("spoil", what))
        running.kill([1])
        with pytest.raises(RestoreError, match=r"does not have its digest"):  # whichever rank has said so first
            running.recover([1])
