"""Search for a history that breaks a law, on every core."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from tests.simulation import history as hist
from tests.simulation.elastic import draw_beyond, draw_elastic
from tests.simulation.patches import slow_disks, slow_starts
from tests.simulation.removed import REMOVED


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=200, help="how many histories")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--seed", type=int, help="this one only, with everything that happens in it")
    parser.add_argument("--shrink", action="store_true", help="leave out faults for as long as the law is broken")
    parser.add_argument("--tolerate", nargs="*", default=[], metavar="LAW", help="laws whose breach does not count")
    parser.add_argument("--without", choices=sorted(REMOVED), help="with this mend taken out, until that is noticed")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: every core)"
    )
    parser.add_argument("--elastic", action="store_true", help="histories of elastic jobs")
    parser.add_argument("--replicas", action="store_true", help="of elastic jobs whose replicas have several ranks")
    parser.add_argument("--beyond", action="store_true", help="of such jobs that grow beyond their launch")
    parser.add_argument("--slow-disks", action="store_true", help="the number of a generation takes a while to write")
    parser.add_argument("--slow-starts", action="store_true", help="what starts a process takes a while")
    args = parser.parse_args()
    if args.seed is not None:
        args.first, args.seeds, args.jobs = args.seed, 1, 1
    return search(args)


@dataclass
class Found:
    """In some histories: the laws that were broken, each with the seed, and what is said of it."""

    seeds: range
    broken: list[tuple[int, str, str]] = field(default_factory=list)
    recoveries: int = 0
    handled: int = 0


def search(args: argparse.Namespace) -> int:
    """0: no law was broken."""
    began, broken = time.perf_counter(), Counter[str]()
    histories = handled = recoveries = 0
    for found in _parts(args):
        histories, handled = histories + len(found.seeds), handled + found.handled
        recoveries += found.recoveries
        for _, law, text in found.broken:
            broken[law] += 1
            print(text, flush=True)
        if args.without and found.broken:
            histories = found.broken[0][0] - args.first + 1
            break
    said = ", ".join(f"{law} {count} times" for law, count in broken.items()) or "no law is broken"
    took = f"{time.perf_counter() - began:.1f} s, {args.jobs} at a time"
    print(f"{histories} histories, {recoveries} recoveries, {handled} events in {took}: {said}")
    return 1 if broken else 0


def _parts(args: argparse.Namespace) -> Iterator[Found]:
    """In the order of the seeds, each as soon as all before it are there."""
    last, most = args.first + args.seeds, 10 if args.without else 50
    parts = [range(first, min(first + most, last)) for first in range(args.first, last, most)]
    part = partial(look, args)
    if args.jobs == 1:
        yield from map(part, parts)
        return
    pool = ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"))
    try:
        yield from pool.map(part, parts)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def rare_collections() -> Iterator[None]:
    """A history makes a hundred thousand short-lived objects; looking for circles among them takes a seventh of it."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def look(args: argparse.Namespace, seeds: range) -> Found:
    """At these histories; with a mend taken out, only up to the first that breaks a law."""
    tolerated, found = frozenset(args.tolerate), Found(seeds)
    removed = REMOVED[args.without]() if args.without else nullcontext()
    disks = slow_disks() if args.slow_disks else nullcontext()
    starts = slow_starts() if args.slow_starts else nullcontext()
    with hist.quiet(), hist.simulated(), rare_collections(), removed, disks, starts:
        for seed in seeds:
            history = _drawn(args, seed)
            outcome = hist.run(history, tolerated=tolerated)
            found.handled += outcome.handled
            found.recoveries += outcome.recoveries
            if args.seed is not None:
                print("\n".join(show(history, outcome)))
            if outcome.violation is None:
                continue
            lines = [f"seed {seed}: {outcome.violation}"]
            if args.shrink:
                small = hist.shrink(history, outcome.violation.law, tolerated=tolerated)
                lines += show(small, hist.run(small, tolerated=tolerated))
            found.broken.append((seed, outcome.violation.law, "\n".join(lines)))
            if args.without:
                break
    return found


def _drawn(args: argparse.Namespace, seed: int) -> hist.History:
    if args.beyond:
        return draw_beyond(seed, several=args.replicas)
    return draw_elastic(seed, several=args.replicas) if args.elastic or args.replicas else hist.draw(seed)


def show(history: hist.History, outcome: hist.Outcome) -> Iterable[str]:
    """What has happened."""
    return [str(history), *outcome.trace]
