"""The comparison that the loop tests rest on finds what it must find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.proof import MOMENTS, Kill
from tests.support.jobs import Job, read_digests
from tests.support.loops import ROTATIONS, check_loop, from_the_start, rotated

SHA = "ab" * 32
LINES = [f"rank=0 step={step} batch=b rate=0x1p-7 loss_hex=0x1.{step}p-3" for step in range(3)]
END = [f"end rank=0 part=parameters {SHA}", f"digest rank=0 {SHA}"]
KILL = Kill(0, 1, "backward", 0)
RECOVERED = {"event": "recovery_finished", "victims": [0], "resume_step": 1, "generation": 1}
MAIN = [*LINES, *END]
DIED = [LINES[0], LINES[1], f"killed {KILL}", *LINES[1:], *END]
START_AGAIN = {"event": "notice", "kind": "start_again", "generation": 1, "text": "no rank holds any state"}
EVENTS = [
    {"event": "job_started"},
    {"event": "failure_detected", "step": 1, "kind": "killed"},
    {"event": "recovery_started", "victims": [0]},
]


def _job(folder: Path, lines: list[str], events: list[dict[str, Any]] | None = None, code: int = 0) -> Job:
    logs = folder / "logs"
    logs.mkdir(parents=True)
    # the victim's lines end with its kill, and its replacement's follow
    end = len(DIED) - len(MAIN) + 1 if len(lines) > len(MAIN) else len(lines)
    for generation, part in enumerate((lines[:end], lines[end:])):
        (logs / f"rank0.gen{generation}.log").write_text("\n".join(part) + "\n")
    job = Job(
        code=code, output="", run_dir=folder, seconds=1.0, marker="no-such-marker", events=[*EVENTS, *(events or [])]
    )
    read_digests(job, logs.glob("*"))
    return job


def _without(lines: list[str], text: str) -> list[str]:
    return [line for line in lines if text not in line]


def _instead(lines: list[str], old: str, new: str) -> list[str]:
    return [line.replace(old, new) for line in lines]


def test_a_job_that_is_the_same(tmp_path: Path) -> None:
    check_loop(_job(tmp_path / "job", DIED, [RECOVERED]), _job(tmp_path / "reference", MAIN), [KILL])


@pytest.mark.parametrize(
    ("change", "events", "code"),
    [
        pytest.param(lambda lines: _without(lines, "killed"), [RECOVERED], 0, id="the kill did not fire"),
        pytest.param(lambda lines: lines, [], 0, id="no recovery"),
        pytest.param(lambda lines: lines, [RECOVERED | {"victims": [1]}], 0, id="another victim"),
        pytest.param(lambda lines: lines, [RECOVERED | {"victims": [0, 1]}], 0, id="a victim more"),
        pytest.param(lambda lines: lines, [RECOVERED | {"resume_step": 0}], 0, id="an older step"),
        pytest.param(lambda lines: lines, [RECOVERED | {"resume_step": 2}], 0, id="a step too late"),
        pytest.param(
            lambda lines: lines, [RECOVERED, {"event": "fallback_started", "version": 0}], 0, id="from a checkpoint"
        ),
        pytest.param(lambda lines: lines, [RECOVERED, START_AGAIN], 0, id="from the beginning"),
        pytest.param(lambda lines: lines, [RECOVERED], 1, id="it failed"),
        pytest.param(lambda lines: _without(lines, "step=2"), [RECOVERED], 0, id="a step is missing"),
        pytest.param(lambda lines: _instead(lines, "1.2p-3", "1.3p-3"), [RECOVERED], 0, id="another loss"),
        pytest.param(lambda lines: _instead(lines, "batch=b", "batch=c"), [RECOVERED], 0, id="another batch"),
        pytest.param(lambda lines: _instead(lines, "0x1p-7", "0x1p-8"), [RECOVERED], 0, id="another learning rate"),
        pytest.param(lambda lines: _instead(lines, f"rs {SHA}", f"rs {'cd' * 32}"), [RECOVERED], 0, id="another end"),
        pytest.param(lambda lines: _without(lines, "part="), [RECOVERED], 0, id="no end"),
    ],
)
def test_what_must_be_found(
    change: Callable[[list[str]], list[str]], events: list[dict[str, Any]], code: int, tmp_path: Path
) -> None:
    job = _job(tmp_path / "job", change(DIED), events, code)
    with pytest.raises(AssertionError):
        check_loop(job, _job(tmp_path / "reference", MAIN), [KILL])


def test_a_reference_that_lacks_a_step_proves_nothing(tmp_path: Path) -> None:
    job = _job(tmp_path / "job", _without(DIED, "step=1"), [RECOVERED])
    with pytest.raises(AssertionError):
        check_loop(job, _job(tmp_path / "reference", _without(MAIN, "step=1")), [KILL])


def test_the_rotations_are_the_whole_product() -> None:
    jobs = [rotated(rotation, every=3, world=3) for rotation in range(ROTATIONS)]
    assert {(kill.moment, kill.rank) for job in jobs for kill in job} == {(m, r) for m in MOMENTS for r in range(3)}
    assert {job[0].moment for job in jobs} == set(MOMENTS)
    for job in [*jobs, from_the_start(17)]:
        assert [kill.generation for kill in job] == list(range(len(MOMENTS)))
        assert len({kill.moment for kill in job}) == len(MOMENTS)
        steps = [kill.step for kill in job]
        assert steps == sorted(set(steps))
