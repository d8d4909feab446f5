"""A script, or a module, finds what it finds under ``python`` alone, and still does when its last line has been run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashrecovery.worker.startup.main_module import run_module

FACTS = """
import atexit, multiprocessing, pickle, sys, threading, time
class Own: pass
def pickled(when):
    try:
        print(when, type(pickle.loads(pickle.dumps(Own()))) is Own, flush=True)
    except Exception as e:
        print(when, e, flush=True)
def later():
    threading.main_thread().join()
    pickled("thread")
atexit.register(pickled, "exit handler")
threading.Thread(target=later).start()
print(__name__, __file__, repr(__package__), __spec__ and __spec__.name, type(__loader__).__name__, __cached__)
print(type(__builtins__).__name__, sys.argv, later.__code__.co_filename)
print(sys.modules["__main__"].__dict__ is globals(), sys.modules.get("__mp_main__") is sys.modules["__main__"])
pickled("script")
"""
BOOTSTRAP = """
import multiprocessing, sys  # which an adapter may have imported before
from flashrecovery.worker.startup import bootstrap
command = sys.argv[1:]
bootstrap._set_module_path(command)
sys.argv = bootstrap._script_arguments(command)
(bootstrap.run_module if command[0] == "-m" else bootstrap.run_file)(sys.argv[0])
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for file in (tmp_path / "script.py", package / "__main__.py", package / "module.py"):
        file.write_text(FACTS)
    (tmp_path / "run.py").write_text(BOOTSTRAP)
    return tmp_path


def output(place: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=place, capture_output=True, text=True, timeout=60, check=True)
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "command",
    [("script.py", "--a"), ("./script.py",), ("-m", "package"), ("-m", "package.module", "b")],
    ids=["script", "relative", "package", "module"],
)
def test_as_under_python(command: tuple[str, ...], place: Path) -> None:
    alone, ours = output(place, *command), output(place, "run.py", *command)
    assert alone.count("True") == 5 and ours == alone


def test_as_under_python_when_compiled(place: Path) -> None:
    compiled = place / "compiled.pyc"
    code = f"import py_compile; py_compile.compile('script.py', {str(compiled)!r})"
    output(place, "-c", code)
    assert output(place, "run.py", compiled.name) == output(place, compiled.name)


def test_what_cannot_be_run_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    for name in ("nowhere", "nowhere.inside", "package.nowhere", "sys.inside", "sys"):
        with pytest.raises(ImportError, match=f"there is no module {name} that can be run"):
            run_module(name)
