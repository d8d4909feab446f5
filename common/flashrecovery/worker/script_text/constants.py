"""What a script's text sets, and which names of containers it only reads, so that those of numbers stay what they are.
Pure."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_READING = frozenset(
    (
        *("all", "any", "dict", "enumerate", "frozenset", "iter", "len", "list", "max", "min", "print", "repr"),
        *("reversed", "set", "sorted", "str", "sum", "tuple", "zip"),
    )
)
"""Functions that keep nothing of a container but its elements."""
_READING_METHODS = frozenset(
    (
        *("copy", "count", "difference", "get", "index", "intersection", "isdisjoint", "issubset", "issuperset"),
        *("items", "keys", "union", "values"),
    )
)
BY_TEXT = frozenset(("delattr", "getattr", "setattr"))
"""Functions that come to attributes by texts."""


@dataclass(frozen=True)
class SetByText:
    """The names that the text sets, of one file, or of several.

    Attributes:
        attributes: names of attributes that it sets, of whatever; and those of ``setattr(thing, "name", value)``.
        owners: names of the things that it sets attributes of.
        declared: names that functions declare ``global``.
    """

    attributes: frozenset[str] = frozenset()
    owners: frozenset[str] = frozenset()
    declared: frozenset[str] = frozenset()


def set_by_text(tree: ast.AST) -> SetByText:
    attributes, owners, declared = set[str](), set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            attributes.add(node.attr)
            owners.add(name_of(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            attributes |= {str(one.value) for one in node.args if isinstance(one, ast.Constant)}
            owners |= {name_of(one) for one in node.args[:1]}
        elif isinstance(node, ast.Global):
            declared |= set(node.names)
    return SetByText(frozenset(attributes), frozenset(owners), frozenset(declared))


@dataclass(frozen=True)
class NameUses:
    """The uses of names, of one file, or of several.

    Attributes:
        otherwise: last names of paths that its text may change, or lead on from: those of constants are not among them.
        by_any_name: it may come to variables of modules by names that its text does not have.
    """

    otherwise: frozenset[str] = frozenset()
    by_any_name: bool = False


def uses_of(tree: ast.AST, *, whole: bool) -> NameUses:
    """``whole``: what statements outside of functions do with the file's own variables counts, too. In an imported
    module they have been run."""
    reader = _UseReader()
    waiting: list[tuple[ast.AST, bool]] = [(tree, whole)]
    while waiting:
        parent, counts = waiting.pop()
        counts = counts or isinstance(parent, _FUNCTIONS)
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, (ast.Name, ast.Attribute)):
                reader.name(child, parent, counts)
            elif isinstance(child, (ast.Constant, ast.expr_context)):
                continue
            elif isinstance(child, ast.Call):
                reader.call(child, counts)
            elif isinstance(child, (ast.Import, ast.ImportFrom)):
                reader.imports(child.names)
            if not isinstance(child, ast.Name):
                waiting.append((child, counts))
    return reader.found()


class _UseReader:
    def __init__(self) -> None:
        self._otherwise = set[str]()
        self._imported, self._outside, self._by_any_name_of = set[str](), set[str](), set[str]()

    def found(self) -> NameUses:
        return NameUses(
            frozenset(self._otherwise | (self._outside & self._imported)),
            not self._by_any_name_of.isdisjoint({"", *self._imported}),
        )

    def imports(self, names: Sequence[ast.alias]) -> None:
        self._imported |= {(alias.asname or alias.name).partition(".")[0] for alias in names}
        self._otherwise |= {alias.name for alias in names if alias.asname is not None}

    def name(self, node: ast.Name | ast.Attribute, parent: ast.AST, counts: bool) -> None:
        if not isinstance(node.ctx, ast.Load) or not _only_reads(node, parent):
            (self._otherwise if counts or isinstance(node, ast.Attribute) else self._outside).add(name_of(node))

    def call(self, call: ast.Call, counts: bool) -> None:
        if not isinstance(call.func, ast.Name):
            return
        function = call.func.id
        if function in BY_TEXT:
            self._otherwise |= {str(one.value) for one in call.args if isinstance(one, ast.Constant)}
        if counts and function in ("exec", "eval", "globals", "__import__"):
            self._by_any_name_of.add("")
        elif counts and (function == "vars" or (function in BY_TEXT and not _has_constant_name(call))):
            of = call.args[0] if call.args else None
            self._by_any_name_of.add(name_of(of) if of is not None else "")


def _only_reads(node: ast.expr, parent: ast.AST) -> bool:
    """Whether a container of numbers is only read here."""
    if isinstance(parent, ast.Subscript):
        return parent.value is node and isinstance(parent.ctx, ast.Load)
    if isinstance(parent, ast.Attribute):
        return parent.attr in _READING_METHODS
    if isinstance(parent, (ast.For, ast.comprehension)):
        return parent.iter is node
    if isinstance(parent, ast.Call):
        return parent.func is not node and isinstance(parent.func, ast.Name) and parent.func.id in _READING
    return isinstance(parent, (ast.Compare, ast.FormattedValue, ast.BinOp, ast.If, ast.While, ast.Assert))


def _has_constant_name(call: ast.Call) -> bool:
    return len(call.args) > 1 and isinstance(call.args[1], ast.Constant)


def name_of(node: ast.AST) -> str:
    """The last name of a path; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
