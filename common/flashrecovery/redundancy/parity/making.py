"""Which parities of a version are made, and from what: each member of a group draws it up from what all have said.

So nothing has to be known from before, and all members conclude the same. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from flashrecovery.errors import ProtocolError
from flashrecovery.plan.parity.code import ParityLayout, StripePart
from flashrecovery.redundancy.parity.frames import NO_BASE, ParityPlace
from flashrecovery.state import codec

ENCODINGS = 2
"""That a member holds at most: the one that is, and while a new one is made the one before."""


@dataclass(frozen=True)
class MemberState:
    """What a member says of itself at the beginning of an exchange; all numbers, -1: none.

    Attributes:
        whole: it takes part; otherwise nothing can be made of this version.
        nbytes, ident: of its shards' bytes, and of their layout.
        before: another version of which it has these shards, laid out alike.
        domain: its failure domain.
        described: bytes of what belongs to the version besides tensors.
        held: by encoding (a number that says all about it), the newest version of its P and of its Q.
    """

    whole: bool
    nbytes: int
    ident: int
    before: int
    domain: int
    described: int
    held: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    LENGTH = 6 + 3 * ENCODINGS

    def words(self) -> list[int]:
        found = [int(self.whole), self.nbytes, self.ident, self.before, self.domain, self.described]
        for key, (p, q) in self.held.items():
            found += [key, p, q]
        return found + [-1] * (MemberState.LENGTH - len(found))

    @staticmethod
    def of(words: Sequence[int]) -> MemberState:
        held = {words[i]: (words[i + 1], words[i + 2]) for i in range(6, MemberState.LENGTH, 3) if words[i] >= 0}
        whole, nbytes, ident, before, domain, described = words[:6]
        return MemberState(bool(whole), nbytes, ident, before, domain, described, held)


@dataclass(frozen=True)
class EncodePlan:
    """Which parities are made of a version, from which one; :data:`.NO_BASE`: from nothing."""

    base: int
    places: frozenset[ParityPlace]


def to_make(layout: ParityLayout, key: int, version: int, states: Sequence[MemberState]) -> EncodePlan:
    """What the members conclude from what they have told each other, all of them the same. Raises ProtocolError."""
    found = {}
    for stripe in range(layout.members):
        for part in layout.parts():
            held = states[layout.holder(stripe, part)].held.get(key, (-1, -1))
            found[stripe, part] = held[part is StripePart.Q]
    if newer := sorted(v for v in found.values() if v > version):
        raise ProtocolError(f"parity of version {newer[-1]} is held at the exchange of version {version}")
    places = frozenset(place for place, newest in found.items() if newest < version)
    bases = {found[place] for place in places} | {s.before for s in states}
    return EncodePlan(bases.pop() if len(bases) == 1 else NO_BASE, places)


def key_of(ranks: Sequence[int], sizes: Sequence[int], idents: Sequence[int], losses: int, bucket: int) -> int:
    """63 bits that say all about an encoding: equal for the same members with equal layouts of their tensors."""
    return xxhash.xxh3_64_intdigest(codec.dumps((*map(tuple, (ranks, sizes, idents)), losses, bucket))) >> 1
