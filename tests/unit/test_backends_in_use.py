"""Which backend stands in the groups: by ``doctor``, in the event log, and by ``flashrecovery groups``."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from flashrecovery import events as ev
from flashrecovery.cli import checks
from flashrecovery.cli.groups import groups as command
from flashrecovery.controller.state.history import group_backends
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.errors import ConfigError
from flashrecovery.groups import torch_private
from flashrecovery.groups.backends_in_use import BackendInUse, backends_in_use
from flashrecovery.groups.torch_private import LEGACY, NCCL2, GroupRequest
from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.support.history_samples import at
from tests.unit.test_report import write_log

GPU = torch.device("cuda", 3)


def _group(nccl: str, device_id: torch.device | None = None, kind: str = "nccl", *, sparse: bool = False) -> object:
    timeout = datetime.timedelta(seconds=1)
    request = GroupRequest("g", (0,), 0, 1, {"cuda": kind}, timeout, None, device_id, sparse, nccl)
    return SimpleNamespace(request=request, process_group=lambda: SimpleNamespace(bound_device_id=GPU))


def test_each_kind_is_told_with_what_has_chosen_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [_group(LEGACY), _group(LEGACY), _group(NCCL2), _group("nccl-lazy", GPU), _group("", kind="gloo")]
    monkeypatch.setitem(backends_in_use.__globals__, "groups", lambda: [*made, _group("", kind="gloo", sparse=True)])
    monkeypatch.setitem(backends_in_use.__globals__, "accelerator", lambda: SimpleNamespace(current=lambda: GPU))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert backends_in_use() == Counter(
        {
            BackendInUse("nccl-legacy", "ProcessGroupNCCL", "cuda:3", "the current device"): 2,
            BackendInUse("nccl2", "ProcessGroupNCCL2", "cuda:3", "LOCAL_RANK"): 1,
            BackendInUse("nccl-lazy", "ProcessGroupNCCLLazy", "cuda:3", "device_id"): 1,
            BackendInUse("gloo", "ProcessGroupGloo"): 1,
        }
    )
    monkeypatch.delenv("LOCAL_RANK")
    (nccl2,) = (one for one in backends_in_use() if one.name == NCCL2)
    assert nccl2.chosen_by == "the global rank"


@pytest.mark.parametrize(("meant", "device"), [(LEGACY, "the current device"), (NCCL2, "LOCAL_RANK")])
def test_the_doctor_says_what_nccl_means(monkeypatch: pytest.MonkeyPatch, meant: str, device: str) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch_private, "chosen_nccl", lambda kinds: meant)
    (finding,) = checks.nccl_backend({"TORCH_DIST_USE_NCCL2": "1"})
    assert finding.found == f"nccl means {torch_private.NCCL_CLASSES[meant]} ({meant}; TORCH_DIST_USE_NCCL2=1)"
    assert finding.meaning == f"its device: device_id, else {device}"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert checks.nccl_backend({})[0].found == "none"


def _record(rank: int, device: str) -> RankRecord:
    record = RankRecord(rank)
    nccl = pb.GroupBackend(name=NCCL2, torch_class="ProcessGroupNCCL2", device=device, chosen_by="LOCAL_RANK", groups=4)
    record.joined(pb.Joined(rank=rank, backends=[nccl, pb.GroupBackend(name="gloo", torch_class="G", groups=1)]))
    return record


def test_the_command_shows_what_the_newest_launch_has_said(tmp_path: Path) -> None:
    found = group_backends([_record(2, "cuda:0"), _record(1, "cuda:1"), _record(0, "cuda:0")])
    assert [(one.name, one.device, one.ranks) for one in found] == [
        ("gloo", "", [0, 1, 2]),
        (NCCL2, "cuda:0", [0, 2]),
        (NCCL2, "cuda:1", [1]),
    ]
    write_log(tmp_path, [at(0, ev.JobStarted(world_size=3)), at(9, ev.JobStarted(world_size=3, backends=found))])
    lines = CliRunner().invoke(command, [str(tmp_path)]).output.splitlines()
    assert [line.split()[0] for line in lines] == ["backend", "gloo", NCCL2, NCCL2]
    assert "host memory" in lines[1] and "ProcessGroupNCCL2" in lines[2] and "ranks 0 and 2" in lines[2]
    said = json.loads(CliRunner().invoke(command, [str(tmp_path), "--json"]).output)
    assert said == [one.model_dump() for one in found]


def test_before_the_first_step_there_is_nothing_to_show(tmp_path: Path) -> None:
    write_log(tmp_path, [at(0, ev.ControllerStarted(world_size=3))])
    with pytest.raises(ConfigError, match="first step"):
        CliRunner().invoke(command, [str(tmp_path)], catch_exceptions=False, standalone_mode=False)
