"""Changes to frameworks: made where there is what they change, once, removable, and told of by the doctor."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery.capabilities import capability, patches
from flashrecovery.capabilities.patches import Patch, PatchTable
from flashrecovery.capabilities.probes import Live
from flashrecovery.cli import checks


def _patch(name: str, target: dict[str, int], changed: str) -> Patch:
    def apply() -> Callable[[], None]:
        target[name] = target.get(name, 0) + 1
        return lambda: target.update({name: target[name] - 1})

    return Patch(name, capability("x", "y", Live("math", (changed,))), f"because of {name}", apply)


@pytest.fixture
def target() -> dict[str, int]:
    return {}


@pytest.fixture
def table(target: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> PatchTable:
    monkeypatch.setattr(patches, "version_of", lambda name: "1.4.2+cpu")
    return PatchTable("framework", [_patch("old", target, "no_such_function"), _patch("new", target, "sqrt")])


def test_a_patch_is_made_once_where_it_is_needed_and_taken_back(table: PatchTable, target: dict[str, int]) -> None:
    table.apply()
    table.apply()
    assert target == {"new": 1} and table.applied == ("new",)
    table.remove()
    assert target == {"new": 0} and table.applied == ()
    table.apply()
    assert target == {"new": 1}


def test_nothing_is_patched_in_a_framework_that_is_not_there(
    table: PatchTable, target: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "version_of", lambda name: None)
    table.apply()
    assert target == {}


def test_the_doctor_lists_name_and_reason(table: PatchTable, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        raise ImportError("no module named x")

    entries = [
        SimpleNamespace(name="a", value="x:TABLE", load=load),
        SimpleNamespace(name="b", value="y:TABLE", load=lambda: table),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    broken, old, new = checks.patches()
    assert broken.level is checks.Level.WARN and "x:TABLE" in broken.found and "no module named x" in broken.found
    assert old.found == "framework: old, the installed version needs no patch"
    assert new.found == "framework: new, applied at import"
    assert new.meaning == "because of new"
