"""Process that hosts the TCPStore (see :mod:`flashrecovery.agent.store`); dies with its agent."""

from __future__ import annotations

import signal
import sys

from flashrecovery.process_control import die_with_parent


def main() -> None:
    fd, port, parent = (int(a) for a in sys.argv[1:4])
    die_with_parent(parent)
    from flashrecovery.groups.peer_names import without_names
    from flashrecovery.groups.torch_private import TCPStore

    with without_names():  # it connects to itself first
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=True, master_listen_fd=fd)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del store


if __name__ == "__main__":
    main()
