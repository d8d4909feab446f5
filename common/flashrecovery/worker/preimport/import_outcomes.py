"""What has become of each module that was imported: a digest of its namespace, taken when its import has just ended.

A script may change a package (``package.FLAG = True``) before it imports a module that reads this while it is imported.
A process that imports that module ahead of the script must not keep what is made without the change. What may have been
changed, and what reads it, cannot be listed. So the outcomes are compared: live workers tell theirs, and a module that
has another one in a trial is left to the script (:mod:`.import_trial`).

A digest covers plain values in a module's namespace and in its containers, which functions and classes there are (by
name and line), defaults of functions, attributes of classes, those of objects that hold plain values, and small tensors
and arrays. It does not cover what an import does in other modules, and what objects of compiled types hold.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

_RUNNING = "_initializing"
"""What a module's spec has while its import runs. Without it outcomes are taken early, and modules left to the rank."""
UNKNOWN = 0
"""The digest of a module that cannot be described. It is equal to none."""
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_WRITTEN = frozenset(f"torch.{kind}" for kind in ("dtype", "device", "layout", "memory_format", "Size"))
"""Types of torch whose objects are equal if they are written alike."""
_OF_THE_IMPORT = frozenset(
    {"__builtins__", "__cached__", "__file__", "__loader__", "__path__", "__spec__"}
) | frozenset({"__dict__", "__doc__", "__module__", "__warningregistry__", "__weakref__"})
"""Names that say how a module or class came to be, not what is in it."""
_OF_THE_PROCESS = re.compile(r"(?<![.\d])\d{13,}(?![.\d])|0x[0-9a-f]{9,}|[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
"""Addresses of objects, times in nanoseconds, and UUIDs."""
_DEPTH = 3
_MOST = 500
"""Values of one module that are looked at besides plain ones and functions."""
_LONGEST = 100
"""Elements of a container that are looked at."""
_LARGEST = 1 << 16
"""Bytes of a tensor or array that is read."""


class ImportOutcomes:
    """Among the finders of modules, of which it finds none. ``digests``: by name of the modules that were imported
    since it was made, in the order in which their imports ended.

    Args:
        wanted: from which files modules count; those without a file do.
    """

    def __init__(self, wanted: Callable[[str], bool] = lambda file: True) -> None:
        self._wanted = wanted
        self._begun: dict[str, None] = {}
        self._known = set(sys.modules)
        self.digests: dict[str, int] = {}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """A module is about to be looked for."""
        self.look()
        self._begun[fullname] = None

    def look(self) -> None:
        """Take the outcomes of all imports that have ended."""
        for name in list(self._begun):
            module = sys.modules.get(name)
            if module is not None and _attributes(_attributes(module).get("__spec__")).get(_RUNNING, False):
                continue
            self._begun.pop(name, None)
            if module is None:
                continue  # it is nowhere, or its import has failed
            self._known.add(name)
            file = _attributes(module).get("__file__")
            if type(file) is not str or self._wanted(file):
                self.digests[name] = digest(module)

    def start(self) -> None:
        """Watch imports from now on, until :meth:`stop`."""
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Take the outcomes of the last imports, and watch no more. Idempotent."""
        self.look()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def told(self) -> dict[str, int]:
        """The digests, and :data:`UNKNOWN` for modules that have come in another way than by an import."""
        unseen = sys.modules.keys() - self._known
        return {**dict.fromkeys(unseen, UNKNOWN), **self.digests}


def digest(module: ModuleType) -> int:
    """64 bits, equal in two processes if the import has made the same of the module."""
    try:
        words = "\0".join(_Description(module).words())
    except Exception:  # noqa: BLE001 - a module may hold anything; its import must not fail because it is looked at
        return UNKNOWN
    words = _OF_THE_PROCESS.sub("#", words)
    return int.from_bytes(hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=8).digest(), "little") or 1


class _Description:
    """No code of a value's own class runs: it might import something, or make what it holds. The order of dicts and
    sets does not count, which may be that of hashes."""

    def __init__(self, module: ModuleType) -> None:
        self._names = _attributes(module)
        self._module = str(self._names.get("__name__"))
        self._left = _MOST
        self._seen: set[int] = set()

    def words(self) -> Iterator[str]:
        for name, value in sorted(self._names.items()):
            if name not in _OF_THE_IMPORT and not issubclass(type(value), ModuleType):
                yield f"{name}={self._written(value, 0)}"

    def _written(self, value: Any, depth: int) -> str:
        kind: Any = type(value)
        if kind in _PLAIN:
            return repr(value)
        if kind is FunctionType:
            return f"{value.__qualname__}:{value.__code__.co_firstlineno}{self._defaults(value)}"
        name = _name(kind)
        if depth > _DEPTH or self._left <= 0 or id(value) in self._seen:
            return name
        self._left -= 1
        self._seen.add(id(value))
        if issubclass(kind, type):
            return self._class(value, depth)
        if issubclass(kind, (tuple, list)):
            parts = (tuple if issubclass(kind, tuple) else list).__getitem__(value, slice(_LONGEST))
            return f"{name}{len(value)}" + ",".join([self._written(part, depth + 1) for part in parts])
        if issubclass(kind, dict):
            parts = list(itertools.islice(dict.items(value), _LONGEST))
            return f"{name}{len(value)}" + self._items(parts, depth)
        if issubclass(kind, (set, frozenset)):
            parts = list((set if issubclass(kind, set) else frozenset).__iter__(value))
            few = parts if len(parts) <= _LONGEST else []
            return f"{name}{len(parts)}" + ",".join(sorted([self._written(part, depth + 1) for part in few]))
        if issubclass(kind, enum.Enum):
            return f"{name}.{_attributes(value).get('_name_')}"
        if name in _WRITTEN or issubclass(kind, PurePath):
            return str(value)
        if name in ("torch.Tensor", "torch.nn.parameter.Parameter"):
            return _tensor(value)
        if name == "numpy.ndarray" or (kind.__module__ == "numpy" and hasattr(kind, "tobytes")):
            return f"{value.dtype}{value.shape}{value.tobytes().hex() if value.nbytes <= _LARGEST else ''}"
        return name + self._items(self._held_by(value, kind), depth)

    def _held_by(self, value: Any, kind: type) -> list[tuple[Any, Any]]:
        """An object's attributes; of one of a class from elsewhere only the plain ones, for it may lead anywhere."""
        of_here = kind.__module__.partition(".")[0] == self._module.partition(".")[0]
        return [item for item in list(_attributes(value).items()) if of_here or type(item[1]) in _PLAIN]

    def _items(self, items: list[tuple[Any, Any]], depth: int) -> str:
        written = [f"{self._written(key, depth + 1)}:{self._written(value, depth + 1)}" for key, value in items]
        return ",".join(sorted(written))

    def _class(self, value: type, depth: int) -> str:
        name = _name(value)
        if value.__module__ != self._module:
            return name
        bases = [_name(base) for base in value.__mro__]
        own = [(key, held) for key, held in list(vars(value).items()) if key not in _OF_THE_IMPORT]
        return f"{name}{bases}{self._items(own, depth)}"

    def _defaults(self, value: FunctionType) -> str:
        if value.__defaults__ is None and value.__kwdefaults__ is None:
            return ""
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return ",".join([_name(FunctionType) if type(d) is FunctionType else self._written(d, _DEPTH) for d in given])


@functools.lru_cache(maxsize=4096)
def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _attributes(value: object) -> Mapping[Any, Any]:
    """What ``vars`` gives, without code of the object's class."""
    for base in type(value).__mro__:
        place = vars(base).get("__dict__")
        if place is not None:
            found = place.__get__(value) if type(place) in (GetSetDescriptorType, MemberDescriptorType) else None
            return found if type(found) is dict else {}
    return {}


def _tensor(value: Any) -> str:
    words = f"{value.dtype}{tuple(value.shape)}{value.device}"
    if value.device.type == "cpu" and value.is_contiguous() and value.nbytes <= _LARGEST:
        words += str(value.detach().flatten().view(sys.modules["torch"].uint8).tolist())
    return words
