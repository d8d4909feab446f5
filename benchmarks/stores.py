"""Establishing the TCPStore: by all ranks on one server and on several, and by one new rank while these are connected.

FlashRecovery's figure 10 shows what the first costs when ranks do it one after the other, and when p do at a time. Here
p servers share the ranks' groups (:mod:`flashrecovery.plan.membership.stores`): of eight neighbouring ranks, and of
those at the same place in their eight. A group over all ranks would need one server whatever p is. The store belongs to
an agent and not to a rank, so survivors keep their connections; in later recoveries only new processes connect, unless
the store's node is lost.

    python stores.py [--quick] [DEVICES,DEVICES,...]
"""

from __future__ import annotations

import itertools
import resource
import subprocess
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import psutil

import harness
from flashrecovery.agent.stores.store import StoreServer
from flashrecovery.plan.membership.stores import store_count

AT_ONCE = 4
"""Processes that connect clients at the same time: this machine's cores set the limit."""
GROUP = 8


@dataclass(frozen=True)
class Established:
    """``all_s``: until all ranks have connected and met their groups; ``late_s``: one more meanwhile connected rank;
    ``busiest_s``: processor time of the server that has most to do, for all ranks; ``connections`` to all servers."""

    devices: int
    servers: int
    all_s: float
    late_s: float
    busiest_s: float
    connections: int


def _clients(ports: list[int], first: int, last: int, world: int) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("store_clients.py"))
    numbers = ",".join(map(str, ports))
    return subprocess.Popen(
        [sys.executable, script, numbers, str(first), str(last), str(GROUP), str(world)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=harness.environment(),
    )


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def _result(process: subprocess.Popen[str]) -> tuple[float, int]:
    assert process.stdout is not None
    seconds, connections = process.stdout.readline().split()
    return float(seconds), int(connections)


def _used(servers: list[StoreServer]) -> list[float]:
    """Processor time of each so far."""
    return [sum(psutil.Process(server.pid).cpu_times()[:2]) for server in servers]


def establish(devices: int, servers: int) -> Established:
    """All ranks connect, several at a time; then one more while they are connected."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the servers inherit it
    with ExitStack() as stack:
        stores = [stack.enter_context(closing(StoreServer("127.0.0.1", 0))) for _ in range(servers)]
        ports = [store.port for store in stores]
        bounds = [devices * i // AT_ONCE for i in range(AT_ONCE + 1)]
        shares = [*itertools.pairwise(bounds), (devices - 1, devices)]
        processes = [_clients(ports, first, last, devices) for first, last in shares if last > first]
        try:
            *launch, late = processes
            _wait_until_up(stores)
            before = _used(stores)
            for process in launch:
                _go(process)
            found = [_result(process) for process in launch]
            busiest = max(after - b for after, b in zip(_used(stores), before, strict=True))
            _go(late)
            all_s, connections = max(s for s, _ in found), sum(n for _, n in found)
            return Established(devices, servers, all_s, _result(late)[0], busiest, connections)
        finally:
            for process in processes:
                process.kill()
                process.wait()
                assert process.stdin is not None and process.stdout is not None
                process.stdin.close()
                process.stdout.close()


def _wait_until_up(stores: list[StoreServer]) -> None:
    """Their imports are not what is measured."""
    from flashrecovery.groups.torch_private import TCPStore

    for store in stores:
        TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False).set("up", "1")


def both(devices: int) -> tuple[Established, Established]:
    """With one server, and with as many as a job of this size uses."""
    return establish(devices, 1), establish(devices, store_count(devices, max(devices // GROUP, 1)))


def show(results: list[Established]) -> None:
    """As a table."""
    rows = [
        (
            f"{r.devices:,}",
            r.servers,
            f"{r.all_s:.2f}",
            f"{r.busiest_s:.2f}",
            f"{r.connections:,}",
            f"{1e3 * r.late_s:.1f} ms",
        )
        for r in results
    ]
    harness.table(
        "TCPStore, seconds. The clients run on this machine, too, and are most of the first time; what a cluster would "
        "wait for is the busiest server's processor time. FlashRecovery's figure 10 is a plot: near-linear in the "
        "number of ranks before, flatter with p at a time",
        ("devices", "servers", "all ranks", "busiest server", "connections", "one new rank"),
        rows,
    )


def main() -> None:
    sizes = harness.numbers(__doc__, "devices", "1000,4000,8000,18000", quick="1000")
    harness.begin()
    results = []
    for devices in sizes:
        for found in dict.fromkeys(both(devices)):
            results.append(found)
            print(f"  {found}", flush=True)
    show(results)


if __name__ == "__main__":
    main()
