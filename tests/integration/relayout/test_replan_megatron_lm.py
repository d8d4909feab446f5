"""Megatron-LM's unmodified loop that goes on in another parallel layout, on command and where a rank is not replaced:
from its iteration on it is, bit for bit, a job that was started in that layout from that iteration's state, which
megatron-core alone has written and read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import elastic
from tests.support.installed import skip_module_without
from tests.support.jobs import check_fired
from tests.support.megatron_lm import needs_checkout
from tests.support.megatron_lm_loop import TIMEOUT_S, content, finished
from tests.support.replan import Course, Saved, Sizes, check_same_steps, command, replanned
from tests.support.replan_elastic import both
from tests.support.replan_megatron_lm import (
    AUTO,
    SLOWLY,
    Training,
    check_changed_around,
    check_goes_on,
    check_killed,
    check_loop,
    check_on_command,
    named,
    started,
)

skip_module_without("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(5 * TIMEOUT_S), needs_checkout]

SHARDED = ("--use-distributed-optimizer", "--bf16")
STAGES = Training("tp2-pp2-bf16", Sizes(2, 2, 1), ("--bf16",))
PARTS = Training("tp2-dp2-distributed", Sizes(2, 1, 2), SHARDED)
ROWS = Training("tp2-fp32", Sizes(2, 1, 1))
WIDE = Training("pp2-dp2-distributed-fp32", Sizes(1, 2, 2), ("--use-distributed-optimizer",))
UNTIED = Training("tp2-pp2-untied-sp", Sizes(2, 2, 1), ("--untie-embeddings-and-output-weights", "--sequence-parallel"))
CUT = Training("tp2-dp2-padded", Sizes(2, 1, 2), ("--bf16",), padding=128)
EVEN = Training("tp2-pp2-evaluated", Sizes(2, 2, 1), evaluates=3)
SPREAD = Training("tp2-dp2-distributed-evaluated", Sizes(2, 1, 2), ("--use-distributed-optimizer",), evaluates=3)
VICTIMS = (0, 1, 3)
READERS = (0, 2)  # the first ones of their tensor-parallel groups
PHASES = ("data", "forward", "backward", "grad-sync", "optimizer-start", "optimizer", "param-gather", "commit")
AT = STAGES.call("train", 4)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("replanned-lm"))


@pytest.mark.parametrize(
    ("training", "sizes"),
    [
        pytest.param(training, sizes, id=f"{training}-to-{sizes.tp}{sizes.pp}{sizes.dp}")
        for training, sizes in (
            (STAGES, Sizes(1, 2, 1)),
            (STAGES, Sizes(2, 1, 2)),
            (PARTS, Sizes(1, 2, 2)),
            (PARTS, Sizes(1, 1, 3)),
            (ROWS, Sizes(1, 1, 2)),
            (WIDE, Sizes(2, 1, 1)),
            (UNTIED, Sizes(1, 2, 1)),
            (CUT, Sizes(1, 2, 2)),
        )
    ],
)
@pytest.mark.parametrize("kind", ["train", "log"])
def test_on_command(training: Training, sizes: Sizes, kind: str, tmp_path: Path, saved: Saved) -> None:
    check_on_command(training, sizes, kind, tmp_path / "run", saved)


def kills() -> list[Any]:
    return [
        pytest.param(training, phase, victim, id=f"{training}-{phase}-{victim}")
        for training in (STAGES, PARTS)
        for phase in PHASES
        for victim in (READERS if phase == "data" else VICTIMS)
        if phase != "param-gather" or training is PARTS
    ]


@pytest.mark.parametrize(("training", "phase", "victim"), kills())
def test_killed_and_not_replaced(training: Training, phase: str, victim: int, tmp_path: Path, saved: Saved) -> None:
    check_killed(training, victim, phase, AT, tmp_path / "run", saved)


@pytest.mark.parametrize("phase", ["between", "commit"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_in_the_log(victim: int, phase: str, tmp_path: Path, saved: Saved) -> None:
    """With a rank of the last stage the losses die that are to be logged; the others have them."""
    at = STAGES.call("log", 4)
    check_killed(STAGES, victim, phase, at, tmp_path / "run", saved)


@pytest.mark.parametrize("victim", VICTIMS)
def test_losses_that_are_summed_up(victim: int, tmp_path: Path, saved: Saved) -> None:
    """The log is of three iterations, of which some were computed in the layout before: its mean loss is that of the
    losses that all of them have had."""
    training = named(STAGES, "logs", logs=3, flags=("--bf16", "--log-params-norm"))
    at = training.call("train", 4)
    check_killed(training, victim, "backward", at, tmp_path / "run", saved)


@pytest.mark.parametrize("victim", READERS)
@pytest.mark.parametrize("training", [EVEN, SPREAD], ids=str)
def test_killed_in_an_evaluation(training: Training, victim: int, tmp_path: Path, saved: Saved) -> None:
    """It is done again, and the ones after it have the samples that they would have had."""
    at = training.call("evaluate", 5)
    check_killed(training, victim, "data", at, tmp_path / "run", saved)


@pytest.mark.parametrize("state", ["quiescing", "stashing"])
def test_a_second_death_before_the_change(state: str, tmp_path: Path, saved: Saved) -> None:
    """Of two whose copies neither of them keeps."""
    faults = [f"rank=0,fault=sigkill,at=backward,step={AT}", f"rank=2,fault=sigkill,at=recovery:{state}"]
    job = STAGES.start(tmp_path / "run", inject=faults).wait(TIMEOUT_S)
    check_fired(job, 2)
    check_changed_around(job, STAGES, saved, AT)


@pytest.mark.parametrize("state", ["restoring", "verifying", "resuming"])
def test_a_second_death_in_the_new_layout(state: str, tmp_path: Path, saved: Saved) -> None:
    running = PARTS.start(tmp_path / "run", inject=[f"rank=0,fault=sigkill,at=backward,step={AT}"])
    running.wait_for("job_replanned", TIMEOUT_S)
    elastic.inject(running, rank=1, at=f"recovery:{state}")
    job = running.wait(TIMEOUT_S)
    check_fired(job, 2)
    changes = replanned(job)
    assert len(changes) == 2 and changes[1][1].ranks <= 2 and changes[0][0] == changes[1][0], job.explain()
    check_goes_on(job, PARTS, saved, changes)


def test_a_rank_is_replaced_in_the_new_layout(tmp_path: Path, saved: Saved) -> None:
    running = started(PARTS, tmp_path / "run")
    at = PARTS.call("train", 2)
    assert command(running, Sizes(1, 2, 2), at) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    elastic.inject(running, rank=1, at="backward", step=PARTS.call("train", 6))
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    assert job.of("recovery_finished")[1]["victims"] == [1], job.explain()
    check_goes_on(job, PARTS, saved, [(at, Sizes(1, 2, 2))])


@pytest.mark.parametrize("phase", ["commit", "backward"])
@pytest.mark.parametrize("elastic_too", [False, True], ids=["replan", "both"])
def test_a_rank_is_replaced_while_losses_are_summed_up(
    elastic_too: bool, phase: str, tmp_path: Path, saved: Saved
) -> None:
    """The log that comes later is of what all iterations have had, also where the last stage's rank is another one, or
    has made its step a second time; with the norm of the parameters."""
    training = named(PARTS, "sums", logs=3, flags=(*SHARDED, "--log-params-norm"))
    config = both(training) if elastic_too else AUTO
    faults = [f"rank=1,fault=sigkill,at={phase},step={training.call('train', 4)}"]
    job = training.start(tmp_path / "run", config=config, inject=faults).wait(TIMEOUT_S)
    check_fired(job)
    assert [event["victims"] for event in job.of("recovery_finished")] == [[1]], job.explain()
    check_loop(job, training, saved, [])


def test_there_and_back(tmp_path: Path, saved: Saved) -> None:
    running = started(PARTS, tmp_path / "run")
    changes = [(PARTS.call("train", 2), Sizes(1, 1, 4)), (PARTS.call("train", 5), PARTS.sizes)]
    assert command(running, changes[0][1], changes[0][0]) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    assert command(running, changes[1][1], changes[1][0]) == ""
    check_goes_on(running.wait(TIMEOUT_S), PARTS, saved, changes)


def test_a_checkpoint_of_megatrons(tmp_path: Path) -> None:
    """A rank dies while one is written, and it is written in another layout. It holds what that of an undisturbed job
    holds. A job that begins with it changes its layout when there is a newer one already, and goes on where it was."""
    training = named(STAGES, "saved", saves=4)
    at = training.call("exit", 3)
    places = [tmp_path / name for name in ("one", "other")]
    one = training.start(
        *(tmp_path / "run", f"--save={places[0]}", "--save-interval=4"),
        inject=[f"rank=3,fault=sigkill,at=between,step={at}"],
    ).wait(TIMEOUT_S)
    check_fired(one)
    ((call, _),) = replanned(one)
    assert training.iteration(call) == 4, one.explain()  # the log may be made again
    other = training.start(tmp_path / "other-run", f"--save={places[1]}", "--save-interval=4").wait(TIMEOUT_S)
    finished(one), finished(other)
    held = [content(place / "iter_0000004", tmp_path / "all.pt") for place in places]
    compared = {name for name in held[0] if not name.startswith(("/rng_state", "/rerun_state_machine"))}
    assert any("exp_avg_sq" in name for name in compared), sorted(compared)
    odd = [name for name in compared | (held[1].keys() - held[0].keys()) if held[0].get(name) != held[1].get(name)]
    assert not [name for name in odd if not name.startswith(("/rng_state", "/rerun_state_machine"))], odd
    for place in places[1:]:
        shutil.rmtree(place / "iter_0000008")
        (place / "latest_checkpointed_iteration.txt").write_text("4")
    running = training.start(
        *(tmp_path / "loaded", SLOWLY, f"--load={places[1]}", f"--save={places[1]}", "--save-interval=1"), config=AUTO
    )
    running.wait_for("job_started", TIMEOUT_S)
    assert command(running, Sizes(1, 2, 1), 3 * 3) == ""  # three calls an iteration
    loaded = finished(running.wait(TIMEOUT_S))
    ours, theirs = Course.of(loaded), Course.of(other)
    check_same_steps(ours, theirs, 4, 7, training.sizes, loaded.explain())
    assert ours.states["begin", 7, "tp=1,pp=2,dp=1"] == theirs.states["state", 7, str(training.sizes)]
    assert ours.states["state", 8, "tp=1,pp=2,dp=1"], loaded.explain()


@pytest.mark.parametrize("phase", ["between", "commit"])
def test_killed_in_the_checkpoint_after_the_last_iteration(phase: str, tmp_path: Path) -> None:
    """Nothing is left to be computed: in the other layout it is only written."""
    training = named(STAGES, "last", saves=5)
    places = [tmp_path / name for name in ("one", "other")]
    at = len(training.calls) + 1  # after what says that training is done
    faults = [f"rank=1,fault=sigkill,at={phase},step={at}"]
    one, other = (
        training.start(*(tmp_path / f"run-{place.name}", f"--save={place}", "--save-interval=5"), inject=armed).wait(
            TIMEOUT_S
        )
        for place, armed in zip(places, (faults, []), strict=True)
    )
    check_fired(one)
    ((call, _),) = replanned(one)
    assert call in (at - 1, at, at + 1), one.explain()
    finished(one), finished(other)
    states = [Course.of(job).states["state", training.iterations, str(training.sizes)] for job in (one, other)]
    assert states[0] == states[1] and len(states[0]) == 1, one.explain()
    held = [content(place / f"iter_{training.iterations:07}", tmp_path / "all.pt") for place in places]
    odd = [name for name in held[0].keys() | held[1].keys() if held[0].get(name) != held[1].get(name)]
    assert not [name for name in odd if not name.startswith(("/rng_state", "/rerun_state_machine"))], odd


REFUSED = [
    ("--pipeline-model-parallel-layout=Et|tL", "--pipeline-model-parallel-layout"),
    ("--decoder-first-pipeline-num-layers=1", "--decoder-first-pipeline-num-layers"),
    ("--hierarchical-context-parallel-sizes=2", "--hierarchical-context-parallel-sizes"),
    ("--dataloader-type=cyclic", "--dataloader-type cyclic"),
    ("--finetune", "--finetune"),
    ("--moe-use-upcycling", "--moe-use-upcycling"),
    ("--flash-recovery-parallelism=3", "the launcher says --parallelism 1"),
    ("--flash-recovery-checkpoint-dir=/nowhere", "checkpoint.dir"),
]


@pytest.mark.parametrize(("flag", "reason"), REFUSED, ids=[reason.split()[0] for _, reason in REFUSED])
def test_what_is_refused(flag: str, reason: str, tmp_path: Path) -> None:
    training = Training("refused", Sizes(1, 2, 1))
    job = training.start(tmp_path / "run", flag, config=AUTO).wait(TIMEOUT_S)
    assert job.code != 0 and reason in job.explain(), job.explain()
    assert "step=0" not in job.explain()
