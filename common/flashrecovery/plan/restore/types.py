"""The facts that a recovery is planned from, and the plan itself. Ranks and versions are integers >= 0, sizes
bytes.

A version below 0 in a :class:`Holding` means a torn shard (its rank was stopped while it changed it): no rank
holds it, and every function of this package ignores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from flashrecovery.errors import RestoreError


class Kind(str, Enum):
    """What a held shard is."""

    LIVE = "live"
    """The rank's own state, in place."""
    UNDO = "undo"
    """The rank's own copy of its state before or after the last step."""
    COPY = "copy"
    """A copy that the rank keeps for another rank (neighbour copy)."""
    PARITY = "parity"
    """Not stored, but the survivors of the rank's parity group can decode it. Used only if no other rank has it."""
    PAGE = "page"
    """Rank-local state in the shared page that the agent keeps of that rank, also when the process is dead."""
    LENT = "lent"
    """The rank-local state of another rank of an elastic job, where it serves as well."""
    CHECKPOINT = "checkpoint"
    """A saved shard that the rank can read."""

    @property
    def words(self) -> str:
        """For people."""
        return _WORDS[self]

    @property
    def order(self) -> int:
        """Lower is preferred between equals: live before copies, memory before checkpoint."""
        return _ORDER[self]


_WORDS: Mapping[Kind, str] = {
    Kind.LIVE: "live",
    Kind.UNDO: "undo copy",
    Kind.COPY: "neighbour copy",
    Kind.PARITY: "parity",
    Kind.PAGE: "rank-local state page",
    Kind.LENT: "another rank's rank-local state",
    Kind.CHECKPOINT: "checkpoint",
}
_ORDER: Mapping[Kind, int] = {kind: i for i, kind in enumerate(Kind)}


@dataclass(frozen=True, slots=True)
class Holding:
    """A living place has ``(shard, version)``. LIVE and UNDO imply that ``rank`` needs that shard itself.

    Attributes:
        rank: the place whose process (for PAGE: whose agent) holds it.
        nbytes: size in bytes; 0 if unknown. Equal for all holdings of one shard at one version.
    """

    rank: int
    shard: str
    version: int
    kind: Kind
    nbytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """``rank`` cannot go on without ``shard``. Needs are stated for every rank, victims included."""

    rank: int
    shard: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The job can go on from ``version``; ``reason`` says why not from a newer one."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class NoCut:
    """No version is held for every shard.

    Attributes:
        reason: as text, shortened when thousands of shards are concerned.
        missing: every (rank, shard) that does not exist at ``best_version``, ascending.
        best_version: the version at which the fewest shards are missing; None if nothing at all is held.
    """

    reason: str
    missing: tuple[tuple[int, str], ...]
    best_version: int | None


@dataclass(frozen=True, slots=True)
class Transfer:
    """``source`` sends its ``kind`` of (shard, version) to ``dest``: ``nbytes`` on the wire."""

    shard: str
    version: int
    source: int
    dest: int
    kind: Kind
    nbytes: int


@dataclass(frozen=True, slots=True)
class LocalRestore:
    """``rank`` takes (shard, version) from its own ``kind`` of copy; nothing on the wire."""

    rank: int
    shard: str
    version: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class RangedTransfer:
    """Shards that several ranks hold alike: each of them sends ranges of bytes to ``dest``, as its link carries them.

    Attributes:
        number: from 0, among those of ``dest``.
        holders: ascending; none of them is on the host of ``dest``.
        shards: ascending. Each also stands among the plan's transfers, with one of the holders as its source.
    """

    dest: int
    number: int
    holders: tuple[int, ...]
    kind: Kind
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """How every rank gets every shard at ``version``. What is neither transferred nor restored locally is
    live.

    Attributes:
        bytes_on_wire: sum over the transfers; equals the bytes that their destinations lost.
        busiest_sender_bytes: what the busiest sender sends.
        lower_bound_bytes: no plan whatever has a busiest sender below this (equal: this plan is optimal).
        ranged: which transfers are carried out in ranges, by several holders.
    """

    version: int
    transfers: tuple[Transfer, ...]
    local: tuple[LocalRestore, ...]
    bytes_on_wire: int
    reason: str
    busiest_sender_bytes: int = 0
    lower_bound_bytes: int = 0
    ranged: tuple[RangedTransfer, ...] = ()


class NoSourceError(RestoreError):
    """A shard has no source left at the version to restore.

    Do: nothing by hand; the checkpoint is used. Keep more copies if it comes often; see redundancy.md.

    Attributes:
        missing: the (rank, shard) pairs, ascending.
    """

    def __init__(self, message: str, missing: tuple[tuple[int, str], ...]) -> None:
        super().__init__(message)
        self.missing = missing
