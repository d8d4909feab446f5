"""What is read from a script before anybody runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrecovery.worker.preimport.script_imports import FILES_READ, Import, ScriptFacts, Setting, read_script


def own_in(folder: Path) -> object:
    """Modules in this folder are the script's own, all others are installed."""

    def find(top: str) -> Path | None:
        places = (folder / f"{top}.py", folder / top / "__init__.py", folder / top)
        return next((place for place in places if place.exists()), None)

    return find


def read(folder: Path, text: str, *, gpus: bool = True, **beside: str) -> ScriptFacts:
    for name, content in beside.items():
        (folder / f"{name}.py").write_text(content)
    (folder / "train.py").write_text(text)
    return read_script(folder / "train.py", own_in(folder), gpus=gpus)  # type: ignore[arg-type]


def imports(facts: ScriptFacts) -> list[str]:
    return [action.name for action in facts.actions if isinstance(action, Import) and not action.member]


def settings(facts: ScriptFacts) -> list[Setting]:
    return [action for action in facts.actions if isinstance(action, Setting)]


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
    names = ["torch", "numpy", "torch.nn", "typing", "first", "second", "third", "inside", "opened"]
    assert imports(facts) == names and Import("torch.nn.functional", member=True) in facts.actions
    assert not facts.ends_at and not settings(facts)


def test_the_scripts_own_modules_are_followed_and_not_named(tmp_path: Path) -> None:
    (tmp_path / "package" / "deep").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("from . import relative\nfrom .deep import inner\n")
    (tmp_path / "package" / "relative.py").write_text("import a\nfrom .deep.inner import thing\n")
    (tmp_path / "package" / "deep" / "__init__.py").write_text("import b\n")
    (tmp_path / "package" / "deep" / "inner.py").write_text("from ..relative import x\nimport c\n")
    (tmp_path / "spread").mkdir()
    (tmp_path / "spread" / "part.py").write_text("import e\n")
    text = "import beside\nimport package\nimport beside\nfrom spread.part import x\n"
    facts = read(tmp_path, text, beside="import d\nimport train\n")
    assert imports(facts) == ["d", "a", "b", "c", "e"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("os.environ['X'] = '1'", [Setting("X", "1")]),
        ("os.environ['X'] = '1'; os.environ['X'] = '2'", [Setting("X", "1"), Setting("X", "2")]),
        ("os.environ.setdefault('X', '1')", [Setting("X", "1", default=True)]),
        ("os.environ.update(X='1', Y='2')", [Setting("X", "1"), Setting("Y", "2")]),
        ("os.environ.update({'X': '1'})", [Setting("X", "1")]),
        ("os.putenv('X', '1')", [Setting("X", "1")]),
        ("value = os.environ['X']", []),
        ("value = os.environ.get('X', 'y')", []),
        ("os.environ['X'] = str(1)", [Setting("X", None)]),
        ("os.environ['X'] += 'a'", [Setting("X", None)]),
        ("os.environ.setdefault('X', f())", [Setting("X", None, default=True)]),
        ("del os.environ['X']", [Setting("X", None)]),
        ("os.environ.pop('X', None)", [Setting("X", None)]),
        ("if f(): os.environ['X'] = '1'", [Setting("X", None)]),
        ("for i in x: os.environ['X'] = '1'", [Setting("X", None)]),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']", [Setting("CUDA_VISIBLE_DEVICES", None)]),
        ("os.environ['OMP_NUM_THREADS'] = '4'", [Setting("OMP_NUM_THREADS", "4")]),
    ],
)
def test_variables_that_are_set(line: str, expected: list[Setting], tmp_path: Path) -> None:
    facts = read(tmp_path, f"import os\n{line}\nimport torch\n")
    assert facts.actions == (Import("os"), *expected, Import("torch")) and not facts.ends_at


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return os.environ['Y']", {"X"}),
        ("os.environ['Y'] = '1'", {"X", "Y"}),
        ("os.environ['Z'] = '1'", {"X"}),
        ("os.environ['Z'] = '2'", {"X", "Z"}),
        ("with f(): os.environ.setdefault('Y', '1')", {"X", "Y"}),
        ("f(lambda: os.environ.update(Y='1'))", {"X", "Y"}),
        ("del os.environ['Y']", {"X", "Y"}),
        ("os.environ[name] = '1'", None),
        ("os.environ |= settings", None),
        ("environment = os.environ", None),
    ],
)
def test_variables_that_are_set_at_any_time(body: str, expected: set[str] | None, tmp_path: Path) -> None:
    """In a function of a module that a function imports, and where the script is the main program. What is set to the
    same value before all imports is not in doubt."""
    text = "import os\nos.environ['Z'] = '1'\ndef main():\n    from setup import begin\n    begin()\n"
    text += "if __name__ == '__main__':\n    os.environ['X'] = '1'\n    main()\n"
    facts = read(tmp_path, text, setup=f"import os\ndef begin():\n    {body}\n")
    assert facts.sets == expected and not facts.ends_at


def test_where_reading_ends_nobody_knows_what_is_set(tmp_path: Path) -> None:
    assert read(tmp_path, "sys.path.insert(0, '/mine')\n").sets is None


def test_what_the_script_does_has_its_order(tmp_path: Path) -> None:
    """A module that reads a variable when it is imported has read it before it is set."""
    text = "import first\nos.environ['X'] = '1'\nimport second\n"
    text += "os.environ['X'] = '2'\nos.environ['X'] = '1'\nimport third\n"
    one, two = Setting("X", "1"), Setting("X", "2")
    facts = read(tmp_path, text)
    assert facts.actions == (Import("first"), Import("second"), two, one, Import("third"))


@pytest.mark.parametrize(
    "line",
    [
        "os.environ[name] = '1'",
        "os.environ.update(settings)",
        "os.environ.update(**settings)",
        "os.environ.clear()",
        "os.environ = {}",
        "os.environ['OMP_NUM_THREADS'] = str(n)",
        "if f(): os.environ['OMP_NUM_THREADS'] = '4'",
        "os.environ['LD_LIBRARY_PATH'] += ':/x'",
        "os.environ['TZ'] = zone",
        "sys.path.insert(0, '/mine')",
        "sys.path[0:0] = ['/mine']",
        "sys.path = ['/mine'] + sys.path",
        "sys.meta_path.insert(0, finder)",
        "sys.modules['torch'] = mine",
        "site.addsitedir('/mine')",
        "numpy.add = mine",
        "numpy.linalg.norm = mine",
        "setattr(numpy, 'add', mine)",
        "for name in names: setattr(numpy.linalg, name, mine)",
        "numpy.add = MagicMock()",
        "numpy = load('numpy'); numpy.add = mine",
        "numpy = MagicMock(); numpy.x = 1; import numpy; numpy.add = mine",
    ],
)
def test_what_comes_after_something_unknown_is_not_imported(line: str, tmp_path: Path) -> None:
    """Also in a module beside the script: what the script imports after that is not known either."""
    line = (
        line.replace("os.add", "numpy.add").replace("os.path", "numpy.linalg").replace("setattr(os,", "setattr(numpy,")
    )
    facts = read(tmp_path, f"import numpy\n{line}\nimport torch\n")
    assert imports(facts) == ["numpy"] and facts.ends_at.startswith("train.py:2: "), facts
    facts = read(
        tmp_path, "import first\nimport beside\nimport torch\n", beside=f"import numpy\n{line}\nimport scipy\n"
    )
    assert imports(facts) == ["first", "numpy"] and facts.ends_at.startswith("beside.py:2: "), facts


@pytest.mark.parametrize(
    "line",
    [
        "sys.path.append('/mine')",
        "torch.backends.cudnn.benchmark = fast",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "sys.stdout = Tee()",
        "own.add = torch.add",
        "value = torch.add",
        "torch.set_num_threads(4)",
        "setattr(own, 'add', mine)",
        "logging.root.handlers = []",
        "x = sys.path[0] + sys.path.index('a') * ''",
        "torch.storage._load_from_bytes = safely",
        "if not found:\n    torch = MagicMock()\n    torch.jit = nothing",
        "try:\n    import torch\nexcept ImportError:\n    torch = mock.MagicMock()\n    torch.jit = nothing",
    ],
)
def test_what_changes_no_module_is_passed_by(line: str, tmp_path: Path) -> None:
    facts = read(tmp_path, f"import torch\nimport own\n{line}\nimport scipy\n", own="")
    assert imports(facts) == ["torch", "scipy"] and not facts.ends_at, facts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import package\npackage.FLAG = True\n", "package.FLAG is set"),
        ("from package import config\nconfig.flag += 1\n", "config.flag is set"),
        ("import package\npackage.CONFIG['x'] = 1\n", "package.CONFIG['x'] is set"),
        ("import package\ndel package.CONFIG['x']\n", "package.CONFIG['x'] is set"),
        ("import package\nconfig = package.config\nconfig.flag = 1\n", "config.flag is set"),
        ("import package\nconfig = package.make()\nconfig.flag = 1\n", "package.make is called"),
        ("import torch\nconfig = torch.make()\nconfig.flag = 1\n", "config.flag is set"),
        (
            "import package\ndef d(f):\n  def g(x):\n    p = package\n    p.FLAG = 1\n  return g\n@d\ndef h(): ...\n",
            "d is called: p.FLAG is set",
        ),
        ("import package\nfor m in [package]:\n    m.FLAG = 1\n", "m.FLAG is set"),
        ("import package\nif x:\n    package.FLAG = 1\n", "package.FLAG is set"),
        ("import package\nclass A:\n    package.FLAG = 1\n", "package.FLAG is set"),
        ("import package\nsetattr(package, name, 1)\n", "package.? is set"),
        ("import sys\nsys.modules['package'].FLAG = 1\n", ""),
        ("import sys\nsys.argv[1:] = []\n", "sys.argv[1:] is set"),
        ("import package\npackage.register(1)\n", "package.register is called"),
        ("import package\n_ = package.register(1)\n", "package.register is called"),
        ("import package\n@package.register\ndef f(): ...\n", "package.register is called"),
        ("import package\n@package.register(1)\nclass A: ...\n", "package.register is called"),
        ("import package\nwith package.using(1):\n    pass\n", "package.using is called"),
        ("import package\nif package.begin():\n    pass\n", "package.begin is called"),
        ("import package\nf = lambda: package.begin()\nf()\n", "f is called"),
        ("import torch\ntorch.set_default_dtype(torch.float64)\n", "torch.set_default_dtype is called"),
        ("import torch\nx = torch.manual_seed(1)\n", "torch.manual_seed is called"),
        ("import torch\nwith torch.no_grad():\n    pass\n", "torch.no_grad is called"),
        ("import warnings\nwarnings.filterwarnings('error')\n", "warnings.filterwarnings is called"),
        ("import importlib\nimportlib.reload(package)\n", "importlib.reload is called"),
        ("import random\nrandom.seed(1)\n", "random.seed is called"),
        ("import os\nos.chdir('/')\n", "os.chdir is called"),
        ("exec(open('x').read())\n", "exec runs a text"),
        ("import package\ndef f():\n    package.FLAG = 1\nf()\n", "f is called: package.FLAG is set"),
        ("import package\ndef f(m):\n    m.FLAG = 1\nf(package)\n", "f is called: m.FLAG is set"),
        ("import package\ndef g():\n    package.begin()\ndef f():\n    g()\nf()\n", "f is called: g is called: "),
        ("import package\nclass A:\n    def __init__(self):\n        package.FLAG = 1\nA()\n", "A is called: "),
        ("import package\nclass A:\n    def m(self):\n        package.FLAG = 1\nA().m()\n", "m is called: "),
        ("from helpers import *\nbegin()\n", "begin is called"),
        ("import helpers\nhelpers.begin()\n", "begin is called: package.FLAG is set"),
        ("from helpers import begin\n@begin\ndef f(): ...\n", "begin is called: package.FLAG is set"),
        ("from helpers import alias\nalias()\n", "alias is called"),
        ("import helpers\nhelpers.config.flag = 1\n", "helpers.config.flag is set"),
        ("from helpers import config\nconfig.flag = 1\n", "config.flag is set"),
        ("import helpers\nc = helpers.config\nc.flag = 1\n", "c.flag is set"),
        ("import package\ndef get():\n    return package.config\nget().flag = 1\n", "get().flag is set"),
        ("import package\nLIST = [package]\nLIST[0].FLAG = 1\n", "LIST[0].FLAG is set"),
        ("import package\nTABLE = {'a': package}\nTABLE['a'].FLAG = 1\n", "TABLE['a'].FLAG is set"),
        ("import package\nlist(map(package.register, [1]))\n", "package.register is called"),
        ("import package\nmatch 1:\n    case 1:\n        package.FLAG = 1\n", "package.FLAG is set"),
        ("import package\ntry:\n    x = 1\nexcept* OSError:\n    package.FLAG = 1\n", "package.FLAG is set"),
        (
            "import package\nclass A:\n    def __init__(self):\n        self.c = package.config\n"
            "        self.c.flag = 1\nA()\n",
            "A is called: self.c.flag is set",
        ),
    ],
)
def test_after_a_change_that_a_later_import_may_read_nothing_is_imported(
    text: str, expected: str, tmp_path: Path
) -> None:
    helpers = "import package\nfrom package import config\ndef begin(f=None):\n    package.FLAG = 1\n"
    facts = read(tmp_path, text + "import second\n", helpers=helpers + "alias = package.begin\n")
    assert expected in (facts.changes_at or facts.ends_at) and "second" not in imports(facts), facts


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True\ntorch.backends.cudnn.benchmark = True\n",
        "import torch\ntorch.set_float32_matmul_precision('high')\n",
        "import torch\nfast = torch.compile(f)\n@torch.no_grad()\ndef g(): ...\n",
        "import logging\nlogging.basicConfig()\nlogger = logging.getLogger(__name__)\nlogger.setLevel(1)\n",
        "import warnings\nwarnings.filterwarnings('ignore')\n",
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('x')\nargs = parser.parse_args()\n"
        "args.x = 1\n",
        "import os\nfolder = os.environ.get('X', 'x').strip()\nos.makedirs(folder)\nprint(folder)\n",
        "from pathlib import Path\nfolder = Path(__file__).parent / 'x'\nfolder.mkdir()\n",
        "TABLE = {}\nTABLE['x'] = 1\nLIST = [1]\nLIST.append(2)\nLIST[0] += 1\n",
        "from dataclasses import dataclass, field\n@dataclass\nclass A:\n    x: list = field(default_factory=list)\n",
        "import package\ndef main():\n    package.FLAG = True\n",
        "REGISTRY = {}\ndef register(name):\n    def inner(cls):\n        REGISTRY[name] = cls\n        return cls\n"
        "    return inner\n@register('a')\nclass A:\n    def __init__(self):\n        self.x = 1\nA().x = 2\n",
        "import package\nVERSION = package.__version__.split('.')\nassert VERSION[0].isdigit()\n",
        "class A:\n    @property\n    def x(self): ...\n    @x.setter\n    def x(self, value): ...\n",
        "import torch\nclass A:\n    @torch.jit.ignore\n    def x(self): ...\n    @classmethod\n    def y(cls): ...\n",
        "def mark(f):\n    f.x = 1\n    return f\n@mark\ndef g(): ...\n",
        "def f(n):\n    return f(n - 1) if n else 0\nN = f(3)\n",
    ],
)
def test_what_no_import_reads_is_passed_by(text: str, tmp_path: Path) -> None:
    facts = read(tmp_path, text + "import second\n")
    assert not facts.changes_at and not facts.ends_at and "second" in imports(facts), facts


def test_a_module_that_is_not_written_in_python_may_change_anything(tmp_path: Path) -> None:
    (tmp_path / "mine.so").write_bytes(b"\0")
    (tmp_path / "train.py").write_text("import first\nimport mine\nimport second\n")
    facts = read_script(tmp_path / "train.py", lambda top: tmp_path / "mine.so" if top == "mine" else None)
    assert imports(facts) == ["first"] and facts.changes_at == "mine.so: it is not written in Python"


def test_a_module_that_is_found_in_a_folder_which_the_script_adds_may_change_anything(tmp_path: Path) -> None:
    text = "import sys\nimport nowhere\nsys.path.append('..')\nimport helpers\nimport second\n"
    (tmp_path / "train.py").write_text(text)
    absent = ("nowhere", "helpers").__contains__
    facts = read_script(tmp_path / "train.py", lambda top: None, absent=absent)
    assert imports(facts) == ["sys", "nowhere"] and "helpers is imported" in facts.changes_at


def test_variables_are_known_behind_a_change(tmp_path: Path) -> None:
    facts = read(tmp_path, "import os, package\npackage.FLAG = 1\nimport second\nos.environ['X'] = '1'\n")
    assert facts.actions == (Import("os"), Import("package"), Setting("X", "1")) and facts.sets == frozenset()


@pytest.mark.parametrize("kind", ["def patch():", "async def patch():", "class A:\n  def patch(self):"])
def test_a_function_that_replaces_parts_of_a_module_may_be_called_before_the_next_import(
    kind: str, tmp_path: Path
) -> None:
    patch = f"import torch\nimport scipy\n{kind}\n    if x:\n      torch.add = lambda a, b: a\nimport after\n"
    facts = read(tmp_path, "import first\nimport beside\nimport megatron\n", beside=patch)
    assert imports(facts) == ["first", "torch", "scipy"]
    assert facts.ends_at.startswith("beside.py:") and facts.ends_at.endswith(": a function replaces torch.add")


ABSENT = """
def patch():
    import absent.parts as parts
    global kept
    kept = parts.multiply
    parts.multiply = mine
def undo():
    parts = import_if_there("absent.parts")
    if parts is not None:
        parts.multiply = kept
"""
"""Megatron-LM's ``batch_invariant_kernels.py``, which changes Transformer Engine."""


def read_without(folder: Path, absent: str, text: str) -> ScriptFacts:
    (folder / "train.py").write_text(text)
    return read_script(folder / "train.py", own_in(folder), absent=lambda top: top == absent)  # type: ignore[arg-type]


def test_no_function_replaces_parts_of_a_module_that_is_not_there(tmp_path: Path) -> None:
    text = f"import first\n{ABSENT}\nimport after\n"
    facts = read_without(tmp_path, "absent", text)
    assert imports(facts) == ["first", "after"] and not facts.ends_at, facts
    facts = read_without(tmp_path, "nothing", text)  # it is there
    assert imports(facts) == ["first"] and facts.ends_at.endswith(": a function replaces parts.multiply")


def test_how_objects_are_written_as_yaml_is_looked_up_then(tmp_path: Path) -> None:
    """Megatron-LM's ``yaml_utils.py``."""
    text = "import yaml\ndef representers():\n    kept = yaml.SafeDumper.yaml_representers.copy()\n"
    text += "    yield\n    yaml.SafeDumper.yaml_representers = kept\nimport after\n"
    facts = read(tmp_path, text)
    assert imports(facts) == ["yaml", "after"] and not facts.ends_at


@pytest.mark.parametrize(
    "instead",
    [
        "try:\n    import absent as parts\nexcept ImportError:\n    import torch as parts",
        "try:\n    import absent as parts\nexcept ImportError:\n    parts = load('torch')",
        "try:\n    import absent as parts\nexcept ImportError:\n    pass\nparts = torch",
        "import absent as parts\nfor parts in (torch, numpy):\n    pass",
        "import absent as parts\nwith given() as parts:\n    pass",
        "import absent as parts\ndef f(parts): ...",
    ],
)
def test_a_name_may_stand_for_another_module_where_the_first_is_not_there(instead: str, tmp_path: Path) -> None:
    text = f"{instead}\ndef patch():\n    parts.multiply = mine\nimport after\n"
    facts = read_without(tmp_path, "absent", text)
    assert "after" not in imports(facts) and facts.ends_at.endswith(": a function replaces parts.multiply")


def test_a_function_that_sets_a_librarys_settings_replaces_nothing(tmp_path: Path) -> None:
    text = "import torch\ndef main(args):\n    torch.backends.cuda.matmul.allow_tf32 = args.tf32\n"
    text += "    self.x = args\nimport scipy\n"
    facts = read(tmp_path, text)
    assert imports(facts) == ["torch", "scipy"] and not facts.ends_at


def test_whether_there_is_a_gpu_is_known_where_there_is_none(tmp_path: Path) -> None:
    text = """
if not torch.cuda.is_available():
    os.environ['X'] = 'cpu'
else:
    os.environ['X'] = str(count())
if torch.cuda.is_available():
    import kernels
"""
    assert read(tmp_path, text, gpus=False).actions == (Setting("X", "cpu"),)
    assert read(tmp_path, text).actions == (Setting("X", None), Import("kernels"))


@pytest.mark.parametrize("text", ["import (", "\0", "x = ("])
def test_what_cannot_be_parsed_is_left_to_the_script(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text) == ScriptFacts()
    assert read_script(tmp_path / "nowhere.py", own_in(tmp_path)) == ScriptFacts()  # type: ignore[arg-type]


def test_a_large_checkout_is_read_in_part(tmp_path: Path) -> None:
    beside = {f"m{i}": "" for i in range(FILES_READ + 1)}
    facts = read(tmp_path, "".join(f"import {name}\n" for name in beside) + "import torch\n", **beside)
    assert "modules of the script's own" in facts.ends_at and not imports(facts)
