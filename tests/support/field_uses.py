"""Where the fields of classes are read and written, told apart by the class and not only by the field's name.

mypy finds the types: a plugin notes the class of the object in each ``object.field``. What stands around it (an
assignment, a call that changes the field) comes from Python's own syntax tree.
"""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mypy import build
from mypy.modulefinder import BuildSource
from mypy.nodes import MemberExpr
from mypy.options import Options
from mypy.plugin import AttributeContext, Plugin
from mypy.types import Type

_CHANGES = frozenset({"add", "append", "clear", "extend", "update", "CopyFrom", "MergeFrom", "SetInParent"})
"""Methods that write to the field that they are called on."""

_OF_NUMPY = ("[var-annotated]", "[has-type]", "[misc]")

_Span = tuple[int, int, int | None, int | None]
_Places = dict[str, set[str]]


@dataclass
class FieldUses:
    """Places, as ``FILE:LINE``, by the full name of a field: ``package.module.Class.field``."""

    read: _Places = field(default_factory=lambda: defaultdict(set))
    written: _Places = field(default_factory=lambda: defaultdict(set))
    """In an assignment to the field, or by a method that changes it."""
    given: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    """Keyword arguments, by the name of what is called and their own; of ``object.field.add``, by ``.field``."""
    quoted: _Places = field(default_factory=lambda: defaultdict(set))
    """Strings, by what they say."""


def field_uses(sources: Mapping[str, Path], stubs: Mapping[str, Path] | None = None) -> FieldUses:
    """Of all fields of the modules in ``sources`` (name -> file). ``stubs``: further modules, of which only the types
    are needed. What is imported besides these and the standard library has no types here: a field of an object that
    comes out of it is not seen, unless the variable is annotated."""
    roots = tuple({name.partition(".")[0] for name in (*sources, *(stubs or {}))})
    finder = _Finder(_options(), tuple(f"{root}." for root in roots))
    modules = {**sources, **(stubs or {})}
    result = build.build(
        [BuildSource(str(path), name) for name, path in modules.items()], finder.options, extra_plugins=[finder]
    )
    # Generated code has no types, and numpy's are not looked at. The linter's mypy sees all of them.
    errors = [e for e in result.errors if "_pb2_grpc" not in e and not e.endswith(_OF_NUMPY)]
    assert errors == [], errors
    uses = FieldUses()
    changed: dict[str, set[_Span]] = {}
    for path in sources.values():
        changed[str(path)] = set(_syntax(path, uses))
    for path_name, span, name, assigned in finder.found:
        if path_name in changed:
            write = assigned or span in changed[path_name]
            (uses.written if write else uses.read)[name].add(f"{path_name}:{span[0]}")
    return uses


def _options() -> Options:
    options = Options()
    options.incremental = False
    options.cache_dir = os.devnull
    options.follow_imports = "skip"
    options.ignore_missing_imports = True
    options.check_untyped_defs = True
    options.namespace_packages = options.explicit_package_bases = True
    return options


class _Finder(Plugin):
    def __init__(self, options: Options, roots: tuple[str, ...]) -> None:
        super().__init__(options)
        self._roots = roots
        self.found: list[tuple[str, _Span, str, bool]] = []

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        return partial(self._note, fullname) if fullname.startswith(self._roots) else None

    def _note(self, name: str, use: AttributeContext) -> Type:
        at = use.context
        if isinstance(at, MemberExpr):  # mypy looks attributes up for its own purposes, too
            self.found.append((use.api.path, (at.line, at.column, at.end_line, at.end_column), name, use.is_lvalue))
        return use.default_attr_type


def _syntax(path: Path, uses: FieldUses) -> Iterator[_Span]:
    """Enters calls and strings of one file into ``uses``; yields where the attributes stand that are changed."""
    for node in ast.walk(ast.parse(path.read_text())):
        changed: Sequence[ast.expr] = ()
        if isinstance(node, ast.Assign):
            changed = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            changed = [node.target]
        elif isinstance(node, ast.Call):
            function = node.func
            name = ""
            if isinstance(function, ast.Name):
                name = function.id
            elif isinstance(function, ast.Attribute):
                name = function.attr
                if name in _CHANGES:
                    changed = [function.value]
                if name == "add" and isinstance(function.value, ast.Attribute):
                    name = f".{function.value.attr}"
            for keyword in node.keywords:
                if keyword.arg is not None:
                    uses.given[name, keyword.arg].add(f"{path}:{node.lineno}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            uses.quoted[node.value].add(f"{path}:{node.lineno}")
        for expression in changed:
            for attribute in _targets(expression):
                yield (attribute.lineno, attribute.col_offset, attribute.end_lineno, attribute.end_col_offset)


def _targets(expression: ast.expr) -> Iterator[ast.Attribute]:
    """Of ``a.b[i].c = x`` both ``a.b`` and ``a.b[i].c`` are changed."""
    if isinstance(expression, ast.Tuple | ast.List):
        for item in expression.elts:
            yield from _targets(item)
    elif isinstance(expression, ast.Attribute):
        yield expression
        yield from _targets(expression.value)
    elif isinstance(expression, ast.Subscript | ast.Starred):
        yield from _targets(expression.value)
