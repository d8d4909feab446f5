"""The megatron-core example; rank 1 dies in the exchange of neighbour copies, which are sent as between hosts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

import fr_megatron  # noqa: F401 - first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import pretrain_gpt
from flashrecovery import init
from flashrecovery.redundancy.memory.neighbor_copy import NeighbourCopies
from flashrecovery.snapshot import memory

FATAL = 5
_receive_header = NeighbourCopies._receive_header


def _die_in_the_middle(self: NeighbourCopies, version: int, *args: Any) -> Any:
    """Own frame, header and tensors are under way; of the other's, the frame is there."""
    if version == FATAL:
        os.kill(os.getpid(), signal.SIGKILL)
    return _receive_header(self, version, *args)


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    memory.host_id = lambda: rank
    if rank == 1 and init().generation == 0:
        NeighbourCopies._receive_header = _die_in_the_middle  # type: ignore[method-assign]
    pretrain_gpt.main()
