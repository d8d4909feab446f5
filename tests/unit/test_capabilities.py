"""Every private thing of a framework belongs to a capability, and probes see what is there and what is not."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from flashrecovery import capabilities
from flashrecovery.capabilities import Capability, Framework, Way, capability
from flashrecovery.capabilities.of_lightning import FABRIC, TRAINER
from flashrecovery.capabilities.of_ray import RAY
from flashrecovery.capabilities.of_torch import TORCH
from flashrecovery.capabilities.of_trainer import ACCELERATE, TRANSFORMERS
from flashrecovery.capabilities.probes import Assigned, Attributes, Defined, Live, Parameters, Uses, module_code
from flashrecovery.errors import UnsupportedError
from fr_deepspeed.capabilities import DEEPSPEED
from fr_megatron.capabilities import MEGATRON

ROOT = Path(__file__).resolve().parents[2]
CORE = (TORCH, TRANSFORMERS, ACCELERATE, FABRIC, TRAINER)
COVERED: dict[str, tuple[Framework, ...]] = {
    "common/flashrecovery": CORE,
    "common/flashrecovery/ray": (RAY,),
    "common/flashrecovery/trainer": (*CORE, DEEPSPEED),
    "fr_deepspeed": (TORCH, DEEPSPEED, ACCELERATE),
    "fr_megatron": (TORCH, MEGATRON),
}
"""Which frameworks' names each package may use. What lets megatron run without a GPU, for development, changes whatever
it must, and is not looked at."""
ELSEWHERE: dict[str, frozenset[str]] = {
    "Python": frozenset(
        {
            *("_exit", "_getframe", "_current_frames", "_inst", "_make", "_fields", "_option_string_actions"),
            *("_get_candidate_names", "_normal_accessor", "_handlerList"),
        }
    ),
    "numpy": frozenset({"_rand", "_bit_generator"}),
    "loguru": frozenset({"_core", "_sink", "_stream"}),
    "torchdata": frozenset({"_initial_iter_for_state_dict"}),
    "glibc": frozenset({"__res_state", "__res_init"}),
    "grpc": frozenset({"grpc._cython", "grpc._cython.cygrpc"}),
    "ours": frozenset({"flashrecovery._version", "flashrecovery._version.__version__", "_flashrecovery_operations"}),
}
"""Private names of others, which keep them or pin their versions."""


def _private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _uses(path: Path) -> Iterator[tuple[int, str]]:
    """(line, private name) of attributes of something else than the class itself, and of modules that are imported.
    Private attributes that a class of the same file has are its own."""
    tree = ast.parse(path.read_text())
    own = {
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and _is_self(n)
    }
    for kind in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
        own |= {n.name for n in kind.body if isinstance(n, ast.FunctionDef)}
        own |= {n.target.id for n in kind.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _private(node.attr) and not _is_self(node) and node.attr not in own:
            yield node.lineno, node.attr
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                parts = name.split(".")
                yield from ((node.lineno, ".".join(parts[: i + 1])) for i, p in enumerate(parts) if _private(p))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.args[1] if len(node.args) > 1 else None
            by_name = node.func.id in ("getattr", "hasattr", "setattr", "delattr") and isinstance(name, ast.Constant)
            if by_name and _private(str(name.value)):
                yield node.lineno, str(name.value)


def _is_self(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls", "super()")


def _files(package: str) -> list[Path]:
    left_out = ["_pb2", "fr_megatron/cpu", "flashrecovery/capabilities"]
    left_out += [other for other in COVERED if other != package and other.startswith(package)]
    return [p for p in sorted((ROOT / package).rglob("*.py")) if not any(part in str(p) for part in left_out)]


@pytest.mark.parametrize("package", COVERED)
def test_no_private_name_without_a_capability(package: str) -> None:
    covered = {name for framework in COVERED[package] for one in framework.capabilities for name in one.names}
    covered |= {name for names in ELSEWHERE.values() for name in names}
    covered |= {part for name in covered for part in name.split(".")}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in _files(package)
        for line, name in _uses(path)
        if name not in covered
        and name.rpartition(".")[2] not in covered
        and not any(c.startswith(f"{name}.") for c in covered)
    ]
    assert wrong == [], "declare a capability for these, or take something public"


def test_no_capability_for_names_that_nobody_uses() -> None:
    """What is declared is used: a table of what once was would refuse versions for nothing."""
    text = "\n".join(path.read_text() for package in COVERED for path in _files(package))
    for one in (one for framework in {*CORE, DEEPSPEED, MEGATRON, RAY} for one in framework.capabilities):
        for name in one.names:
            plain = name.rpartition("PartitionedParameterCoordinator__")[2]
            if _private(plain) and "." not in name:
                assert plain in text, f"{one.name}: no process uses {name}"


def test_the_installed_versions_have_all() -> None:
    for framework in (TORCH, TRANSFORMERS, ACCELERATE, DEEPSPEED, MEGATRON, RAY):
        if framework.is_there:
            framework.require()
            assert all(one.takes(one.way) for one in framework.capabilities if one.way is not None)


def test_declarations_are_told_apart() -> None:
    for framework in (TORCH, TRANSFORMERS, ACCELERATE, DEEPSPEED, MEGATRON, RAY):
        names = [one.name for one in framework.capabilities]
        assert len(names) == len(set(names)) and all(one.purpose for one in framework.capabilities)
        for one in framework.capabilities:
            assert len({way.name for way in one.ways}) == len(one.ways), one.name


# -- probes ---------------------------------------------------------------------------------------

SOURCE = """
from math import sqrt
if True:
    _flag = None

class Kind:
    field: int
    other: int = 3

    def method(self, first, *rest, second=1, **more):
        self.set, self.both = 1, 2
        def inner():
            self.deep = 3
        inner()

    @classmethod
    def made(cls, how):
        cls.number = 1

@some.decorator(with_argument=True)
def function(a, b=None, *, c):
    other._mark = 1

raise RuntimeError("a probe has run this module")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose modules cannot be imported."""
    package = tmp_path / "framework_for_probes" / "inside"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("raise RuntimeError('a probe has run this package')")
    (package / "module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return "framework_for_probes.inside.module"


def test_names(module: str) -> None:
    assert (
        Defined(module, ("sqrt", "_flag", "Kind", "function", "Kind.method", "Kind.field", "Kind.other")).missing()
        == []
    )
    assert Defined(module, ("cbrt", "Kind.set", "Kind.nothing", "Other.x")).missing() == [
        f"no {module}.{name}" for name in ("cbrt", "Kind.set", "Kind.nothing", "Other.x")
    ]
    assert Defined("no_such_framework.module", ("x",)).missing() == ["no module no_such_framework.module"]
    assert Defined(f"{module}.deeper", ("x",)).missing() == [f"no module {module}.deeper"]


def test_attributes(module: str) -> None:
    assert Attributes(module, "Kind", ("set", "both", "deep", "number", "method", "field")).missing() == []
    assert Attributes(module, "Kind", ("_mark",)).missing() == [f"no {module}.Kind._mark"]
    assert Attributes(module, "Other", ("x",)).missing() == [f"no {module}.Other"]
    assert Assigned(module, ("_mark", "set")).missing() == []
    assert Assigned(module, ("_flag",)).missing() == [f"{module} sets no _flag"]


def test_parameters(module: str) -> None:
    assert Parameters(module, "function", ("a", "b")).missing() == []
    assert Parameters(module, "Kind.method", ("first", "second")).missing() == []
    assert Parameters(module, "Kind.method", ("self", "first")).missing() == []
    assert Parameters(module, "Kind.made", ("how",)).missing() == []
    assert Parameters(module, "function", ("b", "a")).missing() == [
        f"{module}.function begins with (a, b), not with (b, a)"
    ]
    assert Parameters(module, "Kind.other", ("x",)).missing() == [f"no {module}.Kind.other"]


def test_uses(module: str) -> None:
    assert Uses(module, "function", ("_mark",)).missing() == []
    assert Uses(module, "function", ("_mark", "deep")).missing() == [f"{module}.function uses no deep"]
    assert Uses(module, "Kind.gone", ("_mark",)).missing() == [f"no {module}.Kind.gone"]


def test_a_package_with_other_paths_in_its_specification(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType(module.partition(".")[0])
    found = importlib.util.find_spec(package.__name__)
    assert found is not None and found.origin is not None
    package.__spec__ = ModuleSpec(package.__name__, None, is_package=True)
    package.__spec__.submodule_search_locations = [Path(found.origin).parent]  # type: ignore[list-item]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    module_code.cache_clear()
    assert Defined(module, ("Kind",)).missing() == []


def test_live() -> None:
    assert Live("math", ("pi", "sqrt.__call__")).missing() == []
    assert Live("math", ("tau", "wand.wood")).missing() == ["no math.wand.wood"]
    assert Live("no_such_module", ("x",)).missing()[0].startswith("no module no_such_module")


def test_many_names_in_one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 255 names, an instruction's operand takes more than a byte."""
    lines = "".join(f"    thing.name{i} = {i}\n" for i in range(700))
    (tmp_path / "long_module_for_probes.py").write_text(f"def function(thing):\n{lines}")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert Assigned("long_module_for_probes", tuple(f"name{i}" for i in range(700))).missing() == []


# -- capabilities ---------------------------------------------------------------------------------


def _framework(*capabilities: Capability) -> Framework:
    return Framework("Frame", "no-such-distribution", "math", ("1.0", "1.1"), capabilities)


def test_the_first_way_whose_probes_all_succeed() -> None:
    new = Way("new", (Live("math", ("pi",)), Live("math", ("wand",))))
    old, oldest = Way("old", (Live("math", ("e",)),)), Way("oldest", (Live("math", ("tau",)),))
    one = Capability("x", "y", (new, old, oldest))
    assert one.way == "old" and one.takes("old") and not one.takes("new") and one.missing() == ()
    assert one.names == {"math", "pi", "wand", "e", "tau"}
    with pytest.raises(ValueError, match="nem"):
        one.takes("nem")
    assert Capability("x", "y", (new,)).missing() == ("no math.wand",)


def test_a_refusal_names_what_is_missing_and_not_a_range() -> None:
    there = capability("sums", "to add", Live("math", ("fsum",)))
    without = capability("wands", "to wave", Live("math", ("wand",)), otherwise="hands are waved")
    needed = capability("magic", "to enchant", Live("math", ("spell",)))
    _framework(there, without).require(version="1.1+local")
    with pytest.raises(UnsupportedError) as caught:
        _framework(there, without, needed).require(version="2.0")
    text = str(caught.value)
    assert (
        "Frame 2.0 lacks" in text
        and "magic (to enchant): no math.spell" in text
        and "Tested with Frame 1.0, 1.1" in text
    )
    assert "wands" not in text and "sums" not in text
    _framework(there, without, needed).require([there, without], "2.0")


def test_an_untested_version_gives_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "_UNTESTED", {})
    one = capability("sums", "to add", Live("math", ("fsum",)))
    _framework(one).require(version="1.0+cu130")
    assert capabilities.untested() == ()
    _framework(one).require(version="2.0")
    _framework(one).require(version="2.0")
    (text,) = capabilities.untested()
    assert text.startswith("Frame 2.0 has all that") and "1.0, 1.1" in text
