"""Parity of bytes: encoded by what changes, decoded after losses, against a naive reference; torn at every step."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashrecovery.errors import ProtocolError, RestoreError
from flashrecovery.plan.parity.code import BUCKET, ParityLayout, Route, StripePart, bucket_for, encode_traffic
from flashrecovery.plan.parity.decode import DecodePlan, decode_plan
from flashrecovery.redundancy.parity import member as module
from flashrecovery.redundancy.parity.bucket import decode_bucket, encode_bucket
from flashrecovery.redundancy.parity.frames import NO_BASE, DeltaBase, Frame, FrameKind, deltas
from flashrecovery.redundancy.parity.member import ParityMember
from flashrecovery.redundancy.parity.store import ParityStore
from flashrecovery.redundancy.parity.xor import NativeXor, NumpyXor, xor
from tests.support.parity_group import ParityGroup, naive_parity

ROUTES = list(Route)


@st.composite
def layouts(draw: st.DrawFn) -> ParityLayout:
    parity = draw(st.sampled_from((1, 2)))
    members = draw(st.integers(parity + 1, 12))
    size = st.one_of(st.integers(0, 200), st.integers(0, 3000), st.sampled_from((0, 1, 63, 64, 65, 1024)))
    sizes = draw(st.lists(size, min_size=members, max_size=members))
    return ParityLayout(tuple(sizes), parity, draw(st.sampled_from((64, 128, 256))))


many = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(layouts(), st.sampled_from(ROUTES), st.randoms(use_true_random=False))
def test_updates_and_losses_bit_for_bit(layout: ParityLayout, route: Route, rng: random.Random) -> None:
    group = ParityGroup(layout, route, rng)
    group.encode(1, group.random_contents())
    group.check(1)
    places = group.places()
    for version in range(2, 2 + rng.randrange(4)):
        some = rng.sample(places, rng.randrange(len(places) + 1))
        group.sent.clear(), group.received.clear()
        before = group.contents[version - 1]
        group.encode(version, group.changed(version - 1, some), version - 1)
        group.check(version)
        group.check(version - 1)
        really = {p for p in some if _bytes(layout, p, group.contents[version]) != _bytes(layout, p, before)}
        traffic = encode_traffic(layout, really, route)
        assert [group.sent[m] for m in range(layout.members)] == list(traffic.sent)
        assert [group.received[m] for m in range(layout.members)] == list(traffic.received)
    newest = max(group.contents)
    for count in range(1, layout.parity + 1):
        lost = sorted(rng.sample(range(layout.members), count))
        for version in {newest, max(1, newest - 1)}:
            plan = group.plan(version, lost, chunk=rng.choice((1, 512, 1 << 20)))
            assert group.recover(plan) == {m: group.contents[version][m] for m in lost}


def _bytes(layout: ParityLayout, place: tuple[int, int, int], contents: list[bytes]) -> bytes:
    member, stripe, bucket = place
    offset, length = layout.data_bucket(stripe, bucket, member)
    return contents[member][offset : offset + length]


@pytest.mark.parametrize("members", range(3, 10))
def test_every_pair_of_every_size(members: int) -> None:
    layout = ParityLayout(tuple(700 + 37 * m for m in range(members)), 2, 128)
    group = ParityGroup(layout)
    group.encode(4, group.random_contents())
    for lost in itertools.combinations(range(members), 2):
        assert group.recover(group.plan(4, lost)) == {m: group.contents[4][m] for m in lost}


@pytest.mark.parametrize("lost", [(0,), (3,), (0, 1), (2, 3), (0, 3), (1, 3)])
@pytest.mark.parametrize("avoided", list(StripePart)[:2])
def test_either_parity_stands_in_for_the_other(lost: tuple[int, ...], avoided: StripePart) -> None:
    """One member and one kind of parity are lost: decoded by the other one, or refused where two members are."""
    layout = ParityLayout((900, 500, 600, 700, 901), 2, 128)
    group = ParityGroup(layout)
    group.encode(1, group.random_contents())
    avoid = [(stripe, avoided) for stripe in range(layout.members)]
    plan = decode_plan(layout, group.held([1], lost), 1, avoid)
    if len(lost) == 1:
        assert isinstance(plan, DecodePlan)
        assert all(s.part is not avoided for task in plan.data for s in task.sources)
        assert group.recover(plan) == {lost[0]: group.contents[1][lost[0]]}
    else:
        assert not isinstance(plan, DecodePlan) and "wrong digest" in plan.reason


# -- versions ------------------------------------------------------------------------------------


def _small(parity: int = 1, route: Route = Route.RELAY) -> ParityGroup:
    group = ParityGroup(ParityLayout((500, 300, 420, 64), parity, 64), route)
    group.encode(1, group.random_contents())
    group.encode(2, group.changed(1, group.places()[::2]), 1)
    return group


@pytest.mark.parametrize(("parity", "route"), [(1, Route.RELAY), (2, Route.RELAY), (2, Route.DIRECT)])
def test_at_every_frame_a_clean_version_is_whole_everywhere(parity: int, route: Route) -> None:
    group = _small(parity, route)
    layout = group.layout
    queues = group.begin(3, group.changed(2, group.places()[1::3]), 2)
    frames = [frame for round_ in itertools.zip_longest(*queues) for frame in round_ if frame is not None]
    for frame in frames:
        for lost in range(layout.members):
            held = group.held([2, 3], [lost])
            assert {2} <= set.intersection(*(set(v) for h in held.values() for v in h.parity.values()))
            plan = decode_plan(layout, held, 2)
            assert isinstance(plan, DecodePlan)
            assert group.recover(plan)[lost] == group.contents[2][lost]
        group.deliver(frame)
    group.check(3)
    assert {tuple(v) for m in group.members.values() for v in m.clean().values()} == {(2, 3)}


def test_a_dirty_version_is_no_version() -> None:
    group = _small()
    queues = group.begin(3, group.changed(2, group.places()), 2)
    for frame in queues[0]:
        group.deliver(frame)
    assert all(1 not in v and 3 not in v for m in group.members.values() for v in m.clean().values())
    plan = decode_plan(group.layout, group.held([2, 3], [0]), 3)
    assert not isinstance(plan, DecodePlan) and "clean at 2" in plan.reason
    store = next(iter(group.members[1].stores.values()))
    with pytest.raises(RestoreError, match=r"not held at version 3; held: \[2\]; 3 is being made"):
        store.bucket(3, 0)


def test_a_version_that_lacks_a_delta_does_not_become_clean() -> None:
    for missing in range(4):
        group = _small()
        queues = group.begin(3, group.changed(2, group.places()), 2)
        dropped = next(f for f in queues[missing] if f.kind is FrameKind.DELTA)
        for frame in [f for q in queues for f in q if f is not dropped]:
            if frame.kind is FrameKind.DONE and (frame.member, frame.stripe) == (dropped.member, dropped.stripe):
                with pytest.raises(ProtocolError, match="arrived"):
                    group.deliver(frame)
            else:
                group.deliver(frame)
        store = group.members[dropped.stripe].stores[dropped.stripe, StripePart.P]
        assert store.clean() == [2] and not store.complete
        with pytest.raises(ProtocolError, match="lacks deltas of columns"):
            store.flip()


def test_a_version_encoded_whole_needs_every_bucket() -> None:
    group = ParityGroup(ParityLayout((200, 200), 1, 64))
    queues = group.begin(1, group.random_contents())
    for frame in queues[1]:
        if frame.kind is FrameKind.DELTA and frame.bucket != 1:
            group.deliver(frame)
    done = queues[1][-1]._replace(bucket=3)
    with pytest.raises(ProtocolError, match="did not send bucket 1"):
        group.deliver(done)
    assert group.members[0].stores[0, StripePart.P].clean() == []


@pytest.mark.parametrize("parity", [1, 2])
def test_what_comes_twice_or_from_the_wrong_one_is_refused_and_changes_nothing(parity: int) -> None:
    group = _small(parity)
    queues = group.begin(3, group.changed(2, group.places()), 2)
    frame = queues[1][0]
    holder = group.members[group.layout.holder(frame.stripe, StripePart.P)]
    group.deliver(frame)
    wrong = {
        "again": frame,
        "another base": frame._replace(base=1, bucket=1),
        "another version": frame._replace(version=4),
        "not a column": frame._replace(member=group.layout.holder(frame.stripe, StripePart.P)),
        "no such member": frame._replace(member=9),
        "too long": frame._replace(bucket=1, payload=bytes(65)),
        "too short": frame._replace(bucket=1, payload=bytes(63)),
        "no such bucket": frame._replace(bucket=99, payload=b""),
        "a sum": frame._replace(kind=FrameKind.SUM, bucket=1),
        "not here": frame._replace(stripe=(frame.stripe + 1) % 4),
    }
    for what, bad in wrong.items():
        with pytest.raises(ProtocolError):
            holder.receive(bad)
            pytest.fail(what)
    for other in [f for q in queues for f in q if f is not frame]:
        group.deliver(other)
    group.check(3)


def test_begin_only_goes_on_from_the_newest_clean_version() -> None:
    store = _small().members[0].stores[0, StripePart.P]
    for version, base in ((3, 1), (2, 2), (1, NO_BASE), (3, 7), (2, NO_BASE)):
        with pytest.raises(ProtocolError, match="newest clean version is 2"):
            store.begin(version, base)
    assert store.clean() == [1, 2]
    store.begin(5, 2)
    assert store.clean() == [2], "the older one is overwritten from now on"


def test_after_a_recovery_newer_versions_are_forgotten_and_made_again() -> None:
    group = _small(2)
    group.encode(3, group.changed(2, group.places()), 2)
    for member in group.members.values():
        member.drop_after(2)
    assert {tuple(v) for m in group.members.values() for v in m.clean().values()} == {(2,)}
    group.check(2)
    group.begin(3, group.changed(2, group.places()), 2)
    group.members[1].drop_after(2)  # in the middle of the next one
    assert group.members[1].stores[1, StripePart.P].dirty is None
    for member in group.members.values():
        member.drop_after(2)
    group.encode(3, group.changed(2, group.places()[::3]), 2)
    group.check(3)


def test_a_lost_holder_is_filled_from_the_others() -> None:
    """A new process has no parity: everybody sends it everything of the version at which they are; the rest go on."""
    for route in ROUTES:
        group = _small(2, route)
        for member in group.members.values():
            member.drop_after(2)
        group.members[1] = ParityMember(group.layout, 1, route=route)
        group.encode(3, group.changed(2, group.places()[::2]))  # all again
        group.check(3)
        group.encode(4, group.changed(3, group.places()[::2]), 3)
        group.check(4)


def test_relayed_sums_wait_for_nobody_that_has_passed() -> None:
    layout = ParityLayout((640, 640, 640, 640, 640), 2, 64)
    group = ParityGroup(layout)
    group.encode(1, group.random_contents())
    queues = group.begin(2, group.changed(1, group.places()), 1)
    most = 0
    for frames in zip(*queues, strict=True):
        for frame in frames:
            group.deliver(frame)
            most = max(most, *(m.waiting_bytes for m in group.members.values()))
    assert 0 < most <= 2 * (64 + 2 * 64), "side by side, one bucket waits or two"
    assert all(m.waiting_bytes == 0 for m in group.members.values())
    group.check(2)


# -- wrong bytes ---------------------------------------------------------------------------------


def test_a_changed_frame_is_refused() -> None:
    frame = Frame(FrameKind.DELTA, StripePart.Q, 7, 6, 1, 2, 3, bytes(range(16)), b"payload")
    assert Frame.parse(frame.header(), frame.payload) == frame
    for byte in range(len(frame.header())):
        header = bytearray(frame.header())
        header[byte] ^= 1
        if byte not in (6, 7):  # padding, which struct ignores, is under the digest, too
            with pytest.raises(ProtocolError):
                Frame.parse(header, frame.payload)
    with pytest.raises(ProtocolError):
        Frame.parse(frame.header(), b"Payload")


def test_each_flipped_byte_of_a_store_is_noticed() -> None:
    """Whatever is flipped: what is read afterwards is right, or it is refused."""
    layout = ParityLayout((200, 190, 130), 1, 64)
    group = ParityGroup(layout)
    memory = bytearray(ParityStore.nbytes(layout, 0, StripePart.P))
    group.members[0] = ParityMember(layout, 0, {(0, StripePart.P): memory})
    group.encode(1, group.random_contents())
    group.encode(2, group.changed(1, group.places()[::2]), 1)
    right = {v: naive_parity(layout, 0, StripePart.P, group.contents[v]) for v in (1, 2)}
    noticed = 0
    for byte in range(len(memory)):
        copy = bytearray(memory)
        copy[byte] ^= 0x10
        try:
            store = ParityStore(layout, 0, StripePart.P, copy)
            for version in store.clean():
                for bucket in range(layout.buckets(0)):
                    content = store.bucket(version, bucket)
                    assert content == right[version][bucket * 64 : bucket * 64 + len(content)]
            noticed += len(store.clean()) < 2
        except RestoreError:
            noticed += 1
    assert noticed > 0.6 * len(memory), "nearly all bytes matter; the rest is padding and what no version uses"


@pytest.mark.parametrize("lost", [(1,), (1, 2)])
def test_a_wrong_source_does_not_come_out_as_data(lost: tuple[int, ...]) -> None:
    """Parity of one version with another one's data, or one flipped bit: refused by the digest, for each source."""
    layout = ParityLayout((640, 600, 610, 640, 640), 2, 128)
    group = ParityGroup(layout)
    group.encode(1, group.random_contents())
    group.encode(2, group.changed(1, group.places()), 1)
    stripe, bucket = 3, 0
    now, before = ({c: _column(group, v, stripe, bucket, c) for c in range(3)} for v in (2, 1))
    store = group.members[stripe].stores[stripe, StripePart.P]
    known = {c: store.data_digest(2, bucket, c) for c in range(3)}
    missing = [layout.column(stripe, m) for m in lost]
    given = {c: now[c] for c in range(3) if c not in missing}
    parity = {p: bytes(encode_bucket(layout, stripe, p, bucket, now)) for p in layout.parts()}
    found = decode_bucket(layout, stripe, bucket, given, parity, known)
    assert found == {c: now[c] for c in missing}
    for column in given:
        with pytest.raises(RestoreError):
            decode_bucket(layout, stripe, bucket, {**given, column: before[column]}, parity, known)
    for part in list(parity)[: len(missing)]:
        flipped = bytearray(parity[part])
        flipped[70] ^= 4
        with pytest.raises(RestoreError):
            decode_bucket(layout, stripe, bucket, given, {**parity, part: flipped}, known)
    with pytest.raises(RestoreError, match="missing, and there are"):
        decode_bucket(layout, stripe, bucket, given, dict(list(parity.items())[: len(missing) - 1]), known)
    with pytest.raises(RestoreError, match="lengths"):
        decode_bucket(layout, stripe, bucket, {c: d[:-1] for c, d in given.items()}, parity, known)


def _column(group: ParityGroup, version: int, stripe: int, bucket: int, column: int) -> bytes:
    member = group.layout.member(stripe, column)
    offset, length = group.layout.data_bucket(stripe, bucket, member)
    return group.contents[version][member][offset : offset + length]


def test_without_digests_what_is_too_long_is_still_noticed() -> None:
    """Past the end of a short column must be zeros: with Q moved by a row too few there are others."""
    layout = ParityLayout((128, 30, 128, 128), 2, 128)
    group = ParityGroup(layout)
    group.encode(1, group.random_contents())
    stripe = next(s for s in layout.data_stripes(1) if layout.unit(s, 1)[1])
    column = layout.column(stripe, 1)
    other = 1 - column
    data = {other: _column(group, 1, stripe, 0, other)}
    right = group.parity(stripe, StripePart.Q, 1)
    assert decode_bucket(layout, stripe, 0, data, {StripePart.Q: right})[column] == group.contents[1][1]
    with pytest.raises(RestoreError, match=r"longer than it was|begins too early"):
        decode_bucket(layout, stripe, 0, data, {StripePart.Q: right[-1:] + right[:-1]})


def test_memory_of_something_else_is_not_taken() -> None:
    layout = ParityLayout((200, 190, 130), 1, 64)
    memory = bytearray(ParityStore.nbytes(layout, 0, StripePart.P) + 100)
    ParityStore(layout, 0, StripePart.P, memory)
    ParityStore(layout, 0, StripePart.P, memory)
    for other in (ParityLayout((200, 190, 129), 1, 64), ParityLayout((201, 190, 130), 1, 64)):
        with pytest.raises(RestoreError, match="does not hold"):
            ParityStore(other, 0, StripePart.P, memory)
    with pytest.raises(RestoreError, match="does not hold"):
        ParityStore(layout, 1, StripePart.P, memory)
    with pytest.raises(ValueError, match="at least"):
        ParityStore(layout, 0, StripePart.P, bytearray(10))


# -- torn ----------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone."""


class Torn:
    """Arithmetic that is cut off in its ``at``-th call: half of the bytes are written, and then nothing more."""

    name = "torn"

    def __init__(self, at: int) -> None:
        self._left, self._real = at, xor()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)

        def call(to: Any, *rest: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                half = len(to) // 2
                real(memoryview(to)[:half], *(memoryview(r)[:half] for r in rest))
                raise Killed
            return real(to, *rest)

        return call


@pytest.mark.parametrize("base", [2, NO_BASE])
@pytest.mark.parametrize("torn", ["arithmetic", "record"])
def test_torn_at_every_step(base: int, torn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies in each call of the arithmetic, in each write of a record, and within that."""
    layout = ParityLayout((700, 660, 800, 400), 1, 64)
    finished = 0
    for at in range(100):
        group = ParityGroup(layout)
        group.encode(1, group.random_contents())
        group.encode(2, group.changed(1, group.places()[::2]), 1)
        memory = bytearray(ParityStore.nbytes(layout, 0, StripePart.P))
        memory[:] = group.members[0].stores[0, StripePart.P]._memory

        class Store(ParityStore):
            """Dies after ``at`` parts of a record."""

            def _write(self, index: int, record: Any, steps: Any = iter(range(at))) -> None:  # noqa: B008
                where = self._record_at[index]
                body = struct.pack("<q", record.version) + record.slots + record.parity + record.data
                for cut in (0, 4, 9, len(body) // 2, len(body)):
                    self._memory[where + 8 : where + 8 + cut] = body[:cut]
                    if next(steps, None) is None:
                        raise Killed
                super()._write(index, record)

        arithmetic = Torn(at) if torn == "arithmetic" else xor()
        monkeypatch.setattr(module, "ParityStore", Store if torn == "record" else ParityStore)
        group.members[0] = ParityMember(layout, 0, {(0, StripePart.P): memory}, arithmetic=arithmetic)
        monkeypatch.undo()
        contents = group.changed(2, group.places()[1::2])
        try:
            group.encode(3, contents, base)
            finished += 1
        except Killed:
            pass
        found = ParityStore(layout, 0, StripePart.P, memory)
        assert found.clean() == ([2, 3] if finished else [2])
        for version in found.clean():
            content = b"".join(found.bucket(version, b) for b in range(layout.buckets(0)))
            assert content == naive_parity(layout, 0, StripePart.P, group.contents[version])
        if finished > 3:
            assert at >= 5, "the number of places at which it has been torn"
            return
    pytest.fail("it never came to an end")


CHILD = """
import mmap, random, sys
from flashrecovery.plan.parity.code import ParityLayout, StripePart
from flashrecovery.redundancy.parity.frames import NO_BASE, DeltaBase, deltas
from flashrecovery.redundancy.parity.member import ParityMember
fd, start, seed = map(int, sys.argv[1:])
layout = ParityLayout((300_000, 290_001, 250_000), 1, 4096)
place = 0, StripePart.P
memory = mmap.mmap(fd, ParityMember.places(layout, 0)[place])
member = ParityMember(layout, 0, {place: memory})
rng = random.Random(seed)
def contents(version):
    return {m: random.Random(f"{m} {version // 2}").randbytes(layout.sizes[m]) for m in (1, 2)}
clean = member.stores[place].clean()
base = clean[-1] if clean else NO_BASE
print("ready", flush=True)
version = max(base, start) + 1
while True:
    now, before = contents(version), contents(base) if base != NO_BASE else None
    member.begin(version, base)
    for m in (1, 2):
        for frame in deltas(layout, m, version, now[m], before and DeltaBase(base, before[m])):
            if frame.stripe == 0:
                member.receive(frame)
    base, version = version, version + 1
"""


def _expected(layout: ParityLayout, version: int) -> bytes:
    contents = [b""] + [random.Random(f"{m} {version // 2}").randbytes(layout.sizes[m]) for m in (1, 2)]
    contents[0] = bytes(layout.sizes[0])
    return naive_parity(layout, 0, StripePart.P, contents)


def test_sigkill_leaves_the_last_clean_version() -> None:
    """A real process that updates parity in a memfd as fast as it can is killed at any moment, again and again; the
    next one goes on from what it left."""
    layout = ParityLayout((300_000, 290_001, 250_000), 1, 4096)
    nbytes = ParityMember.places(layout, 0)[0, StripePart.P]
    fd = os.memfd_create("flashrecovery-parity-test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        rng, newest, seen = random.Random(5), 0, set()
        for kill in range(8):
            command = [sys.executable, "-c", CHILD, str(fd), str(newest), str(kill)]
            child = subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE)
            assert child.stdout is not None
            with child.stdout:
                assert child.stdout.readline() == b"ready\n"
                while max(_clean(layout, fd, nbytes), default=0) <= newest:  # one version each time, at least
                    time.sleep(0.001)
                time.sleep(rng.uniform(0.0, 0.02))
                child.send_signal(signal.SIGKILL)
                assert child.wait() == -signal.SIGKILL
            versions = _clean(layout, fd, nbytes)
            assert versions and versions[-1] >= newest, "nothing that was clean is lost"
            with mmap.mmap(fd, nbytes) as memory:
                store = ParityStore(layout, 0, StripePart.P, memory)
                for version in store.clean():
                    content = b"".join(bytes(store.bucket(version, b)) for b in range(layout.buckets(0)))
                    assert content == _expected(layout, version)
                seen.add(len(store.clean()))
                del store, content
                newest = versions[-1]
        assert newest >= 8 and seen <= {1, 2}
    finally:
        os.close(fd)


def _clean(layout: ParityLayout, fd: int, nbytes: int) -> list[int]:
    with mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ) as memory:
        return ParityStore(layout, 0, StripePart.P, bytearray(memory)).clean()


def test_it_imports_no_torch() -> None:
    modules = "flashrecovery.redundancy.parity.member, flashrecovery.redundancy.parity.bucket"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_both_arithmetics_send_the_same_frames() -> None:
    layout = ParityLayout((1000, 900, 1100, 70), 2, 128)
    rng = random.Random(3)
    old, new = rng.randbytes(1000), rng.randbytes(1000)
    native, plain = (
        [(f.header(), bytes(f.payload)) for f in deltas(layout, 0, 2, new, DeltaBase(1, old), arithmetic=compute)]
        for compute in (xor(), NumpyXor())
    )
    assert isinstance(xor(), NativeXor) and native == plain and len(native) > 8


@pytest.mark.parametrize("route", ROUTES)
def test_memory_for_a_payload_may_be_written_to_once_the_next_one_is_asked_for(route: Route) -> None:
    """A batch is sent before the next frame is asked for, and what arrives then takes its memory."""
    layout = ParityLayout((1000, 900, 1100, 70), 2, 128)
    rng = random.Random(3)
    old, new = rng.randbytes(1000), rng.randbytes(1000)
    memory = memoryview(bytearray(128))
    used = 0

    def room(place: tuple[int, StripePart], nbytes: int) -> memoryview:
        nonlocal used
        used += 1
        return memory[:nbytes]

    expected = [(f.header(), bytes(f.payload)) for f in deltas(layout, 0, 2, new, DeltaBase(1, old), route)]
    found = []
    for frame in deltas(layout, 0, 2, new, DeltaBase(1, old), route, room=room):
        found.append((frame.header(), bytes(frame.payload)))
        memory[:] = bytes(128)
    assert found == expected
    assert used == (0 if route is Route.DIRECT else 8)


def test_longer_buckets_where_there_are_many() -> None:
    assert bucket_for((1000, 70), 1) == bucket_for((32 << 20, 1 << 10), 1) == BUCKET
    assert bucket_for((33 << 20, 0), 1) == 2 * BUCKET
    assert bucket_for([1 << 40] * 8, 2) == 4 << 20
    for size in (1 << 28, 1 << 30):
        layout = ParityLayout((size,) * 4, 1, bucket_for((size,) * 4, 1))
        assert layout.buckets(0) <= 128
