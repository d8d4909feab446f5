"""What imports have done to the environment, for a process that finds them done.

A module may set a variable when it is imported, which others read later: in a function, or when they are imported. A
process that is forked from a zygote, or that has imported ahead of its rank, begins with the environment of its rank,
and its script's import does nothing any more. Without what the import has set, libraries would compute otherwise there
than in a fresh interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager


class ImportEnvironment:
    """Variables by name: their values before the imports and after them; None: unset."""

    def __init__(self) -> None:
        self._changes: dict[str, tuple[str | None, str | None]] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What is set in the block counts, also where it ends with an exception."""
        before = dict(os.environ)
        try:
            yield
        finally:
            for name in before.keys() | os.environ.keys():
                old, new = before.get(name), os.environ.get(name)
                if new != old:
                    first, _ = self._changes.get(name, (old, None))
                    self._changes[name] = first, new

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
