"""State of the old layout goes from agent to agent: all that was asked for, to those that belong to the job only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from flashrecovery.agent.peers.staging_transfer import StagingTransfer, served
from flashrecovery.errors import ProtocolError, RestoreError
from flashrecovery.plan.reshard.boxes import Box
from flashrecovery.plan.reshard.logical import LogicalPart
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy.memory.staged_files import StagedFiles, Wanted, write
from flashrecovery.rpc.channel import Access
from tests.support.peers import peer_service
from tests.unit.test_logical import SHAPES, shard, whole

ACCESS, STRANGER = Access("the-token-of-this-test-job"), Access("another-token-of-this-length")


def with_peer(use: Callable[[str, Path], Awaitable[None]], tmp_path: Path) -> None:
    """``use`` gets the address of another node's agent, and its directory, in which rank 3 has written."""

    async def main() -> None:
        root = tmp_path / "there"
        (root / "5-1-7").mkdir(parents=True)
        (root / "5-1-7" / "rank3.data").write_bytes(os.urandom(3 << 20))
        (root / "5-1-7" / "rank3.index").write_bytes(b"the index")
        (root / "secret").write_bytes(b"secret")
        peer = peer_service(ACCESS, staging=root)
        await peer.start("127.0.0.1")
        try:
            await use(f"127.0.0.1:{peer.port}", root)
        finally:
            await peer.stop()

    asyncio.run(main())


def wanted(peer: str, *ranges: tuple[int, int], directory: str = "5-1-7", rank: int = 3) -> pb.StagingWanted:
    read = pb.StagingRead(directory=directory, rank=rank, starts=[s for s, _ in ranges], sizes=[n for _, n in ranges])
    return pb.StagingWanted(number=1, within_s=10.0, files=[pb.StagingFile(peer=peer, read=read)])


def test_parts_lie_where_they_do_there(tmp_path: Path) -> None:
    async def use(peer: str, root: Path) -> None:
        transfer = StagingTransfer(tmp_path / "here", ACCESS)
        assert await transfer.bring(wanted(peer)) == ""
        ranges = ((64, 100), (1 << 20, (1 << 20) + 1), (3 << 20) - 5 and ((3 << 20) - 5, 5))
        twice = [transfer.bring(wanted(peer, *ranges)), transfer.bring(wanted(peer, ranges[1], (200, 8)))]
        assert await asyncio.gather(*twice) == ["", ""]
        mine, theirs = tmp_path / "here" / "elsewhere" / "5-1-7", root / "5-1-7"
        assert (mine / "rank3.index").read_bytes() == b"the index"
        there, here = (theirs / "rank3.data").read_bytes(), (mine / "rank3.data").read_bytes()
        assert len(here) == len(there)
        for start, nbytes in (*ranges, (200, 8)):
            assert here[start : start + nbytes] == there[start : start + nbytes]
        assert here[300:4000] == bytes(3700)  # what no one has asked for is not sent

    with_peer(use, tmp_path)


@pytest.mark.parametrize(
    ("ranges", "directory", "rank", "said"),
    [
        ([(3 << 20, 1)], "5-1-7", 3, "not_found"),
        ([(0, 8)], "5-1-7", 2, "not_found"),
        ([], "5-1-8", 3, "not_found"),
        ([], "..", 3, "no state is kept as '..'"),
        ([], "5-1-7/../../there", 3, "no state is kept"),
    ],
)
def test_what_is_not_there(
    ranges: Sequence[tuple[int, int]], directory: str, rank: int, said: str, tmp_path: Path
) -> None:
    async def use(peer: str, root: Path) -> None:
        transfer = StagingTransfer(tmp_path / "here", ACCESS)
        found = await transfer.bring(wanted(peer, *ranges, directory=directory, rank=rank))
        assert said in found, found
        assert await transfer.bring(wanted(peer, (0, 8))) == ""  # it has not taken harm

    with_peer(use, tmp_path)


def test_a_request_cannot_lead_out_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "rank3.index").write_bytes(b"not yours")
    (tmp_path / "root").mkdir()
    for name in ("..", "../", "", "/", "1-2/..", "1-2\n"):
        with pytest.raises(ProtocolError, match="no state is kept"):
            list(served(tmp_path / "root", pb.StagingRead(directory=name, rank=3)))


def test_strangers_get_nothing_and_nobody_is_an_error(tmp_path: Path) -> None:
    async def use(peer: str, root: Path) -> None:
        found = await StagingTransfer(tmp_path / "here", STRANGER).bring(wanted(peer, (0, 8)))
        assert "does not know this job's token" in found
        assert not list((tmp_path / "here").rglob("rank*"))
        found = await StagingTransfer(tmp_path / "here", ACCESS).bring(wanted("127.0.0.1:1", (0, 8)))
        assert "rank 3's, from 127.0.0.1:1: " in found

    with_peer(use, tmp_path)


def test_what_has_been_dropped_is_read_again(tmp_path: Path) -> None:
    async def use(peer: str, root: Path) -> None:
        transfer = StagingTransfer(tmp_path / "here", ACCESS)
        assert await transfer.bring(wanted(peer, (0, 8))) == ""
        mine = tmp_path / "here" / "elsewhere" / "5-1-7" / "rank3.data"
        mine.unlink()
        transfer.forget()
        assert await transfer.bring(wanted(peer, (0, 8))) == "" and mine.exists()

    with_peer(use, tmp_path)


def test_what_has_come_damaged_is_read_again_in_the_next_try(tmp_path: Path) -> None:
    async def use(peer: str, root: Path) -> None:
        transfer = StagingTransfer(tmp_path / "here", ACCESS)
        assert await transfer.bring(wanted(peer, (64, 8))) == ""
        mine = tmp_path / "here" / "elsewhere" / "5-1-7" / "rank3.data"
        mine.write_bytes(bytes(72))
        assert await transfer.bring(wanted(peer, (64, 8))) == "" and mine.read_bytes() == bytes(72)  # it is here
        transfer.forget()
        assert await transfer.bring(wanted(peer, (64, 8))) == ""
        assert mine.read_bytes()[64:] == (root / "5-1-7" / "rank3.data").read_bytes()[64:72]

    with_peer(use, tmp_path)


def test_the_next_try_does_not_wait_for_a_node_that_is_lost(tmp_path: Path) -> None:
    """It does not answer, and the readers of the try before, which have ended, still wait for it."""

    async def use(peer: str, root: Path) -> None:
        transfer = StagingTransfer(tmp_path / "here", ACCESS)
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        message = wanted(f"127.0.0.1:{port}", (0, 8), rank=100)
        message.files.extend(wanted(f"127.0.0.1:{port}", rank=rank).files[0] for rank in range(101, 130))
        message.files.extend(wanted(peer, (0, 8)).files)  # waits for its turn
        before = asyncio.create_task(transfer.bring(message))
        await asyncio.sleep(0.2)
        transfer.forget()
        assert await asyncio.wait_for(transfer.bring(wanted(peer, (0, 8))), 3.0) == ""
        before.cancel()
        silent.close()

    with_peer(use, tmp_path)


@pytest.mark.parametrize("ranges", [[], [(0, 8)]])
def test_nothing_comes_after_it_has_been_dropped(ranges: Sequence[tuple[int, int]], tmp_path: Path) -> None:
    """The agent that had asked may have died: no process would ever remove it."""

    async def use(peer: str, root: Path) -> None:
        transfer = StagingTransfer(tmp_path / "here", ACCESS)
        asked = asyncio.create_task(transfer.bring(wanted(peer, *ranges)))
        await asyncio.sleep(0)
        transfer.dropped()
        assert "it has been dropped meanwhile" in await asked
        assert not (tmp_path / "here").exists()
        assert await transfer.bring(wanted(peer, *ranges)) == ""

    with_peer(use, tmp_path)


def test_not_all_are_asked_at_once(tmp_path: Path) -> None:
    """A job of thousands of ranks has as many files, and each takes a connection."""
    open_now, most = 0, 0

    class Counting(StagingTransfer):
        async def _read(self, *_: object) -> None:
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            await asyncio.sleep(0)
            open_now -= 1

    async def main() -> None:
        message = pb.StagingWanted(within_s=10.0)
        for rank in range(1000):
            message.files.add(peer="h:1", read=pb.StagingRead(directory="1-1-1", rank=rank))
        assert await Counting(tmp_path, ACCESS).bring(message) == ""

    asyncio.run(main())
    assert 1 < most <= 16


# -- the reader -------------------------------------------------------------------------------------


@dataclass
class Copied:
    """Of a directory in which the ranks have written that have written on another node."""

    source: Path
    directory: Path
    ranks: tuple[int, ...]
    asked: list[tuple[int, int, int]] = field(default_factory=list)

    def bring(self, wanted: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        self.directory.mkdir(exist_ok=True)
        for rank, ranges in wanted.items():
            if not ranges:
                name = f"rank{rank}.index"
                (self.directory / name).write_bytes((self.source / name).read_bytes())
            there = (self.source / f"rank{rank}.data").read_bytes()
            file = os.open(self.directory / f"rank{rank}.data", os.O_WRONLY | os.O_CREAT)
            for start, nbytes in ranges:
                self.asked.append((rank, start, nbytes))
                os.pwrite(file, there[start : start + nbytes], start)
            os.close(file)


def on_two_nodes(tmp_path: Path, *, twice: bool) -> tuple[StagedFiles, Copied, dict[str, torch.Tensor]]:
    """Rank 0 has written here, rank 1 there; with ``twice`` each of them both halves."""
    values = whole()
    for rank, folder in enumerate((tmp_path / "here", tmp_path / "there")):
        made = [shard(name, part, 2, 0, values) for name in SHAPES for part in ((0, 1) if twice else (rank,))]
        described = {source.name: parts for source, parts in made}
        write(folder, rank, 3, [source for source, _ in made], described, b"common")
    copied = Copied(tmp_path / "there", tmp_path / "elsewhere", (1,))
    return StagedFiles(tmp_path / "here", (0, 1), 3, copied), copied, values


def fill_rows(staging: StagedFiles, low: int, high: int) -> torch.Tensor:
    into = torch.zeros(high - low, 4)
    staging.fill([Wanted(into, (LogicalPart("rows", (12, 4), Box((low, 0), (high, 4)), 0),))])
    return into


def test_only_what_is_needed_and_not_here_comes_from_elsewhere(tmp_path: Path) -> None:
    staging, copied, values = on_two_nodes(tmp_path, twice=False)
    assert torch.equal(fill_rows(staging, 0, 6), values["rows"][:6]) and not copied.asked
    assert torch.equal(fill_rows(staging, 4, 12), values["rows"][4:])
    assert [(rank, nbytes) for rank, _, nbytes in copied.asked] == [(1, 6 * 4 * 4)]


def test_what_several_have_written_is_read_here(tmp_path: Path) -> None:
    staging, copied, values = on_two_nodes(tmp_path, twice=True)
    assert torch.equal(fill_rows(staging, 0, 12), values["rows"]) and not copied.asked


def test_what_comes_later_is_read_too(tmp_path: Path) -> None:
    """The file grows with what is brought."""
    staging, copied, values = on_two_nodes(tmp_path, twice=False)
    for name in SHAPES:  # one after another in the file
        shape = SHAPES[name]
        into = torch.zeros(shape)
        staging.fill([Wanted(into, (LogicalPart(name, shape, Box((0,) * len(shape), shape), 0),))])
        assert torch.equal(into, values[name])
    assert len({start for _, start, _ in copied.asked}) > 1


@pytest.mark.parametrize("both", [False, True])
def test_what_is_damaged_here_is_read_from_another_node(tmp_path: Path, both: bool) -> None:
    staging, copied, values = on_two_nodes(tmp_path, twice=True)
    for folder, rank in (("here", 0), ("there", 1))[: 1 + both]:
        file = tmp_path / folder / f"rank{rank}.data"
        file.write_bytes(bytes(len(file.read_bytes())))
    if both:
        with pytest.raises(RestoreError, match="which rank 0 has written, does not have the digest"):
            fill_rows(staging, 0, 12)
    else:
        assert torch.equal(fill_rows(staging, 0, 12), values["rows"])
    assert {rank for rank, _, _ in copied.asked} == {1}


def test_what_another_has_written_otherwise_is_no_stand_in(tmp_path: Path) -> None:
    staging, copied, values = on_two_nodes(tmp_path, twice=True)
    changed = {name: tensor + 1 for name, tensor in values.items()}
    made = [shard(name, part, 2, 0, changed) for name in SHAPES for part in (0, 1)]
    described = {source.name: parts for source, parts in made}
    write(tmp_path / "there", 1, 3, [source for source, _ in made], described, b"common")
    file = tmp_path / "here" / "rank0.data"
    file.write_bytes(bytes(len(file.read_bytes())))
    staging = StagedFiles(tmp_path / "here", (0, 1), 3, copied)
    with pytest.raises(RestoreError, match="does not have the digest"):
        fill_rows(staging, 0, 12)
    assert not copied.asked


def test_what_has_come_otherwise_than_it_was_written(tmp_path: Path) -> None:
    staging, copied, _ = on_two_nodes(tmp_path, twice=False)
    there = tmp_path / "there" / "rank1.data"
    there.write_bytes(bytes(len(there.read_bytes())))
    with pytest.raises(RestoreError, match="does not have the digest"):
        fill_rows(staging, 4, 12)
    assert copied.asked
