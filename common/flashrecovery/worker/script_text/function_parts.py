"""What a function holds from one call to the next: the variables that it shares with the one around it, its defaults
and attributes, the object of a method, the arguments of a partial."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from flashrecovery.worker.preimport.own_files import is_own_file
from flashrecovery.worker.script_text.script_frames import is_own

_READ = frozenset(("builtins", "collections", "itertools", "random", "numpy"))
"""Modules whose objects are looked into where a method of theirs is kept, as those of the script's own classes are."""


def function_parts(value: object) -> dict[str, Any] | None:
    """By name; None if ``value`` is no function, or one that is not the script's."""
    if isinstance(value, types.FunctionType):
        return _of_function(value) if is_own_file(value.__code__.co_filename) else None
    if isinstance(value, (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)):
        return {"__self__": value.__self__} if _is_looked_into(value.__self__) else None
    if type(value) is functools.partial:
        return {"func": value.func, "args": value.args, "keywords": value.keywords, **vars(value)}
    return None


def shared_variables(function: types.FunctionType) -> dict[str, Any]:
    """Those of the function around it that it uses, by name, as far as they have a value by now."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def with_parts(value: Any, parts: Mapping[str, Any]) -> Any:
    """``value`` with these of its parts; another object where its own cannot be set."""
    now = function_parts(value)
    if now is None or all(name in now and now[name] is part for name, part in parts.items()):
        return value
    if isinstance(value, types.FunctionType):
        _set_in(value, parts)
        return value
    if type(value) is functools.partial:
        all_parts = {**now, **parts}
        made = functools.partial(all_parts.pop("func"), *all_parts.pop("args"), **all_parts.pop("keywords"))
        vars(made).update(all_parts)
        return made
    return getattr(parts["__self__"], value.__name__)


def _is_looked_into(owner: object) -> bool:
    kind = type(owner)
    if owner is None or isinstance(owner, (types.ModuleType, type)):
        return False
    return is_own(kind) or kind.__module__.partition(".")[0] in _READ


def _of_function(function: types.FunctionType) -> dict[str, Any]:
    defaults = {f"default {number}": one for number, one in enumerate(function.__defaults__ or ())}
    keywords = {f"default {name}": one for name, one in (function.__kwdefaults__ or {}).items()}
    return {
        **shared_variables(function),
        **defaults,
        **keywords,
        **{f"attribute {name}": one for name, one in vars(function).items()},
    }


def _set_in(function: types.FunctionType, parts: Mapping[str, Any]) -> None:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name in parts:
            cell.cell_contents = parts[name]
    if function.__defaults__ is not None:
        function.__defaults__ = tuple(parts.get(f"default {n}", one) for n, one in enumerate(function.__defaults__))
    if function.__kwdefaults__ is not None:
        function.__kwdefaults__ = {n: parts.get(f"default {n}", one) for n, one in function.__kwdefaults__.items()}
    for name in [name for name in parts if name.startswith("attribute ")]:
        vars(function)[name.removeprefix("attribute ")] = parts[name]
