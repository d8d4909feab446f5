"""What ``flashrecovery doctor`` says of Megatron. Reads files, and imports neither megatron nor its training loop."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from flashrecovery.capabilities.finding import Finding, Level
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
    before = re.search(r"""^PRE_RELEASE = ['"](\w*)['"]""", text, re.MULTILINE)
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
    sources = _Sources(places)
    wrong = hooks.differences(sources.parameters)
    if wrong:
        meaning, advice = "--flash-recovery is refused: a function of the loop is not the known one", "use a known one"
        found = Finding(name, Level.WARN, f"{checkout}: {'; '.join(wrong)}", meaning, advice)
    else:
        names = [hook.name for hook in hooks.ALL if sources.parameters(hook) is not None]
        text = f"{checkout}: {len(names)} functions as known"
        found = Finding(name, Level.OK, text, f"with the flag: {', '.join(names)}")
    native = "_add_flash_recovery_args" in (checkout / "megatron/training/arguments.py").read_text()
    text = "patches/megatron/0001 is applied" if native else "unmodified"
    meaning = "Megatron-LM reads --flash-recovery itself" if native else "flashrecovery run adds --flash-recovery"
    return [found, Finding("megatron flag", Level.OK, text, meaning)]


class _Sources:
    """The sources of modules. ``places``: where Python looks for them."""

    def __init__(self, places: list[Path]) -> None:
        self._places = places
        self._trees: dict[str, tuple[list[ast.stmt], bool]] = {}

    def parameters(self, hook: ReplacedFunction) -> tuple[str, ...] | None:
        """The parameters of a function; None if there is none. A module may re-export it from another: a package from
        its own modules."""
        first, *rest = hook.name.split(".")
        found = self._definition(hook.module, first, ())
        for name in rest:
            body = found.body if isinstance(found, ast.ClassDef) else []
            found = next((n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name), None)
        if not isinstance(found, ast.FunctionDef):
            return None
        return tuple(a.arg for a in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs))

    def _definition(self, module: str, name: str, seen: tuple[str, ...]) -> ast.stmt | None:
        """The class or function that ``name`` is in ``module``."""
        if module in seen:
            return None
        body, is_package = self._module(module)
        imported: list[tuple[str, str]] = []
        for node in _at_top(body):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return node
            if isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names if name == (alias.asname or alias.name)]
                names += [name for alias in node.names if alias.name == "*"]
                imported += [(_absolute(node, module, is_package), original) for original in names]
        found = (self._definition(*one, (*seen, module)) for one in reversed(imported))
        return next((one for one in found if one is not None), None)

    def _module(self, name: str) -> tuple[list[ast.stmt], bool]:
        """What stands in it, and whether it is a package; nothing of one that is not there."""
        if name not in self._trees:
            path = name.replace(".", "/")
            package = _first(self._places, f"{path}/__init__.py")
            source = package or _first(self._places, f"{path}.py")
            self._trees[name] = (ast.parse("" if source is None else source.read_text()).body, package is not None)
        return self._trees[name]


def _at_top(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """All statements that run when a module is imported, and are none of others."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            handlers = [statement for handler in getattr(node, "handlers", ()) for statement in handler.body]
            yield from _at_top([*node.body, *handlers, *node.orelse])


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module from which something is imported in ``module``."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    above = parts[: len(parts) - node.level + is_package]
    return ".".join([*above, *([node.module] if node.module else [])])
