"""What a script will import, and which environment variables it sets before, read from its text without running it.

A zygote imports the same ahead of all ranks. Read are the statements that run when the script is started: those of the
script itself, and of the modules beside it that it imports, but not the bodies of functions.

A library may read a variable of the environment when it is imported, once and for ever. So a variable that the script
sets to a text is set before the imports. Where the value cannot be known without running the script (each rank has
another one, say), the variable is *uncertain*: a module that asks for it when it is imported is left to each rank. What
is read in C cannot be noticed; so where such a variable is uncertain (:data:`READ_IN_C`), or the name is not known
either, what the script imports after it is left to each rank.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FILES_READ = 300
"""Modules of the script's own that are read at most; a large checkout has thousands."""
READ_IN_C = re.compile("(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|MALLOC|LD|GLIBC|TORCH|PYTORCH|ATEN|LC)_|LANG$|MALLOC_|TZ$")
"""Variables that libraries written in C read when they are loaded. CUDA's and NCCL's are read when a GPU is opened."""

_PASSED_BY = frozenset({"TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'"})
"""Conditions of what need not be read: it does not run, or comes after the imports."""
_NO_GPU = {"torch.cuda.is_available()": False, "not torch.cuda.is_available()": True}
"""Conditions whose result is known where there is no GPU."""


@dataclass(frozen=True)
class ScriptFacts:
    """``imports``: dotted names, in the order of the text; ``members``: names taken from a module, which may be modules
    themselves. ``environment``: variables that are set to a text; ``defaults``: if they are not set already;
    ``uncertain``: variables that are set to something unknown. ``ends_at``: ``file:line``, what is imported after this
    is not known."""

    imports: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    uncertain: frozenset[str] = frozenset()
    ends_at: str = ""


@dataclass(frozen=True)
class _Setting:
    """Of a variable; None: not known."""

    name: str | None
    value: str | None
    default: bool = False


def script_file(command: Sequence[str], directory: Path) -> Path | None:
    """The file of ``script.py args``, or of ``-m module args`` if that lies in ``directory``."""
    if command[0] != "-m":
        return Path(command[0])
    return _own_file(directory, command[1], main=True)


def read_script(file: Path, directory: Path, *, gpus: bool = True) -> ScriptFacts:
    """Facts about the script ``file`` and the modules in ``directory`` that it imports. What cannot be read or parsed
    is left out: the script itself will say what is wrong with it. ``gpus``: whether this machine may have any."""
    reader = _Reader(directory, gpus)
    reader.read(file, "")
    return ScriptFacts(
        tuple(reader.imports),
        tuple(reader.members),
        reader.environment,
        reader.defaults,
        frozenset(reader.uncertain),
        reader.ends_at,
    )


class _Reader:
    def __init__(self, directory: Path, gpus: bool) -> None:
        self._directory = directory
        self._gpus = gpus
        self._seen: set[Path] = set()
        self.imports: dict[str, None] = {}
        self.members: dict[str, None] = {}
        self.environment: dict[str, str] = {}
        self.defaults: dict[str, str] = {}
        self.uncertain: set[str] = set()
        self.ends_at = ""

    def read(self, file: Path, package: str) -> None:
        """``package``: that relative imports of this file count from."""
        if file in self._seen or len(self._seen) >= FILES_READ:
            return
        self._seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return
        for statement, certain in self._statements(tree.body, True):
            if self.ends_at:
                return
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    self._imported(alias.name)
            elif isinstance(statement, ast.ImportFrom):
                self._imported_from(statement, package)
            else:
                self._environment_of(statement, certain, file)

    def _imported_from(self, statement: ast.ImportFrom, package: str) -> None:
        module = statement.module or ""
        if statement.level:
            parents = package.split(".")
            above = parents[: len(parents) - statement.level + 1]
            module = ".".join(filter(None, (*above, module)))
        if module and module != "__future__":
            self._imported(module)
            for alias in statement.names:
                if alias.name != "*":
                    self._imported(f"{module}.{alias.name}", member=True)

    def _imported(self, name: str, *, member: bool = False) -> None:
        parts = name.split(".")
        if not _is_own(self._directory, parts[0]):
            (self.members if member else self.imports).setdefault(name)
            return
        for count in range(1, len(parts) + 1):
            dotted = ".".join(parts[:count])
            file = _own_file(self._directory, dotted)
            if file is not None:
                self.read(file, dotted if file.name == "__init__.py" else dotted.rpartition(".")[0])

    def _environment_of(self, statement: ast.stmt, certain: bool, file: Path) -> None:
        for found in _settings(statement):
            if found.name is None:
                self.ends_at = f"{file.name}:{statement.lineno}"
            elif not certain or found.value is None:
                self.uncertain.add(found.name)
                if READ_IN_C.match(found.name):
                    self.ends_at = f"{file.name}:{statement.lineno}"
            elif found.default:
                self.defaults.setdefault(found.name, found.value)
            else:
                self.environment[found.name] = found.value

    def _statements(self, body: Sequence[ast.stmt], certain: bool) -> Iterator[tuple[ast.stmt, bool]]:
        """Those that run when a module is imported; whether they run in any case."""
        for statement in body:
            if isinstance(statement, ast.If):
                test = ast.unparse(statement.test)
                if test in _NO_GPU and not self._gpus:
                    yield from self._statements(statement.body if _NO_GPU[test] else statement.orelse, certain)
                elif test not in _PASSED_BY:
                    yield from self._statements([*statement.body, *statement.orelse], False)
            elif isinstance(statement, ast.Try):
                yield from self._statements(statement.body, certain)
                for handler in statement.handlers:
                    yield from self._statements(handler.body, False)
                yield from self._statements([*statement.orelse, *statement.finalbody], certain)
            elif isinstance(statement, ast.With):
                yield from self._statements(statement.body, certain)
            elif isinstance(statement, (ast.For, ast.While)):
                yield from self._statements([*statement.body, *statement.orelse], False)
            elif isinstance(statement, ast.ClassDef):
                yield from self._statements(statement.body, certain)
            elif not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield statement, certain


def _settings(statement: ast.stmt) -> Iterator[_Setting]:
    """Variables of the environment that a statement sets."""
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                plain = None if isinstance(statement, ast.AugAssign) else statement.value
                yield _Setting(_text(target.slice), _text(plain))
            elif _is_environ(target):
                yield _Setting(None, None)
    for call in ast.walk(statement):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            yield from _called(call, call.func)


def _called(call: ast.Call, function: ast.Attribute) -> Iterator[_Setting]:
    method = function.attr
    if method == "putenv" or (method == "setdefault" and _is_environ(function.value)):
        given = [_text(argument) for argument in call.args] + [None, None]
        yield _Setting(given[0], given[1], default=method == "setdefault")
    elif method == "update" and _is_environ(function.value):
        for keyword in call.keywords:
            yield _Setting(keyword.arg, _text(keyword.value))
        for argument in call.args:
            if isinstance(argument, ast.Dict):
                for key, value in zip(argument.keys, argument.values, strict=True):
                    yield _Setting(_text(key), _text(value))
            else:
                yield _Setting(None, None)


def _is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _is_own(directory: Path, top: str) -> bool:
    return (directory / f"{top}.py").is_file() or (directory / top).is_dir()


def _own_file(directory: Path, dotted: str, *, main: bool = False) -> Path | None:
    """The file of a module in ``directory``. ``main``: it is run with ``-m``."""
    place = directory.joinpath(*dotted.split("."))
    for file in (place.with_suffix(".py"), place / ("__main__.py" if main else "__init__.py")):
        if file.is_file():
            return file
    return None
