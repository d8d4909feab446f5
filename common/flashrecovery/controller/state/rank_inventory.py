"""Which state a rank needs and holds, and how that becomes input for :mod:`flashrecovery.plan`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashrecovery.controller.state.parity import held_by
from flashrecovery.plan import Holding, Kind, Need
from flashrecovery.plan.ownership import renamed
from flashrecovery.proto import flashrecovery_pb2 as pb

if TYPE_CHECKING:
    from flashrecovery.plan.parity.decodable import ParityHeld


def local_state_name(rank: int) -> str:
    """Shard name of the rank-only state of ``rank``."""
    return f"capsule@{rank}"


@dataclass(frozen=True, slots=True)
class StopAnswer:
    """What one or several ranks say when they have stopped, but for what each of them holds: read once. The fields are
    as in :class:`RankInventory`; ``parity`` as it was said."""

    live: int
    late: frozenset[int]
    layout: tuple[int, ...]
    ready: tuple[int, ...]
    parity: pb.Parity | None

    @staticmethod
    def of(said: pb.Reply) -> StopAnswer:
        """As it came."""
        parity = said.parity if said.HasField("parity") else None
        return StopAnswer(said.live_version, frozenset(said.late), tuple(said.layout), tuple(said.ready), parity)


@dataclass(slots=True)
class RankInventory:
    """The inventory of one rank.

    Attributes:
        needs: size in bytes by shard.
        sharded: those of its needs that belong to what is sharded among the ranks; each is of one size of the job.
        as_launched: what it has said that it needs of sharded state may be of the launch's sharding: it came, or was
            found, and has not been stopped since, and what the rank needs was not known.
        layout, ready: the ranks among which its state is sharded, and for which it has been made ready, as it has said
            to a controller that did not know.
        live: the version that its tensors have; -1: no whole one.
        local_states, early: versions of its rank-local state that its last process's page has, and those of them that
        are not final.
        late: versions whose rank-local state, on this rank, was not what it had been early.
        uses_device: its process uses an accelerator.
        parity: what it has said of parity; None: it keeps none, or has not said so yet.
    """

    rank: int
    needs: dict[str, int] = field(default_factory=dict)
    sharded: frozenset[str] = frozenset()
    as_launched: bool = False
    layout: tuple[int, ...] = ()
    ready: tuple[int, ...] = ()
    live: int = -1
    local_states: tuple[int, ...] = ()
    early: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    uses_device: bool = False
    parity: ParityHeld | None = None
    _said: list[pb.Held] = field(default_factory=list)  # what it holds besides its live state, in its own words

    def forget_process(self) -> None:
        """What its last process had is gone; what the rank needs stays known."""
        self.live = -1
        self._said = []
        self.parity = None

    def found_pages(self, local_states: Iterable[int], early: Iterable[int]) -> None:
        """Its last process's page has these versions of its rank-local state."""
        self.local_states, self.early = tuple(local_states), frozenset(early)

    def forget_pages(self) -> None:
        """No page of its last process is left, or its process itself says what is in it."""
        self.local_states = ()

    def process_stopped(self, answer: StopAnswer, held: Iterable[pb.Held]) -> None:
        """Its process has stopped, and knows by now of which sharding its state is, and what is in its page."""
        self.as_launched = False
        self.take(answer.live, held, answer.parity)
        self.late, self.layout, self.ready = answer.late, answer.layout, answer.ready
        self.forget_pages()

    def process_resumed(self) -> None:
        """Its process takes steps again."""
        self.live, self.as_launched = -1, False

    def forget_needs(self) -> None:
        """What it needs will be said again: all processes start from the script's first line."""
        self.needs = {}

    def rename_own(self, own: Collection[str]) -> None:
        """These shards have turned out to be each rank's own."""
        self.needs = renamed(self.needs, self.rank, own)

    def need_as(self, other: RankInventory) -> None:
        """It needs what the rank whose place it takes needs."""
        self.needs, self.sharded = dict(other.needs), other.sharded

    def need_as_sharded(self, known: Mapping[str, int], sharded: frozenset[str]) -> None:
        """Its process has sharded its state as at the launch, and takes on the sharding that was ``known``."""
        self.needs = {**self.common_needs(), **{name: known[name] for name in sharded}}
        self.sharded = sharded

    def sharding_told(self, *, as_launched: bool, has_part: bool) -> None:
        """The ranks have said among which of them state is sharded. ``has_part``: it is one of them."""
        self.as_launched = as_launched
        if not has_part:
            self.need_no_part()

    def process_joined(self, needs: Collection[pb.ShardNeed], *, as_launched: bool, uses_device: bool) -> None:
        """What its process needs and uses, as it says at its first step, perhaps of the launch's sharding."""
        self.take_needs(needs)
        self.as_launched, self.uses_device = as_launched, uses_device

    def take_needs(self, needs: Collection[pb.ShardNeed]) -> None:
        """What the rank needs, in its own words."""
        self.needs = {need.name: need.nbytes for need in needs}
        self.sharded = frozenset(need.name for need in needs if need.sharded)

    def common_needs(self) -> dict[str, int]:
        """What it needs in any size of the job."""
        return {name: nbytes for name, nbytes in self.needs.items() if name not in self.sharded}

    def need_part(self, kept: Mapping[str, int]) -> None:
        """This rank needs the sharded state that others keep for it."""
        common = self.common_needs()
        self.sharded, self.as_launched = frozenset(kept.keys() - common.keys()), False
        self.needs = {**common, **{name: kept[name] for name in self.sharded}}

    def need_no_part(self) -> None:
        """The rank has no part of the sharded state yet, and gets its part when that is resharded."""
        self.needs, self.sharded = self.common_needs(), frozenset()

    def take(self, live: int, held: Iterable[pb.Held], parity: pb.Parity | None = None) -> None:
        """Replace what is known of this rank's versions by its own report. The report is parsed on demand."""
        self.live = live
        self._said = list(held)
        self.parity = held_by(self.rank, parity)
        self.late = frozenset()

    def forget_early(self, versions: Set[int]) -> bool:
        """The step before each of these versions was late on another rank: rank-local state that was sealed early in it
        may be wrong. Returns whether there was one."""
        said = [h for h in self._said if not (h.early and h.version in versions)]
        local_states = tuple(v for v in self.local_states if not (v in self.early and v in versions))
        known = len(said) < len(self._said) or len(local_states) < len(self.local_states)
        self._said, self.local_states = said, local_states
        return known

    @property
    def newest(self) -> int:
        """The newest version of anything that it holds, -1: nothing."""
        newest = self.live
        for held in self._said:
            newest = max(newest, held.version)
        return max(newest, *self.local_states) if self.local_states else newest

    def _names(self, held: pb.Held) -> Collection[str]:
        return held.shards or self.needs.keys()

    def _expand(self, held: pb.Held) -> list[Holding]:
        kind = Kind(held.kind)
        names = self._names(held)
        sizes = held.nbytes or [self.needs.get(n, 0) for n in names]
        return [Holding(self.rank, n, held.version, kind, b) for n, b in zip(names, sizes, strict=True)]

    def holdings(self) -> list[Holding]:
        """Everything that this rank's process, or the agent for it, holds."""
        found = [h for message in self._said for h in self._expand(message)]
        if self.live >= 0:
            found += [Holding(self.rank, n, self.live, Kind.LIVE, b) for n, b in self.needs.items()]
        return found + self._pages()

    def live_at(self, version: int, shards: Set[str]) -> list[Holding]:
        """Those of ``shards`` that the rank's tensors hold at ``version``."""
        if self.live != version or shards.isdisjoint(self.needs):
            return []
        return [Holding(self.rank, n, version, Kind.LIVE, self.needs[n]) for n in shards & self.needs.keys()]

    def copies_at(self, version: int, shards: Set[str]) -> Iterator[Holding]:
        """Those of ``shards`` that the rank keeps at ``version`` besides its tensors. In a large job most ranks have
        none or one."""
        for held in self._said:
            if held.version == version and not shards.isdisjoint(self._names(held)):
                yield from (h for h in self._expand(held) if h.shard in shards)
        if self.local_states:
            yield from (h for h in self._pages() if h.version == version and h.shard in shards)

    def copies(self) -> dict[str, int]:
        """Shards that it keeps for another rank, and their sizes, of any version."""
        copies = [held for held in self._said if held.kind == Kind.COPY]
        return {holding.shard: holding.nbytes for held in copies for holding in self._expand(held)}

    def _pages(self) -> list[Holding]:
        if not self.local_states:
            return []
        local_state = local_state_name(self.rank)
        return [
            Holding(self.rank, local_state, v, Kind.PAGE, self.needs.get(local_state, 0)) for v in self.local_states
        ]

    def kept_at(self, version: int) -> Iterator[str]:
        """The shards that it holds at this version besides its live state; some perhaps twice."""
        for held in self._said:
            if held.version == version:
                yield from self._names(held)
        if version in self.local_states:
            yield local_state_name(self.rank)

    def has_local_state(self, version: int) -> bool:
        """Whether its process has its own rank-local state of this version, in its final form."""
        if version < 0 or self.live == version:
            return version >= 0
        name = local_state_name(self.rank)
        kept = (h for h in self._said if h.version == version and h.kind == Kind.UNDO and not h.early)
        return any(name in self._names(h) for h in kept)

    def need_list(self) -> list[Need]:
        return [Need(self.rank, n, b) for n, b in self.needs.items()]
