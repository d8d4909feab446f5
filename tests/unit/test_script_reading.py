"""What a zygote reads from a script before anybody runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrecovery.worker.script_reading import ScriptFacts, read_script, script_file


def read(folder: Path, text: str, *, gpus: bool = True, **beside: str) -> ScriptFacts:
    for name, content in beside.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    (folder / "train.py").write_text(text)
    return read_script(folder / "train.py", folder, gpus=gpus)


def test_imports_are_found_where_they_run(tmp_path: Path) -> None:
    text = """
from __future__ import annotations
import torch, numpy as np
from torch.nn import functional
from typing import TYPE_CHECKING
try:
    import first
except ImportError:
    import second
if True:
    import third
if TYPE_CHECKING:
    import never
class A:
    import inside
with open("x"):
    import opened
def f():
    import later
if __name__ == "__main__":
    import main_only
"""
    facts = read(tmp_path, text)
    names = ("torch", "numpy", "torch.nn", "typing", "first", "second", "third", "inside", "opened")
    assert facts.imports == names and facts.members == ("torch.nn.functional", "typing.TYPE_CHECKING")
    assert not facts.ends_at and not facts.uncertain


def test_the_scripts_own_modules_are_followed_and_not_named(tmp_path: Path) -> None:
    (tmp_path / "package" / "deep").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("from . import relative\nfrom .deep import inner\n")
    (tmp_path / "package" / "relative.py").write_text("import a\nfrom .deep.inner import thing\n")
    (tmp_path / "package" / "deep" / "__init__.py").write_text("import b\n")
    (tmp_path / "package" / "deep" / "inner.py").write_text(
        "from ..relative import x\nfrom ... import nothing\nimport c\n"
    )
    facts = read(tmp_path, "import beside\nimport package\nimport beside\n", beside="import d\nimport train\n")
    assert facts.imports == ("d", "a", "b", "c")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("os.environ['X'] = '1'", {"environment": {"X": "1"}}),
        ("os.environ['X'] = '1'; os.environ['X'] = '2'", {"environment": {"X": "2"}}),
        ("os.environ.setdefault('X', '1')", {"defaults": {"X": "1"}}),
        ("os.environ.update(X='1', Y='2')", {"environment": {"X": "1", "Y": "2"}}),
        ("os.environ.update({'X': '1'})", {"environment": {"X": "1"}}),
        ("os.putenv('X', '1')", {"environment": {"X": "1"}}),
        ("value = os.environ['X']", {}),
        ("value = os.environ.get('X', 'y')", {}),
        ("os.environ['X'] = str(1)", {"uncertain": frozenset("X")}),
        ("os.environ['X'] += 'a'", {"uncertain": frozenset("X")}),
        ("os.environ.setdefault('X', f())", {"uncertain": frozenset("X")}),
        ("if f(): os.environ['X'] = '1'", {"uncertain": frozenset("X")}),
        ("for i in x: os.environ['X'] = '1'", {"uncertain": frozenset("X")}),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']", {"uncertain": {"CUDA_VISIBLE_DEVICES"}}),
    ],
)
def test_variables_that_are_set(line: str, expected: dict[str, object], tmp_path: Path) -> None:
    facts = read(tmp_path, f"import os\n{line}\nimport torch\n")
    assert facts == ScriptFacts(imports=("os", "torch"), **expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    [
        "os.environ[name] = '1'",
        "os.environ.update(settings)",
        "os.environ.update(**settings)",
        "os.environ = {}",
        "os.environ['OMP_NUM_THREADS'] = str(n)",
        "if f(): os.environ['OMP_NUM_THREADS'] = '4'",
        "os.environ['LD_LIBRARY_PATH'] += ':/x'",
        "os.environ['TZ'] = zone",
    ],
)
def test_what_comes_after_something_unknown_is_not_imported(line: str, tmp_path: Path) -> None:
    """Also in a module beside the script: what the script imports after that is not known either."""
    facts = read(tmp_path, f"import os\n{line}\nimport torch\n")
    assert facts.imports == ("os",) and facts.ends_at == "train.py:2"
    facts = read(tmp_path, "import first\nimport beside\nimport torch\n", beside=f"import os\n{line}\nimport numpy\n")
    assert facts.imports == ("first", "os") and facts.ends_at == "beside.py:2"


def test_a_known_number_of_threads_is_no_obstacle(tmp_path: Path) -> None:
    facts = read(tmp_path, "import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch\n")
    assert facts.imports == ("os", "torch") and facts.environment == {"OMP_NUM_THREADS": "4"}


def test_whether_there_is_a_gpu_is_known_where_there_is_none(tmp_path: Path) -> None:
    text = """
if not torch.cuda.is_available():
    os.environ['X'] = 'cpu'
else:
    os.environ['X'] = str(count())
if torch.cuda.is_available():
    import kernels
"""
    assert read(tmp_path, text, gpus=False) == ScriptFacts(environment={"X": "cpu"})
    assert read(tmp_path, text) == ScriptFacts(imports=("kernels",), uncertain=frozenset("X"))


@pytest.mark.parametrize("text", ["import (", "\0", "é".encode("latin-1").decode("latin-1") + " = ("])
def test_what_cannot_be_parsed_is_left_to_the_script(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text) == ScriptFacts()
    assert read_script(tmp_path / "nowhere.py", tmp_path) == ScriptFacts()


def test_the_file_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/__main__.py", "package/train.py"):
        (tmp_path / name).write_text("")
    assert script_file(["a/train.py", "--x"], tmp_path) == Path("a/train.py")
    for module, file in (
        ("train", "train.py"),
        ("package", "package/__main__.py"),
        ("package.train", "package/train.py"),
    ):
        assert script_file(["-m", module, "--x"], tmp_path) == tmp_path / file
    assert script_file(["-m", "torch.nowhere"], tmp_path) is None
