"""What ``flashrecovery doctor`` says of Megatron, from sources alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashrecovery.capabilities.finding import Finding, Level
from flashrecovery.cli.adapter_checks import adapters
from fr_megatron import doctor, stand_ins
from fr_megatron.lm import hooks

CORE_0_16, CORE_0_20 = "0.16", "0.20"
TESTED = {CORE_0_16: "0.16.1", CORE_0_20: "0.20.0"}
DEFINED = {
    "save_checkpoint": "megatron.training.checkpointing",
    "calc_params_l2_norm": "megatron.training.utils",
    "update_num_microbatches": "megatron.core.num_microbatches_calculator",
    "get_num_microbatches": "megatron.core.num_microbatches_calculator",
    "update_pg_timeout": "megatron.core.parallel_state",
}
"""Functions that the loop's module has from another one."""


def tree(root: Path, release: str, version: str | None = None) -> Path:
    """A directory with the hooked functions as they are in ``release``, and with nothing else."""
    lines: dict[str, list[str]] = {}
    for hook in hooks.ALL:
        if release == CORE_0_16 and hook.name == "consume_seqlen_stats_in_iteration":
            continue
        *classes, function = hook.name.split(".")
        source = lines.setdefault(DEFINED.get(hook.name, hook.module), [])
        if hook.name in DEFINED:
            lines.setdefault(hook.module, []).append(f"from {DEFINED[hook.name]} import {function}")
        source += [f"class {name}:" for name in classes]
        source.append(f"{'    ' * len(classes)}def {function}({', '.join(hook.known[-(release == CORE_0_20)])}): ...")
    for module, source in lines.items():
        path = root / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(source) + "\n")
    major, minor, patch = (version or TESTED[release]).split(".")
    info = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n"
    (root / "megatron/core/package_info.py").write_text(info)
    return root


def found(*path: Path) -> dict[str, Finding]:
    return {f.check: f for f in doctor.findings([str(p) for p in path])}


@pytest.mark.parametrize("release", [CORE_0_16, CORE_0_20])
def test_a_known_checkout(release: str, tmp_path: Path) -> None:
    findings = found(tree(tmp_path, release))
    assert {f.level for f in findings.values()} == {Level.OK}
    assert findings["megatron-core"].found == f"{TESTED[release]} in {tmp_path}"
    known = len(hooks.ALL) - (release == CORE_0_16)
    assert findings["megatron hooks"].found == f"{tmp_path}: {known} functions as known"
    assert "train_step" in findings["megatron hooks"].meaning
    assert findings["megatron flag"].found == "unmodified"


def test_functions_of_two_releases(tmp_path: Path) -> None:
    """As in 0.18: each is known by itself."""
    training = tree(tmp_path, CORE_0_16) / "megatron/training/training.py"
    training.write_text(
        training.read_text().replace("(model_provider_func, model_type)", "(model_type, model_provider_func)")
    )
    assert found(tmp_path)["megatron hooks"].level is Level.OK


def test_a_function_with_other_parameters(tmp_path: Path) -> None:
    training = tree(tmp_path, CORE_0_16) / "megatron/training/training.py"
    training.write_text(training.read_text().replace("(model_provider_func, model_type)", "(model, provider)"))
    finding = found(tmp_path)["megatron hooks"]
    assert finding.level is Level.WARN
    known = "not with (model_provider_func, model_type) or (model_type, model_provider_func)"
    assert f"setup_model_and_optimizer begins with (model, provider), {known}" in finding.found


@pytest.mark.parametrize(
    "package",
    ["from .common import calc_params_l2_norm", "from megatron.training.utils.common import *", "name"],
    ids=["relative", "star", "another-name"],
)
def test_a_function_of_a_package_that_has_it_from_its_own_module(package: str, tmp_path: Path) -> None:
    """As ``calc_params_l2_norm`` in 0.19."""
    utilities = tree(tmp_path, CORE_0_20) / "megatron/training/utils.py"
    inside = tmp_path / "megatron/training/utils"
    inside.mkdir()
    text = utilities.read_text()
    utilities.unlink()
    if package == "name":
        text, package = (
            text.replace("calc_", "_calc_"),
            "from .common import _calc_params_l2_norm as calc_params_l2_norm",
        )
    (inside / "common.py").write_text(text)
    (inside / "__init__.py").write_text(f"try:\n    {package}\nexcept ImportError:\n    pass\n")
    finding = found(tmp_path)["megatron hooks"]
    assert finding.level is Level.OK and finding.found == f"{tmp_path}: {len(hooks.ALL)} functions as known"


def test_a_missing_function(tmp_path: Path) -> None:
    tree(tmp_path, CORE_0_16)
    (tmp_path / "megatron/core/timers.py").write_text("class Timer:\n    pass\n")
    finding = found(tmp_path)["megatron hooks"]
    assert finding.level is Level.WARN and "megatron.core.timers.Timer.start is missing" in finding.found


def test_an_unknown_version(tmp_path: Path) -> None:
    """It is told, and refused only if its functions are not known."""
    findings = found(tree(tmp_path, CORE_0_16, "0.18.0"))
    assert findings["megatron-core"].level is Level.WARN and "0.16.1" in findings["megatron-core"].meaning
    assert findings["megatron hooks"].level is Level.OK


def test_the_native_flag(tmp_path: Path) -> None:
    arguments = tree(tmp_path, CORE_0_16) / "megatron/training/arguments.py"
    arguments.write_text(arguments.read_text() + "def _add_flash_recovery_args(parser): ...\n")
    assert found(tmp_path)["megatron flag"].found == "patches/megatron/0001 is applied"


def test_nothing_is_there(tmp_path: Path) -> None:
    findings = found(tmp_path)
    assert "megatron-core" not in findings  # what pip knows of is told with its capabilities
    assert findings["megatron hooks"].found == "no Megatron-LM on PYTHONPATH"
    assert "megatron flag" not in findings


@pytest.mark.parametrize(("value", "level"), [("1", Level.WARN), ("0", Level.OK)])
def test_stand_ins(value: str, level: Level, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(stand_ins.VARIABLE, value)
    finding = found(tmp_path)["megatron stand-ins"]
    assert finding.level is level and stand_ins.VARIABLE in finding.found + finding.meaning


def test_it_is_a_part_of_the_doctor() -> None:
    assert {"megatron stand-ins", "megatron hooks"} <= {f.check for f in adapters()}


def test_it_imports_nothing_of_megatron() -> None:
    """Also where the stand-ins, which change torch and megatron, are asked for."""
    script = (
        "import os, sys; os.environ['FR_MEGATRON_CPU'] = '1'\n"
        "from flashrecovery.cli.adapter_checks import adapters\n"
        "adapters()\n"
        "import torch\n"
        "assert not [m for m in sys.modules if m.partition('.')[0] == 'megatron'], sys.modules\n"
        "assert 'fr_megatron' in sys.modules and not torch.cuda.is_initialized()\n"
        "assert torch.cuda.Stream.__module__ == 'torch.cuda.streams', torch.cuda.Stream\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=150)
