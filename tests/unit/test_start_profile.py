"""Lines of a script that take long before its first step are found, and what libraries do counts for their callers."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import threading
import time
import types
from pathlib import Path

import pytest
import torch

from flashrecovery.runtime.page import Page
from flashrecovery.worker.preimport import start_profile
from flashrecovery.worker.preimport.preimport import Installed
from flashrecovery.worker.preimport.start_profile import StartProfile


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much processor time a look takes: on a slow machine one more would come too late for these tests."""
    monkeypatch.setattr(start_profile, "_AT_MOST", 1.0)


@pytest.mark.usefixtures("looks_often")
def test_the_scripts_lines_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "slow_library.py").write_text("import time\ntime.sleep(0.2)\ndef work():\n    time.sleep(0.4)\n")
    (tmp_path / "slow_script.py").write_text(
        "import time\ndef main():\n    import slow_library\n    slow_library.work()\n    fast = 1\n"
        "    inner()\n"
        "def inner():\n    end = time.monotonic() + 0.3\n    while time.monotonic() < end:\n        pass\n"
    )
    paths = {**sysconfig.get_paths(), "purelib": str(packages)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    script = importlib.import_module("slow_script")
    profile = StartProfile(Installed())
    profile.start()
    script.main()
    found = profile.joined()
    assert profile.joined() == found
    assert not [t for t in threading.enumerate() if t.name == "flashrecovery-start-profile"]
    del sys.modules["slow_script"], sys.modules["slow_library"]
    named = {line.where: line for line in found}
    assert {"slow_script.py:3", "slow_script.py:4"} <= set(named) and "slow_script.py:5" not in named, found
    assert named["slow_script.py:4"].text == "slow_library.work()"
    assert all("slow_library" not in line.where for line in found)
    assert [line.seconds for line in found] == sorted((line.seconds for line in found), reverse=True)
    inner = sum(line.seconds for line in found if line.where in ("slow_script.py:9", "slow_script.py:10"))
    assert inner > 0.1, "the innermost line of the script's own counts"


@pytest.mark.usefixtures("looks_often")
def test_an_instruction_of_no_line_counts_for_the_line_that_called_its_function(tmp_path: Path) -> None:
    """What another thread does may be seen there."""
    script = tmp_path / "script.py"
    script.write_text("import time\n\ndef work():\n    time.sleep(0.2)\n")
    found: dict[str, types.FunctionType] = {}
    exec(compile(script.read_text(), str(script), "exec"), found)
    no_location = bytes([0xFF] * len(found["work"].__code__.co_code))  # eight code units each
    found["work"].__code__ = found["work"].__code__.replace(co_linetable=no_location)
    profile = StartProfile(Installed())
    profile.start()
    found["work"]()  # here
    assert [line.text for line in profile.joined()] == ['found["work"]()  # here']


def test_nothing_of_the_training_thread_is_destroyed_by_the_one_that_looks() -> None:
    """A guard of torch sets the state of the thread that made it back, whichever thread destroys it."""
    destroyed_by: set[int] = set()

    class Guard:
        def __del__(self) -> None:
            destroyed_by.add(threading.get_ident())

    def guarded(until: float) -> None:
        guard = Guard()
        parameter = torch.nn.Parameter(torch.ones(30, 30))
        while time.monotonic() < until:
            repr(parameter)  # ten thousand views, and guards
        del parameter
        return guard and None

    profile = StartProfile(Installed(), period_s=0.001)
    profile.start()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        guarded(time.monotonic() + 0.02)
    profile.joined()
    assert destroyed_by == {threading.get_ident()}


def test_who_never_began_has_nothing_to_say() -> None:
    assert StartProfile(Installed()).joined() == []


def test_a_line_that_takes_long_is_told_while_it_lasts_and_so_is_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start_profile, "TELL_S", 0.2)
    monkeypatch.setattr(start_profile, "FIRST_STEP_PERIOD_S", 0.01)
    told: list[tuple[str, float]] = []
    page = Page.create("test")
    try:
        profile = StartProfile(Installed(), page, lambda line, seconds: told.append((line, seconds)))
        profile.start()
        time.sleep(0.5)  # builds a model
        assert profile.joined()[0].text == "time.sleep(0.5)  # builds a model"
        ((line, seconds),) = told  # the next word would come after six times as long
        assert line.startswith(f"{Path(__file__).name}:") and "builds a model, in test_a_line" in line
        assert 0.2 <= seconds < 0.4
        time.sleep(0.4)  # waits for the others
        assert len(told) == 1
        page.resume(7, 0, 0)
        time.sleep(0.5)  # compiles
        page.set_committed(8, 0)
        assert len(told) == 2 and "# compiles" in told[1][0]
        time.sleep(0.4)  # the second step
        assert len(told) == 2 and not [t for t in threading.enumerate() if t.name == "flashrecovery-first-step"]
    finally:
        page.close()
