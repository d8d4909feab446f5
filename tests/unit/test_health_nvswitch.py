"""NVSwitch errors: what the kernel's log says, what that means, and NVLink's counters over a longer time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flashrecovery.health import nvswitch
from flashrecovery.health.findings import Severity
from flashrecovery.health.gpu import WINDOW_ERRORS, WINDOW_RECOVERIES, Gpu, GpuReading, NvLink, judge
from flashrecovery.health.nvswitch import NvSwitches, open_log
from flashrecovery.health.sxid import ALWAYS_FATAL, CORRECTED, SXid, parse
from flashrecovery.health.sxid import judge as judge_sxid
from flashrecovery.health.xid import XidClass, xid

TEARDOWN = "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)"
FAULT = "4,1,2,-;nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up"
OVERFLOW = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 23001, Fatal, Link 01 ingress SRC-VC buffer overflow"
REPLAY = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20001, Non-fatal, Link 28 TX Replay Error"
FURTHER = "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Severity 1 Engine instance 60 Sub-engine instance 00"


def test_lines_of_the_log() -> None:
    assert parse(TEARDOWN) == SXid(3, "0000:05:00.0", 12028, False, 32)
    assert parse(FAULT) == SXid(1, "0000:06:00.0", 20034, True, 48)
    assert parse(FURTHER) is None and parse("NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus.") is None


@pytest.mark.parametrize(
    ("line", "severity"),
    [(TEARDOWN, Severity.WARNING), (FAULT, Severity.WARNING), (OVERFLOW, Severity.FATAL), (REPLAY, None)],
)
def test_which_of_them_end_a_node(line: str, severity: Severity | None) -> None:
    sxid = parse(line)
    assert sxid is not None
    found = judge_sxid(sxid)
    assert (None if found is None else found.severity) == severity
    if found is not None:
        assert found.device is None and found.code == f"sxid_{sxid.number}" and "link" in found.evidence
    assert not ALWAYS_FATAL & CORRECTED


class Log:
    """/dev/kmsg: each read gives one record, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *records: Any) -> None:
        self.records = [*records]
        monkeypatch.setattr(nvswitch.os, "read", self.read)

    def read(self, log: int, size: int) -> bytes:
        record = self.records.pop(0) if self.records else BlockingIOError()
        if isinstance(record, Exception):
            raise record
        return str(record).encode()


def test_each_look_has_what_has_come_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch, "something", FAULT, BrokenPipeError(), OVERFLOW, REPLAY)
    switches = NvSwitches(7)
    assert [one.code for one in switches.look()] == ["sxid_20034", "sxid_23001"]
    assert switches.look() == []
    log.records += [TEARDOWN]
    assert [one.code for one in switches.look()] == ["sxid_12028"]


def test_what_was_there_before_the_job_is_none_of_it(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(OVERFLOW + "\n")
    switches = open_log(path)
    assert switches is not None and switches.look() == []
    with path.open("a") as file:
        file.write(FAULT + "\n")
    assert [one.code for one in switches.look()] == ["sxid_20034"]
    switches.close()
    assert open_log(tmp_path / "absent") is None


def test_without_switches_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvswitch, "SWITCHES", "no-such-switch*")
    monkeypatch.setattr(nvswitch, "open_log", lambda path: pytest.fail("it is opened"))
    assert nvswitch.find() is None
    monkeypatch.setattr(nvswitch, "SWITCHES", "null")
    monkeypatch.setattr(nvswitch, "open_log", lambda path: NvSwitches(os.open("/dev/null", os.O_RDONLY)))
    found = nvswitch.find()
    assert found is not None
    found.close()


def test_a_consequence_of_a_peers_end_that_marks_the_node() -> None:
    assert xid(137).level is XidClass.WARNING


def _codes(errors: int, recoveries: int) -> set[str]:
    reading = lambda e, r: GpuReading(links=(NvLink(4, True, r, e),))  # noqa: E731
    now = reading(5 + errors, 1 + recoveries)
    return {one.code for one in judge(Gpu(0, 0), reading(0, 0), now, now, reading(5, 1))}


def test_a_link_that_errs_seldom_but_steadily() -> None:
    assert _codes(WINDOW_ERRORS - 1, WINDOW_RECOVERIES - 1) == set()
    assert _codes(WINDOW_ERRORS, 0) == {"nvlink_4_worn"} == _codes(0, WINDOW_RECOVERIES)
