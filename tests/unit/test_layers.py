"""Imports go downwards: a file may import from its own folder and from layers below it, whether at the top of the file,
within a function or for types only. :data:`NOT_YET` names what still goes up or sideways; it may only become shorter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOTS = {"flashrecovery": ROOT / "common" / "flashrecovery"} | {
    name: ROOT / name for name in ("fr_deepspeed", "fr_megatron")
}
CORE = "flashrecovery"

LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(layer.split())
    for layer in (
        "_version errors kinds proto terminal util",
        "capabilities plan state",
        "config events",
        "rpc",
        "heartbeat health",
        "runtime",
        "snapshot",
        "groups redundancy",
        "contract",
        "worker",
        "adapter",
        "torch_native",
        "entry",
        "flashrecovery",
        "fr_deepspeed fr_megatron",
        "trainer",
        "worker_main",
        "agent controller",
        "observe",
        "job",
        "launchers",
        "adopt",
        "ray",
        "cli",
        "run",
    )
)
"""From the bottom to the top. A name is a folder or a file of ``common/flashrecovery``, or a package; ``flashrecovery``
is the public API in its ``__init__``. Two of one layer do not import each other."""

NOT_YET: frozenset[str] = frozenset()

ROUND_NOT_YET: tuple[set[str], ...] = ()
"""Files that import each other, round about."""


def _layer(package: str) -> int:
    (found,) = [number for number, layer in enumerate(LAYERS) if package in layer]
    return found


def _package(module: str) -> str:
    """The folder, or the file in the core's root."""
    first, *rest = module.split(".")
    return rest[0] if first == CORE and rest else first


def _modules() -> dict[str, Path]:
    found = {}
    for name, folder in ROOTS.items():
        for path in folder.rglob("*.py"):
            parts = [name, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: a relative import"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in full]
        yield from (name for name in names if name.split(".")[0] in ROOTS)


def _wrong() -> set[str]:
    modules = _modules()
    found = set()
    for module, path in modules.items():
        for imported in _imports(path, modules):
            mine, theirs = _package(module), _package(imported)
            if mine != theirs and _layer(theirs) >= _layer(mine):
                found.add(f"{module} -> {imported}")
    return found


def _circles() -> list[list[str]]:
    """Files that import each other, round about; groups of at least two (Tarjan)."""
    modules = _modules()
    edges = {module: sorted(set(_imports(path, modules)) & modules.keys()) for module, path in modules.items()}
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in edges[module]:
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            groups.append(sorted(group))

    for module in modules:
        if module not in order:
            visit(module)
    return sorted(group for group in groups if len(group) > 1)


def test_imports_go_downwards() -> None:
    wrong = _wrong()
    assert wrong - NOT_YET == set(), "these go up or sideways"
    assert NOT_YET - wrong == set(), "mended: take them out of NOT_YET"


def test_no_imports_go_round() -> None:
    found = [set(group) for group in _circles()]
    assert [group for group in found if not any(group <= known for known in ROUND_NOT_YET)] == [], "these go round"
    assert [known for known in ROUND_NOT_YET if known not in found] == [], "mended: make ROUND_NOT_YET shorter"


ROOMS: dict[str, tuple[str, ...]] = {
    "agent": ("peers", "processes", "stores", "monitoring", "agent", "controller_link"),
    "contract": ("adapter shard_layout logical_state", "elastic_adapter loop_adapter relayout_adapter", "roles"),
    "controller": (
        "state",
        "storage hang membership last_save divergence_advice parallelism",
        "elastic",
        "relayout",
        "next_move",
        "recovery",
        "takeover",
        "machine",
        "service",
    ),
    "plan": (
        "checkpoint_interval device_barrier membership model_state ownership pacing quiet_abort transitions words",
        "divergence elastic estimates hang reshard restore snapshot_interval",
        "parity strategy",
    ),
    "redundancy": ("announcement memory", "checkpoint parity"),
    "worker": (
        "local_state transfer",
        "preimport",
        "script_text",
        "kept_attributes setup_replay",
        "data",
        "script_checks",
        "connection registry",
        "control exit",
        "consistency",
        "replication",
        "reshard",
        "context",
        "step",
        "recovery_commands",
        "loop",
        "session",
        "framework_calls own_loops",
        "recovery",
        "auto",
        "startup",
    ),
}
"""The rooms of a folder, from the bottom to the top: each is a folder or a file. Two of one level do not import each
other."""


def _room(module: str, folder: str) -> str | None:
    """None: the module lies elsewhere, or is the folder's own ``__init__``."""
    core, _, rest = module.partition(f"{CORE}.{folder}.")
    return rest.split(".")[0] if not core and rest else None


@pytest.mark.parametrize("folder", ROOMS)
def test_imports_within_a_folder_go_downwards(folder: str) -> None:
    modules = _modules()
    level = {name: number for number, names in enumerate(ROOMS[folder]) for name in names.split()}
    rooms = {room for module in modules if (room := _room(module, folder)) is not None}
    assert rooms == level.keys()
    wrong = {
        f"{module} -> {imported}"
        for module, path in modules.items()
        if (mine := _room(module, folder)) is not None
        for imported in _imports(path, modules)
        if (theirs := _room(imported, folder)) not in (None, mine) and level[str(theirs)] >= level[mine]
    }
    assert wrong == set(), "these go up or sideways"


@pytest.mark.parametrize("folder", [name for name in ROOMS if name != "contract"])
def test_the_readme_of_a_folder_names_its_rooms_from_the_top(folder: str) -> None:
    text = (ROOTS[CORE] / folder / "README.md").read_text()
    named = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", text, re.M)
    assert named == [room for level in reversed(ROOMS[folder]) for room in level.split()]


def test_every_folder_has_its_layer() -> None:
    packages = {_package(module) for module in _modules()}
    named = [name for layer in LAYERS for name in layer]
    assert packages == set(named) and len(named) == len(set(named))


ADAPTERS = ("flashrecovery.torch_native", "fr_deepspeed", "fr_megatron")
DECLARED = ("__init__", "elastic", "loop", "relayout")
"""The files of ``adapter/`` that are the declared API."""
API = {"flashrecovery", "flashrecovery.adapter"} | {
    f"flashrecovery.{name}"
    for name in (
        *("capabilities", "capabilities.finding", "capabilities.of_torch", "capabilities.patches"),
        *("capabilities.of_trainer", "capabilities.probes", "config", "errors"),
        *("util.import_hooks", "util.versions"),
        *(f"adapter.{name}" for name in (*DECLARED[1:], "faults", "fsdp2_state")),
    )
}
"""What adapters may import of the core: the declared API, and modules that do not import torch."""
OWN_KIT = {ADAPTERS[0]: ("flashrecovery.adapter.fsdp2_",)}
"""Parts of the kit that no other adapter needs: the core's own adapters import them where they are."""


def test_adapters_keep_to_the_declared_api() -> None:
    modules = _modules()
    found = set()
    for module, path in modules.items():
        mine = next((a for a in ADAPTERS if f"{module}.".startswith(f"{a}.")), None)
        for imported in _imports(path, modules) if mine is not None else ():
            allowed = imported in API or f"{imported}.".startswith((f"{mine}.", *OWN_KIT.get(mine, ())))
            if not allowed:
                found.add(f"{module} -> {imported}")
    assert found == set()


def _declared(file: str) -> list[str]:
    tree = ast.parse((ROOTS[CORE] / "adapter" / f"{file}.py").read_text())
    (names,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    return list(ast.literal_eval(names))


def test_the_api_declares_names_and_no_modules() -> None:
    """An internal module is no part of the API; each name is at home in one file of it."""
    declared = [(name, file) for file in DECLARED for name in _declared(file)]
    modules = {path.stem for path in (ROOTS[CORE] / "adapter").glob("*.py")} | {"groups", "codec", "logical"}
    assert [name for name, _ in declared if name in modules] == []
    assert len({name for name, _ in declared}) == len(declared)


STAND_INS = "fr_megatron.cpu"
"""Named after what they stand for."""


def test_no_two_classes_share_a_name() -> None:
    """Public classes and types. The messages of the protocol are always written ``pb.Name``."""
    found: dict[str, list[str]] = {}
    for module, path in _modules().items():
        if f"{module}.".startswith(f"{STAND_INS}.") or "_pb2" in module:
            continue
        for node in ast.parse(path.read_text()).body:
            names = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
            names = [node.name] if isinstance(node, ast.ClassDef) else names
            for name in (n for n in names if n[0].isupper() and not n.isupper()):
                found.setdefault(name, []).append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


SHARED_FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "adapter.py": dict.fromkeys(ADAPTERS, ("adapter_for",)),
    "support.py": {
        ADAPTERS[0]: ("check",),
        ADAPTERS[1]: ("check", "check_inside"),
        ADAPTERS[2]: ("check", "check_inside"),
    },
    "capabilities.py": dict.fromkeys(ADAPTERS[1:], ()),
    "attach.py": dict.fromkeys(ADAPTERS[1:], ("attach",)),
    "checkpoint.py": dict.fromkeys(ADAPTERS[1:], ()),
    "layout.py": dict.fromkeys(ADAPTERS[1:], ()),
    "shard_layout.py": dict.fromkeys(ADAPTERS[1:], ()),
    "elastic.py": dict.fromkeys(ADAPTERS[1:], ("tied_to_size", "batch_of")),
    "reform.py": dict.fromkeys(ADAPTERS[1:], ("reform",)),
    "random.py": dict.fromkeys(ADAPTERS[1:], ("capture_tracker", "restore_tracker")),
    "calls.py": {ADAPTERS[1]: (), f"{ADAPTERS[2]}.lm": ()},
    "fsdp2.py": {ADAPTERS[0]: (), ADAPTERS[2]: ()},
}
"""Files that do the same job in several adapters, and what each of them defines under the same name."""


def test_the_same_job_has_the_same_file_name_in_all_adapters() -> None:
    modules = _modules()
    found: dict[str, dict[str, set[str]]] = {}
    for module, path in modules.items():
        folder, _, stem = module.rpartition(".")
        if path.name != "__init__.py" and any(f"{folder}.".startswith(f"{adapter}.") for adapter in ADAPTERS):
            defined = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
            found.setdefault(f"{stem}.py", {})[folder] = defined
    shared = {name: set(folders) for name, folders in found.items() if len(folders) > 1}
    assert shared == {name: set(folders) for name, folders in SHARED_FILES.items()}
    missing = {
        (name, folder, function)
        for name, folders in SHARED_FILES.items()
        for folder, functions in folders.items()
        for function in functions
        if function not in found[name][folder]
    }
    assert missing == set()
    text = (ROOT / "docs" / "adapters.md").read_text()
    assert [name for name in SHARED_FILES if f"`{name}`" not in text] == []


def test_the_documentation_names_the_whole_api() -> None:
    text = (ROOT / "docs" / "adapters.md").read_text()
    assert [name for file in DECLARED for name in _declared(file) if f"`{name}`" not in text] == []
