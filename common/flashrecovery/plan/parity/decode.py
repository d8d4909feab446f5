"""How what a parity group has lost is decoded: which member gathers what, adds it up, and sends what comes out. Pure.

Every member draws the same plan from the same facts. Of each stripe the chunks go to those members that are least busy
with the ones before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashrecovery.plan.parity.code import ParityLayout, StripePart, Traffic

CHUNK = 8 << 20
"""The most bytes of a decode that a member gathers at a time."""
_CHUNKS = 16
"""Least number of chunks of a unit with enough buckets: while one chunk is gathered, the previous one is sent to the
lost member."""


@dataclass(frozen=True)
class Held:
    """What a living member has whole. A version whose parity is still dirty is in none of these.

    Attributes:
        data: versions of its own shards.
        parity: versions of each (stripe, part) that it holds.
    """

    data: frozenset[int]
    parity: Mapping[tuple[int, StripePart], frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StripeSource:
    """One column or parity of a stripe, and the member that has it."""

    member: int
    part: StripePart
    column: int = -1


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """``at`` gathers the sources of some buckets of a stripe, adds them up, and hands over what comes out.

    Attributes:
        buckets: from the first one up to, not including, the last one.
        sources: what is added; those of ``at`` itself do not travel.
        results: what comes out, and the member that gets it.
        gathered, delivered: bytes that travel to ``at`` and from it.
    """

    stripe: int
    buckets: tuple[int, int]
    at: int
    sources: tuple[StripeSource, ...]
    results: tuple[StripeSource, ...]
    gathered: int
    delivered: int


@dataclass(frozen=True)
class DecodePlan:
    """How the members in ``lost`` get their shards of ``version`` back (``data``), and then their parity (``parity``),
    which the group can make again while training goes on.

    Attributes:
        traffic: of both, payload alone.
        chunk_bytes: of a task's sums, the most that a member needs at a time for each of two of them.
    """

    version: int
    lost: tuple[int, ...]
    data: tuple[DecodeTask, ...]
    parity: tuple[DecodeTask, ...]
    traffic: Traffic
    chunk_bytes: int


@dataclass(frozen=True)
class Undecodable:
    """There is no plan; ``reason``: as text."""

    reason: str


def decode_plan(
    layout: ParityLayout,
    held: Mapping[int, Held],
    version: int,
    avoid: Collection[tuple[int, StripePart]] = (),
    chunk: int | None = None,
) -> DecodePlan | Undecodable:
    """Bring all members to ``version``. Members missing from ``held`` are lost, and so are the shards of members that
    do not have that version of their own data; their new owner has the same number.

    Only clean versions are used: P of one version and data of another would give meaningless bytes. ``avoid``:
    (stripe, part) whose digest was wrong. ``chunk``: bytes of a task; by default, chosen by the sizes.

    Any survivor of a stripe may gather: it need not send its own bytes, and the bytes of the result must go to the lost
    member anyway. So each chunk goes to the least busy survivor, and the lost member receives its own bytes and nothing
    else.
    """
    lost = lost_members(layout, held, version)
    if chunk is None:
        chunk = min(CHUNK, max(layout.sizes) // layout.columns // _CHUNKS)
    planner = _Planner(layout, held, version, frozenset(avoid), chunk, lost)
    problems = planner.problems()
    if problems:
        return Undecodable(f"version {version} cannot be decoded: " + "; ".join(problems[:3]))
    data: list[DecodeTask] = []
    parity: list[DecodeTask] = []
    for stripe in range(layout.members):
        missing, usable = planner.missing(stripe), planner.usable_parts(stripe)
        unmade = [part for part in layout.parts() if part not in usable]
        # What has to be gathered for the data gives the lost parity as well, if all columns come out of it.
        data += planner.tasks(stripe, missing, usable[: len(missing)], unmade if missing else []) if missing else []
        parity += planner.tasks(stripe, [], [], unmade) if unmade and not missing else []
    traffic = Traffic(tuple(planner.sent), tuple(planner.received))
    return DecodePlan(version, lost, tuple(data), tuple(parity), traffic, planner.largest)


def lost_members(layout: ParityLayout, held: Mapping[int, Held], version: int) -> tuple[int, ...]:
    """The members that do not have that version of their own shards."""
    return tuple(m for m in range(layout.members) if m not in held or version not in held[m].data)


def undecodable(layout: ParityLayout, held: Mapping[int, Held], version: int) -> Undecodable | None:
    """Why the group cannot come to ``version``; None if it can. Quick, however much has to be decoded."""
    planner = _Planner(layout, held, version, frozenset(), CHUNK, lost_members(layout, held, version))
    problems = planner.problems()
    return Undecodable(f"version {version} cannot be decoded: " + "; ".join(problems[:3])) if problems else None


def newest_decodable(layout: ParityLayout, held: Mapping[int, Held]) -> int | None:
    """The newest version that every member can have."""
    versions: set[int] = set()
    for one in held.values():
        versions |= one.data
        versions |= {version for known in one.parity.values() for version in known}
    found = (v for v in sorted(versions, reverse=True) if undecodable(layout, held, v) is None)
    return next(found, None)


class _Planner:
    """Which member gathers what; counts what each member sends and receives."""

    def __init__(
        self,
        layout: ParityLayout,
        held: Mapping[int, Held],
        version: int,
        avoid: frozenset[tuple[int, StripePart]],
        chunk: int,
        lost: Sequence[int],
    ) -> None:
        self._layout, self._held, self._version, self._avoid = layout, held, version, avoid
        self._lost = frozenset(lost)
        self._step = max(1, chunk // layout.bucket)
        self.sent, self.received = [0] * layout.members, [0] * layout.members
        self.largest = 0

    def missing(self, stripe: int) -> list[int]:
        """The lost members that have something in this stripe."""
        layout = self._layout
        lost = sorted(self._lost)
        return [m for m in lost if layout.part(stripe, m) is StripePart.DATA and layout.unit(stripe, m)[1]]

    def usable_parts(self, stripe: int) -> list[StripePart]:
        return [part for part in self._layout.parts() if self.usable(stripe, part)]

    def problems(self) -> list[str]:
        """The stripes that cannot be decoded."""
        found = []
        for stripe in range(self._layout.members):
            missing, usable = self.missing(stripe), self.usable_parts(stripe)
            if len(missing) > len(usable):
                found.append(self.problem(stripe, missing, usable))
        return found

    def usable(self, stripe: int, part: StripePart) -> bool:
        """Whether this parity is clean at the version."""
        known = self._held.get(self._layout.holder(stripe, part))
        return (
            known is not None
            and self._version in known.parity.get((stripe, part), ())
            and (stripe, part) not in self._avoid
        )

    def problem(self, stripe: int, missing: Sequence[int], usable: Sequence[StripePart]) -> str:
        have = ", ".join(f"{part.value} of member {self._layout.holder(stripe, part)}" for part in usable) or "none"
        lacking = [
            f"{part.value} of member {self._layout.holder(stripe, part)} ({self._state(stripe, part)})"
            for part in self._layout.parts()
            if part not in usable
        ]
        return (
            f"stripe {stripe} lacks the shards of members {', '.join(map(str, missing))}, and of its parity "
            f"{have} is clean" + (f", not {', '.join(lacking)}" if lacking else "")
        )

    def _state(self, stripe: int, part: StripePart) -> str:
        known = self._held.get(self._layout.holder(stripe, part))
        if known is None:
            return "lost"
        if (stripe, part) in self._avoid:
            return "wrong digest"
        clean = sorted(known.parity.get((stripe, part), ()))
        return f"clean at {', '.join(map(str, clean))}" if clean else "clean at no version"

    def tasks(
        self, stripe: int, missing: Sequence[int], parities: Sequence[StripePart], unmade: Sequence[StripePart]
    ) -> list[DecodeTask]:
        """The tasks of one stripe: the missing data by these parities, and the parities that are to be made again."""
        layout = self._layout
        columns = [StripeSource(layout.member(stripe, c), StripePart.DATA, c) for c in range(layout.columns)]
        sources = [s for s in columns if s.member not in self._lost]
        sources += [StripeSource(layout.holder(stripe, part), part) for part in parities]
        results = [s for s in columns if s.member in missing]
        results += [StripeSource(layout.holder(stripe, part), part) for part in unmade]
        count = layout.buckets(stripe)
        found = []
        for first in range(0, count, self._step):
            buckets = (first, min(first + self._step, count))
            task = self._task(stripe, buckets, sources, results)
            if task is not None:
                found.append(task)
        return found

    def _task(
        self, stripe: int, buckets: tuple[int, int], sources: Iterable[StripeSource], results: Iterable[StripeSource]
    ) -> DecodeTask | None:
        """None if nothing comes out of these buckets: a short member's are empty at its end."""
        size = {s: self._bytes(stripe, buckets, s) for s in (*sources, *results)}
        results = tuple(s for s in results if size[s])
        if not results:
            return None
        sources = tuple(s for s in sources if size[s])
        at = min((s.member for s in sources), key=lambda m: (self._busy_with(m, sources, results, size), m))
        gathered = sum(size[s] for s in sources if s.member != at)
        delivered = sum(size[s] for s in results if s.member != at)
        for source in sources:
            self.sent[source.member] += size[source] if source.member != at else 0
        for result in results:
            self.received[result.member] += size[result] if result.member != at else 0
        self.sent[at] += delivered
        self.received[at] += gathered
        self.largest = max(self.largest, *size.values())
        return DecodeTask(stripe, buckets, at, sources, results, gathered, delivered)

    def _busy_with(
        self,
        at: int,
        sources: Iterable[StripeSource],
        results: Iterable[StripeSource],
        size: Mapping[StripeSource, int],
    ) -> tuple[int, int]:
        """The busier direction of ``at`` if it gathers, and both together."""
        received = self.received[at] + sum(size[s] for s in sources if s.member != at)
        sent = self.sent[at] + sum(size[s] for s in results if s.member != at)
        return max(received, sent), received + sent

    def _bytes(self, stripe: int, buckets: tuple[int, int], source: StripeSource) -> int:
        if source.part is StripePart.DATA:
            return sum(self._layout.data_length(stripe, b, source.column) for b in range(*buckets))
        return sum(self._layout.parity_length(stripe, source.part, b) for b in range(*buckets))
