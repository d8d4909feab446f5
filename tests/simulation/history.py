"""A history: a job and the faults that strike it, all drawn from one seed. And the search for those that break a
law."""

from __future__ import annotations

import contextvars
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from flashrecovery.controller.service.service import ControllerService
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.simulation.content import Script
from tests.simulation.network import Firewall, Weather
from tests.simulation.patches import inside, simulated
from tests.simulation.process import SimWorkerProcess
from tests.simulation.world import Outcome, Shape, World

LONGEST_S = 260.0
"""After the last fault nothing takes longer than this."""

MOMENTS = (
    *("hears hold", "hears stop", "hears regroup", "hears restore", "hears resume", "hears release"),
    *("recovery_started", "recovery_finished", "taken_over", "controller_elected", "start_again"),
)
"""What a fault may follow: a worker hears a command, a controller writes an event or a notice."""


@dataclass(frozen=True)
class Fault:
    """Something that happens at a time, in seconds after the job has begun to take steps (or after its start); or that
    long ``after`` one of MOMENTS has come that many times."""

    at: float
    kind: str
    what: tuple[Any, ...] = ()
    after: tuple[str, int] | None = None

    def __str__(self) -> str:
        after = f" after {self.after[0]} for the {self.after[1]}. time" if self.after is not None else ""
        return f"{self.at:.4f} s{after}: {self.kind} {' '.join(map(str, self.what))}"


@dataclass(frozen=True)
class History:
    """Everything that decides what happens."""

    seed: int
    shape: Shape
    script: Script
    weather: Weather
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.shape}", f"  {self.script}", f"  {self.weather}"]
        return "\n".join([*lines, *(f"  {fault}" for fault in self.faults)])


def draw(seed: int) -> History:
    """The history of this seed."""
    rng = random.Random(seed * 7919 + 17)
    shape = _shape(rng)
    script = Script(
        steps=rng.choice((6, 10, 16, 24)),
        unique=rng.random() < 0.4,
        late_every=rng.choice((0, 0, 0, 1, 3, 5)),
        late_buffer=rng.random() < 0.25,
        below=rng.random() < 0.3,
        below_every=rng.choice((0, 0, 0, 1, 2, 4)),
        forward_s=rng.choice((0.005, 0.03, 0.1)),
        backward_s=rng.choice((0.005, 0.03, 0.1)),
        optimizer_s=rng.choice((0.002, 0.02, 0.1)),
        startup_s=rng.choice((0.1, 0.5, 2.0)),
    )
    bad = rng.random() < 0.4
    weather = Weather(
        delay_s=rng.choice((0.0002, 0.001, 0.005)),
        jitter=rng.choice((0.5, 3.0)),
        slow=rng.choice((0.0, 0.02, 0.1)) if bad else 0.0,
        slow_s=rng.choice((0.03, 0.15)),
        loss=rng.choice((0.01, 0.1, 0.3)) if bad else 0.0,
        repeat=rng.choice((0.0, 0.05)) if bad else 0.0,
    )
    faults = sorted(_faults(rng, shape, script), key=lambda f: f.at)
    more = random.Random(seed * 65_537 + 11)
    script, shape = _habits(more, script), _precautions(more, shape)
    if seed % 8 == 5:
        return _scene(more, History(seed, shape, script, weather, ()))
    if seed % 40 == 11:
        return _in_one_node(more, History(seed, shape, script, weather, ()))
    if seed % 3 == 2:
        faults += _followers(random.Random(seed * 104_729 + 3), shape)
    if more.random() < 0.3:
        faults += _rarer(more, shape, faults[0].at if faults else 0.5)
    return History(seed, shape, script, weather, tuple(faults))


def _habits(rng: random.Random, script: Script) -> Script:
    return replace(
        script,
        bias=rng.random() < 0.15,
        thing=rng.choice(("own", "own", "later")) if rng.random() < 0.2 else "",
        plain=rng.random() < 0.06,
        in_place=rng.random() < 0.2,
    )


def _precautions(rng: random.Random, shape: Shape) -> Shape:
    checkpoint_s = rng.choice((0.2, 0.5, 1.0)) if rng.random() < 0.3 else 0.0
    return replace(shape, checkpoint_s=checkpoint_s, limits=rng.random() < 0.3)


def _rarer(rng: random.Random, shape: Shape, near: float) -> Iterator[Fault]:
    """What the other faults do not do."""
    at, rank = near + rng.random() * rng.choice((0.1, 1.0, 3.0)), rng.randrange(shape.world)
    kind = rng.choice(("dirty", "dirty", "crash", "crash", "suspend", "suspend", "wall", "busy"))
    name = f"n{rng.randrange(shape.nodes + shape.spares)}"
    if kind == "dirty":
        yield Fault(at, "dirty", (rank,))
        yield Fault(at + 0.2 * rng.random(), "kill", ((rank + 1) % shape.world,))
    elif kind == "crash":
        yield Fault(at, "crash", (rank,))
        for time in range(rng.choice((0, 1, 3, 5))):  # again in the first step after it
            yield Fault(0.05 * rng.random(), "crash", (rank,), after=("hears resume", (time + 2) * shape.world))
    elif kind == "suspend" and shape.nodes > 1:
        yield Fault(at, "suspend", (name, rng.choice((0.3, 1.0, 3.0, 8.0)) * (0.5 + rng.random())))
    elif kind == "busy":
        yield Fault(at, "kill", (rank,))
        yield Fault(at, "busy", (rng.randrange(shape.world), rng.choice((0.5, 1.0, 2.0))))
    else:
        yield Fault(at, "wall", (name, rng.choice((-1e6, -60.0, -1.0, 1.0, 60.0, 1e6))))


SCENES = ("away", "muted", "elections", "late resume", "crash loop", "two nodes", "sleep")
"""What chance would bring together too seldom."""


def _scene(rng: random.Random, h: History) -> History:
    """Several things that have to meet, each of them still by chance."""
    kind, faults = SCENES[h.seed // 8 % len(SCENES)], []
    script = replace(h.script, steps=max(h.script.steps, 16), plain=False)
    shape, weather, at = h.shape, h.weather, 0.2 + rng.random()
    if kind == "away":  # a rank dies while there is no controller, for longer than a rank would wait for one
        shape = replace(shape, nodes=rng.choice((2, 3, 4)), nproc=1, external=True)
        away = rng.choice((5.0, 22.0, 25.0, 35.0)) + rng.random()
        faults = [Fault(at, "controller", (away,)), Fault(at + rng.random(), "kill", (rng.randrange(shape.world),))]
    elif kind == "muted":  # several that do not answer, at one moment
        shape = replace(shape, nodes=rng.choice((1, 2)), nproc=4, external=False, standby=0)
        ranks = rng.sample(range(shape.world), rng.choice((3, 3, 4)))
        muted, victim = tuple(sorted(ranks[1:])), ranks[0]
        faults = [Fault(at, "mute", muted), Fault(at + 0.05 + 0.3 * rng.random(), "kill", (victim,))]
    elif kind == "elections":  # the controller's node is lost, and electors stand still or are cut off while they vote
        shape = replace(shape, nodes=rng.choice((3, 4, 5)), nproc=1, external=False)
        lost = rng.choice(("power", "freeze host", "freeze agent", "cut"))
        faults = list(_lost(rng, shape, "n0", lost, at))
        for _ in range(rng.choice((1, 2, 3))):
            name, wait = f"n{rng.randrange(shape.nodes)}", rng.choice((0.4, 0.6, 0.8, 1.0)) + 0.3 * rng.random()
            faults += _lost(rng, shape, name, rng.choice(("freeze agent", "cut", "one way")), at + wait)
        weather = replace(weather, loss=rng.choice((0.0, 0.3)), slow=rng.choice((0.0, 0.1, 0.3)), slow_s=0.15)
    elif kind == "late resume":  # a rank is slow to go on, and another node stops answering meanwhile
        shape = replace(shape, nodes=3, nproc=1, spares=1)
        victim, busy, frozen = rng.sample(range(3), 3)
        told = ("hears resume", 3 + rng.randint(1, 3))
        faults = [
            Fault(at, "kill", (victim,)),
            Fault(0.0, "busy", (busy, 0.8 + rng.random()), after=("hears regroup", rng.randint(1, 3))),
            Fault(0.02 + 0.3 * rng.random(), "freeze host", (f"n{frozen}", 3.0), after=told),
        ]
    elif kind == "crash loop":
        shape = replace(shape, limits=True)
        rank, fault = rng.randrange(shape.world), rng.choice(("crash", "kill"))
        faults = [Fault(at, fault, (rank,))]
        for time in range(rng.choice((1, 2, 3, 11))):
            faults.append(Fault(0.02 * rng.random(), fault, (rank,), after=("hears resume", (time + 2) * shape.world)))
    elif kind == "two nodes":  # more is lost at once than copies can make up for, with the controller or without
        shape = replace(shape, nodes=rng.choice((3, 4)), nproc=1, spares=2, checkpoint_s=rng.choice((0.2, 0.4)))
        script = replace(script, unique=rng.random() < 0.8, steps=24, forward_s=0.05, backward_s=0.05)
        names = rng.sample([f"n{i}" for i in range(shape.nodes)], 2)
        at = 1.0 + 1.5 * rng.random()
        faults = [Fault(at + 0.1 * rng.random(), "power", (name, rng.choice((0.5, 20.0)))) for name in names]
        if shape.external and rng.random() < 0.7:
            faults.append(Fault(at - 0.3 * rng.random(), "controller", (rng.choice((0.5, 2.0)),)))
    else:
        shape = replace(shape, nodes=rng.choice((2, 3, 4)), nproc=1)
        slept = rng.choice((0.5, 0.8, 1.2, 2.0, 6.0)) * (0.8 + 0.4 * rng.random())
        faults = [Fault(at, "suspend", (f"n{rng.randrange(shape.nodes)}", slept))]
        if rng.random() < 0.5:
            faults.append(Fault(at + 0.3 * rng.random(), "kill", (rng.randrange(shape.world),)))
    return replace(h, shape=shape, script=script, weather=weather, faults=tuple(sorted(faults, key=lambda f: f.at)))


def _in_one_node(rng: random.Random, h: History) -> History:
    """Where no barrier between nodes keeps a rank from a mistake: an old word to go on comes late, together with a new
    controller's to hold; or ranks have committed a version, go back from it, and are looked at in that moment."""
    shape = Shape(1, 4, checkpoint_s=h.shape.checkpoint_s)
    at, ranks = 0.3 + 0.7 * rng.random(), rng.sample(range(4), 4)
    script = replace(h.script, steps=16, unique=False, plain=False, forward_s=0.03, backward_s=0.03, optimizer_s=0.02)
    if h.seed // 40 % 2 == 0:
        victim, slow, muted, _ = ranks
        shape = replace(shape, external=True)
        gone_on, sent = ("hears resume", 8), 0.1 + 0.1 * rng.random()  # their gradients of the first step
        faults = [
            Fault(at, "kill", (victim,)),
            Fault(0.0, "busy", (slow, 1.0 + 4.0 * rng.random()), after=("hears regroup", rng.randint(1, 4))),
            Fault(sent, "controller", (0.1 + 0.5 * rng.random(),), after=gone_on),
            Fault(sent, "mute", (muted,), after=gone_on),
        ]
    else:
        script = replace(script, below=True, below_every=1, optimizer_s=0.1, read_amid=True)
        faults = [Fault(at, "kill", (ranks[0],)), Fault(at + 1.0 + rng.random(), "kill", (ranks[1],))]
    return replace(h, shape=shape, script=script, faults=tuple(faults))


def _lost(rng: random.Random, shape: Shape, name: str, how: str, at: float) -> Iterator[Fault]:
    """This node, in this way."""
    seconds = rng.choice((0.5, 1.0, 2.0)) + rng.random()
    others = tuple(f"n{i}" for i in range(shape.nodes + shape.spares) if f"n{i}" != name)
    some = tuple(n for n in others if rng.random() < 0.7) or others
    if how == "power":
        yield Fault(at, "power", (name, rng.choice((0.5, 3.0))))
    elif how in ("freeze host", "freeze agent"):
        yield Fault(at, how, (name, seconds))
    else:
        pair = ((name,), some) if rng.random() < 0.5 else (some, (name,))
        yield Fault(at, "cut", (*pair, seconds, rng.choice((Firewall.DROP, Firewall.REJECT)), how == "one way"))


def _followers(rng: random.Random, shape: Shape) -> Iterator[Fault]:
    """Faults that strike where chance would seldom bring them: between two messages of a recovery."""
    for _ in range(rng.choice((1, 1, 2))):
        times = rng.choice((1, 1, 2, shape.world, rng.randint(1, 3 * shape.world)))
        delay = rng.choice((0.0, 0.0003, 0.002, 0.01, 0.05))
        yield replace(_fault(rng, shape, delay), after=(rng.choice(MOMENTS), times))


def _shape(rng: random.Random) -> Shape:
    kind = rng.random()
    if kind < 0.2:
        return Shape(1, rng.choice((2, 3, 4)), standby=rng.choice((0, 1)))
    nodes = rng.choice((2, 3, 3, 4, 5))
    return Shape(
        nodes,
        1 if nodes > 3 else rng.choice((1, 1, 2)),
        spares=rng.choice((0, 1, 1, 2)),
        external=rng.random() < 0.3,
        max_direct_agents=rng.choice((64, 64, 64, 1, 2)),
    )


def _faults(rng: random.Random, shape: Shape, script: Script) -> Iterator[Fault]:
    step_s = script.forward_s + script.backward_s + script.optimizer_s
    span = max(script.steps * step_s, 0.5)
    count = rng.choice((0, 1, 1, 2, 2, 3, 4, 6))
    begin = rng.random() * span
    for _ in range(count):
        # most faults come soon after another one: in the middle of its recovery
        at = begin if rng.random() < 0.2 else begin + rng.choice((0.05, 0.3, 1.0, 3.0)) * rng.random()
        if rng.random() < 0.25:
            at = rng.random() * span * 1.2
        yield _fault(rng, shape, at)
        begin = at


def _fault(rng: random.Random, shape: Shape, at: float) -> Fault:
    world, nodes = shape.world, shape.nodes + shape.spares
    names = [f"n{i}" for i in range(nodes)] + (["ctl"] if shape.external else [])
    length = rng.choice((0.1, 0.3, 0.6, 1.0, 2.0, 5.0, 8.0)) * (0.5 + rng.random())
    how = rng.choice((Firewall.DROP, Firewall.DROP, Firewall.REJECT))
    kinds = ["kill", "kill", "kill", "kills", "stop", "mute"]
    if nodes > 1:
        kinds += [
            "power",
            "power",
            "agent",
            "freeze",
            "freeze",
            "cut",
            "cut",
            "cut",
            "reset",
            "reset+cut",
            "one way",
            "pair",
        ]
    if shape.external:
        kinds += ["controller", "controller", "long controller"]
    kind = rng.choice(kinds)
    if kind == "kill":
        return Fault(at, "kill", (rng.randrange(world),))
    if kind in ("kills", "mute"):
        ranks = rng.sample(range(world), rng.randint(1, min(world, 4)))
        return Fault(at, "kill" if kind == "kills" else "mute", tuple(sorted(ranks)))
    if kind == "stop":
        return Fault(at, "stop", (rng.randrange(world),))
    if kind in ("controller", "long controller"):
        return Fault(at, "controller", (22.0 + 18.0 * rng.random() if kind == "long controller" else length,))
    name = rng.choice(names[:nodes]) if kind in ("power", "agent") else rng.choice(names)
    if kind == "power":
        return Fault(at, "power", (name, rng.choice((0.5, 3.0, 20.0))))
    if kind == "agent":
        return Fault(at, "agent", (name, rng.choice((0.2, 1.0, 5.0))))
    if kind == "freeze":
        return Fault(at, rng.choice(("freeze host", "freeze agent")), (name, length))
    if kind == "pair":
        other = rng.choice([n for n in names if n != name])
        return Fault(at, "cut", ((name,), (other,), length, how, False))
    others = tuple(n for n in names if n != name)
    if kind == "one way":
        pair = ((name,), others) if rng.random() < 0.5 else (others, (name,))
        return Fault(at, "cut", (*pair, length, how, True))
    if kind == "cut":
        some = tuple(sorted(rng.sample(names, rng.randint(1, max(1, len(names) // 2)))))
        rest = tuple(n for n in names if n not in some)
        return Fault(at, "cut", (some, rest, length, how, False))
    return Fault(at, kind, ((name,), others, length, how, False))


# -- carrying it out ----------------------------------------------------------------------------------


class Struck:
    """Carries out the faults of one history in its world."""

    def __init__(self, world: World, faults: Sequence[Fault]) -> None:
        self.world = world
        self._faults = faults
        self._cuts: list[tuple[str, str]] = []
        self._moments: Counter[str] = Counter()
        self._nobody = contextvars.copy_context()
        """In which nothing runs in one of the processes, which may be gone when the time comes."""

    def plan(self, world: World) -> None:
        """Once the job takes its first steps; or after 10 s, if it never does."""
        world.on_moment = self._moment
        world.loop.call_later(0.05, self._wait, 0.05)

    def _wait(self, waited: float) -> None:
        begun = any(
            w.model is not None and w.model.gate.generation >= 0 and w.model.can_step()
            for w in self.world.workers.values()
        )
        if begun or waited > 10:
            for fault in self._faults:
                if fault.after is None:
                    self._later(fault.at, self.strike, fault)
        else:
            self.world.loop.call_later(0.05, self._wait, waited + 0.05)

    def _moment(self, name: str) -> None:
        self._moments[name] += 1
        for fault in self._faults:
            if fault.after == (name, self._moments[name]):
                self._later(fault.at, self.strike, fault)

    def strike(self, fault: Fault) -> None:
        world = self.world
        if world.over:
            return
        world.note(f"*** {fault.kind} {' '.join(map(str, fault.what))}")
        world.laws.struck(fault)
        getattr(self, "_" + fault.kind.replace(" ", "_").replace("+", "_"))(*fault.what)

    def _later(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        self.world.loop.call_later(seconds, callback, *args, context=self._nobody)
        self.world.laws.last_fault_at = max(self.world.laws.last_fault_at, self.world.loop.now + seconds)

    def _workers(self, ranks: Iterable[int]) -> list[SimWorkerProcess]:
        return [w for w in self.world.workers.values() if w.place in ranks and not w.process.dead]

    def _kill(self, *ranks: int) -> None:
        for worker in self._workers(ranks):
            worker.process.end()

    def _stop(self, *ranks: int) -> None:
        for worker in self._workers(ranks):
            if worker.stepping:  # before its first step no one looks for it
                worker.process.freeze()

    def _mute(self, *ranks: int) -> None:
        for worker in self._workers(ranks):
            if worker.model is not None:
                worker.model.mute = True

    def _power(self, name: str, off_s: float) -> None:
        host = self.world.hosts[name]
        if host.up:
            host.power_off()
            self._later(off_s, self._power_on, name)

    def _power_on(self, name: str) -> None:
        self.world.hosts[name].power_on()
        if not self.world.laws.job_over:  # whatever has started the job starts no node of it any more
            self.world.start_agent(name)

    def _agent(self, name: str, off_s: float) -> None:
        process = self.world.agents[name]
        if process.host.up and not process.dead:
            process.end()
            self._later(off_s, self._agent_again, name)

    def _agent_again(self, name: str) -> None:
        if self.world.hosts[name].up and self.world.agents[name].dead and not self.world.laws.job_over:
            self.world.start_agent(name)

    def _controller(self, off_s: float) -> None:
        process = self.world.agents["ctl"]
        if not process.dead:
            process.end()
            self._later(off_s, self._controller_again)

    def _controller_again(self) -> None:
        if not self.world.laws.job_over:
            self.world.start_controller()

    def _freeze_host(self, name: str, seconds: float) -> None:
        host = self.world.hosts[name]
        if host.up and not host.frozen:
            host.freeze()
            self._later(seconds, self._thaw_host, name, seconds)

    def _thaw_host(self, name: str, seconds: float) -> None:
        host = self.world.hosts[name]
        if host.frozen:
            self.world.note(f"*** {name} goes on")
            host.thaw(self.world.loop)

    def _suspend(self, name: str, seconds: float) -> None:
        host = self.world.hosts[name]
        if host.up and not host.frozen:
            host.suspend(self.world.loop)
            self._later(seconds, self._thaw_host, name, seconds)

    def _wall(self, name: str, seconds: float) -> None:
        """Someone sets the clock."""
        self.world.hosts[name].wall += seconds

    def _resize(self, replicas: int, ahead: int) -> None:
        """A user commands it: that many steps ahead of the newest one (-1: from the next one on)."""
        newest = max(self.world.laws.newest.values(), default=0)
        step = newest + ahead if ahead >= 0 else -1
        self._command(lambda service: service.Resize(pb.ResizeRequest(replicas=replicas, step=step), None))

    def _drain(self, name: str, within_s: float) -> None:
        """A user commands a node to leave."""
        self._command(lambda service: service.Drain(pb.DrainRequest(node=name, within_s=within_s), None))

    def _command(self, call: Callable[[ControllerService], Any]) -> None:
        for process, service in self.world.controllers():
            if process.runs and service.machine.job.launched:

                async def commanded(service: ControllerService = service) -> None:
                    answer = await call(service)
                    self.world.note(f"*** the controller answers: {answer.error or 'yes'}")

                process.start(commanded())

    def _dirty(self, *ranks: int) -> None:
        for worker in self._workers(ranks):
            if worker.model is not None:
                worker.model.dirty = True

    def _crash(self, *ranks: int) -> None:
        for worker in self._workers(ranks):
            if worker.model is not None and worker.process.runs:
                worker.process.call(0.0, worker.model.fail, "ValueError", "a bug")

    def _busy(self, rank: int, seconds: float) -> None:
        """Its training thread is slow to go on after the next recovery."""
        for worker in self._workers((rank,)):
            if worker.model is not None:
                worker.model.busy_until = self.world.loop.now + seconds

    def _freeze_agent(self, name: str, seconds: float) -> None:
        process = self.world.agents[name]
        process.freeze()

        def thaw() -> None:
            self.world.note(f"*** the agent of {name} goes on")
            process.thaw()

        self._later(seconds, thaw)

    def _cut(self, some: Sequence[str], rest: Sequence[str], seconds: float, how: Firewall, one_way: bool) -> None:
        hosts = self.world.hosts
        pairs = [(hosts[a].ip, hosts[b].ip) for a in some for b in rest]
        for a, b in pairs:
            self.world.network.block(a, b, how, one_way=one_way)
        self._later(seconds, self._heal, pairs)

    def _heal(self, pairs: list[tuple[str, str]]) -> None:
        self.world.note("*** the paths are whole again")
        for a, b in pairs:
            self.world.network.unblock(a, b)
        self.world.fabric.heal()

    def _reset(self, some: Sequence[str], rest: Sequence[str], *_: Any) -> None:
        hosts = self.world.hosts
        for a in some:
            for b in rest:
                self.world.network.reset(hosts[a].ip, hosts[b].ip)

    def _reset_cut(
        self, some: Sequence[str], rest: Sequence[str], seconds: float, how: Firewall, one_way: bool
    ) -> None:
        self._reset(some, rest)
        self._cut(some, rest, seconds, how, one_way)


# -- running, searching -------------------------------------------------------------------------------


def run(history: History, tolerated: frozenset[str] = frozenset()) -> Outcome:
    """One history, inside of :func:`simulated`. ``tolerated``: laws whose breach does not count."""
    h = history
    world = World(h.seed, h.shape, h.script, h.weather, tolerated=tolerated)
    with inside(world):
        return world.run(LONGEST_S, Struck(world, history.faults).plan)


def shrink(history: History, law: str, tolerated: frozenset[str] = frozenset(), tries: int = 60) -> History:
    """The same violation with as few faults, and as simple a job, as can be found."""
    best = history
    again = True
    while again and tries > 0:
        again = False
        for candidate in _simpler(best):
            tries -= 1
            violation = run(candidate, tolerated).violation
            if violation is not None and violation.law == law:
                best, again = candidate, True
                break
            if tries <= 0:
                break
    return best


def _simpler(history: History) -> Iterator[History]:
    for i in range(len(history.faults)):
        yield replace(history, faults=history.faults[:i] + history.faults[i + 1 :])
    script, weather = history.script, history.weather
    calm = replace(weather, slow=0.0, loss=0.0, repeat=0.0)
    if calm != weather:
        yield replace(history, weather=calm)
    plain = Script(script.steps)
    names = ("late_every", "late_buffer", "below", "below_every", "unique", "bias", "thing", "plain", "in_place")
    for name in names:
        simpler = replace(script, **{name: getattr(plain, name)})
        if simpler != script:
            yield replace(history, script=simpler)
    simpler_shape = replace(history.shape, checkpoint_s=0.0, limits=False)
    if simpler_shape != history.shape:
        yield replace(history, shape=simpler_shape)


@contextmanager
def quiet() -> Iterator[None]:
    """No log of the product on the terminal."""
    logger = logging.getLogger("flashrecovery")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


__all__ = ["Fault", "History", "Outcome", "draw", "quiet", "run", "shrink", "simulated"]
