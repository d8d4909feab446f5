"""One member of a parity group: it takes frames in, makes its parities of them, and relays what others are to get.

Nothing here is safe for several threads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flashrecovery.errors import ProtocolError
from flashrecovery.plan.parity.code import DIGEST_BYTES, ParityLayout, Route, StripePart
from flashrecovery.redundancy.parity.frames import (
    ABSENT,
    NO_BASE,
    Frame,
    FrameKind,
    ParityPlace,
    relayed,
)
from flashrecovery.redundancy.parity.store import ParityStore, nth_digest
from flashrecovery.redundancy.parity.xor import Buffer, Xor, xor


class _Relay:
    """The deltas of one stripe, added up as Q wants them, bucket by bucket."""

    def __init__(self, layout: ParityLayout, stripe: int, compute: Xor) -> None:
        self._layout, self._stripe, self._xor = layout, stripe, compute
        self._sums: dict[int, tuple[bytearray, dict[int, bytes]]] = {}
        self._next = dict.fromkeys(range(layout.columns), 0)
        """The first bucket of which a column may still send something."""
        self._done: set[int] = set()
        self._sent = 0

    def check(self, frame: Frame, column: int) -> None:
        """Raises ProtocolError if it comes too late: the sum has been sent on without it."""
        if frame.kind is FrameKind.DELTA and frame.bucket < self._next[column]:
            raise ProtocolError(f"member {frame.member} sends bucket {frame.bucket} of stripe {frame.stripe} too late")

    def add(self, frame: Frame, column: int) -> list[Frame]:
        """What can be sent on now."""
        if frame.kind is FrameKind.DONE:
            self._next[column] = self._layout.buckets(self._stripe)
            self._done.add(column)
            return self._ready(frame)
        self._next[column] = frame.bucket + 1
        if frame.bucket not in self._sums:
            length = self._layout.parity_length(self._stripe, StripePart.Q, frame.bucket)
            self._sums[frame.bucket] = bytearray(length), {}
        total, digests = self._sums[frame.bucket]
        shift = self._layout.shift(StripePart.Q, column)
        self._xor.into(memoryview(total)[shift : shift + len(frame.payload)], frame.payload)
        digests[column] = frame.digest
        return self._ready(frame)

    @property
    def ended(self) -> bool:
        """Whether all of it has been sent on."""
        return len(self._done) == self._layout.columns

    @property
    def waiting_bytes(self) -> int:
        """The bytes of sums that are not complete yet."""
        return sum(len(total) for total, _ in self._sums.values())

    def _ready(self, frame: Frame) -> list[Frame]:
        layout, first = self._layout, min(self._next.values())
        sender = layout.holder(self._stripe, StripePart.P)
        place = StripePart.Q, frame.version, frame.base, sender, self._stripe
        found = []
        for bucket in sorted(b for b in self._sums if b < first):
            total, digests = self._sums.pop(bucket)
            lengths = [layout.shift(StripePart.Q, c) + layout.data_length(self._stripe, bucket, c) for c in digests]
            head = b"".join(digests.get(column, ABSENT) for column in range(layout.columns))
            found.append(Frame(FrameKind.SUM, *place, bucket, ABSENT, head + memoryview(total)[: max(lengths)]))
            self._sent += 1
        if len(self._done) == layout.columns:
            found.append(Frame(FrameKind.DONE, *place, self._sent))
        return found


class ParityMember:
    """All parity that one member of a group holds."""

    def __init__(
        self,
        layout: ParityLayout,
        member: int,
        memory: Mapping[ParityPlace, Buffer] | None = None,
        route: Route = Route.RELAY,
        arithmetic: Xor | None = None,
    ) -> None:
        """``memory``: for each of :meth:`places`; without it, of this process."""
        self.layout, self.member = layout, member
        self._xor = arithmetic or xor()
        self._route = route
        self._summed: frozenset[int] = frozenset()
        self._relay: dict[int, _Relay] = {}
        self.stores = {
            place: ParityStore(layout, *place, memory[place] if memory else bytearray(nbytes), self._xor)
            for place, nbytes in self.places(layout, member).items()
        }

    @staticmethod
    def places(layout: ParityLayout, member: int) -> dict[ParityPlace, int]:
        """(stripe, part) that this member holds, and the bytes of memory that each takes."""
        return {
            (stripe, part): ParityStore.nbytes(layout, stripe, part)
            for stripe in range(layout.members)
            for part in layout.parts()
            if layout.holder(stripe, part) == member
        }

    def begin(self, version: int, base: int = NO_BASE, places: Collection[ParityPlace] | None = None) -> None:
        """Before the first frame of ``version``. ``places``: as for ``deltas()``; the parities that are
        not made stay as they are."""
        layout = self.layout
        for place, store in self.stores.items():
            if places is None or place in places:
                store.begin(version, base)
        stripes = range(layout.members)
        self._summed = frozenset(stripe for stripe in stripes if relayed(layout, stripe, self._route, places))
        held = {stripe for stripe, part in self.stores if part is StripePart.P}
        self._relay = {stripe: _Relay(layout, stripe, self._xor) for stripe in self._summed & held}

    def owes_sums(self, target: int) -> bool:
        """Whether a sum of others' deltas has still to be sent on to that member."""
        return any(
            not relay.ended and self.layout.holder(stripe, StripePart.Q) == target
            for stripe, relay in self._relay.items()
        )

    def receive(self, frame: Frame) -> list[Frame]:
        """Take a frame in; returns those to be sent on, each to the holder of its part. A parity becomes clean with the
        last frame that it needs. Raises ProtocolError for what does not belong here; nothing has been changed then."""
        store = self.stores.get((frame.stripe, frame.part))
        if store is None or store.dirty != frame.version or store.making_from != frame.base:
            raise ProtocolError(
                f"member {self.member} does not make version {frame.version} from {frame.base} of {frame.part.value} "
                f"of stripe {frame.stripe}"
            )
        layout, summed = self.layout, frame.part is StripePart.Q and frame.stripe in self._summed
        if summed:
            senders, kind = {layout.holder(frame.stripe, StripePart.P)}, FrameKind.SUM
        else:
            senders, kind = {layout.member(frame.stripe, c) for c in range(layout.columns)}, FrameKind.DELTA
        if frame.member not in senders or frame.kind not in (kind, FrameKind.DONE):
            raise ProtocolError(f"member {frame.member} does not send {frame.kind.name} for {frame.part.value}")
        column = 0 if summed else layout.column(frame.stripe, frame.member)
        relay = self._relay.get(frame.stripe) if frame.part is StripePart.P else None
        if relay is not None:
            relay.check(frame, column)
        if frame.kind is FrameKind.DONE:
            store.done(range(layout.columns) if summed else [column], frame.bucket)
        elif summed:
            head, payload = _split(frame.payload, DIGEST_BYTES * layout.columns)
            known = {c: nth_digest(head, c) for c in range(layout.columns) if nth_digest(head, c) != ABSENT}
            store.apply(frame.bucket, payload, known)
        else:
            if len(frame.payload) != layout.data_length(frame.stripe, frame.bucket, column):
                raise ProtocolError(f"{len(frame.payload)} bytes of bucket {frame.bucket} from member {frame.member}")
            store.apply(frame.bucket, frame.payload, {column: frame.digest}, layout.shift(frame.part, column))
        onward = relay.add(frame, column) if relay is not None else []
        if store.complete:
            store.flip()
        return onward

    def clean(self) -> dict[ParityPlace, list[int]]:
        """Versions held whole, of each parity."""
        return {place: store.clean() for place, store in self.stores.items()}

    def drop_after(self, version: int) -> None:
        """Forget newer versions, and what is being made."""
        for store in self.stores.values():
            store.drop_after(version)
        self._relay = {}

    @property
    def waiting_bytes(self) -> int:
        """Memory of sums that wait for another member's delta."""
        return sum(relay.waiting_bytes for relay in self._relay.values())


def _split(payload: Buffer, at: int) -> tuple[memoryview, memoryview]:
    view = memoryview(payload)
    return view[:at], view[at:]
