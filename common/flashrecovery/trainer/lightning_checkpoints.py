"""Lightning's ModelCheckpoint: a checkpoint that is written again, by a call that is made again, keeps its name.

The callback gives a file a name with a number behind it (``-v1``) where there is one of that name. A file that was left
by an attempt that does not count is none: only those are that were there when the training began, and those that calls
have written which count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any


class KnownFiles:
    """Files below the folders of the ModelCheckpoint callbacks, as rank 0 sees them.

    Attributes:
        names: with the number of the callback before them.
    """

    def __init__(self, trainer: Any) -> None:
        from lightning.pytorch.callbacks import ModelCheckpoint

        self._trainer = trainer
        self.names: set[str] = set()
        callbacks = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint)]
        for number, callback in enumerate(callbacks if trainer.is_global_zero else ()):
            if callback.dirpath and callback._fs.exists(callback.dirpath):
                self.names |= {self._name(number, callback, path) for path in callback._fs.find(callback.dirpath)}
        for number, callback in enumerate(callbacks):
            callback.file_exists = functools.partial(self._exists, number, callback)
            for method in ("_save_checkpoint", "_link_checkpoint", "_remove_checkpoint"):
                setattr(callback, method, self._noting(number, callback, getattr(callback, method)))

    def restore(self, names: Iterable[str]) -> None:
        """These are known, and no others."""
        self.names = {*names}

    @staticmethod
    def _name(number: int, callback: Any, path: Any) -> str:
        return f"{number}/{str(path).removeprefix(str(callback.dirpath)).lstrip('/')}"

    def _exists(self, number: int, callback: Any, filepath: Any, trainer: Any) -> bool:
        """In the place of the callback's own."""
        name = self._name(number, callback, filepath)
        known = any(one == name or one.startswith(f"{name}/") for one in self.names)
        here = trainer.is_global_zero and known and callback._fs.exists(filepath)
        exists: bool = trainer.strategy.reduce_boolean_decision(here, all=False)
        return exists

    def _noting(self, number: int, callback: Any, method: Callable[..., None]) -> Callable[..., None]:
        """``method``, whose last argument is the file that it writes, or removes."""

        @functools.wraps(method)
        def noting(*arguments: Any) -> None:
            method(*arguments)
            name = self._name(number, callback, arguments[-1])
            if method.__name__ == "_remove_checkpoint":
                self.names = {one for one in self.names if one != name and not one.startswith(f"{name}/")}
            elif self._trainer.is_global_zero:
                self.names.add(name)

        return noting
