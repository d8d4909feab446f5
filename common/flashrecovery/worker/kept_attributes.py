"""Attributes of a script's objects and modules, as one thing that can be registered."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from flashrecovery.errors import UnsupportedError
from flashrecovery.worker.script_text.plain_values import LARGE, Putting, copies_of, is_kept


class KeptAttributes:
    """Attributes of an object, or variables of a module, that come back with a step::

        kept = types.SimpleNamespace(best=None, meter=AverageMeter())
        recovery.register(
            kept=flashrecovery.KeptAttributes(kept, "best", "meter"),
            counts=flashrecovery.KeptAttributes(sys.modules[__name__], "seen"),
            per_rank=["kept", "counts"],
        )

    Their values are numbers, texts, tensors and arrays of up to 16 Mi elements, containers of these, and objects of
    the script's own classes whose attributes are such. An object that is there is put back as it was; it
    stays the same one.

    Args:
        owner: what has them.
        names: of those that may change. One that ``owner`` has not yet need not be there.
    """

    def __init__(self, owner: object, *names: str) -> None:
        self.owner, self.names = owner, names

    def values(self) -> dict[str, Any]:
        """As they are now, by name."""
        return {name: getattr(self.owner, name) for name in self.names if hasattr(self.owner, name)}

    def state_dict(self) -> dict[str, Any]:
        """Copies. Raises UnsupportedError if one of the values is of another kind."""
        values = self.values()
        for name, value in values.items():
            if not is_kept(value, largest=LARGE):
                raise UnsupportedError(
                    f"KeptAttributes({self._name}, {name!r}): a {type(value).__name__} cannot be kept with a step; "
                    "allowed: numbers, texts, tensors, containers of these, and objects of the script's classes with "
                    "such attributes"
                )
        return copies_of(values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """``state``: of :meth:`state_dict`, in this process or another one."""
        putting = Putting()
        for name in self.names:
            if name in state:
                setattr(self.owner, name, putting.put(getattr(self.owner, name, None), state[name]))
            elif hasattr(self.owner, name):
                delattr(self.owner, name)

    @property
    def _name(self) -> str:
        return self.owner.__name__ if isinstance(self.owner, types.ModuleType) else type(self.owner).__name__
