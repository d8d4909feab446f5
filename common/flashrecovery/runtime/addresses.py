"""Addresses of this host, as other nodes see it."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct

from flashrecovery.errors import ConfigError

_SIOCGIFADDR = 0x8915


def split_address(text: str, option: str) -> tuple[str, int]:
    """``HOST:PORT``. Raises ConfigError that names ``option``."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{option} {text!r}: HOST:PORT is needed, with a port from 1 to 65535")
    return host.strip("[]"), int(port)


def resolve(host: str, option: str) -> str:
    """The address of ``host``. Raises ConfigError that names ``option``."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as e:
        raise ConfigError(f"{option}: host {host!r} cannot be resolved: {e}") from e


def is_here(address: str) -> bool:
    """Whether ``address`` is one of this host's own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def is_free(address: str, port: int) -> bool:
    """Whether nothing listens on ``port`` of this host's ``address``."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(f"controller {address}:{port}: cannot listen there: {e.strerror}") from e
    return True


def address_towards(host: str, port: int) -> str:
    """This host's own address in the direction of ``host``. Sends nothing. Raises ConfigError if there is no way."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as e:
            raise ConfigError(f"controller {host}:{port}: this host has no route there: {e.strerror}") from e
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Name of the network interface that has the IPv4 ``address``; None if none has."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            try:
                packed = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # this one has no IPv4 address
        if socket.inet_ntoa(packed[20:24]) == address:
            return name
    return None
