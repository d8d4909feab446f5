"""Keeps torch from looking up the host names of its peers.

For its log, torch looks up the host name of every connection to a TCPStore, in the client and in the server, whose only
thread serves no client meanwhile. Where the addresses have no names, or a reply of the name server gets lost, this
takes seconds for each rank that connects (5 s is the resolver's backoff), in the middle of a recovery. torch stops
asking for the whole process once one look-up has failed (``formatSockAddr`` in torch 2.13). So the first one is made to
fail, on a connection of this process to itself.

Also here: the address at which other ranks reach this one (:func:`own_address`), as gloo chooses it.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Any

from flashrecovery.groups.torch_private import TCPStore
from flashrecovery.runtime.addresses import is_here
from flashrecovery.runtime.resolver import without_names

log = logging.getLogger("flashrecovery")

_LIMIT = timedelta(seconds=5)


def stop_asking() -> None:
    """From now on, torch logs addresses in place of names in this process. The call takes milliseconds."""
    with without_names():
        try:
            TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_LIMIT)
        except RuntimeError as e:
            log.warning("torch goes on asking for its peers' names: no connection to 127.0.0.1: %s", e)


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
