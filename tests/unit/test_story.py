"""``flashrecovery story``: what one rank went through, as the event log has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashrecovery import events as ev
from flashrecovery.cli.story import story as command
from flashrecovery.errors import ConfigError
from flashrecovery.observe.story import story
from tests.support.history_samples import at, two_recoveries
from tests.unit.test_report import write_log


def texts(events: list[ev.Event], rank: int) -> list[str]:
    return [passage.text for passage in story(events, rank)]


def test_a_victim_fails_is_replaced_and_goes_on() -> None:
    found = [text for text in texts(two_recoveries(), 3) if not text.startswith("  ")]
    assert any(text.startswith("failed in step") and "detected after" in text for text in found)
    assert "recovery: it is replaced (killed)" in found
    assert any(text.startswith("its replacement goes on at step") for text in found)
    assert any(text.startswith("recovery: it is stopped, because of rank 1") for text in found), "the second one"


def test_a_survivor_is_stopped_and_goes_on() -> None:
    found = texts(two_recoveries(), 0)
    assert not any(text.startswith("failed") for text in found)
    assert sum(text.startswith("recovery: it is stopped") for text in found) == 2
    assert sum(text.startswith("goes on at step") for text in found) == 2


def test_who_leaves_and_who_joins() -> None:
    events: list[ev.Event] = [
        at(0, ev.JobStarted(world_size=4)),
        at(5, ev.JobResized(generation=1, step=9, before=4, replicas=3, ranks=[0, 1, 2], left=[3])),
        at(9, ev.JobResized(generation=2, step=20, before=3, replicas=4, ranks=[0, 1, 2, 3], came=[3])),
    ]
    assert texts(events, 3)[1:] == [
        "leaves the job at step 9: 4 -> 3 replicas",
        "joins the job at step 20: 3 -> 4 replicas",
    ]
    assert texts(events, 0)[1] == "goes on at step 9: 4 -> 3 replicas"


def test_a_victim_that_nobody_replaces() -> None:
    finished = ev.RecoveryFinished(generation=1, resume_step=7, victims=[1], left=[1], total_s=0.2, reason="all")
    assert texts([at(0, ev.JobStarted(world_size=2)), at(1, finished)], 1)[1] == (
        "is not replaced: the job goes on at step 7 without it"
    )


def test_the_command(tmp_path: Path) -> None:
    write_log(tmp_path, two_recoveries())
    plain = CliRunner().invoke(command, [str(tmp_path), "--rank", "3"])
    assert plain.exit_code == 0 and "its replacement goes on" in plain.output
    lines = CliRunner().invoke(command, [str(tmp_path), "--rank", "3", "--json"]).output.splitlines()
    found = [json.loads(line) for line in lines]
    assert [entry["seconds"] for entry in found] == sorted(entry["seconds"] for entry in found)
    assert len(found) == len(plain.output.splitlines())
    wrong = CliRunner().invoke(command, [str(tmp_path), "--rank", "9"])
    assert isinstance(wrong.exception, ConfigError) and "allowed: 0 to 3" in str(wrong.exception)


@pytest.mark.parametrize("rank", range(4))
def test_every_recovery_is_in_every_story(rank: int) -> None:
    assert sum("recovery:" in text for text in texts(two_recoveries(), rank)) == 2
