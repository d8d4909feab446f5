"""NVIDIA's XID numbers: which of them end the use of a GPU, and which are the application's own.

Source: NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors, the catalogue with its resolution buckets), the names
in the driver's ``nverror.h``, and the list of application errors that NVIDIA's k8s-device-plugin leaves out.
FATAL is what the catalogue answers with a reset of the GPU or of the node, or after which the process that used the
GPU is lost anyway. Where the number alone does not tell (NVML hands over no sub-code), it is a warning. The table is
compiled by hand, and the catalogue grows with each GPU generation: compare it with the edition for your GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from flashrecovery.health.findings import Severity


class XidClass(str, Enum):
    """APPLICATION: the process's own fault or a consequence of its end (every SIGKILL makes a 45); not a finding."""

    FATAL = "fatal"
    WARNING = "warning"
    APPLICATION = "application"

    @property
    def severity(self) -> Severity | None:
        return None if self is XidClass.APPLICATION else Severity(self.value)


@dataclass(frozen=True)
class Xid:
    """One number of the catalogue: how bad, and what it says."""

    level: XidClass
    text: str


_F, _W, _A = XidClass.FATAL, XidClass.WARNING, XidClass.APPLICATION

XIDS: Mapping[int, Xid] = MappingProxyType(
    {
        8: Xid(_A, "a channel stood still too long"),
        13: Xid(_A, "graphics engine exception: mostly an illegal instruction or address of a kernel"),
        31: Xid(_A, "GPU memory page fault: an illegal address of a kernel"),
        32: Xid(_W, "corrupted push buffer stream: the bus, the driver, or the application"),
        38: Xid(_W, "driver firmware error"),
        43: Xid(_A, "the driver ended a channel after an error of the application"),
        45: Xid(_A, "the driver cleans up after a process that ended, or after another XID"),
        46: Xid(_F, "the GPU has stopped processing"),
        48: Xid(_F, "uncorrectable (double bit) ECC error"),
        61: Xid(_W, "breakpoint or warning of the internal micro-controller"),
        62: Xid(_F, "the internal micro-controller has halted"),
        63: Xid(_W, "a memory row is to be remapped (or a page was retired); done at the next reset"),
        64: Xid(_F, "remapping a memory row (or retiring a page) has failed"),
        68: Xid(_A, "video processor exception"),
        69: Xid(_A, "graphics engine class error"),
        74: Xid(_F, "NVLink error"),
        79: Xid(_F, "the GPU has fallen off the bus"),
        92: Xid(_W, "many corrected (single bit) ECC errors"),
        94: Xid(_F, "contained ECC error: the process that used the memory is lost"),
        95: Xid(_F, "uncontained ECC error: every process on the GPU is lost"),
        109: Xid(_W, "context switch timeout"),
        110: Xid(_F, "security fault"),
        119: Xid(_F, "the GPU's system processor (GSP) does not answer"),
        120: Xid(_F, "error of the GPU's system processor (GSP)"),
        121: Xid(_W, "chip-to-chip (C2C) link error, corrected"),
        136: Xid(_F, "NVLink training has failed"),
        137: Xid(_W, "a peer's memory cannot be reached through NVLink: mostly its process has ended"),
        140: Xid(_F, "unrecovered ECC error"),
        143: Xid(_F, "the GPU could not be initialised"),
        **{n: Xid(_W, "NVLink error (5th generation); its sub-code tells how bad") for n in range(144, 151)},
        154: Xid(_W, "the driver asks for a recovery action"),
    }
)


def xid(number: int) -> Xid:
    """What the catalogue says of ``number``; a number that the table lacks is a warning."""
    return XIDS.get(number, Xid(_W, "not in the table of XIDs"))
