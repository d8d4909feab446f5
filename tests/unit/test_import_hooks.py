"""A hook runs when its module is imported, no matter what has asked for the module before."""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from flashrecovery.util.import_hooks import ImportHooks

NAME = "module_with_a_hook"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModuleType]]:
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    found: list[ModuleType] = []
    finder = ImportHooks({NAME: found.append})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield found
    sys.modules.pop(NAME, None)


def test_the_hook_sees_the_whole_module_once(calls: list[ModuleType]) -> None:
    module = importlib.import_module(NAME)
    importlib.import_module(NAME)
    assert calls == [module] and module.value == 1


def test_asking_whether_a_module_exists_does_not_spend_its_hook(calls: list[ModuleType]) -> None:
    """As transformers does with deepspeed."""
    assert importlib.util.find_spec(NAME) is not None
    assert importlib.util.find_spec(NAME) is not None
    assert not calls
    assert importlib.import_module(NAME) in calls


def test_other_modules_are_left_alone(calls: list[ModuleType]) -> None:
    assert importlib.util.find_spec("no_such_module_at_all") is None
    assert not calls


def test_the_module_has_its_own_loader(calls: list[ModuleType], tmp_path: Path) -> None:
    """What asks it for a file of the package gets it; so does what asks for the module's code before it is imported."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "data.txt").write_text("text")
    sys.meta_path.insert(0, ImportHooks({"package": calls.append}))
    spec = importlib.util.find_spec(NAME)
    assert spec is not None and spec.loader is not None
    assert spec.loader.get_code(NAME) is not None  # type: ignore[attr-defined]
    try:
        for module in (importlib.import_module(NAME), importlib.import_module("package")):
            assert module in calls and module.__spec__ is not None
            assert isinstance(module.__loader__, SourceFileLoader) and module.__spec__.loader is module.__loader__
        assert pkgutil.get_data("package", "data.txt") == b"text"
        assert (importlib.resources.files("package") / "data.txt").is_file()
    finally:
        sys.modules.pop("package", None)


@pytest.mark.parametrize("first", ["", "import torch.utils.data\n"])
def test_each_iteration_has_new_workers(first: str) -> None:
    """So it draws a seed for them, however often the loader has been iterated over before. In a standby, too. Workers
    that live at the end of their interpreter leave Python's directory of sockets (pymp-...)."""
    code = first + (
        "from flashrecovery.worker.startup.import_time_hooks import install_loader_hook; install_loader_hook()\n"
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(range(4), batch_size=2, num_workers=1, persistent_workers=True)\n"
        "def drawn():\n"
        "    torch.manual_seed(0)\n"
        "    iterator = iter(loader)\n"
        "    return iterator._workers[0].pid, [b.tolist() for b in iterator], torch.rand(1).item()\n"
        "one, other = drawn(), drawn()\n"
        "from flashrecovery.worker.data.loader_iterations import ITERATIONS\n"
        "print(one[0] != other[0], one[1:] == other[1:], one[1], ITERATIONS.begun)\n"
    )
    command = [sys.executable, "-c", code]
    with tempfile.TemporaryDirectory() as folder:  # a socket's path may have 107 bytes
        env = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=env)
    assert done.stdout == "True True [[0, 1], [2, 3]] 2\n", done


@pytest.mark.parametrize("first", ["", "import torch.multiprocessing\n"])
def test_spawn_says_what_to_do(first: str) -> None:
    """Also in a standby, which has imported torch before."""
    code = first + (
        "from flashrecovery.worker.startup.import_time_hooks import install_spawn_hook; install_spawn_hook()\n"
        "import torch.multiprocessing as mp\n"
        "from torch.multiprocessing.spawn import start_processes\n"
        "def train(rank): pass\n"
        "for spawn in (mp.spawn, mp.start_processes, start_processes):\n"
        "    try: spawn(train, nprocs=2)\n"
        "    except Exception as e: print(type(e).__name__, e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.count("UnsupportedError torch.multiprocessing.spawn(train)") == 3, done
    assert done.stdout.count("call train directly") == 3
