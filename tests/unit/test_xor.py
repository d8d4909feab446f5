"""XOR of buffers: the native code and numpy's give the bytes of a naive loop, at any length and place."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecovery.errors import BuildError
from flashrecovery.redundancy.parity import xor as module
from flashrecovery.redundancy.parity.xor import ROW, NativeXor, NumpyXor, Xor, xor

BOTH: list[Xor] = [xor(), NumpyXor()]
both = pytest.mark.parametrize("compute", BOTH, ids=lambda compute: compute.name)
LENGTHS = [0, 1, 15, 16, 63, 64, 65, 127, 128, 255, 256, 257, 320, 4096, (1 << 18) + 1, (16 << 10) * 2 + 77]


def naive(*buffers: bytes) -> bytes:
    total = 0
    for buffer in buffers:
        total ^= int.from_bytes(buffer, "little")
    return total.to_bytes(len(buffers[0]), "little")


def test_the_native_code_is_what_is_tested_here() -> None:
    assert isinstance(BOTH[0], NativeXor)


@both
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("offset", [0, 1, 16, 33])
def test_each_operation_at_each_length_and_place(compute: Xor, length: int, offset: int) -> None:
    """Nothing before or after the buffer is touched."""
    a, b = os.urandom(length), os.urandom(length)
    guarded = bytearray(os.urandom(offset + length + 70))
    before = bytes(guarded)
    out = memoryview(guarded)[offset : offset + length]

    def around() -> bool:
        return guarded[:offset] == before[:offset] and guarded[offset + length :] == before[offset + length :]

    assert compute.delta(out, a, b) == (a != b) and out == naive(a, b) and around()
    compute.into(out, a)
    assert out == b and around()
    compute.stream(out, b, a)
    assert out == naive(a, b) and around()
    assert compute.delta(out, out, a) == any(b) and out == b and around()
    compute.many(out, [])
    assert out == b
    others = [os.urandom(length) for _ in range(7)]
    for count in range(1, 8):
        out[:] = b
        compute.many(out, others[:count])
        assert out == naive(b, *others[:count]) and around()


@both
@pytest.mark.parametrize("length", [1, 63, 64, 300, 4096])
def test_one_changed_bit_is_a_difference_wherever_it_is(compute: Xor, length: int) -> None:
    a = os.urandom(length)
    out = bytearray(length)
    assert not compute.delta(out, a, a)
    for byte in sorted({0, length // 3, length // 2, max(0, length - 2), length - 1}):
        b = bytearray(a)
        b[byte] ^= 0x80
        assert compute.delta(out, a, b) and out == naive(a, b)


@both
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 45))
def test_unzip(compute: Xor, rows: int, distance: int) -> None:
    a, b = os.urandom(rows * ROW), os.urandom(rows * ROW)
    moved = (bytes(distance * ROW) + b)[: rows * ROW]
    p, q = bytearray(naive(a, b) if rows else b""), bytearray(naive(a, moved) if rows else b"")
    compute.unzip(p, q, distance)
    assert bytes(q) == a and bytes(p) == b


@both
def test_bad_buffers_are_refused(compute: Xor) -> None:
    good, short = bytearray(128), bytearray(64)
    for call in (
        lambda: compute.into(good, short),
        lambda: compute.delta(good, good, short),
        lambda: compute.delta(good, short, good),
        lambda: compute.stream(short, good, good),
        lambda: compute.many(good, [good, short]),
        lambda: compute.unzip(good, short, 1),
        lambda: compute.unzip(good, bytearray(128), 0),
        lambda: compute.unzip(bytearray(100), bytearray(100), 1),
    ):
        with pytest.raises(ValueError):
            call()
    for write in (
        lambda: compute.into(bytes(128), good),
        lambda: compute.delta(bytes(128), good, good),
        lambda: compute.stream(bytes(128), good, good),
        lambda: compute.many(bytes(128), [good]),
        lambda: compute.unzip(bytes(128), good, 1),
        lambda: compute.unzip(good, bytes(128), 1),
    ):
        with pytest.raises(BufferError):
            write()
    with pytest.raises((BufferError, ValueError)):
        compute.into(memoryview(bytearray(256))[::2], good)
    assert good == bytes(128)


@both
def test_memory_of_any_kind_is_used_in_place(compute: Xor) -> None:
    with mmap.mmap(-1, 4096) as shared:
        compute.into(shared, b"\x0f" * 4096)
        assert shared[:] == b"\x0f" * 4096  # and nothing of it is held: it can be closed


def test_without_a_compiler_numpy_does_it_with_a_notice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHRECOVERY_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(module, "_chosen", None)
    said: list[str] = []
    assert isinstance(xor(said.append), NumpyXor) and isinstance(xor(said.append), NumpyXor)
    (line,) = said
    assert "no-such-compiler" in line and "slower" in line
    with pytest.raises(BuildError, match="no-such-compiler"):
        module.build()


def test_a_compiler_that_fails_and_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHRECOVERY_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match="failed"):
        module.build()
    assert not list(tmp_path.rglob("*.so*"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHRECOVERY_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="cannot write the build cache"):
        module.build()


def test_it_is_compiled_once_for_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHRECOVERY_CACHE", str(tmp_path))
    code = "from flashrecovery.redundancy.parity.xor import xor; print(xor().name)"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in started] == ["native\n"] * 3
    (found,) = tmp_path.rglob("*.so*")
    assert found == module.build()


def test_with_one_instruction_set_the_bytes_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is compiled where the C library cannot choose."""
    monkeypatch.setenv("FLASHRECOVERY_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_FLAGS", (*module._FLAGS, "-DFLASHRECOVERY_ONE_TARGET"))
    monkeypatch.setattr(module, "_chosen", None)
    compute = xor()
    assert isinstance(compute, NativeXor) and str(tmp_path) in str(module.build())
    a, b, out = os.urandom(1000), os.urandom(1000), bytearray(1000)
    assert compute.delta(out, a, b) and out == naive(a, b)
