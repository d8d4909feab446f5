"""Histories of elastic jobs: nodes leave and come back, a user commands a size or has a node leave, and what strikes
any job strikes in the middle of that."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from tests.simulation.content import Script
from tests.simulation.history import MOMENTS, Fault, History, draw
from tests.simulation.network import Firewall
from tests.simulation.world import Shape

MORE_MOMENTS = (*MOMENTS, "hears pause", "hears leave", "job_resized", "joining_processes", "node_leaves")
"""What a fault may follow here."""


def draw_beyond(seed: int, *, several: bool = False) -> History:
    """The same job as :func:`draw_elastic`'s, which may become larger than it was launched, and has nodes for that.
    What strikes a rank there may strike one beyond the launch here, and a command may ask for as many. ``several``: the
    replicas have two ranks each, at most two more come, and there are at least two at the launch."""
    history, rng = draw_elastic(seed, several=several), random.Random(seed)
    shape, more = history.shape, rng.choice((1, 2) if several else (1, 2, 3))
    spares = max(shape.spares, rng.choice((1, 1, 2))) if shape.nodes > 1 else 0
    if several and spares:
        spares = max(spares, shape.each // shape.nproc)  # a replica comes as a whole
    script = replace(history.script, micro_batches=history.script.micro_batches + more)
    ranks, replicas = shape.world + more * shape.each, shape.replicas.replicas + more

    def other(fault: Fault) -> Fault:
        if fault.kind in ("kill", "mute"):
            return replace(fault, what=(rng.randrange(ranks),))
        if fault.kind == "resize":
            return replace(fault, what=(rng.randint(shape.elastic, replicas), fault.what[1]))
        return fault

    faults = tuple(other(fault) if rng.random() < 0.6 else fault for fault in history.faults)
    return replace(history, shape=replace(shape, spares=spares, beyond=more), script=script, faults=faults)


def draw_elastic(seed: int, *, several: bool = False) -> History:
    """The history of this seed. ``several``: the replicas have two ranks each."""
    rng, like = random.Random(seed * 6_700_417 + 5), draw(seed)
    shape = _shape_of_several(rng) if several else _shape(rng)
    script = Script(
        steps=rng.choice((16, 30, 60)),
        micro_batches=shape.replicas.replicas + rng.choice((0, 1, 3)),
        below=rng.random() < 0.3,
        in_place=rng.random() < 0.2,
        forward_s=rng.choice((0.02, 0.05)),
        backward_s=rng.choice((0.02, 0.05)),
        optimizer_s=rng.choice((0.002, 0.02)),
        startup_s=rng.choice((0.1, 0.5)),
    )
    faults = [fault for _ in range(rng.choice((1, 2, 2, 3, 4))) for fault in _one(rng, shape, script)]
    if rng.random() < 0.5:
        times = rng.choice((1, 1, 2, shape.world, rng.randint(1, 3 * shape.world)))
        after, delay = (rng.choice(MORE_MOMENTS), times), rng.choice((0.0, 0.0003, 0.002, 0.01, 0.05, 0.3))
        faults += [replace(fault, at=delay, after=after) for fault in _one(rng, shape, script)][:1]
    return History(seed, shape, script, like.weather, tuple(sorted(faults, key=lambda fault: fault.at)))


def _shape(rng: random.Random) -> Shape:
    least, never = rng.choice((1, 2)), "never" if rng.random() < 0.2 else "auto"
    if rng.random() < 0.3:
        return Shape(1, rng.choice((3, 4)), elastic=least, replace=never)
    nodes, nproc = rng.choice(((3, 1), (4, 1), (5, 1), (2, 2), (3, 2)))
    spares = rng.choice((0, 0, 1))
    return Shape(nodes, nproc, spares=spares, external=rng.random() < 0.4, elastic=least, replace=never)


def _shape_of_several(rng: random.Random) -> Shape:
    """Replicas of two ranks, which are neighbours or not, on one node or on two."""
    never, inner = "never" if rng.random() < 0.2 else "auto", rng.choice((1, 2))
    if rng.random() < 0.3:
        return Shape(1, rng.choice((4, 6)), elastic=1, replace=never, each=2, inner=inner)
    nodes, nproc = rng.choice(((4, 1), (6, 1), (2, 2), (3, 2)))
    least = rng.choice((1, nodes * nproc // 2 - 1))
    spares, external = rng.choice((0, 0, 1)), rng.random() < 0.4
    return Shape(nodes, nproc, spares, external, elastic=least, replace=never, each=2, inner=inner)


def _one(rng: random.Random, shape: Shape, script: Script) -> Iterator[Fault]:
    """Something that happens, and perhaps what follows from it."""
    span = max(script.steps * (script.forward_s + script.backward_s + script.optimizer_s), 1.0)
    at, names = 0.1 + rng.random() * span, [f"n{i}" for i in range(shape.nodes + shape.spares)]
    kinds = ["kill", "kill", "resize", "resize", "mute"]
    if shape.nodes > 1:
        kinds += ["power", "power", "power", "drain", "drain", "cut", "freeze host", "freeze agent"]
    if shape.external:
        kinds += ["controller", "controller"]
    kind, name = rng.choice(kinds), rng.choice(names)
    if kind in ("kill", "mute"):
        yield Fault(at, kind, (rng.randrange(shape.world),))
    elif kind == "resize":
        most = shape.replicas.replicas
        yield Fault(at, kind, (rng.randint(shape.elastic, most), rng.choice((-1, -1, 2, 5))))
        if rng.random() < 0.6:
            yield Fault(at + rng.random() * span / 2, kind, (most, rng.choice((-1, 2, 5))))
    elif kind == "power":
        yield Fault(at, kind, (name, rng.choice((0.5, 1.0, 3.0))))
    elif kind == "drain":
        yield Fault(at, kind, (name, rng.choice((2.0, 10.0))))
    elif kind == "controller":
        yield Fault(at, kind, (rng.choice((0.2, 1.0, 3.0)),))
    elif kind == "cut":
        others = tuple(n for n in [*names, *(["ctl"] if shape.external else [])] if n != name)
        yield Fault(
            at,
            kind,
            ((name,), others, 0.5 + 4 * rng.random(), rng.choice((Firewall.DROP, Firewall.REJECT)), rng.random() < 0.3),
        )
    else:
        yield Fault(at, kind, (name, 0.5 + 3 * rng.random()))
