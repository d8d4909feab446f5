"""What a script will import, and in which environment, read from its text without running it.

A zygote or a standby imports the same ahead of its rank. The statements are read that run when the script starts: those
of the script itself and of its *own modules* (not installed ones), but not the bodies of functions. The result lists
what the script does, in order: imports of installed modules, and environment variables that it sets, because a library
may read one only once, when it is imported.

Reading ends where the script's effect cannot be known (:attr:`ScriptFacts.ends_at`); the rest is left to the rank
itself. It ends:

* at a variable with an unknown name, or with an unknown value if libraries written in C read it (:data:`READ_IN_C`);
* at a change of the module path;
* at the script's own code that replaces parts of another module, or the definition of a function that does: later
  imports may use the replaced parts. (Nothing can be replaced in a missing module: its import fails first.)

Where the script changes anything else that a later import may read (:mod:`.script_changes`), no further import is
listed (:attr:`ScriptFacts.changes_at`).

It is unknown when functions set variables, and to which value. The names of these variables are listed separately
(:attr:`ScriptFacts.sets`); for this the whole text is read, and that of modules which functions import.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashrecovery.worker.preimport.script_changes import Changes

FILES_READ = 600
"""Modules of the script's own that are read at most; a large checkout has thousands. Megatron-LM's pretrain_gpt.py
imports about 420."""
READ_IN_C = re.compile("(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|MALLOC|LD|GLIBC|TORCH|PYTORCH|ATEN|LC)_|LANG$|MALLOC_|TZ$")
"""Variables that libraries written in C read when they are loaded. CUDA's and NCCL's are read when a GPU is opened."""
_PASSED_BY = frozenset({"TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'"})
"""Conditions of what need not be read: it does not run, or comes after the imports."""
_NO_GPU = {"torch.cuda.is_available()": False, "not torch.cuda.is_available()": True}
"""Conditions whose result is known where there is no GPU."""
_FINDING = ("sys.path", "sys.meta_path", "sys.path_hooks", "sys.modules", "site.addsitedir", "pkgutil.extend_path")
"""Attributes that determine, or record, the file of a module."""
_SETTINGS = re.compile(r"\.(backends|config|_config|conf|settings|options)\.|\.rcParams|^(os|sys|warnings|logging)\.")
"""Places in libraries that are made to be assigned to; to do so replaces no part of them."""
_REPRESENTERS = frozenset(f"yaml.SafeDumper.yaml_{kind}representers" for kind in ("", "multi_"))
_WHEN_CALLED = frozenset({"torch.storage._load_from_bytes", *_REPRESENTERS})
"""Parts of which nothing is made when it is imported: they are looked up for each pickled tensor, and for each object
that is written as YAML. megatron-core 0.19 replaces the first, Megatron-LM puts the others back (0.18)."""
_STAND_INS = frozenset({"MagicMock", "Mock", "SimpleNamespace"})
"""Classes of placeholders for a module that cannot be imported. Replacing parts of a placeholder affects no module."""
FindOwn = Callable[[str], "Path | None"]
"""The file of a top-level module if that is the script's own: ``name.py``, a package's ``__init__.py``, or the folder
of a package without one. None if it is installed, or not there."""


@dataclass(frozen=True)
class Import:
    """The import of a dotted name. ``member``: a name taken from a module, which may be a module itself."""

    name: str
    member: bool = False


@dataclass(frozen=True)
class Setting:
    """The setting of a variable. ``value`` None: to an unknown value. ``default``: if it is not set already."""

    name: str
    value: str | None
    default: bool = False


@dataclass(frozen=True)
class ScriptFacts:
    """What the script does when it starts, in order. ``ends_at``: ``file:line`` where that stops being known, and why;
    empty if all was read. ``changes_at``: where it changes something that later imports may read, which are not in
    ``actions``. ``sets``: variables that its text also sets elsewhere, at an unknown time; None: their names are
    unknown."""

    actions: tuple[Import | Setting, ...] = ()
    ends_at: str = ""
    changes_at: str = ""
    sets: frozenset[str] | None = frozenset()


class _EndError(Exception):
    """Nothing more is known."""


def read_script(
    file: Path, find: FindOwn, *, gpus: bool = True, absent: Callable[[str], bool] = lambda top: False
) -> ScriptFacts:
    """Facts about the script ``file`` and its own modules. What cannot be read or parsed is left out: the script itself
    will say what is wrong with it.

    Args:
        gpus: whether this machine may have any.
        absent: whether a top-level module is nowhere, neither installed nor the script's own.
    """
    reader = _Reader(find, gpus, absent)
    try:
        reader.read(file, "")
    except _EndError as e:
        return ScriptFacts(tuple(reader.actions), str(e), reader.changes_at, None)
    settings = reader.set_anywhere(file)
    sets = (
        None if settings is None else frozenset(found.name or "" for found in settings if found not in reader.actions)
    )
    return ScriptFacts(tuple(reader.actions), changes_at=reader.changes_at, sets=sets)


class _Reader:
    def __init__(self, find: FindOwn, gpus: bool, absent: Callable[[str], bool]) -> None:
        self._find = find
        self._gpus = gpus
        self._absent = absent
        self._trees: dict[Path, ast.Module | None] = {}  # of the files that have been parsed; None: cannot be
        self._seen: set[Path] = set()
        self._changes = Changes(lambda top: find(top) is not None, absent)
        self._path_is_longer = False
        self.actions: dict[Import | Setting, None] = {}
        self.changes_at = ""

    def read(self, file: Path, package: str) -> None:
        """``package``: that relative imports of this file count from. Raises _EndError."""
        if file in self._seen:
            return
        if len(self._seen) >= FILES_READ:
            raise _EndError(f"{file.name}: {FILES_READ} modules of the script's own have been read")
        self._seen.add(file)
        tree = self._tree(file)
        if tree is None:
            if file.suffix != ".py":
                self._changed(f"{file.name}: it is not written in Python")
            return
        if not self.changes_at:
            self._changes.read(file, tree)
        patches = _Patches(tree, self._find, self._absent)
        for statement, certain in self._statements(tree.body, True):
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    self._imported(alias.name)
            elif isinstance(statement, ast.ImportFrom):
                self._imported_from(statement, package)
            elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                line, replaced = patches.made_in(statement)
                if replaced:
                    raise _EndError(f"{file.name}:{line}: a function replaces {replaced}")
                self._look_for_changes(statement, file)
            else:
                self._other(statement, certain, f"{file.name}:{statement.lineno}", patches)
                if not patches.is_of_stand_in(statement):
                    self._look_for_changes(statement, file)

    def _look_for_changes(self, statement: ast.stmt, file: Path) -> None:
        found = "" if self.changes_at else self._changes.made_by(statement, file)
        if found:
            self._changed(f"{file.name}:{statement.lineno}: {found}")

    def _changed(self, what: str) -> None:
        self.changes_at = self.changes_at or what

    def set_anywhere(self, script: Path) -> set[Setting] | None:
        """What the script and its own modules set, in functions, too; None: variables whose names are not known."""
        settings: set[Setting] = set()
        left, seen = [(script, "")], {script}
        while left:
            file, package = left.pop()
            tree = self._tree(file)
            for node in ast.walk(tree) if tree is not None else ():
                for found in _set_by(node):
                    if found is None:
                        return None
                    settings.add(found)
                for module in _imported_by(node, package):
                    new = [own for own in _own_files(module, self._find) or () if own[0] not in seen]
                    seen.update(own for own, _ in new)
                    left += new
            if len(seen) > FILES_READ:
                return None
        return settings

    def _tree(self, file: Path) -> ast.Module | None:
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse(file.read_bytes())
            except (OSError, SyntaxError, ValueError):
                self._trees[file] = None
        return self._trees[file]

    def _imported_from(self, statement: ast.ImportFrom, package: str) -> None:
        module = _module_of(statement, package)
        if module and module != "__future__":
            self._imported(module)
            for alias in statement.names:
                if alias.name != "*":
                    self._imported(f"{module}.{alias.name}", member=True)

    def _imported(self, name: str, *, member: bool = False) -> None:
        files = _own_files(name, self._find)
        if files is None:
            if self._path_is_longer and self._absent(name.partition(".")[0]):
                self._changed(f"{name} is imported, which is found through sys.path")
            elif not self.changes_at:
                self.actions.setdefault(Import(name, member))
            return
        for file, package in files:
            self.read(file, package)

    def _other(self, statement: ast.stmt, certain: bool, where: str, patches: _Patches) -> None:
        for found in _settings(statement):
            if found is None:
                raise _EndError(f"{where}: variables are set whose names are not known")
            known = found if certain else Setting(found.name, None)
            if known.value is None and READ_IN_C.match(found.name):
                raise _EndError(f"{where}: {found.name} is set to something that is not known")
            self.actions.pop(known, None)  # what is set again counts from here on
            self.actions[known] = None
        source = ast.unparse(statement)
        self._path_is_longer |= "sys.path.append" in source
        for name in _FINDING:
            if name in source and _changes(statement, name):
                raise _EndError(f"{where}: {name} is changed")
        replaced = patches.made_by(statement)
        if replaced:
            raise _EndError(f"{where}: {replaced} is replaced")

    def _statements(self, body: Sequence[ast.stmt], certain: bool) -> Iterator[tuple[ast.stmt, bool]]:
        """Those that run when a module is imported, definitions of functions too; whether they run in any case."""
        for statement in body:
            if isinstance(statement, ast.If):
                test = ast.unparse(statement.test)
                if test in _NO_GPU and not self._gpus:
                    yield from self._statements(statement.body if _NO_GPU[test] else statement.orelse, certain)
                elif test not in _PASSED_BY:
                    yield _evaluated(statement.test), certain
                    yield from self._statements([*statement.body, *statement.orelse], False)
            elif isinstance(statement, ast.Try):
                yield from self._statements(statement.body, certain)
                for handler in statement.handlers:
                    yield from self._statements(handler.body, False)
                yield from self._statements([*statement.orelse, *statement.finalbody], certain)
            elif isinstance(statement, ast.With):
                for item in statement.items:
                    yield ast.copy_location(ast.Expr(item.context_expr), item.context_expr), certain
                yield from self._statements(statement.body, certain)
            elif isinstance(statement, (ast.For, ast.While)):
                yield _evaluated(statement.iter if isinstance(statement, ast.For) else statement.test), certain
                yield from self._statements([*statement.body, *statement.orelse], False)
            elif isinstance(statement, ast.ClassDef):
                yield from self._statements(statement.body, certain)
                yield _alone(statement), certain
            else:
                yield statement, certain


def _evaluated(expression: ast.expr) -> ast.stmt:
    """A statement that uses its value."""
    return ast.copy_location(ast.Return(expression), expression)


def _alone(statement: ast.ClassDef) -> ast.stmt:
    """The class without its body."""
    bare = ast.ClassDef(statement.name, statement.bases, statement.keywords, [ast.Pass()], statement.decorator_list)
    return ast.copy_location(bare, statement)


class _Patches:
    """Where one file replaces parts of modules that are not the script's own: ``torch.add = mine``, or by ``setattr``.
    A plain value (a flag, a number, a text) is a setting, and replaces nothing."""

    def __init__(self, tree: ast.Module, find: FindOwn, absent: Callable[[str], bool]) -> None:
        self._foreign: set[str] = set()
        nowhere: set[str] = set()
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, ast.Import):
                tops = {a.asname or a.name.partition(".")[0]: a.name.partition(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                tops = {a.asname or a.name: (node.module or "").partition(".")[0] for a in node.names}
            else:
                continue
            nowhere |= {name for name, top in tops.items() if absent(top)}
            self._foreign |= {name for name, top in tops.items() if find(top) is None and not absent(top)}
        if nowhere:
            self._foreign |= nowhere & _bound_to_others(nodes)
        self._of_stand_ins = {id(statement) for suite in _suites(nodes) for statement in _of_stand_ins(suite)}

    def made_in(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, str]:
        """In which line the function replaces what; empty: nothing. It may be called any time after its definition."""
        simple = [node for node in ast.walk(function) if isinstance(node, (ast.Expr, ast.Assign))]
        found = [(node.lineno, self._replaced(node)) for node in simple]
        return min(((line, what) for line, what in found if what), default=(0, ""))

    def made_by(self, statement: ast.stmt) -> str:
        """What this statement replaces; empty: nothing."""
        return self._replaced(statement)

    def is_of_stand_in(self, statement: ast.AST) -> bool:
        """Whether it sets a part of a placeholder."""
        return id(statement) in self._of_stand_ins

    def _replaced(self, statement: ast.AST) -> str:
        if self.is_of_stand_in(statement):
            return ""
        if isinstance(statement, ast.Assign) and not isinstance(statement.value, ast.Constant):
            for target in statement.targets:
                if isinstance(target, ast.Attribute) and self._is_part(ast.unparse(target)):
                    return ast.unparse(target)
        for call in ast.walk(statement) if isinstance(statement, (ast.Expr, ast.Assign)) else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "setattr" and len(call.args) == 3:
                part = f"{ast.unparse(call.args[0])}.{_text(call.args[1]) or '?'}"
                if not isinstance(call.args[2], ast.Constant) and self._is_part(part):
                    return part
        return ""

    def _is_part(self, dotted: str) -> bool:
        if dotted in _WHEN_CALLED or _SETTINGS.search(dotted):
            return False
        return dotted.partition(".")[0] in self._foreign


def _bound_to_others(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that may stand for something else where their import fails: all that are bound in any other way than by an
    import, but for results of calls outside of an ``except``."""
    handled = {id(node) for handler in nodes if isinstance(handler, ast.ExceptHandler) for node in ast.walk(handler)}
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and id(node) not in handled]
    results = [node for node in assigned if isinstance(node.value, (ast.Call, ast.Constant))]
    passed = {id(target) for node in results for target in node.targets}
    stores = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return arguments | {node.id for node in stores if id(node) not in passed}


def _suites(nodes: Sequence[ast.AST]) -> Iterator[list[ast.stmt]]:
    for node in nodes:
        for field in ("body", "orelse", "finalbody"):
            suite = getattr(node, field, None)
            if isinstance(suite, list):
                yield suite


def _of_stand_ins(suite: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements like ``triton.jit = nothing`` behind ``triton = MagicMock()``."""
    names: set[str] = set()
    for statement in suite:
        if isinstance(statement, ast.Assign):
            made = statement.value.func if isinstance(statement.value, ast.Call) else None
            stands_in = made is not None and ast.unparse(made).rpartition(".")[2] in _STAND_INS
            for target in map(ast.unparse, statement.targets):
                if stands_in and "." not in target:
                    names.add(target)
                elif target in names:
                    names.discard(target)
                elif len(statement.targets) == 1 and target.partition(".")[0] in names:
                    yield statement
        elif names:
            names -= {name.id for name in ast.walk(statement) if isinstance(name, ast.Name)}
            names -= {
                a.asname or a.name.partition(".")[0] for a in getattr(statement, "names", []) if hasattr(a, "name")
            }


def _changes(statement: ast.stmt, name: str) -> bool:
    """Whether a statement changes the object with this name, or passes it on. (An entry appended to a path comes after
    all installed modules, and does not count.)"""
    for node in ast.walk(statement):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(target).startswith(name) for target in targets):
                return True
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.startswith(name) and called not in (f"{name}.append", f"{name}.get", f"{name}.index"):
                return True
    return False


def _module_of(statement: ast.ImportFrom, package: str) -> str:
    """The module from which names are imported. ``package``: that relative imports count from."""
    module = statement.module or ""
    if statement.level:
        parents = package.split(".")
        module = ".".join(filter(None, (*parents[: len(parents) - statement.level + 1], module)))
    return module


def _imported_by(node: ast.AST, package: str) -> list[str]:
    """Modules that a statement imports, and names from modules, which may be modules themselves."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = _module_of(node, package)
        return [module, *(f"{module}.{alias.name}" for alias in node.names)] if module else []
    return []


def _own_files(name: str, find: FindOwn) -> list[tuple[Path, str]] | None:
    """The files that are run when the script's own module of this dotted name is imported, each with the package from
    which its relative imports count; None if it is not the script's own."""
    parts = name.split(".")
    own = find(parts[0])
    if own is None:
        return None
    files = [(own, parts[0] if own.name == "__init__.py" else "")] if own.is_file() else []
    if own.is_file() and own.name != "__init__.py":
        return files
    place = own if own.is_dir() else own.parent
    for count in range(2, len(parts) + 1):
        place /= parts[count - 1]
        dotted = ".".join(parts[:count])
        if place.with_suffix(".py").is_file():
            files.append((place.with_suffix(".py"), dotted.rpartition(".")[0]))
        elif (place / "__init__.py").is_file():
            files.append((place / "__init__.py", dotted))
    return files


def _settings(statement: ast.stmt) -> Iterator[Setting | None]:
    """Variables of the environment that a statement sets, calls in it included; None: one whose name is not known."""
    for node in ast.walk(statement):
        if node is statement or isinstance(node, ast.Call):
            yield from _set_by(node)


def _set_by(node: ast.AST) -> Iterator[Setting | None]:
    """Variables of the environment that this statement or call sets by itself."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                plain = None if isinstance(node, ast.AugAssign) else node.value
                yield _setting(_text(target.slice), _text(plain))
            elif _is_environ(target) or (node.value is not None and _is_environ(node.value)):
                yield None
    elif isinstance(node, ast.Delete):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield _setting(_text(target.slice), None)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from _called(node, node.func)


def _called(call: ast.Call, function: ast.Attribute) -> Iterator[Setting | None]:
    method, of_environ = function.attr, _is_environ(function.value)
    if method in ("putenv", "unsetenv") or (method in ("setdefault", "pop") and of_environ):
        given = [*(_text(argument) for argument in call.args), None, None]
        yield _setting(given[0], None if method in ("pop", "unsetenv") else given[1], default=method == "setdefault")
    elif method == "clear" and of_environ:
        yield None
    elif method == "update" and of_environ:
        for keyword in call.keywords:
            yield _setting(keyword.arg, _text(keyword.value))
        for argument in call.args:
            if isinstance(argument, ast.Dict):
                for key, value in zip(argument.keys, argument.values, strict=True):
                    yield _setting(_text(key), _text(value))
            else:
                yield None


def _setting(name: str | None, value: str | None, *, default: bool = False) -> Setting | None:
    return None if name is None else Setting(name, value, default)


def _is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
