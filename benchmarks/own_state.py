"""Processor time that a rank's own state and the comparison of a batch take in a step, by their size; no training.

A step's looks at one rank's own state, and its writing into the page, are made in one process as a healthy step makes
them: at the end of the forward pass, before the mutation, and when the step is over. Before each step the state changes
as the row says. Run it under two builds, turn by turn, to compare these.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

import harness
from flashrecovery.runtime.page import Page
from flashrecovery.torch_native import ModuleAdapter, adapter_for
from flashrecovery.worker.data.batch_digest import Content, digests_of_leaves
from flashrecovery.worker.loop import _LocalStates
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.step.sealing import Sealing

MIB = 1 << 20
WARM_UP = 5
"""Steps; each of the page's slots has been written by then."""
GOAL_OWN, GOAL_BATCH = 0.5, 0.02
"""Milliseconds a MiB."""


@dataclass(frozen=True)
class Case:
    """A rank's own state: a registered object's, or a buffer of ``model``. ``change`` is what a step does to it."""

    name: str
    value: Any
    change: Callable[[], object]
    model: nn.Module | None = None


class Own:
    """A registered object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """The value itself."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Not used."""
        self.value = state["value"]


def cases(mib: int) -> Iterator[Case]:
    """Of ``mib`` MiB each."""
    numbers = mib * MIB // 4
    whole = torch.rand(numbers)
    yield Case("a tensor, all of it written", whole, lambda: whole.add_(1))
    part = torch.rand(numbers)
    yield Case("a tensor, 100 elements written", part, lambda: part[50:150].add_(1))
    many = [torch.rand(numbers // 100) for _ in range(100)]
    yield Case("100 tensors, all written", many, lambda: torch._foreach_add_(many, 1.0))
    array = np.zeros(numbers, np.float32)
    yield Case("an array, 100 elements written", array, lambda: array.__setitem__(slice(50, 150), array[50] + 1))
    queue = collections.deque((torch.rand(1 << 14) for _ in range(16 * mib)), maxlen=16 * mib)
    yield Case("a queue of 64 KiB tensors, a new one", queue, lambda: queue.append(torch.rand(1 << 14)))
    small = [np.zeros(1 << 10, np.float32) for _ in range(256 * mib)]
    yield Case("4 KiB arrays, one written", small, lambda: small[3].__setitem__(7, small[3][7] + 1))
    model = nn.Linear(2, 2)
    buffer = torch.rand(numbers)
    model.register_buffer("own", buffer)
    yield Case("a buffer, all of it written", None, lambda: buffer.add_(1), model)


def own_state(case: Case, steps: int) -> float:
    """Seconds a step, the median."""
    registry = Registry(0, 2, adapter_for, ModuleAdapter)
    objects, per_rank = ({}, ()) if case.model is not None else ({"own": Own(case.value)}, ("own",))
    registry.register(case.model or nn.Linear(2, 2), [], objects, per_rank)
    registry.habits.known = True
    registry.capture_common(0)
    page = Page.create("own-state")
    place: Any = SimpleNamespace(page=page)
    sealing = Sealing(registry.habits, _LocalStates(registry, place))
    sealing.start()
    times = []
    for version in range(1, steps + 1):
        sealing.step_begins()
        case.change()
        began = time.thread_time()
        sealing.forward_ends(version)
        sealing.mutation_begins(version)
        shown = sealing.shown(version)
        registry.capture_common(version)
        sealing.complete(version, shown)
        times.append(time.thread_time() - began)
    page.close()
    return statistics.median(times[WARM_UP:])


def batch(mib: int, repeats: int, *, by_workers: bool) -> float:
    """Seconds for one fetch, the median. ``by_workers``: those of the loader have digested it."""
    made = {"x": torch.rand(mib * MIB // 8), "y": torch.rand(mib * MIB // 8)}
    times = []
    for _ in range(repeats):
        made["x"].add_(1)
        leaves = digests_of_leaves(made) if by_workers else ()
        began = time.thread_time()
        Content.of(made, leaves)
        times.append(time.thread_time() - began)
    return statistics.median(times)


def main() -> None:
    """Measure and judge."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--quick", action="store_true", help="16 MiB alone")
    flags.add_argument("--sizes", default="1,16,60", help="MiB")
    flags.add_argument("--steps", type=int, default=20)
    args = flags.parse_args()
    torch.set_num_threads(1)
    rows, missed = [], False
    for mib in [16] if args.quick else [int(size) for size in args.sizes.split(",")]:
        found = [(case.name, own_state(case, args.steps) * 1e3 / mib, GOAL_OWN) for case in cases(mib)]
        for name, by_workers in (("compared", False), ("compared by a loader's workers", True)):
            ms = batch(mib, args.steps, by_workers=by_workers) * 1e3 / mib
            found.append((f"a batch of two tensors, {name}", ms, GOAL_BATCH))
        rows += [[name, str(mib), f"{ms:.3f}", "met" if ms <= goal else "NOT MET"] for name, ms, goal in found]
        missed = missed or any(ms > goal for _, ms, goal in found)
    harness.table("Processor time in a step, milliseconds a MiB", ("own state", "MiB", "ms a MiB", "goal"), rows)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
