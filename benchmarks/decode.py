"""What a lost node's state takes to come back out of parity, beside what the links alone would take. Needs root, and
``tc``.

Four hosts (network namespaces) whose links are shaped to a speed train with FSDP2 and parity, one rank on each; the
last one is killed, and a spare one takes its rank. Most of a restore is then the decoding: each of the three that are
left sends its part of what the others add up, and what it has added up itself, as many bytes as the lost one gets. A
recovery's phase ``restore`` also has the orders, the digests on both sides and the copy into the model in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # hosts and jobs are the tests'
from tests.support.hosts import Network, available, network
from tests.support.jobs import FSDP, Layout
from tests.support.nodes import NodesJob

NODES = 4
GOAL = 1.2


def restore(net: Network, layout: Layout) -> tuple[float, int]:
    """Seconds of the phase, and the bytes that were decoded. Raises TimeoutError, RuntimeError."""
    with tempfile.TemporaryDirectory() as folder:
        job = NodesJob(
            net,
            Path(folder) / "run",
            layout,
            nnodes=NODES,
            spare=1,
            steps=12,
            options=["--redundancy", "parity", "--snapshots", "never"],
        )
        try:
            job.wait_for_step(4, 400)
            job.kill_node(net.hosts[NODES - 1])
            job.wait_for("recovery_finished", timeout_s=200)
            (recovery,) = job.of("recovery_finished")
        finally:
            job.stop()
    return float(recovery["phases"]["restore"]), int(recovery["decoded_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", type=float, nargs="*", default=[10, 20, 40], metavar="MB/S")
    parser.add_argument("--width", type=int, default=512, help="of the model: more bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one speed, one round")
    args = parser.parse_args()
    if args.quick:
        args.speeds, args.rounds = [20], 1
    if not available():
        parser.error("needs root and iproute2, for network namespaces")
    layout = Layout(f"fsdp-{args.width}", FSDP.script, ("--width", str(args.width)), nproc=NODES)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; goal: {GOAL} x what the links take")
    print(f"{'MB/s':>5}  {'decoded, MB':>11}  {'links, s':>8}  {'restore, s':>20}  {'ratio':>5}")
    for speed in args.speeds:
        taken, nbytes = [], 0
        for number in range(args.rounds):
            with network(NODES + 1) as net:
                for host in net.hosts:
                    host.shape(speed)
                seconds, nbytes = restore(net, layout)
            taken.append(seconds)
            print(f"  {speed:g} MB/s, round {number + 1}: {seconds:.3f} s", file=sys.stderr, flush=True)
        alone, median = nbytes / (speed * 1e6), statistics.median(taken)
        spread = f"{median:.2f} ({min(taken):.2f}..{max(taken):.2f})"
        print(f"{speed:5g}  {nbytes / 1e6:11.1f}  {alone:8.2f}  {spread:>20}  {median / alone:5.2f}", flush=True)


if __name__ == "__main__":
    main()
