"""What has become of a module that was imported, and which modules become the same here as in live workers."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashrecovery.agent.processes.zygote import KnownModules
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.worker.preimport import import_trial
from flashrecovery.worker.preimport.import_outcomes import UNKNOWN, ImportOutcomes, digest

SETTINGS = "FLAG = False\n"
READS = {
    "a constant": "VALUE = 2 if settings.FLAG else 1",
    "a private constant": "_VALUE = 2 if settings.FLAG else 1",
    "an item of a dict": "TABLE = {'a': [settings.FLAG]}",
    "an element of a set": "NAMES = {'a', 'b' if settings.FLAG else 'c'}",
    "another function": "if settings.FLAG:\n    def f(): return 1\nelse:\n    def f(): return 2",
    "a default": "def f(x=settings.FLAG): return x",
    "a keyword's default": "def f(*, x=settings.FLAG): return x",
    "an attribute of a class": "class A:\n    flag = settings.FLAG",
    "a base class": "class A(dict if settings.FLAG else list): pass",
    "a method's default": "class A:\n    def f(self, x=settings.FLAG): return x",
    "a dataclass's default": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = settings.FLAG",
    "an object": "class A:\n    def __init__(self): self.flag = settings.FLAG\nOBJECT = A()",
    "an object of another package": "import types\nOBJECT = types.SimpleNamespace(flag=settings.FLAG)",
    "a tensor": "import torch\nX = torch.zeros(2) if settings.FLAG else torch.ones(2)",
    "a dtype": "import torch\nX = torch.float64 if settings.FLAG else torch.float32",
    "an array": "import numpy\nX = numpy.array([settings.FLAG])",
    "a name that is there": "if settings.FLAG: X = 1",
    "an alias": "import json, pickle\nloads = json.loads if settings.FLAG else pickle.loads",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "settings.py").write_text(SETTINGS)
    importlib.invalidate_caches()
    before = set(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - before:
        if getattr(sys.modules[name], "__file__", "").startswith(str(tmp_path)):
            del sys.modules[name]


def outcome(name: str, flag: bool) -> int:
    """Of an import with this flag."""
    for module in (name, "settings"):
        sys.modules.pop(module, None)
    importlib.import_module("settings").FLAG = flag
    return digest(importlib.import_module(name))


@pytest.mark.parametrize("reads", READS)
def test_what_an_import_has_read_is_seen(reads: str, folder: Path) -> None:
    (folder / "second.py").write_text(f"import settings\n{READS[reads]}\n")
    assert outcome("second", True) == outcome("second", True) != UNKNOWN
    assert outcome("second", True) != outcome("second", False)


def test_a_module_is_described_alike_in_each_process(folder: Path) -> None:
    """With other hashes, addresses, times and UUIDs."""
    text = "import time, uuid\nNAMES = {'a', 'b', 'c'}\nKEYS = dict.fromkeys(NAMES)\nMADE = time.time_ns()\n"
    text += "RUN = f'run-{uuid.uuid4()}'\nclass A: pass\nWHO = id(A)\nTEXT = str(A())\nFUNCTION = lambda x=A(): x\n"
    (folder / "second.py").write_text(
        text + "def f(x=None): return x\nf.__defaults__ = (f,)\nLIST = []\nLIST.append(LIST)\n"
    )
    code = "import second\nfrom flashrecovery.worker.preimport.import_outcomes import digest\nprint(digest(second))"
    said = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        said.add(subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True).stdout)
    assert len(said) == 1 and said != {b"0\n"}


def test_no_code_of_a_value_runs(folder: Path) -> None:
    (folder / "second.py").write_text(
        "class Lazy:\n"
        "    def __getattribute__(self, name): raise RuntimeError(name)\n"
        "    def __repr__(self): raise RuntimeError\n"
        "    def __eq__(self, other): raise RuntimeError\n"
        "    def __hash__(self): return 1\n"
        "    def __iter__(self): raise RuntimeError\n"
        "class List(list):\n"
        "    __iter__ = Lazy.__iter__\n"
        "ONE, FEW, MANY = Lazy(), {Lazy()}, List([1])\n"
    )
    assert digest(importlib.import_module("second")) != UNKNOWN


def test_what_cannot_be_described_is_equal_to_nothing(folder: Path) -> None:
    (folder / "second.py").write_text("globals()[1] = 2\n")
    assert digest(importlib.import_module("second")) == UNKNOWN


def test_outcomes_are_those_of_the_imports_end(folder: Path) -> None:
    (folder / "second.py").write_text("import third\nX = 1\n")
    (folder / "third.py").write_text("Y = 1\n")
    (folder / "fourth.py").write_text("raise ImportError\n")
    watch = ImportOutcomes(lambda file: not file.endswith("third.py"))
    watch.start()
    second = importlib.import_module("second")
    with pytest.raises(ImportError):
        importlib.import_module("fourth")
    expected = digest(second)
    second.X = 2  # the script's, later
    sys.modules["made"] = type(sys)("made")
    watch.stop()
    watch.stop()
    assert watch.told() == {"second": expected, "made": UNKNOWN} and watch not in sys.meta_path
    del sys.modules["made"]


def importing(names: object, tried: object) -> None:
    for name in names:  # type: ignore[attr-defined]
        importlib.import_module(name)
        tried(name, None)  # type: ignore[operator]


def test_modules_that_become_others_are_left_out_and_those_that_import_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "reads.py").write_text("import settings\nVALUE = settings.FLAG\n")
    (folder / "through.py").write_text("import reads\n")
    (folder / "harmless.py").write_text("import settings\n")
    told = {"reads": outcome("reads", True), "through": 5, "harmless": outcome("harmless", True)}
    told["through"] = outcome("through", True)
    for name in (*told, "settings"):
        sys.modules.pop(name, None)
    names = ["through", "harmless", "reads", "settings"]
    assert import_trial.equal_ones(names, told, importing) == ["harmless", "settings"]
    assert not sys.modules.keys() & {*names}, "it was another process"
    assert "through is left to each rank: imported ahead, reads is other" in capsys.readouterr().out
    assert import_trial.equal_ones(names, {}, importing) == names, "those vary from worker to worker"
    assert import_trial.equal_ones(["settings"], {"settings": UNKNOWN}, importing) == []


def test_where_too_many_import_what_is_other_the_rest_is_imported_ahead(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each trial finds one of them, and takes as long as all imports."""
    names = [f"importer{number}" for number in range(2 * import_trial._TRIES)]
    for name in names:
        (folder / f"{name}.py").write_text("import settings\n")
    told = {"settings": 1}
    assert import_trial.equal_ones(names, told, importing) == names[import_trial._TRIES - 1 :]
    assert "modules are imported ahead, which import some of these" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["import os\nos._exit(1)\n", "import os\nos.kill(os.getpid(), 9)\n", "raise SystemExit\n"]
)
def test_a_trial_that_ends_otherwise_leaves_all_out(text: str, folder: Path) -> None:
    (folder / "ends.py").write_text(text)
    assert import_trial.equal_ones(["settings", "ends"], {}, importing) == []


def test_a_trial_that_takes_too_long_leaves_all_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_trial, "_LONGEST_S", 0.2)
    (folder / "waits.py").write_text("import time\ntime.sleep(60)\n")
    assert import_trial.equal_ones(["waits"], {}, importing) == []


def test_what_varies_from_worker_to_worker_is_not_compared() -> None:
    known = KnownModules()
    known.add(pb.Modules(names=["a", "b"], outcomes={"a": 1, "b": 2}))
    assert known.modules().outcomes == {"a": 1, "b": 2}
    known.add(pb.Modules(names=["a", "b", "c"], outcomes={"a": 1, "b": 3, "c": UNKNOWN}))
    assert known.modules().outcomes == {"a": 1, "c": UNKNOWN}
