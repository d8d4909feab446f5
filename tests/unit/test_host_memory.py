"""What a control group leaves of its memory."""

from __future__ import annotations

from flashrecovery.runtime.host_memory import available_memory, left_by_control_group

STAT = "anon 3000\nfile 900\nshmem 100\ninactive_file 500\nactive_file 300\nunevictable 0\n"


def test_cached_files_are_free() -> None:
    assert left_by_control_group("10000\n", "4000\n", STAT) == 6000 + 800
    assert left_by_control_group("10000\n", "4000\n", "anon 4000\n") == 6000


def test_without_a_limit() -> None:
    assert left_by_control_group("max\n", "4000\n", STAT) is None


def test_this_machine_has_some() -> None:
    assert available_memory() > 1 << 20
