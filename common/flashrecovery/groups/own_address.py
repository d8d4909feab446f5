"""Where this rank can be reached by the others: as gloo chooses it, which users configure already."""

from __future__ import annotations

import os
import socket
from typing import Any

from flashrecovery.runtime.addresses import is_here

_LOOPBACK = "127.0.0.1"


def own_address(native: Any) -> str:
    """The address at which this rank listens: of the first interface in ``GLOO_SOCKET_IFNAME`` (agents set it), else
    the host name's if that is this host's, else the loopback address, which is enough for one node.

    Raises OSError if that interface has no address.
    """
    interface = next((i for i in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if i), None)
    if interface is not None:
        address = str(native.address_of(interface))
        if not address:
            raise OSError(f"GLOO_SOCKET_IFNAME: the interface {interface!r} has no address on this host")
        return address
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return _LOOPBACK
    return next((str(entry[4][0]) for entry in found if is_here(str(entry[4][0]))), _LOOPBACK)
