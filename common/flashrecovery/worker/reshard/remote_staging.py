"""A worker's way to what ranks of the old layout have written on other nodes: its agent brings it here.

A worker has no network connections except its process groups, but the agents know and authenticate each other. So the
worker says which parts of which files it needs; its agent gets them from the others' agents into the memory of this
node, once for all workers here.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashrecovery.errors import RestoreError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.environment import STAGING_ELSEWHERE

_LOOK_S = 0.05
_numbers = itertools.count(1)


@dataclass(frozen=True)
class AgentStaging:
    """A worker's way to its agent, which brings what other nodes have.

    Attributes:
        answers: of the agent, as they come.
        called_off: this worker has been asked to stop.
    """

    send: Callable[[pb.FromWorker], None]
    answers: queue.Queue[pb.StagingThere]
    called_off: Callable[[], bool]


class Fetched:
    """What a change of the layout has left on other nodes:
    :class:`~flashrecovery.redundancy.memory.staged_files.Elsewhere`."""

    def __init__(self, root: Path, place: pb.StagingPlace, agent: AgentStaging, within_s: float) -> None:
        """
        Args:
            root: of this node's agent.
            within_s: so long it may take, all together.
        """
        own = root / place.directory
        self._peers = {
            source.rank: source.peer for source in place.sources if not (own / f"rank{source.rank}.index").exists()
        }
        self.ranks = frozenset(self._peers)
        self.directory = root / STAGING_ELSEWHERE / place.directory
        self._name = place.directory
        self._agent = agent
        self._until = time.monotonic() + within_s

    def bring(self, wanted: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Raises RestoreError."""
        message = pb.StagingWanted(number=next(_numbers), within_s=max(self._until - time.monotonic(), 0.0))
        for rank, ranges in wanted.items():
            read = pb.StagingRead(directory=self._name, rank=rank)
            read.starts.extend(start for start, _ in ranges)
            read.sizes.extend(nbytes for _, nbytes in ranges)
            message.files.add(peer=self._peers[rank], read=read)
        self._agent.send(pb.FromWorker(staging_wanted=message))
        error = self._answer(message.number)
        if error:
            raise RestoreError(f"what ranks have written on other nodes did not come: {error}")

    def _answer(self, number: int) -> str:
        while time.monotonic() < self._until:
            if self._agent.called_off():
                return "this worker has been asked to stop"
            try:
                answer = self._agent.answers.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if answer.number == number:
                return answer.error
        return "not in time (timeouts.restore_s)"
