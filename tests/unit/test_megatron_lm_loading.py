"""Which checkpoint a process of Megatron-LM's loop loads that takes a dead one's place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from fr_megatron.lm import loading
from fr_megatron.lm.loading import as_at_the_launch


class Launch:
    """Stands for the collective, to which a replacement gets the launch's answer."""

    def __init__(self) -> None:
        self.answer: list[str] | None = None

    def union(self, mine: Sequence[str]) -> list[str]:
        self.answer = self.answer or sorted(mine)
        return self.answer


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    found = Launch()
    monkeypatch.setattr(loading, "union", found.union)
    return found


def saved(folder: Path, iteration: str) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text(iteration)


def loads(folder: Path | None, step: int | None = None) -> tuple[str | None, int | None]:
    """What Megatron is told to load."""
    args = SimpleNamespace(load=None if folder is None else str(folder), ckpt_step=step)
    before = dict(vars(args))
    with as_at_the_launch(args):
        within = args.load, args.ckpt_step
    assert vars(args) == before
    return within


@pytest.mark.usefixtures("launch")
def test_the_one_of_the_launch(tmp_path: Path) -> None:
    saved(tmp_path, "8\n")
    assert loads(tmp_path) == (str(tmp_path), None)
    saved(tmp_path, "10")
    assert loads(tmp_path) == (str(tmp_path), 8)


@pytest.mark.usefixtures("launch")
def test_nothing_where_there_was_nothing(tmp_path: Path) -> None:
    assert loads(tmp_path) == (str(tmp_path), None)
    saved(tmp_path, "2")
    place, step = loads(tmp_path)
    assert step is None and place is not None and not Path(place).exists()


def test_nobody_is_asked_where_it_is_said(launch: Launch, tmp_path: Path) -> None:
    assert loads(tmp_path, 4) == (str(tmp_path), 4) and loads(None) == (None, None)
    assert launch.answer is None
