"""What is there before the script's first line: nothing that it could tell from a process without us."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashrecovery.worker import bootstrap


def run(code: str, folder: Path, **env: str) -> list[str]:
    command = [sys.executable, "-c", code]
    environment = {**os.environ, **env}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_torch_is_not_imported_before_the_script_does_so(tmp_path: Path) -> None:
    """It reads variables of the environment then, which the script may set before: how many threads there are, say."""
    (tmp_path / "torch.py").write_text("import os\nprint(os.environ['OMP_NUM_THREADS'])\n")
    (tmp_path / "an_adapter.py").write_text(
        "import importlib.machinery, sys, torch\n"
        "print('adapter')\n"
        "def install(module): print('hooked')\n"
        "class Mine(importlib.machinery.PathFinder): pass\n"
        "sys.meta_path.insert(0, Mine)  # which finds all by itself\n"
    )
    (tmp_path / "a_framework.py").write_text("import torch\nprint('framework')\n")
    record = tmp_path / "an_adapter-1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: an_adapter\nVersion: 1\n")
    (record / "entry_points.txt").write_text("[flashrecovery.import_hooks]\na_framework = an_adapter:install\n")
    code = (
        "import importlib.metadata, os, sys\n"
        "every = importlib.metadata.entry_points\n"
        "importlib.metadata.entry_points = lambda **k: [e for e in every(**k) if e.name == 'a_framework']\n"
        "from flashrecovery.worker.hooks import install_adapter_hooks, install_group_hook, install_spawn_hook\n"
        "from flashrecovery.worker import ahead_of_script, bootstrap, connection, zygote\n"
        "install_adapter_hooks(); install_spawn_hook(); install_group_hook(False, None)\n"
        "os.environ['OMP_NUM_THREADS'] = '3'\n"
        "import torch, a_framework\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    found = run(code, tmp_path, OMP_NUM_THREADS="1", PYTHONPATH=path)
    assert found == ["3", "adapter", "framework", "hooked"]


def test_of_ours_nothing_needs_torch_before_the_script(tmp_path: Path) -> None:
    """And once the script has imported it, all is in place."""
    code = (
        "import sys\n"
        "from flashrecovery.worker.hooks import install_adapter_hooks, install_group_hook\n"
        "install_adapter_hooks()\n"
        "from flashrecovery.worker import ahead_of_script, bootstrap, connection, hooks, skipping, zygote\n"
        "install_group_hook(False, None)\n"
        "print('torch' in sys.modules, 'flashrecovery.groups' in sys.modules)\n"
        "import torch\n"
        "print(torch.distributed.distributed_c10d._new_process_group_helper.__module__)\n"
        "print('fr_deepspeed.hook' in sys.modules, 'fr_megatron.lm.hooks' in sys.modules)\n"
    )
    assert run(code, tmp_path) == ["False", "False", "flashrecovery.groups.torch_private", "True", "True"]


@pytest.mark.parametrize("safe", [False, True])
def test_the_working_directory_is_on_the_module_path_for_a_module_only(
    safe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ``python``: what lies there hides no installed package of the same name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "flags", type("Flags", (), {"safe_path": safe}))
    rest = ["/usr/lib"] if safe else [str(tmp_path), "/usr/lib"]  # where `python -m` has put the first one
    for command, first in ((["there/script.py"], str(tmp_path / "there")), (["-m", "module"], str(tmp_path))):
        monkeypatch.setattr(sys, "path", list(rest))
        bootstrap._set_module_path(command)
        assert sys.path == (["/usr/lib"] if safe else [first, "/usr/lib"])
