"""What a process has to do with: the devices that it may open, and its namespaces.

Control groups keep devices apart, and the kernel says "no" when one is opened; the names of control groups do not
matter. So a process of another group may take another's place if it may open what that one may.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

_DEVICES = re.compile(r"nvidia\d+|kfd|accel\d+|davinci\d+|habana\d+")
"""Accelerators: NVIDIA's, AMD's, the kernel's own class, Ascend's, Gaudi's."""
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


@dataclass(frozen=True)
class Surroundings:
    """``devices``: paths; ``namespaces``: as /proc names them."""

    devices: frozenset[str]
    namespaces: frozenset[str]

    @staticmethod
    def own() -> Surroundings:
        """The surroundings of this process."""
        found = [f"/dev/{name}" for name in os.listdir("/dev") if _DEVICES.fullmatch(name)]
        allowed = [path for path in found if os.access(path, os.R_OK | os.W_OK)]
        return Surroundings(frozenset(allowed), frozenset(os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES))

    @staticmethod
    def of(lines: Iterable[str]) -> Surroundings:
        """What :meth:`lines` has given."""
        told = frozenset(lines)
        devices = frozenset(line for line in told if line.startswith("/"))
        return Surroundings(devices, told - devices)

    def lines(self) -> list[str]:
        return sorted(self.devices | self.namespaces)

    def covers(self, other: Surroundings) -> bool:
        """Whether this process can do what the other one can."""
        return self.namespaces == other.namespaces and self.devices >= other.devices
