"""Which internals of a framework are used, by name, and whether the installed version has them.

Recovery needs more of torch, DeepSpeed, Megatron, the Trainer and accelerate than their public APIs. A version number
does not tell whether an internal exists: vendor builds, nightlies and patch releases differ. So every private name
belongs to a :class:`Capability` with probes, which look at the installed code itself (:mod:`.probes`). Where versions
differ, a capability has several ways. The first one whose probes all succeed is used, and the code asks which one that
is (:meth:`Capability.takes`). If no way works, a feature that needs the capability is refused before training. The
error names what is missing, not a version; tested versions are only named in a notice (docs/versions.md).

``tests/unit/test_capabilities.py`` fails if a private name of a framework is used that no capability covers. A package
registers its :class:`Framework` as an entry point in the group :data:`ENTRY_POINTS`, so that ``flashrecovery doctor``
lists it. Probing imports neither DeepSpeed nor Megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from flashrecovery.capabilities.probes import Probe, exists
from flashrecovery.errors import UnsupportedError
from flashrecovery.util.versions import version_of

ENTRY_POINTS = "flashrecovery.capabilities"


@dataclass(frozen=True)
class Way:
    """One way in which versions of a framework offer a capability: a word for it, and what has to be there."""

    name: str
    probes: tuple[Probe, ...]

    def missing(self) -> tuple[str, ...]:
        """What is not there; () if all is."""
        return tuple(text for probe in self.probes for text in probe.missing())


@dataclass(frozen=True)
class Capability:
    """Something that is needed of a framework's inside.

    Attributes:
        name: short, as errors and ``flashrecovery doctor`` show it.
        purpose: what it is needed for.
        ways: the newest first.
        otherwise: what is done without any of them; "": features that need it are refused.
    """

    name: str
    purpose: str
    ways: tuple[Way, ...]
    otherwise: str = ""

    @functools.cached_property
    def way(self) -> str | None:
        """The word for the way that the installed version offers, None if there is none. Probed once in a process:
        adapters ask in every step."""
        return next((way.name for way in self.ways if not way.missing()), None)

    def takes(self, name: str) -> bool:
        """Whether the way of this name is the one. The name must be one of the ways' (ValueError)."""
        if name not in (way.name for way in self.ways):
            raise ValueError(f"{self.name}: no way is called {name!r}")
        return self.way == name

    def missing(self) -> tuple[str, ...]:
        """What is not there, by the way of which least is missing; () if a way is there."""
        if self.way is not None:
            return ()
        return min((way.missing() for way in self.ways), key=len)

    @property
    def names(self) -> frozenset[str]:
        """The names that are used, of attributes, functions and modules."""
        return frozenset(name for way in self.ways for probe in way.probes for name in probe.covers)


def capability(name: str, purpose: str, *probes: Probe, otherwise: str = "") -> Capability:
    """One that all versions offer in the same way."""
    return Capability(name, purpose, (Way("there", probes),), otherwise)


@dataclass(frozen=True)
class Framework:
    """All that is used of one framework's inside.

    Attributes:
        name: as messages say it.
        distribution: as pip knows it.
        package: that is imported.
        tested: the versions with which ``make matrix`` has been run (docs/versions.md); others get a notice.
        capabilities: in the order in which they are listed.
    """

    name: str
    distribution: str
    package: str
    tested: tuple[str, ...]
    capabilities: tuple[Capability, ...]

    def require(self, needed: Iterable[Capability] | None = None, version: str | None = None) -> None:
        """Raises UnsupportedError that names every capability among ``needed`` (all, if not given) that the installed
        version does not offer, and what is missing of it. ``version``: as the framework itself says it."""
        lacking = [
            f"{one.name} ({one.purpose}): {'; '.join(missing)}"
            for one in (self.capabilities if needed is None else needed)
            if not one.otherwise and (missing := one.missing())
        ]
        found = version or version_of(self.distribution)
        if lacking:
            raise UnsupportedError(
                f"{self.name} {found} lacks what flash recovery needs: "
                + " | ".join(lacking)
                + f". {self.tested_text()}"
            )
        if found is not None and not self.is_tested(found):
            _UNTESTED[self.name] = (
                f"{self.name} {found} has all that recovery uses of its inside, but is not one of the versions that "
                f"were tested ({', '.join(self.tested)}): try a fault drill before a long run"
            )

    @property
    def is_there(self) -> bool:
        """Whether it can be imported, as far as is known without importing it."""
        return exists(self.package)

    def probe(self) -> None:
        """Look for everything now, so that later callers need not wait."""
        for one in self.capabilities:
            one.missing()

    def is_tested(self, version: str) -> bool:
        """Whether it is one of :attr:`tested`, in any build."""
        return version.partition("+")[0] in self.tested

    def tested_text(self) -> str:
        """The tested versions, as a sentence."""
        return f"Tested with {self.name} {', '.join(self.tested)}"


_UNTESTED: dict[str, str] = {}


def untested() -> tuple[str, ...]:
    """A sentence for each framework whose capabilities this process needed, and found, in a version that was not
    tested."""
    return tuple(_UNTESTED.values())
