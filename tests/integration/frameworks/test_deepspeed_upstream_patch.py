"""``patches/deepspeed/0001-*.patch``: DeepSpeed itself reads the key, with and without our wrapper around it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, Layout, check_fired, check_recovered, check_same, run_job
from tests.support.patched import apply_patch, run_script

skip_module_without("deepspeed")

(PATCH,) = sorted((ROOT / "patches" / "deepspeed").glob("0001-*.patch"))
SCRIPT = ROOT / "tests" / "scripts" / "deepspeed_attach.py"
TIMEOUT_S = 400
pytestmark = [pytest.mark.deepspeed, pytest.mark.grid, pytest.mark.timeout(2 * TIMEOUT_S)]


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a patched copy of the installed package, to be put on the path."""
    place = tmp_path_factory.mktemp("patched")
    spec = find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, place / "deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    apply_patch(PATCH, place)
    yield place
    shutil.rmtree(place)


def _attach(place: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(place), str(ROOT / "common"), str(ROOT)])
    return run_script(SCRIPT, flags, place, TIMEOUT_S, {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"})


def test_it_is_for_the_installed_version() -> None:
    assert importlib.metadata.version("deepspeed") in (ROOT / "patches" / "deepspeed" / "README.md").read_text()


@pytest.mark.parametrize("flags", [(), ("--import-first",)], ids=["stock", "with-our-wrapper"])
def test_every_engine_is_attached_once(flags: tuple[str, ...], patched: Path) -> None:
    """The second engine is made when the first has imported fr_deepspeed, which wraps ``deepspeed.initialize``."""
    done = _attach(patched, *flags)
    assert done.returncode == 0, done.stderr
    assert f"deepspeed from {patched}" in done.stdout
    assert "engine 1: recovery=Recovery" in done.stdout and "engine 2: recovery=Recovery" in done.stdout, done.stdout


def test_switched_off_the_package_is_not_imported(patched: Path) -> None:
    done = _attach(patched, "--not-installed", "--key", '{"enabled": false}')
    assert done.returncode == 0, done.stderr
    assert "engine 1: recovery=NoneType" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--not-installed",), ["'flash_recovery' is enabled", "pip install flashrecovery[deepspeed]"]),
        (("--key", "true"), ["'flash_recovery' must be a dictionary, got True"]),
        (("--key", '{"enabled": "yes"}'), ["'flash_recovery.enabled' must be true or false, got 'yes'"]),
    ],
    ids=["not-installed", "no-dictionary", "no-bool"],
)
def test_what_is_wrong_is_said(flags: tuple[str, ...], words: list[str], patched: Path) -> None:
    done = _attach(patched, *flags)
    assert done.returncode != 0 and "DeepSpeedConfigError" in done.stderr, done.stderr
    for word in words:
        assert word in done.stderr


def test_a_patched_job_recovers(patched: Path, tmp_path: Path) -> None:
    """Bit for bit as with the wrapper alone."""
    layout = Layout("zero2", "train_deepspeed.py", ("--zero", "2"), nproc=2)
    inject = ["rank=1,fault=sigkill,at=backward,step=3"]
    reference = run_job(tmp_path / "reference", layout, steps=6, standby=0, timeout_s=TIMEOUT_S)
    path = os.pathsep.join([str(patched), os.environ.get("PYTHONPATH", "")])
    job = run_job(
        tmp_path / "run",
        layout,
        steps=6,
        inject=inject,
        env={"PYTHONPATH": path.strip(os.pathsep)},
        timeout_s=TIMEOUT_S,
    )
    check_same(job, reference)
    check_fired(job, 1)
    check_recovered(job, [1])
