"""The NVIDIA plugin, with NVML's answers prescribed at the library boundary (pynvml's functions)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from flashrecovery.health.findings import HealthContext, HealthFinding, Severity
from flashrecovery.health.gpu import LINK_ERRORS, visible
from flashrecovery.health.nvidia import NvidiaPlugin, create
from flashrecovery.health.xid import XIDS, XidClass, xid
from tests.support.fake_nvml import FakeGpu, FakeNvml

UUIDS = ["GPU-aa11", "GPU-bb22", "GPU-bb33", "GPU-cc44"]
FATAL, WARNING = Severity.FATAL, Severity.WARNING


def context(ranks: int = 2, **environment: str) -> HealthContext:
    return HealthContext(Path("."), ranks, environment)


def two(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeNvml, NvidiaPlugin]:
    """Two GPUs, after the first look: nothing is wrong."""
    nvml = FakeNvml(monkeypatch, FakeGpu("GPU-aa11"), FakeGpu("GPU-bb22"))
    plugin = create(context())
    assert plugin is not None and plugin.health() == []
    return nvml, plugin


def codes(findings: list[HealthFinding]) -> list[tuple[int | None, Severity, str]]:
    return [(f.device, f.severity, f.code) for f in findings]


# -- which GPUs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("3,1", [3, 1]),
        (" 2 , GPU-aa", [2, 0]),
        ("1,9,0", [1]),  # as in CUDA: what comes after an entry that is no GPU is not seen
        ("GPU-bb", []),  # ambiguous
        ("GPU-bb3,2", [2]),
        ("MIG-GPU-aa11/1/0", []),
    ],
)
def test_visible_devices_are_cudas(setting: str | None, expected: list[int]) -> None:
    assert visible(setting, UUIDS) == expected


def test_a_local_rank_has_the_visible_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [FakeGpu(uuid) for uuid in UUIDS]
    FakeNvml(monkeypatch, *gpus)
    plugin = create(context(2, CUDA_VISIBLE_DEVICES="3,GPU-bb2,0"))
    assert plugin is not None and plugin.health() == []
    gpus[3].xids, gpus[1].xids, gpus[0].xids = [79], [48], [62]  # no process uses GPU 0
    found = plugin.health()
    assert codes(found) == [(0, FATAL, "xid_79"), (1, FATAL, "xid_48")]
    assert [f.subject for f in found] == ["gpu 3 (GPU-cc44)", "gpu 1 (GPU-bb22)"]


# -- declining ------------------------------------------------------------------------------------


def test_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, 28):
        FakeNvml(monkeypatch, init=code)
        assert create(context()) is None
    nvml = FakeNvml(monkeypatch, FakeGpu("GPU-aa11"))
    assert create(context(CUDA_VISIBLE_DEVICES="")) is None and nvml.shut_down == 1
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert create(context()) is None


def test_a_driver_that_does_not_fit_its_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch, init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    with pytest.raises(pynvml.NVMLError):
        create(context())


# -- XIDs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [48, 62, 64, 74, 79, 94, 95, 119, 120, 140])
def test_fatal_xids(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    nvml, plugin = two(monkeypatch)
    nvml.gpus[1].xids = [number]
    (found,) = plugin.health()
    assert (found.device, found.severity, found.code) == (1, FATAL, f"xid_{number}")
    assert "GPU-bb22" in found.subject and str(number) in found.evidence
    assert plugin.health() == [], "an XID is an event, told once"


def test_errors_of_the_application_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, plugin = two(monkeypatch)
    nvml.gpus[0].xids = [13, 31, 43, 45, 45]
    assert plugin.health() == []


def test_other_xids_are_warnings_and_storms_end(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, plugin = two(monkeypatch)
    nvml.gpus[0].xids = [63, 63, 999] + [61] * 1000
    found = plugin.health()
    assert codes(found) == [(0, WARNING, "xid_63"), (0, WARNING, "xid_999"), (0, WARNING, "xid_61")]
    assert "not in the table" in found[1].text
    assert nvml.gpus[0].xids, "the rest is for the next look"


def test_the_table_is_in_the_documentation() -> None:
    doc = (Path(__file__).resolve().parents[2] / "docs" / "health.md").read_text()
    for number, entry in XIDS.items():
        if not 144 <= number <= 150:  # one line in the page
            assert f"| {number} | {entry.level.value} | {entry.text} |" in doc, number
    assert xid(145).level is XidClass.WARNING and "| 144-150 | warning |" in doc


# -- fallen off the bus, and other codes ------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "severity", "name"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, FATAL, "gpu_is_lost"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, FATAL, "reset_required"),
        (pynvml.NVML_ERROR_UNKNOWN, WARNING, "unknown"),
    ],
)
def test_a_gpu_that_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, code: int, severity: Severity, name: str
) -> None:
    nvml, plugin = two(monkeypatch)
    nvml.gpus[0].code = code
    nvml.gpus[1].temperature = 90
    assert codes(plugin.health()) == [(0, severity, name), (1, WARNING, "hot")]
    nvml.gpus[0].code = 0
    assert codes(plugin.health()) == [(1, WARNING, "hot")]


def test_an_xid_is_not_lost_with_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, plugin = two(monkeypatch)
    nvml.gpus[0].xids, nvml.gpus[0].code = [79], pynvml.NVML_ERROR_GPU_IS_LOST
    assert codes(plugin.health()) == [(0, FATAL, "xid_79"), (0, FATAL, "gpu_is_lost")]


def test_a_gpu_that_was_lost_before_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(monkeypatch, FakeGpu("GPU-aa11", code=pynvml.NVML_ERROR_GPU_IS_LOST), FakeGpu("GPU-bb22"))
    plugin = create(context())
    assert plugin is not None
    (found,) = plugin.health()
    assert (found.device, found.severity, found.subject) == (0, FATAL, "gpu 0 (UUID unknown)")
    nvml.gpus[0].code, nvml.gpus[0].uncorrected = 0, 7
    assert plugin.health() == [], "its first readable look is the start"


# -- counters and states ----------------------------------------------------------------------------


def _set(**values: object) -> Callable[[FakeGpu], None]:
    return lambda gpu: gpu.__dict__.update(values)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_set(uncorrected=1), [(FATAL, "ecc_uncorrected")]),
        (_set(remapped=(0, 1, 1, 0)), [(WARNING, "row_remap_pending")]),
        (_set(remapped=(0, 1, 0, 1)), [(FATAL, "row_remap_failed")]),
        (_set(temperature=89), [(WARNING, "hot")]),
        (_set(temperature=92), [(FATAL, "too_hot")]),
        (
            _set(reasons=pynvml.nvmlClocksEventReasonHwSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown),
            [(WARNING, "slowdown_thermal")],
        ),
        (_set(reasons=pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown), [(WARNING, "slowdown_power_brake")]),
        (_set(reasons=pynvml.nvmlClocksEventReasonHwSlowdown), [(WARNING, "slowdown_hardware")]),
        (_set(reasons=pynvml.nvmlClocksEventReasonSwPowerCap), []),
        (_set(links=[pynvml.NVML_FEATURE_ENABLED, pynvml.NVML_FEATURE_DISABLED]), [(WARNING, "nvlink_1_down")]),
        (
            _set(link_counters={(1, pynvml.NVML_NVLINK_ERROR_DL_RECOVERY): 1}),
            [(WARNING, "nvlink_1_recovery")],
        ),
        (_set(link_counters={(0, pynvml.NVML_NVLINK_ERROR_DL_REPLAY): LINK_ERRORS - 1}), []),
        (
            _set(link_counters={(0, pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT): LINK_ERRORS}),
            [(WARNING, "nvlink_0_errors")],
        ),
    ],
)
def test_values_that_become_bad(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[FakeGpu], None], expected: list[tuple[Severity, str]]
) -> None:
    nvml, plugin = two(monkeypatch)
    change(nvml.gpus[1])
    assert codes(plugin.health()) == [(1, *e) for e in expected]


def test_counters_count_from_the_last_look_and_states_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch, gpu := FakeGpu("GPU-aa11", uncorrected=5, remapped=(0, 1, 0, 1)))
    plugin = create(context())
    assert plugin is not None
    assert codes(plugin.health()) == [(0, WARNING, "row_remap_failed")], "it had that already"
    gpu.uncorrected = 6
    assert (0, FATAL, "ecc_uncorrected") in codes(plugin.health())
    assert (0, FATAL, "ecc_uncorrected") not in codes(plugin.health())
    gpu.uncorrected = 0  # the driver was loaded again
    assert (0, FATAL, "ecc_uncorrected") not in codes(plugin.health())


def test_a_gpu_that_says_little_is_watched_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = {"events", "ecc", "remapped", "threshold", "reasons", "links"}
    FakeNvml(monkeypatch, gpu := FakeGpu("GPU-aa11", missing=silent, temperature=99))
    plugin = create(context())
    assert plugin is not None and plugin.health() == []
    gpu.code = pynvml.NVML_ERROR_GPU_IS_LOST
    assert codes(plugin.health()) == [(0, FATAL, "gpu_is_lost")]
    plugin.close()


def test_close_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, plugin = two(monkeypatch)
    assert len(nvml.event_sets) == 2
    plugin.close()
    assert not nvml.event_sets and nvml.shut_down == 1
