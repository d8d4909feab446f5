"""One host's side of a launch by ``--hostfile``: starts the host's agent as instructed on standard input.

The agent writes to a file, which is copied to standard output while that has a reader: an agent must outlive the
terminal, and the connection, that it was started from. The line ``stop`` ends it; the end of the input does not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flashrecovery.launchers.remote import ENDED, STOP, UP, HostOrder
from flashrecovery.rpc.token import TOKEN_ENV

_PERIOD_S = 0.1


def main() -> None:
    """Run the agent to its end; the exit code is the agent's."""
    order = HostOrder(**json.loads(sys.stdin.buffer.readline()))
    output = Path(order.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output, "ab") as out:
        begin = out.tell()
        agent = subprocess.Popen(
            [sys.executable, "-m", "flashrecovery.cli.main", "run", "--config", "/dev/stdin", *order.command],
            cwd=order.folder,
            env={**_own_environment(), **order.environment, TOKEN_ENV: order.token},
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with agent.stdin as config:  # type: ignore[union-attr]
            config.write(json.dumps(order.config).encode())
    except BrokenPipeError:
        pass  # it has ended before it read; its exit code says the rest
    shown = _say(f"{UP}\n".encode())
    threading.Thread(target=_listen, args=(agent,), daemon=True, name="stop").start()
    with open(output, "rb") as file:
        file.seek(begin)
        for data in _written(file, agent):
            shown = shown and _say(data)
    _say(f"{ENDED}\n".encode())
    os._exit(agent.returncode if agent.returncode >= 0 else 128 - agent.returncode)  # no flush: the reader may be gone


def _own_environment() -> dict[str, str]:
    """This host's variables, without those that say how to launch: that is said in the order."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "FLASHRECOVERY_RUN_"))}


def _listen(agent: subprocess.Popen[bytes]) -> None:
    """Until the input ends."""
    for line in sys.stdin.buffer:
        if line == STOP and agent.poll() is None:
            agent.send_signal(signal.SIGTERM)


def _written(file: BinaryIO, agent: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """What the agent writes, until it has ended."""
    while True:
        ended = agent.poll() is not None
        data = file.read()
        if data:
            yield data
        elif ended:
            return
        else:
            time.sleep(_PERIOD_S)


def _say(data: bytes) -> bool:
    """Write to standard output. Returns whether it still has a reader."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
