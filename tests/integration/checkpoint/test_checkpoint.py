"""The fallback checkpoint: written by real ranks without collectives, published whole or not at all, read
back exactly.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from flashrecovery.config import CheckpointSettings
from flashrecovery.controller.service.checkpoints import Checkpoints
from flashrecovery.controller.state.rank_record import RankRecord
from flashrecovery.errors import ConfigError, RestoreError
from flashrecovery.redundancy.checkpoint import reader, verify
from flashrecovery.redundancy.checkpoint.dcp import read_whole, write_part
from flashrecovery.redundancy.checkpoint.keys import writer_of
from flashrecovery.redundancy.checkpoint.manifest import Manifest, StoredCheckpoint, manifests_of
from flashrecovery.redundancy.checkpoint.published import newest, step_name
from flashrecovery.redundancy.checkpoint.reader import checkpoint_layout_mismatch
from flashrecovery.redundancy.checkpoint.writer import CheckpointFallback, Published
from flashrecovery.runtime import durable
from flashrecovery.state.checkpoint_format import CheckpointFormat
from tests.integration.redundancy.test_neighbour import Owned, local_state_of, shards_of
from tests.support.checkpoints import load
from tests.support.ranks import die, results, run_ranks

WORLD = 3
COMMON = b"common state"


def shards(rank: int, world: int = WORLD) -> list[Owned]:
    everyone = tuple(range(world))
    return [*shards_of(rank, world), *(Owned(f"layer{i}", 50 + i, 100 + i, everyone) for i in range(6))]


def advance(mine: list[Owned], version: int) -> None:
    for s in mine:
        s.advance(version)


def _save(rank: int, world: int, folder: Path, versions: list[int], keep: int = 2) -> list[int]:
    published: list[Published] = []
    fallback = CheckpointFallback(folder, rank=rank, world=world, keep=keep, on_published=published.append)
    mine = shards(rank, world)
    for version in versions:
        advance(mine, version)
        fallback.announce(version, 0)
        assert not fallback.due(version - 1) and fallback.due(version) and not fallback.due(version)
        k0 = fallback.commit(version, mine, local_state=local_state_of(rank, version), common=COMMON, generation=0)
        advance(mine, version + 1)  # training goes on while the checkpoint is written
        assert 0 <= k0 < 10
        assert fallback.wait(30)
    assert fallback.close(5)
    return [p.version for p in published]


def save(tmp_path: Path, folder: Path, versions: list[int], world: int = WORLD, keep: int = 2) -> None:
    for version in versions:  # one launch each: the ranks of one launch need not end a version together
        outcomes = results(run_ranks(_save, world, tmp_path, folder, [version], keep, group=False))
        assert sorted(v for o in outcomes for v in o) == [version]  # exactly one rank published it


def check(folder: Path, version: int, world: int = WORLD) -> None:
    found = newest(folder)
    assert found is not None and found[0] == version
    for rank in range(world):
        mine = shards(rank, world)
        state = load(found[1], mine, rank=rank, world=world)
        assert (state.local_state, state.common) == (local_state_of(rank, version), COMMON)
        for s in mine:
            expected = s.expected(version)
            assert list(s.live) == list(expected) and s.extra == {"count": version}
            assert all(torch.equal(s.live[k], v) for k, v in expected.items()), s.name


def test_save_and_load_exactly_and_keep_two(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert newest(folder) is None
    save(tmp_path, folder, [4, 7, 9])
    check(folder, 9)
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-0000000007", "step-0000000009"]
    (folder / "latest").unlink()
    check(folder, 9)


def test_what_a_job_sweeps_away_while_it_is_looked_at_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    save(tmp_path, folder, [4, 7])
    swept = folder / step_name(4)

    def manifests(path: Path, ranks: Sequence[int]) -> dict[int, Manifest]:
        if path == swept and path.exists():
            CheckpointFallback(folder, rank=0, world=WORLD, keep=1)._sweep(7)
        return manifests_of(path, ranks)

    monkeypatch.setattr(verify, "manifests_of", manifests)
    assert [(saved.version, saved.wrong) for saved in verify.checkpoints_in(folder)] == [(7, ())]
    assert not swept.exists() and not list(folder.glob(".pending*"))


def test_index_and_manifests_are_read_once_for_all_that_a_restore_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker asks for the rank's own shards first, then for the layout, then it loads its part."""
    folder = tmp_path / "checkpoints"
    save(tmp_path, folder, [4])
    opened: list[str] = []
    original = FileSystem.create_stream

    def create_stream(self: FileSystem, path: Path, mode: str) -> AbstractContextManager[io.IOBase]:
        opened.append(Path(path).name)
        return original(self, path, mode)

    decoded: list[int] = []
    decode = Manifest.decode
    monkeypatch.setattr(FileSystem, "create_stream", create_stream)
    monkeypatch.setattr(Manifest, "decode", lambda data, path: decoded.append(len(data)) or decode(data, path))
    checkpoint = StoredCheckpoint.open(folder / step_name(4))
    assert checkpoint.first.common == checkpoint.manifests([0])[0].common == COMMON
    mine = shards(2)
    assert reader.load(checkpoint, mine, rank=2, world=WORLD).local_state == local_state_of(2, 4)
    assert opened.count(".metadata") == 1
    assert len(decoded) == WORLD


def test_it_is_an_ordinary_dcp_checkpoint(tmp_path: Path) -> None:
    """Any tool that reads DCP reads it; each replicated tensor is in it once."""
    import torch.distributed.checkpoint as dcp

    save(tmp_path, tmp_path / "c", [4])
    path = tmp_path / "c" / "step-0000000004"
    keys = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    tensors = {"param", "avg", "step"}
    expected = {f"shared/{n}/{k}" for n in ["norm", *(f"layer{i}" for i in range(6))] for k in tensors}
    expected |= {f"rank{r}/{n}#{r}/{k}" for r in range(WORLD) for n in ("w", "bias") for k in tensors}
    assert keys == expected | {f"manifest/{r}" for r in range(WORLD)}
    into = {"shared/layer2/param": torch.zeros(102)}
    dcp.load(into, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert torch.equal(into["shared/layer2/param"], Owned("layer2", 52, 102, (0,)).expected(4)["param"])


def test_replicated_shards_are_spread_over_their_holders() -> None:
    world = tuple(range(4))
    writers = [writer_of(Owned(f"param/{i}", 0, 1, world)) for i in range(400)]
    assert all(60 < writers.count(r) < 140 for r in world)
    assert writer_of(Owned("x", 0, 1, (3,))) == 3


def _die_while_writing(rank: int, world: int, folder: Path) -> None:
    fallback = CheckpointFallback(folder, rank=rank, world=world)
    mine = shards(rank, world)
    advance(mine, 12)
    if rank == 1:
        die()
    fallback.commit(12, mine, local_state=b"", common=COMMON, generation=0)
    fallback.wait(30)


def test_an_incomplete_checkpoint_is_never_found_and_is_swept_away(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save(tmp_path, folder, [9])
    outcomes = run_ranks(_die_while_writing, WORLD, tmp_path, folder, group=False)
    assert outcomes[1].signal == 9
    assert (folder / ".pending-12.0-").is_dir()
    check(folder, 9)
    save(tmp_path, folder, [15])
    check(folder, 15)
    assert not list(folder.glob(".pending*"))


def _save_in_launch(rank: int, world: int, folder: Path, launch: str, writing: list[int]) -> list[int]:
    """Ranks outside of ``writing`` are killed first."""
    published: list[Published] = []
    fallback = CheckpointFallback(folder, rank=rank, world=world, on_published=published.append)
    mine = shards(rank, world)
    advance(mine, 12)
    if rank not in writing:
        die()
    fallback.announce(12, 1, launch)
    assert fallback.due(12)
    fallback.commit(12, mine, local_state=launch.encode(), common=COMMON, generation=1)
    fallback.wait(30)
    return [p.version for p in published]


def test_what_a_killed_launch_has_left_becomes_no_part_of_the_next_ones_checkpoint(tmp_path: Path) -> None:
    """Each begins in generation 1. Seen to be needed: ranks 0 and 2 of the first with rank 1 of the second."""
    folder = tmp_path / "c"
    run_ranks(_save_in_launch, WORLD, tmp_path, folder, "first", [0, 2], group=False)
    assert len(list(folder.glob(".pending-12.*/done-*"))) == 2
    alone = run_ranks(_save_in_launch, WORLD, tmp_path, folder, "second", [1], group=False)
    assert results([alone[1]]) == [[]] and newest(folder) is None
    published = results(run_ranks(_save_in_launch, WORLD, tmp_path, folder, "third", [0, 1, 2], group=False))
    assert sorted(v for of_rank in published for v in of_rank) == [12]
    assert {load(folder / step_name(12), shards(r), rank=r, world=WORLD).local_state for r in range(WORLD)} == {
        b"third"
    }
    assert not list(folder.glob(".pending*"))


def test_all_ranks_are_told_of_which_launch_it_is() -> None:
    schedule = Checkpoints(CheckpointSettings(dir=Path("c"), interval_s=1.0))
    ranks = [RankRecord(rank) for rank in range(WORLD)]
    commands = schedule.announce(ranks, "this", time.monotonic() + 2)
    assert [(c.rank, c.checkpoint.launch) for c in commands] == [(rank, "this") for rank in range(WORLD)]


def test_the_same_version_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, tmp_path / "c", [4, 4])
    check(tmp_path / "c", 4)
    assert not list((tmp_path / "c").glob(".pending*"))


def _save_and_die(rank: int, world: int, folder: Path, exchanges: bool, after: int) -> None:
    """Killed by SIGKILL right after that many renames and exchanges of names."""
    rename, exchange, done = os.rename, durable._exchange, [0]

    def counted() -> None:
        done[0] += 1
        if done[0] == after:
            die()

    def renames(*args: Any, **kwargs: Any) -> None:
        rename(*args, **kwargs)
        counted()

    def exchange_names(one: Path, other: Path) -> bool:
        found = exchanges and exchange(one, other)
        if found:
            counted()
        return found

    os.rename, durable._exchange = renames, exchange_names
    assert _save_in_launch(rank, world, folder, f"launch{after}", [rank]) == [12]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_whole_one_is_there_whenever_a_writer_is_killed_that_replaces_it(exchanges: bool, tmp_path: Path) -> None:
    """Where the file system exchanges names, and where it cannot."""
    folder = tmp_path / "c"
    save(tmp_path, folder, [12], world=1)
    killed = 0
    while (end := run_ranks(_save_and_die, 1, tmp_path, folder, exchanges, killed + 1, group=False)[0]).signal:
        killed += 1
        assert newest(folder) == (12, folder / step_name(12))
        (saved,) = verify.checkpoints_in(folder)
        assert not saved.wrong
    assert end.error is None and killed >= (6 if exchanges else 7)
    assert load(folder / step_name(12), shards(0, 1), rank=0, world=1).local_state == f"launch{killed + 1}".encode()
    assert not list(folder.glob(".pending*"))


def test_one_that_was_to_be_replaced_is_brought_back(tmp_path: Path) -> None:
    """Also by a writer, and where the new one has been swept away."""
    save(tmp_path, tmp_path / "c", [4], world=1)
    os.rename(tmp_path / "c" / step_name(4), tmp_path / "c" / ".pending-4.2-launch.replaced")
    CheckpointFallback(tmp_path / "c", rank=0, world=1)
    assert (tmp_path / "c" / step_name(4)).is_dir()
    check(tmp_path / "c", 4, world=1)


def test_another_runs_later_checkpoint_is_neither_resumed_nor_removed(tmp_path: Path) -> None:
    save(tmp_path, tmp_path / "c", [1000, 1001])
    save(tmp_path, tmp_path / "c", [5, 6, 7])
    check(tmp_path / "c", 7)
    assert len(list((tmp_path / "c").glob("step-*"))) == 4


def test_a_rank_that_hears_of_it_too_late_does_not_take_part(tmp_path: Path) -> None:
    fallback = CheckpointFallback(tmp_path, rank=0, world=1)
    fallback.announce(5, 0)
    assert not fallback.due(6)
    assert not fallback.due(5)
    fallback.close(1)


def test_only_what_was_announced_before_a_recovery_is_withdrawn_by_it(tmp_path: Path) -> None:
    fallback = CheckpointFallback(tmp_path, rank=0, world=1)
    fallback.announce(5, 1)
    fallback.withdraw(2)
    assert fallback.announced is None and not fallback.due(5)
    fallback.announce(6, 2)  # by a controller that knows of the resume before this rank has carried it out
    fallback.withdraw(2)
    assert fallback.due(6)
    fallback.close(1)


def test_another_world_model_or_content_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save(tmp_path, folder, [4])
    path = folder / "step-0000000004"
    with pytest.raises(RestoreError, match="written by 3 ranks, this job has 2"):
        load(path, shards(0, 2), rank=0, world=2)
    with pytest.raises(RestoreError, match="another model: it lacks shards 'other'"):
        load(path, [*shards(0), Owned("other", 1, 5, (0,))], rank=0, world=WORLD)
    with pytest.raises(RestoreError, match="cannot be read"):
        load(folder / "step-0000000099", shards(0), rank=0, world=WORLD)


def test_damaged_files_are_noticed(tmp_path: Path) -> None:
    save(tmp_path, tmp_path / "c", [4])
    path = tmp_path / "c" / "step-0000000004"
    data = path / "part-0" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    spot = content.find(shards(0)[1].expected(4)["param"].numpy().tobytes()[:64])
    assert spot > 0
    content[spot] ^= 1
    data.write_bytes(content)
    with pytest.raises(RestoreError, match=r"digests|cannot be read"):
        load(path, shards(0), rank=0, world=WORLD)
    data.write_bytes(content[: len(content) // 2])
    with pytest.raises(RestoreError, match="cannot be read"):
        load(path, shards(0), rank=0, world=WORLD)


def test_a_directory_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint.dir = .*cannot be written"):
        CheckpointFallback(tmp_path / "file" / "c", rank=0, world=1)


def test_an_error_while_writing_is_reported_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[BaseException] = []
    fallback = CheckpointFallback(tmp_path, rank=0, world=1, on_error=errors.append)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flashrecovery.redundancy.checkpoint.writer.write_part", full)
    fallback.commit(3, shards(0, 1), local_state=b"", common=b"", generation=0)
    assert fallback.wait(10)
    assert isinstance(errors[0], OSError) and newest(tmp_path) is None
    monkeypatch.undo()
    fallback.commit(4, shards(0, 1), local_state=b"", common=b"", generation=0)
    assert fallback.wait(10) and len(errors) == 1
    assert newest(tmp_path) == (4, tmp_path / "step-0000000004")
    fallback.close(5)


def _slow(rank: int, world: int, folder: Path) -> bool:
    """The step after the checkpoint does not wait for the disk."""
    mine = [Owned(f"big#{rank}", rank, 4 << 20, (rank,))]
    advance(mine, 1)
    fallback = CheckpointFallback(folder, rank=rank, world=world)
    began = time.monotonic()
    k0 = fallback.commit(1, mine, local_state=b"", common=b"", generation=0)
    committed = time.monotonic() - began
    fallback.wait()
    return committed < k0 + 0.5 and os.path.exists(folder / "step-0000000001")


def test_training_waits_for_the_snapshot_only(tmp_path: Path) -> None:
    assert results(run_ranks(_slow, 1, tmp_path, tmp_path / "c", group=False)) == [True]


class Plain(CheckpointFormat):
    """One file a rank. ``damage`` is added to what is loaded."""

    name = "plain"

    def __init__(self, mine: list[Owned], rank: int, damage: float = 0.0) -> None:
        self.mine, self.rank, self.damage = mine, rank, damage

    def capture(
        self, directory: Path, tag: str, copy: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[Path], None]:
        state = {s.name: ({k: copy(t) for k, t in s.live.items()}, s.extra) for s in self.mine}
        for s in self.mine:
            assert all(copy(t) is state[s.name][0][k] for k, t in s.live.items() if t.numel()), "copied once"
        return lambda path: torch.save(state, path / f"rank{self.rank}.pt")

    def load(self, directory: Path, tag: str) -> None:
        for name, (tensors, extra) in torch.load(directory / tag / f"rank{self.rank}.pt").items():
            shard = next(s for s in self.mine if s.name == name)
            shard.live, shard.extra = {k: t + self.damage for k, t in tensors.items()}, extra


def _save_plain(rank: int, world: int, folder: Path) -> None:
    mine = shards(rank, world)
    advance(mine, 4)
    fallback = CheckpointFallback(folder, rank=rank, world=world, form=Plain(mine, rank))
    fallback.commit(4, mine, local_state=local_state_of(rank, 4), common=COMMON, generation=0)
    advance(mine, 5)
    assert fallback.wait(30) and fallback.close(5)


def test_a_frameworks_own_format_takes_the_place_of_the_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    results(run_ranks(_save_plain, WORLD, tmp_path, folder, group=False))
    found = newest(folder)
    assert found is not None
    assert sorted(p.name for p in found[1].glob("*.pt")) == [f"rank{r}.pt" for r in range(WORLD)]
    for rank in range(WORLD):
        mine = shards(rank)
        state = load(found[1], mine, rank=rank, world=WORLD, form=Plain(mine, rank))
        assert state.local_state == local_state_of(rank, 4)
        assert all(torch.equal(s.live[k], v) for s in mine for k, v in s.expected(4).items())
    mine = shards(0)
    with pytest.raises(RestoreError, match="digests"):
        load(found[1], mine, rank=0, world=WORLD, form=Plain(mine, 0, damage=1.0))
    with pytest.raises(RestoreError, match="format 'plain'"):
        load(found[1], mine, rank=0, world=WORLD)


class Sharded(Plain):
    """Each rank's file, as DCP, which ranks of any layout can read."""

    name = "sharded"

    def __init__(self, mine: list[Owned], rank: int, world: int) -> None:
        super().__init__(mine, rank)
        self.world = world
        self.loaded: list[torch.Tensor] = []

    def layout(self) -> str:
        return f"ranks={self.world}"

    def capture(
        self, directory: Path, tag: str, copy: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[Path], None]:
        tensor = copy(self.mine[0].live["param"])
        return lambda path: write_part({f"first/{self.rank}": tensor}, path / f"sharded-{self.rank}")

    def load(self, directory: Path, tag: str) -> None:
        self.loaded = list(read_whole([f"first/{r}" for r in range(WORLD)], directory / tag).values())


def _save_sharded(rank: int, world: int, folder: Path) -> None:
    mine = shards(rank, world)
    advance(mine, 4)
    fallback = CheckpointFallback(folder, rank=rank, world=world, form=Sharded(mine, rank, world))
    fallback.commit(4, mine, local_state=local_state_of(rank, 4), common=COMMON, generation=0)
    assert fallback.wait(30) and fallback.close(5)


def test_ranks_of_another_layout_load_what_the_format_can_give_them(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    results(run_ranks(_save_sharded, WORLD, tmp_path, folder, group=False))
    found = newest(folder)
    assert found is not None
    for rank in range(WORLD - 1):
        form = Sharded(shards(rank, WORLD - 1), rank, WORLD - 1)
        assert checkpoint_layout_mismatch(StoredCheckpoint.open(found[1]), form) == f"ranks={WORLD}"
        state = load(found[1], form.mine, rank=rank, world=WORLD - 1, form=form)
        assert (found[0], state.local_state, state.common) == (4, None, COMMON)
        assert [t.tolist() for t in form.loaded] == [shards(r)[0].expected(4)["param"].tolist() for r in range(WORLD)]
    assert checkpoint_layout_mismatch(StoredCheckpoint.open(found[1]), Sharded(shards(0), 0, WORLD)) == ""
    with pytest.raises(RestoreError, match="format 'sharded'"):
        load(found[1], shards(0), rank=0, world=WORLD, form=Plain(shards(0), 0))
