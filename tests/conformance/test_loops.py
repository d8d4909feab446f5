"""Loops as people write them, killed at five moments each: every step and the end are those of the same launch without
a kill, bit for bit.

A job has one kill at each moment, and its victims take turns. Five such jobs, between which moments and victims rotate,
are the whole product of moments and victims for a loop, and each moment comes once as the first of its job; a sixth
begins with a kill in step 0 and ends with one in the last step. ``make test`` has jobs of several loops in one,
``make grid`` everything.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scripts.loops import LOOPS, loop_class
from tests.support.jobs import ROOT, Job, Layout, References, check_same
from tests.support.loops import ROTATIONS, Kill, check_loop, differences, from_the_start, rotated, run_loop, steps_for

Reference = Callable[[Layout], Job]
WORLD = 3
PAUSE = ("--pause", "0.5")  # the peers have come as far as they can
IN_BLOCK = (
    "differs-from-the-start+differs-later+in-place-batches+python-and-numpy+edited-groups"
    "+rank-bias+checkpointed-batch-norm+ema-module"
)
BELOW = "scheduler-below+evaluation-below+averaged-below+running-average-below+generators+best-of-rank-zero"
LATE_COLLECTIVES = "expert-bias+averaged-in-block+draws-above+accumulation"


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch without a kill, once for each loop and framework."""
    return References(lambda: tmp_path_factory.mktemp("reference"), lambda path, it: run_loop(path, it, _steps(it)))


def _layout(loop: str, framework: str) -> Layout:
    return Layout(f"{loop}-{framework}", "", ("--loop", loop, "--framework", framework), nproc=WORLD)


def _steps(layout: Layout) -> int:
    return steps_for(rotated(0, every=loop_class(layout.flags[1]).every))


def _cases() -> list[object]:
    return [pytest.param(loop, framework, id=f"{loop}-{framework}") for loop in LOOPS for framework in LOOPS[loop].only]


def _check(layout: Layout, kills: list[Kill], path: Path, reference: Reference) -> None:
    job = run_loop(path / "run", layout, _steps(layout), kills)
    check_loop(job, reference(layout), kills)


@pytest.mark.parametrize(
    ("loops", "framework", "moments"),
    [
        pytest.param(IN_BLOCK, "ddp", ("backward", "optimizer"), id="in the block", marks=pytest.mark.grid),
        pytest.param(BELOW, "ddp", ("end", "below"), id="below it", marks=pytest.mark.grid),
        pytest.param(
            "evaluation-below+scheduler-below+rank-bias", "fsdp2", ("optimizer",), id="fsdp2", marks=pytest.mark.grid
        ),
        pytest.param("silent-codebook", "ddp", ("backward", "optimizer"), id="silent buffer", marks=pytest.mark.grid),
        pytest.param(
            "silent-codebook+silent-queue+later-numbers+large-own-state",
            "fsdp2",
            ("backward", "below"),
            id="silent buffers, its own large state, fsdp2",
        ),
        pytest.param(
            "scaler+module-counter+spectral-norm", "ddp", ("backward", "below"), id="scaler", marks=pytest.mark.grid
        ),
        pytest.param("freezes-later+module-counter", "fsdp2", ("backward",), id="frozen", marks=pytest.mark.grid),
        pytest.param(
            "replaced-buffers+skips-together+packed-documents",
            "ddp",
            ("optimizer", "below", "backward"),
            id="replaced buffers, skipped steps",
            marks=pytest.mark.grid,
        ),
        pytest.param(
            "replaced-buffers", "fsdp2", ("below", "backward"), id="replaced buffers, fsdp2", marks=pytest.mark.grid
        ),
        pytest.param("two-optimizers", "ddp", ("optimizer", "backward"), id="two optimizers", marks=pytest.mark.grid),
    ],
)
def test_several_loops_in_one(
    loops: str, framework: str, moments: tuple[str, ...], tmp_path: Path, reference: Reference
) -> None:
    """Each job's first kill is in a step in which the unusual things happen, its second in the step after one."""
    every = loop_class(loops).every
    kills = [Kill(2 - i, every * (2 * i + 2) - 1 + i, moment, i) for i, moment in enumerate(moments)]
    _check(_layout(loops, framework), kills, tmp_path, reference)


@pytest.mark.grid
@pytest.mark.timeout(400)  # nine cold starts of a process on two cores
@pytest.mark.parametrize("rotation", range(ROTATIONS))
@pytest.mark.parametrize("loops", [IN_BLOCK, BELOW, LATE_COLLECTIVES])
def test_every_moment_of_several_loops_in_one(loops: str, rotation: int, tmp_path: Path, reference: Reference) -> None:
    kills = rotated(rotation, every=loop_class(loops).every, world=WORLD)
    _check(_layout(loops, "ddp"), kills, tmp_path, reference)


@pytest.mark.grid
@pytest.mark.timeout(400)
@pytest.mark.parametrize("rotation", range(ROTATIONS))
@pytest.mark.parametrize(("loop", "framework"), _cases())
def test_every_moment(loop: str, framework: str, rotation: int, tmp_path: Path, reference: Reference) -> None:
    kills = rotated(rotation, every=LOOPS[loop].every, world=WORLD)
    _check(_layout(loop, framework), kills, tmp_path, reference)


@pytest.mark.grid
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("loop", "framework"), _cases())
def test_first_and_last_step(loop: str, framework: str, tmp_path: Path, reference: Reference) -> None:
    layout = _layout(loop, framework)
    touched_in = LOOPS[loop].every - 1 if LOOPS[loop].touches_now_and_then else None
    _check(layout, from_the_start(_steps(layout), world=WORLD, touched_in=touched_in), tmp_path, reference)


@pytest.mark.grid
def test_a_rank_that_dies_in_the_step_in_which_all_begin_to_seal_again(tmp_path: Path, reference: Reference) -> None:
    """Step 0 has shown that a rank's own state changes after the forward pass. In step 1 the ranks tell each other, and
    from the next one on they seal again before the optimizer. This one was not sealed, so it is undone."""
    layout = _layout("draws-between", "ddp")
    late = Layout(layout.name, "", (*layout.flags, *PAUSE), nproc=WORLD)
    kills = [Kill(1, 1, "optimizer", 0)]
    check_loop(run_loop(tmp_path / "run", late, _steps(layout), kills), reference(layout), kills)


@pytest.mark.grid
def test_an_object_that_differs_from_the_start_is_each_ranks_own_in_the_first_step(
    tmp_path: Path, reference: Reference
) -> None:
    _check(_layout("differs-from-the-start", "ddp"), [Kill(1, 0, "backward", 0)], tmp_path, reference)


def test_state_that_is_said_to_be_replicated_and_is_not(tmp_path: Path, reference: Reference) -> None:
    """An optimizer whose ranks own whole parameters (and others later), weights that are averaged now and then, and
    counters of groups that are empty on some ranks: each rank has its own. A death in the first step, before anybody
    knows, in the next one, and in the middle of the owners' broadcasts."""
    layout = _layout("owned-parameters+local-weights+counts-in-groups", "ddp")
    kills = [Kill(1, 0, "optimizer", 0), Kill(2, 1, "backward", 1), Kill(0, 5, "broadcast", 2)]
    check_loop(run_loop(tmp_path / "run", layout, _steps(layout), kills), reference(layout), kills)
    said = [notice["text"] for notice in reference(layout).notices("redundancy")]
    assert "'param/0.bias'" in said[-1] and "survives the loss of any one rank" in said[-1], said
    (own,) = reference(layout).notices("own_objects")
    assert "hyperparameters of model" in own["text"], own


def test_what_torch_compile_has_learned_of_sizes(tmp_path: Path) -> None:
    """A kernel for any size, in the ranks that have met several: a replacement begins with it. A survivor does the
    first step again with kernels for the sizes that it meets first, as if it had learned nothing in the attempt."""
    layout = replace(_layout("compiled-sizes", "ddp"), nproc=2)
    kills = [Kill(1, 0, "backward", 0), Kill(1, 4, "backward", 1)]
    check_loop(run_loop(tmp_path / "run", layout, 7, kills), run_loop(tmp_path / "reference", layout, 7), kills)


@pytest.mark.grid
@pytest.mark.timeout(600)  # a compiler in four processes
def test_what_inductor_has_learned_of_sizes(tmp_path: Path) -> None:
    layout = replace(_layout("compiled-by-inductor", "ddp"), nproc=2)
    kills = [Kill(1, 2, "backward", 0)]
    job = run_loop(tmp_path / "run", layout, 4, kills, timeout_s=280)
    check_loop(job, run_loop(tmp_path / "reference", layout, 4, timeout_s=280), kills)


@pytest.mark.grid
@pytest.mark.mutants
def test_an_object_that_begins_to_differ_in_a_redone_step_is_named(tmp_path: Path) -> None:
    """It may just as well be the trace of a variable that is not registered."""
    job = run_loop(tmp_path / "run", _layout("differs-later", "ddp"), 9, [Kill(1, 0, "backward", 0)])
    assert job.code not in (0, -1000), job.explain()
    assert "'registered object lowest'" in job.output and "per_rank=" in job.output, job.explain()


def test_a_plain_variable_that_decides_something(tmp_path: Path) -> None:
    """nanoGPT's ``iter_num`` is 0 in a replacement, so that it takes another learning rate than its peers."""
    layout = _layout("plain-variable", "ddp")
    paused = Layout(layout.name, "", (*layout.flags, *PAUSE), nproc=WORLD)  # a slow peer would not have counted step 3
    job = run_loop(tmp_path / "run", paused, 9, [Kill(1, 4, "backward", 0)])
    assert job.code not in (0, -1000), f"it went on with ranks that differ, or stood\n{job.explain()}"
    (failed,) = job.of("job_failed")
    said = failed["reason"]
    assert "do not agree at version 5: 'hyperparameters of model 0' (ranks 0 and 2 | rank 1)" in said, job.explain()
    assert "The majority is alike, ranks 0 and 2; rank 1 differs (rank 1: a replacement)" in said, job.explain()
    assert "All were alike at version 4" in said, "which the replacement was given"
    assert "suspect node" in said and "No checkpoint is left" in said, job.explain()


@pytest.mark.grid
def test_a_rank_whose_weights_go_wrong_is_named_with_its_node_and_the_way_on(tmp_path: Path) -> None:
    """In the step that is done again after another rank's death. It goes on from a checkpoint that was made before the
    ranks may have begun to differ; one that is made later is told from it."""
    layout, folder = _layout("weights-of-one-rank", "ddp"), tmp_path / "checkpoints"
    options = ["--checkpoint-dir", str(folder), "--checkpoint-interval", "0.02"]
    paused = Layout(layout.name, "", (*layout.flags, *PAUSE), nproc=WORLD)
    job = run_loop(tmp_path / "run", paused, 9, [Kill(1, 5, "backward", 0)], options=options)
    assert job.code not in (0, -1000), job.explain()
    (failed,) = job.of("job_failed")
    said = failed["reason"]
    assert "do not agree at version 6: 'param/down.bias' (ranks 0 and 1 | rank 2). The majority is alike" in said, said
    assert "All were alike at version 4" in said, "the last comparison: a survivor may have changed since"
    node = job.of("node_joined")[0]["node"]
    assert f"suspect node {node} (rank 2)" in said, said
    way = re.search(r"`--run-dir (\S+) --resume` goes on from the newest checkpoint from before, of step (\d)", said)
    assert way is not None and way[1] == str(tmp_path / "run") and int(way[2]) <= 4, said
    for path in re.findall(r"\((\S+)\)", (re.search(r"may hold what differs: (.*); remove", said) or [""])[0]):
        shutil.rmtree(path)
    again = run_loop(tmp_path / "run", layout, 5, options=[*options, "--resume"])
    assert again.code == 0, again.explain()
    assert any(f"resumed at step {way[2]}" in notice["text"] for notice in again.notices("resumed")), again.explain()


def test_what_changes_and_is_not_registered_is_named_and_again_after_a_recovery(tmp_path: Path) -> None:
    """None of it is brought back, and the ranks agree all the same: each has its own."""
    forgotten = "forgotten-average+forgotten-generator+forgotten-data+carried-hidden+plain-skips"
    job = run_loop(tmp_path / "run", _layout(forgotten, "ddp"), 12, [Kill(1, 6, "backward", 0)])
    assert job.code == 0 and job.of("recovery_finished"), job.explain()
    told = [notice["text"] for notice in job.notices("not_registered")]
    # The first ones may reach the controller when it has heard of the death already: its generation says nothing.
    (after,) = (text for text in told if "After this recovery they may not be" in text)
    before = " ".join(text for text in told if text != after)
    objects = ("averaged (AveragedModel)", "forgotten (Generator)", "loop.average (Kept)")
    for named in (*objects, "loop.batches", "loop.hidden"):
        assert named in before and named in after, job.explain()


@pytest.mark.grid
def test_a_packer_around_what_is_protected_is_refused_before_the_second_step(tmp_path: Path) -> None:
    """What it has kept for its next row is in its frame."""
    job = run_loop(tmp_path / "run", _layout("packs-outside", "ddp"), 6)
    assert job.code not in (0, -1000) and not job.of("recovery_finished"), job.explain()
    (failed,) = job.of("job_failed")
    assert failed["step"] == 1 and "takes batches of recovery.data() from step to step" in failed["reason"], failed
    assert "recovery.data(documents(loader))" in failed["reason"], failed


@pytest.mark.grid
def test_a_rank_that_skips_a_step_alone_is_named(tmp_path: Path) -> None:
    """The others wait in the backward pass, and it for them at the end of its step."""
    config = {"timeouts": {"hang_step_s": 8.0}}
    job = run_loop(tmp_path / "run", _layout("skips-alone", "ddp"), 10, config=config, timeout_s=240)
    assert job.code not in (0, -1000), f"it went on with ranks that differ, or stood\n{job.explain()}"
    text = job.notices("deadlock")[0]["text"]
    assert "rank 0 came there without what rank" in text and "skip or retry a step on all ranks" in text, text


def test_an_optimizer_that_nobody_has_registered_is_refused(tmp_path: Path) -> None:
    job = run_loop(tmp_path / "run", _layout("forgotten-optimizer", "ddp"), 6)
    assert job.code not in (0, -1000) and not job.of("recovery_finished"), job.explain()
    assert "UnsupportedError: RMSprop.step() at " in job.output and "not registered" in job.output, job.explain()


def test_gradients_that_live_across_steps_are_refused(tmp_path: Path) -> None:
    job = run_loop(tmp_path / "run", _layout("accumulates-across", "fsdp2"), 6)
    assert job.code not in (0, -1000) and not job.of("recovery_finished"), job.explain()
    assert "UnsupportedError: this step uses gradients of an earlier step" in job.output, job.explain()


@pytest.mark.grid
def test_parameter_groups_that_are_added_later_are_named(tmp_path: Path) -> None:
    job = run_loop(tmp_path / "run", _layout("group-later", "ddp"), 12, [Kill(1, 8, "backward", 0)])
    assert any(
        "the parameter groups of AdamW have changed" in told["text"] for told in job.notices("not_registered")
    ), job.explain()
    assert job.code not in (0, -1000), f"it went on without them\n{job.explain()}"
    (failed,) = job.of("job_failed")
    assert "(AdamW) had 2 parameter groups, it has 1; groups that a script adds" in failed["reason"], job.explain()


@pytest.mark.grid
def test_what_is_put_into_the_model_later_is_named(tmp_path: Path) -> None:
    job = run_loop(tmp_path / "run", _layout("pruned-later", "ddp"), 12, [Kill(1, 8, "backward", 0)])
    assert any(
        "hooks of modules have changed since the first step: model.module.down" in told["text"]
        for told in job.notices("not_registered")
    ), job.explain()
    assert job.code not in (0, -1000), f"it went on without it\n{job.explain()}"
    (failed,) = job.of("job_failed")
    assert "down.weight_orig'" in failed["reason"] and "a replacement has not" in failed["reason"], job.explain()


@pytest.mark.parametrize("loop", ["plain-rate-below", "plain-counter"])
@pytest.mark.grid
def test_a_plain_variable_that_decides_something_later(loop: str, tmp_path: Path) -> None:
    """The redone step is the right one, and the ranks part afterwards: they go on to compare, and so they find it."""
    job = run_loop(tmp_path / "run", _layout(loop, "ddp"), 14, [Kill(1, 4, "backward", 0)])
    assert job.code not in (0, -1000), f"it went on with ranks that differ, or stood\n{job.explain()}"
    assert "do not agree" in job.output and job.of("recovery_finished"), job.explain()


@pytest.mark.grid
def test_an_object_that_begins_to_differ_just_before_the_death_is_named(tmp_path: Path) -> None:
    """No comparison has found it yet. What the dead rank's was like is in the last bytes of its rank-local state."""
    layout = _layout("found-by-rank-zero", "ddp")
    paused = Layout(layout.name, "", (*layout.flags, *PAUSE), nproc=WORLD)
    job = run_loop(tmp_path / "run", paused, 12, [Kill(0, 6, "backward", 0)])
    assert job.code not in (0, -1000), f"it went on with another rank's object\n{job.explain()}"
    assert "['found']" in job.output and "at version 6" in job.output, job.explain()


@pytest.mark.grid
def test_an_object_that_begins_to_differ_is_each_ranks_own_in_the_step_in_which_that_is_found(tmp_path: Path) -> None:
    """The ranks compare in step 1, and seal again."""
    layout = _layout("differs-later", "ddp")
    paused = Layout(layout.name, "", (*layout.flags, *PAUSE), nproc=WORLD)
    reference = run_loop(tmp_path / "reference", layout, 8)
    kills = [Kill(1, 1, "optimizer", 0)]
    check_loop(run_loop(tmp_path / "run", paused, 8, kills), reference, kills)


@pytest.mark.grid
@pytest.mark.parametrize("step", [0, 3])
def test_tensors_that_change_above_the_block_are_copied_before_that(
    step: int, tmp_path: Path, reference: Reference
) -> None:
    """Also in the first step: the step communicates after its optimizer, so the survivors go back."""
    layout = _layout("decay-above+expert-bias", "ddp")
    paused = Layout(layout.name, "", (*layout.flags, *PAUSE), nproc=WORLD)
    kills = [Kill(1, step, "optimizer", 0)]
    check_loop(run_loop(tmp_path / "run", paused, _steps(layout), kills), reference(layout), kills)


@pytest.mark.parametrize(
    ("loop", "framework", "moment"),
    [
        pytest.param("momentum-edited+expert-bias", "ddp", "optimizer", marks=pytest.mark.grid),
        pytest.param("momentum-edited", "fsdp2", "data", marks=pytest.mark.grid),
        ("momentum-edited", "fsdp2", "optimizer"),
    ],
)
def test_the_first_step_that_changes_tensors_above_the_block_has_no_copy(
    loop: str, framework: str, moment: str, tmp_path: Path, reference: Reference
) -> None:
    """One that is made later holds what the script has changed already. Nothing of that is taken for the version: the
    step before is done again, or the job ends with an error."""
    layout = _layout(loop, framework)
    paused = Layout(layout.name, "", (*layout.flags, *PAUSE), nproc=WORLD)
    job = run_loop(tmp_path / "run", paused, _steps(layout), [Kill(1, 2, moment, 0)])
    if job.of("job_failed"):
        assert job.code not in (0, -1000), job.explain()
        return
    (finished,) = job.of("recovery_finished")
    assert finished["resume_step"] in (1, 2), job.explain()
    assert job.code == 0 and not differences(job, reference(layout)), job.explain()


@pytest.mark.grid
@pytest.mark.mutants
def test_a_collective_above_the_block_costs_nothing_and_is_not_named(tmp_path: Path) -> None:
    job = run_loop(tmp_path / "run", _layout("reduce-above", "ddp"), 6)
    assert job.code == 0, job.explain()
    assert not job.notices("communication_outside"), job.explain()


@pytest.mark.parametrize(
    ("slow", "moment"),
    [
        pytest.param("below", "below", id="after the commit", marks=[pytest.mark.grid, pytest.mark.mutants]),
        pytest.param("after", "optimizer", id="before it", marks=pytest.mark.grid),
    ],
)
def test_what_stand_ins_have_answered_below_the_block_is_nobodys_version(
    slow: str, moment: str, tmp_path: Path, reference: Reference
) -> None:
    """The survivors hear of the death before they communicate. They live on, and do the step again."""
    layout = _layout("reduce-below", "ddp")
    late = Layout(layout.name, "", (*layout.flags, "--slow", slow, *PAUSE), nproc=WORLD)
    kills = [Kill(1, 5, moment, 0)]
    job = run_loop(tmp_path / "run", late, _steps(layout), kills)
    check_loop(job, reference(layout), kills)
    (finished,) = job.of("recovery_finished")
    assert finished["resume_step"] == 5, job.explain()
    (named, *_) = job.notices("communication_outside")
    assert "all_reduce" in named["text"] and "loops.py:" in named["text"] and "move it into the block" in named["text"]


@pytest.mark.grid
def test_a_mean_below_the_block_that_a_stand_in_has_answered_is_made_again(
    tmp_path: Path, reference: Reference
) -> None:
    """No rank has a mean of all losses. Since the script communicates there, own copies are kept."""
    layout = _layout("mean-below", "ddp")
    late = Layout(layout.name, "", (*layout.flags, "--slow", "below", *PAUSE), nproc=WORLD)
    kills = [Kill(1, 5, "below", 0)]
    job = run_loop(tmp_path / "run", late, _steps(layout), kills)
    check_loop(job, reference(layout), kills)


def test_who_leaves_its_loop_in_a_void_attempt_is_replaced(tmp_path: Path) -> None:
    """A stand-in has answered rank 0; it is not a rank that has done all its steps."""
    layout = _layout("leaves-below", "ddp")
    paused = Layout(layout.name, "", (*layout.flags, *PAUSE), nproc=WORLD)
    job = run_loop(tmp_path / "run", paused, 9, [Kill(1, 4, "backward", 0)])
    undisturbed = run_loop(tmp_path / "reference", layout, 9)
    assert job.code == 0 and {0, 1} == {v for e in job.of("recovery_finished") for v in e["victims"]}, job.explain()
    assert not differences(job, undisturbed), job.explain()


@pytest.mark.grid
def test_the_first_late_step_of_a_job_is_not_taken_for_one_like_any_other(tmp_path: Path) -> None:
    """What the dead rank drew after its optimizer is nowhere, and its peers hold no copy to go back to. They say so.
    Only where one of them has heard in time that another one's step was late, it has a copy; all go back to it then."""
    plain = _layout("late-draws", "ddp")
    layout = Layout(plain.name, "", (*plain.flags, *PAUSE), nproc=WORLD)
    job = run_loop(tmp_path / "run", layout, 12, [Kill(1, 8, "end", 0)])
    if job.code == 0:
        (finished,) = job.of("recovery_finished")
        assert finished["resume_step"] == 8, job.explain()
        assert not differences(job, run_loop(tmp_path / "reference", plain, 12)), f"without the draws\n{job.explain()}"
    else:
        assert job.code != -1000 and job.of("job_failed"), job.explain()
    assert "do not agree" not in job.output, f"only the proof has found it\n{job.explain()}"


@pytest.mark.grid
def test_own_state_that_has_changed_after_the_forward_pass_is_sealed_again(
    tmp_path: Path, reference: Reference
) -> None:
    """Its peers complete the step, and have the rank-local state of its version from before they did."""
    _check(_layout("checkpointed-batch-norm", "ddp"), [Kill(1, 12, "optimizer", 0)], tmp_path, reference)


def test_a_rank_dies_again_before_it_has_published_anything(tmp_path: Path, reference: Reference) -> None:
    """Its heir finds all that it was given, and both deaths are one recovery."""
    layout = _layout(IN_BLOCK, "ddp")
    paused = Layout(layout.name, "", (*layout.flags, *PAUSE), nproc=WORLD)
    kills = [Kill(1, 5, "backward", 0), Kill(1, 5, "data", 1)]
    job = run_loop(tmp_path / "run", paused, _steps(layout), kills)
    (finished,) = job.of("recovery_finished")
    assert finished["generation"] == 2 and finished["resume_step"] == 5, job.explain()
    assert not differences(job, reference(layout)), job.explain()
    check_same(job, reference(layout))


@pytest.mark.grid
@pytest.mark.parametrize("framework", ["ddp", "fsdp2"])
def test_a_silent_buffer_in_the_first_step(framework: str, tmp_path: Path, reference: Reference) -> None:
    """Nothing has been learned yet, and the survivors' buffers have changed behind their counters' backs."""
    _check(_layout("silent-codebook", framework), [Kill(1, 0, "backward", 0)], tmp_path, reference)


@pytest.mark.grid
def test_a_buffer_that_is_silent_on_one_rank_is_watched_on_all(tmp_path: Path, reference: Reference) -> None:
    """The others write theirs first in steps in which no one looks closely, and one of them dies there."""
    layout = _layout("silent-first-on-rank-zero", "ddp")
    _check(layout, [Kill(1, 6, "backward", 0)], tmp_path, reference)
    (told,) = reference(layout).notices("silent_buffers")
    assert "codebook" in told["text"]


@pytest.mark.grid
def test_a_buffer_that_becomes_silent_is_watched_from_the_next_comparison_on(tmp_path: Path) -> None:
    layout = _layout("silent-later", "ddp")
    kills = [Kill(1, 10, "backward", 0), Kill(2, 11, "optimizer", 1)]
    job = run_loop(tmp_path / "run", layout, 14, kills)
    check_loop(job, run_loop(tmp_path / "reference", layout, 14), kills)


@pytest.mark.grid
@pytest.mark.parametrize("step", [6, 8])
def test_before_that_comparison_it_is_named(step: int, tmp_path: Path) -> None:
    """In the recovery, or in the comparison of this very step, the survivors find their buffers written, which were not
    in the first step. No rank-local state says what they were like when the step began."""
    layout = _layout("silent-later", "ddp")
    paused = Layout(layout.name, "", (*layout.flags, *PAUSE), nproc=WORLD)
    job = run_loop(tmp_path / "run", paused, 12, [Kill(1, step, "backward", 0)])
    assert job.code not in (0, -1000), f"it went on with a buffer of another step, or stood\n{job.explain()}"
    assert "'codebook'" in job.output and "torch.no_grad()" in job.output, job.explain()


@pytest.mark.grid
@pytest.mark.mutants
def test_a_compiled_optimizer(tmp_path: Path) -> None:
    """What is done before and after its step is no part of the graph."""
    layout = Layout("compiled", "", ("--optimizer", "adamw-compiled"), nproc=2)
    kills = (Kill(1, 2, "data", 0), Kill(0, 3, "backward", 1))
    script = ROOT / "tests" / "scripts" / "library_optimizers.py"
    reference = run_loop(tmp_path / "reference", layout, 5, script=script)
    check_loop(run_loop(tmp_path / "run", layout, 5, kills, script=script), reference, kills)
