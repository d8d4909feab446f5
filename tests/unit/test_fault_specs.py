"""Faults that are asked for: what can be, and that what would do nothing is refused."""

from __future__ import annotations

import pytest

from flashrecovery.cli.inject import inject
from flashrecovery.config import CORRUPTIBLE, FAULTS, parse_fault
from flashrecovery.controller.drills import Drills
from flashrecovery.errors import ConfigError
from flashrecovery.proto import flashrecovery_pb2 as pb


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_can_be_asked_for_in_every_way(fault: str) -> None:
    at = CORRUPTIBLE if fault == "corrupt" else "backward"
    assert parse_fault(f"rank=1,fault={fault},at={at},step=3").fault == fault
    assert Drills(2).refusal(pb.InjectRequest(rank=1, fault=fault, phase=at)) == ""
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
    drills = Drills(2)
    assert "outside the world" in drills.refusal(pb.InjectRequest(rank=2, fault="sigkill"))
    assert "unknown; allowed: sigkill" in drills.refusal(pb.InjectRequest(rank=0, fault="nap"))
    assert f"needs at={CORRUPTIBLE}" in drills.refusal(pb.InjectRequest(rank=0, fault="corrupt", phase="commit"))
