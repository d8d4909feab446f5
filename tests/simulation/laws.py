"""What must hold in every history, after every event."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from flashrecovery import events as ev
from flashrecovery.controller.states import State
from flashrecovery.handshake import job_key
from flashrecovery.plan.electors import majority
from tests.simulation.content import TOKEN, Content
from tests.simulation.loop import Life
from tests.simulation.network import Firewall, Host

if TYPE_CHECKING:
    from flashrecovery.controller.service import ControllerService
    from flashrecovery.plan.electors import Elector
    from tests.simulation.history import Fault
    from tests.simulation.loop import Process
    from tests.simulation.process import SimWorkerProcess
    from tests.simulation.worker import ModelWorker
    from tests.simulation.world import World


_SEEN_AT_ONCE = ("kill", "power", "agent")
"""Faults after which a process is gone, and its kernel, or its host's silence, says so."""
_TO_COME_S = 5.0
"""For a node that was cut off: to come to a new controller, before that stops waiting and decides."""


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
        self.terms: dict[int, tuple[Process, ControllerService, set[Elector]]] = {}
        self.lives: dict[int, ModelWorker] = {}
        self.pid_generation: dict[int, int] = {}
        self.over_at = float("inf")
        self.reached: dict[int, int] = {}
        self.began_in = 0
        self.unresponsive = self.asked_again = 0
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

    def struck(self, fault: Fault) -> None:
        """A fault strikes now."""
        self.faults.append(fault)
        self.since_whole.append(fault)
        models = [w.model for w in self.world.living() if w.model is not None]
        self.late_known = min((model.gate.version for model in models), default=0) > self.world.script.first_late + 1

    # -- content --------------------------------------------------------------------------------------

    def _check_content(self, worker: ModelWorker, version: int, when: str) -> None:
        """What a rank has is what it would have without any fault."""
        want, have = self.world.reference.at(version, worker.rank), worker.now
        wrong = [name for name in ("weights", "unique", "rate", "own") if getattr(want, name) != getattr(have, name)]
        if when == "commit":  # the rest may change below the block
            wrong = [name for name in wrong if name in ("weights", "unique")]
        if wrong:
            parts = "; ".join(f"{n} is {_short(have, n)} and should be {_short(want, n)}" for n in wrong)
            self.broken("content", f"rank {worker.rank} at version {version} ({when}): {parts}")

    def committed(self, worker: ModelWorker) -> None:
        gate = worker.gate
        self.reached[gate.generation] = max(self.reached.get(gate.generation, 0), gate.version)
        self._check_content(worker, worker.gate.version, "commit")
        self._alone(worker)

    def settled(self, worker: ModelWorker, version: int) -> None:
        self._check_content(worker, version, "hand-out")

    def resumed(self, worker: ModelWorker, version: int) -> None:
        """Equal versions at every resume, and the right content."""
        generation = worker.gate.generation
        known = self.generations.setdefault(generation, version)
        if known != version:
            self.broken("versions", f"rank {worker.rank} resumes at {version}, others at {known} ({generation=})")
        pid = int(self.world.pid_of(worker.process))
        before = self.pid_generation.get(pid, -1)
        if generation < before:
            self.broken("generation", f"rank {worker.rank} resumes in generation {generation} after {before}")
        self.pid_generation[pid] = generation
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
        """No mutation begins between a hold and the stop."""
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
        term = service._electorate.term
        if service.machine.config.controller is None or not service._electorate.named:
            return
        electors = set(service._electorate.voters)
        owner, other, known = self.terms.setdefault(term, (process, service, electors))
        if other is service:
            known |= electors
        elif owner.dead and (not known & electors or not other._electorate.voters):
            # Everyone has been started anew: another job, of nodes with the same names. Or the one before had no
            # electors left, because there were but two nodes: then whoever is started again in its place goes on.
            self.terms[term] = process, service, electors
        else:
            self.broken("term", f"two controllers decide in term {term}: the one on {process.host.name} is the second")
        for other_process, other in world.controllers():
            if other is service or not other_process.runs:
                continue
            if other._electorate.named and other._electorate.term > term:
                clock = now + other_process.host.clock
                if other._electorate.may_decide(clock) and other.machine._launched:
                    self.broken(
                        "two controllers",
                        f"{process.host.name} of term {term} decides, and so may {other_process.host.name} "
                        f"of term {other._electorate.term}",
                    )

    def event(self, process: Process, event: ev.Event) -> None:
        self._together(event)
        if isinstance(event, (ev.JobFailed, ev.Notice)):
            self.failed_by = next((s for p, s in reversed(self.world.services) if p is process), None)
        if isinstance(event, (ev.JobStarted, ev.RecoveryFinished)):
            self.since_whole = []
        if isinstance(event, ev.JobFailed):
            self._job_failed(event.reason)
        elif isinstance(event, ev.NodeLost):
            self._node_lost(event)
        elif isinstance(event, ev.Notice) and event.kind == "start_again":
            self._started_again(event.text)

    def _together(self, event: ev.Event) -> None:
        """Whoever is silenced by one fault is one recovery's."""
        silencing = sum(fault.kind not in _SEEN_AT_ONCE for fault in self.faults)
        if isinstance(event, ev.Notice) and event.kind == "all_asked_again":
            self.asked_again += 1
        elif isinstance(event, ev.RecoveryStarted) and event.cause == "unresponsive":
            self.unresponsive += 1
            if self.unresponsive > silencing + self.asked_again:
                many = f"{self.unresponsive} recoveries because of missed deadlines"
                self.broken("together", f"{many}, but only {silencing} faults by which a rank could miss one")

    def _node_lost(self, event: ev.NodeLost) -> None:
        """Its ranks are given away: nothing of it may be able to begin a change of state by now."""
        host = self.world.hosts[event.node]
        if "silent" not in event.evidence and "broken" not in event.evidence:
            return
        if self._controller_seems_dead_to(host):
            return
        alive = [
            w
            for w in self.world.workers.values()
            if w.process.host is host and w.process.runs and w.model is not None and w.model.can_step()
            if not 0.0 < w.page.lent_until < self.world.loop.now + host.clock
        ]
        if alive:
            ranks = [w.place for w in alive]
            self.broken("given away", f"node {event.node} is taken for lost while its ranks {ranks} can take steps")

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
        """Everything from the script's first line: only where nobody holds a later version."""
        newest = max((v for g, v in self.reached.items() if g >= self.began_in), default=0)
        held = self.best_cut()
        if newest > 1 and held > 0:
            self.broken("start again", f"{text}: but the job had come to version {newest}, and {held} is held whole")
        self.began_in = max(self.reached, default=0) + 1

    def _job_failed(self, reason: str) -> None:
        self.failed, self.reason = True, reason
        if not self._justified(reason):
            self.broken("unjustified", reason)

    def _justified(self, reason: str) -> bool:
        """Whether the history leaves nothing better than this failure."""
        world = self.world
        if "end state is lost" in reason:
            return True
        if "have taken their last step" in reason:
            return bool(world.ended_ranks)
        if "before its first step" in reason:
            return True
        if "no node with room" in reason:
            nodes = self.failed_by.machine.nodes.values() if self.failed_by is not None else ()
            return sum(node.slots for node in nodes if node.alive) < world.size
        if "cannot be recovered" in reason or "holds any state" in reason:
            if self._one_is_lost():
                world.note("(one rank, or one node, is lost of a whole job)")
                return False
            found = self.best_cut()
            if found >= 0:
                world.note(f"(version {found} is held whole)")
            return found < 0
        return False

    def _one_is_lost(self) -> bool:
        """Whether no more than that has happened since everything was whole: then nothing may be missing, whatever the
        laws can find out about what is held. But for the first late step, which nobody could expect. A controller that
        is away takes no state with it."""
        since = [fault for fault in self.since_whole if fault.kind != "controller"]
        if any(f.kind not in (*_SEEN_AT_ONCE, "controller") for f in self.faults) or len(since) != 1:
            return False
        (fault,) = since
        one = len(fault.what) == 1 if fault.kind == "kill" else self.world.shape.nodes > 1
        return one and self.late_known

    def best_cut(self) -> int:
        """The newest version of which everything is held by somebody alive; -1: there is none."""
        world = self.world
        models = [w.model for w in world.workers.values() if w.model is not None and not w.process.dead]
        late = {v for model in models for v, was in model.late_versions.items() if was}
        names: dict[str, set[int]] = {f"capsule@{r}": set() for r in range(world.size)}
        names |= {"param": set(), "common": set()}
        if world.script.unique:
            names |= {f"zero@{r}": set() for r in range(world.size)}
        for process in world.workers.values():
            model = process.model
            if process.place < 0 or process.agent.dead or process._closed or not self._counts(process):
                continue
            if model is not None and process.process.life is Life.RUNS and not model.mute:
                if model.gate.live >= 0:
                    for name in ("param", *([f"zero@{model.rank}"] if world.script.unique else ())):
                        names[name].add(model.gate.live)
                for held in model._held():
                    if not held.early or held.version not in late:
                        for name in held.shards:
                            names[name].add(held.version)
                names["common"] |= set(model.common.at)
                names[f"capsule@{model.rank}"] |= {v for v in model.capsule.at if v not in model.capsule.early}
            page = process.page
            names[f"capsule@{process.place}"] |= set(page.capsule_versions()) - (set(page.early_capsules()) & late)
        common = set.intersection(*names.values())
        return max(common, default=-1)

    def _counts(self, process: SimWorkerProcess) -> bool:
        """Whether the controller that has failed the job could still ask it: its node was not taken for lost, and has
        neither stood still nor been cut off while a new controller has waited for it."""
        there, service = next((found for found in self.world.services if found[1] is self.failed_by), (None, None))
        node = service.machine.nodes.get(process.agent.name) if service is not None else None
        if node is not None or there is None:
            return node is None or node.alive
        return process.agent.runs and self.world.network.reached_for(process.agent.host, there.host, _TO_COME_S)

    # -- agents ---------------------------------------------------------------------------------------

    def agent_raised(self, name: str, error: BaseException) -> None:
        world = self.world
        if self.failed or any(s.machine.state in (State.FINISHED, State.FAILED) for _, s in world.services):
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
        named = [(p, s) for p, s in world.services if s._electorate.named]
        if not named:
            return False
        process, newest = max(named, key=lambda found: found[1]._electorate.term)

        def lives(elector: Elector) -> bool:
            ip, _, port = elector.peer.rpartition(":")
            listener = world.network.hosts[ip].listeners.get(int(port))
            return listener is not None and not listener.process.dead

        quorum = newest._electorate._quorum
        lists = [electors for electors in (quorum.electors, quorum.before) if electors]
        if not lists:
            return process.dead
        return any(sum(lives(e) for e in electors) < majority(len(electors)) for electors in lists)

    def agent_ended(self, name: str, code: int, reason: str) -> None:
        """Whether the job is over for it."""

    # -- the end --------------------------------------------------------------------------------------

    @property
    def job_over(self) -> bool:
        """It has failed, or every rank has come to its end."""
        return self.failed or len(self.world.ended_ranks) == self.world.size

    def finished(self) -> bool:
        if not self.job_over:
            return False
        if all(p.dead or not p.host.up for p in self.world.agents.values()):
            return True
        # Who was away at the end gives up by itself, which takes a minute: not every history has to show it. Nodes that
        # were started again wait for a new job, where the old one was left without electors.
        self.over_at = min(self.over_at, self.world.loop.now)
        return (self.left_alone or self.world.seed % 16 != 0) and self.world.loop.now > max(
            self.over_at, self.last_fault_at
        ) + 12.0

    def too_late(self) -> None:
        world = self.world
        if self.failed or len(world.ended_ranks) == world.size:
            waits = [n for n, p in world.agents.items() if not p.dead]
            self.broken("waits", f"the job is over, but {waits} have not ended")
            return
        parts = []
        for process, service in world.controllers():
            m = service.machine
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
        """Nothing is left behind."""


def _short(content: Content, name: str) -> str:
    value = getattr(content, name)
    return f"..{value % 10000}" if isinstance(value, int) else str(tuple(v % 10000 for v in vars(value).values()))
