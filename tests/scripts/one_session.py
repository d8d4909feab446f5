"""A real session in one process, of which this file plays the agent: what loops change, and what is left of it when a
step is stopped and done again. Prints a line of JSON for each loop and moment: whether all steps and the end are those
of the loop without a stop. Not a test of recovery between ranks; those start real jobs."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import queue
import random
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

if __name__ == "__main__":
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", OMP_NUM_THREADS="1")

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from flashrecovery.config import Settings
from flashrecovery.errors import RegistrationError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.channel import Channel
from flashrecovery.runtime.page import Page
from flashrecovery.torch_native import ModuleAdapter, adapter_for
from flashrecovery.worker.connection import Assignment, Connection
from flashrecovery.worker.preimport.environment_watch import EnvironmentWatch
from flashrecovery.worker.preimport.preimport import Installed
from flashrecovery.worker.preimport.start_profile import StartProfile
from flashrecovery.worker.recovery import Recovery
from flashrecovery.worker.session import Session

STEPS, STOPPED = 9, 4
MOMENTS = ("start", "forward", "backward", "optimizer", "below")
_LENGTH = struct.Struct("<I")


class Agent:
    """Says to one worker what agent and controller would: begin, and for a survivor whose state is the cut."""

    def __init__(self, inherited: Page | None = None) -> None:
        self._socket, theirs = socket.socketpair()
        self.page = Page.create("one-session")
        if inherited is not None:
            self.page.inherit(inherited)
        self._said: queue.Queue[pb.FromWorker] = queue.Queue()
        self.connection = Connection(
            Channel(theirs),
            self.page,
            Assignment(rank=0, place=0, detached=inherited is not None),
            EnvironmentWatch(Installed()),
            StartProfile(Installed()),
        )
        self.session = Session(self.connection, Settings(), adapter_for, ModuleAdapter)
        self.recovery = Recovery(self.session)
        self.notices: list[str] = []
        self._serial = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        stream = self._socket.makefile("rb")
        while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
            message = pb.FromWorker.FromString(stream.read(_LENGTH.unpack(head)[0]))
            if message.HasField("notice"):
                self.notices.append(message.notice.kind)
            self._said.put(message)

    def _wait(self, what: str) -> Any:
        while True:
            message = self._said.get(timeout=30)
            if message.WhichOneof("body") == what and not message.reply.outside:
                return getattr(message, what)

    def _tell(self, generation: int, **body: Any) -> None:
        self._serial += 1
        command = pb.Command(generation=generation, rank=0, serial=self._serial, **body)
        data = pb.ToWorker(command=command).SerializeToString()
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def begin(self) -> None:
        def go() -> None:
            self._wait("joined")
            self._tell(0, resume=pb.Resume(version=0))
            self._wait("reply")

        threading.Thread(target=go, daemon=True).start()

    def recover(self, generation: int) -> None:
        def go() -> None:
            self._tell(generation, hold=pb.Hold())
            self._wait("reply")
            self._tell(generation, stop=pb.Stop(reason="drill", mutation_grace_s=20, finish_to=-1))
            stopped = self._wait("reply")
            version, held = stopped.live_version, stopped.held
            local = []
            if version < 0:  # torn: back to its own copy
                version = max(h.version for h in held if h.kind == "undo" and len(h.shards) > 1)
                local = [s for h in held for s in h.shards if h.version == version]
            self._tell(generation, restore=pb.Restore(version=version, local=local, deadline_s=20))
            reply = self._wait("reply")
            assert not reply.error_type, reply
            self._tell(generation, resume=pb.Resume(version=version))

        threading.Thread(target=go, daemon=True).start()
        self.await_stop()

    def await_stop(self) -> None:
        while not self.session.gate.stopped:
            time.sleep(0.0005)

    def release(self) -> None:
        self._tell(self.session.gate.generation, release=pb.Release())


class Counter:
    """An object with a state."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 1)
        self.register_buffer("bias", torch.zeros(6))
        self.register_buffer("large", torch.zeros(20_000))
        self.activations: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.tanh(self.first(x) + self.bias))
        if hidden.requires_grad:
            self.activations.append(weakref.ref(hidden))  # the last layer needs it in the backward pass
        out: torch.Tensor = self.last(hidden)
        return out

    def held(self) -> int:
        """How many activations of all forward passes are still in memory."""
        return sum(hidden() is not None for hidden in self.activations)


@dataclass
class World:
    """What a loop has."""

    net: Net
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    data: Iterator[Any]
    average: Net
    counter: Counter
    generator: torch.Generator
    validation: DataLoader[Any]
    seen: list[float] = field(default_factory=list)


Part = Callable[[World, int, float], None]


def buffer_after_optimizer(world: World, step: int, loss: float) -> None:
    world.net.bias.add_(0.1 * (step + 1))


def large_buffer_after_optimizer(world: World, step: int, loss: float) -> None:
    world.net.large[10_000] += loss
    world.net.bias.copy_(world.net.large[10_000:10_006])


def scheduler(world: World, step: int, loss: float) -> None:
    world.scheduler.step()


def evaluation(world: World, step: int, loss: float) -> None:
    if step % 3 == 1:
        world.net.eval()
        with torch.no_grad():
            for x in world.validation:
                world.net(x)
        world.net.train()


def left_in_evaluation(world: World, step: int, loss: float) -> None:
    world.net.train(step % 3 != 1)


def averaged(world: World, step: int, loss: float) -> None:
    with torch.no_grad():
        for mine, theirs in zip(world.average.parameters(), world.net.parameters(), strict=True):
            mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)
        world.average.bias.add_(1)


def parameters_clamped(world: World, step: int, loss: float) -> None:
    for parameter in world.net.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def momentum_reset(world: World, step: int, loss: float) -> None:
    if step % 3 == 1:
        for state in world.optimizer.state.values():
            state["exp_avg"].mul_(0.5)


def prefetched(world: World, step: int, loss: float) -> None:
    world.seen.append(float(next(world.data).sum()))


def other_random_numbers(world: World, step: int, loss: float) -> None:
    world.net.bias.data.add_(random.random() + float(np.random.rand()))


def own_generator(world: World, step: int, loss: float) -> None:
    world.net.bias.add_(torch.rand(6, generator=world.generator))


def counted(world: World, step: int, loss: float) -> None:
    world.counter.value = 0.9 * world.counter.value + loss
    world.optimizer.param_groups[0]["lr"] = 0.01 + world.counter.value / 1000


def backward_again(world: World, step: int, loss: float) -> None:
    world.net(torch.ones(1, 4)).sum().backward()


LOOPS: dict[str, Part] = {
    part.__name__: part
    for part in (
        buffer_after_optimizer,
        large_buffer_after_optimizer,
        scheduler,
        evaluation,
        left_in_evaluation,
        averaged,
        parameters_clamped,
        momentum_reset,
        prefetched,
        other_random_numbers,
        own_generator,
        counted,
        backward_again,
    )
}
PLACES = ("in the block", "below", "above")
_AGENTS = []  # a connection that is closed ends the process, as it does a worker's


def train(part: Part, place: str, moment: str | None) -> tuple[dict[int, Any], str, list[str]]:
    """What each step saw (last: how many activations were in memory when it began), a digest of the end, and the
    notices. Stopped at ``moment`` of a step, the first time."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    agent = Agent()
    _AGENTS.append(agent)
    net, average = Net(), Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    counter, generator = Counter(), torch.Generator().manual_seed(4)
    agent.recovery.register(
        model=net, optimizer=optimizer, scheduler=schedule, counter=counter, average=average, generator=generator
    )
    rows = torch.rand(40, 4)
    data = agent.recovery.data(DataLoader(rows, batch_size=2, shuffle=True))  # type: ignore[arg-type]
    validation: DataLoader[Any] = DataLoader(torch.rand(6, 4), batch_size=3)  # type: ignore[arg-type]
    world = World(net, optimizer, schedule, data, average, counter, generator, validation)
    agent.begin()
    left = [moment]
    steps: dict[int, Any] = {}

    def at(here: str, step: int) -> None:
        if left[0] == here and step == STOPPED:
            left[0] = None
            agent.recover(1)
            if here != "below":
                agent.session.gate.check()

    for step in agent.recovery.steps(STEPS):
        i = step.index
        if place == "above":
            part(world, i, 1.0)
        loss = 0.0
        with step:
            held = net.held()
            at("start", i)
            x = next(data)
            output = net(x)
            at("forward", i)
            value = (output.square().mean() + net.bias.square().mean()) * torch.rand(())
            optimizer.zero_grad()
            value.backward()
            at("backward", i)
            optimizer.step()
            at("optimizer", i)
            loss = float(value)
            if place == "in the block":
                part(world, i, loss)
        at("below", i)
        if place == "below":
            part(world, i, loss)
        steps[i] = (loss, float(x.sum()), world.seen[-1:], optimizer.param_groups[0]["lr"], held)
        if agent.session.gate.version == STEPS:
            agent.release()
    return steps, _digest(world), agent.notices


def count_along() -> str:
    """What a loop is informed that counts the steps itself; "" if it comes into its second step."""
    agent = Agent()
    _AGENTS.append(agent)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    agent.recovery.register(model=net, optimizer=optimizer)
    agent.begin()
    try:
        for number, step in enumerate(agent.recovery.steps(STEPS)):
            with step:
                if number == 1:
                    break
                net(torch.ones(1, 4)).sum().backward()
                optimizer.step()
    except RegistrationError as e:
        return str(e)
    return ""


def _digest(world: World) -> str:
    hasher = hashlib.sha256()
    for module in (world.net, world.average):
        for tensor in module.state_dict().values():
            hasher.update(tensor.numpy().tobytes())
        hasher.update(bytes(m.training for m in module.modules()))
    for state in world.optimizer.state_dict()["state"].values():
        hasher.update(b"".join(v.numpy().tobytes() for v in state.values()))
    hasher.update(torch.get_rng_state().numpy().tobytes() + world.generator.get_state().numpy().tobytes())
    hasher.update(repr((random.getstate(), np.random.get_state()[1:3], world.counter.value)).encode())
    hasher.update(repr((world.scheduler.state_dict(), world.optimizer.param_groups[0]["lr"])).encode())
    return hasher.hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    for name, part in LOOPS.items():
        if wanted and name not in wanted:
            continue
        for place in PLACES:
            undisturbed, end, _ = train(part, place, None)
            gc.freeze()  # as in a rank: each session looks through all objects of its process that are not frozen
            for moment in MOMENTS:
                steps, other_end, notices = train(part, place, moment)
                same_steps = [i for i in undisturbed if steps.get(i) != undisturbed[i]]
                result = {"odd_steps": same_steps, "same_end": end == other_end, "notices": sorted(set(notices))}
                print(json.dumps({"loop": name, "place": place, "moment": moment, **result}), flush=True)
    print(json.dumps({"loop": "count_along", "place": "", "moment": "", "refused": count_along()}))
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(0)  # the connections of the workers are open


if __name__ == "__main__":
    main()
