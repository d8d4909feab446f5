"""``patches/megatron/0001-*.patch``: Megatron-LM itself has the flag, with and without our wrapper of its parser."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, check_fired, check_recovered, check_same
from tests.support.megatron_lm import CHECKOUT, TIMEOUT_S, copied, environment, needs_checkout, run_lm
from tests.support.patched import apply_patch, run_script
from tests.support.sameness import Printed

skip_module_without("megatron.core")

(PATCH,) = sorted((ROOT / "patches" / "megatron").glob("0001-*.patch"))
SCRIPTS = ROOT / "tests" / "scripts"
SCRIPT = SCRIPTS / "megatron_flag.py"
OURS = re.compile(r"^\s+(?:--flash-recovery\S*(?:, )?)+", re.MULTILINE)
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(3 * TIMEOUT_S), needs_checkout]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the checkout with the patch."""
    place = copied(Path(CHECKOUT), tmp_path_factory.mktemp("patched") / "Megatron-LM")
    apply_patch(PATCH, place)
    yield place


def _python(checkout: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_script(
        SCRIPT, flags, checkout, TIMEOUT_S, {**environment(checkout), "FR_MEGATRON_CPU": "0", "COLUMNS": "120"}
    )


def _shown(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Our flags in the output of ``--help``, below its usage."""
    assert done.returncode == 0, done.stderr
    text = done.stdout[done.stdout.index("flash recovery:") :]
    return sorted(flag for line in OURS.findall(text) for flag in re.findall(r"--[\w-]+", line))


def test_it_changes_one_file(patched: Path) -> None:
    """And the tree without our package does not need it."""
    changed = subprocess.run(
        ["git", "apply", "--numstat", "-R", str(PATCH)], cwd=patched, check=True, capture_output=True, text=True
    )
    assert [line.split()[-1] for line in changed.stdout.splitlines()] == ["megatron/training/arguments.py"]


def test_help_shows_the_flags_once(patched: Path) -> None:
    """The same ones that our wrapper adds to an unmodified tree."""
    script = ("--script", str(patched / "pretrain_gpt.py"), "--help")
    stock, wrapped = _python(patched, *script), _python(patched, "--wrapped", *script)
    added = _python(Path(CHECKOUT), "--wrapped", "--script", f"{CHECKOUT}/pretrain_gpt.py", "--help")
    assert _shown(stock) == _shown(wrapped) == _shown(added)
    assert len(set(_shown(stock))) == len(_shown(stock)) > 1
    assert stock.stdout.count("flash recovery:") == wrapped.stdout.count("flash recovery:") == 1
    assert "imported: []" in stock.stdout


def test_without_the_flag_nothing_of_ours_is_imported(patched: Path) -> None:
    done = _python(patched, "--parse", "--not-installed")
    assert done.returncode == 0 and "flag: False" in done.stdout, done.stderr
    done = _python(patched, "--parse")
    assert "imported: []" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--not-installed",), "--flash-recovery: the package 'fr_megatron' is not installed: pip install"),
        ((), "ConfigError: --flash-recovery: start the script with `flashrecovery run` in place of torchrun"),
    ],
    ids=["not-installed", "another-launcher"],
)
def test_what_is_wrong_is_said(flags: tuple[str, ...], words: str, patched: Path) -> None:
    done = _python(patched, "--parse", *flags, "--flash-recovery")
    assert done.returncode != 0 and words in done.stderr, done.stderr


def test_a_patched_job_recovers(patched: Path, tmp_path: Path) -> None:
    """Bit for bit as the unmodified checkout with our wrapper, with the wrapper around it and without."""
    inject = ["rank=1,fault=sigkill,at=backward,step=4"]
    reference = run_lm(tmp_path / "reference", Path(CHECKOUT))
    for name, script in (("wrapped", None), ("alone", SCRIPTS / "megatron_unwrapped.py")):
        job = run_lm(tmp_path / name, patched, inject=inject, script=script)
        check_same(job, reference, printed=Printed.LAST_RANK)
        check_fired(job, 1)
        check_recovered(job, [1])
