"""What ``flashrecovery doctor`` says of Megatron. Reads files, and imports neither megatron nor its training loop."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from flashrecovery.finding import Finding, Level
from fr_megatron import stand_ins
from fr_megatron.capabilities import MEGATRON
from fr_megatron.lm import hooks
from fr_megatron.lm.hooks import ReplacedFunction

_VERSION = ("MAJOR", "MINOR", "PATCH")


def findings(path: Iterable[str] | None = None) -> list[Finding]:
    """``path``: where Python looks for modules; this process's by default."""
    places = [Path(place or ".") for place in (sys.path if path is None else path)]
    core = _first(places, "megatron/core/package_info.py")
    loop = _first(places, "megatron/training/training.py")
    return [*_core(core), _stand_ins(), *_loop(core, loop, places)]


def _first(places: Iterable[Path], name: str) -> Path | None:
    return next((found for place in places if (found := place / name).is_file()), None)


def _version(package_info: Path) -> str | None:
    """From ``MAJOR = 0`` and so on, and ``PRE_RELEASE = 'rc1'``."""
    text = package_info.read_text()
    numbers = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in _VERSION]
    if None in numbers:
        return None
    before = re.search(r"^PRE_RELEASE = '(\w*)'", text, re.MULTILINE)
    return ".".join(found[1] for found in numbers if found) + (before[1] if before else "")


def _core(where: Path | None) -> list[Finding]:
    """megatron-core of a checkout, whose version pip does not know."""
    if where is None or "site-packages" in where.parts:
        return []
    name, version = "megatron-core", _version(where) or "unknown version"
    found = f"{version} in {where.parents[2]}"
    if MEGATRON.is_tested(version):
        return [Finding(name, Level.OK, found, "tested")]
    meaning = f"not among the versions that were tested ({', '.join(MEGATRON.tested)})"
    return [Finding(name, Level.WARN, found, meaning, "try a fault drill before a long run")]


def _stand_ins() -> Finding:
    name = "megatron stand-ins"
    if stand_ins.wanted():
        found = f"{stand_ins.VARIABLE}=1: {', '.join(stand_ins.PARTS)}"
        meaning = "megatron runs on the CPU, with gloo: for development only"
        return Finding(name, Level.WARN, found, meaning, f"unset {stand_ins.VARIABLE} for training on GPUs")
    return Finding(name, Level.OK, "off", f"{stand_ins.VARIABLE}=1 lets megatron run without a GPU, for development")


def _loop(core: Path | None, training: Path | None, places: list[Path]) -> list[Finding]:
    """The hooks in Megatron-LM's loop, and whether it has the flag itself."""
    name = "megatron hooks"
    if training is None:
        advice = "--flash-recovery needs a checkout of it on PYTHONPATH; fr_megatron.attach does not"
        return [Finding(name, Level.OK, "no Megatron-LM on PYTHONPATH", advice)]
    checkout = training.parents[2]
    if core is None:
        return [Finding(name, Level.WARN, f"{checkout} without megatron.core", "the loop needs it", "put it beside")]
    wrong = differences(places)
    if wrong:
        meaning, advice = "--flash-recovery is refused: a function of the loop is not the known one", "use a known one"
        found = Finding(name, Level.WARN, f"{checkout}: {'; '.join(wrong)}", meaning, advice)
    else:
        names = ", ".join(hook.name for hook in hooks.ALL)
        found = Finding(name, Level.OK, f"{checkout}: {len(hooks.ALL)} functions as known", f"with the flag: {names}")
    native = "_add_flash_recovery_args" in (checkout / "megatron/training/arguments.py").read_text()
    text = "patches/megatron/0001 is applied" if native else "unmodified"
    meaning = "Megatron-LM reads --flash-recovery itself" if native else "flashrecovery run adds --flash-recovery"
    return [found, Finding("megatron flag", Level.OK, text, meaning)]


def differences(places: list[Path]) -> list[str]:
    """Where the hooked functions' sources are not as in a known release, in words."""
    trees: dict[str, ast.Module] = {}

    def parameters(hook: ReplacedFunction) -> tuple[str, ...] | None:
        if hook.source not in trees:
            source = _first(places, hook.source.replace(".", "/") + ".py")
            trees[hook.source] = ast.parse("" if source is None else source.read_text())
        return _parameters(hook, trees[hook.source])

    return hooks.differences(parameters)


def _parameters(hook: ReplacedFunction, module: ast.Module) -> tuple[str, ...] | None:
    body: list[ast.stmt] = module.body
    *classes, function = hook.name.split(".")
    for name in classes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name), [])
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
    return None
