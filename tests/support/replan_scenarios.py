"""What jobs of :mod:`tests.support.replan` go through, whatever they train: changes of the layout by command, losses of
ranks that are not replaced, second deaths. Each is compared from its change on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import elastic
from tests.support.jobs import Job, RunningJob, check_fired
from tests.support.replan import AT, TIMEOUT_S, Saved, Sizes, Training, check_goes_on, command, replanned, start

SLOWLY = ("--step-time", "150")
AUTO: dict[str, Any] = {"parallelism": {"min": 1}}
"""Lost ranks are replaced; the layout changes by command."""
FIRST, THEN = 3, 6
"""Steps of what happens one after another."""


def started(folder: Path, training: Training, *flags: str, **options: Any) -> RunningJob:
    """A slow job whose first step has begun."""
    running = start(folder, training, *SLOWLY, *flags, config=AUTO, **options)
    running.wait_for("job_started", TIMEOUT_S)
    return running


def check_on_command(training: Training, sizes: Sizes, folder: Path, saved: Saved) -> None:
    running = started(folder, training)
    assert command(running, sizes, AT) == ""
    job = running.wait(TIMEOUT_S)
    check_goes_on(job, training, saved, [(AT, sizes)])
    assert not job.of("failure_detected"), job.explain()


def check_there_and_back(training: Training, there: Sizes, folder: Path, saved: Saved) -> None:
    """To other sizes, and back to those of the launch."""
    running = started(folder, training)
    assert command(running, there, FIRST) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    assert command(running, training.sizes, THEN) == ""
    job = running.wait(TIMEOUT_S)
    check_goes_on(job, training, saved, [(FIRST, there), (THEN, training.sizes)])


def killed(rank: int, at: str, step: int | None = AT) -> str:
    """A rank is killed there, in this step; None: whenever it comes there."""
    return f"rank={rank},fault=sigkill,at={at}" + ("" if step is None else f",step={step}")


def check_losses(training: Training, faults: Sequence[str], ranks: int, folder: Path, saved: Saved) -> None:
    """All of these faults strike, no rank is replaced, and the others go on in a layout of that many ranks at most."""
    job = start(folder, training, inject=faults).wait(TIMEOUT_S)
    check_fired(job, len(faults))
    check_changed_around(job, training, saved, ranks)


def check_changed_around(job: Job, training: Training, saved: Saved, ranks: int) -> None:
    """It has changed once, before or after the step of the fault, to a layout of that many ranks at most."""
    assert job.code == 0, job.explain()
    (event,) = job.of("job_replanned")
    assert event["step"] in (AT - 1, AT, AT + 1) and 1 <= event["ranks"] <= ranks, job.explain()
    assert event["bytes"] > 0, job.explain()
    assert not job.of("fallback_started"), job.explain()
    check_goes_on(job, training, saved, replanned(job))


def check_second_death_before_the_change(
    training: Training, state: str, folder: Path, saved: Saved, second: int = 2
) -> None:
    """Of two whose copies neither of them keeps."""
    faults = [killed(0, "backward"), killed(second, f"recovery:{state}", None)]
    check_losses(training, faults, 2, folder, saved)


def check_second_death_in_the_new_layout(training: Training, state: str, folder: Path, saved: Saved) -> None:
    """A rank that had not come so far as to have the state gets it from the memory again, in a layout of fewer."""
    running = start(folder, training, inject=[killed(0, "backward")])
    running.wait_for("job_replanned", TIMEOUT_S)
    elastic.inject(running, rank=1, at=f"recovery:{state}")
    job = running.wait(TIMEOUT_S)
    check_fired(job, 2)
    assert job.code == 0, job.explain()
    changes = replanned(job)
    assert len(changes) == 2 and changes[1][1].ranks <= 2, job.explain()
    assert changes[0][0] == changes[1][0], job.explain()
    check_goes_on(job, training, saved, changes)


def check_replaced_in_the_new_layout(training: Training, sizes: Sizes, folder: Path, saved: Saved) -> None:
    """As in any job: the others keep their processes, and the same bits follow."""
    running = started(folder, training)
    assert command(running, sizes, FIRST) == ""
    running.wait_for("recovery_finished", TIMEOUT_S)
    elastic.inject(running, rank=1, at="backward", step=THEN)
    job = running.wait(TIMEOUT_S)
    check_fired(job)
    assert [event["left"] for event in job.of("recovery_finished")] == [[], []], job.explain()
    assert job.of("recovery_finished")[1]["victims"] == [1], job.explain()
    check_goes_on(job, training, saved, [(FIRST, sizes)])


def check_back_to_a_checkpoint(training: Training, folder: Path, saved: Saved) -> None:
    """Two are lost at once that keep each other's copies: what no one has is read from the fallback checkpoint, which
    Megatron's format lets any layout read."""
    options = ["--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-interval", "0.2"]
    running = start(folder / "run", training, *SLOWLY, options=options)
    running.wait_for("checkpoint_saved", TIMEOUT_S)
    running.kill(1, 2)
    job = running.wait(TIMEOUT_S)
    assert job.code == 0, job.explain()
    (fallback,) = job.of("fallback_started")
    (change,) = replanned(job)
    assert change[0] == fallback["version"] > 0 and change[1].ranks <= 2, job.explain()
    check_goes_on(job, training, saved, [change])


def wait_for_version(running: RunningJob, version: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not any(f"state={version} " in log.read_text() for log in running.logs()):
        assert time.monotonic() < deadline, running.wait(1).explain()
        time.sleep(0.05)
