"""What bounds a restore on this host, and what of it an event and the report say."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrecovery import events as ev
from flashrecovery.cli.history import read_history
from flashrecovery.cli.report import restore_lines
from flashrecovery.controller.state.history import HistoryEntry
from flashrecovery.controller.state.nodes import NodeRecord
from flashrecovery.controller.state.restore_plan import RestoreRound
from flashrecovery.observe.facts import RestoreSpeed
from flashrecovery.plan.restore.types import Kind, RestorePlan, Transfer
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.machine_speed import (
    NOT_MEASURED,
    MachineSpeed,
    copy_speed,
    link_speed,
    machine_speed,
    slower,
)
from tests.support.history_samples import FAST, at, kill

GIB = float(1 << 30)


def test_a_host_copies_at_some_speed_and_its_loopback_has_none() -> None:
    found = machine_speed("127.0.0.1")
    assert found.copy > 0 and found.link == 0
    assert copy_speed(nbytes=1 << 12) > 0


@pytest.mark.parametrize(
    ("text", "speed"), [("100000\n", 12.5e9), ("1000\n", 125e6), ("-1\n", 0.0), ("", 0.0), (None, 0.0)]
)
def test_what_a_driver_says_of_its_link(tmp_path: Path, text: str | None, speed: float) -> None:
    if text is not None:
        (tmp_path / "speed").write_text(text)
    assert link_speed(tmp_path) == speed


def test_of_two_hosts_the_slower_one_counts_as_far_as_it_is_known() -> None:
    assert slower(MachineSpeed(5.0, 3.0), MachineSpeed(4.0, 6.0)) == MachineSpeed(4.0, 3.0)
    assert slower(NOT_MEASURED, MachineSpeed(4.0, 6.0)) == MachineSpeed(4.0, 6.0)
    assert slower(MachineSpeed(4.0), MachineSpeed(5.0, 6.0)) == MachineSpeed(4.0, 6.0)


def finished(hosts: dict[int, str]) -> ev.RecoveryFinished:
    """Rank 0 has given 3 bytes to rank 1 and 5 to rank 2."""
    nodes = {
        rank: NodeRecord.of(pb.Register(node=f"n{rank}", host=host, speed=pb.MachineSpeed(copy=9.0 - rank, link=7.0)))
        for rank, host in hosts.items()
    }
    moves = tuple(Transfer("s", version=3, source=0, dest=dest, kind=Kind.LIVE, nbytes=1) for dest in (1, 2))
    done = RestoreRound(3, "", RestorePlan(version=3, transfers=moves, local=(), bytes_on_wire=8, reason=""), (0, 1, 2))
    for rank, nbytes in ((1, 3), (2, 5)):
        done.report(rank, pb.Reply(bytes_received=nbytes))
    entry = HistoryEntry(generation=1, failed_at=0.0, detect_s=0.0)
    entry.add_round(done, nodes)
    return entry.finished_event(1, (0, 1, 2))


def test_an_event_says_what_the_slowest_host_copies_and_the_link_only_between_hosts() -> None:
    here = finished({0: "a", 1: "a", 2: "a"})
    assert (here.bytes, here.rank_bytes, here.copy_speed, here.link_speed) == (8, 5, 7.0, 0.0)
    between = finished({0: "a", 1: "a", 2: "b"})
    assert (between.copy_speed, between.link_speed) == (7.0, 7.0)


def lines(**facts: float) -> list[str]:
    events = [at(0, ev.JobStarted(world_size=4)), *kill(10, 1, 3, 41, FAST | {"restore": 0.5})]
    end = events[-1]
    assert isinstance(end, ev.RecoveryFinished)
    return restore_lines(read_history([*events[:-1], end.model_copy(update=facts)]).recoveries)


def test_the_report_says_what_bounds_a_restore() -> None:
    (link,) = lines(rank_bytes=1 << 30, copy_speed=8 * GIB, link_speed=4 * GIB)
    assert link == "Restore of #1: 2.0 GiB/s to a rank; the network link is made for 4.0 GiB/s, of which this is 50%."
    (copy,) = lines(rank_bytes=1 << 30, copy_speed=8 * GIB)
    assert copy == "Restore of #1: 2.0 GiB/s to a rank; one thread of the host copies 8.0 GiB/s, of which this is 25%."
    assert lines(rank_bytes=1 << 30) == ["Restore of #1: 2.0 GiB/s to a rank."]
    assert not lines(rank_bytes=1 << 20, copy_speed=8 * GIB), "messages take its time"


def test_a_speed_as_json_says_what_bounds_it() -> None:
    known = {"speed": 2.0, "copy_speed": 8.0, "link_speed": 4.0, "bound": 4.0, "bounded_by": "link"}
    assert RestoreSpeed(2.0, 8.0, 4.0).as_dict() == known
    assert RestoreSpeed(2.0, 0.0, 0.0).as_dict()["bounded_by"] == ""
