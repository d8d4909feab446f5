"""What a group over all ranks costs in a recovery: the recovery's own group beside gloo's, which it used to be.

    python benchmarks/control_group.py [--rounds 5] [--ranks 8 32 64 128] [--gloo-up-to 128]

Per row, medians over the rounds of the slowest rank of each round: *form* forms the group again when all ranks are
there, *first* is its first barrier (here ours connects the ranks that a barrier needs), *barrier* a later one;
*connections* are those of one rank. All ranks are processes of this machine and share its cores.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store

from flashrecovery import groups
from flashrecovery.groups import native_build, peer_names
from flashrecovery.groups.inner import make_inners
from flashrecovery.groups.torch_private import GroupRequest
from regroup import slowest_rank_medians, sync

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the ranks' harness is the tests'
from tests.support.groups_ranks import connections, run_ranks

_LIMIT = datetime.timedelta(seconds=120)
_BARRIERS = 20


def _rounds(rounds: int, sparse: bool) -> Callable[[int, int, Store], None]:
    def body(rank: int, size: int, store: Store) -> None:
        peer_names.stop_asking()
        module = native_build.native()
        request = GroupRequest("all", tuple(range(size)), rank, size, {"cpu": "gloo"}, _LIMIT, None, None, sparse)
        for number in range(rounds + 1):
            before = connections()
            sync(store, f"start{number}", size)
            t0 = time.monotonic()
            inners = make_inners(module, request, PrefixStore(f"round{number}", store), _LIMIT, _LIMIT, None)
            (_, backend), *_ = inners.backends
            t1 = time.monotonic()
            backend.barrier().wait()
            t2 = time.monotonic()
            later = []
            for _ in range(_BARRIERS):
                t3 = time.monotonic()
                backend.barrier().wait()
                later.append(time.monotonic() - t3)
            made = connections() - before
            if number:  # the first round also loads what is loaded once
                print(number, t1 - t0, t2 - t1, statistics.median(later), made, flush=True)
            backend.barrier().wait()
            inners.backends.clear()
            module.bury(backend)
            del backend
            module.wait_buried(_LIMIT)

    return body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 32, 64, 128])
    parser.add_argument("--gloo-up-to", type=int, default=128, help="it makes n^2 connections")
    parser.add_argument("--quick", action="store_true", help="2 rounds, 8 and 32 ranks")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.ranks = 2, [8, 32]
    groups.build()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.rounds} rounds (median of the slowest rank)")
    print(f"{'ranks':>5} {'group':>6} {'form ms':>9} {'first ms':>9} {'barrier ms':>11} {'connections':>12}  ours/gloo")
    for size in args.ranks:
        cost = {}
        for name, sparse in (("gloo", False), ("ours", True)):
            if not sparse and size > args.gloo_up_to:
                continue
            form, first, later, made = slowest_rank_medians(run_ranks(size, _rounds(args.rounds, sparse), 600))
            cost[name] = form + first
            ratio = f"{cost['ours'] / cost['gloo']:9.2f}" if len(cost) == 2 else ""
            print(
                f"{size:5d} {name:>6} {1e3 * form:9.1f} {1e3 * first:9.1f} {1e3 * later:11.2f} {made:12.0f} {ratio}",
                flush=True,
            )


if __name__ == "__main__":
    main()
