"""Snapshots on disk are whole, or not there; what has been damaged since is found."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecovery.runtime import durable
from flashrecovery.snapshot import files
from flashrecovery.snapshot.files import damaged, listed, load, save
from flashrecovery.snapshot.memory import HEADER, NOTES_LIMIT, SharedMemory


def memory(content: bytes, notes: bytes = b"", version: int = 5) -> SharedMemory:
    made = SharedMemory.create(len(content), notes=True)
    made.map[HEADER : HEADER + len(content)] = content
    if notes:
        made.write_notes(notes)
    made.version = version
    return made


@given(content=st.binary(max_size=10_000), notes=st.binary(max_size=9_000), version=st.integers(0, 1 << 40))
@settings(max_examples=40, deadline=None)
def test_what_is_loaded_is_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, notes: bytes, version: int
) -> None:
    folder = tmp_path_factory.mktemp("saved") / "snapshots"
    (saved,) = save(folder, [(3, "own-0-of-4", memory(content, notes, version))])
    assert listed(folder) == [saved] and (saved.rank, saved.name, saved.version) == (3, "own-0-of-4", version)
    found = load(folder, saved)
    assert found is not None and found.version == version and found.nbytes == len(content)
    assert found.map[HEADER : HEADER + len(content)] == content
    assert found.read_notes() == (notes or None)


def test_several_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIECE", 1000)
    content, notes = os.urandom(7_777), os.urandom(3_001)
    (saved,) = save(tmp_path / "s", [(0, "a-of-1", memory(content, notes))])
    found = load(tmp_path / "s", saved)
    assert found is not None
    assert (found.map[HEADER : HEADER + len(content)], found.read_notes()) == (content, notes)


@pytest.mark.parametrize("change", ["bit", "shorter", "gone", "longer"])
def test_damage_is_found(change: str, tmp_path: Path) -> None:
    saved = save(tmp_path / "s", [(rank, "a-of-2", memory(os.urandom(5_000), b"notes")) for rank in (0, 1)])
    path = tmp_path / "s" / saved[1].file
    content = path.read_bytes()
    if change == "gone":
        path.unlink()
    else:
        flipped = content[:4_000] + bytes([content[4_000] ^ 1]) + content[4_001:]
        path.write_bytes({"bit": flipped, "shorter": content[:-1], "longer": content + b"\0"}[change])
    assert damaged(tmp_path / "s", saved[1]) and load(tmp_path / "s", saved[1]) is None
    assert not damaged(tmp_path / "s", saved[0])


def test_only_what_is_whole_is_saved(tmp_path: Path) -> None:
    saved = save(tmp_path / "s", [(0, "a-of-1", memory(b"x" * 100, version=-1)), (0, "b-of-1", memory(b"y" * 100))])
    assert [one.name for one in saved] == ["b-of-1"]


def test_what_somebody_writes_into_meanwhile_is_not_saved(tmp_path: Path) -> None:
    class Busy(SharedMemory):
        looks = 0

        @property
        def version(self) -> int:
            type(self).looks += 1
            return 5 if self.looks < 3 else -1

    made = memory(b"x" * 100)
    busy = Busy(os.dup(made.fd), made.address)
    assert save(tmp_path / "s", [(0, "a-of-1", busy)]) == []


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = save(tmp_path / "s", [(0, "a-of-1", memory(b"old"))])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "s", [(0, "a-of-1", memory(b"new", version=6))])
    assert listed(tmp_path / "s") == before and not damaged(tmp_path / "s", before[0])
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("killed", [True, False])
def test_a_crash_between_the_renames_loses_nothing(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system cannot exchange two names."""
    save(tmp_path / "s", [(0, "a-of-1", memory(b"old"))])
    rename = os.rename

    def crash(one: Path, other: Path) -> None:
        if killed and other == tmp_path / "s":
            raise KeyboardInterrupt
        rename(one, other)

    monkeypatch.setattr(durable, "_exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", crash)
    with pytest.raises(KeyboardInterrupt) if killed else nullcontext():
        save(tmp_path / "s", [(0, "a-of-1", memory(b"new", version=6))])
    monkeypatch.undo()
    (found,) = listed(tmp_path / "s")
    assert found.version == (5 if killed else 6) and not damaged(tmp_path / "s", found)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"rank": 0}]', "[]"])
def test_a_list_that_cannot_be_read_names_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(text)
    assert listed(tmp_path) == []


def test_notes_that_are_too_long_are_no_notes() -> None:
    made = memory(b"x", b"some")
    assert not made.write_notes(bytes(NOTES_LIMIT + 1)) and made.read_notes() is None


def test_notes_that_were_overwritten_in_part_are_no_notes() -> None:
    made = memory(b"x" * 10, b"some notes")
    at, _ = made.parts()[1]
    made.map[at] ^= 1
    assert made.read_notes() is None


def test_what_is_no_memory_of_this_kind_is_not_taken() -> None:
    fd = os.memfd_create("other")
    os.pwrite(fd, b"\xff" * 200, 0)
    assert SharedMemory.of(fd) is None
    assert SharedMemory.of(os.memfd_create("empty")) is None
