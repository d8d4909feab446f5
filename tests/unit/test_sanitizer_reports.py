"""Whose a sanitizer's report is, and that each build has its own place."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrecovery.errors import BuildError
from flashrecovery.groups import native_build
from tests.sanitizers.reports import Folder, parse

LOG = """\
==================
WARNING: ThreadSanitizer: data race (pid=7)
  Write of size 8 at 0x1 by thread T1:
    #0 flashrecovery::Lane::add lane.h:57 (flashrecovery_groups_native.so+0x1)
SUMMARY: ThreadSanitizer: data race lane.h:57
==================
==7==ERROR: AddressSanitizer: heap-use-after-free on address 0x1
    #0 gloo::Context::get (libtorch_cpu.so+0x1)
ThreadSanitizer: reported 1 warnings
"""


def test_reports_of_ours_are_told_from_others() -> None:
    first, second = parse(LOG)
    assert first.ours and "data race" in first.title
    assert not second.ours and "heap-use-after-free" in second.title


def test_each_report_is_read_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (tmp_path / "report.7").write_text(LOG)
    assert len(folder.new()) == 2 and folder.new() == []
    with open(tmp_path / "report.7", "a") as log:
        log.write(LOG)
    (tmp_path / "report.8").write_text(LOG)
    assert len(folder.new()) == 4


def test_a_sanitized_build_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = set()
    for wanted in ("", "address", "thread"):
        monkeypatch.setenv("FLASHRECOVERY_SANITIZE", wanted)
        targets.add(native_build._target(native_build.BACKEND))
    assert len(targets) == 3
    monkeypatch.setenv("FLASHRECOVERY_SANITIZE", "all")
    with pytest.raises(BuildError, match="allowed are address, thread"):
        native_build.build()
