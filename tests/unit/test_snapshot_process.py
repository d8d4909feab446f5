"""The snapshot process: what it holds for which rank, for how long, and what it does when no process comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from flashrecovery.errors import AuthenticationError
from flashrecovery.redundancy.memory.flat_buffer import Beside, Layout, Outliving, Slot, slot_for_next
from flashrecovery.snapshot.client import Keeper, SnapshotHost
from flashrecovery.snapshot.files import listed
from flashrecovery.snapshot.memory import HEADER, SharedMemory

WRITER = """
import sys, torch
from flashrecovery.redundancy.memory.flat_buffer import Beside, Layout, Outliving, Slot, slot_for_next
from flashrecovery.snapshot.client import Keeper
keeper = Keeper(sys.argv[1], 0)
left = keeper.left()
slots = [
    Slot(Outliving(lambda m, n=f"own-{i}": keeper.keep(n, m), keeper.check, left.get(f"own-{i}"))) for i in range(2)
]
version = max(slot.version for slot in slots)
print(version, flush=True)
while True:
    version += 1
    tensors = {"w": {"x": torch.full((20_000 + version % 7,), float(version))}}
    slot = slot_for_next(slots)
    slot.shape(Layout.of(tensors), pin=False, share=True)
    slot.views[0].copy_(tensors["w"]["x"])
    slot.values = {"w": {"step": version}}
    slot.finish(version, Beside(0, {"capsule@0": b"c%d" % version}))
"""


@pytest.fixture
def name() -> str:
    return f"flashrecovery-test-{uuid.uuid4().hex}"


@pytest.fixture
def host(name: str, tmp_path: Path) -> Iterator[SnapshotHost]:
    made = SnapshotHost.start(name, tmp_path / "log", tmp_path / "snapshots", 30.0)
    yield made
    made.end()


def memory(version: int, content: bytes = b"content") -> SharedMemory:
    made = SharedMemory.create(len(content), notes=True)
    made.map[HEADER : HEADER + len(content)] = content
    made.write_notes(b"notes")
    made.version = version
    return made


def test_a_rank_finds_what_its_predecessor_has_left(host: SnapshotHost, name: str) -> None:
    before = Keeper(name, 2)
    before.keep("own-0-of-4", memory(7))
    before.keep("own-1-of-4", memory(6))
    Keeper(name, 1).keep("own-0-of-4", memory(9))
    before.keep("own-1-of-4", None)
    del before
    left = Keeper(name, 2).left()
    assert {n: m.version for n, m in left.items()} == {"own-0-of-4": 7}
    assert left["own-0-of-4"].map[HEADER : HEADER + 7] == b"content" and left["own-0-of-4"].read_notes() == b"notes"
    host.forget([2])
    assert Keeper(name, 2).left() == {} and len(Keeper(name, 1).left()) == 1
    host.forget(None)
    assert host.held() == []


def test_who_has_died_is_heard_before_its_successor(host: SnapshotHost, name: str) -> None:
    """Also if the process had no time for either of them until both had spoken."""
    assert host.pid is not None
    for attempt in range(20):
        process = psutil.Process(host.pid)
        successor = Keeper(name, 0)
        process.suspend()
        before = Keeper(name, 0)
        before.keep("own-0-of-1", memory(attempt))
        del before
        found: list[dict[str, SharedMemory]] = []
        asked = threading.Thread(target=lambda: found.append(successor.left()))  # noqa: B023 - joined below
        asked.start()
        time.sleep(0.01)
        process.resume()
        asked.join()
        assert [m.version for m in found[0].values()] == [attempt]


def test_it_imports_no_torch(host: SnapshotHost) -> None:
    assert host.pid is not None
    maps = Path(f"/proc/{host.pid}/maps").read_text()
    assert "libtorch" not in maps and psutil.Process(host.pid).num_threads() == 1
    assert psutil.Process(host.pid).memory_info().rss < 40 << 20


def test_a_second_process_of_the_name_is_refused(host: SnapshotHost, name: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="in use"):
        SnapshotHost.start(name, tmp_path / "log", None, 1.0)


def test_another_users_socket_is_not_trusted(host: SnapshotHost, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(AuthenticationError, match="another user"):
        Keeper(name, 0)


def test_a_rank_gives_its_memories_to_a_new_process(name: str, tmp_path: Path) -> None:
    first = SnapshotHost.start(name, tmp_path / "log", None, 30.0)
    keeper = Keeper(name, 0)
    kept = memory(3)
    keeper.keep("own-0-of-1", kept)
    keeper.check()
    assert first.pid is not None and first.alive()
    os.kill(first.pid, signal.SIGKILL)
    first.close()
    keeper.check()  # no process is there yet
    keeper.keep("own-1-of-1", memory(4))
    second = SnapshotHost.start(name, tmp_path / "log", None, 30.0)
    try:
        keeper.check()
        assert {n: m.version for n, m in Keeper(name, 0).left().items()} == {"own-0-of-1": 3, "own-1-of-1": 4}
        kept.version = 5
        assert Keeper(name, 0).left()["own-0-of-1"].version == 5, "it is the same memory"
    finally:
        second.end()


def agent_that_dies(name: str, tmp_path: Path, linger_s: float, keep: bool) -> int:
    """An agent that starts the process and is killed. Returns the pid of the process."""
    script = f"""
import os, pathlib, signal
from flashrecovery.snapshot.client import SnapshotHost, Keeper
from flashrecovery.snapshot.memory import SharedMemory
here = pathlib.Path({str(tmp_path)!r})
host = SnapshotHost.start({name!r}, here / "log", here / "s", {linger_s})
if {keep}:
    made = SharedMemory.create(10, notes=True)
    made.version = 4
    Keeper({name!r}, 0).keep("own-0-of-1", made)
host.held()
print(host.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    out = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False).stdout
    return int(out)


def gone_after(pid: int, timeout_s: float = 20.0) -> float:
    began = time.monotonic()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < timeout_s
        time.sleep(0.02)
    return time.monotonic() - began


def test_it_waits_for_the_next_agent_then_writes_and_ends(name: str, tmp_path: Path) -> None:
    pid = agent_that_dies(name, tmp_path, 0.5, keep=True)
    gone_after(pid)
    (saved,) = listed(tmp_path / "s")
    assert (saved.rank, saved.version) == (0, 4)
    assert "1 memories were written" in (tmp_path / "log").read_text()


def test_where_nothing_is_held_it_ends_with_its_agent(name: str, tmp_path: Path) -> None:
    assert gone_after(agent_that_dies(name, tmp_path, 60.0, keep=False)) < 10
    assert not (tmp_path / "s").exists()


def test_the_next_agent_comes_in_time(name: str, tmp_path: Path) -> None:
    pid = agent_that_dies(name, tmp_path, 3.0, keep=True)
    found = SnapshotHost.find(name)
    assert found is not None and [one.version for one in found.held()] == [4] and found.pid is None
    time.sleep(3.5)
    assert found.alive(), "an agent is there: it does not linger any more"
    found.end()
    gone_after(pid)
    assert SnapshotHost.find(name) is None and not (tmp_path / "s").exists()


def test_saved_and_loaded(host: SnapshotHost, name: str, tmp_path: Path) -> None:
    keeper = Keeper(name, 0)
    keeper.keep("own-0-of-1", memory(3))
    keeper.keep("own-1-of-1", memory(-1))
    assert host.save(tmp_path / "there") == ([3], "")
    host.forget(None)
    assert host.load(tmp_path / "there") == [] and [one.version for one in host.held()] == [3]
    versions, wrong = host.save(Path("/proc/nowhere/there"))
    assert versions == [] and "/proc/nowhere/there" in wrong and host.alive()


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_version(host: SnapshotHost, name: str) -> None:
    """Newer than what the one before has left, of one version throughout, and its successor goes on from it."""
    newest = -1
    for attempt in range(12):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, name], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert int(writer.stdout.readline()) == newest
        time.sleep(0.05 + 0.0137 * attempt)
        writer.kill()
        writer.communicate()
        slots = [Slot(Outliving(lambda m: None, lambda: None, left)) for left in Keeper(name, 0).left().values()]
        slot = max(slots, key=lambda s: s.version)
        assert slot.version > newest + 1 and slot.beside == Beside(0, {"capsule@0": b"c%d" % slot.version})
        spec, (tensor,) = slot.content("w")
        assert spec.values == {"step": slot.version}
        assert torch.equal(tensor, torch.full((20_000 + slot.version % 7,), float(slot.version)))
        newest = slot.version


def test_a_slot_that_was_being_overwritten_is_not_taken_over() -> None:
    """Nor one without notes, or whose notes speak of more than there is."""

    def slot(left: SharedMemory | None = None) -> Slot:
        return Slot(Outliving(lambda m: None, lambda: None, left))

    first = slot()
    first.shape(Layout.of({"w": {"x": torch.arange(8.0)}}), pin=False)
    first.views[0].copy_(torch.arange(8.0))
    first.finish(3, Beside(0, {"common": b"x"}))
    left = first.shared
    assert left is not None and slot(left).version == 3 and slot_for_next([slot(left), slot()]).version == -1
    notes = left.read_notes()
    assert notes is not None
    left.version = -1
    assert slot(left).version == -1
    small = SharedMemory.create(8, notes=True)
    small.write_notes(notes)
    small.version = 3
    assert slot(small).version == -1
    bare = SharedMemory.create(64)
    bare.version = 3
    assert slot(bare).version == -1
