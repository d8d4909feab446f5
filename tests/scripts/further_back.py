"""A real session in one process that has come into the loop as a replacement, and goes back to the version before that
(of which a peer has the rest, played by this file). Prints a line of JSON: which steps are not those of the loop
without any of this, whether the end is, and what it has said that it holds. No test of recovery between ranks."""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

if __name__ == "__main__":
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", OMP_NUM_THREADS="1")

import numpy as np
import torch
from torch.utils.data import DataLoader

from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.page import Page
from tests.scripts.one_session import STEPS, Agent, Net

DIES, EARLIER = 5, 4


class Died(Exception):
    """The end of a process."""


class Run:
    """One process, from the script's first line."""

    def __init__(self, source: str, inherited: Page | None = None) -> None:
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        self.agent = Agent(inherited)
        self.net = Net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.agent.recovery.register(model=self.net, optimizer=self.optimizer)
        rows = torch.rand(40, 4)
        loader: Any = DataLoader(rows, batch_size=2, shuffle=True)  # type: ignore[arg-type]
        self.data = self.agent.recovery.data(loader if source == "loader" else _batches(rows))
        self.copies: dict[int, Any] = {}
        self.steps: dict[int, tuple[float, float]] = {}
        self.held: list[pb.Held] = []

    @property
    def registry(self) -> Any:
        return self.agent.session.registry

    def train(self, dies: int = -1, back: Run | None = None) -> None:
        """``dies``: in this step. ``back``: in step DIES it is brought to EARLIER, once, by what this one has kept."""
        for step in self.agent.recovery.steps(STEPS):
            i = step.index
            self.copies[i] = self._tensors(), self.registry.common.at(i)
            seen = 0.0, 0.0
            with step:
                if i == dies:
                    raise Died
                if i == DIES and back is not None:
                    self._go_back(back)
                    back = None
                    self.agent.session.gate.check()
                x = next(self.data)
                value = self.net(x).square().mean() * torch.rand(())
                self.optimizer.zero_grad()
                value.backward()
                self.optimizer.step()
                seen = value.item(), x.sum().item()
            self.steps[i] = seen
            if self.agent.session.gate.version == STEPS:
                self.agent.release()

    def _tensors(self) -> Any:
        return copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict()))

    def take(self, other: Run, version: int) -> None:
        """What a peer would send."""
        (net, optimizer), common = other.copies[version]
        self.net.load_state_dict(net)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        self.registry.common.keep(version, common)

    def come_in(self, peer: Run) -> None:
        """As a replacement, at version DIES."""

        def go() -> None:
            self.agent._wait("joined")
            self.take(peer, DIES)
            self.restore(0, DIES)

        self.coming = threading.Thread(target=go, daemon=True)
        self.coming.start()

    def in_page(self) -> list[int]:
        """Versions of its rank-local state that it has offered out of its page when it was stopped."""
        return sorted(h.version for h in self.held if h.kind == "page")

    def _go_back(self, peer: Run) -> None:
        agent = self.agent
        agent.connection.detached = False  # as of a process that has peers

        def go() -> None:
            self.coming.join()  # or each of the two might take the other's reply
            agent._tell(1, hold=pb.Hold())
            agent._wait("reply")
            agent._tell(1, stop=pb.Stop(reason="drill", mutation_grace_s=20, finish_to=-1))
            self.held = list(agent._wait("reply").held)
            self.take(peer, EARLIER)
            self.restore(1, EARLIER)

        threading.Thread(target=go, daemon=True).start()
        agent.await_stop()

    def restore(self, generation: int, version: int) -> None:
        agent = self.agent
        local = [self.registry.local_state.name]
        agent._tell(generation, restore=pb.Restore(version=version, local=local, deadline_s=20))
        reply = agent._wait("reply")
        if reply.error_type:
            print(json.dumps({"error": reply.error_type, "in_page": self.in_page()}), flush=True)
            os._exit(0)
        agent._tell(generation, resume=pb.Resume(version=version))
        agent._wait("reply")


def _batches(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    for i in range(0, len(rows), 2):
        yield rows[i : i + 2]


def main() -> None:
    torch.set_num_threads(1)
    source = sys.argv[1]
    whole, dead = Run(source), Run(source)
    for run, dies in ((whole, -1), (dead, DIES)):
        torch.manual_seed(5)
        run.agent.begin()
        with suppress(Died):
            run.train(dies)
    second = Run(source, dead.agent.page)
    second.come_in(whole)
    second.train(back=whole)
    same_end = str(whole._tensors()) == str(second._tensors())
    odd = [i for i in range(EARLIER, STEPS) if whole.steps[i] != second.steps.get(i)]
    print(json.dumps({"odd_steps": odd, "same_end": same_end, "in_page": second.in_page()}), flush=True)
    os._exit(0)  # the connections of the workers are open


if __name__ == "__main__":
    main()
