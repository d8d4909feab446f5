"""The resolver of this process, without its name servers for a while (:mod:`flashrecovery.groups.peer_names` says why).
Nothing here needs torch."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("flashrecovery")

_NSCOUNT = 16
"""The offset of the number of name servers in glibc's ``struct __res_state``, as <resolv.h> says: after two ints and an
unsigned long, on 64-bit machines."""
_MOST_SERVERS = 3


@contextmanager
def without_names() -> Iterator[None]:
    """The first connection of a TCPStore that is made in here is the last one whose peer's name is asked for."""
    servers = _name_servers()
    if servers is None:
        log.debug("no glibc: torch goes on asking for its peers' names")
        yield
        return
    before, servers.value = servers.value, 0
    try:
        with _unsaid():
            yield
    finally:
        servers.value = before


def _name_servers() -> ctypes.c_int | None:
    """How many the resolver of this thread has; None where it is not glibc's."""
    libc = ctypes.CDLL(None)
    try:
        state, init = libc.__res_state, libc.__res_init
    except AttributeError:
        return None
    init()
    state.restype = ctypes.c_void_p
    found = ctypes.c_int.from_address(state() + _NSCOUNT)
    return found if 0 <= found.value <= _MOST_SERVERS else None


@contextmanager
def _unsaid() -> Iterator[None]:
    """torch's warning that it could not learn a name."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
