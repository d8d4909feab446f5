"""Parity's arithmetic beside memcpy, on the same buffers and in turn: encoding whole, by deltas, decoding. No torch.

A speed is that of the bytes of state: what a member has is encoded, or what it has lost is decoded, at this rate in
bytes a second. memcpy is one call for as many bytes; the ratio is the median of the ratios within each round, so that
whatever else the machine does meets both. Each round's order is another one.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import statistics
import sys
import time
from collections.abc import Callable

from flashrecovery.plan.parity.code import BUCKET, ParityLayout, StripePart, encode_traffic
from flashrecovery.redundancy.parity.bucket import decode_bucket
from flashrecovery.redundancy.parity.frames import DeltaBase, deltas, digest
from flashrecovery.redundancy.parity.store import ParityStore
from flashrecovery.redundancy.parity.xor import NumpyXor, Xor, xor

GOAL = 0.7
"""Of memcpy's speed, for encoding."""


def buffer(nbytes: int) -> memoryview:
    """Anonymous memory with something in it, in huge pages where the system gives them."""
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    piece = os.urandom(1 << 16)
    for start in range(0, nbytes, len(piece)):
        end = min(start + len(piece), nbytes)
        view[start:end] = piece[: end - start]
    return view


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Bench:
    """``columns`` members' units of ``nbytes`` each."""

    def __init__(self, nbytes: int, columns: int, bucket: int, compute: Xor) -> None:
        self.nbytes, self.columns, self.bucket, self.xor = nbytes, columns, bucket, compute
        self.units = [buffer(nbytes) for _ in range(columns)]
        self.total, self.spare = buffer(nbytes), buffer(nbytes)
        self.scratch = memoryview(bytearray(bucket))
        self.q = bytearray(bucket + 64 * columns)

    def memcpy(self) -> int:
        ctypes.memmove(address(self.spare), address(self.total), self.nbytes)
        return self.nbytes

    def whole_p(self) -> int:
        for start in range(0, self.nbytes, self.bucket):
            to = slice(start, start + self.bucket)
            self.xor.many(self.total[to], [unit[to] for unit in self.units])
        return self.nbytes * self.columns

    def whole_pq(self) -> int:
        """P and Q of all units, bucket by bucket, as the first holder of a stripe does it."""
        q = memoryview(self.q)
        for start in range(0, self.nbytes, self.bucket):
            to = slice(start, start + self.bucket)
            for column, unit in enumerate(self.units):
                self.xor.into(self.total[to], unit[to])
                self.xor.into(q[64 * column : 64 * column + self.bucket], unit[to])
        return self.nbytes * self.columns

    def delta(self) -> int:
        """old ^ new of one member, as it is sent."""
        for start in range(0, self.nbytes, self.bucket):
            to = slice(start, start + self.bucket)
            self.xor.delta(self.scratch, self.units[0][to], self.total[to])
        return self.nbytes

    def delta_of_fresh(self) -> int:
        """The same where the new bytes have just been copied, bucket by bucket: copy and delta together."""
        for start in range(0, self.nbytes, self.bucket):
            to = slice(start, start + self.bucket)
            self.spare[to] = self.total[to]
            self.xor.delta(self.scratch, self.units[0][to], self.spare[to])
        return self.nbytes

    def apply(self) -> int:
        """P ^= delta, where the delta has just arrived."""
        for start in range(0, self.nbytes, self.bucket):
            self.xor.into(self.total[start : start + self.bucket], self.scratch)
        return self.nbytes

    def apply_first(self) -> int:
        """dirty = clean ^ delta, past the caches."""
        for start in range(0, self.nbytes, self.bucket):
            to = slice(start, start + self.bucket)
            self.xor.stream(self.spare[to], self.total[to], self.scratch)
        return self.nbytes

    def apply_first_cached(self) -> int:
        for start in range(0, self.nbytes, self.bucket):
            to = slice(start, start + self.bucket)
            self.xor.delta(self.spare[to], self.total[to], self.scratch)
        return self.nbytes

    def digests(self) -> int:
        for start in range(0, self.nbytes, self.bucket):
            digest(self.total[start : start + self.bucket])
        return self.nbytes

    def unzip(self) -> int:
        """Two lost columns from what is left of P and Q."""
        for start in range(0, self.nbytes, self.bucket):
            to = slice(start, start + self.bucket)
            self.xor.unzip(self.total[to], self.spare[to], 3)
        return 2 * self.nbytes


def group_step(nbytes: int, members: int, parity: int, bucket: int, compute: Xor) -> dict[str, Callable[[], int]]:
    """A member's work of a step by the objects that a job would use: digests, headers and Python included."""
    layout = ParityLayout((nbytes,) * members, parity, bucket)
    old, new = buffer(nbytes), buffer(nbytes)
    new[::4096] = bytes(b ^ 1 for b in bytes(new[::4096]))
    stripe = layout.data_stripes(0)[0]
    store = ParityStore(
        layout, stripe, StripePart.P, buffer_of_zeros(ParityStore.nbytes(layout, stripe, StripePart.P)), compute
    )
    version = 0
    length = layout.unit(stripe, 0)[1]
    payloads = [buffer(min(bucket, length - start)) for start in range(0, length, bucket)]
    known = {column: bytes(15) + b"1" for column in range(layout.columns)}

    def send() -> int:
        for frame in deltas(layout, 0, 2, new, DeltaBase(1, old), arithmetic=compute):
            frame.header()
        return nbytes

    def hold() -> int:
        nonlocal version
        store.begin(version + 1, version if version else -1)
        for index, payload in enumerate(payloads):
            for column in range(layout.columns):
                store.apply(index, payload[: layout.data_length(stripe, index, column)], {column: known[column]})
        store.done(range(layout.columns), len(payloads))
        store.flip()
        version += 1
        return length * layout.columns

    def decode() -> int:
        parity_of = {StripePart.P: store}
        missing = 0
        for index, payload in enumerate(payloads):
            lengths = [layout.data_length(stripe, index, c) for c in range(layout.columns)]
            columns = {c: payload[:n] for c, n in enumerate(lengths) if n and c != missing}
            content = {part: s.bucket(version, index) for part, s in parity_of.items()}
            decode_bucket(layout, stripe, index, columns, content, compute=compute)
        return length

    hold()
    return {
        "a member sends its deltas": send,
        "a holder takes them in, to the flip": hold,
        "decoding one lost unit": decode,
    }


def buffer_of_zeros(nbytes: int) -> memoryview:
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="of each unit")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bucket", type=int, default=BUCKET, help="bytes")
    parser.add_argument("--numpy", action="store_true", help="the arithmetic where there is no compiler")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    compute: Xor = NumpyXor() if args.numpy else xor()
    nbytes, rounds = (32 << 20, 5) if args.quick else (args.mib << 20, args.rounds)
    bench = Bench(nbytes, args.members - 1, args.bucket, compute)
    work: dict[str, Callable[[], int]] = {
        "memcpy": bench.memcpy,
        f"P of {bench.columns} units": bench.whole_p,
        f"P and Q of {bench.columns} units": bench.whole_pq,
        "delta = old ^ new": bench.delta,
        "delta of what is being copied, with the copy": bench.delta_of_fresh,
        "P ^= delta": bench.apply,
        "dirty = clean ^ delta, past the caches": bench.apply_first,
        "dirty = clean ^ delta, through them": bench.apply_first_cached,
        "two lost columns": bench.unzip,
        "digests (xxh3-128)": bench.digests,
    }
    for parity in (1, 2):
        steps = group_step(nbytes, args.members, parity, args.bucket, compute)
        work.update({f"parity {parity}: {name}": action for name, action in steps.items()})
    speeds: dict[str, list[float]] = {name: [] for name in work}
    order = list(work)
    for _ in range(rounds + 1):
        random.shuffle(order)
        for name in order:
            began = time.perf_counter()
            done = work[name]()
            speeds[name].append(done / (time.perf_counter() - began))
    ratios = {name: [a / b for a, b in zip(s[1:], speeds["memcpy"][1:], strict=True)] for name, s in speeds.items()}
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {compute.name}, units of {nbytes >> 20} MiB, "
        f"buckets of {args.bucket >> 10} KiB, {args.members} members, {rounds} rounds; one thread"
    )
    print(f"\n| {'what':<46} | GB/s of state, median (extremes) | best / memcpy's best | median of ratios |")
    print(f"|{'-' * 48}|{'-' * 34}|{'-' * 22}|{'-' * 18}|")
    for name, values in speeds.items():
        best, median = max(values[1:]), statistics.median(values[1:])
        cell = f"{median / 1e9:.2f} ({min(values[1:]) / 1e9:.2f} .. {best / 1e9:.2f})"
        against = best / max(speeds["memcpy"][1:])
        print(f"| {name:<46} | {cell:<32} | {against:>20.2f} | {statistics.median(ratios[name]):>16.2f} |")
    for parity in (1, 2):
        layout = ParityLayout((nbytes,) * args.members, parity, args.bucket)
        traffic = encode_traffic(layout)
        print(
            f"parity {parity}: a member of {nbytes / 1e6:.1f} MB sends {max(traffic.sent) / 1e6:.2f} MB a step "
            f"({100 * traffic.frames / traffic.total:.2f} % headers), holds {layout.memory(0) / 1e6:.2f} MB a version"
        )
    met = statistics.median(ratios[f"P of {bench.columns} units"]) >= GOAL
    print(f"encoding at {GOAL:.0%} of memcpy: {'met' if met else 'missed'}")
    sys.exit(0 if met or args.numpy else 1)


if __name__ == "__main__":
    main()
