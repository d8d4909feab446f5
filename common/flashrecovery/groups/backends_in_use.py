"""Which of torch's backends stand in this process's groups, on which device, and what has chosen that device."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

import torch.distributed as dist

from flashrecovery.groups import torch_private
from flashrecovery.groups.accelerator import accelerator
from flashrecovery.groups.registry import ManagedGroup, groups

GLOO_CLASS = "ProcessGroupGloo"


@dataclass(frozen=True)
class BackendInUse:
    """One kind of inner backend.

    Attributes:
        name: torch's name of it, as ``nccl-legacy``.
        torch_class: as ``ProcessGroupNCCL``.
        device: of its communicators; "" for host memory, or if it is not known yet.
        chosen_by: what has chosen the device, as ``device_id`` or ``LOCAL_RANK``; "" for host memory.
    """

    name: str
    torch_class: str
    device: str = ""
    chosen_by: str = ""


def backends_in_use() -> Counter[BackendInUse]:
    """How many of the script's groups have each kind, also while stand-ins are in them."""
    found: Counter[BackendInUse] = Counter()
    for group in groups():
        if not group.request.sparse:
            found.update(_nccl_of(group) if kind == "nccl" else _GLOO for kind in set(group.request.kinds.values()))
    return found


_GLOO = BackendInUse("gloo", GLOO_CLASS)


def _nccl_of(group: ManagedGroup) -> BackendInUse:
    request = group.request
    device, chosen_by = request.device_id, "device_id"
    if device is None and request.nccl == torch_private.LEGACY:
        device, chosen_by = accelerator().current(), "the current device"
    elif device is None:
        device, chosen_by = getattr(group.process_group(), "bound_device_id", None), device_source()
    name = torch_private.NCCL_CLASSES[request.nccl]
    return BackendInUse(request.nccl, name, "" if device is None else str(device), chosen_by)


def device_source() -> str:
    """What chooses the device of torch's newer NCCL backends where the script names none (see
    :func:`.torch_private.default_device`)."""
    return "LOCAL_RANK" if "LOCAL_RANK" in os.environ else "the global rank"


def what_nccl_means() -> BackendInUse | None:
    """What a group that asks for ``nccl`` gets in a process with this one's environment. None: this torch has no
    NCCL."""
    if not dist.is_nccl_available():
        return None
    name = torch_private.chosen_nccl({"cuda": "nccl"})
    chosen_by = "the current device" if name == torch_private.LEGACY else "LOCAL_RANK"
    return BackendInUse(name, torch_private.NCCL_CLASSES[name], "", f"device_id, else {chosen_by}")
