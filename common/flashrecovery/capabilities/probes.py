"""Probes: is a name there, has a function its parameters, does a class keep an attribute?

Frameworks in Python are not imported for it, which takes seconds and may need a GPU. Their modules' compiled code is
read (from ``__pycache__`` where Python has put it): it tells what a module defines, with which parameters, and which
attributes the methods of a class set. Attributes of instances are found so, too, before there is an instance.
What a framework has in C++ is asked of the imported module (:class:`Live`).
"""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType
from typing import Protocol


class Probe(Protocol):
    """Looks for something in the installed version of a framework."""

    @property
    def covers(self) -> tuple[str, ...]:
        """The names that it looks for: of attributes and functions, and of modules."""

    def missing(self) -> list[str]:
        """What is not there."""


@dataclass(frozen=True)
class Defined:
    """Names that a module defines or imports at its top level; ``Class.name`` for a method or field of a class."""

    module: str
    names: tuple[str, ...]

    @property
    def covers(self) -> tuple[str, ...]:
        return self.module, *(part for name in self.names for part in name.split("."))

    def missing(self) -> list[str]:
        code = module_code(self.module)
        if code is None:
            return [f"no module {self.module}"]
        return [f"no {self.module}.{name}" for name in self.names if not _is_defined(code, name)]


@dataclass(frozen=True)
class Attributes:
    """Attributes of a class or its instances: defined in its body, or set by its methods (not by those of bases)."""

    module: str
    kind: str
    names: tuple[str, ...]

    @property
    def covers(self) -> tuple[str, ...]:
        return self.module, *self.names

    def missing(self) -> list[str]:
        code = module_code(self.module)
        bodies = [] if code is None else list(_inner(code, self.kind))
        if not bodies:
            return [f"no {self.module}.{self.kind}"]
        there = {name for body in bodies for name in (*_bound(body), *_attributes_set(body))}
        return [f"no {self.module}.{self.kind}.{name}" for name in self.names if name not in there]


@dataclass(frozen=True)
class Assigned:
    """Attributes that some function of a module sets, on whatever object."""

    module: str
    names: tuple[str, ...]

    @property
    def covers(self) -> tuple[str, ...]:
        return self.module, *self.names

    def missing(self) -> list[str]:
        code = module_code(self.module)
        if code is None:
            return [f"no module {self.module}"]
        there = set(_attributes_set(code))
        return [f"{self.module} sets no {name}" for name in self.names if name not in there]


@dataclass(frozen=True)
class Parameters:
    """A function (``Class.name`` for a method, without ``self``) and its first parameters."""

    module: str
    function: str
    first: tuple[str, ...]

    @property
    def covers(self) -> tuple[str, ...]:
        return self.module, *self.function.split(".")

    def missing(self) -> list[str]:
        found = parameters(self.module, self.function)
        if found is None:
            return [f"no {self.module}.{self.function}"]
        method = found[:1] in (("self",), ("cls",)) and self.first[:1] != found[:1]
        here = found[method:][: len(self.first)]
        if here != self.first:
            return [
                f"{self.module}.{self.function} begins with ({', '.join(here)}), not with ({', '.join(self.first)})"
            ]
        return []


@dataclass(frozen=True)
class Uses:
    """Attributes or global names that the body of a function uses (``Class.name`` for a method)."""

    module: str
    function: str
    names: tuple[str, ...]

    @property
    def covers(self) -> tuple[str, ...]:
        return self.module, *self.names

    def missing(self) -> list[str]:
        code = _function(self.module, self.function)
        if code is None:
            return [f"no {self.module}.{self.function}"]
        return [f"{self.module}.{self.function} uses no {name}" for name in self.names if name not in code.co_names]


@dataclass(frozen=True)
class Live:
    """Names of a module that is imported for it: what C++ has no code for. ``Class.name`` for one of a class."""

    module: str
    names: tuple[str, ...]

    @property
    def covers(self) -> tuple[str, ...]:
        return self.module, *(part for name in self.names for part in name.split("."))

    def missing(self) -> list[str]:
        try:
            module = importlib.import_module(self.module)
        except ImportError as e:
            return [f"no module {self.module} ({e})"]
        return [f"no {self.module}.{name}" for name in self.names if not _has(module, name)]


def _has(found: object, dotted: str) -> bool:
    for part in dotted.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def exists(module: str) -> bool:
    """Whether there is a module or package of this name. Imports nothing."""
    return _spec(module) is not None


@functools.cache
def module_code(name: str) -> CodeType | None:
    """A module's compiled code, without running it; None if there is no such module in Python."""
    spec = _spec(name)
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(name) if get_code is not None else None
    return code if isinstance(code, CodeType) else None


def _spec(name: str) -> ModuleSpec | None:
    """Where a module lies. Its packages are not run, so this finds only what lies where its name says.

    A package that puts itself in its module's place may have written other paths into its specification than those that
    Python writes there: transformers 5.23 has a ``Path``, which Python's finder passes over.
    """
    first, *rest = name.split(".")
    spec: ModuleSpec | None = importlib.util.find_spec(first)
    for number in range(len(rest)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        locations = [os.fspath(location) for location in spec.submodule_search_locations]
        spec = PathFinder.find_spec(".".join((first, *rest[: number + 1])), locations)
    return spec


def parameters(module: str, function: str) -> tuple[str, ...] | None:
    """The parameters of a function or method, without ``*`` and ``**``; None if there is none of this name."""
    code = _function(module, function)
    return None if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _function(module: str, function: str) -> CodeType | None:
    """The body of a function or method; None if there is none of this name."""
    code = module_code(module)
    for part in function.split("."):
        code = None if code is None else next(_inner(code, part), None)
    return code


def _inner(code: CodeType, name: str) -> Iterator[CodeType]:
    """The bodies of classes and functions of this name that ``code`` defines; the last definition first."""
    return (c for c in reversed(code.co_consts) if isinstance(c, CodeType) and c.co_name == name)


def _is_defined(code: CodeType, dotted: str) -> bool:
    first, _, rest = dotted.partition(".")
    if not rest:
        return first in _bound(code)
    return any(_is_defined(body, rest) for body in _inner(code, first))


@functools.cache
def _bound(code: CodeType) -> frozenset[str]:
    """The names that a module's or a class's body binds, and the fields that it only annotates."""
    names = set(_operands(code, "STORE_NAME", "STORE_GLOBAL"))
    if "__annotations__" in code.co_names:
        names.update(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(names)


@functools.cache
def _attributes_set(code: CodeType) -> frozenset[str]:
    """The attributes that code sets on anything, its inner functions included."""
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(_operands(code, "STORE_ATTR")).union(*map(_attributes_set, inner))


def _operands(code: CodeType, *instructions: str) -> Iterator[str]:
    """The names in these instructions. (``dis.get_instructions`` takes twenty times as long.)"""
    wanted = {dis.opmap[name] for name in instructions}
    more = 0
    for operation, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        if operation == dis.EXTENDED_ARG:
            more = (more | argument) << 8
            continue
        if operation in wanted:
            yield code.co_names[more | argument]
        more = 0
