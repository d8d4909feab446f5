"""The parts that ``make gpu-check`` looks at on one GPU, with stand-ins for what a device does: each passes with one
that is as it should be, and fails with one that is not."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flashrecovery.agent.processes import gpu_fence
from flashrecovery.agent.processes.gpu_fence import GpuFence
from flashrecovery.groups import accelerator, native_build
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.worker.control.device_sync import DeviceClock
from tests import gpu_check, gpu_parts
from tests.gpu_parts import Gpu
from tests.support import fake_nccl
from tests.support.fake_nccl import held_back
from tests.support.fake_nccl.held_back import FakeHold

TOTAL, CONTEXT = 80 << 30, 512 << 20
TAKES = "import os, pathlib; pathlib.Path({folder!r}, str(os.getpid())).write_text({nbytes!r})\n"


class Event:
    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()


class StandIn(Gpu):
    """A GPU, and the accelerator of this process.

    Attributes:
        leaves: for how many seconds memory is still taken when a process has ended. says_free_early: no one is listed
            on it. waits: whether synchronisations wait. eager: bytes that an import takes.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(device="cpu", held=1 << 30, busy_s=0.3, copied=1 << 16)
        self.folder = folder
        self.leaves, self.waits, self.eager, self.says_free_early = 0.0, True, 0, False
        self.pinned: dict[int, int] = {}
        self._events: list[Event] = []
        self._gone: dict[str, float] = {}

    # -- the accelerator

    def in_use(self) -> bool:
        return True

    def current(self) -> torch.device:
        return torch.device("cpu")

    def synchronize_stream(self) -> None:
        """Other streams are not waited for."""

    def synchronize(self, device: torch.device | None = None) -> None:
        for event in self._events if self.waits else []:
            event.happened.wait()

    def empty_cache(self) -> None:
        """There is none."""

    # -- the GPU

    def busy(self, seconds: float) -> Event:
        self._events.append(Event())
        threading.Timer(seconds, self._events[-1].happened.set).start()
        return self._events[-1]

    def free_bytes(self) -> int:
        return TOTAL - sum(int(path.read_text()) for path in self.folder.iterdir() if self._has(path.name))

    def _has(self, pid: str) -> bool:
        try:
            alive = psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            alive = False
        now = time.monotonic()
        return alive or now < self._gone.setdefault(pid, now) + self.leaves

    def on(self, local_rank: int) -> frozenset[int]:
        return frozenset(int(p.name) for p in self.folder.iterdir() if not self.says_free_early and self._has(p.name))

    def fence(self) -> GpuFence:
        return GpuFence(lambda: self)

    def holder(self) -> list[str]:
        code = TAKES.format(folder=str(self.folder), nbytes=str(self.held))
        return [sys.executable, "-c", f"{code}print(flush=True); import sys; sys.stdin.read()"]

    def standby(self) -> list[str]:
        first, then = (TAKES.format(folder=str(self.folder), nbytes=str(n)) for n in (self.eager, CONTEXT))
        code = f"{first}print(flush=True)\nimport sys\nsys.stdin.readline()\n{then}print(flush=True)\nsys.stdin.read()"
        return [sys.executable, "-c", code]

    def generator(self) -> torch.Generator:
        return torch.default_generator

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return memory.data_ptr() in self.pinned

    def join(self, rank: int) -> str:
        fake_nccl.install()
        return fake_nccl.backend_name()

    # -- CUDA's runtime library

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.pop(address, None)
        return 0


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    folder, driver = tmp_path / "gpu", tmp_path / "nvidiactl"
    folder.mkdir()
    driver.touch()
    monkeypatch.setattr(gpu_fence, "DRIVER", driver)
    stand_in = StandIn(folder)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stand_in)
    before = accelerator.accelerator()
    accelerator.use(stand_in)
    yield stand_in
    accelerator.use(before)


def fails(part: Callable[[Gpu], object], gpu: Gpu, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        part(gpu)


def test_the_fence(gpu: StandIn) -> None:
    gpu.leaves = 0.3
    found = gpu_parts.fence(gpu)
    assert found["held_bytes"] == gpu.held and found["released_s"] >= 0.3
    gpu.says_free_early = True
    fails(gpu_parts.fence, gpu, "bytes are not free although the fence has let it pass")
    gpu.held = 0
    fails(gpu_parts.fence, gpu, "has taken 0 bytes only")


def test_the_device_tag(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu_parts.device_tag(gpu)
    assert found["commit_waited_s"] >= 0.25 and found["busy_refused_after_s"] < 0.25
    gpu.waits = False
    fails(gpu_parts.device_tag, gpu, "the commit came before")
    gpu.waits = True
    monkeypatch.setattr(DeviceClock, "settle", lambda self, deadline_s: None)
    fails(gpu_parts.device_tag, gpu, "a busy device was said to be idle")


def test_random_numbers(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_parts.random_numbers(gpu) == {"streams": 0}
    monkeypatch.setattr(gpu, "generator", torch.Generator)
    fails(gpu_parts.random_numbers, gpu, "it is another generator")
    monkeypatch.setattr(gpu_parts, "restore_rng", lambda state: None)
    fails(gpu_parts.random_numbers, gpu, "other numbers after a restore")


def test_pinned_staging(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(gpu_parts.pinned_staging(gpu)) == {"pinned_gb_s", "pageable_gb_s"}
    monkeypatch.setattr("flashrecovery.redundancy.memory.flat_buffer.page_lock", lambda owner, memory: False)
    fails(gpu_parts.pinned_staging, gpu, r"is_pinned\(\) is False")


def test_overlap(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(gpu_parts.overlap(gpu)) == {"step_s", "step_with_copy_s", "copy_alone_s"}

    def start_late(self: PreStepCopy, version: int) -> None:
        """The step does not wait, and the copy is made when it has written."""
        self._late = version  # type: ignore[attr-defined]

    def wait(self: PreStepCopy) -> None:
        self.copy(self._late, self.capture())  # type: ignore[attr-defined]

    monkeypatch.setattr(PreStepCopy, "start", start_late)
    monkeypatch.setattr(PreStepCopy, "wait", wait)
    fails(gpu_parts.overlap, gpu, "has what the step has written")


def test_the_standbys_context(gpu: StandIn) -> None:
    assert gpu_parts.standby_context(gpu)["context_bytes"] == CONTEXT
    gpu.eager = 256 << 20
    fails(gpu_parts.standby_context, gpu, "bytes by importing")


def test_control_groups(gpu: StandIn) -> None:
    assert 0 < gpu_parts.control_groups(gpu)["exchange_s"] < 30


def test_nccl_groups(gpu: StandIn) -> None:
    fake_nccl.build()
    found = gpu_parts.nccl_groups(gpu)
    assert found["abort_s"] < 20 and 0 < found["attach_median_s"] <= found["attach_s"] < 60


def test_held_back(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nccl.build()
    for name in held_back.PATCHED:
        monkeypatch.setattr(torch, name, getattr(torch, name))
    module = native_build.load(fake_nccl.EXTENSION)
    held_back.queue_kernels(module)
    device = fake_nccl.FakeDevice(module)
    accelerator.use(device)
    assert gpu_parts.held_back(gpu)["let_go_s"] > 0
    monkeypatch.setattr(FakeHold, "let_go", lambda self, *, void, let_go=FakeHold.let_go: let_go(self, void=False))
    fails(gpu_parts.held_back, gpu, "the flag does not come to the device")
    module.run_ahead(False)


def test_what_a_parts_process_says() -> None:
    assert gpu_parts.read("fence", 0, 'a warning\n{"released_s": 1.5}\n', "").found == {"released_s": 1.5}
    said = gpu_parts.read("fence", 1, "", "Traceback\n  ...\nAssertionError: it is still listed\n\n")
    assert said.problem == "AssertionError: it is still listed" and not said.found
    assert gpu_parts.read("fence", -11, "", "").problem == "exit status -11"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_a_part_fails_and_says_so() -> None:
    assert gpu_parts.run_part("overlap").problem == "there is no GPU here"


def test_every_part_has_a_test_here() -> None:
    tests: dict[str, Any] = globals()
    names = " ".join(name.replace("_", " ") for name in tests if name.startswith("test_"))
    assert [part for part in gpu_parts.PARTS if part.split()[-1] not in names] == []


def test_the_report_names_what_each_part_has_measured_or_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole program, but for the jobs and the parts' processes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_check, "machine", lambda: {"gpus": ["H100"]})

    def run(*problems: str) -> int:
        parts = {name: gpu_parts.PartResult(name, {"seconds": 1.25}) for name in ("fence", "overlap")}
        for name in problems:
            parts[name] = gpu_parts.PartResult(name, {}, "it is still listed")
        out = tmp_path / "-".join(["report", *problems])
        monkeypatch.setattr(gpu_check, "run_part", parts.__getitem__)
        left_out = ["--layouts", "--scenarios", "--elastic", "--no-overhead"]
        argv = ["check", *left_out, "--out", str(out), "--parts", "fence", "overlap"]
        monkeypatch.setattr(sys, "argv", argv)
        code = gpu_check.main()
        told = json.loads((out / "report.json").read_text())
        assert [part["problem"] != "" for part in told["parts"]] == [name in problems for name in parts]
        report = (out / "report.md").read_text()
        assert "| overlap | seconds 1.25 | yes |" in report
        assert ("| fence | - | no: it is still listed |" in report) is ("fence" in problems)
        return code

    assert run() == 0
    assert run("fence") == 1
