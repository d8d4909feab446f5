"""What it takes to plan a change of layout, or of strategy, for 18,432 ranks: processor time of the pure functions.

python reshaping.py [CASE ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import harness
from flashrecovery.plan.reshard.boxes import Box, Space
from flashrecovery.plan.reshard.layouts import (
    Placement,
    RankGrid,
    chunked,
    end_to_end,
    even,
    flat_partitions,
    padded,
    replicated,
    sharded,
    together,
)
from flashrecovery.plan.reshard.plan import plan_reshard
from flashrecovery.plan.reshard.schedule import timetable
from flashrecovery.plan.strategy.step_cost import MeasuredStep, choose
from flashrecovery.plan.strategy.strategy import Machines, ModelShape, Strategy, Workload

RANKS = 18_432
LIMIT = 4 << 30
SHAPES = {
    "qkv": ((10240, 8192), 0),
    "proj": ((8192, 8192), 1),
    "up": ((57344, 8192), 0),
    "down": ((8192, 28672), 1),
    "norm1": ((8192,), None),
    "norm2": ((8192,), None),
}
"""Of a layer of a 70B model: shape, and the dimension that tensor parallelism cuts."""

Layout = tuple[list[Space], Mapping[str, Placement]]
Result = TypeVar("Result")


def _layers(grid: RankGrid, layers: int, pp: int) -> range:
    return range(pp * layers // grid.pp, (pp + 1) * layers // grid.pp)


def weights(grid: RankGrid, layers: int) -> Layout:
    """Weights and a moment of each, replicated over data-parallel ranks."""
    spaces, layout = [], {}
    for pp in range(grid.pp):
        groups = grid.shards(pp)
        placements = {
            kind: replicated(shape, grid.stage(pp))
            if dim is None
            else sharded(shape, dim, even(shape[dim], grid.tp), groups)
            for kind, (shape, dim) in SHAPES.items()
        }
        for layer in _layers(grid, layers, pp):
            for kind, placement in placements.items():
                for state in ("weight", "moment"):
                    spaces.append(Space(f"{layer}.{kind}.{state}", SHAPES[kind][0], 4))
                    layout[spaces[-1].name] = placement
    return spaces, layout


def shards(parts: int, count: int) -> Layout:
    """FSDP2 over ``parts`` ranks, and replicas of that."""
    groups = [range(i, RANKS, parts) for i in range(parts)]
    placements = [sharded(shape, 0, chunked(shape[0], parts), groups) for shape, _ in SHAPES.values()]
    shapes = [shape for shape, _ in SHAPES.values()]
    spaces = [Space(str(i), shapes[i % len(shapes)], 4) for i in range(count)]
    return spaces, {space.name: placements[i % len(shapes)] for i, space in enumerate(spaces)}


def optimizer(grid: RankGrid, layers: int) -> Layout:
    """The distributed optimizer: a flat buffer for each stage and tensor position, as boxes of each tensor."""
    spaces, parts = [], []
    for pp in range(grid.pp):
        names = [(layer, kind) for layer in _layers(grid, layers, pp) for kind in SHAPES]
        spaces += [Space(f"{layer}.{kind}", SHAPES[kind][0], 4) for layer, kind in names]
        for tp in range(grid.tp):
            boxes = []
            for layer, kind in names:
                shape, dim = SHAPES[kind]
                if dim is not None:
                    boxes.append((f"{layer}.{kind}", Box.whole(shape).narrowed(dim, *even(shape[dim], grid.tp)[tp])))
                elif tp == 0:
                    boxes.append((f"{layer}.{kind}", Box.whole(shape)))
            segments, end = end_to_end(boxes, 64)
            ranks = [(rank,) for rank in grid.peers(tp=tp, pp=pp)]
            parts.append(flat_partitions(segments, padded(end, grid.dp, 128), ranks))
    return spaces, together(*parts)


def buffers(replicas: int) -> Layout:
    """The same buffers as tensors of their own, which is enough where only the number of replicas changes."""
    size, count = 540_000_000, 128
    spaces = [Space(f"buffer{n}", (size,), 12) for n in range(count)]
    ranges = [(min(start, size), min(stop, size)) for start, stop in padded(size, replicas, 128)]
    return spaces, {
        space.name: sharded((size,), 0, ranges, [(n + count * dp,) for dp in range(replicas)])
        for n, space in enumerate(spaces)
    }


CASES: dict[str, tuple[Callable[[], Layout], Callable[[], Layout]]] = {
    "tensor parallel 8 to 4": (
        lambda: weights(RankGrid(tp=8, dp=144, pp=16), 192),
        lambda: weights(RankGrid(tp=4, dp=288, pp=16), 192),
    ),
    "16 stages to 8": (
        lambda: weights(RankGrid(tp=8, dp=144, pp=16), 192),
        lambda: weights(RankGrid(tp=8, dp=288, pp=8), 192),
    ),
    "HSDP, 256 shards to 128": (lambda: shards(256, 3000), lambda: shards(128, 3000)),
    "flat buffers, 144 replicas to 143": (lambda: buffers(144), lambda: buffers(143)),
    "the same as boxes of tensors": (
        lambda: optimizer(RankGrid(tp=8, dp=144, pp=16), 96),
        lambda: optimizer(RankGrid(tp=8, dp=143, pp=16), 96),
    ),
}


def timed(call: Callable[[], Result]) -> tuple[float, Result]:
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


def planned(name: str) -> tuple[str, ...]:
    """A line of the table."""
    old, new = CASES[name]
    (spaces, before), (_, after) = old(), new()
    plan_s, plan = timed(lambda: plan_reshard(spaces, before, after))
    rounds_s, table = timed(lambda: timetable(plan, LIMIT))
    moved = f"{plan.moved_bytes / 2**40:.1f}"
    return name, f"{len(spaces):,}", moved, f"{plan_s:.2f}", f"{rounds_s:.2f}", str(table.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="the first case only")
    args = parser.parse_args()
    harness.begin()
    rows = [planned(name) for name in args.cases or [*CASES][: 1 if args.quick else None]]
    harness.table(
        f"Planning a change of layout of {RANKS:,} ranks, seconds of processor time",
        ("change", "tensors", "TiB sent", "plan", "rounds", "number of rounds"),
        rows,
    )
    model = ModelShape(80, 8192, 64, 8, 28672, 128256, 70_553_706_496, 70_553_706_496)
    work, machines = Workload(model, 8192, 2304), Machines(RANKS, 8, 80 * 2.0**30)
    current = Strategy(tp=8, pp=16, dp=144)
    strategy_s, choice = timed(lambda: choose(work, machines, [MeasuredStep(current, 6.0)], current))
    print(f"\nStrategies: {strategy_s:.2f} s for {len(choice.ranked):,} that fit")


if __name__ == "__main__":
    main()
