"""Whether the state fits into the nodes' memory while the parallel layout changes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

COPIES = 2
"""Number of nodes that have each shard in memory, if it is on that many: one of them may be lost."""
_ALLOWED = (
    "allowed: a larger /dev/shm (docker run --shm-size, an emptyDir with medium: Memory in Kubernetes, mount -o "
    "remount,size=), or no --parallelism"
)


@dataclass(frozen=True, slots=True)
class StagingRoom:
    """Bytes of a job's state, each shard once, which its nodes keep when the layout changes.

    Attributes:
        now: as it is before the first step.
        expected: with what optimizers are about to make.
        nodes: with ranks.
        free: that the node with least has free in ``/dev/shm``.
        free_in_all: that all nodes have free there.
    """

    now: int
    expected: int
    nodes: int
    free: int
    free_in_all: int

    @property
    def refusal(self) -> str:
        """Why the layout can never change: there is more of it than all nodes have room for. Empty if it
        can."""
        return self._lacking(self.now) if self.now > self.free_in_all else ""

    @property
    def warning(self) -> str:
        """Why it cannot change once optimizers have made their state, if all nodes keep equally much of it, and each
        shard, or a copy of it, is on several nodes, where there are several. Empty if it can."""
        return self._lacking(self.expected * min(COPIES, self.nodes))

    def _lacking(self, nbytes: int) -> str:
        each = -(-nbytes // max(self.nodes, 1))
        if each <= self.free:
            return ""
        return (
            f"parallelism: while the layout changes, the state is in the nodes' memory (/dev/shm): {_size(each)} on a "
            f"node, and {_size(self.free)} are free on the node with least; {_ALLOWED}"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"
