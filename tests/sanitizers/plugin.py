"""A pytest plug-in: a test during which a sanitizer reports something of ours has failed. Loaded by ``__main__``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sanitizers.reports import Folder, Report

FOLDER_ENV = "FR_SANITIZER_REPORTS"
_folder = Folder(Path(os.environ.get(FOLDER_ENV, "/nonexistent")))
_others: list[Report] = []


def take() -> list[Report]:
    """What has been reported and not been taken yet."""
    return _folder.new()


def pytest_sessionstart() -> None:
    """Ranks are forked: what takes long under a sanitizer is done once, before."""
    import torch._dynamo
    import torch.nn.parallel  # noqa: F401

    from flashrecovery.groups import native_build
    from tests.support import fake_nccl

    native_build.build()
    fake_nccl.build()


@pytest.fixture(autouse=True)
def _no_report_of_ours() -> Iterator[None]:
    yield
    reports = take()
    _others.extend(report for report in reports if not report.ours)
    ours = [report.text for report in reports if report.ours]
    assert not ours, "\n\n".join(ours)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in _others:
        terminalreporter.write_line(f"not of ours: {report.text}")
