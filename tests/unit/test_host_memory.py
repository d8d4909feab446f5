"""What control groups leave of a host's memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flashrecovery.runtime.host_memory import available_memory, left_by_control_group, memory_groups
from tests.support.control_groups import limited_memory

STAT = "anon 3000\nfile 900\nshmem 100\ninactive_file 500\nactive_file 300\nunevictable 0\n"


def test_cached_files_are_free() -> None:
    assert left_by_control_group("10000\n", "4000\n", STAT) == 6000 + 800
    assert left_by_control_group("10000\n", "4000\n", "anon 4000\n") == 6000


def test_version_1_counts_the_groups_below_apart() -> None:
    stat = f"{STAT}total_inactive_file 700\ntotal_active_file 400\n"
    assert left_by_control_group("10000\n", "4000\n", stat) == 6000 + 1100


def test_without_a_limit() -> None:
    assert left_by_control_group("max\n", "4000\n", STAT) is None


def test_the_groups_of_a_process_are_found() -> None:
    root = Path("/cg")
    assert list(memory_groups("0::/\n", root)) == [root]
    job = "0::/system.slice/slurmstepd.scope/job_7/step_0\n"
    assert list(memory_groups(job, root)) == [
        root / "system.slice/slurmstepd.scope/job_7/step_0",
        root / "system.slice/slurmstepd.scope/job_7",
        root / "system.slice/slurmstepd.scope",
        root / "system.slice",
        root,
    ]
    first = "5:devices:/\n4:memory,hugetlb:/docker/1:2\n0::/\n"
    assert list(memory_groups(first, root)) == [
        root / "memory/docker/1:2",
        root / "memory/docker",
        root / "memory",
        root,
    ]


def test_a_group_of_the_process_limits_it() -> None:
    code = "from flashrecovery.runtime.host_memory import available_memory\nprint(available_memory())"
    with limited_memory(300 << 20) as group:
        enter = f"open('{group}/cgroup.procs', 'w').write('0')\n"
        done = subprocess.run(
            [sys.executable, "-c", enter + code], check=True, capture_output=True, text=True, timeout=60
        )
        assert 200 << 20 < int(done.stdout) <= 300 << 20 < available_memory()
