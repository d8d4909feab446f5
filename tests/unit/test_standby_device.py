"""A standby uses a GPU only where it is asked to, and fills no rank but that GPU's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from flashrecovery.agent.processes.gpu_fence import GpuFence
from flashrecovery.agent.processes.process_manager import NodeParts, ProcessManager
from flashrecovery.agent.processes.providers import ProcessOrder, Spawned
from flashrecovery.agent.processes.standby import StandbyPool
from flashrecovery.agent.processes.tasks import Tasks
from flashrecovery.config import RunConfig, load_run_config
from flashrecovery.errors import ConfigError
from flashrecovery.events import RunDir
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.environment import STANDBY_DEVICE_ENV
from flashrecovery.worker.startup import bootstrap, warm_up

IMPORTS = """
import sys, sysconfig
sys.path.insert(0, {folder!r})
paths = sysconfig.get_paths()
sysconfig.get_paths = lambda: {{**paths, "purelib": {folder!r}}}
from flashrecovery.worker.preimport.preimport import Installed, import_ahead
count = import_ahead(["takes_a_gpu", "torch", "harmless"], Installed())
import torch
assert "takes_a_gpu" not in sys.modules and "harmless" in sys.modules, count
assert torch.cuda._lazy_init.__module__ == "torch.cuda", "the script may use it"
"""


def test_a_module_that_takes_a_gpu_is_left_to_the_script(tmp_path: Path) -> None:
    taking = "import torch\ntry:\n    torch.zeros(1, device='cuda')\nexcept Exception:\n    pass\n"
    (tmp_path / "takes_a_gpu.py").write_text(taking)
    (tmp_path / "harmless.py").write_text("import torch\ntorch.cuda.is_available()\n")
    code = IMPORTS.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "takes_a_gpu not imported ahead: DeviceAskedError: it uses a GPU" in done.stderr


class Pool:
    """A pool of two, whose processes are not started."""

    def __init__(self, folder: Path, *, for_each: bool) -> None:
        self.devices: list[int | None] = []
        self.pool = StandbyPool(2, self._spawn, folder, for_each=for_each)
        self.pool.set_modules(pb.Modules())
        self.fill()

    def fill(self) -> None:
        asyncio.run(self._add())

    async def _add(self) -> None:
        """As many as are missing, all at once."""
        await asyncio.gather(*[self.pool.start_one() for _ in range(self.pool.missing())])

    async def _spawn(self, log: Path, device: int | None) -> Any:
        self.devices.append(device)
        await asyncio.sleep(0)
        return Process(device)


class Process(SimpleNamespace):
    def __init__(self, device: int | None) -> None:
        super().__init__(device=device, ready=True, dead=False, rank=None)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def test_one_for_each_gpu(tmp_path: Path) -> None:
    it = Pool(tmp_path, for_each=True)
    assert it.devices == [0, 1]
    taken = it.pool.take(1)
    assert taken is not None and taken.device == 1 and it.pool.take(1) is None  # type: ignore[attr-defined]
    it.fill()
    assert it.devices == [0, 1, 1]
    (lost,) = [p for p in it.pool.processes() if p.device == 0]  # type: ignore[attr-defined]
    assert it.pool.discard(lost)
    it.fill()
    assert it.devices == [0, 1, 1, 0]


def test_without_it_any_standby_fills_any_rank(tmp_path: Path) -> None:
    it = Pool(tmp_path, for_each=False)
    assert it.devices == [None, None]
    assert it.pool.take(7) is not None and it.pool.take(0) is not None and it.pool.take(0) is None


def test_as_many_standbys_as_gpus() -> None:
    with pytest.raises(ConfigError, match=r"standby = 1, allowed: 2 \(nproc_per_node\)"):
        load_run_config(None, {"nproc_per_node": 2, "standby": 1, "standby_device": True})
    assert load_run_config(None, {"nproc_per_node": 2, "standby": 2, "standby_device": True}).standby_device


@pytest.mark.parametrize(("given", "used"), [(None, []), ("2", [2])])
def test_a_standby_uses_the_gpu_that_it_is_given_and_none_without(
    given: str | None, used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STANDBY_DEVICE_ENV, raising=False)
    if given is not None:
        monkeypatch.setenv(STANDBY_DEVICE_ENV, given)
    seen: list[int] = []
    monkeypatch.setattr(warm_up, "warm_kernels", lambda: None)
    monkeypatch.setattr(warm_up, "make_context", seen.append)
    bootstrap._warm_kernels()
    assert seen == used


def test_a_context_is_made_on_the_gpu_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: calls.append(device))
    warm_up.make_context(3)
    assert calls == [3, "cuda"]


@pytest.mark.parametrize(("for_each", "places"), [(False, [None, None]), (True, ["0", "1"])])
def test_the_agent_tells_each_standby_which_gpu(
    for_each: bool, places: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str | None] = []

    async def spawn(_: Spawned, order: ProcessOrder) -> Any:
        given.append(order.env.get(STANDBY_DEVICE_ENV))
        return Process(None)

    async def body() -> None:
        config = RunConfig(nproc_per_node=2, standby=2, standby_device=for_each, start_method="spawn")
        tasks, fence = Tasks(lambda error: None), GpuFence(lambda: None)
        manager = ProcessManager(
            MagicMock(), config, [], NodeParts(RunDir(tmp_path), dict, MagicMock(), tasks, fence, MagicMock())
        )
        manager.pool.set_modules(pb.Modules())
        for _ in range(2):
            await manager.pool.start_one()

    monkeypatch.setattr(Spawned, "start", spawn)
    asyncio.run(body())
    assert given == places
