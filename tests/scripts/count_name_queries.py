"""Connects TCPStores while it is the name server itself, and prints how many names were asked for meanwhile: by torch
alone, by a server of flashrecovery's, and by connections within a rank, each in a process that is forked for it.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing

from flashrecovery.agent.stores.store import StoreServer
from flashrecovery.groups.peer_names import stop_asking
from flashrecovery.groups.torch_private import TCPStore

NO_SUCH_NAME = bytes([0x81, 0x83])


class NameServer(threading.Thread):
    """Knows no name, and counts."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.asked = 0
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 53))

    def run(self) -> None:
        while True:
            query, client = self.socket.recvfrom(4096)
            self.asked += 1
            self.socket.sendto(query[:2] + NO_SUCH_NAME + query[4:], client)


def connect(port: int) -> None:
    for _ in range(3):
        TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("key", "value")


def count(how: str) -> None:
    names = NameServer()
    names.start()
    if how != "torch":
        stop_asking()
    if how == "server":
        with closing(StoreServer("127.0.0.1", 0)) as server:
            connect(server.port)
            names.asked = 0  # in the background it may have begun to ask when it connected to itself
            connect(server.port)
    else:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        connect(server.port)
    print(how, names.asked, flush=True)


def main() -> None:
    for how in ("torch", "server", "rank"):
        child = os.fork()
        if child == 0:
            return count(how)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
