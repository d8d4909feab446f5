"""The job's token, which a process must know to speak to controller and agents.

Both sides of every connection prove that they know it (:mod:`.handshake`), without ever sending it. A job on one node
makes its own; nodes of one job must be given the same one, by the environment variable or a file, as schedulers pass
secrets. What this does not protect (PyTorch's own TCPStore and gloo, reading along without TLS) is in docs/security.md.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from pathlib import Path

from flashrecovery.errors import ConfigError

TOKEN_ENV = "FLASHRECOVERY_TOKEN"
SHORTEST_TOKEN = 16


def new_token() -> str:
    return secrets.token_hex(16)


def job_token(file: Path | None, *, host: str) -> str:
    """The token that the nodes of a job share. ``host``: where its controller listens.

    Raises:
        ConfigError: none is given although others could reach ``host``, or it is too short.
    """
    if file is not None:
        try:
            token = file.read_text().strip()
        except OSError as e:
            raise ConfigError(f"--token-file {file}: {e.strerror}") from e
        where = f"--token-file {file}"
    else:
        token, where = os.environ.get(TOKEN_ENV, "").strip(), TOKEN_ENV
    if not token and is_loopback(host):
        return ""
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(
            f"{where}: a token of at least {SHORTEST_TOKEN} characters is needed where others can reach the controller "
            f"({host}), the same on every node, but this one has {len(token)}. One way to make it: "
            f"export {TOKEN_ENV}=$(python -c 'import secrets; print(secrets.token_hex(16))')"
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host`` (a name or an address)."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in found)
