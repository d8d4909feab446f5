"""Elastic jobs on Megatron-LM's unmodified loop that go back to a fallback checkpoint some iterations before, or begin
with it, in another number of replicas, and what they are compared with."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashrecovery.redundancy.checkpoint.published import published
from tests.support.elastic_checkpoints import Begin, dead_job, of_ranks, saving, started
from tests.support.elastic_megatron_lm import Resized, Training, check_goes_on_alike, evaluations, logged
from tests.support.jobs import Job, RunningJob, check_clean
from tests.support.megatron_lm_loop import TIMEOUT_S, check_experts_logged, logs_of

SLOWLY = "--step-time=300"
FAR = 6
"""The iteration in which ranks are lost, and from which a recovery in place does not go back to the second one."""


def held(training: Training, folder: Path, *flags: str, kind: str = "", **options: Any) -> RunningJob:
    """A job that is held in iteration :data:`FAR`, and has no other checkpoint than its first one, or its first one
    before a call of this kind. No rank is replaced unless ``elastic`` says otherwise; None: it is not elastic."""
    given = options.pop("elastic", {})
    elastic = {"min": 1, "max": training.launched // training.each, "replace": "never"}
    config: dict[str, Any] = {"elastic": elastic | (given or {}), "timeouts": {"node_wait_s": 3}}
    if given is None:
        config = {"snapshots": {"keep": "never"}}  # else what the dead had is on their node
    config |= saving(folder / "checkpoints")
    running = training.start(folder / "run", SLOWLY, *flags, config=config, **options)
    running.hold(FAR)
    deadline = time.monotonic() + TIMEOUT_S
    while not all(f"state={FAR} " in log.read_text() for log in running.logs()) or not running.logs():
        assert time.monotonic() < deadline and running.popen.poll() is None, running.wait(1).explain()
        time.sleep(0.1)
    time.sleep(3)  # until they are there, and what is being written has been
    _leave(published(folder / "checkpoints"), training, kind)
    return running


def _leave(found: list[tuple[int, Path]], training: Training, kind: str) -> tuple[int, Path]:
    """Remove all of these checkpoints but the first one that is before a call of this kind ("": of any)."""
    left = next(one for one in found if not kind or training.calls[one[0]][0] == kind)
    assert len(found) > 1
    for one in found:
        if one != left:
            shutil.rmtree(one[1])
    return left


def by_ranks(training: Training) -> Begin:
    """As :mod:`tests.support.elastic_checkpoints` starts jobs, which counts ranks."""

    def begin(folder: Path, *flags: str, config: Any, nproc: int, **options: Any) -> RunningJob:
        of_replicas = config
        if "elastic" in config:
            of_replicas = {**config, "elastic": {**config["elastic"], "max": nproc // training.each}}
        return training.start(folder, *flags, config=of_replicas, nproc=nproc, **options)

    return begin


def died_whole(training: Training, folder: Path, kind: str = "") -> int:
    """A job that has died whole, in ``folder / "died"``, and has left one checkpoint, before a call of this kind.
    Returns its version."""
    return _leave(_of_dead(training, folder), training, kind)[0]


def died_with_two(training: Training, folder: Path) -> tuple[int, Path]:
    """A job that has died whole. Returns the version of its newest checkpoint but one, and the newest."""
    *_, (older, _), (_, newest) = _of_dead(training, folder)
    return older, newest


def _of_dead(training: Training, folder: Path) -> list[tuple[int, Path]]:
    return dead_job(folder, nproc=training.launched, checkpoints=6, begin=by_ranks(training))


def goes_on(training: Training, folder: Path, replicas: int) -> Job:
    """A job of that many replicas that is launched to go on from the newest checkpoint."""
    config = {"elastic": {"min": 1, "max": replicas}, **saving(folder / "checkpoints", 1000), "resume": True}
    return training.start(folder / "again", config=config, nproc=replicas * training.each).wait(TIMEOUT_S)


def lost(running: RunningJob, *victims: int) -> Job:
    """These at once. Returns the job at its end."""
    running.kill(*victims)
    running.hold(None)
    return running.wait(TIMEOUT_S)


def fell_far_back(job: Job, training: Training, replicas: int) -> int:
    """To the first checkpoint, of which all were, and on in this size. Returns its version."""
    assert job.code == 0, job.explain()
    call = int(job.of("recovery_finished")[-1]["resume_step"])
    assert call == job.of("fallback_started")[-1]["version"], job.explain()
    assert 0 < call < training.call("train", FAR) - 3, job.explain()
    assert of_ranks(Path(job.of("fallback_started")[-1]["path"])) == training.launched, job.explain()
    sizes = [event["replicas"] for event in job.of("job_resized")] or [training.launched // training.each]
    assert sizes[-1] == replicas, job.explain()
    return call


def check_goes_back(job: Job, training: Training, replicas: int, resized: Resized) -> None:
    """As if that had been commanded."""
    call = fell_far_back(job, training, replicas)
    check_alike(job, resized(training, call, replicas), call, replicas, training)


def check_alike(
    job: Job, other: Job, call: int, replicas: int, training: Training, *, begun: Sequence[Path] = ()
) -> None:
    """From this call on: losses, the whole state, what is logged (also a job that has gone back has logged more before)
    and evaluations. ``begun``: run directories of the jobs that it goes on from."""
    assert job.code == 0, job.explain()
    size = replicas * training.each
    check_goes_on_alike(job, other, call, replicas, training)
    check_experts_logged_from(job, call, replicas, training, begun)
    mine, theirs = logged(job), logged(other)
    printed = {number for number, _ in logs_of(training, str)}
    for number in [number for kind, number in training.calls[call:] if kind == "log" and number in printed]:
        assert len(theirs[number]) == 1 and theirs[number] <= mine[number], (number, mine[number], theirs[number])
    found, expected = evaluations(job), evaluations(other)
    for number in [number for kind, number in training.calls[call:] if kind == "evaluate"]:
        assert found[number, size] == expected[number, size] != set(), (number, found, expected)
    check_clean(job)


def check_experts_logged_from(job: Job, call: int, replicas: int, training: Training, begun: Sequence[Path]) -> None:
    """From this call on, at which the job has got this size."""
    first = next((number for kind, number in training.calls[call:] if kind == "log"), training.iterations)
    check_experts_logged(job, training, training.sizes(call, replicas), begun=begun, first=first)


def check_started(job: Job, call: int, replicas: int, training: Training, folder: Path) -> None:
    """A job of this size that goes on, from this call on, from the checkpoint of one that has died in ``folder``: as
    one that is started in this size from the state of an undisturbed one."""
    before, after = training.launched, replicas * training.each
    other = started(folder, before, training.iteration(call), after, begin=by_ranks(training))
    check_goes_on_alike(job, other, call, replicas, training)
    check_experts_logged_from(job, call, replicas, training, [folder / "died"])
    check_clean(job)
