"""Which GPUs are joined by NVLink, as NVML says: within a node, and beyond it (a rack of NVL72)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrecovery.health.gpu import visible
from flashrecovery.health.nvidia import open_nvml, uuid_of


@dataclass(frozen=True)
class NvLinks:
    """The NVLinks of one node.

    Attributes:
        domains: by local rank, a number for the GPUs that reach each other by NVLink; -1: its GPU reaches none.
        fabric: the part of an NVLink fabric beyond the node to which its GPUs belong (cluster and clique); "": none.
    """

    domains: tuple[int, ...] = ()
    fabric: str = ""


NONE = NvLinks()


def look(environment: Mapping[str, str], local_ranks: int) -> NvLinks:
    """``environment``: of the agent or a rank. Nothing is found without nvidia-ml-py, a driver or GPUs, nor where NVML
    cannot be asked: the device plugin reports that."""
    try:
        import pynvml
    except ImportError:
        return NONE
    try:
        nvml = open_nvml()
    except pynvml.NVMLError:
        return NONE
    if nvml is None:
        return NONE
    try:
        uuids = [uuid_of(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        indices = visible(environment.get("CUDA_VISIBLE_DEVICES"), uuids)[:local_ranks]
        return NvLinks(domains_of(nvml, indices), fabric_of(nvml, indices))
    except pynvml.NVMLError:
        return NONE
    finally:
        nvml.nvmlShutdown()


def domains_of(nvml: Any, indices: Sequence[int]) -> tuple[int, ...]:
    """See :class:`NvLinks`. ``indices``: NVML's, of each local rank's GPU. A pair that cannot be asked is not
    joined."""
    number = list(range(len(indices)))
    for one in range(len(indices)):
        for other in range(one):
            if number[one] != number[other] and _joined(nvml, indices[one], indices[other]):
                number = [number[other] if known == number[one] else known for known in number]
    return tuple(known if number.count(known) > 1 else -1 for known in number)


def _joined(nvml: Any, one: int, other: int) -> bool:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in (one, other)]
    try:
        status = nvml.nvmlDeviceGetP2PStatus(*handles, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def fabric_of(nvml: Any, indices: Sequence[int]) -> str:
    """See :class:`NvLinks`. "" also where the GPUs of the node are not all in one."""
    found = {_fabric(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in indices}
    return found.pop() if len(found) == 1 else ""


def _fabric(nvml: Any, handle: Any) -> str:
    if not hasattr(nvml, "nvmlDeviceGetGpuFabricInfo"):  # an older nvidia-ml-py
        return ""
    info = nvml.c_nvmlGpuFabricInfo_t()
    try:
        nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    except nvml.NVMLError:
        return ""
    uuid = bytes(info.clusterUuid)
    if info.state != nvml.NVML_GPU_FABRIC_STATE_COMPLETED or not any(uuid):
        return ""
    return f"nvlink-{uuid.hex()}.{info.cliqueId}"
