"""What is shown of an error that ends a script."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashrecovery.agent.monitoring.failure_reports import exception_text
from flashrecovery.errors import ConfigError, RegistrationError, UnsupportedError
from flashrecovery.job import check_directory
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.worker.exit.script_error import place_of, text_of
from flashrecovery.worker.script_checks.optimizer_watch import OptimizerWatch
from flashrecovery.worker.startup.main_module import run_file


def raised(path: Path, text: str) -> BaseException:
    path.write_text(text)
    with pytest.raises(Exception) as caught:
        run_file(str(path))
    return caught.value


def test_the_frames_around_a_script_are_left_out(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    error = raised(script, "def build():\n    raise ValueError('no such data set')\nbuild()\n")
    text = text_of(error)
    assert text.count("File ") == 3 and "main_module" not in text, text  # and this test's
    assert text.endswith("ValueError: no such data set\n") and f'File "{script}", line 2, in build' in text
    assert place_of(error) == f"{script}:2"


def test_an_error_on_purpose_ends_at_the_scripts_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    error = raised(script, "import flashrecovery\nr = flashrecovery.Recovery(None)\nfor _ in r.steps(3):\n    pass\n")
    assert isinstance(error, RegistrationError)
    text = text_of(error)
    assert "recovery.py" not in text and f'File "{script}", line 3' in text and "no model is registered" in text
    assert place_of(error) == f"{script}:3"


def test_an_error_in_a_hook_ends_at_the_line_that_has_led_to_it() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer, watch = torch.optim.SGD(model.parameters()), OptimizerWatch([], [model], lambda: 0)
    watch.start()
    with pytest.raises(UnsupportedError) as caught:
        optimizer.step()
    watch.stop()
    text = text_of(caught.value)
    assert "optimizer.step()" in text and "optimizer_watch.py" not in text and "optimizer.py" not in text, text


def test_an_error_of_the_packages_own_is_shown_whole(tmp_path: Path) -> None:
    error = raised(tmp_path / "train.py", "from flashrecovery.runtime.page import Page\nPage.create(3).set_tag('x')\n")
    assert "page.py" in text_of(error)


def test_a_causes_frames_are_left_out_too(tmp_path: Path) -> None:
    text = "try:\n    {}['x']\nexcept KeyError as e:\n    raise ValueError('no x') from e\n"
    shown = text_of(raised(tmp_path / "train.py", text))
    assert "KeyError: 'x'" in shown and "direct cause" in shown and "main_module" not in shown


def test_the_first_line_of_evidence_says_where() -> None:
    words = pb.LastWords(exception="ValueError", message="bad\nworse", place="train.py:7")
    assert (
        exception_text(words, "logs/rank1.gen0.log")
        == "ValueError: bad (at train.py:7, log: logs/rank1.gen0.log)\nworse"
    )
    assert exception_text(pb.LastWords(exception="ValueError", message="bad"), "") == "ValueError: bad"


def test_a_checkpoint_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    check_directory(None)
    check_directory(tmp_path / "new" / "folder")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"checkpoint\.dir = .*file/in' cannot be written"):
        check_directory(tmp_path / "file" / "in")
