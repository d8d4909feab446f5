"""Bad input with Megatron ends the job before it trains, with the name of what is wrong and what is allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.installed import skip_module_without
from tests.support.jobs import GPT, ROOT, SMALL, Job, Layout, check_clean, run_job
from tests.support.megatron_lm import CHECKOUT, FLAGS, MODEL, copied, environment, needs_checkout, run_lm
from tests.unit.test_megatron_doctor import CORE_0_16, CORE_0_20, tree

skip_module_without("megatron.core")

FLAG = ROOT / "tests" / "scripts" / "megatron_flag.py"
RANK_FLAGS = ROOT / "tests" / "scripts" / "rank_flags.py"
TP = ("--tensor-model-parallel-size", "2")
DISTRIBUTED = ("--use-distributed-optimizer", "--bf16")


def refused(job: Job, *words: str) -> None:
    assert job.code != 0 and not job.losses and not job.digests, job.explain()
    for word in words:
        assert word in job.output, job.explain()
    assert "iteration        1/" not in job.output
    check_clean(job)


# -- without Megatron: sources with the functions that are hooked, and nothing else -----------------


EACH = """
import os, sys
import torch.distributed
for root in sys.argv[1:]:
    print(root, flush=True)
    child = os.fork()
    if child == 0:
        sys.path.insert(0, root)
        from fr_megatron.lm import hooks
        from flashrecovery.errors import UnsupportedError
        try:
            hooks.check_hooks()
        except UnsupportedError as error:
            print(error)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
"""Imports torch once; a process for each tree."""


def test_a_loop_that_is_not_known(tmp_path: Path) -> None:
    kinds = {
        "other-functions": (CORE_0_16, "0.18.0"),
        "another-version": (CORE_0_16, "0.18.0"),
        "0.16": (CORE_0_16, "0.16.1"),
        "0.20": (CORE_0_20, "0.20.0"),
    }
    roots = {}
    for name, (functions, version) in kinds.items():
        roots[name] = root = tree(tmp_path / name, functions, version)
        (root / "megatron/core/__init__.py").write_text(f"__version__ = {version!r}\n")
    training = roots["other-functions"] / "megatron/training/training.py"
    training.write_text(training.read_text().replace("(forward_step_func, data_iterator, model, optimizer)", "()"))
    done = subprocess.run(
        [sys.executable, "-c", EACH, *map(str, roots.values())],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "common"), str(ROOT)])},
    )
    assert done.returncode == 0, done.stderr
    refused, *others = done.stdout.split(str(tmp_path))[1:]
    assert "(core 0.18.0)" in refused, refused
    assert "megatron.training.training.train_step begins with (), not with" in refused, refused
    assert [other.split("/", 2)[1].strip() for other in others] == list(kinds)[1:], others


# -- Megatron-LM ----------------------------------------------------------------------------------


@needs_checkout
@pytest.mark.megatron
@pytest.mark.grid
@pytest.mark.timeout(900)
class TestMegatronLM:
    """With ``pretrain_gpt.py`` of a checkout."""

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ((), "unrecognized arguments: --flash-recovery"),
            (("--wrapped",), "ConfigError: --flash-recovery: start the script with `flashrecovery run` in place of"),
        ],
        ids=["stock", "wrapped"],
    )
    def test_without_our_launcher(self, flags: tuple[str, ...], words: str) -> None:
        """No one adds the flag there: Megatron-LM's parser names it."""
        done = subprocess.run(
            [sys.executable, str(FLAG), "--parse", *flags, "--flash-recovery"],
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
            cwd=CHECKOUT,
            env={**os.environ, **environment(Path(CHECKOUT))},
        )
        assert done.returncode != 0 and words in done.stderr, done.stderr

    @pytest.mark.parametrize(
        ("nproc", "flags", "words"),
        [
            (1, ("neighbor",), ["redundancy = 'neighbor': a world of one rank", "allowed here: auto, none"]),
            (1, ("replica",), ["redundancy = 'replica': a world of one rank", "allowed here: auto, none"]),
            (2, ("replica", *TP), ["redundancy 'replica'", "exist on no other rank", "#group=0"]),
            (2, ("replica", *DISTRIBUTED), ["redundancy 'replica'", "#part=0/2", "allowed here: auto, neighbor, none"]),
        ],
        ids=["one-rank-neighbor", "one-rank-replica", "dp1-replica", "distributed-replica"],
    )
    def test_redundancy_that_the_layout_cannot_give(
        self, nproc: int, flags: tuple[str, ...], words: list[str], tmp_path: Path
    ) -> None:
        more = (*FLAGS, "--flash-recovery-redundancy", *flags)
        refused(run_lm(tmp_path / "run", Path(CHECKOUT), more, nproc=nproc), *words)

    def test_another_loop(self, tmp_path: Path) -> None:
        checkout = copied(Path(CHECKOUT), tmp_path / "checkout")
        training = checkout / "megatron/training/training.py"
        text = training.read_text()
        assert text.count("def train_step(forward_step_func, ") == 1
        training.write_text(text.replace("def train_step(forward_step_func, ", "def train_step(state, "))
        words = "megatron.training.training.train_step begins with (state, data_iterator, model, optimizer), not with"
        refused(run_lm(tmp_path / "run", checkout, nproc=1), "UnsupportedError", words)

    def test_no_initialisation_on_the_cpu(self, tmp_path: Path) -> None:
        model = [flag for flag in MODEL if flag != "--use-cpu-initialization"]
        job = run_lm(tmp_path / "run", Path(CHECKOUT), model=model, nproc=1)
        refused(job, "ConfigError: FR_MEGATRON_CPU=1", "needs the flag --use-cpu-initialization")

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ("--hidden-size=128", "--hidden-size is 64 on rank 0 and 128 on rank 1"),
            ("--tensor-model-parallel-size=2", "--tensor-model-parallel-size is 1 on rank 0 and 2 on rank 1"),
            (
                "--flash-recovery-pre-step-copy=always",
                "--flash-recovery-pre-step-copy is None on rank 0 and 'always' on rank 1",
            ),
        ],
        ids=["model", "layout", "ours"],
    )
    def test_arguments_that_differ(self, more: str, words: str, tmp_path: Path) -> None:
        flags = ("1", more, f"{CHECKOUT}/pretrain_gpt.py")
        job = run_lm(tmp_path / "run", Path(CHECKOUT), script=RANK_FLAGS, script_flags=flags)
        refused(job, "ConfigError: Megatron's arguments differ between the ranks", words)


# -- megatron-core with your own loop --------------------------------------------------------


@pytest.mark.megatron
@pytest.mark.grid
@pytest.mark.timeout(900)
class TestMegatronCore:
    """With the example."""

    @pytest.mark.parametrize(
        ("nproc", "options", "flags", "words"),
        [
            (1, ("--redundancy", "neighbor"), (), ["redundancy", "neighbor", "world size is 1"]),
            (2, ("--redundancy", "replica"), TP, ["redundancy 'replica'", "exist on no other rank"]),
            (2, ("--redundancy", "replica"), DISTRIBUTED, ["redundancy 'replica'", "#part=0/2"]),
        ],
        ids=["one-rank-neighbor", "dp1-replica", "distributed-replica"],
    )
    def test_redundancy_that_the_layout_cannot_give(
        self, nproc: int, options: tuple[str, ...], flags: tuple[str, ...], words: list[str], tmp_path: Path
    ) -> None:
        refused(self._run(tmp_path, nproc, options, flags), *words)

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ("--lr=0.5", "OptimizerConfig.lr is 0.001 on rank 0 and 0.5 on rank 1"),
            ("--use-distributed-optimizer", "use_distributed_optimizer is False on rank 0 and True on rank 1"),
            ("--width=64", "TransformerConfig.hidden_size is 32 on rank 0 and 64 on rank 1"),
        ],
        ids=["optimizer", "layout", "model"],
    )
    def test_settings_that_differ(self, more: str, words: str, tmp_path: Path) -> None:
        flags = ("1", more, str(GPT / "pretrain_gpt.py"))
        job = self._run(tmp_path, 2, (), (), script=RANK_FLAGS, script_flags=flags)
        refused(job, "ConfigError", "differ between the ranks", words)

    @staticmethod
    def _run(
        tmp_path: Path,
        nproc: int,
        options: tuple[str, ...],
        flags: tuple[str, ...],
        script: Path = GPT / "pretrain_gpt.py",
        script_flags: tuple[str, ...] = (),
    ) -> Job:
        return run_job(
            tmp_path / "run",
            Layout("refused", "", nproc=nproc),
            standby=0,
            options=["--max-restarts", "0", *options],
            script=script,
            flags=[*script_flags, *SMALL, "--steps", "4", *flags],
            timeout_s=300,
            env={"FR_MEGATRON_CPU": "1", "PYTHONWARNINGS": "ignore"},
        )
