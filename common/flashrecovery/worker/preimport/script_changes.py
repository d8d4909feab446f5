"""Which statement of a script changes something outside of the script that a later import may read.

``package.FLAG = True`` between two imports is seen by the second package while it is imported. A process that imports
ahead of the script must not import it without that. What a package reads is not known, so everything counts that is not
known to be harmless: an attribute or item of another package's object that is set, and a call of another package's
function. Of a function of the script's own, the text is read. Each doubt costs only that what follows is imported by
each rank itself, and by later replacements ahead, if it becomes the same there (:mod:`.import_outcomes`).
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HARMLESS = re.compile(
    r"torch\.(backends|_dynamo\.config|_inductor\.config)\."
    r"|torch\.set_(float32_matmul_precision|num_threads|num_interop_threads|printoptions)"
    r"|torch\.(serialization\.add_safe_globals|storage\._load_from_bytes)|yaml\.SafeDumper\."
    r"|sys\.(stdout|stderr|setrecursionlimit)|logging\.|flashrecovery\.|fr_\w+\.|.*\.__version__\."
)
"""Settings that are read when kernels are called, lines are printed, or objects written, and not when a module is
imported. What is logged depends on no bit, and no bit on it."""
_QUIET = frozenset({"torch", "numpy", "triton", "packaging", "typing_extensions"})
"""Packages whose functions give a value, and change nothing, if the value is used and they have no name like these."""
_CHANGING = re.compile(
    r"(set|use|enable|disable|register|add|init|patch|load|install|update|configure|seed|manual)(_|$)"
)
_OF_PYTHON = re.compile(
    r"importlib\.(reload|import_module|util\.module_from_spec)|random\.|locale\.|time\.tzset|runpy\.|copyreg\.|codecs\."
    r"|socket\.setdefaulttimeout|multiprocessing\.set_|decimal\.(set|get)context|site\.|unittest\.mock\.patch"
    r"|mimetypes\.add|os\.(chdir|fchdir|chroot)|sys\.(argv|setdlopenflags|modules|meta_path|path_hooks)|ctypes\.|builtins\."
)
"""What of Python's own modules changes something that imports may read."""
_DEEPEST = 8
_RUNS_TEXT = frozenset({"exec", "eval", "__import__"})
_READING = frozenset(
    {*dir(str), *dir(dict), *dir(tuple)} - {*dir(object), "clear", "pop", "popitem", "setdefault", "update"}
)
"""Methods of Python's own types that change nothing, whatever the object is."""
_OF_PROPERTIES = frozenset({"getter", "setter", "deleter"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_MADE, _OWN, _CLASS, _HELD, _GIVEN = "<made>", "<own>", "<class>", "<held>", "<given>"
"""Kinds of what a name stands for, besides the dotted name in another package ("package.make().part"): an object that
the script has made, one of its functions and modules, one of its classes, an object that may be another package's, and
what a function is called with: something of the script's own, if it decorates that."""
_CALLS_THE_FIRST = frozenset({"builtins.map", "builtins.filter", "functools.reduce"})


@dataclass(frozen=True)
class _FromOwn:
    """A name that is imported from one of the script's own modules."""

    name: str


class _Bound:
    """What all files that are read have bound, wherever that is: by name, and by attribute."""

    def __init__(self) -> None:
        self.names: dict[str, list[tuple[str | ast.expr, ScriptNames]]] = {}
        self.attributes: dict[str, list[tuple[ast.expr, ScriptNames]]] = {}
        self.functions: dict[str, list[ast.AST]] = {}
        self.modules: set[str] = set()


class ScriptNames:
    """What the names in one file, or in one of its functions, stand for, in whatever order they are bound.

    Args:
        all_files: receives what this file binds.
        outer: those of the file, or function, around this function.
    """

    def __init__(
        self, scope: Any, is_own: Callable[[str], bool], all_files: _Bound, outer: ScriptNames | None = None
    ) -> None:
        self._outer = outer
        self._all = all_files
        self.bound: dict[str, list[str | ast.expr | _FromOwn]] = {}
        nodes = list(_of_scope(scope))
        self._global = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self._bind(alias.asname or top, _OWN if is_own(top) else alias.name if alias.asname else top)
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                own = bool(node.level) or is_own(module.partition(".")[0])
                for alias in node.names:
                    self._bind(alias.asname or alias.name, _FromOwn(alias.name) if own else f"{module}.{alias.name}")
            elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                self._bind(node.name, _CLASS if isinstance(node, ast.ClassDef) else _OWN)
            elif isinstance(node, ast.arg):
                self._bind(node.arg, _MADE if node.arg in ("self", "cls") else _GIVEN)
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assigned(target, node.value)
            elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
                self._assigned(node.target, None)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._assigned(node.optional_vars, node.context_expr)

    def _file(self) -> ScriptNames:
        return self if self._outer is None else self._outer._file()

    def _bind(self, name: str, what: str | ast.expr | _FromOwn) -> None:
        scope = self._file() if name in self._global else self
        scope.bound.setdefault(name, []).append(what)
        if scope._outer is None and not isinstance(what, _FromOwn):
            self._all.names.setdefault(name, []).append((what, scope))

    def _assigned(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, _HELD if value is None else value)
        elif isinstance(target, ast.Attribute):
            self._all.attributes.setdefault(target.attr, []).append((value or ast.Name("", ast.Load()), self))
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self._assigned(part, None)

    def kinds(self, node: ast.expr, depth: int = 0) -> set[str]:
        """What an expression's value may be."""
        if depth > _DEEPEST:
            return {_HELD}
        if isinstance(node, ast.Name):
            bound = self.bound.get(node.id)
            if bound is None and self._outer is not None:
                return self._outer.kinds(node, depth)
            if bound is None and hasattr(builtins, node.id):
                return {f"builtins.{node.id}"}
            if bound is None:  # it is from a star import, or not there
                return {_HELD if "*" in self.bound else _MADE}
            return set().union(*(self._what(what, depth + 1) for what in bound))
        if isinstance(node, ast.Attribute):
            return set().union(*(self._part(kind, node.attr, depth + 1) for kind in self.kinds(node.value, depth + 1)))
        if isinstance(node, ast.Subscript):
            return self._elements(node.value, depth + 1)
        if isinstance(node, (ast.Starred, ast.Await)):
            return self.kinds(node.value, depth + 1)
        if isinstance(node, ast.Call):
            own = isinstance(node.func, ast.Attribute) and node.func.attr in self._all.functions
            return {_HELD if own and kind == _MADE else _result(kind) for kind in self.kinds(node.func, depth + 1)}
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return set().union(*(self.kinds(part, depth + 1) for part in parts))
        return {_HELD} if isinstance(node, (ast.Lambda, ast.Yield, ast.YieldFrom)) else {_MADE}

    def _what(self, what: str | ast.expr | _FromOwn, depth: int) -> set[str]:
        if isinstance(what, ast.expr):
            return self.kinds(what, depth)
        return {what} if isinstance(what, str) else self._in_own_files(what.name, depth)

    def _in_own_files(self, name: str, depth: int) -> set[str]:
        """What a name stands for in the script's files, whichever it is of."""
        found = [names._what(what, depth + 1) for what, names in self._all.names.get(name, ())]
        return set().union(*found, {_OWN} if name in self._all.modules else set()) or {_HELD}

    def _part(self, kind: str, attribute: str, depth: int) -> set[str]:
        """What the attribute of an object of this kind may be."""
        if not kind.startswith("<"):
            return {f"{kind}.{attribute}"}
        if kind == _OWN:
            return self._in_own_files(attribute, depth)
        if kind in (_MADE, _CLASS) and depth < _DEEPEST:
            assigned = self._all.attributes.get(attribute, ())
            return set().union({_MADE}, *(names.kinds(value, depth + 1) for value, names in assigned))
        return {kind}

    def _elements(self, node: ast.expr, depth: int) -> set[str]:
        """What a container may have in it."""
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return set().union({_MADE}, *(self.kinds(part, depth + 1) for part in node.elts))
        if isinstance(node, ast.Dict):
            return set().union({_MADE}, *(self.kinds(part, depth + 1) for part in node.values))
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)):
            return self.kinds(node.value if isinstance(node, ast.DictComp) else node.elt, depth + 1)
        bound = self.bound.get(node.id, ()) if isinstance(node, ast.Name) and depth < _DEEPEST else ()
        inside = [self._elements(what, depth + 1) for what in bound if isinstance(what, ast.expr)]
        return set().union(self.kinds(node, depth + 1), *inside)


def _result(kind: str) -> str:
    """What a call of this gives."""
    top = kind.partition(".")[0]
    if kind.startswith("<") or kind == "builtins.getattr":
        return _MADE if kind in (_MADE, _CLASS) else _HELD
    return _MADE if top in sys.stdlib_module_names else f"{kind}()"


class Changes:
    """Of the files that are read so far. ``is_own``: whether a top-level module is the script's own; ``absent``:
    whether it is nowhere."""

    def __init__(self, is_own: Callable[[str], bool], absent: Callable[[str], bool]) -> None:
        self._is_own, self._absent = is_own, absent
        self._names: dict[Path, ScriptNames] = {}
        self._all = _Bound()
        self._functions = self._all.functions
        self._names_in: dict[ast.AST, ScriptNames] = {}
        self._judged: dict[tuple[str, bool], str] = {}

    def read(self, file: Path, tree: ast.Module) -> None:
        """The file's functions may be called from now on."""
        self._all.modules.add(file.parent.name if file.name == "__init__.py" else file.stem)
        names = self._names[file] = ScriptNames(tree, self._is_own, self._all)
        self._index(tree, names)
        self._judged.clear()

    def _index(self, scope: Any, names: ScriptNames) -> None:
        for node in _of_scope(scope):
            if isinstance(node, _FUNCTIONS):
                self._names_in[node] = ScriptNames(node, self._is_own, self._all, names)
                self._functions.setdefault(node.name, []).append(node)
                self._index(node, self._names_in[node])
            elif isinstance(node, ast.ClassDef):
                making = [n for n in node.body if isinstance(n, _FUNCTIONS) and n.name in _MAKING]
                self._functions.setdefault(node.name, []).extend(making)

    def made_by(self, statement: ast.AST, file: Path) -> str:
        """What this statement changes, in words; empty: nothing."""
        within = () if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)) else _of_scope(statement)
        statements = [statement, *(node for node in within if isinstance(node, ast.stmt))]
        return next(filter(None, (self._first(one, self._names[file]) for one in statements)), "")

    def _first(self, statement: ast.AST, names: ScriptNames, *, decorates: bool = False) -> str:
        dropped = statement.value if isinstance(statement, ast.Expr) else None
        for node in _executed(statement):
            if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
                found = self._set(node, names, decorates=decorates)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                found = self._set(node.target, names)
            elif isinstance(node, ast.Call):
                given = decorates and names.kinds(node.func) == {_GIVEN}
                found = "" if given else self._called(node.func, node, names, used=node is not dropped)
            elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                plain = [d for d in node.decorator_list if not isinstance(d, ast.Call)]
                called = (self._called(d, None, names, used=True, decorates=True) for d in plain)
                found = next(filter(None, called), "")
            else:
                continue
            if found:
                return found
        return ""

    def _set(self, target: ast.expr, names: ScriptNames, *, decorates: bool = False) -> str:
        holder = target.value if isinstance(target, (ast.Attribute, ast.Subscript)) else target
        part = f".{target.attr}" if isinstance(target, ast.Attribute) else ""
        harmless = (_MADE, _OWN, _CLASS, *([_GIVEN] if decorates else []))
        for kind in names.kinds(holder):
            if kind not in harmless and (kind.startswith("<") or not self._is_harmless(kind + part)):
                return f"{ast.unparse(target)} is set"
        return ""

    def _is_harmless(self, dotted: str) -> bool:
        top = dotted.partition(".")[0]
        return bool(_HARMLESS.match(dotted)) or dotted.startswith("os.environ") or self._absent(top)

    def _called(
        self, function: ast.expr, call: ast.Call | None, names: ScriptNames, *, used: bool, decorates: bool = False
    ) -> str:
        text = ast.unparse(function)
        if decorates and isinstance(function, ast.Attribute) and function.attr in _OF_PROPERTIES:
            return ""
        for kind in sorted(names.kinds(function)):
            if kind in (_OWN, _CLASS) or (kind == _MADE and isinstance(function, ast.Attribute)):
                name = text.rpartition(".")[2]
                found = self._body(name, decorates) if kind != _MADE or name in self._functions else ""
            elif kind == _MADE:
                found = ""
            elif kind in (_HELD, _GIVEN):
                reads = isinstance(function, ast.Attribute) and function.attr in _READING
                found = "" if reads else f"{text} is called"
            else:
                found = self._foreign(kind, text, call, names, used=used)
            if found:
                return found
        return ""

    def _foreign(self, dotted: str, text: str, call: ast.Call | None, names: ScriptNames, *, used: bool) -> str:
        top, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
        arguments = [] if call is None else call.args
        if top == "builtins" and last in ("setattr", "delattr") and len(arguments) > 1:
            place = ast.Attribute(arguments[0], _text(arguments[1]) or "?", ast.Store())
            return self._set(place, names)
        if dotted in _CALLS_THE_FIRST and arguments:
            return self._called(arguments[0], None, names, used=False)
        if top == "builtins":
            return f"{last} runs a text" if last in _RUNS_TEXT else ""
        if top == "warnings":
            return f"{text} is called" if any(_text(a) == "error" for a in arguments) else ""
        if self._is_harmless(dotted):
            return ""
        if top in sys.stdlib_module_names:
            return f"{text} is called" if _OF_PYTHON.match(dotted) else ""
        return "" if top in _QUIET and used and not _CHANGING.match(last) else f"{text} is called"

    def _body(self, name: str, decorates: bool) -> str:
        """What functions of the script's own with this name change, the constructors of classes, and what its files
        have assigned to the name, or to an attribute with it."""
        key = name, decorates
        if key not in self._judged:
            self._judged[key] = ""  # while it is read, for one that calls itself
            self._judged[key] = next(filter(None, self._of_each(name, decorates)), "")
        return self._judged[key]

    def _of_each(self, name: str, decorates: bool) -> Iterator[str]:
        known = name in self._functions
        for function in self._functions.get(name, ()):
            found = self._in_function(function, decorates)
            yield f"{name} is called: {found}" if found else ""
        for what, names in self._all.names.get(name, ()):
            known |= what != _OWN
            if isinstance(what, ast.expr):
                yield self._called(what, None, names, used=True)
            elif not what.startswith("<"):
                yield self._foreign(what, name, None, names, used=True)
        for value, names in self._all.attributes.get(name, ()):
            known = True
            yield self._called(value, None, names, used=True)
        yield "" if known else f"{name} is called"

    def _in_function(self, function: ast.AST, decorates: bool) -> str:
        """Functions in it are given what it gives them, or what it decorates."""
        for node in _of_scope(function):
            found = ""
            if isinstance(node, _FUNCTIONS):
                found = self._in_function(node, True)
            if not found and isinstance(node, ast.stmt):
                found = self._first(node, self._names_in[function], decorates=decorates)
            if found:
                return found
        return ""


_MAKING = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__"})


def _of_scope(scope: Any) -> Iterator[ast.AST]:
    """The parts of a file or function whose names are its own; functions in it, without what is in them."""
    left = list(ast.iter_child_nodes(scope))
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, _FUNCTIONS):
            left += ast.iter_child_nodes(node)


def _executed(statement: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement that run with it: not what is in functions, and not the statements within it."""
    left = [statement]
    while left:
        node = left.pop()
        yield node
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            left += node.decorator_list
            left += [*node.bases, *(k.value for k in node.keywords)] if isinstance(node, ast.ClassDef) else []
            left += (
                [d for d in (*node.args.defaults, *node.args.kw_defaults) if d] if isinstance(node, _FUNCTIONS) else []
            )
        else:
            left += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
