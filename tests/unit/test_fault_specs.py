"""Faults that are asked for: what can be, and that what would do nothing is refused."""

from __future__ import annotations

import pytest

from flashrecovery.cli.inject import inject
from flashrecovery.config import CORRUPTIBLE, FAULTS, parse_fault
from flashrecovery.controller.state.fault_drills import Asked, FaultDrills
from flashrecovery.errors import ConfigError
from flashrecovery.kinds import FailureKind
from flashrecovery.proto import flashrecovery_pb2 as pb


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_can_be_asked_for_in_every_way(fault: str) -> None:
    at = CORRUPTIBLE if fault == "corrupt" else "backward"
    assert parse_fault(f"rank=1,fault={fault},at={at},step=3").fault == fault
    assert FaultDrills(2).refusal(pb.InjectRequest(rank=1, fault=fault, phase=at)) == ""
    (choices,) = [p.type.to_info_dict()["choices"] for p in inject.params if p.name == "fault"]
    assert fault in choices


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank=1,fault=sigkil", "sigkill"),
        ("rank=1,at=backwards", "did you mean 'backward'"),
        ("rank=1,fault=corrupt,at=backward", f"needs at={CORRUPTIBLE}"),
        ("rank=1,fault=corrupt", f"needs at={CORRUPTIBLE}"),
        ("rank", "is not KEY=VALUE"),
    ],
)
def test_what_would_do_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_fault(text)


def test_a_running_job_refuses_it_too() -> None:
    drills = FaultDrills(2)
    assert "outside the world" in drills.refusal(pb.InjectRequest(rank=2, fault="sigkill"))
    assert "unknown; allowed: sigkill" in drills.refusal(pb.InjectRequest(rank=0, fault="nap"))
    assert f"needs at={CORRUPTIBLE}" in drills.refusal(pb.InjectRequest(rank=0, fault="corrupt", phase="commit"))


def test_only_what_somebody_has_asked_for_is_taken_for_a_drill() -> None:
    """A failure of another kind or in another step is not, whatever its rank is to suffer later."""
    asked = Asked([pb.InjectRequest(rank=1, fault="sigkill", phase="backward", step=7)])
    assert not asked.take(1, FailureKind.EXCEPTION, 7), "the script's own"
    assert not asked.take(1, FailureKind.KILLED, 3), "an out-of-memory killer"
    assert not asked.take(0, FailureKind.KILLED, 7)
    assert [drill.step for drill in asked.missed()] == [7]
    assert asked.take(1, FailureKind.KILLED, 7) and not asked.missed(), "its word may come later"
    assert not asked.take(1, FailureKind.KILLED, 7), "one failure for each"


def test_a_drill_that_says_that_it_strikes_is_known_wherever_that_is() -> None:
    drills = [pb.InjectRequest(rank=0, fault="raise", phase="forward", step=2)]
    asked = Asked(drills)
    assert not asked.take(0, FailureKind.EXCEPTION, 2, "builtins.ValueError")
    asked.fires(0, pb.Fault(fault="raise", phase="forward", step=2))
    assert asked.missed() == [], "it fired, whatever follows"
    assert asked.take(0, FailureKind.EXCEPTION, 9, "somewhere.Wrapped")
    outside = Asked(
        [pb.InjectRequest(rank=0, fault="sigkill"), pb.InjectRequest(rank=0, fault="hang", phase="data", step=-1)]
    )
    assert outside.take(0, FailureKind.KILLED, 40)
    assert not outside.take(0, FailureKind.STOPPED, 40)
    assert outside.take(0, FailureKind.HANG, 41)
