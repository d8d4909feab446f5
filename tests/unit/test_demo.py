"""The wheel has what ``flashrecovery demo`` runs."""

from __future__ import annotations

import ast
import shutil
import zipfile
from pathlib import Path

import pytest
from setuptools.build_meta import build_wheel

from tests.support.jobs import GPT, ROOT


def scripts() -> tuple[str, ...]:
    """``SCRIPTS`` of setup.py."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SCRIPTS":
            found: tuple[str, ...] = ast.literal_eval(node.value)
            return found
    raise AssertionError("setup.py has no SCRIPTS")


def test_what_the_demo_imports_is_with_it() -> None:
    siblings = {path.stem for path in GPT.glob("*.py")}
    needed = {"train_ddp"}
    for name in scripts():
        for node in ast.walk(ast.parse((GPT / name).read_text())):
            if isinstance(node, ast.Import):
                needed |= {alias.name for alias in node.names} & siblings
            elif isinstance(node, ast.ImportFrom):
                needed |= {node.module} & siblings
    assert {Path(name).stem for name in scripts()} == needed


def test_the_wheel_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    for part in ("common", "fr_deepspeed", "fr_megatron", "examples"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    monkeypatch.chdir(tree)
    names = set(zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path))).namelist())
    assert {f"flashrecovery/demo/{script}" for script in scripts()} <= names
    assert not any(name.startswith(("fr_megatron/cpu", "tests", "examples")) for name in names)
