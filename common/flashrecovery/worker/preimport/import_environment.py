"""What imports have done to the environment, for a process that finds them done.

A module may set a variable when it is imported, which others read later: in a function, or when they are imported. A
process that is forked from a zygote, or that has imported ahead of its rank, begins with the environment of its rank,
and its script's import does nothing any more. Without what the import has set, libraries would compute otherwise there
than in a fresh interpreter.

A process may have variables that no rank has: a zygote has torch ask NVML whether there is a GPU. A module
that would set such a variable if it were not there (DeepSpeed does) has set it, as in a rank.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import contextmanager


class ImportEnvironment:
    """Variables by name: their values before the imports and after them; None: unset. ``own``: those that this process
    has for itself."""

    def __init__(self, own: Collection[str] = ()) -> None:
        self._own = frozenset(own)
        self._changes: dict[str, tuple[str | None, str | None]] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What is set in the block counts, also where it ends with an exception."""
        before = dict(os.environ)
        try:
            with self._noting_defaults():
                yield
        finally:
            for name in before.keys() | os.environ.keys():
                old, new = before.get(name), os.environ.get(name)
                if new != old:
                    first, _ = self._changes.get(name, (None if name in self._own else old, None))
                    self._changes[name] = first, new

    @contextmanager
    def _noting_defaults(self) -> Iterator[None]:
        """``os.environ.setdefault`` of a variable that is there for this process only counts."""
        if not self._own:
            yield
            return

        def setdefault(name: str, value: str) -> str:
            if name in self._own and name in os.environ and name not in self._changes:
                self._changes[name] = None, value
            return type(os.environ).setdefault(os.environ, name, value)

        vars(os.environ)["setdefault"] = setdefault
        try:
            yield
        finally:
            del vars(os.environ)["setdefault"]

    def apply(self, env: MutableMapping[str, str]) -> None:
        """Set the variables there that are as the imports had found them. Those with another value are the rank's own,
        or what the script is about to set."""
        for name, (old, new) in self._changes.items():
            if env.get(name) != old:
                continue
            if new is None:
                env.pop(name, None)
            else:
                env[name] = new
