"""``Step.committed``, and the saves of a script below the block of an attempt that does not count."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashrecovery.worker.control.overhead import Overhead
from flashrecovery.worker.recovery import Recovery
from flashrecovery.worker.step import post_step_code
from flashrecovery.worker.step.step import Step


class Loop:
    """What a step asks. ``goes_on``: what its end says."""

    def __init__(self, *, void: bool, goes_on: bool = True) -> None:
        self.overhead, self.void, self.goes_on = Overhead(), void, goes_on

    def entered(self, _: object) -> None:
        pass

    def begin(self) -> None:
        pass

    def end(self, _: BaseException | None) -> bool:
        return self.goes_on


def test_without_recovery_a_step_is_committed_below_its_block() -> None:
    recovery = Recovery(None)
    recovery.register(model=torch.nn.Linear(1, 1))
    steps = []
    for step in recovery.steps(3):
        assert not step.committed
        with step:
            assert not step.committed
        assert step.committed
        steps.append(step)
    assert [step.committed for step in steps] == [True] * 3
    failed = Step(3, None)
    with pytest.raises(ValueError, match="bad"), failed:
        raise ValueError("bad")
    assert not failed.committed


def test_a_void_attempt_is_not_committed_whenever_it_is_asked() -> None:
    loop = Loop(void=True)
    step = Step(3, loop)
    with step:
        pass
    assert not step.committed
    step.over()
    loop.void = False  # the next one is yielded
    assert not step.committed


def test_what_stand_ins_answer_makes_an_attempt_void() -> None:
    loop = Loop(void=False)
    step = Step(3, loop)
    with step:
        pass
    assert step.committed
    loop.void = True
    assert not step.committed


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Below the block of a discarded attempt."""
    told: list[str] = []
    post_step_code.install_hooks()
    asked = SimpleNamespace(void=True, cut_off=True, outside=False, not_saved=told.append, told=told)
    asked.saving = nullcontext
    monkeypatch.setattr(post_step_code, "_below", asked)
    yield asked
    post_step_code.attempt_is_over()


def test_a_void_attempt_writes_no_file_and_moves_none(attempt: SimpleNamespace, tmp_path: Path) -> None:
    best, new = tmp_path / "best.pt", tmp_path / "best.tmp"
    best.write_text("good")
    real = os.replace
    torch.save({"x": torch.ones(1)}, new)
    os.replace(new, best)
    new.rename(best)
    assert best.read_text() == "good" and not new.exists()
    (text,) = attempt.told
    assert text.startswith(f"torch.save to {new} at {__file__}:") and "step.committed" in text
    post_step_code.attempt_is_over()
    assert os.replace is real
    attempt.void = attempt.cut_off = False
    torch.save({"x": torch.ones(1)}, new)
    os.replace(new, best)
    assert torch.load(best)["x"] == 1


def test_memory_is_no_file(attempt: SimpleNamespace) -> None:
    buffer = io.BytesIO()
    torch.save([1], buffer)
    assert buffer.getvalue() and not attempt.told


def test_other_files_can_be_moved(attempt: SimpleNamespace, tmp_path: Path) -> None:
    torch.save([1], tmp_path / "left.out")
    (tmp_path / "one").write_text("1")
    os.replace(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_text() == "1"


def test_what_a_save_is_given_by_name_alone_is_found() -> None:
    """accelerate calls ``torch.distributed.checkpoint.save(state_dict=..., storage_writer=...)``."""
    writer = SimpleNamespace(path="checkpoint-4")
    assert post_step_code._checkpoint(state_dict={}, storage_writer=writer) == "checkpoint-4"
    assert post_step_code._checkpoint({}, checkpoint_id="there") == "there"
    assert post_step_code._first(self=None, output_dir="out") == "out"
