"""Changes that an adapter makes inside its framework at run time: named, made where they are needed, with a reason,
removable.

A patch is the last resort, for what the framework's own hooks cannot do. An adapter registers its table as an entry
point in the group ``flashrecovery.patches``, so that ``flashrecovery doctor`` lists it without importing the framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from flashrecovery.capabilities import Capability
from flashrecovery.util.versions import version_of

ENTRY_POINTS = "flashrecovery.patches"

_looking = False


@contextmanager
def only_looking() -> Iterator[None]:
    """An adapter that is imported inside changes nothing: ``flashrecovery doctor`` asks it what it would do."""
    global _looking
    _looking = True
    try:
        yield
    finally:
        _looking = False


def looked_at() -> bool:
    """Whether an adapter is being imported :func:`only_looking`."""
    return _looking


@dataclass(frozen=True)
class Patch:
    """One change.

    Attributes:
        name: short, as ``flashrecovery doctor`` shows it.
        changed: what it changes; it is made where the installed version has that.
        reason: why it has to be made.
        apply: makes it, and returns a function that takes it back. Called when the framework has been imported.
    """

    name: str
    changed: Capability
    reason: str
    apply: Callable[[], Callable[[], None]]


class PatchTable:
    """All patches of one framework. ``distribution``: its name as pip knows it."""

    def __init__(self, distribution: str, patches: Sequence[Patch]) -> None:
        self.distribution = distribution
        self.patches = tuple(patches)
        self._applied: dict[str, Callable[[], None]] = {}

    @property
    def applied(self) -> tuple[str, ...]:
        """The names of those that are in place in this process."""
        return tuple(self._applied)

    def wanted(self, patch: Patch) -> bool:
        """Whether ``patch`` is for the installed version."""
        return version_of(self.distribution) is not None and patch.changed.way is not None

    def apply(self) -> None:
        """Make all changes that are for the installed version and have not been made."""
        for patch in self.patches:
            if patch.name not in self._applied and self.wanted(patch):
                self._applied[patch.name] = patch.apply()

    def remove(self) -> None:
        """Take all changes back, the last one first."""
        while self._applied:
            _, take_back = self._applied.popitem()
            take_back()
