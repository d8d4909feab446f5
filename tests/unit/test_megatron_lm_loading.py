"""Which checkpoint a process of Megatron-LM's loop loads that takes a dead one's place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery.errors import UnsupportedError
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


def loads(folder: Path | None, step: int | None = None, **more: Any) -> tuple[str | None, int | None]:
    """What Megatron is asked to load."""
    args = SimpleNamespace(load=None if folder is None else str(folder), ckpt_step=step, **more)
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


# -- non-persistent checkpoints ------------------------------------------------------------------------


def taken(folder: Path, step: int | None = None, **more: Any) -> str:
    """What Megatron then loads, as its ``_load_base_checkpoint`` decides (core 0.16)."""
    given = {"non_persistent_ckpt_type": "global", "non_persistent_global_ckpt_dir": None, **more}
    args = SimpleNamespace(load=str(folder), ckpt_step=step, **given)
    before = dict(vars(args))
    with as_at_the_launch(args):
        beside = Path(args.non_persistent_global_ckpt_dir or Path(args.load) / "non_persistent") / TRACKER
        other = Path(args.load) / TRACKER
        late = int(beside.read_text()) if args.non_persistent_ckpt_type and beside.exists() else -1
        iteration = args.ckpt_step or (int(other.read_text()) if other.exists() else -1)
        found = f"beside {late}" if late != -1 and late >= iteration else f"load {iteration}"
    assert vars(args) == before
    return found


TRACKER = "latest_checkpointed_iteration.txt"
SAVES = {"non_persistent_save_interval": 2}


@pytest.fixture(params=["within", "elsewhere"])
def beside(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made = tmp_path / "non_persistent" if request.param == "within" else tmp_path / "fast"
    made.mkdir()
    return made


def elsewhere(beside: Path) -> dict[str, Any]:
    return {} if beside.name == "non_persistent" else {"non_persistent_global_ckpt_dir": str(beside)}


@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize("step", [None, 4])
@pytest.mark.parametrize(("before", "old"), [("", ""), ("4", ""), ("4", "2")])
def test_one_that_the_job_has_saved_since_is_left_out(
    before: str, old: str, step: int | None, beside: Path, tmp_path: Path
) -> None:
    more = {"save": str(tmp_path), **SAVES, **elsewhere(beside)}
    if before:
        saved(tmp_path, before)
    if old:
        saved(beside, old)
    launched = taken(tmp_path, step, **more)
    assert launched == f"load {step or before or -1}"
    for persistent, late in (("", "6"), ("8", "6"), ("8", "10")):
        if persistent:
            saved(tmp_path, persistent)
        saved(beside, late)
        assert taken(tmp_path, step, **more) == launched


@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize("persistent", ["", "4", "6"])
def test_the_launchs_own_is_loaded_where_nobody_removes_it(persistent: str, beside: Path, tmp_path: Path) -> None:
    """Megatron takes it where it is not older."""
    saved(beside, "6")
    if persistent:
        saved(tmp_path, persistent)
    more = {"save": str(tmp_path / "other"), **(SAVES if not elsewhere(beside) else {}), **elsewhere(beside)}
    assert taken(tmp_path, **more) == "beside 6"
    saved(tmp_path, "10")
    assert taken(tmp_path, **more) == "beside 6"


@pytest.mark.usefixtures("launch")
def test_one_that_the_job_would_remove_is_refused(beside: Path, tmp_path: Path) -> None:
    saved(beside, "6")
    with pytest.raises(
        UnsupportedError, match=r"non-persistent checkpoint of iteration 6 in .* by a job with --non-pe"
    ):
        taken(tmp_path, save=str(tmp_path), **SAVES, **elsewhere(beside))


@pytest.mark.usefixtures("launch")
def test_a_release_is_older_than_any(tmp_path: Path) -> None:
    """It has no iteration."""
    (tmp_path / "non_persistent").mkdir()
    saved(tmp_path, "release")
    args = {"non_persistent_ckpt_type": "global", "save": str(tmp_path), **SAVES}
    assert loads(tmp_path, **args) == (str(tmp_path), None)
    saved(tmp_path / "non_persistent", "2")
    assert loads(tmp_path, **args) == (str(tmp_path), None)


def _cleanup(save_dir: str, leave_ckpt_num: int = 1, do_async: bool = False) -> None:
    """As Megatron-LM core 0.16.1's."""
    found = sorted(Path(save_dir).rglob("iter_*"), key=lambda path: int(path.name[len("iter_") :]))
    for path in found[:-leave_ckpt_num]:
        path.rmdir()


@pytest.mark.parametrize(
    ("there", "whole", "left"),
    [
        ((2, 4), "4", [4]),  # as Megatron does
        ((4, 6), "4", [4, 6]),  # a rank has died while 6 was written, which is made again
        ((2, 4, 6), "4", [4, 6]),
        ((4, 6), "6", [6]),  # the job is back before 4, which is written again beside 6
        ((4, 6, 8), "4", [4, 6, 8]),
        ((4, 6), None, [6]),
        ((2, 4), "release", [4]),
        ((6,), "4", [6]),
    ],
)
def test_the_non_persistent_checkpoint_that_is_whole_stays(
    there: tuple[int, ...], whole: str | None, left: list[int], tmp_path: Path
) -> None:
    """Until another one is. If the job dies as a whole while one is written again, it is what is left."""
    from fr_megatron.lm.saving import keeping_the_whole_one

    for number in there:
        (tmp_path / f"iter_{number:07d}").mkdir()
    if whole is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(whole)
    keeping_the_whole_one(_cleanup)(str(tmp_path), leave_ckpt_num=1, do_async=False)
    assert sorted(int(path.name[len("iter_") :]) for path in tmp_path.glob("iter_*")) == left


def test_more_are_kept_if_megatron_says_so(tmp_path: Path) -> None:
    from fr_megatron.lm.saving import keeping_the_whole_one

    for number in (2, 4, 6):
        (tmp_path / f"iter_{number:07d}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    keeping_the_whole_one(_cleanup)(tmp_path, 2)
    assert len([*tmp_path.glob("iter_*")]) == 2
