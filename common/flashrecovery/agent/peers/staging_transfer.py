"""Moves state of the old layout between agents while the layout changes: each node reads what it lacks.

The state lies in the memory of the nodes whose ranks wrote it (:mod:`flashrecovery.agent.stores.staging_memory`). An
agent reads what its own workers need from the other agents, once for all workers. It writes them to files with the same
bytes at the same offsets; ranges that no worker here needs stay holes. Agents use their usual connection: both ends
prove that they belong to the job, and the traffic is encrypted (:mod:`flashrecovery.rpc.channel`).
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from flashrecovery.agent.peers.client import NOT_HANDED_OVER, said_by
from flashrecovery.errors import ProtocolError
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import Access, agent_at
from flashrecovery.runtime.environment import STAGING_ELSEWHERE

_DIRECTORY = re.compile(r"[0-9]+(-[0-9]+)*")
_PART_BYTES = 1 << 20
_AT_ONCE = 16
"""The most files that are read at the same time: each takes a separate connection."""


def served(root: Path, read: pb.StagingRead) -> Iterator[pb.StagingPart]:
    """What a rank of this node has written. Raises ProtocolError if it is not there; the other side has no say in
    where else it might be."""
    if not _DIRECTORY.fullmatch(read.directory) or len(read.starts) != len(read.sizes):
        raise ProtocolError(f"no state is kept as {read.directory!r}")
    kind = "data" if read.starts else "index"
    path = root / read.directory / f"rank{read.rank}.{kind}"
    try:
        with path.open("rb") as file:
            ranges = list(zip(read.starts, read.sizes, strict=True)) or [(0, os.fstat(file.fileno()).st_size)]
            for start, nbytes in ranges:
                file.seek(start)
                for part in _sizes(nbytes):
                    data = file.read(part)
                    if len(data) != part:
                        raise ProtocolError(f"{path.name} of {read.directory} is shorter than that")
                    yield pb.StagingPart(data=data)
    except OSError as e:
        raise ProtocolError(f"{path.name} of {read.directory} cannot be read: {e.strerror}") from e
    yield pb.StagingPart(last=True)


def _sizes(nbytes: int) -> Iterator[int]:
    while nbytes > 0:
        part = min(nbytes, _PART_BYTES)
        yield part
        nbytes -= part


class StagingTransfer:
    """The staging transfers of one agent. ``root``: its directory in the node's memory."""

    def __init__(self, root: Path, access: Access) -> None:
        self._root = root
        self._access = access
        self._here: dict[Path, set[tuple[int, int]]] = {}  # what has been read, by file
        self._locks: dict[Path, asyncio.Lock] = {}
        self._some = asyncio.Semaphore(_AT_ONCE)
        self._drops = 0

    async def bring(self, wanted: pb.StagingWanted) -> str:
        """Have all of that in this node's memory. Returns why not; "" if it is there."""
        files = [self._bring(file, wanted.within_s, self._drops, self._some) for file in wanted.files]
        found = await asyncio.gather(*files)
        return "; ".join(text for text in found if text)

    def forget(self) -> None:
        """Forget all reads. A later request reads again, and does not wait for earlier requests: these may be waiting
        for a lost node."""
        self._here, self._locks, self._some = {}, {}, asyncio.Semaphore(_AT_ONCE)

    def dropped(self) -> None:
        """All of it has been removed, and nothing that was asked for before may come any more."""
        self._drops += 1
        self.forget()

    async def _bring(self, file: pb.StagingFile, within_s: float, drops: int, some: asyncio.Semaphore) -> str:
        read = file.read
        if not _DIRECTORY.fullmatch(read.directory):
            return f"no state is kept as {read.directory!r}"
        kind = "data" if read.starts else "index"
        path = self._root / STAGING_ELSEWHERE / read.directory / f"rank{read.rank}.{kind}"
        ranges = list(zip(read.starts, read.sizes, strict=True)) or [(0, 0)]
        try:
            async with self._locks.setdefault(path, asyncio.Lock()), some:
                here = self._here.setdefault(path, set())
                lacking = [one for one in ranges if one not in here]
                if lacking:
                    await self._read(file.peer, read, path, lacking if read.starts else [], within_s, drops)
                    here.update(lacking)
        except NOT_HANDED_OVER as e:
            return f"rank {read.rank}'s, from {file.peer}: {said_by(e)}"
        except OSError as e:
            return f"rank {read.rank}'s, from {file.peer}: {e.strerror or type(e).__name__}"
        return ""

    async def _read(
        self,
        peer: str,
        read: pb.StagingRead,
        path: Path,
        ranges: Sequence[tuple[int, int]],
        within_s: float,
        drops: int,
    ) -> None:
        request = pb.StagingRead(directory=read.directory, rank=read.rank)
        request.starts.extend(start for start, _ in ranges)
        request.sizes.extend(nbytes for _, nbytes in ranges)
        async with self._access.dial(peer, agent_at(peer), within_s) as channel:
            call = rpc.PeerStub(channel).ReadStaging(request, timeout=within_s)
            if not ranges:  # the index: as a whole, or not at all
                whole = b"".join([part async for part in _data(call)])
                self._make_room(path, drops)
                partial = path.with_name(f".{path.name}")
                partial.write_bytes(whole)
                os.replace(partial, path)
                return
            self._make_room(path, drops)
            number = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                await _fill(number, _data(call), ranges)
            finally:
                os.close(number)

    def _make_room(self, path: Path, drops: int) -> None:
        """Raises ProtocolError if it has been dropped since it was asked for: its file would stay for ever."""
        if drops != self._drops:
            raise ProtocolError("it has been dropped meanwhile")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)


async def _data(call: AsyncIterator[pb.StagingPart]) -> AsyncIterator[bytes]:
    """Raises ProtocolError if it does not come to its end: that a stream has ended proves nothing."""
    last = False
    async for part in call:
        last = part.last
        if part.data:
            yield part.data
    if not last:
        raise ProtocolError("it did not come whole")


async def _fill(number: int, parts: AsyncIterator[bytes], ranges: Sequence[tuple[int, int]]) -> None:
    """Write the received parts to these ranges of a file, in order."""
    left = list(ranges)[::-1]
    async for data in parts:
        view = memoryview(data)
        while view:
            if not left:
                raise ProtocolError("more has come than was asked for")
            start, nbytes = left.pop()
            now = view[:nbytes]
            os.pwrite(number, now, start)
            view = view[len(now) :]
            if nbytes > len(now):
                left.append((start + len(now), nbytes - len(now)))
    if left:
        raise ProtocolError("less has come than was asked for")
