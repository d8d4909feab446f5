"""The leak check of the soak finds a slow leak, and takes neither noise nor a warm-up for one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.leaks import LEAST, OTHERS_SETTLING, SETTLING, Growth, Usage, files_of
from tests.support.soak import Overdue

RECOVERIES = 200


def growth(of: Callable[[int], float], name: str = "fds", count: int = RECOVERIES) -> Growth:
    made = Growth()
    for number in range(count):
        made.look("rank 0", number, {name: of(number)})
    return made


def test_a_descriptor_every_ten_recoveries_is_a_leak() -> None:
    (found,) = growth(lambda n: 60 + n // 10).leaks()
    assert "rank 0: fds grows by 0.1" in found


@pytest.mark.parametrize("name", ["fds", "threads", "maps", "shared", "files", "keys", "rss_mib"])
def test_each_of_them_can_leak(name: str) -> None:
    assert growth(lambda n: 60 + n // 10, name).leaks()
    assert not growth(lambda n: 60, name).leaks()


def test_a_leak_shows_in_the_shortest_series_and_in_noise() -> None:
    rng = random.Random(0)
    assert growth(lambda n: 60 + n // 10, count=LEAST + OTHERS_SETTLING).leaks()
    assert growth(lambda n: 60 + n / 10 + rng.choice((0, 0, 0, 6))).leaks()


def test_noise_and_warm_up_are_no_leak() -> None:
    rng = random.Random(0)
    assert not growth(lambda n: 60 + rng.choice((0, 0, 0, 6))).leaks()
    assert not growth(lambda n: 60 + min(n, OTHERS_SETTLING)).leaks()
    assert not growth(lambda n: 60 - n / 10).leaks()


def test_resident_memory_settles_late() -> None:
    settled = SETTLING["rss_mib"]
    assert not growth(lambda n: 360 + 0.2 * min(n, settled), "rss_mib").leaks()
    assert growth(lambda n: 360 + 0.1 * n, "rss_mib", settled + LEAST).leaks()
    assert growth(lambda n: 360 + 0.1 * n, "rss_mib", settled + LEAST - 1).judged() == []


def test_a_process_that_lived_too_short_is_not_judged() -> None:
    short = growth(lambda n: 60 + n, count=LEAST + OTHERS_SETTLING - 1)
    assert short.judged() == [] and short.leaks() == [] and short.table() == ""
    assert growth(lambda n: 60 + n, count=LEAST + OTHERS_SETTLING).judged() == ["rank 0"]


def test_keys_of_generations_that_are_over_must_be_forgotten() -> None:
    def keys(*generations: int) -> list[str]:
        return [
            "default_pg/0",
            "default_pg/1",
            *(f"fr/gen{g}/0//cpu//0/{rank}" for g in generations for rank in (0, 1)),
        ]

    swept, kept = Overdue(), Overdue()
    for number in range(100):
        now = 10.0 * number
        assert swept.count(keys(*range(max(number - 5, 0), number + 1)), now) == 2
        found = kept.count(keys(*range(number + 1)), now)
    assert found == 2 + 2 * (99 - 8), "all but those of the last 75 s"


TAKES = """
import os, sys, threading
print(flush=True)
sys.stdin.readline()
opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
memory = os.memfd_create("leak")
threading.Thread(target=threading.Event().wait, daemon=True).start()
ballast = bytearray(os.urandom(1) * (32 << 20))
print(flush=True)
sys.stdin.readline()
"""


def test_what_a_process_uses_is_seen() -> None:
    """Of a separate process: in this one other tests' threads and connections come and go."""
    command = [sys.executable, "-c", TAKES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        before = Usage.at_rest(process.pid)
        print(file=process.stdin, flush=True)
        process.stdout.readline()
        after = Usage.at_rest(process.pid)
        print(file=process.stdin, flush=True)
    assert after.fds == before.fds + 4 and after.shared == before.shared + 1
    assert after.threads == before.threads + 1 and after.maps > before.maps
    assert after.rss_mib > before.rss_mib + 30
    with pytest.raises(OSError):
        Usage.of(1 << 30)


def test_files_are_told_by_the_process_in_their_name() -> None:
    path = f"/dev/shm/torch_{os.getpid()}_123_0"
    before = files_of([os.getpid()])
    with open(path, "w"):
        pass
    try:
        assert files_of([os.getpid()]) == before + 1 and files_of([os.getpid() * 10]) == files_of([])
    finally:
        os.unlink(path)
