"""What bounds a transfer of state on this host: how fast one thread copies memory, and what its network link carries.

``flashrecovery report`` and the page show a recovery's speed beside them.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from dataclasses import dataclass
from pathlib import Path

from flashrecovery.runtime.addresses import interface_of

_NBYTES = 32 << 20  # more than most processors keep of it in a core's cache
_COPIES = 3
_MBIT = 1e6 / 8


@dataclass(frozen=True)
class MachineSpeed:
    """In bytes a second. 0: not known.

    Attributes:
        copy: one thread copies memory that has been written to before.
        link: what the network link is made for, as its driver says; a virtual one often says nothing.
    """

    copy: float = 0.0
    link: float = 0.0


NOT_MEASURED = MachineSpeed()


def slower(one: MachineSpeed, other: MachineSpeed) -> MachineSpeed:
    """The slower of two hosts that exchange data, as far as it is known."""
    copies, links = [s for s in (one.copy, other.copy) if s], [s for s in (one.link, other.link) if s]
    return MachineSpeed(min(copies, default=0.0), min(links, default=0.0))


def machine_speed(address: str) -> MachineSpeed:
    """The speed of this host, and of the interface that has its IPv4 ``address``. Takes about 50 ms of a processor, and
    64 MiB of memory for as long."""
    name = interface_of(address)
    return MachineSpeed(copy_speed(), link_speed(Path("/sys/class/net", name)) if name is not None else 0.0)


def copy_speed(nbytes: int = _NBYTES) -> float:
    """Bytes a second that one thread copies: the best of three times, as others run beside it."""
    copy = ctypes.CDLL(None).memcpy  # called without the interpreter's lock
    copy.argtypes, copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p
    took = []
    with mmap.mmap(-1, nbytes) as there, mmap.mmap(-1, nbytes) as here:
        to, source = (ctypes.c_char * nbytes).from_buffer(there), (ctypes.c_char * nbytes).from_buffer(here)
        ctypes.memset(ctypes.addressof(source), 1, nbytes)
        copy(ctypes.addressof(to), ctypes.addressof(source), nbytes)  # now both have their own pages
        for _ in range(_COPIES):
            began = time.perf_counter()
            copy(ctypes.addressof(to), ctypes.addressof(source), nbytes)
            took.append(time.perf_counter() - began)
        del to, source  # an mmap that is in use cannot be closed
    return nbytes / min(took)


def link_speed(interface: Path) -> float:
    """Bytes a second of a network interface, given its directory below /sys/class/net."""
    try:
        megabits = int((interface / "speed").read_text())
    except (OSError, ValueError):  # a loopback interface has none, and one that is down cannot be read
        return 0.0
    return max(0, megabits) * _MBIT
