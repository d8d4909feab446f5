"""What must hold in every history, after every event."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from typing import TYPE_CHECKING

from flashrecovery import events as ev
from flashrecovery.controller.state.crashes import cause_of, option_of
from flashrecovery.controller.state.rank_record import Place
from flashrecovery.kinds import FailureKind, NoticeKind
from flashrecovery.plan.membership.electors import majority
from flashrecovery.plan.transitions import State
from flashrecovery.rpc.handshake import job_key
from tests.simulation.content import TOKEN, Content
from tests.simulation.loop import Life
from tests.simulation.network import Firewall, Host

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashrecovery.controller.service.service import ControllerService
    from flashrecovery.plan.membership.electors import Elector
    from tests.simulation.history import Fault
    from tests.simulation.loop import Process
    from tests.simulation.process import SimWorkerProcess
    from tests.simulation.worker import ModelWorker
    from tests.simulation.world import World


_SEEN_AT_ONCE = ("kill", "power", "agent")
"""Faults after which a process is gone, and its kernel, or its host's silence, says so."""
_BEFORE_A_STEP = -1
"""In place of a step, for a replacement that has not taken any."""
_TO_COME_S = 5.0
"""For a node that was cut off, or has stood still: to come to a new controller before that decides."""


_Failures = tuple["Process", int, str, int]
"""A controller, a rank, the option with the limit, a step: whose failures are counted together."""


class Violation(Exception):
    """A law is broken. ``law``: its short name."""

    def __init__(self, law: str, text: str) -> None:
        super().__init__(f"{law}: {text}")
        self.law = law
        self.text = text


class Laws:
    """Of one history."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.violation: Violation | None = None
        self.reason = ""
        self.failed = self.left_alone = False
        self.last_fault_at = 0.0
        self.generations: dict[int, int] = {}
        self.newest_generation = -1
        self.progress: dict[tuple[int, int], int] = {}
        """The version that a rank has come to in a generation."""
        self.newest: dict[int, int] = {}
        """By rank."""
        self.at: dict[int, tuple[int, int]] = {}
        """By pid: the generation in which it takes steps, and its version."""
        self.given_away: dict[int, Process] = {}  # by pid: the controller that has done so
        self.stepped: set[int] = set()
        """Pids that have ever committed a step."""
        self.failures: Counter[_Failures] = Counter()
        self.standstills: Counter[Process] = Counter()
        """Recoveries of the controller in this process that have begun with one."""
        self.restarts = 0
        self.forgotten = False
        self.started_by: Process | None = None
        self.last_terms: dict[int, tuple[int, int]] = {}
        self.terms: dict[int, tuple[Process, ControllerService, set[Elector]]] = {}
        self.lives: dict[int, ModelWorker] = {}
        self.pid_generation: dict[int, int] = {}
        self.over_at = float("inf")
        self.reached: dict[int, int] = {}
        self.sizes: dict[int, tuple[int, ...]] = {}
        """The members, by generation."""
        self.committed_in = -1
        self.dismissed: set[str] = set()
        """Nodes that have handed their ranks over, and are to end."""
        self.began_in = 0
        self.unresponsive = self.asked_again = 0
        self.asked_again_at = -1.0
        self.failed_by: ControllerService | None = None
        self.faults: list[Fault] = []
        self.since_whole: list[Fault] = []
        self.late_known = False
        plain = (TOKEN.encode(), job_key(TOKEN))
        self.secrets = (*plain, *(secret.hex().encode() for secret in plain))

    def broken(self, law: str, text: str, error: BaseException | None = None) -> None:
        """Remember the first, and end the history."""
        if self.violation is None and law not in self.world.tolerated:
            self.world.note(f"VIOLATION {law}: {text}")
            if error is not None:
                for line in "".join(traceback.format_exception(error)).splitlines():
                    self.world.trace.append("           | " + line)
            self.violation = Violation(law, text)
            if not self.world.over:
                self.world.loop.after = self.look

    def struck(self, fault: Fault) -> None:
        """A fault strikes now."""
        self.faults.append(fault)
        self.since_whole.append(fault)
        models = [w.model for w in self.world.living() if w.model is not None]
        self.late_known = min((model.gate.version for model in models), default=0) > self.world.script.first_late + 1

    # -- content --------------------------------------------------------------------------------------

    def _check_content(self, worker: ModelWorker, version: int, when: str) -> None:
        """What a rank has is what it would have without any fault."""
        if self._may_have_come_apart(worker):
            return
        want, have = self.world.reference.at(version, worker.rank), worker.now
        parts = ("weights", "unique", "rate", "own", "thing")
        wrong = [name for name in parts if getattr(want, name) != getattr(have, name)]
        if when == "commit":  # the rest may change below the block
            wrong = [name for name in wrong if name in ("weights", "unique")]
        if wrong:
            parts = "; ".join(f"{n} is {_short(have, n)} and should be {_short(want, n)}" for n in wrong)
            self.broken("content", f"rank {worker.rank} at version {version} ({when}): {parts}")

    def _may_have_come_apart(self, worker: ModelWorker) -> bool:
        """A script whose variables do not come back: what counts is that the ranks notice it together. No one can once
        all of them have been replaced without a step in between."""
        if not self.world.script.comes_apart:
            return False
        if self.world.script.plain:
            models = [w.model for w in self.world.living() if w.model is not None and w.model.gate.generation > 0]
            self.forgotten |= bool(models) and not any(m.plain for m in models if m is not None)
        return self.forgotten or not worker.proven

    def _grows(self, worker: ModelWorker) -> None:
        """Commits count up by one from where the generation began; a process takes no step in an older generation."""
        gate, pid = worker.gate, int(self.world.pid_of(worker.process))
        generation, version = self.at.get(pid, (-1, -1))
        if (gate.generation, gate.version) != (generation, version + 1):
            self.broken(
                "growth",
                f"rank {worker.rank} commits version {gate.version} in generation {gate.generation} after version "
                f"{version} in generation {generation}",
            )
        self._came_to(worker, pid)

    def _came_to(self, worker: ModelWorker, pid: int) -> None:
        gate = worker.gate
        self.at[pid] = gate.generation, gate.version
        self.progress[gate.generation, worker.rank] = gate.version
        self.newest[worker.rank] = max(self.newest.get(worker.rank, 0), gate.version)

    def committed(self, worker: ModelWorker) -> None:
        gate = worker.gate
        self._grows(worker)
        self._in_one_size(worker)
        self.stepped.add(int(self.world.pid_of(worker.process)))
        self.reached[gate.generation] = max(self.reached.get(gate.generation, 0), gate.version)
        self._check_content(worker, worker.gate.version, "commit")
        self._alone(worker)

    def split(self, worker: ModelWorker, of_all: Mapping[int, Sequence[tuple[int, int]]]) -> list[int]:
        """Each micro-batch of a step is computed once, by all ranks of one replica. Returns their gradients, in
        order."""
        computed: list[tuple[int, int]] = []
        for replica, ranks in worker.shape.by_replica(of_all).items():
            computed += of_all[ranks[0]]
            if any(of_all[rank] != of_all[ranks[0]] for rank in ranks):
                self.broken("batch_split", f"the ranks of replica {replica} do not compute the same: {of_all}")
        numbers = sorted(number for number, _ in computed)
        if numbers != list(range(self.world.script.micro_batches)):
            self.broken("batch_split", f"rank {worker.rank}, of {worker.members}: micro-batches {numbers}")
        return [gradient for _, gradient in sorted(computed)]

    def _in_one_size(self, worker: ModelWorker) -> None:
        """Any process that commits a step of an elastic job does so with the others of the newest generation that
        has."""
        generation, version = worker.gate.generation, worker.gate.version
        gone_on = min((self.generations[g] for g in self.sizes if generation < g <= self.committed_in), default=version)
        if gone_on < version and worker.script.micro_batches:  # else they count on that step, too
            self.broken(
                "two sizes",
                f"rank {worker.rank} commits in generation {generation}, with {worker.members}, and others have in "
                f"{self.committed_in}, with {self.sizes.get(self.committed_in)}",
            )
        self.committed_in = max(self.committed_in, generation)

    def settled(self, worker: ModelWorker, version: int) -> None:
        self._check_content(worker, version, "hand-out")

    def resumed(self, worker: ModelWorker, version: int) -> None:
        """Equal versions at every resume, and the right content."""
        generation = worker.gate.generation
        known = self.generations.setdefault(generation, version)
        if known != version:
            self.broken("versions", f"rank {worker.rank} resumes at {version}, others at {known} ({generation=})")
        size = self.sizes.setdefault(generation, worker.members)
        if size != worker.members or worker.rank not in size:
            self.broken(
                "sizes", f"rank {worker.rank} goes on with {worker.members}, others with {size} ({generation=})"
            )
        if worker.script.micro_batches and len(worker.shape.whole(size)) * worker.shape.each != len(size):
            self.broken("replicas", f"rank {worker.rank} goes on with {size}, in which replicas are not whole")
        pid = int(self.world.pid_of(worker.process))
        before = self.pid_generation.get(pid, -1)
        if generation < before:
            self.broken("generation", f"rank {worker.rank} resumes in generation {generation} after {before}")
        self.pid_generation[pid] = generation
        self.given_away.pop(pid, None)  # another controller has found it, and kept it
        self.newest_generation = max(self.newest_generation, generation)
        self._came_to(worker, pid)
        self._check_content(worker, version, "resume")
        self._alone(worker)

    def _alone(self, worker: ModelWorker) -> None:
        """A rank lives once."""
        self.lives[worker.rank] = worker
        for other in self.world.workers.values():
            model = other.model
            if model is None or model is worker or model.rank != worker.rank or not other.process.runs:
                continue
            if model.gate.generation == worker.gate.generation and model._stepping_now():
                self.broken("twice", f"rank {worker.rank} lives twice: pids {other.pid} and {worker.process.name}")

    def mutates(self, worker: ModelWorker, held_for: int) -> None:
        """No mutation begins between a hold and the stop, nor in a process whose rank was given away."""
        pid = int(self.world.pid_of(worker.process))
        if self._is_given_away(pid, worker.rank):
            self.broken("given away", f"rank {worker.rank} begins to change its state, and has been given away")
        if held_for > worker.gate.generation and not worker.gate.stopped:
            self.broken("held", f"rank {worker.rank} begins to change its state, held for generation {held_for}")

    def ended(self, worker: ModelWorker) -> None:
        self._check_content(worker, self.world.script.steps, "end")

    # -- the network ----------------------------------------------------------------------------------

    def sent(self, data: bytes) -> None:
        """No secret goes over it, as it is or in hexadecimal digits."""
        if any(secret in data for secret in self.secrets):
            self.broken("secret", f"the job's token, or the key made of it, is sent: {data[:60]!r}")

    # -- controllers ----------------------------------------------------------------------------------

    def look(self) -> None:
        """After every event."""
        if self.violation is not None:
            raise self.violation

    def decides(self, process: Process, service: ControllerService) -> None:
        """A controller is about to decide something."""
        world = self.world
        now = world.loop.now
        term = service._elector_set.term
        self._goes_on(service)
        self._believes(service)
        if service.machine.job.config.controller is None or not service._elector_set.named:
            return
        electors = set(service._elector_set.voters)
        owner, other, known = self.terms.setdefault(term, (process, service, electors))
        if other is service:
            known |= electors
        elif owner.dead and (not known & electors or not other._elector_set.voters):
            # Everyone has been restarted: another job, of nodes with the same names. Or the one before had no
            # electors left, because there were but two nodes: then any process that is started again in its place goes
            # on.
            self.terms[term] = process, service, electors
        else:
            self.broken("term", f"two controllers decide in term {term}: the one on {process.host.name} is the second")
        for other_process, other in world.controllers():
            if other is service or not other_process.runs:
                continue
            if other._elector_set.named and other._elector_set.term > term:
                clock = now + other_process.host.clock
                if other._elector_set.may_decide(clock) and other.machine.job.launched:
                    self.broken(
                        "two controllers",
                        f"{process.host.name} of term {term} decides, and so may {other_process.host.name} "
                        f"of term {other._elector_set.term}",
                    )

    def _goes_on(self, service: ControllerService) -> None:
        """A controller's term and generation only grow."""
        now = service._elector_set.term, service.machine.job.generation
        before = self.last_terms.get(id(service), now)
        if now[0] < before[0] or now[1] < before[1]:
            self.broken("growth", f"a controller goes from term and generation {before} to {now}")
        self.last_terms[id(service)] = now

    def term_falls(self, process: Process, name: str, before: int, now: int) -> None:
        """An agent goes back to an older term."""
        self.broken("growth", f"the agent of {process.host.name}: {name} {now} after {before}")

    def _believes(self, service: ControllerService) -> None:
        """What a controller takes for committed in its generation was so."""
        machine = service.machine
        if machine.job.state is not State.RUNNING or machine.job.generation not in self.generations:
            return
        began = self.generations[machine.job.generation]
        for record in machine.job.ranks.values():
            true = max(self.progress.get((machine.job.generation, record.rank), -1), began)
            if record.place is Place.RUNNING and record.committed > true:
                self.broken(
                    "believed",
                    f"rank {record.rank} is taken to have committed version {record.committed} in generation "
                    f"{machine.job.generation}, and has come to {true}",
                )

    def _is_newer(self, process: Process, event: ev.Event) -> None:
        """A recovery, or another start, is in a generation in which no rank has taken a step."""
        if isinstance(event, ev.JobStarted):
            if self.started_by is not process and self.started_by is not None and self.started_by.dead:
                self.newest_generation = -1  # another job, of nodes with the same names
                self.progress.clear()
                self.generations.clear()
                self.sizes.clear()
                self.reached.clear()
                self.committed_in = -1
            self.started_by = process
        started = isinstance(event, ev.RecoveryStarted)
        if started and event.generation <= self.newest_generation and process.host.up:
            self.broken(
                "growth", f"a recovery in generation {event.generation}, and ranks are in {self.newest_generation}"
            )

    def _failure(self, process: Process, event: ev.FailureDetected) -> None:
        """Count it as often as it may count for a crash loop: what this controller has written down of this rank, by
        cause, at its step and, as long as the process has taken none, among those of replacements that have not."""
        newest = max((w.pid for w in self.world.workers.values() if w.place == event.rank), default=-1)
        # of the signals, there are none here that a process gives itself
        option = option_of(cause_of(FailureKind(event.kind), 0))
        if event.kind != "node_lost":
            self.failures[process, event.rank, option, event.step] += 1
            self.failures[process, event.rank, option, _BEFORE_A_STEP] += newest not in self.stepped

    def _finished(self, event: ev.RecoveryFinished) -> None:
        """Every rank has committed a step since, or has none left."""
        steps = self.world.script.steps
        for rank in self.world.members:
            has = self.progress.get((event.generation, rank), -1)
            if has <= event.resume_step and has < steps:
                self.broken("finished", f"the recovery is over, and rank {rank} has come to {has}: {event}")

    def _falls_back(self, event: ev.FallbackStarted) -> None:
        """To a checkpoint, only where nothing in memory is newer."""
        if self._one_is_lost() or self.best_cut() > event.version:
            self.broken("fallback", f"to version {event.version}, but {self.best_cut()} is held whole")

    def event(self, process: Process, event: ev.Event) -> None:
        self._together(event)
        self._is_newer(process, event)
        if isinstance(event, ev.JobResized):
            self.world.members = set(event.ranks)
        elif isinstance(event, ev.JobStarted):  # also again, when the launch's nodes have come back without ranks
            self.world.members &= set(range(self.world.size))
        elif isinstance(event, ev.Notice) and event.kind == NoticeKind.NODE_LEFT:
            self.dismissed.add(event.text.split()[1])
        if isinstance(event, ev.RecoveryFinished):
            self._finished(event)
            for key in [k for k in self.failures if k[0] is process and k[3] == _BEFORE_A_STEP]:
                del self.failures[key]
        elif isinstance(event, ev.FallbackStarted):
            self.failed_by = next((s for p, s in reversed(self.world.services) if p is process), None)
            self._falls_back(event)
        elif isinstance(event, ev.FailureDetected):
            self._failure(process, event)
        if isinstance(event, (ev.JobFailed, ev.Notice)):
            self.failed_by = next((s for p, s in reversed(self.world.services) if p is process), None)
        if isinstance(event, ev.RecoveryStarted) and event.cause == "deadlock_suspected":
            self.standstills[process] += 1
        if isinstance(event, (ev.JobStarted, ev.RecoveryFinished)):
            self.since_whole = []
        if isinstance(event, ev.JobFailed):
            self._job_failed(event.reason)
        elif isinstance(event, ev.NodeLost):
            self._node_lost(process, event)
        elif isinstance(event, ev.Notice) and event.kind == "start_again":
            self._started_again(event.text)
        elif isinstance(event, ev.Notice) and event.kind == NoticeKind.TAKEN_OVER and self.failed_by is not None:
            self._taken_over(self.failed_by)

    def _taken_over(self, service: ControllerService) -> None:
        """Another controller has found ranks that the one before had given away and no other rank has got: it keeps
        them, and may have them finish their step."""
        for record in service.machine.job.ranks.values():
            if record.place is not Place.EMPTY:
                self.given_away.pop(record.process.pid, None)

    def _together(self, event: ev.Event) -> None:
        """Any process that is silenced by one fault is one recovery's."""
        silencing = sum(fault.kind not in _SEEN_AT_ONCE for fault in self.faults)
        if isinstance(event, ev.Notice) and event.kind == "all_asked_again":
            self.asked_again += 1
            self.asked_again_at = self.world.loop.now
        elif isinstance(event, ev.RecoveryStarted) and event.cause == "unresponsive":
            self.unresponsive += 1
            if self.unresponsive > silencing + self.asked_again:
                many = f"{self.unresponsive} recoveries because of missed deadlines"
                self.broken("together", f"{many}, but only {silencing} faults by which a rank could miss one")
            if self.asked_again_at < self.world.loop.now:
                self._all_who_were_late(event)

    def _all_who_were_late(self, event: ev.RecoveryStarted) -> None:
        """A rank that has missed the same deadline as a victim is one, too."""
        limit = self.world.config.timeouts.stop_ack_s
        for worker in self.world.living():
            model = worker.model
            if model is None or model.rank in event.victims:
                continue
            # the first victim joins the recovery whose hold it has not answered, or is a later one's
            told_in = (event.generation, event.generation - 1)
            if any(self.world.loop.now - model.ignored_at.get(g, self.world.loop.now) > limit for g in told_in):
                self.broken("together", f"rank {model.rank} has missed the deadline as well as {event.victims}")

    def _is_given_away(self, pid: int, rank: int) -> bool:
        """Not if the controller that has done so is dead, and no other process has ever got the rank: then it was cut
        off from everybody, and any process that takes over finds the rank where it is."""
        controller = self.given_away.get(pid)
        if controller is None:
            return False
        filled = any(w.place == rank and w.pid > pid for w in self.world.workers.values())
        return filled or not controller.dead

    def _node_lost(self, process: Process, event: ev.NodeLost) -> None:
        """Its ranks are given away: nothing of it may be able to begin a change of state by now."""
        host = self.world.hosts[event.node]
        if "silent" not in event.evidence and "broken" not in event.evidence:
            return
        if self._controller_seems_dead_to(host):
            return
        here = [w for w in self.world.workers.values() if w.process.host is host and not w.process.dead]
        self.given_away |= {w.pid: process for w in here if w.place in event.ranks}
        alive = [
            w
            for w in self.world.workers.values()
            if w.process.host is host and w.process.runs and w.model is not None and w.model.can_step()
            if not w.process.context.run(w.page.lease_over)
        ]
        if alive:
            ranks = [w.place for w in alive]
            self.broken("given away", f"node {event.node} is declared dead while its ranks {ranks} can take steps")

    def _controller_seems_dead_to(self, host: Host) -> bool:
        """Several nodes that reach each other, and for which a firewall refuses connections to a controller outside of
        the nodes, cannot tell that from its death, for which training does not end (docs/limits.md)."""
        world = self.world
        if not world.shape.external:
            return False
        there = world.controller_host
        network, to_halt_s = world.network, 0.3
        refused = Firewall.REJECT in (network.verdict(host, there), network.verdict(there, host))
        others = [
            p.host
            for name, p in world.agents.items()
            if name not in (host.name, "ctl") and not p.dead and network.reached_lately(host, p.host, to_halt_s)
        ]
        return refused and any(network.reached_lately(other, host, to_halt_s) for other in others)

    def _started_again(self, text: str) -> None:
        """Everything from the script's first line: only where no one holds a later version."""
        newest = max((v for g, v in self.reached.items() if g >= self.began_in), default=0)
        held = self.best_cut()
        if newest > 1 and held > 0:
            self.broken("start again", f"{text}: but the job had come to version {newest}, and {held} is held whole")
        self.restarts += 1
        self.began_in = max(self.reached, default=0) + 1

    def _job_failed(self, reason: str) -> None:
        self.failed, self.reason = True, reason
        if not self._justified(reason):
            self.broken("unjustified", reason)

    def _justified(self, reason: str) -> bool:
        """Whether the history leaves nothing better than this failure."""
        world = self.world
        if "DivergedError" in reason:
            return world.script.comes_apart
        if "end state is lost" in reason or "have taken their last step" in reason:
            return all(self.newest.get(rank) == world.script.steps for rank in world.members)
        if "(max_" in reason:
            return self._is_a_loop(reason)
        if "raised" in reason and "before its first step" in reason:
            return bool(self.faults) if "PeerLost" in reason else self._struck("crash") > 0
        if "no node with room" in reason:
            nodes = self.failed_by.machine.job.nodes.values() if self.failed_by is not None else ()
            if world.shape.replace == "never":
                return True
            if world.shape.each > 1:
                return self._lack_room(sum(node.slots for node in nodes if node.alive))
            return sum(node.slots for node in nodes if node.alive) < (world.shape.elastic or world.size)
        if "(timeouts.rendezvous_s)" in reason:
            nodes = self.failed_by.machine.job.nodes.values() if self.failed_by is not None else ()
            here = sum(node.alive and not node.wants_spare for node in nodes)  # spare ones begin no job
            return here < world.shape.nodes and self.best_cut() < 0
        if "cannot be recovered" in reason or "holds any state" in reason:
            if self._one_is_lost():
                world.note("(one rank, or one node, is lost of a whole job)")
                return False
            remembered = self._checkpoints_known()
            if remembered:
                world.note(f"(there is {remembered[0]}, which an agent remembers)")
                return False
            found = self.best_cut()
            if found >= 0:
                world.note(f"(version {found} is held whole)")
            return found < 0
        return False

    def _lack_room(self, slots: int) -> bool:
        """Whether no ``elastic`` replicas can be whole with that many slots, some of which living ranks have."""
        world, shape = self.world, self.world.shape.replicas
        living = {p.place for p in world.workers.values() if not p.process.dead and not p.agent.dead} & world.members
        there = shape.by_replica(living)
        replicas = {*range(shape.replicas), *shape.by_replica(world.members)}
        lacking = sorted(shape.each - len(there.get(replica, ())) for replica in replicas)
        return sum(lacking[: world.shape.elastic]) > slots - len(living)

    def _struck(self, kind: str) -> int:
        return sum(fault.kind == kind for fault in self.faults)

    def _is_a_loop(self, reason: str) -> bool:
        """Whether that limit was reached."""
        config, process = self.world.config, next(p for p, s in self.world.services if s is self.failed_by)
        if "max_restarts" in reason:
            return self.restarts >= config.max_restarts
        again = re.search(r"so it was (\d+) times at step \d+ \(max_failures_per_step\)", reason)
        if again is not None:  # the last time begins no recovery any more
            return config.max_failures_per_step == int(again[1]) <= self.standstills[process] + 1
        found = re.search(r"rank (\d+) failed (\d+) times (?:at step (\d+)|before its first step) \((\w+)\)", reason)
        if found is None:
            return False
        rank, times, step, option = int(found[1]), int(found[2]), int(found[3] or _BEFORE_A_STEP), found[4]
        return times == getattr(config, option) and times <= self.failures[process, rank, option, step]

    def _checkpoints_known(self) -> list[str]:
        """Those on the disk of which an agent that the failed controller can ask knows."""
        world = self.world
        if world.disk is None or self.failed_by is None:
            return []
        nodes = self.failed_by.machine.job.nodes
        known = [
            agent.checkpoint.path
            for process, agent in world.agent_of.items()
            if not process.dead and agent.checkpoint is not None
            if process.host.name in nodes and nodes[process.host.name].alive and nodes[process.host.name].slots
        ]
        return [path for path in known if path in world.disk.published]

    def _one_is_lost(self) -> bool:
        """Whether no more than that has happened since everything was whole: then nothing may be missing, whatever the
        laws can find out about what is held. But for the first late step, which no one could expect. A controller that
        is away takes no state with it."""
        since = [fault for fault in self.since_whole if fault.kind != "controller"]
        if any(f.kind not in (*_SEEN_AT_ONCE, "controller") for f in self.faults) or len(since) != 1:
            return False
        (fault,) = since
        shape = self.world.shape.replicas
        if len(self.world.members) == 1 < self.world.size:
            return False  # the others have left, and it alone had anything
        if shape.each > 1 and (fault.kind != "kill" or len(shape.by_replica(self.world.members)) == 1):
            return False  # what a rank has, no other one has, or they are on one node
        one = len(fault.what) == 1 if fault.kind == "kill" else self.world.shape.nodes > 1
        return one and self.late_known

    def best_cut(self) -> int:
        """The newest version of which everything is held by someone alive; -1: there is none."""
        world = self.world
        models = [w.model for w in world.workers.values() if w.model is not None and not w.process.dead]
        late = {v for model in models for v, was in model.sealing.late.items() if was}
        names: dict[str, set[int]] = {f"capsule@{r}": set() for r in world.members}
        shape = world.shape.replicas
        params = ["param"] if shape.each == 1 else [f"param#{model_rank}" for model_rank in range(shape.each)]
        names |= {"common": set(), **{name: set() for name in params}}
        if world.script.unique:
            names |= {f"zero@{r}": set() for r in world.members}
        for process in world.workers.values():
            model = process.model
            if process.place not in world.members or process.agent.dead or process._closed or not self._counts(process):
                continue
            if model is not None and process.process.life is Life.RUNS and not (model.mute or model.spoilt):
                if model.gate.live >= 0:
                    for name in (model.param, *([f"zero@{model.rank}"] if world.script.unique else ())):
                        names[name].add(model.gate.live)
                for held in model._held():
                    if not held.early or held.version not in late:
                        for name in names.keys() & set(held.shards):
                            names[name].add(held.version)
                names["common"] |= set(model.common.at)
                names[f"capsule@{model.rank}"] |= {v for v in model.local_state.at if v not in model.local_state.early}
            page = process.page
            names[f"capsule@{process.place}"] |= set(page.local_state_versions()) - (
                set(page.early_local_states()) & late
            )
        common = set.intersection(*names.values())
        return max(common, default=-1)

    def _counts(self, process: SimWorkerProcess) -> bool:
        """Whether the controller that has failed the job could still ask it: its node was not declared dead, and has
        neither stood still nor been cut off while a new controller has waited for it."""
        there, service = next((found for found in self.world.services if found[1] is self.failed_by), (None, None))
        node = service.machine.job.nodes.get(process.agent.name) if service is not None else None
        if node is not None or there is None:
            return node is None or node.alive
        agent = process.agent
        if not agent.runs or self.world.loop.now - agent.went_on_at < _TO_COME_S:
            return False
        return self.world.network.reached_for(agent.host, there.host, _TO_COME_S)

    # -- agents ---------------------------------------------------------------------------------------

    def agent_raised(self, name: str, error: BaseException) -> None:
        world = self.world
        if self.failed or any(s.machine.job.state in (State.FINISHED, State.FAILED) for _, s in world.services):
            return
        if "has been gone for" in str(error) and self._electors_lost():
            self.failed = self.left_alone = True
            self.reason = str(error)
            return
        self.broken("agent ends", f"{name}: {type(error).__name__}: {error}", error)

    def _electors_lost(self) -> bool:
        """Whether the controller is lost, and of the agents that were to elect another one half or more are, or there
        are none because only two nodes were left: then the job ends (docs/nodes.md). Of the newest controller, which
        the others follow."""
        world = self.world
        named = [(p, s) for p, s in world.services if s._elector_set.named]
        if not named:
            return False
        process, newest = max(named, key=lambda found: found[1]._elector_set.term)

        def lives(elector: Elector) -> bool:
            ip, _, port = elector.peer.rpartition(":")
            listener = world.network.hosts[ip].listeners.get(int(port))
            return listener is not None and not listener.process.dead

        quorum = newest._elector_set._quorum
        lists = [electors for electors in (quorum.electors, quorum.before) if electors]
        if not lists:
            return process.dead
        return any(sum(lives(e) for e in electors) < majority(len(electors)) for electors in lists)

    def agent_ended(self, name: str, code: int, reason: str) -> None:
        """Well, only if all ranks have come to their end."""
        if code == 0 and name not in self.dismissed and not self.world.members <= self.world.ended_ranks:
            self.broken("agent ends", f"{name} ends well ({reason}), and only ranks {self.world.ended_ranks} have")

    # -- the end --------------------------------------------------------------------------------------

    @property
    def job_over(self) -> bool:
        """It has failed, or every rank has come to its end."""
        return self.failed or self.world.members <= self.world.ended_ranks

    def finished(self) -> bool:
        if not self.job_over:
            return False
        if all(p.dead or not p.host.up for p in self.world.agents.values()):
            return True
        # A process that was away at the end gives up by itself, which takes a minute: not every history has to show it,
        # or even what comes in the first seconds. Nodes that were started again wait for a new job, where the old one
        # was left without electors.
        self.over_at = min(self.over_at, self.world.loop.now)
        wait_s = 12.0 if self.world.seed % 4 == 0 else 2.0
        return (self.left_alone or self.world.seed % 16 != 0) and self.world.loop.now > max(
            self.over_at, self.last_fault_at
        ) + wait_s

    def too_late(self) -> None:
        world = self.world
        if self.job_over:
            waits = [n for n, p in world.agents.items() if not p.dead]
            self.broken("waits", f"the job is over, but {waits} have not ended")
            return
        parts = []
        for process, service in world.controllers():
            m = service.machine.job
            places = " ".join(f"{r.rank}:{r.place.value}@{r.home}" for r in m.ranks.values())
            parts.append(f"{process.name}: {m.state.value} generation {m.generation} [{places}]")
        for worker in world.workers.values():
            if worker.model is not None and not worker.process.dead:
                g = worker.model.gate
                parts.append(
                    f"pid {worker.pid} rank {worker.place}: version {g.version} live {g.live} gen {g.generation} "
                    f"stopped {g.stopped} {worker.process.life.value}"
                )
        self.broken("waits", "the job does not end; " + "; ".join(parts))

    def at_the_end(self) -> None:
        """Nothing is left behind on a node whose agent has ended by itself."""
        for worker in self.world.workers.values():
            agent = worker.agent
            if worker.process.dead or not agent.dead or agent.host.frozen or not worker.process.runs:
                continue
            if self.world.agents.get(agent.name) is agent and agent.name in self.world.endings:
                self.broken(
                    "left behind", f"pid {worker.pid} (rank {worker.place}) runs on, and {agent.name} has ended"
                )


def _short(content: Content, name: str) -> str:
    value = getattr(content, name)
    return f"..{value % 10000}" if isinstance(value, int) else str(tuple(v % 10000 for v in vars(value).values()))
