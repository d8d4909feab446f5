"""Which changes of the environment count as the script's own."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrecovery.worker.preimport.environment_watch import EnvironmentWatch
from flashrecovery.worker.preimport.preimport import Installed

CHANGES = """
import os
def change():
    os.environ["A"] = "1"
    os.environ["A"] = "2"
    os.environ.setdefault("B", "3")
    os.environ.setdefault("PATH", "4")
    os.environ.update({"C": "5"}, D="6")
    os.environ |= {"E": "7"}
    os.environ.pop("F")
    del os.environ["G"]
    os.putenv("H", "8")
    dict(os.environ)["I"] = "9"
"""
CHANGED = {"A": "2", "B": "3", "C": "5", "D": "6", "E": "7", "F": None, "G": None}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(os, "environ", os.environ)
    before = dict(os.environ)
    monkeypatch.syspath_prepend(str(tmp_path))
    os.environ.update(F="f", G="g")
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


def changed_by(name: str, folder: Path) -> dict[str, str | None]:
    (folder / f"{name}.py").write_text(CHANGES)
    module = __import__(name)
    watch = EnvironmentWatch(Installed())
    kind = type(os.environ)
    before = kind.__setitem__, kind.__delitem__
    watch.start()
    try:
        module.change()
    finally:
        watch.stop()
        watch.stop()
    assert (kind.__setitem__, kind.__delitem__) == before
    assert os.environ["A"] == "2" and "F" not in os.environ
    os.environ["Z"] = "after"
    return watch.changed


def test_what_the_script_and_its_modules_change(folder: Path) -> None:
    assert changed_by("changes_as_own", folder) == CHANGED


def test_what_libraries_change_is_their_own_affair(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {**sysconfig.get_paths(), "purelib": str(folder)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    assert changed_by("changes_as_library", folder) == {}
    assert "changes_as_library" in sys.modules
