"""Building the C++ backend, and what needs no process group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.capabilities.of_torch import TORCH
from flashrecovery.errors import BuildError, UnsupportedError
from flashrecovery.groups import native_build, torch_private


def test_build_is_cached_and_silent_the_second_time() -> None:
    path = groups.build()
    said: list[str] = []
    assert groups.build(said.append) == path and path.exists() and said == []


def test_no_compiler_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHRECOVERY_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no-such-compiler.*install a C"):
        groups.build()


def test_a_failing_compiler_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHRECOVERY_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    said: list[str] = []
    with pytest.raises(BuildError, match="failed"):
        groups.build(said.append)
    assert len(said) == 1 and "compiling" in said[0]
    assert [p.name for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"] == []


def test_an_unwritable_cache_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHRECOVERY_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="FLASHRECOVERY_CACHE"):
        groups.build()


def test_a_broken_binary_is_a_clear_error(tmp_path: Path) -> None:
    broken = tmp_path / f"{native_build.BACKEND.module}.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(BuildError, match="delete it"):
        native_build._load(broken, native_build.BACKEND.module)


def test_install_does_not_load_the_extension() -> None:
    code = (
        "import torch.distributed as dist; before = dist.distributed_c10d._new_process_group_helper\n"
        "from flashrecovery import groups; groups.install(); groups.install()\n"
        "from flashrecovery.groups import native_build\n"
        "assert native_build.loaded() is None and groups.groups() == [] and groups.main_op() is None\n"
        "assert groups.abandon('x') == 0 and groups.drain(1).quiet\n"
        "assert dist.distributed_c10d._new_process_group_helper is not before\n"
        "groups.start_setup_log(); assert len(groups.take_setup_log()) == 16\n"
        "assert native_build.loaded() is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_this_torch_is_among_the_tested() -> None:
    import torch

    assert TORCH.is_tested(torch.__version__)


def test_what_later_versions_of_torch_hand_on_may_ask_for_nothing() -> None:
    torch_private._refuse_newer({"enable_reconfigure": False, "later": None})
    with pytest.raises(UnsupportedError, match="enable_reconfigure: "):
        torch_private._refuse_newer({"enable_reconfigure": True, "later": None})


def test_communication_errors_are_told_by_type() -> None:
    assert groups.is_communication_error(dist.DistBackendError("x"))
    assert groups.is_communication_error(dist.DistNetworkError("x"))
    assert groups.is_communication_error(dist.DistStoreError("x"))
    assert not groups.is_communication_error(RuntimeError("Connection closed by peer"))
