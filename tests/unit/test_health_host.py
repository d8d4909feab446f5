"""The host plugin, with written /proc and /sys trees, and once with the machine's own."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from flashrecovery.health import host
from flashrecovery.health.findings import HealthContext, HealthFinding, Severity
from flashrecovery.health.host import HostPlugin, clock_synchronised, create, parse_pressure
from flashrecovery.health.node import Disk, NodeReading, judge

PSI = "some avg10=31.00 avg60=9.10 avg300=2.00 total=9000\nfull avg10={full:.2f} avg60=8.00 avg300=1.70 total=8000\n"
QUIET = NodeReading(at=10.0, disk=Disk(1 << 40, False), synchronised=True, wall_offset=1.7e9)


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def interface(name: str, state: str = "up", kind: int = 1, rx: int = 0, tx: int = 0) -> dict[str, object]:
    folder = f"class/net/{name}"
    counters = {"statistics/rx_errors": rx, "statistics/tx_errors": tx}
    return {f"{folder}/{k}": v for k, v in {"operstate": state, "type": kind, **counters}.items()}


@pytest.fixture
def machine(tmp_path: Path) -> tuple[HostPlugin, Path, Path]:
    """A quiet machine, after the first look."""
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    write(proc, {"pressure/memory": PSI.format(full=0), "vmstat": "nr_free_pages 7\noom_kill 3"})
    write(proc, {"self/cgroup": "4:memory:/job\n0::/job"})
    write(sys, {"fs/cgroup/job/memory.events": "low 0\noom 1\noom_kill 1"})
    write(sys, {"fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 2"})
    write(sys, {**interface("eth0", rx=100), **interface("ib0", "down"), **interface("lo", "unknown", 772)})
    port = "class/infiniband/mlx5_0/ports/1"
    write(sys, {f"{port}/state": "4: ACTIVE", f"{port}/counters/symbol_error": 5})
    plugin = HostPlugin(tmp_path, proc, sys)
    assert plugin.health() == []
    return plugin, proc, sys


def codes(findings: list[HealthFinding]) -> list[tuple[str, str]]:
    assert all(f.severity is Severity.WARNING and f.device is None and f.plugin == "host" for f in findings)
    return [(f.subject, f.code) for f in findings]


def test_memory(machine: tuple[HostPlugin, Path, Path]) -> None:
    plugin, proc, sys = machine
    write(proc, {"pressure/memory": PSI.format(full=20), "vmstat": "oom_kill 4"})
    write(sys, {"fs/cgroup/job/memory.events": "oom_kill 2"})
    assert codes(plugin.health()) == [("memory", "memory_pressure"), ("memory", "oom_kill"), ("memory", "oom_kill")]
    write(proc, {"pressure/memory": PSI.format(full=19.9)})
    assert plugin.health() == [], "kills count once"


def test_network(machine: tuple[HostPlugin, Path, Path]) -> None:
    plugin, _, sys = machine
    write(sys, interface("eth0", rx=109))
    assert plugin.health() == [], "single errors are usual"
    write(sys, {**interface("eth0", rx=110, tx=30), **interface("ib0", "up")})
    assert codes(plugin.health()) == [("eth0", "interface_errors")]
    write(sys, {**interface("eth0", "down", rx=110, tx=30), "class/infiniband/mlx5_0/ports/1/state": "1: DOWN"})
    assert codes(plugin.health()) == [("eth0", "interface_down"), ("mlx5_0/1", "interface_down")]
    os.rename(sys / "class/net/eth0", sys / "class/net-gone")
    assert ("eth0", "interface_gone") in codes(plugin.health())


def test_a_file_that_is_missing_says_nothing(tmp_path: Path) -> None:
    plugin = HostPlugin(tmp_path, tmp_path / "no-proc", tmp_path / "no-sys")
    assert plugin.health() == [] and plugin.health() == []
    assert parse_pressure("some avg10=1.00 avg60=0 avg300=0 total=0") is None


def test_disk_and_clock() -> None:
    for change, expected in (
        ({"disk": None}, [("disk", "disk_unreadable")]),
        ({"disk": Disk(1 << 40, True)}, [("disk", "disk_read_only")]),
        ({"disk": Disk(5 << 20, False)}, [("disk", "disk_full")]),
        ({"synchronised": False}, [("clock", "clock_unsynchronised")]),
        ({"wall_offset": 1.7e9 - 1.5}, [("clock", "clock_jump")]),
        ({"wall_offset": 1.7e9 + 0.4}, []),
    ):
        now = dataclasses.replace(QUIET, at=11.0, **change)  # type: ignore[arg-type]
        assert codes(judge(QUIET, QUIET, now)) == expected
    never = dataclasses.replace(QUIET, synchronised=False)
    assert judge(never, never, never) == [], "a machine without a time source is none the worse for it"


def test_the_run_directory_that_is_gone(
    machine: tuple[HostPlugin, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> object:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(host.os, "statvfs", fails)
    assert codes(machine[0].health()) == [("disk", "disk_unreadable")]


def test_this_machine(tmp_path: Path) -> None:
    plugin = create(HealthContext(tmp_path, 1))
    reading = plugin.read()
    assert ("vmstat" in dict(reading.oom_kills)) == ("oom_kill" in Path("/proc/vmstat").read_text())
    assert reading.disk is not None and reading.disk.free > 0
    assert (reading.pressure is not None) == Path("/proc/pressure/memory").exists()
    assert "lo" not in {i.name for i in reading.interfaces}
    assert clock_synchronised() in (True, False)
    assert all(f.severity is Severity.WARNING for f in plugin.health())
    plugin.close()
