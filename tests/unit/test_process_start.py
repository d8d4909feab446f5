"""What is there before the script's first line: nothing that it could tell from a process without us."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashrecovery.worker.startup import bootstrap


@pytest.mark.parametrize("first", ["flashrecovery.torch_native", "fr_deepspeed"])
def test_a_script_may_import_anything_of_ours_first(first: str, tmp_path: Path) -> None:
    """With torch or a framework in it: nothing of ours may then be imported in the middle of itself."""
    code = (
        "from flashrecovery.worker.startup.import_time_hooks import install_adapter_hooks, install_group_hook\n"
        f"install_adapter_hooks(); install_group_hook(False, None)\nimport {first}\nimport torch\n"
        "assert torch.distributed.distributed_c10d._new_process_group_helper.__module__.startswith('flashrecovery.')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=True)


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
