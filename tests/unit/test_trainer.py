"""Which Trainers are protected. Trainers are stood in for: what happens in their loops, the conformance tests show."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery.capabilities.of_trainer import RESUMING
from flashrecovery.errors import RegistrationError, UnsupportedError
from flashrecovery.state import codec
from flashrecovery.trainer import plain, protect, state
from flashrecovery.trainer.events import may_stop
from flashrecovery.trainer.start import Start
from flashrecovery.trainer.state import TrainerLoop

RESUMES = pytest.mark.skipif(
    bool(RESUMING.missing()), reason="this version of transformers does not resume as is known"
)


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


@RESUMES
def test_a_replacement_begins_where_its_rank_began(tmp_path: Path) -> None:
    """Not with the newest checkpoint; and it needs nothing of the one that there was."""
    first = Process()
    assert start(resuming(tmp_path, 4), first, True).path == str(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4").rename(tmp_path / "gone")
    again = start(resuming(tmp_path, 8), Process(first.notes), True)
    assert (again.path, again.step) == (str(tmp_path / "checkpoint-4"), 4)
    with again.begun() as passed:
        assert passed is not None
        assert json.loads((Path(passed) / "trainer_state.json").read_text())["global_step"] == 4
    assert not Path(passed).exists()


def test_a_replacement_begins_again_where_its_rank_did(tmp_path: Path) -> None:
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


@RESUMES
def test_a_replacement_without_state_does_not_train(tmp_path: Path) -> None:
    """It has not read the checkpoint."""
    first = Process()
    start(resuming(tmp_path, 4), first, True).check(restored=False)
    again = start(resuming(tmp_path), Process(first.notes), True)
    again.check(restored=True)
    with pytest.raises(RegistrationError, match="no other rank has given it the state"):
        again.check(restored=False)


class Stopping:
    def on_evaluate(self, args: Any, state: Any, control: Any) -> None:
        control.should_training_stop = True


class Named:
    def on_evaluate(self, args: Any, state: Any, control: Any) -> None:
        for name in ("should_epoch_stop",):
            setattr(control, name, True)


class Looking:
    def on_evaluate(self, args: Any, state: Any, control: Any) -> None:
        control.should_save = True


@pytest.mark.parametrize(
    ("callbacks", "stops"),
    [
        pytest.param((), False, id="none"),
        pytest.param((Looking(),), False, id="looking"),
        pytest.param((Looking(), Stopping()), True, id="stopping"),
        pytest.param((Named(),), True, id="by-name"),
    ],
)
def test_what_may_stop_a_training_is_known_by_its_class(callbacks: tuple[Any, ...], stops: bool) -> None:
    flow = type("DefaultFlowCallback", (), {**vars(Stopping), "__module__": "transformers.trainer_callback"})()
    assert may_stop(SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[flow, *callbacks]))) == stops


class Control:
    def __init__(self, *, stops: bool = False, epoch: bool = False) -> None:
        self.should_training_stop, self.should_epoch_stop = stops, epoch


def at(step: int, control: Control, saved: dict[str, Any] | None = None) -> TrainerLoop:
    """A loop that has come to this step; in a replacement that gets ``saved``."""
    loop: Any = object.__new__(TrainerLoop)
    loop._begun_at, loop._restored, loop._follows, loop._makes_calls, loop.kind = 0, None, None, False, ""
    loop._decided = (-1, False, False)
    arguments = SimpleNamespace(load_best_model_at_end=False)
    loop._trainer = SimpleNamespace(state=SimpleNamespace(global_step=step), control=control, args=arguments)
    if saved is not None:
        restore(loop, saved)
    made: TrainerLoop = loop
    return made


def restore(loop: TrainerLoop, saved: dict[str, Any]) -> None:
    loop.restored({"begun_at": 0, "history": codec.dumps([]), **saved})


@pytest.mark.parametrize(
    ("step", "decided", "wants", "is_decided"),
    [
        pytest.param(5, (6, True, False), False, (False, False), id="before"),
        pytest.param(6, (6, True, False), False, (True, False), id="passed-over"),
        pytest.param(6, (6, False, True), False, (False, True), id="an-epoch"),
        pytest.param(5, (6, True, False), True, (False, False), id="too-early"),
        pytest.param(5, (5, False, False), True, (False, False), id="not-then"),
    ],
)
def test_a_replacement_stops_where_the_dead_process_did(
    step: int, decided: tuple[int, bool, bool], wants: bool, is_decided: tuple[bool, bool]
) -> None:
    control = Control(stops=wants, epoch=wants)
    loop = at(step, control, {"decided": decided})
    loop.decides()
    assert (control.should_training_stop, control.should_epoch_stop) == is_decided
    assert loop._decided == (step, *is_decided)


def test_a_process_that_makes_calls_decides_itself() -> None:
    """Also a replacement that skips none, and a survivor, which gets its own state."""
    control = Control(stops=True)
    before = {"decided": (4, True, True)}
    for loop in (at(4, control), at(4, control, before)):
        loop.makes("train:2")
        loop._trainer.state.global_step = 5
        restore(loop, before)
        loop.decides()
        assert control.should_training_stop and loop._decided == (5, True, False)


def test_a_step_is_not_left_amid_its_micro_batches() -> None:
    for control in (Control(stops=True), Control(epoch=True)):
        with pytest.raises(UnsupportedError, match="amid the micro-batches of a step"):
            at(5, control).goes_on()
        at(5, control, {}).goes_on()
        assert not control.should_training_stop and not control.should_epoch_stop
    at(5, Control()).goes_on()


def test_a_replacement_that_has_gone_on_behind_the_end_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="stopped behind step 6"):
        at(7, Control(), {"decided": (6, True, False)})


@pytest.mark.parametrize(("kind", "step"), [("train:2", 5), ("log:010", 5), ("log:100", 6)])
def test_a_replacement_that_has_come_elsewhere_is_refused(kind: str, step: int) -> None:
    loop = at(step, Control(), {"kind": "log:100", "state": codec.dumps({"global_step": 5})})
    loop.kind = kind  # and nothing is loaded
    with pytest.raises(UnsupportedError, match=r"the dead one was then in 'log:100' behind step 5"):
        loop.resume()


@pytest.mark.parametrize("first", [False, True])
def test_a_replacement_knows_of_the_best_model_when_its_loop_is_left(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 4 looks for it before anything else has restored the state."""
    monkeypatch.setattr(state, "LOOP", SimpleNamespace(takes=lambda form: not first and form == "kept"))
    loop = at(6, Control(), {"decided": (6, True, False), "state": codec.dumps({"best_model_checkpoint": "best"})})
    loop._trainer.args = SimpleNamespace(load_best_model_at_end=True)
    loop._trainer.state.best_model_checkpoint = None
    loop.decides()
    assert loop.loads_best_first is first
    assert loop._trainer.state.best_model_checkpoint == ("best" if first else None)
