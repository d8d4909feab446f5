"""How long it takes to interrupt and to regroup, and what the exchangeable backend costs per operation.

    python benchmarks/regroup.py [--quick] [--ranks 2 4 8] [--groups 1 12]

Per row, medians over the rounds of the slowest rank of each round, in ms: *free* from ``abandon`` on a rank that is
blocked in an all_reduce to its exception; *drain* until nothing can touch a tensor; *detach*; *attach* until all groups
are connected again; *first* the first all_reduce on the default group. ``stock`` is what torch itself needs for it:
``destroy_process_group`` and re-creating all groups (which no handle survives). All ranks share this machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from flashrecovery import groups

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the ranks' harness is the tests'
from tests.support.groups_ranks import run_ranks

PHASES = ("free", "drain", "detach", "attach", "first")


def sync(store: Store, name: str, size: int) -> None:
    """A barrier over the store, for starting together."""
    if store.add(f"{name}/count", 1) == size:
        store.set(f"{name}/go", "1")
    store.wait([f"{name}/go"])


def _make_groups(count: int, size: int) -> list[object]:
    return [dist.new_group(list(range(size))) for _ in range(count - 1)]


def _exchanges(rounds: int, count: int) -> Callable[[int, int, Store], None]:
    def body(rank: int, size: int, store: Store) -> None:
        groups.install(control_group=False)
        dist.init_process_group("gloo", store=PrefixStore("job", store), rank=rank, world_size=size)
        kept = _make_groups(count, size)
        dist.all_reduce(torch.ones(1000))
        for generation in range(1, rounds + 1):
            sync(store, f"start{generation}", size)
            times = _one_exchange(rank, size, store, generation)
            print(generation, *(f"{1e3 * t:.3f}" for t in times), flush=True)
        assert len(kept) == count - 1

    return body


def _one_exchange(rank: int, size: int, store: Store, generation: int) -> list[float]:
    cut_at = 0.0

    def cut() -> None:
        nonlocal cut_at
        sync(store.clone(), f"cut{generation}", size)  # type: ignore[attr-defined]  # all ranks are blocked: the last one does not take part
        time.sleep(0.02)
        cut_at = time.monotonic()
        groups.abandon("benchmark")

    thread = threading.Thread(target=cut)
    thread.start()
    freed = None
    if rank != size - 1:
        try:
            dist.all_reduce(torch.ones(1000))
        except dist.DistBackendError:
            freed = time.monotonic()
    thread.join()
    t0 = time.monotonic()
    assert groups.drain(5.0).quiet
    t1 = time.monotonic()
    groups.detach_all()
    t2 = time.monotonic()
    sync(store, f"attach{generation}", size)
    t3 = time.monotonic()
    groups.attach(store, generation, 30.0)
    t4 = time.monotonic()
    dist.all_reduce(torch.ones(1000))
    t5 = time.monotonic()
    return [0.0 if freed is None else freed - cut_at, t1 - t0, t2 - t1, t4 - t3, t5 - t4]


def _stock(rounds: int, count: int) -> Callable[[int, int, Store], None]:
    def body(rank: int, size: int, store: Store) -> None:
        kept: list[object] = []
        for generation in range(rounds + 1):
            sync(store, f"start{generation}", size)
            t0 = time.monotonic()
            if generation:
                dist.destroy_process_group()
                kept.clear()
            prefixed = PrefixStore(f"stock{generation}", store)
            dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size)
            kept.extend(_make_groups(count, size))
            t1 = time.monotonic()
            dist.all_reduce(torch.ones(1000))
            if generation:
                print(generation, f"{1e3 * (t1 - t0):.3f} {1e3 * (time.monotonic() - t1):.3f}", flush=True)
        assert len(kept) == count - 1

    return body


def slowest_rank_medians(texts: list[str]) -> list[float]:
    """Median over the rounds of each phase's slowest rank."""
    rounds: dict[str, list[list[float]]] = {}
    for text in texts:
        for line in text.splitlines():
            words = line.split()
            if words and words[0].isdigit():
                rounds.setdefault(words[0], []).append([float(w) for w in words[1:]])
    worst = [[max(column) for column in zip(*rows, strict=True)] for rows in rounds.values()]
    return [statistics.median(column) for column in zip(*worst, strict=True)]


def _per_operation(batches: int) -> Callable[[int, int, Store], None]:
    """A stock and an exchangeable group in the same processes, in turns: on a busy machine only that compares."""

    def body(rank: int, size: int, store: Store) -> None:
        dist.init_process_group("gloo", store=PrefixStore("job", store), rank=rank, world_size=size)
        stock = dist.new_group(list(range(size)))
        groups.install(control_group=False)
        ours = dist.new_group(list(range(size)))
        t = torch.ones(1)
        for _ in range(batches):
            for name, group in (("stock", stock), ("ours", ours)):
                dist.all_reduce(t, group=group)
                began = time.perf_counter()
                for _ in range(300):
                    dist.all_reduce(t, group=group)
                print(name, 1e6 * (time.perf_counter() - began) / 300, flush=True)

    return body


def _fastest(texts: list[str], name: str) -> float:
    return min(float(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 20, and at most 4 ranks")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--groups", type=int, nargs="*", default=[1, 12])
    args = parser.parse_args()
    groups.build()
    rounds = 5 if args.quick else 20
    ranks = [r for r in args.ranks if r <= 4] if args.quick else args.ranks
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {rounds} rounds, ms (median of the slowest rank)")
    print(f"{'ranks':>5} {'groups':>6} " + " ".join(f"{p:>8}" for p in PHASES) + f" {'total':>8} {'stock':>8}  ratio")
    for size in ranks:
        for count in args.groups:
            ours = slowest_rank_medians(run_ranks(size, _exchanges(rounds, count), deadline_s=300))
            stock = sum(slowest_rank_medians(run_ranks(size, _stock(rounds, count), deadline_s=300)))
            cells = " ".join(f"{ms:8.2f}" for ms in ours)
            print(f"{size:5d} {count:6d} {cells} {sum(ours):8.2f} {stock:8.2f} {sum(ours) / stock:6.2f}", flush=True)
    print("\nall_reduce of 4 bytes, us per operation (fastest of the batches of 300)")
    for size in (1, 2):
        texts = run_ranks(size, _per_operation(10 if args.quick else 40), deadline_s=120)
        print(f"{size} ranks: stock {_fastest(texts, 'stock'):7.1f}   exchangeable {_fastest(texts, 'ours'):7.1f}")


if __name__ == "__main__":
    main()
