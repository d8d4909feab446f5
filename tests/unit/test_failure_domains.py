"""What one event takes along, what then is left, and what a job says of that."""

from __future__ import annotations

import ctypes
import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery.config import Settings, run_config
from flashrecovery.errors import ConfigError
from flashrecovery.health import nvlink
from flashrecovery.health.nvlink import NvLinks
from flashrecovery.plan.membership.failure_domains import (
    Kept,
    LossEvent,
    RankLocation,
    labelled_gpus,
    locations,
    may_be_lost_together,
    survival_text,
    survives,
)
from flashrecovery.runtime.environment import GPUS_ENV
from flashrecovery.worker.replication import survival
from flashrecovery.worker.replication.policy import CopyPolicy, PeerProtection

# Two racks of two nodes with four GPUs each, two and two of which are joined.
CLUSTER = locations(16, 4, (0, 0, 1, 1), (0, 0, 1, 1))


def taken(event: LossEvent, rank: int) -> list[int]:
    return [p.rank for p in CLUSTER if may_be_lost_together(CLUSTER[rank], p, event)]


def test_what_goes_with_rank_5() -> None:
    assert taken(LossEvent.RANK, 5) == [5]
    assert taken(LossEvent.GPUS, 5) == [4, 5]
    assert taken(LossEvent.NODE, 5) == [4, 5, 6, 7]
    assert taken(LossEvent.RACK, 5) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_gpu_that_reaches_no_other_goes_alone_and_a_node_without_a_rack_too() -> None:
    where = locations(4, 2, ())
    assert not may_be_lost_together(where[0], where[1], LossEvent.GPUS)
    assert may_be_lost_together(where[0], where[0], LossEvent.GPUS)
    assert may_be_lost_together(where[0], where[1], LossEvent.RACK)
    assert not may_be_lost_together(where[0], where[2], LossEvent.RACK)


def test_ever_larger_events_take_ever_more() -> None:
    for rank in range(16):
        reach = [set(taken(event, rank)) for event in LossEvent]
        assert all(small <= large for small, large in pairwise(reach))


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (Kept((0,)), ""),
        (Kept((0, 1)), "r"),  # DDP on two GPUs of a domain
        (Kept((0, 2)), "rg"),
        (Kept((0, 1), (0, 1), outlives=True), "rg"),  # and snapshots
        (Kept((0, 1), (0, 1)), "r"),  # copies that end with their processes are none
        (Kept((0,), (0, 1), outlives=True), "rg"),
        (Kept((0,), (0, 1)), "r"),
        (Kept((0,), (0, 4)), "rgn"),  # on the next node
        (Kept((0,), (0, 8)), "rgnR"),  # in another rack
        (Kept((0,), (), group=(0, 4, 8), losses=1), "rgn"),
        (Kept((0,), (), group=(0, 1, 8), losses=1), "r"),
        (Kept((0,), (), group=(0, 4, 8, 12), losses=2), "rgnR"),
    ],
)
def test_what_is_left_of_a_shard(kept: Kept, left: str) -> None:
    found = "".join(letter for event, letter in zip(LossEvent, "rgnR", strict=True) if survives(kept, CLUSTER, event))
    assert found == left


def test_what_is_said() -> None:
    assert survival_text({LossEvent.RANK: -1, LossEvent.NODE: -1}) == "survives the loss of a rank, or of a node"
    text = survival_text({LossEvent.RANK: -1, LossEvent.GPUS: 3, LossEvent.NODE: 0})
    assert text == (
        "survives the loss of a rank; not of the GPUs that share NVLink: all that has the state of rank 3, copies "
        "included, may go with it; nor of a node: all that has the state of rank 0, copies included, may go with it (a "
        "checkpoint does)"
    )
    assert survival_text({LossEvent.RANK: 1}).startswith("survives the loss of nothing; not of a rank: ")


@pytest.mark.parametrize("size", [1, 2, 4, 8, 9, 72])
def test_domains_that_divide_a_node_or_are_all_of_it(size: int) -> None:
    config = run_config({"nproc_per_node": 8, "gpu_domain": size}, "test")
    gpus = labelled_gpus(config.settings().gpu_domain, 8)
    assert max(gpus) + 1 == max(8 // size, 1) and gpus == tuple(sorted(gpus))


def test_others_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"gpu_domain = 3: nproc_per_node = 8 is no multiple of it; 1 to 8"):
        run_config({"nproc_per_node": 8, "gpu_domain": 3}, "test")
    with pytest.raises(ConfigError, match="gpu_domain"):
        run_config({"gpu_domain": 0}, "test")


class Shards:
    """The registry of a rank of four, on one node."""

    def __init__(self, *holders: tuple[int, ...], rank: int = 0) -> None:
        self.rank, self.world_size, self.holders = rank, 4, holders

    def tensor_shards(self) -> list[Any]:
        return [SimpleNamespace(name=str(h), holders=h) for h in self.holders]


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setattr(survival.groups, "groups", list)
    return monkeypatch


def label(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    """As a rank finds ``gpu_domain`` in its environment."""
    monkeypatch.setenv(GPUS_ENV, json.dumps(labelled_gpus(size, 4)))


def policy(protection: PeerProtection = PeerProtection.NOTHING) -> CopyPolicy:
    return CopyPolicy(protection, False, False, False, ((0, 1, 2, 3),), "", ())


def said(registry: Any, protection: PeerProtection = PeerProtection.NOTHING, **more: Any) -> str:
    copies = {"own": False, "outlives": False, **more}
    with pytest.MonkeyPatch.context() as monkeypatch:
        label(monkeypatch, copies.pop("gpu_domain", None))
        return survival.say(registry, Settings(), policy(protection), **copies)


def test_nothing_is_asked_in_a_job_without_nccl_and_labels(one_node: pytest.MonkeyPatch) -> None:
    one_node.setattr(survival, "most", lambda numbers: pytest.fail("a collective"))
    one_node.setattr(nvlink, "look", lambda *_: pytest.fail("NVML"))
    assert said(Shards((0, 1, 2, 3))) == ""
    assert not survival.gpus_take_replicas(Shards((0, 1)), Settings())  # type: ignore[arg-type]


def test_replicas_on_gpus_that_are_joined_are_not_enough(one_node: pytest.MonkeyPatch) -> None:
    ddp = Shards((0, 1, 2, 3))
    assert "survives the loss of a rank; not of the GPUs" in said(ddp, gpu_domain=4)
    assert "in one NVLink domain, so that no copy can lie outside of it; --snapshots always" in said(ddp, gpu_domain=4)
    assert "survives the loss of a rank, or of the GPUs" in said(ddp, gpu_domain=2)
    assert "survives the loss of a rank, or of the GPUs" in said(ddp, gpu_domain=4, own=True, outlives=True)


def test_with_nccl_nvml_is_asked(one_node: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(request=SimpleNamespace(kind="nccl"), size=4)
    one_node.setattr(survival.groups, "groups", lambda: [group])
    one_node.setattr(nvlink, "look", lambda environment, ranks: NvLinks((0,) * ranks))
    assert "not of the GPUs that share NVLink" in said(Shards((0, 1, 2, 3)))
    one_node.setattr(nvlink, "look", lambda environment, ranks: nvlink.NONE)
    assert "NVLink" not in said(Shards((0, 1, 2, 3)))


def test_labels_have_copies_made_only_where_they_help(one_node: pytest.MonkeyPatch) -> None:
    def made(*holders: tuple[int, ...], size: int = 2, **more: Any) -> bool:
        settings = Settings.model_validate(more)
        label(one_node, size)
        return survival.gpus_take_replicas(Shards(*holders), settings)  # type: ignore[arg-type]

    assert made((0, 1)) and made((0, 2), (2, 3)) and made((0, 3), size=4)
    assert not made((0, 2)) and not made((0, 1), size=1)
    assert not made((0,)), "what one rank has is copied, or is not, by other settings"
    assert not made((0, 1), elastic={"min": 1, "max": 4})


class Nvml:
    """``joined``: pairs of GPUs. ``fabrics``: (state, cluster, clique) by GPU."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    NVML_GPU_FABRIC_STATE_COMPLETED = 3

    class NVMLError(Exception):
        pass

    class c_nvmlGpuFabricInfo_t(ctypes.Structure):
        _fields_ = (("clusterUuid", ctypes.c_uint8 * 16), ("cliqueId", ctypes.c_uint32), ("state", ctypes.c_uint32))

    def __init__(self, *joined: tuple[int, int], fabrics: dict[int, tuple[int, int, int]] | None = None) -> None:
        self.joined, self.fabrics = joined, fabrics or {}

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, what: int) -> int:
        assert what == self.NVML_P2P_CAPS_INDEX_NVLINK
        if 9 in (one, other):
            raise self.NVMLError
        return 0 if (one, other) in self.joined or (other, one) in self.joined else 1

    def nvmlDeviceGetGpuFabricInfo(self, handle: int, info: Any) -> None:
        if handle not in self.fabrics:
            raise self.NVMLError
        state, cluster, clique = self.fabrics[handle]
        info._obj.state, info._obj.cliqueId = state, clique
        info._obj.clusterUuid[0] = cluster


def test_gpus_are_joined_by_way_of_others() -> None:
    assert nvlink.domains_of(Nvml((0, 1), (1, 2), (4, 5)), range(6)) == (0, 0, 0, -1, 4, 4)
    assert nvlink.domains_of(Nvml(), (3, 4)) == (-1, -1)
    assert nvlink.domains_of(Nvml((3, 4)), (4, 9, 3)) == (0, -1, 0), "by local rank, whatever CUDA shows"


def test_the_fabric_is_a_label_where_all_gpus_are_in_one_and_it_is_complete() -> None:
    name = f"nvlink-07{'00' * 15}.5"
    assert nvlink.fabric_of(Nvml(fabrics={0: (3, 7, 5), 1: (3, 7, 5)}), (0, 1)) == name
    assert nvlink.fabric_of(Nvml(fabrics={0: (3, 7, 5), 1: (3, 7, 6)}), (0, 1)) == ""
    assert nvlink.fabric_of(Nvml(fabrics={0: (2, 7, 5)}), (0,)) == "", "it is being set up"
    assert nvlink.fabric_of(Nvml(fabrics={0: (3, 0, 0)}), (0,)) == "", "HGX without a fabric beyond the node"
    assert nvlink.fabric_of(Nvml(), (0,)) == ""


def test_places_are_of_the_launch() -> None:
    assert locations(4, 2, (0, -1), (5, 5))[3] == RankLocation(3, 1, -1, "5")
