"""Workers and agents as a model, for the controller's machine: no process, and every message may be late or come twice.

A step is sealed, mutated, committed. A rank that has sealed has synchronised; a rank may mutate version v only when
every rank has sealed it, so neighbouring ranks are never more than a step apart, as in a job. What a worker holds is a
version for each shard: its live state, rank-local states and common state of its last versions, copies for the rank
before it, perhaps a pre-step copy. So a wrong version in any shard is seen when training goes on. What the controller
may decide is worked out here a second time, from nothing but the answers that it has been given.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from flashrecovery import events as ev
from flashrecovery.agent.monitoring.reply_batching import singly
from flashrecovery.config import RunConfig
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.state.outbox import Emit, Send
from flashrecovery.controller.state.rank_record import Place
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb

BROKEN = -99
"""Version of content that is not what was sent."""
Shards = dict[str, int]
OVER = (State.FINISHED, State.FAILED)


@dataclass(frozen=True)
class Layout:
    """``unique``: each rank has a shard that no other has, with a copy on the next rank. ``undo``: own pre-step copies.
    ``gather``: a rank that has begun to mutate needs all others to finish."""

    ranks: int = 4
    steps: int = 6
    unique: bool = False
    undo: bool = False
    gather: bool = False
    standby: bool = False


@dataclass
class Worker:
    """One process."""

    rank: int
    pid: int
    generation: int
    layout: Layout
    fresh: bool = True
    version: int = 0
    place: str = "starting"  # starting | waiting | training | done | released
    live: Shards = field(default_factory=dict)
    torn: bool = False
    sealed: bool = False
    mutating: bool = False
    held: bool = False
    mute: bool = False
    called_off: int = 0
    finish_to: int = -1
    kept: set[tuple[str, int]] = field(default_factory=set)  # plain state, and the own pre-step copy
    copies: set[tuple[str, int]] = field(default_factory=set)  # for the rank before it

    @property
    def shards(self) -> list[str]:
        own = [f"own/{self.rank}"] if self.layout.unique else []
        return ["w", *own, "common", self.local_state]

    @property
    def local_state(self) -> str:
        return f"capsule@{self.rank}"

    @property
    def live_version(self) -> int:
        return -1 if self.torn else self.version


class Model:
    """A job. ``act`` does one thing that could happen next."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        self.pick = Random(seed)
        limits = {"max_failures_per_step": 10**6, "max_kills_per_step": 10**6, "max_restarts": 10**6}
        self.config = RunConfig.model_validate({"nproc_per_node": layout.ranks, **limits})
        self.machine = Machine(self.config)
        self.now = 0.0
        self.workers: dict[int, Worker] = {}
        self.pages: dict[int, set[int]] = defaultdict(set)  # rank-local states in the agent's page of each rank
        self.down: dict[int, deque[pb.Command]] = defaultdict(deque)
        self.up: dict[int, deque[object]] = defaultdict(deque)
        self.past: list[object] = []
        self.checkpoints: set[int] = set()
        self.known: dict[int, set[tuple[str, int]]] = {}  # what the controller has been informed that each rank holds
        self.progress: dict[int, tuple[int, int]] = {}  # (generation, newest version committed in it)
        self.ordered: dict[int, int] = {}  # the generation in which each rank was last to be filled
        self.corrupt = 0
        self.corrupted = 0
        self.over = False  # someone has been let go
        self.pid = 100
        self.generation = 0
        self.decided = -1
        self.events: list[ev.Event] = []
        register = pb.Register(node="n", host="h", slots=layout.ranks, node_rank=-1, peer_port=1, incarnation="n")
        self.machine.on_register(register, self.now)
        self.collect()

    # -- from the machine -------------------------------------------------------------------------

    def collect(self) -> None:
        """Take the machine's actions, and check them."""
        machine = self.machine
        assert machine.job.generation >= self.generation, "generations only grow"
        self.generation = machine.job.generation
        for action in machine.job.take_actions():
            if isinstance(action, Emit):
                self.events.append(action.event)
                self._check_event(action.event)
            elif isinstance(action, Send):
                commands = list(singly(action.command)) if action.command.ranks else [action.command]
                for command in commands:
                    self._check_command(command)
                    if command.rank >= 0:
                        self.down[command.rank].append(command)

    def _check_event(self, event: ev.Event) -> None:
        if isinstance(event, ev.RecoveryFinished):
            for rank in range(self.layout.ranks):
                generation, version = self.progress.get(rank, (-1, -1))
                new = generation == event.generation and version > event.resume_step
                assert new or version >= self.layout.steps, f"rank {rank} has committed no step since: {event}"
        elif isinstance(event, ev.JobFailed):
            self._check_failure(event.reason)
        elif isinstance(event, ev.Notice) and event.kind == "start_again":
            assert self.cut() is None or self.machine.job.state is State.STARTING, (
                "everything from zero, although state is left"
            )
            self.known.clear()
            self.progress.clear()

    def _check_failure(self, reason: str) -> None:
        """The job may end only for what has happened to it."""
        if "its end state is lost" in reason:
            assert self.over, "no process had finished"
            return
        assert not self.checkpoints, f"there is a checkpoint: {reason}"
        if "no source is left" in reason:
            assert self.corrupted, "every transfer has arrived as it was sent"
            return
        assert "cannot be recovered" in reason or "no survivor" in reason, reason
        assert self.cut() is None, f"there is version {self.cut()}: {reason}"

    def cut(self) -> int | None:
        """The newest version at which everything exists, by what the controller has been told."""
        versions: dict[str, set[int]] = defaultdict(set)
        for held in self.known.values():
            for shard, version in held:
                versions[shard].add(version)
        wanted = [s for rank in range(self.layout.ranks) for s in Worker(rank, 0, 0, self.layout).shards]
        common = set.intersection(*(versions[s] for s in wanted))
        return max(common, default=None)

    def _check_command(self, command: pb.Command) -> None:
        body = command.WhichOneof("body")
        if body == "regroup" and command.generation != self.decided:
            self.decided = command.generation
            found, decided = self.cut(), self.machine.job.round.restoring
            assert decided is not None
            if self.machine.job.round.checkpoint:
                assert found is None, f"back to a checkpoint, although version {found} is there"
            else:
                assert decided.version == found, f"resumes at {decided.version}, not at {found}"
        elif body == "replace":
            self.known.pop(command.rank, None)
            self.ordered[command.rank] = command.generation
        elif body == "release":
            self.over = True
            assert all(w.version == self.layout.steps for w in self.workers.values()), "let go before all were done"

    # -- what happens -----------------------------------------------------------------------------

    def act(self) -> bool:
        """One thing that can happen next; False if nothing can but time."""
        moves = list(self._moves())
        if not moves or self.machine.job.state in OVER:
            return False
        kind, rank = self.pick.choice(moves)
        if kind == "up":
            self.hear(rank)
        elif kind == "down":
            self.tell(rank)
        elif kind == "come":
            self._come(self.workers[rank])
        else:
            self._step(self.workers[rank])
        self.collect()
        return True

    def _moves(self) -> Iterator[tuple[str, int]]:
        for rank in range(self.layout.ranks):
            worker = self.workers.get(rank)
            if self.up[rank]:
                yield "up", rank
            first = self.down[rank][0] if self.down[rank] else None
            if first is not None and (worker is None or not worker.mute or first.HasField("replace")):
                yield "down", rank
            if worker is not None and not worker.mute:
                if worker.place == "starting":
                    yield "come", rank
                elif worker.place == "training" and self._can_step(worker):
                    yield "step", rank

    def heartbeat(self) -> None:
        """Of all workers at once."""
        ranks = [
            pb.RankHealth(rank=w.rank, pid=w.pid, committed=self.progress[w.rank][1])
            for w in self.workers.values()
            if self.progress.get(w.rank, (-1,))[0] == w.generation == self.machine.job.generation
        ]
        message = pb.Heartbeat(generation=self.machine.job.generation, ranks=ranks)
        self.past.append(message)
        self.machine.on_heartbeat(message, self.now)
        self.collect()

    def wait(self, seconds: float) -> None:
        """Time passes; what has been said arrives within a second."""
        if seconds >= 1.0:
            for rank in range(self.layout.ranks):
                while self.up[rank] and self.machine.job.state not in OVER:
                    self.hear(rank)
                    self.collect()
        self.now += seconds
        if self.machine.job.state not in OVER:
            self.machine.on_tick(self.now)
        self.collect()

    def again(self) -> None:
        """Something that has been said comes a second time."""
        if self.past and self.machine.job.state not in OVER:
            self._deliver(self.pick.choice(self.past))
            self.collect()

    def checkpoint(self) -> None:
        """All ranks have saved what they have all committed."""
        saved = min((v for _, v in self.progress.values()), default=-1)
        if len(self.progress) == self.layout.ranks and saved > 0:
            self.checkpoints.add(saved)
            self.machine.on_checkpoint(saved, f"/c/{saved}")

    def living(self) -> list[int]:
        return [r for r, w in self.workers.items() if w.place != "released"]

    def kill(self, rank: int, kind: str = "killed", number: int = 9) -> None:
        """The process ends, and its agent says so."""
        worker = self.workers.pop(rank)
        failure = pb.Failure(rank=rank, pid=worker.pid, kind=kind, evidence="x", signal=number)
        failure.failed_at, failure.step = self.now, worker.version
        self.up[rank].append(failure)

    def mute(self, rank: int) -> None:
        """The process answers nothing any more."""
        self.workers[rank].mute = True

    def settle(self) -> None:
        """No more faults: whatever is frozen is found, everything arrives, and the job must come to an end."""
        self.corrupt = 0
        for rank, worker in list(self.workers.items()):
            if worker.mute:
                self.kill(rank, "stopped", 0)
        idle = 0
        for _ in range(30_000):
            if self.machine.job.state in OVER:
                return
            if self.act():
                idle = 0
                if self.pick.random() < 0.1:
                    self.heartbeat()
                continue
            self.heartbeat()
            self.wait(0.3 if idle < 8 else 40.0)
            idle += 1
            assert idle < 200, (
                f"waits for ever in {self.machine.job.state}: {self.machine.job.outbox.pending} {self.workers}"
            )
        raise AssertionError("no end")

    # -- the agent --------------------------------------------------------------------------------

    def hear(self, rank: int) -> None:
        """The controller gets the next message about this rank."""
        message = self.up[rank].popleft()
        if not isinstance(message, (pb.Failure, pb.Exited)):
            self.past.append(message)
        self._deliver(message)

    def _deliver(self, message: object) -> None:
        machine = self.machine
        if isinstance(message, pb.WorkerStarted):
            machine.on_started(message, "n", "h")
        elif isinstance(message, pb.Joined):
            if (
                machine.job.ranks[message.rank].place is Place.STARTING
                and message.generation == self.ordered[message.rank]
            ):
                self.known[message.rank] = {(shard, h.version) for h in message.held for shard in h.shards}
            machine.on_joined(message, self.now)
        elif isinstance(message, pb.Failure):
            machine.on_failure(message, self.now)
        elif isinstance(message, pb.Reply):
            self._learn(message)
            machine.on_reply(message, self.now)
        elif isinstance(message, pb.Done):
            machine.on_done(message, self.now)
        elif isinstance(message, pb.Exited):
            machine.on_exited(message, self.now)
        elif isinstance(message, pb.Heartbeat):
            machine.on_heartbeat(message, self.now)

    def _learn(self, message: pb.Reply) -> None:
        order = self.machine.job.outbox.pending.get(message.serial)
        waited_for = order is not None and order.what == "stop" and message.rank in order.waiting
        if message.generation != self.machine.job.generation or not waited_for or message.error_type:
            return
        held = {(shard, h.version) for h in message.held for shard in h.shards}
        if message.live_version >= 0:
            held |= {(s, message.live_version) for s in Worker(message.rank, 0, 0, self.layout).shards}
        self.known[message.rank] = held

    def tell(self, rank: int) -> None:
        """The next command for this rank arrives."""
        command = self.down[rank].popleft()
        body = command.WhichOneof("body")
        if body == "replace":
            self._fill(rank, command)
            return
        worker = self.workers.get(rank)
        if worker is None or worker.place == "starting":
            return
        if body == "hold":
            self._hold(worker, command)
        elif body == "stop":
            self._stop(worker, command)
        elif body == "release":
            worker.place = "released"
            self.up[rank].append(pb.Exited(rank=rank, pid=worker.pid))
        elif command.generation < worker.called_off:
            return  # something newer has been announced
        elif body == "regroup":
            self._answer(worker, command, "" if self._complete(command) else "RegroupError")
        elif body == "restore":
            self._restore(worker, command)
        elif body == "resume":
            self._resume(worker, command)

    def _fill(self, rank: int, command: pb.Command) -> None:
        self.workers.pop(rank, None)
        self.pid += 1
        worker = self.workers[rank] = Worker(rank, self.pid, command.generation, self.layout)
        worker.fresh = command.replace.detached
        if not worker.fresh:
            self.pages[rank].clear()
        local_states = sorted(self.pages[rank])
        self.up[rank].append(
            pb.WorkerStarted(rank=rank, generation=command.generation, pid=self.pid, local_states=local_states)
        )

    def _come(self, worker: Worker) -> None:
        worker.place = "waiting"
        joined = pb.Joined(rank=worker.rank, generation=worker.generation, steps=self.layout.steps)
        joined.needs.extend(pb.ShardNeed(name=s, nbytes=10) for s in worker.shards)
        if worker.fresh:
            worker.torn = True
            joined.held.extend(
                pb.Held(kind="page", version=v, shards=[worker.local_state], nbytes=[5])
                for v in sorted(self.pages[worker.rank])
            )
        else:
            worker.live = dict.fromkeys(worker.shards, 0)
            worker.kept = {("common", 0), (worker.local_state, 0)}
            self.pages[worker.rank] = {0}
        self.up[worker.rank].append(joined)

    def _complete(self, command: pb.Command) -> bool:
        """Whether every rank has a process that can take part."""
        there = [self.workers.get(r) for r in range(self.layout.ranks)]
        return all(w is not None and not w.mute and w.place != "starting" for w in there)

    # -- the worker -------------------------------------------------------------------------------

    def _can_step(self, worker: Worker) -> bool:
        if worker.called_off > worker.generation and not worker.mutating and worker.version >= worker.finish_to:
            return False
        others = [self.workers.get(r) for r in range(self.layout.ranks) if r != worker.rank]
        together = [w for w in others if w is not None and w.generation == worker.generation]
        if worker.mutating:
            return not self.layout.gather or len(together) == len(others)
        if not worker.sealed:
            return True
        if worker.held and worker.version >= worker.finish_to:
            return False
        return all(w.version > worker.version or (w.version == worker.version and w.sealed) for w in together) and (
            len(together) == len(others) or worker.version < worker.finish_to
        )

    def _step(self, worker: Worker) -> None:
        rank, version = worker.rank, worker.version
        if not worker.sealed:
            worker.sealed = True
            self._keep(worker, worker.local_state, version + 1)
            pages = self.pages[rank] | {version + 1}
            self.pages[rank] = set(sorted(pages)[-3:])
            keeper = self.workers.get((rank + 1) % self.layout.ranks)
            if self.layout.unique and keeper is not None and not keeper.mute:
                mine = {(f"own/{rank}", version), (worker.local_state, version)}
                keeper.copies = {c for c in keeper.copies if c[1] >= version - 1} | mine
        elif not worker.mutating:
            worker.mutating = worker.torn = True
            if self.layout.undo:
                self._keep(worker, "w", version)
                self._keep(worker, f"own/{rank}", version)
        else:
            worker.version += 1
            worker.mutating = worker.sealed = worker.torn = False
            worker.live = {shard: at + 1 for shard, at in worker.live.items()}
            self._keep(worker, "common", version + 1)
            self.progress[rank] = (worker.generation, worker.version)
            if worker.version == self.layout.steps and worker.called_off <= worker.generation:
                self._done(worker)

    def _done(self, worker: Worker) -> None:
        worker.place = "done"
        self.up[worker.rank].append(pb.Done(rank=worker.rank, generation=worker.generation, version=worker.version))

    @staticmethod
    def _keep(worker: Worker, shard: str, version: int) -> None:
        worker.kept = {k for k in worker.kept if k[0] != shard or k[1] >= version - 1} | {(shard, version)}

    def _hold(self, worker: Worker, command: pb.Command) -> None:
        if command.generation > worker.generation and command.generation >= worker.called_off:
            worker.held = True
        settled = worker.place in ("training", "done") and worker.called_off <= worker.generation
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=worker.rank)
        reply.position.CopyFrom(pb.Position(settled=settled, mutating=worker.mutating, version=worker.version))
        self.up[worker.rank].append(reply)

    def _stop(self, worker: Worker, command: pb.Command) -> None:
        """Whoever may finish its step does, as far as the others let it."""
        if command.generation <= worker.generation or command.generation < worker.called_off:
            return
        worker.called_off, worker.finish_to = command.generation, command.stop.finish_to
        while worker.place == "training" and (worker.mutating or worker.version < worker.finish_to):
            if not self._can_step(worker) or self.pick.random() < 0.05:  # ... or it waits for the dead rank too long
                break
            self._step(worker)
        worker.place, worker.held, worker.sealed, worker.mutating = "waiting", False, False, False
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=worker.rank)
        reply.live_version = worker.live_version
        for shard, version in sorted(worker.kept):
            if shard in worker.shards and version != worker.live_version:
                reply.held.add(kind="undo", version=version, shards=[shard], nbytes=[5])
        for version in sorted(self.pages[worker.rank]) if worker.fresh else ():
            reply.held.add(kind="page", version=version, shards=[worker.local_state], nbytes=[5])
        for shard, version in sorted(worker.copies):
            reply.held.add(kind="copy", version=version, shards=[shard], nbytes=[5])
        self.up[worker.rank].append(reply)

    def _answer(self, worker: Worker, command: pb.Command, error: str = "") -> None:
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=worker.rank, error_type=error)
        self.up[worker.rank].append(reply)

    def _restore(self, worker: Worker, command: pb.Command) -> None:
        restore, version = command.restore, command.restore.version
        if restore.checkpoint:
            assert version in self.checkpoints and restore.checkpoint == f"/c/{version}"
            worker.live, worker.torn = dict.fromkeys(worker.shards, version), False
            worker.kept = {("common", version), (worker.local_state, version)}
            self.pages[worker.rank] = {version}
            worker.version = version
            self._answer(worker, command)
            return
        reply = pb.Reply(serial=command.serial, generation=command.generation, rank=worker.rank)
        if worker.live_version == version:
            worker.live = dict.fromkeys(worker.shards, version)
        for name in restore.local:
            held = worker.kept | {(worker.local_state, v) for v in self.pages[worker.rank]}
            assert (name, version) in held, f"rank {worker.rank} does not hold {name} at {version}"
            worker.torn = True
            worker.live[name] = version
        for item in restore.transfers:
            source = self.workers.get(item.source)
            if source is None or source.mute or item.dest not in self.workers:
                self._answer(worker, command, "RestoreError")
                return
            if item.source == worker.rank:
                reply.sent_digests[item.shard] = f"{item.shard} at {version}"
                self._must_hold(worker, item, version)
            else:
                worker.torn = True
                worker.live[item.shard] = version
                if self.corrupt > 0:
                    self.corrupt -= 1
                    self.corrupted += 1
                    worker.live[item.shard] = BROKEN
                if worker.live[item.shard] != BROKEN or self.pick.random() < 0.5:
                    reply.received_digests[item.shard] = f"{item.shard} at {worker.live[item.shard]}"
        if all(worker.live.get(s) == version for s in worker.shards):
            worker.torn, worker.version = False, version
            worker.kept |= {("common", version), (worker.local_state, version)}
            self.pages[worker.rank] = {v for v in self.pages[worker.rank] if v <= version} | {version}
        self.up[worker.rank].append(reply)

    def _must_hold(self, worker: Worker, item: pb.TransferItem, version: int) -> None:
        if item.kind == "live":
            assert worker.live.get(item.shard) == version, f"rank {worker.rank} is asked for {item}"
        else:
            pages = {(worker.local_state, v) for v in self.pages[worker.rank]}
            assert (item.shard, version) in worker.kept | worker.copies | pages, f"rank {worker.rank}: {item}"

    def _resume(self, worker: Worker, command: pb.Command) -> None:
        version = command.resume.version
        wrong = {s: worker.live.get(s) for s in worker.shards if worker.live.get(s) != version}
        assert not wrong, f"rank {worker.rank} goes on at {version} with {wrong}"
        worker.version, worker.generation, worker.torn, worker.fresh = version, command.generation, False, False
        worker.place, worker.held, worker.finish_to = "training", False, -1
        worker.copies = {c for c in worker.copies if c[1] <= version}
        worker.kept = {k for k in worker.kept if k[1] <= version}
        self.progress[worker.rank] = (command.generation, version)
        self._answer(worker, command)
        if version == self.layout.steps:
            self._done(worker)
