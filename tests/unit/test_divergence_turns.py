"""Which tensors the ranks compare when a part is enough: all come in turn, and the same on all ranks."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

from flashrecovery.adapter.shards import FixedShard
from flashrecovery.plan.divergence import Past
from flashrecovery.worker.consistency import divergence_check
from flashrecovery.worker.consistency.divergence_check import DivergenceCheck, Unequal, compare_replicas, in_turn

WEIGHT = torch.zeros(4)
TURNS = 4


def shards(count: int, holders: tuple[int, ...] = (0, 1)) -> list[FixedShard]:
    return [FixedShard(f"param/layers.{number}.weight", holders, WEIGHT) for number in range(count)]


def names(many: list[FixedShard], turn: int) -> dict[str, int]:
    return {shard.name: piece for shard, piece in in_turn(many, turn)}


def test_of_many_shards_each_comes_once_in_four_turns_with_the_same_piece() -> None:
    many = shards(400)
    for first in (4, 8):
        turns = [names(many, turn) for turn in range(first, first + TURNS)]
        assert sum(map(len, turns)) == len(many)
        assert {name for turn in turns for name in turn} == {shard.name for shard in many}
        assert {piece for turn in turns for piece in turn.values()} == {first // TURNS}
        assert max(map(len, turns)) < len(many) // 2


def test_few_shards_are_compared_each_time_another_piece_of_each() -> None:
    few = shards(64)
    assert [names(few, turn) for turn in (1, 2)] == [{s.name: 1 for s in few}, {s.name: 2 for s in few}]


def test_a_shard_that_one_rank_alone_has_changes_nothing_for_the_others() -> None:
    """By their places in a list, all that follow would be chosen in other turns."""
    mine, theirs = shards(200), [FixedShard("param/a.new", (0, 1), WEIGHT), *shards(200)]
    assert names(theirs, 5).items() - {"param/a.new": 1}.items() == names(mine, 5).items()


def test_shards_of_other_holders_do_not_count() -> None:
    assert len(names([*shards(64), *shards(400, (0, 1, 2))], 4)) >= 64


@pytest.mark.parametrize(("version", "compared"), [(32, 400), (64, 100), (128, 100)])
def test_late_comparisons_look_at_a_fourth(version: int, compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    digests = divergence_check.shard_digests

    def counted(chosen: dict[str, object], on_device: object) -> dict[str, str]:
        looked.append(len(chosen))
        return digests(chosen, on_device)  # type: ignore[arg-type]

    monkeypatch.setattr(divergence_check, "shard_digests", counted)
    monkeypatch.setattr(divergence_check, "gather_objects", lambda mine: [mine, mine])
    registry = MagicMock()
    registry.tensor_shards.return_value, registry.settings.return_value = shards(400), {}
    assert compare_replicas(registry, version, Past()) == Unequal()
    assert looked == [pytest.approx(compared, rel=0.3)]


def test_after_a_part_only_what_has_had_its_turn_is_known_to_be_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Past] = []

    def compare(_: object, __: int, past: Past) -> Unequal:
        seen.append(past)
        return Unequal()

    monkeypatch.setattr(divergence_check, "compare_replicas", compare)
    check = DivergenceCheck(MagicMock(), MagicMock(), tensors=True, replacement=False)
    check.resumed(0, 0)
    for version in range(1, 64 * 8 + 2):
        check.before_commit(version)
    assert [(past.alike, past.whole) for past in seen[-6:]] == [
        *((32, 32),) * 3,
        *((64 * turn, 32) for turn in (1, 2, 3)),
    ]
