"""Speed at which a replacement gets its state back, beside the machine's memory and links. Linux; as root with hosts.

Two ranks train with DDP and Adam, so that all state is replicated. Rank 1 is killed several times in one job, and each
time rank 0 gives its replacement everything: parameters and both moments. What counts is the phase ``restore`` of the
recovery: the orders, the transfer, the digests on both sides. Beside it, in the same run, one thread copies as many
bytes (memory that has been written to before), and with ``--speeds`` the ranks are on two hosts (network namespaces)
whose links are shaped (``tc``). What such a link carries is measured by ``iperf3``, if it is installed. With
``--holders`` there are three hosts: two hold the state, each behind a link of its own speed, and the link of the third
one, which gets it, is not shaped. What both links carry together is the bound.

Memory: the peak of both processes while the state comes back (of the replacement: from its start on), less the peak of
the same rank in ordinary training, as a part of the state. At most a tenth is the goal.

``--sizes`` are MB of state. The job takes three times that: 4000 MB need 12 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import harness

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # hosts are the tests'
from tests.support.hosts import Host, available, network

LAYERS = 24
OF_PARAMETER = 12
"""Bytes of state of one parameter: itself and two moments, in fp32."""
FIRST_KILL, BETWEEN = 3, 3
GOAL, LINK_GOAL, MEMORY_GOAL = 0.5, 0.9, 0.1
COPIES = 5
IPERF_S = 3
LIMIT_S = 600.0


@dataclass(frozen=True)
class Restored:
    """Of one recovery: the phase's seconds, and the bytes that came back."""

    seconds: float
    nbytes: int

    @property
    def speed(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds


@dataclass(frozen=True)
class Job:
    """``more_memory``: see the top, the most of all recoveries and processes, in bytes."""

    recoveries: list[Restored]
    more_memory: int


# -- the script that is measured -------------------------------------------------------------------


def work(megabytes: int, kills: int, folder: str) -> None:
    """What each rank runs."""
    import flashrecovery

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    width = max(8, round((megabytes * 1e6 / OF_PARAMETER / LAYERS) ** 0.5))
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recovery.register(model=model, optimizer=optimizer)
    x = torch.ones(1, width)
    deaths = {FIRST_KILL + BETWEEN * number for number in range(kills)}
    seen: set[int] = set()
    for step in recovery.steps(FIRST_KILL + BETWEEN * kills):
        if step.index == FIRST_KILL or step.index in seen or (step.index > 0 and not seen):
            came_back = step.index in seen or not seen
            with Path(folder, f"memory.{dist.get_rank()}").open("a") as file:
                print("recovered" if came_back else "training", _peak_memory(), file=file)
        seen.add(step.index)
        if step.index in deaths:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        with step:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            mark = Path(folder, f"killed.{step.index}")
            if dist.get_rank() == dist.get_world_size() - 1 and step.index in deaths and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
    dist.destroy_process_group()


def _peak_memory() -> int:
    """Bytes of this process, the most since that began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


# -- measuring ---------------------------------------------------------------------------------------


def copy_speed(nbytes: int) -> float:
    """Bytes a second of one thread that copies as many bytes, at most a GB, between memory in use: the median."""
    nbytes = min(nbytes, 1_000_000_000)
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    torch.set_num_threads(1)
    times = []
    for _ in range(COPIES):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return nbytes / statistics.median(times)


def link_speed(hosts: list[Host]) -> float | None:
    """Bytes a second that one connection from each of the hosts to the last one carries, all at once; None without
    ``iperf3``."""
    if shutil.which("iperf3") is None:
        return None
    *holders, last = hosts
    ports = [str(5201 + place) for place in range(len(holders))]
    servers = [
        subprocess.Popen([*last.command, "iperf3", "-s", "-1", "-p", port], stdout=subprocess.DEVNULL) for port in ports
    ]
    clients: list[subprocess.Popen[str]] = []
    try:
        time.sleep(0.5)
        for holder, port in zip(holders, ports, strict=True):
            client = [*holder.command, "iperf3", "-c", last.address, "-p", port, "-t", str(IPERF_S), "-J"]
            clients.append(subprocess.Popen(client, stdout=subprocess.PIPE, text=True))
        found = [json.loads(client.communicate(timeout=10 * IPERF_S)[0]) for client in clients]
    finally:
        for process in clients:
            process.kill()
            process.wait()
        for server in servers:
            server.kill()
            server.wait()
    return sum(float(one["end"]["sum_received"]["bits_per_second"]) for one in found) / 8


def more_memory(directory: Path) -> int:
    """By how much the peaks in recoveries were above that of training, in bytes."""
    most = -(1 << 60)
    for path in directory.glob("memory.*"):
        found = [line.split() for line in path.read_text().splitlines()]
        usual = next(int(nbytes) for moment, nbytes in found if moment == "training")
        most = max([most, *(int(nbytes) - usual for moment, nbytes in found if moment == "recovered")])
    return most


def restore(megabytes: int, kills: int, hosts: list[Host]) -> Job:
    """One job. Raises RuntimeError if it fails."""
    with harness.job_directory() as directory:
        launch = harness.Launch(directory / "output.log")
        run_dir = directory / "run"
        script = [__file__, "--work", str(megabytes), str(kills), str(directory)]
        shared = [sys.executable, "-m", "flashrecovery.cli.main", "run", "--run-dir", str(run_dir), "--standby", "0"]
        env = {harness.JOB_ENV: json.dumps({"directory": str(directory)})}
        if not hosts:
            launch.start([*shared, "--nproc-per-node", "2", *script], **env)
        else:
            env |= {"FLASHRECOVERY_TOKEN": "the-token-of-this-benchmark", "GLOO_SOCKET_IFNAME": "eth0"}
            for number, host in enumerate(hosts):
                place = ["--node-rank", str(number), "--node-name", host.name]
                place += ["--controller", f"{hosts[0].address}:29400"]
                options = ["--nnodes", str(len(hosts)), "--nproc-per-node", "1", *place]
                launch.start([*host.command, *shared, *options, *script], **env)
        try:
            codes = [process.wait(LIMIT_S) for process in launch.processes]
            if any(codes):
                raise RuntimeError(f"{megabytes} MB: ended with {codes}\n{launch.tail(30)}")
        finally:
            launch.stop()
        found = [
            Restored(event["phases"]["restore"], event["bytes"])
            for event in _events(run_dir)
            if event["event"] == "recovery_finished"
        ]
        return Job(found, more_memory(directory))


def _events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def row(megabytes: int, kills: int, speeds: Sequence[float], hosts: list[Host]) -> tuple[list[str], bool]:
    """A row of the table, and whether the goal is met. ``speeds``: of the links of those who hold state, MB a second,
    where there are hosts."""
    copies = [copy_speed(megabytes * 1_000_000)]
    measured = link_speed(hosts) if hosts else None
    job = restore(megabytes, kills, hosts)
    found = job.recoveries
    copies.append(copy_speed(megabytes * 1_000_000))
    bound = (measured or sum(speeds) * 1e6) if hosts else statistics.median(copies)
    goal = LINK_GOAL if hosts else GOAL
    more = job.more_memory / found[0].nbytes
    ratio = statistics.median(one.speed for one in found) / bound
    return [
        f"{found[0].nbytes / 1e6:.0f}",
        f"{_words(speeds)} MB/s, {bound / 1e6:.0f} carried" if hosts else f"memory, {bound / 2**30:.2f} GiB/s",
        harness.spread([one.seconds for one in found], 1e3, 0),
        harness.spread([one.speed / 2**30 for one in found], digits=2),
        f"{ratio:.2f}",
        f"{goal:g}: " + ("met" if ratio >= goal else "NOT MET"),
        f"{more:+.2f}" + ("" if more <= MEMORY_GOAL else " NOT MET"),
    ], ratio >= goal and more <= MEMORY_GOAL


def _words(speeds: Sequence[float]) -> str:
    return "link of " + " and ".join(f"{speed:g}" for speed in speeds)


def between(megabytes: int, kills: int, links: Sequence[float], *, both_ways: bool) -> tuple[list[str], bool]:
    """A row of a job on one host more than there are links. ``both_ways``: what the last host sends is shaped, too."""
    with network(len(links) + 1) as net:
        for host, speed in zip(net.hosts, [*links, *links[:1]] if both_ways else links, strict=False):
            host.shape(speed)
        return row(megabytes, kills, links, net.hosts)


def main() -> None:
    """Measure and judge."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--sizes", type=int, nargs="*", default=[10, 100, 1000, 2000], metavar="MB")
    flags.add_argument("--kills", type=int, default=3, help="a launch")
    flags.add_argument("--speeds", type=float, nargs="*", default=[], metavar="MB/S", help="of links between two hosts")
    flags.add_argument(
        "--holders",
        type=float,
        nargs=2,
        action="append",
        default=[],
        metavar=("MB/S", "MB/S"),
        help="of the links of two hosts that hold the state; may be repeated",
    )
    flags.add_argument("--quick", action="store_true", help="100 MB on one host, two kills")
    args = flags.parse_args()
    if args.quick:
        args.sizes, args.kills, args.speeds, args.holders = [100], 2, [], []
    if (args.speeds or args.holders) and not available():
        flags.error("--speeds and --holders need root and iproute2, for network namespaces")
    harness.begin()
    rows, all_met = [], True
    for megabytes in args.sizes:
        found = [row(megabytes, args.kills, [], [])]
        found += [between(megabytes, args.kills, [speed], both_ways=True) for speed in args.speeds]
        found += [between(megabytes, args.kills, links, both_ways=False) for links in args.holders]
        rows += [cells for cells, _ in found]
        all_met = all_met and all(met for _, met in found)
    head = ("MB", "bound", "restore, ms", "GiB/s", "of the bound", "goal", "more memory, of the state")
    harness.table("State that comes back to a replacement, DDP, a rank on each host, two on one", head, rows)
    sys.exit(0 if all_met else 1)


if __name__ == "__main__":
    if "--work" in sys.argv:
        size, deaths, place = sys.argv[2:5]
        work(int(size), int(deaths), place)
    else:
        main()
