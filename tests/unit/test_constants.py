"""Containers of numbers that no text of a script changes are not looked at in each step; all others are."""

from __future__ import annotations

import ast
import importlib
import sys
import types
from pathlib import Path

import pytest

from flashrecovery.worker.script_text.constants import uses_of
from flashrecovery.worker.script_text.script_modules import ScriptModules

READ = (
    "x = M.T[0]",
    "return 3 in T",
    "for x in T: print(x)",
    "return [x for x in M.T]",
    "return len(T) + sum(M.T)",
    "return T.get(1)",
    "return sorted(T.items())",
    "return f'{T}'",
    "return T == M.T",
    "if T: return max(T)",
)
CHANGED = (
    "T[0] = 1",
    "T[0] += 1",
    "del T[0]",
    "M.T[0] = 1",
    "T.append(1)",
    "M.T.pop()",
    "return T",
    "x = T",
    "x = M.T or 1",
    "f(T)",
    "f(x=M.T)",
    "random.shuffle(T)",
    "f(*[T])",
    "self.t = T",
    "getattr(M, 'T')",
    "M.T = []",
    "x, y = T, 1",
    "yield T",
    "return lambda: T",
    "from m import T as t",
    "with T as t: pass",
    "return T.append",
    "return {'t': T}",
)


def _uses(statement: str, *, whole: bool = False) -> bool:
    tree = ast.parse(f"import M\ndef g(self, f):\n    {statement}\n")
    return "T" in uses_of(tree, whole=whole).otherwise


@pytest.mark.parametrize("statement", READ)
def test_what_only_reads(statement: str) -> None:
    assert not _uses(statement)


@pytest.mark.parametrize("statement", CHANGED)
def test_what_may_change_a_container_or_lead_on_from_it(statement: str) -> None:
    assert _uses(statement)


def test_an_imported_module_has_run_what_is_outside_of_functions() -> None:
    tree = ast.parse("T = []\nfor i in range(3):\n    T.append(i)\n")
    assert "T" not in uses_of(tree, whole=False).otherwise and "T" in uses_of(tree, whole=True).otherwise
    for text in ("import m\nm.T.append(1)", "from m import T\nT.append(1)"):  # perhaps for the first time in a step
        assert "T" in uses_of(ast.parse(text), whole=False).otherwise


@pytest.mark.parametrize(
    ("call", "found"),
    [
        *(("getattr(M, name)", True), ("getattr(self, name)", False), ("vars(args)", False), ("vars(M)", True)),
        *(("globals()[name]", True), ("exec(text)", True), ("getattr(self, 'x')", False)),
        ("getattr(sys.modules[name], other)", True),
    ],
)
def test_variables_by_names_that_the_text_does_not_have(call: str, found: bool) -> None:
    tree = ast.parse(f"import M, sys\ndef g(self, args, name, other, text):\n    return {call}\n")
    assert uses_of(tree, whole=False).by_any_name is found


HELPERS = """
TABLE, NAMES, FLAGS = list(range(90)), ("a", "b"), dict.fromkeys(range(90))
NESTED, SHUFFLED, HANDED = {i: [1] for i in range(90)}, [1] * 90, [2] * 90
for i in range(3):
    TABLE.append(i)

def read(x):
    return TABLE[x], FLAGS.get(x), NESTED["a"], NAMES

def change(rng, model):
    rng.shuffle(SHUFFLED)
    return model(HANDED)

def constant_default(x, y=None, z=3):
    return x

def attributed(x):
    return x

def with_list(x, seen=[]):
    return x
"""
SCRIPT = "import helpers\ndef set_one():\n    helpers.attributed.n = 1\n"


def _changing(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> set[str]:
    (folder / "constant_helpers.py").write_text(HELPERS)
    (folder / "constant_script.py").write_text(script.replace("helpers", "constant_helpers"))
    monkeypatch.syspath_prepend(folder)
    importlib.import_module("constant_script")
    try:
        mine = {name: sys.modules[name] for name in ("constant_helpers", "constant_script")}
        monkeypatch.setattr("flashrecovery.worker.script_text.script_modules.sys", types.SimpleNamespace(modules=mine))
        modules = ScriptModules()
        assert [name for name, _ in modules.besides({})] == sorted(mine)
        return {*modules.changing("constant_helpers")}
    finally:
        for name in ("constant_helpers", "constant_script"):
            del sys.modules[name]


def test_a_modules_constants_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changing = _changing(tmp_path, monkeypatch, SCRIPT)
    assert changing == {"NESTED", "SHUFFLED", "HANDED", "attributed", "with_list"}


@pytest.mark.parametrize(
    "change",
    [
        *("helpers.TABLE.append(1)", "helpers.FLAGS[1] = False", "exec('pass')"),
        "setattr(helpers, 'TABLE', [])",
    ],
)
def test_none_is_left_out_that_another_module_may_change(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = _changing(tmp_path, monkeypatch, f"{SCRIPT}\ndef change():\n    {change}\n")
    assert {"TABLE", "FLAGS"} & changing
