"""Which Trainers are protected. Trainers are stood in for: what happens in their loops, the conformance tests show."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery.errors import RegistrationError, UnsupportedError
from flashrecovery.trainer import plain, protect
from flashrecovery.trainer.start import Start
from flashrecovery.trainer.state import TrainerLoop


def trainer(kind: str) -> Any:
    accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=None), distributed_type=SimpleNamespace(value=kind)
    )
    return SimpleNamespace(accelerator=accelerator)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "init", lambda: SimpleNamespace(enabled=True))


@pytest.mark.usefixtures("live")
@pytest.mark.parametrize("kind", ["NO", "MEGATRON_LM", "XLA"])
def test_other_kinds_of_training_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"trains by {kind}; allowed: DEEPSPEED, MULTI_CPU"):
        protect(trainer(kind))


def test_nothing_is_touched_under_another_launcher() -> None:
    found = trainer("MULTI_GPU")
    before = vars(found).copy()
    protect(found)
    assert vars(found) == before


class Process:
    """What ``Start`` asks of the recovery of a process. ``notes``: of the rank's first process."""

    def __init__(self, notes: dict[str, str] | None = None, *, resumed: bool = False) -> None:
        self.is_replacement = notes is not None
        self.first_launch = not self.is_replacement and not resumed
        self.notes = {} if notes is None else notes

    def noted(self, name: str, make: Callable[[], str]) -> str | None:
        if self.is_replacement:
            return self.notes.get(name)
        return self.notes.setdefault(name, make())


def resuming(folder: Path, *steps: int) -> Any:
    """A trainer whose folder has these checkpoints."""
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir()
        state = {"global_step": step, "log_history": [{"loss": 1.0}]}
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    return SimpleNamespace(args=SimpleNamespace(output_dir=str(folder)), _load_rng_state=print)


def start(trainer: Any, process: Process, resumes: str | bool | None) -> Start:
    return Start(trainer, process, resumes)  # type: ignore[arg-type]


def test_a_replacement_begins_where_its_rank_began(tmp_path: Path) -> None:
    """Not with the newest checkpoint; and it needs nothing of the one that there was."""
    pytest.importorskip("transformers")
    first = Process()
    assert start(resuming(tmp_path, 4), first, True).path == str(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4").rename(tmp_path / "gone")
    again = start(resuming(tmp_path, 8), Process(first.notes), True)
    assert (again.path, again.step) == (str(tmp_path / "checkpoint-4"), 4)
    with again.begun() as passed:
        assert passed is not None
        assert json.loads((Path(passed) / "trainer_state.json").read_text())["global_step"] == 4
    assert not Path(passed).exists()


def test_a_replacement_begins_anew_where_its_rank_did(tmp_path: Path) -> None:
    """The script asks for the newest checkpoint, and there was none when the job began."""
    pytest.importorskip("transformers")
    first = Process()
    assert start(resuming(tmp_path), first, None).path is None
    again = start(resuming(tmp_path, 4), Process(first.notes), str(tmp_path / "checkpoint-4"))
    with again.begun() as passed:
        assert (again.path, again.step, passed) == (None, 0, None)


def test_what_a_rank_began_with_must_be_known(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UnsupportedError, match=r"in a replacement: what its rank began with is not known"):
        start(resuming(tmp_path, 4), Process({}), True)
    with pytest.raises(UnsupportedError, match=r"resumed by itself \(--resume\)"):
        start(resuming(tmp_path), Process(resumed=True), True)
    with pytest.raises(UnsupportedError, match=r"began behind step 4 .* and this one behind step 0"):
        TrainerLoop.restored(SimpleNamespace(_begun_at=0), {"begun_at": 4})  # type: ignore[arg-type]


def test_a_replacement_without_state_does_not_train(tmp_path: Path) -> None:
    """It has not read the checkpoint."""
    pytest.importorskip("transformers")
    first = Process()
    start(resuming(tmp_path, 4), first, True).check(restored=False)
    again = start(resuming(tmp_path), Process(first.notes), True)
    again.check(restored=True)
    with pytest.raises(RegistrationError, match="no other rank has given it the state"):
        again.check(restored=False)
