"""The script's process group that carries a recovery's tensors between devices.

It is the first group over all ranks (those of the default group, which is made first) whose backend is NCCL. It exists
in every process, in the same order, and is connected in ``attach`` like every other group. A separate group would cost
the memory of its communicator, and a second or more in every recovery. A recovery's traffic is not the script's: it is
not counted, and no stand-in answers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery.groups import native_build, torch_private
from flashrecovery.groups.accelerator import accelerator
from flashrecovery.groups.registry import groups

DeviceMessage = tuple[torch.Tensor, int]
"""A contiguous tensor, and the rank that it is sent to or received from."""


@dataclass(frozen=True)
class DeviceGroup:
    """``process_group`` over all ranks of the job, and the device on which its communicator is."""

    process_group: Any
    device: torch.device

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` can travel over it from or to its own memory."""
        return accelerator().holds(tensor, self.device)

    def start(self, sends: Sequence[DeviceMessage], receives: Sequence[DeviceMessage]) -> None:
        """Queue messages behind what is on the calling thread's current stream; what is queued there next comes after
        them. Raises DistBackendError if communication has been abandoned."""
        module = native_build.native()
        module.recovery_here(True)
        try:
            work: dist.Work | None = torch_private.send_and_receive(self.process_group, self.device, sends, receives)
            if work is not None:
                work.wait()  # for the stream, not for the host
        finally:
            module.recovery_here(False)


def device_group() -> DeviceGroup | None:
    """The one of this job, to be asked on the thread that has attached the groups; None if this process uses no device,
    or no group of NCCL spans all ranks on it."""
    device = accelerator().current()
    if device is None:
        return None
    living = groups()
    for group in living:
        request = group.request
        if request.sparse or request.kinds.get(device.type) != "nccl" or request.ranks != living[0].request.ranks:
            continue
        if group.size == 1 or group.detached or request.device_id not in (None, device):
            return None
        return DeviceGroup(group.process_group(), device)
    return None
