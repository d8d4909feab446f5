"""How a group's NCCL backend is made, with stand-ins for torch's class and for the device."""

from __future__ import annotations

import dataclasses
import datetime
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashrecovery.capabilities.of_torch import NCCL_BY_NAME
from flashrecovery.errors import UnsupportedError
from flashrecovery.groups import torch_private
from flashrecovery.groups.torch_private import LEGACY, GroupRequest, HashStore

TIMEOUT = datetime.timedelta(seconds=10)
REQUEST = GroupRequest("tp", (4, 6), 1, 2, {"cuda": "nccl"}, TIMEOUT, None, None)


class Nccl:
    """ProcessGroupNCCL."""

    current: torch.device | None = None
    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.place, self.options = (rank, size), options
        self.connected: list[tuple[torch.device, torch.device | None]] = []

    def _set_sequence_number_for_group(self) -> None:
        """Over the store."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append((device, self.current))


class Nccl2(Nccl):
    """ProcessGroupNCCL2."""


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        Nccl.current = wanted
        yield
        Nccl.current = None

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL2", Nccl2, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)


def test_with_a_device_it_is_connected_at_once_on_that_one() -> None:
    """Not by its first operation, which nothing could interrupt; and the thread that connects is on GPU 0."""
    gpu = torch.device("cuda", 3)
    backend = torch_private.nccl_backend(HashStore(), REQUEST, TIMEOUT, gpu)
    assert backend.connected == [(gpu, gpu)]
    assert backend.place == (1, 2) and backend.options.global_ranks_in_group == [4, 6]


def test_without_one_it_is_not_connected() -> None:
    assert torch_private.nccl_backend(HashStore(), REQUEST, TIMEOUT, None).connected == []


def test_it_is_never_split_from_another_whose_members_may_be_dead() -> None:
    options = SimpleNamespace(split_from="parent", is_high_priority_stream=True)
    request = GroupRequest("dp", (0, 1), 0, 2, {"cuda": "nccl"}, TIMEOUT, options, None)
    made = torch_private.nccl_backend(HashStore(), request, TIMEOUT, None).options
    assert made.split_from is None and made.is_high_priority_stream and made._timeout == TIMEOUT


# -- which of torch's backends --------------------------------------------------------------------


def test_the_backend_is_the_one_that_was_chosen() -> None:
    request = dataclasses.replace(REQUEST, nccl="nccl2")
    gpu = torch.device("cuda", 3)
    backend = torch_private.nccl_backend(HashStore(), request, TIMEOUT, gpu)
    assert type(backend) is Nccl2 and backend.connected == [(gpu, gpu)]
    assert type(torch_private.nccl_backend(HashStore(), REQUEST, TIMEOUT, gpu)) is Nccl


@pytest.mark.parametrize(("local_rank", "device"), [("5", 1), (None, 2)])  # of 4 GPUs; the global rank is 6
def test_the_newer_one_always_has_a_device(
    local_rank: str | None, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of LOCAL_RANK, or of the global rank, as in torch."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    request = dataclasses.replace(REQUEST, nccl="nccl2")
    gpu = torch.device("cuda", device)
    assert torch_private.nccl_backend(HashStore(), request, TIMEOUT, None).connected == [(gpu, gpu)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UnsupportedError, match="nccl2 needs a GPU"):
        torch_private.nccl_backend(HashStore(), request, TIMEOUT, None)


@pytest.mark.parametrize("kind", ["nccl-legacy", "nccl2", "nccl-lazy"])
def test_a_name_of_its_own_decides(kind: str) -> None:
    assert torch_private.chosen_nccl({"cpu": "gloo", "cuda": kind}) == kind


@pytest.mark.skipif(NCCL_BY_NAME.way is not None, reason="this torch has a table of its backends")
@pytest.mark.parametrize(
    ("value", "has_it", "chosen"), [("1", True, "nccl2"), ("1", False, LEGACY), ("0", True, LEGACY)]
)
def test_before_torch_2_15_nccl_is_the_newer_one_if_the_environment_asks_for_it(
    value: str, has_it: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", value)
    if not has_it:
        monkeypatch.delattr(dist, "ProcessGroupNCCL2")
    assert torch_private.chosen_nccl({"cuda": "nccl"}) == chosen


def test_nccl_is_what_torchs_own_table_says() -> None:
    """torch 2.15: ProcessGroupNCCL2, if the environment has not asked for the older one when torch was imported."""
    if NCCL_BY_NAME.way is None:
        pytest.skip("before torch 2.15")
    code = "from flashrecovery.groups import torch_private; print(torch_private.chosen_nccl({'cuda': 'nccl'}))"
    for value, chosen in (("1", "nccl2"), ("0", LEGACY), ("", "nccl2")):
        environment = {**os.environ, "TORCH_DIST_USE_NCCL2": value}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == chosen
