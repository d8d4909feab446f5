"""Replacements in Megatron-LM's loop where a new process would do something else than the dead one had done at the
launch: there are newer checkpoints to load, or the loop has decided to end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT, Layout, RunningJob, check_clean, check_fired
from tests.support.megatron_lm import CHECKOUT, FLAGS, MODEL, TIMEOUT_S, environment, needs_checkout

SCRIPT = ROOT / "tests" / "scripts" / "ending_megatron_lm.py"
LAYOUTS: dict[str, Any] = {"parallelism": {"min": 1, "replace": "never"}}
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(3 * TIMEOUT_S), needs_checkout]


def start(folder: Path, *flags: str, config: Any = None, **more: Any) -> RunningJob:
    environ = environment(Path(CHECKOUT)) | more.pop("env", {})
    script = more.pop("script", Path(CHECKOUT) / "pretrain_gpt.py")
    layout = Layout("megatron-lm", "", nproc=2)
    return RunningJob(
        *(folder, layout),
        standby=0,
        config=config or {},
        script=script,
        flags=[*MODEL, *FLAGS, *flags],
        env=environ,
        **more,
    )


@pytest.mark.parametrize("config", [{}, {"parallelism": {"min": 1}}], ids=["plain", "replan"])
@pytest.mark.parametrize("before", ["nothing", "a checkpoint"])
def test_the_job_has_saved_since_its_launch(before: str, config: dict[str, Any], tmp_path: Path) -> None:
    """The flags of most scripts: it goes on from what it has saved, if it has."""
    place = tmp_path / "checkpoints"
    flags = (f"--save={place}", f"--load={place}", "--save-interval=2", "--lr-decay-iters=6")
    if before != "nothing":
        ends = start(tmp_path / "before", *flags, "--train-iters=6", "--exit-interval=2").wait(TIMEOUT_S)
        assert ends.code == 0, ends.explain()
    done, step = (0, 10) if before == "nothing" else (2, 5)  # the training step of iteration 5, as calls are counted
    job = start(
        *(tmp_path / "run", *flags, "--train-iters=6"),
        config=config,
        inject=[f"rank=1,fault=sigkill,at=backward,step={step}"],
    ).wait(TIMEOUT_S)
    assert job.code == 0, job.explain()
    check_fired(job)
    (place / "latest_checkpointed_iteration.txt").write_text(str(done))
    same = flags[1:2] if done else ()
    other = start(tmp_path / "other", *same, "--lr-decay-iters=6", "--train-iters=6", config=config).wait(TIMEOUT_S)
    assert other.code == 0 and other.digests == job.digests and len(job.digests) == 2, job.explain()
    check_clean(job)


@pytest.mark.parametrize("before", ["nothing", "a checkpoint"])
def test_the_job_has_saved_one_that_is_not_persistent(before: str, tmp_path: Path) -> None:
    """It is newer than what the job was launched with, and what was launched is not there any more."""
    place = tmp_path / "checkpoints"
    flags = (f"--save={place}", f"--load={place}", "--lr-decay-iters=6")
    beside = ("--non-persistent-ckpt-type=global", "--non-persistent-save-interval=2", "--save-interval=100")
    if before != "nothing":
        ended = start(tmp_path / "before", *flags, "--save-interval=2", "--train-iters=6", "--exit-interval=2")
        ends = ended.wait(TIMEOUT_S)
        assert ends.code == 0, ends.explain()
    job = start(
        *(tmp_path / "run", *flags, *beside, "--train-iters=6"),
        inject=[f"rank=1,fault=sigkill,at=backward,step={10 if before == 'nothing' else 5}"],
    ).wait(TIMEOUT_S)
    assert job.code == 0, job.explain()
    check_fired(job)
    assert (place / "non_persistent" / "latest_checkpointed_iteration.txt").read_text() == "6"
    (place / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.rmtree(place / "non_persistent")
    same = flags[1:2] if before != "nothing" else ()
    other = start(tmp_path / "other", *same, "--lr-decay-iters=6", "--train-iters=6").wait(TIMEOUT_S)
    assert other.code == 0 and other.digests == job.digests and len(job.digests) == 2, job.explain()
    check_clean(job)


@pytest.mark.parametrize(
    ("said", "flags"),
    [
        ("--log-energy (after", ("--log-energy",)),
        ("non-persistent checkpoint of iteration 2", ("--non-persistent-save-interval=2",)),
        ("--use-checkpoint-args with --load and --save", ("--use-checkpoint-args",)),
    ],
)
def test_what_no_replacement_could_follow_is_refused(said: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    common = ("--train-iters=4", f"--save={place}", f"--load={place}", "--save-interval=4")
    common += ("--non-persistent-ckpt-type=global",)
    if "--log-energy" not in flags:
        saves = ("--exit-interval=2", "--non-persistent-save-interval=2")
        ends = start(tmp_path / "before", *common, *saves).wait(TIMEOUT_S)
        assert ends.code == 0, ends.explain()
    job = start(tmp_path / "run", *common, *flags).wait(TIMEOUT_S)
    assert job.code != 0 and said in job.explain(), job.explain()
    assert " iteration        3/" not in job.explain()


@pytest.mark.parametrize("config", [{}, LAYOUTS], ids=["replaced", "another-layout"])
def test_the_loop_has_decided_to_end(config: dict[str, Any], tmp_path: Path) -> None:
    """The others wait for it at the end, and it does not train on."""
    died = tmp_path / "died"
    flags = ("--train-iters=6", "--exit-interval=3")
    job = start(tmp_path / "run", *flags, config=config, script=SCRIPT, env={"DIED": str(died)}).wait(TIMEOUT_S)
    assert job.code == 0 and died.exists(), job.explain()
    (failed,) = job.of("failure_detected")
    assert failed["rank"] == 1, job.explain()
    assert " iteration        4/" not in "".join(log.read_text() for log in job.run_dir.rglob("rank*.log"))
    check_clean(job)


FAR_BACK = {"redundancy": "none", "snapshots": {"keep": "never"}, "timeouts": {"hang_step_s": 20}}
"""What a rank had alone is lost with it, so that all go back to a checkpoint."""


@pytest.mark.parametrize("dies", ["in-the-call", "later", "far-back"])
def test_a_signal_that_only_the_victim_has_got(dies: str, tmp_path: Path) -> None:
    """It has told the others, and their loops have ended; the replacement gets none, and ends there, too. If it has
    died in that call, and no loop has heard of it, the signal is lost with it."""
    signalled, died = tmp_path / "signalled", tmp_path / "died"
    flags = ("--train-iters=6", "--exit-signal-handler")
    env, inject, config = {"SIGNALLED": str(signalled)}, [], {}
    if dies == "in-the-call":
        inject = ["rank=1,fault=sigkill,at=commit,step=8"]
    else:
        env["DIED"] = str(died)
    if dies == "far-back":
        flags += ("--use-distributed-optimizer", "--bf16")
        config = {**FAR_BACK, "checkpoint": {"dir": str(tmp_path / "fallback"), "interval_s": 0.1, "keep": 100}}
    running = start(tmp_path / "run", *flags, config=config, script=SCRIPT, env=env, inject=inject)
    job = running.wait(TIMEOUT_S)
    assert job.code == 0 and signalled.exists(), job.explain()
    (failed,) = job.of("failure_detected")
    assert failed["rank"] == 1 and len(job.of("fallback_started")) == (dies == "far-back"), job.explain()
    logged = "".join(log.read_text() for log in job.run_dir.rglob("rank*.log"))
    assert " iteration        4/" not in logged or dies == "in-the-call", job.explain()
    check_clean(job)
