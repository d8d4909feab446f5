"""``python -m tests.simulation --seeds 1000``: search for a history that breaks a law; ``--seed N`` shows one."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import nullcontext

from tests.simulation import history as hist
from tests.simulation.removed import REMOVED


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=200, help="how many histories")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--seed", type=int, help="this one only, with everything that happens in it")
    parser.add_argument("--shrink", action="store_true", help="leave out faults for as long as the law is broken")
    parser.add_argument("--tolerate", nargs="*", default=[], metavar="LAW", help="laws whose breach does not count")
    parser.add_argument("--without", choices=sorted(REMOVED), help="with this mend taken out, until that is noticed")
    args = parser.parse_args()
    with hist.quiet(), hist.simulated(), REMOVED[args.without]() if args.without else nullcontext():
        return search(args)


def search(args: argparse.Namespace) -> int:
    """0: no law was broken."""
    tolerated = frozenset(args.tolerate)
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + args.seeds)
    found: Counter[str] = Counter()
    histories = handled = recoveries = 0
    began = time.process_time()
    for seed in seeds:
        history = hist.draw(seed)
        outcome = hist.run(history, tolerated=tolerated)
        histories, handled = histories + 1, handled + outcome.handled
        recoveries += outcome.recoveries
        if args.seed is not None:
            show(history, outcome)
        if outcome.violation is None:
            continue
        found[outcome.violation.law] += 1
        print(f"seed {seed}: {outcome.violation}", flush=True)
        if args.shrink:
            small = hist.shrink(history, outcome.violation.law, tolerated=tolerated)
            show(small, hist.run(small, tolerated=tolerated))
        if args.without:
            break
    spent = time.process_time() - began
    said = ", ".join(f"{law} {count} times" for law, count in found.items()) or "no law is broken"
    print(f"{histories} histories, {recoveries} recoveries, {handled} events in {spent:.1f} s of one core: {said}")
    return 1 if found else 0


def show(history: hist.History, outcome: hist.Outcome) -> None:
    """What has happened."""
    print(history)
    print("\n".join(outcome.trace))


if __name__ == "__main__":
    sys.exit(main())
