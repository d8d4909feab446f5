"""A sharding group in one process: members' bytes, their parity, frames brought from one to the other, decode plans."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from flashrecovery.plan.parity.code import ParityLayout, Route, StripePart
from flashrecovery.plan.parity.decode import DecodePlan, DecodeTask, Held, StripeSource, decode_plan
from flashrecovery.redundancy.parity.bucket import decode_bucket, encode_bucket
from flashrecovery.redundancy.parity.frames import NO_BASE, DeltaBase, Frame, FrameKind, deltas, digest
from flashrecovery.redundancy.parity.member import ParityMember


def naive_parity(layout: ParityLayout, stripe: int, part: StripePart, contents: Sequence[bytes]) -> bytes:
    """All buckets of a stripe's parity, one after another without gaps, by big integers and the definition alone."""
    n, m, size = len(contents), layout.parity, layout.bucket
    members = [(stripe + m + c) % n for c in range(n - m)]
    units = []
    for member in members:
        # Unit u of a member belongs to the stripe u + 1 places further on.
        rows, wanted = -(-layout.sizes[member] // 64), (stripe - member - 1) % n
        lengths = [(rows // (n - m) + (u < rows % (n - m))) * 64 for u in range(n - m)]
        start = sum(lengths[:wanted])
        units.append(contents[member][start : start + lengths[wanted]])
    found = b""
    for start in range(0, max(map(len, units)), size):
        total = length = 0
        for column, unit in enumerate(units):
            piece = unit[start : start + size]
            shift = 64 * column if part is StripePart.Q and piece else 0
            total ^= int.from_bytes(piece, "little") << (8 * shift)
            length = max(length, shift + len(piece))
        found += total.to_bytes(length, "little")
    return found


class ParityGroup:
    """All members of a group; ``contents[version][member]`` is what each has."""

    def __init__(self, layout: ParityLayout, route: Route = Route.RELAY, rng: random.Random | None = None) -> None:
        self.layout, self.route, self.rng = layout, route, rng or random.Random(0)
        self.members = {m: ParityMember(layout, m, route=route) for m in range(layout.members)}
        self.contents: dict[int, list[bytes]] = {}
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()

    def random_contents(self) -> list[bytes]:
        return [self.rng.randbytes(size) for size in self.layout.sizes]

    def changed(self, version: int, places: Collection[tuple[int, int, int]]) -> list[bytes]:
        """The contents of ``version`` with some bytes of these (member, stripe, bucket) changed."""
        contents = [bytearray(c) for c in self.contents[version]]
        for member, stripe, bucket in places:
            offset, length = self.layout.data_bucket(stripe, bucket, member)
            for _ in range(self.rng.randrange(1, 4) if length else 0):
                contents[member][offset + self.rng.randrange(length)] ^= self.rng.randrange(1, 256)
        return [bytes(c) for c in contents]

    def places(self) -> list[tuple[int, int, int]]:
        """Every (member, stripe, bucket) that has bytes."""
        layout = self.layout
        return [
            (member, stripe, bucket)
            for member in range(layout.members)
            for stripe in layout.data_stripes(member)
            for bucket in range(layout.buckets(stripe))
            if layout.data_bucket(stripe, bucket, member)[1]
        ]

    def begin(self, version: int, contents: Sequence[bytes], base: int = NO_BASE) -> list[list[Frame]]:
        """Each member's frames, still to be delivered."""
        self.contents[version] = list(contents)
        for member in self.members.values():
            member.begin(version, base)
        queues = []
        for m in range(self.layout.members):
            old = None if base == NO_BASE else DeltaBase(base, self.contents[base][m])
            frames = deltas(self.layout, m, version, contents[m], old, self.route)
            queues.append([frame._replace(payload=bytes(frame.payload)) for frame in frames])
        return queues

    def encode(self, version: int, contents: Sequence[bytes], base: int = NO_BASE) -> None:
        """Everything delivered, in a random order (of each sender in its own)."""
        queues = [queue for queue in self.begin(version, contents, base) if queue]
        while queues:
            queue = self.rng.choice(queues)
            self.deliver(queue.pop(0))
            queues = [queue for queue in queues if queue]

    def deliver(self, frame: Frame) -> None:
        """By way of its bytes; and what it leads to."""
        target = self.layout.holder(frame.stripe, frame.part)
        header = frame.header()
        assert len(header) + len(frame.payload) == frame.nbytes and Frame.payload_bytes(header) == len(frame.payload)
        self.sent[frame.member] += frame.nbytes
        self.received[target] += frame.nbytes
        for onward in self.members[target].receive(Frame.parse(header, frame.payload)):
            assert onward.member == target and onward.kind in (FrameKind.SUM, FrameKind.DONE)
            self.deliver(onward)

    def parity(self, stripe: int, part: StripePart, version: int) -> bytes:
        store = self.members[self.layout.holder(stripe, part)].stores[stripe, part]
        return b"".join(store.bucket(version, b) for b in range(self.layout.buckets(stripe)))

    def held(self, version_of_data: Collection[int], lost: Collection[int] = ()) -> dict[int, Held]:
        """What those that are not lost have whole."""
        return {
            m: Held(
                frozenset(version_of_data),
                {place: frozenset(versions) for place, versions in member.clean().items()},
            )
            for m, member in self.members.items()
            if m not in lost
        }

    def check(self, version: int) -> None:
        """All parity is what the definition says."""
        for stripe in range(self.layout.members):
            for part in self.layout.parts():
                naive = naive_parity(self.layout, stripe, part, self.contents[version])
                assert self.parity(stripe, part, version) == naive, (stripe, part)

    # -- carrying out a plan ----------------------------------------------------------------------

    def recover(self, plan: DecodePlan) -> dict[int, bytes]:
        """The lost members' bytes, by the plan and from what the others have; counts what travels, and compares."""
        contents = {m: bytearray(self.layout.sizes[m]) for m in plan.lost}
        parities: dict[tuple[int, StripePart, int], bytes] = {}
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        done: set[tuple[StripeSource, int, int]] = set()
        for task in (*plan.data, *plan.parity):
            assert task.at not in plan.lost or not any(s.member not in plan.lost for s in task.sources)
            gathered = delivered = 0
            for bucket in range(*task.buckets):
                g, d = self._recover_bucket(plan, task, bucket, contents, parities, sent, received, done)
                gathered, delivered = gathered + g, delivered + d
            assert (gathered, delivered) == (task.gathered, task.delivered)
        assert [sent[m] for m in range(self.layout.members)] == list(plan.traffic.sent)
        assert [received[m] for m in range(self.layout.members)] == list(plan.traffic.received)
        for (stripe, part, bucket), content in parities.items():
            start = sum(self.layout.parity_length(stripe, part, b) for b in range(bucket))
            naive = naive_parity(self.layout, stripe, part, self.contents[plan.version])
            assert content == naive[start : start + len(content)]
        return {m: bytes(c) for m, c in contents.items()}

    def _recover_bucket(
        self,
        plan: DecodePlan,
        task: DecodeTask,
        bucket: int,
        contents: Mapping[int, bytearray],
        parities: dict[tuple[int, StripePart, int], bytes],
        sent: Counter[int],
        received: Counter[int],
        done: set[tuple[StripeSource, int, int]],
    ) -> tuple[int, int]:
        layout, stripe = self.layout, task.stripe
        columns: dict[int, bytes] = {}
        parity: dict[StripePart, memoryview] = {}
        known: dict[int, bytes] = {}
        gathered = delivered = 0
        for source in task.sources:
            assert source.member not in plan.lost or source.part is not StripePart.DATA
            if source.part is StripePart.DATA:
                assert layout.column(stripe, source.member) == source.column
                offset, length = layout.data_bucket(stripe, bucket, source.member)
                columns[source.column] = self.contents[plan.version][source.member][offset : offset + length]
                nbytes = length
            else:
                store = self.members[source.member].stores[stripe, source.part]
                parity[source.part] = store.bucket(plan.version, bucket)
                known = {c: store.data_digest(plan.version, bucket, c) for c in range(layout.columns)}
                nbytes = len(parity[source.part])
            if source.member != task.at:
                sent[source.member] += nbytes
                received[task.at] += nbytes
                gathered += nbytes
        columns = {c: data for c, data in columns.items() if data}
        found = decode_bucket(layout, stripe, bucket, columns, parity, known or None)
        everything = {**columns, **found}
        for result in task.results:
            assert (result, stripe, bucket) not in done, "twice"
            done.add((result, stripe, bucket))
            if result.part is StripePart.DATA:
                offset, length = layout.data_bucket(stripe, bucket, result.member)
                data: bytes = bytes(found[result.column]) if length else b""
                assert len(data) == length
                contents[result.member][offset : offset + length] = data
            else:
                data = bytes(encode_bucket(layout, stripe, result.part, bucket, everything))
                parities[stripe, result.part, bucket] = data
            if result.member != task.at:
                sent[task.at] += len(data)
                received[result.member] += len(data)
                delivered += len(data)
        return gathered, delivered

    def plan(self, version: int, lost: Collection[int], chunk: int = 1 << 20) -> DecodePlan:
        found = decode_plan(self.layout, self.held([version], lost), version, chunk=chunk)
        assert isinstance(found, DecodePlan), found
        return found


def digests_of(layout: ParityLayout, stripe: int, bucket: int, contents: Sequence[bytes]) -> dict[int, bytes]:
    """Of every column that has bytes there."""
    found = {}
    for column in range(layout.columns):
        member = layout.member(stripe, column)
        offset, length = layout.data_bucket(stripe, bucket, member)
        if length:
            found[column] = digest(contents[member][offset : offset + length])
    return found
