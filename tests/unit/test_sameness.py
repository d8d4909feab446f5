"""The check that a job went the way of its reference can fail: each of its demands, violated alone, is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.jobs import Job, check_same, read_digests
from tests.support.sameness import Printed, ProcessLog, Run, differences

RANKS, STEPS = 3, 10
FAILED, RESUMED = 4, 5
"""Rank 1 dies in this step before its line; its peers complete it."""

Change = Callable[[Run], None]


def lines(rank: int, *steps: int) -> tuple[tuple[int, str], ...]:
    """Of a process that took these steps."""
    return tuple((step, f"0x{rank}.{step}p+0") for step in steps)


def log(rank: int, generation: int, *steps: int) -> ProcessLog:
    return ProcessLog(rank, generation, lines(rank, *steps))


def undisturbed() -> Run:
    return Run(
        code=0,
        events=[{"event": "job_started", "generation": 0}],
        digests={rank: f"digest {rank}" for rank in range(RANKS)},
        logs=[log(rank, 0, *range(STEPS)) for rank in range(RANKS)],
    )


def recovered() -> Run:
    """One recovery, and in it nothing is wrong."""
    run = undisturbed()
    run.events += [
        {"event": "failure_detected", "generation": 0, "rank": 1, "step": FAILED},
        {"event": "recovery_started", "generation": 1, "victims": [1]},
        {"event": "recovery_finished", "generation": 1, "victims": [1], "resume_step": RESUMED},
    ]
    run.logs[1:2] = [log(1, 0, *range(FAILED)), log(1, 1, *range(RESUMED, STEPS))]
    return run


def gone_back() -> Run:
    """To a checkpoint of version 2, with all ranks."""
    run = recovered()
    run.events[2:3] = [run.events[2], {"event": "fallback_started", "generation": 1, "version": 2}]
    run.events[-1]["resume_step"] = 2
    run.logs = [log(0, 0, *range(5), *range(2, STEPS)), log(1, 0, *range(4)), log(1, 1, *range(2, STEPS))]
    return run


def put(run: Run, index: int, *steps: int) -> None:
    run.logs[index] = log(run.logs[index].rank, run.logs[index].generation, *steps)


def again(run: Run) -> None:
    """All from the first line, because of a failure in step 4."""
    run.events.append({"event": "notice", "kind": "start_again", "generation": 1, "text": "a failure"})
    run.events.append({"event": "job_started", "generation": 2})
    run.logs += [log(rank, 2, *range(STEPS)) for rank in range(RANKS)]


def test_nothing_is_wrong() -> None:
    assert differences(undisturbed(), undisturbed()) == []
    assert differences(recovered(), undisturbed()) == []


def test_a_step_may_be_redone() -> None:
    run = recovered()
    run.events[-1]["resume_step"] = FAILED
    run.logs = [log(0, 0, 0, 1, 2, 3, 4, *range(4, STEPS)), log(1, 0, *range(4)), log(1, 1, *range(4, STEPS))]
    run.logs.append(log(2, 0, *range(STEPS)))
    assert differences(run, undisturbed()) == []


def test_a_checkpoint_may_be_gone_back_to() -> None:
    run = gone_back()
    run.logs.append(log(2, 0, *range(5), *range(2, STEPS)))
    assert differences(run, undisturbed()) == []


def test_a_last_step_without_a_line_may_be_completed_by_peers() -> None:
    run = recovered()
    run.events[1]["step"], run.events[3]["resume_step"] = STEPS - 1, STEPS
    run.logs[1:3] = [log(1, 0, *range(STEPS - 1)), log(1, 1)]
    assert not differences(run, undisturbed())
    run.logs[1:3] = [log(1, 0, *range(STEPS - 2)), log(1, 1)]
    assert any("no loss" in line for line in differences(run, undisturbed()))
    run.logs[1:3] = [log(1, 0, *range(STEPS - 1))]
    assert any("no loss" in line for line in differences(run, undisturbed()))


def test_a_first_step_without_a_line_may_be_completed_by_peers() -> None:
    run = recovered()
    run.events[1]["step"], run.events[-1]["resume_step"] = 0, 1
    run.logs[1:3] = [log(1, 0), log(1, 1, *range(1, STEPS))]
    assert differences(run, undisturbed()) == []


def test_the_first_step_may_be_started_again() -> None:
    run = undisturbed()
    run.logs = [log(r, 0, 0) for r in range(RANKS)] + [log(r, 1, *range(STEPS)) for r in range(RANKS)]
    run.events.append({"event": "notice", "kind": "start_again", "generation": 0, "text": "a failure"})
    run.events.append({"event": "job_started", "generation": 1})
    assert differences(run, undisturbed()) == []


@pytest.mark.parametrize("steps", [1, 2])
def test_a_recovery_that_is_cut_short_may_have_taken_steps(steps: int) -> None:
    """Its replacement began with them, and the next recovery, which ends, resumes with a later one."""
    run = recovered()
    resumed = run.events[-1]["resume_step"]
    run.events.insert(-1, {**run.events[1], "generation": 1, "step": resumed + steps - 1})
    run.events[-1].update(generation=2, resume_step=resumed + steps)
    assert differences(run, undisturbed()) == []
    run.events[-1].update(resume_step=resumed - 1)
    assert any("has begun with step" in text for text in differences(run, undisturbed()))


def other_attempt(run: Run) -> None:
    """A discarded attempt of step 4 had another loss; its repetition has the right one."""
    run.logs[0] = ProcessLog(0, 0, (*lines(0, *range(4)), (4, "0x1p-9"), *lines(0, *range(4, STEPS))))


VIOLATIONS: dict[str, tuple[Change, str]] = {
    "no loss at all": (lambda r: [put(r, i) for i in range(len(r.logs))] and None, "no loss was found"),  # type: ignore[func-returns-value]
    "a rank without losses": (lambda r: put(r, 3), "no loss of (rank, step) [(2, 0)"),
    "a step without its loss": (lambda r: put(r, 0, 0, 1, 2, 3, 5, 6, 7, 8, 9), "no loss of (rank, step) [(0, 4)]"),
    "the last step without its loss": (lambda r: put(r, 3, *range(9)), "no loss of (rank, step) [(2, 9)]"),
    "a loss before the death is missing": (lambda r: put(r, 1, 0, 1, 2), "no loss of (rank, step) [(1, 3), (1, 4)]"),
    "the resume step without its loss": (lambda r: put(r, 2, *range(6, STEPS)), "(1, 5)"),
    "another loss": (
        lambda r: r.logs.__setitem__(0, ProcessLog(0, 0, lines(3, *range(STEPS)))),
        "rank 0, step 0: loss 0x3.0p+0, not 0x0.0p+0",
    ),
    "another loss in a discarded attempt": (other_attempt, "rank 0, step 4: loss 0x1p-9, not 0x0.4p+0"),
    "a step too many": (lambda r: put(r, 0, *range(STEPS + 1)), "rank 0, step 10: loss"),
    "another end": (lambda r: r.digests.update({2: "other"}), "the end state differs"),
    "an end is missing": (lambda r: r.digests.pop(2), "the end state differs"),
    "an exit code": (lambda r: setattr(r, "code", 1), "exit code 1"),
    "a resume before the failure": (
        lambda r: r.events[-1].update(resume_step=2),
        "resumed at step 2 after failures at [4]",
    ),
    "a resume after the failure": (
        lambda r: r.events[-1].update(resume_step=6),
        "resumed at step 6 after failures at [4]",
    ),
    "a replacement at another step than its recovery": (
        lambda r: r.events[-1].update(resume_step=FAILED),
        "has begun with step 5, although its recovery resumed at 4",
    ),
    "a replacement from the beginning": (lambda r: put(r, 2, *range(STEPS)), "generation 1: step 0 after 3"),
    "a survivor from the beginning": (
        lambda r: put(r, 0, *range(5), *range(STEPS)),
        "rank 0, generation 0: step 0 after 4",
    ),
    "two steps back": (lambda r: put(r, 0, *range(5), *range(3, STEPS)), "rank 0, generation 0: step 3 after 4"),
    "more steps redone than recoveries": (
        lambda r: put(r, 0, 0, *range(5), *range(4, STEPS)),
        "rank 0 has redone 2 steps in 1 recoveries",
    ),
    "started from the beginning": (again, "it was started from the beginning: a failure"),
    "started twice": (lambda r: r.events.append(r.events[0]), "the job was started 2 times, not 1"),
    "never started": (lambda r: r.events.pop(0), "the job was started 0 times, not 1"),
    "a launch that did not resume": (lambda r: put(r, 3, *range(1, STEPS)), "rank 2, generation 0: step 1 after None"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violated_demand_is_found(name: str) -> None:
    run = recovered()
    change, words = VIOLATIONS[name]
    change(run)
    found = differences(run, undisturbed())
    assert any(words in text for text in found), found


def test_another_step_than_the_checkpoints_is_found() -> None:
    run = gone_back()
    run.events[-1]["resume_step"] = 3
    assert "resumed at step 3, although the checkpoint is of 2" in differences(run, undisturbed())


def test_a_launch_begins_with_the_step_it_was_given() -> None:
    run = undisturbed()
    run.logs = [log(rank, 0, *range(4, STEPS)) for rank in range(RANKS)]
    assert differences(run, undisturbed(), start=4) == []
    assert any("step 4 after None" in text for text in differences(run, undisturbed()))
    assert any("step 4 after None" in text for text in differences(run, undisturbed(), start=5))
    assert any("no loss of" in text for text in differences(run, undisturbed(), start=3))


def test_a_second_launch_is_allowed_where_it_is_said() -> None:
    run = undisturbed()
    run.events += [{"event": "checkpoint_saved", "version": 3}, run.events[0]]
    run.logs = [log(rank, 0, *range(6), *range(3, STEPS)) for rank in range(RANKS)]
    assert differences(run, undisturbed(), launches=2) == []
    put(run, 0, *range(6), *range(STEPS))
    assert any("step 0 after 5" in text for text in differences(run, undisturbed(), launches=2))


def no_numbers(run: Run, *ranks: int) -> None:
    """The losses of two steps on these ranks, as they were printed last."""
    run.logs += [ProcessLog(rank, 0, ((3, "nan"), (4, "-inf"))) for rank in ranks]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: setattr(r, "code", 1), "exit code 1"),
        (lambda r: r.digests.clear(), "0 digests and 30 losses were found"),
        (lambda r: r.logs.clear(), "3 digests and 0 losses were found"),
        (lambda r: r.logs.pop(), "ranks [2] have printed no loss"),
        (lambda r: no_numbers(r, 0, 1, 2), "the losses of steps [3, 4] are no numbers"),
        (lambda r: put(r, 1, *range(9)), "rank 1 lacks the losses of steps [9]"),
        (lambda r: put(r, 1, *range(1, STEPS)), "rank 1 lacks the losses of steps [0]"),
    ],
)
def test_a_reference_that_proves_nothing_is_refused(change: Change, words: str) -> None:
    reference = undisturbed()
    change(reference)
    (found, *_) = differences(reference, reference)
    assert found.startswith("the reference proves nothing: ") and words in found


def test_of_a_pipeline_only_the_last_stage_has_a_loss() -> None:
    reference = undisturbed()
    no_numbers(reference, 0, 1)
    assert not any("no numbers" in text for text in differences(reference, reference))


def logs_of_calls(run: Run) -> None:
    """As of a script whose lines have their own numbers: every third."""
    run.logs = [ProcessLog(x.rank, x.generation, tuple(y for y in x.lines if y[0] % 3 == 0)) for x in run.logs]


def test_lines_with_numbers_of_their_own() -> None:
    reference, run = undisturbed(), recovered()
    logs_of_calls(reference)
    logs_of_calls(run)
    assert differences(run, reference, Printed.LOGS) == []
    assert differences(run, reference), "they are not one for each step"
    put(run, 2, 9)  # one line a recovery may be missing
    assert differences(run, reference, Printed.LOGS) == []
    put(run, 2)
    assert differences(run, reference, Printed.LOGS) == ["no loss of (rank, step) [(1, 9)]"]
    put(run, 2, 0, 3, 6, 9)
    assert differences(run, reference, Printed.LOGS) == ["rank 1, generation 1: began with the first line again"]


def test_lines_of_one_rank() -> None:
    reference, run = undisturbed(), recovered()
    for one in (reference, run):
        one.logs = [x for x in one.logs if x.rank == 1]
    assert differences(run, reference, Printed.LAST_RANK) == []
    assert "have printed no loss" in differences(run, reference, Printed.LOGS)[0]
    run.logs.clear()
    assert "no loss was found" in differences(run, reference, Printed.LAST_RANK)


def test_output_is_read(tmp_path: Path) -> None:
    """Of the examples and of Megatron-LM; and what is not read makes the check fail."""

    def job(name: str, words: str) -> Job:
        folder = tmp_path / name
        folder.mkdir()
        text = "rank=0 step=0 loss=1.5 tokens/s=9 {0}=0x1p+0\nrank=0 step=1 loss=1.5 tokens/s=9 {0}=0x1p+1\n"
        (folder / "rank0.gen0.log").write_text(text.format(words) + f"digest rank=0 {'0' * 64}\n")
        made = Job(code=0, output="", run_dir=folder, seconds=1.0, marker="nobody", events=undisturbed().events)
        read_digests(made, folder.glob("rank*.log"))
        return made

    check_same(job("run", "loss_hex"), job("reference", "loss_hex"))
    with pytest.raises(AssertionError, match="no loss was found"):
        check_same(job("mute", "loss"), job("reference2", "loss_hex"))
    with pytest.raises(AssertionError, match="the reference proves nothing"):
        check_same(job("run2", "loss_hex"), job("reference3", "loss"))

    megatron = tmp_path / "rank1.gen3.log"
    megatron.write_text(" [stamp] iteration        7/      12 | samples: 56 | lm loss: 4.85E+00 | loss scale: 1.0 |\n")
    made = job("lm", "loss_hex")
    read_digests(made, [megatron])
    assert made.logs[-1] == ProcessLog(1, 3, ((7, "4.85E+00"),))


def given_to(*survivors: int) -> Run:
    """The failure has torn rank 2's state in a step that rank 0 has completed, before its line."""
    run = recovered()
    run.events[-1]["survivors_given"] = list(survivors)
    put(run, 3, *range(FAILED), *range(RESUMED, STEPS))
    return run


def test_a_survivor_that_was_given_its_peers_state_has_no_line_of_that_step() -> None:
    assert differences(given_to(2), undisturbed()) == []


def test_of_no_other_survivor_a_line_is_missing() -> None:
    assert differences(given_to(0), undisturbed())
    run = given_to(2)
    put(run, 3, *range(FAILED - 1), *range(RESUMED, STEPS))
    assert differences(run, undisturbed())
