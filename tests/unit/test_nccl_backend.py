"""How a group's NCCL backend is made, with stand-ins for torch's class and for the device."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashrecovery.groups import torch_private
from flashrecovery.groups.torch_private import GroupRequest, HashStore

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


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        Nccl.current = wanted
        yield
        Nccl.current = None

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
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
