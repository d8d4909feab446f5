"""Fingerprints see every damage that a transfer can do, and are the same wherever they are computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flashrecovery.state import fingerprint
from flashrecovery.state.digest import shard_digest, shard_digests
from flashrecovery.state.fingerprint import Fingerprints, finalized, key, page_factor
from flashrecovery.state.spec import ShardSpec, TensorSpec

PAGE = 16
MASK = (1 << 64) - 1


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that a few hundred bytes are several pages, and no tensor is too small."""
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "PAGE_WORDS", PAGE)
        patch.setattr(fingerprint, "SMALL_BYTES", 1)
        yield


def of(*tensors: torch.Tensor) -> list[bytes]:
    prints = Fingerprints()
    for tensor in tensors:
        prints.add(tensor)
    return prints.results()


def of_bytes(content: bytes) -> bytes:
    return of(torch.frombuffer(bytearray(content), dtype=torch.uint8))[0]


def definition(content: bytes) -> bytes:
    """Word by word, in Python's integers."""
    values = squares = 0
    for place in range(-(-len(content) // 8)):
        word = int.from_bytes(content[8 * place : 8 * place + 8], "little")
        page, within = divmod(place, PAGE)
        mixed = finalized((word + key(within + 1)) * page_factor(page) & MASK)
        values, squares = (values + mixed) & MASK, (squares + mixed * mixed) & MASK
    return b"words" + b"".join(n.to_bytes(8, "little") for n in (len(content), values, squares))


some_bytes = st.one_of(
    st.binary(min_size=1, max_size=600),
    st.builds(lambda byte, size: bytes([byte]) * size, st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]), st.integers(1, 600)),
)


@given(some_bytes)
def test_they_are_what_they_are_defined_to_be(content: bytes) -> None:
    assert of_bytes(content) == definition(content)


def test_the_finalizer_is_murmurs() -> None:
    assert finalized(1) == 0xB456BCFC34C2CB2C and finalized(MASK) == 0x64B5720B4B825F21
    assert len({key(n) for n in range(100_000)}) == 100_000


def test_no_two_positions_are_alike() -> None:
    """Equal words of two positions never become equal ones, or they could change places."""
    changed = {key(within + 1) * page_factor(page) & MASK for within in range(500) for page in range(500)}
    assert len(changed) == 500 * 500


@given(some_bytes, st.data())
def test_a_flipped_bit_is_seen(content: bytes, data: st.DataObject) -> None:
    damaged = bytearray(content)
    damaged[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert of_bytes(bytes(damaged)) != of_bytes(content)


def test_every_flipped_bit_is_seen() -> None:
    content = bytes(8 * PAGE * 3 + 5)
    seen = {of_bytes(content)}
    for bit in range(8 * len(content)):
        seen.add(of_bytes((1 << bit).to_bytes(len(content), "little")))
    assert len(seen) == 1 + 8 * len(content)


def test_every_two_flipped_signs_are_seen() -> None:
    """The highest bits of words are where sums modulo 2^64 are weakest."""
    words = 3 * PAGE
    seen = set()
    for first in range(words):
        for second in range(first, words):
            changed = torch.zeros(words, dtype=torch.float64)
            changed[first] = -0.0
            changed[second] = -0.0
            seen.add(of(changed)[0])
    assert len(seen) == words * (words + 1) // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@given(data=st.data())
@settings(max_examples=60)
def test_two_swapped_elements_are_seen(dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.tensor(data.draw(st.lists(st.integers(0, 100), min_size=2, max_size=300))).to(dtype)
    i, j = data.draw(st.integers(0, len(tensor) - 1)), data.draw(st.integers(0, len(tensor) - 1))
    assume(tensor[i] != tensor[j])
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j], tensor[i]
    assert of(swapped) != of(tensor)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=80), st.integers(1, 2**64 - 1), st.data())
def test_what_is_added_here_and_taken_away_there_is_seen(words: list[int], x: int, data: st.DataObject) -> None:
    places = st.integers(0, len(words) - 1)
    i, j = data.draw(places), data.draw(places)
    assume(i != j)
    change = fingerprint._signed(x)
    changed = torch.tensor(words)
    changed[i] += change
    changed[j] -= change
    assert of(changed) != of(torch.tensor(words))
    both = torch.tensor(words)
    both[i] ^= change
    both[j] ^= change
    assert of(both) != of(torch.tensor(words))


@given(some_bytes, st.integers(1, 200))
def test_a_shift_is_seen(content: bytes, by: int) -> None:
    moved = content[by % len(content) :] + content[: by % len(content)]
    assume(moved != content)
    assert of_bytes(moved) != of_bytes(content)


@given(some_bytes, st.integers(1, 200))
def test_a_truncated_or_longer_tail_is_seen(content: bytes, by: int) -> None:
    assert of_bytes(content[:-by] or b"\1" + content) != of_bytes(content) != of_bytes(content + bytes(by))


@given(some_bytes, st.data())
def test_a_message_that_did_not_arrive_is_seen(content: bytes, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(content) - 1))
    end = data.draw(st.integers(start + 1, len(content)))
    for byte in (0, 0xFF):
        lost = content[:start] + bytes([byte]) * (end - start) + content[end:]
        assert (of_bytes(lost) == of_bytes(content)) == (lost == content)


@given(st.lists(st.binary(min_size=8 * PAGE, max_size=8 * PAGE), min_size=2, max_size=4), st.data())
def test_exchanged_pages_are_seen(pages: list[bytes], data: st.DataObject) -> None:
    order = data.draw(st.permutations(pages))
    assert (of_bytes(b"".join(order)) == of_bytes(b"".join(pages))) == (order == pages)


def test_views_of_any_kind_are_their_values_in_index_order() -> None:
    whole = torch.arange(700.0).reshape(35, 20)
    assert of(whole.t()) == of(whole.t().contiguous()) != of(whole)
    for offset in range(9):  # not at a multiple of eight bytes
        view = torch.arange(400, dtype=torch.uint8)[offset:]
        assert of(view) == of(view.clone()) == [definition(bytes(view.tolist()))]
    for dtype in (torch.bool, torch.complex64, torch.float16):
        assert of(torch.ones(3, 7).to(dtype)) == of(torch.ones(21).to(dtype))
    assert of(torch.tensor(0.0)) != of(torch.tensor(-0.0))
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert of(nan[:1]) != of(nan[1:]), "bits, not values"


def test_many_at_once_are_what_each_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "SMALL_BYTES", 64)
    tensors = [torch.arange(n, dtype=torch.int16) for n in (0, 1, 31, 32, 33, 500, 3, 64, 0, 40)]
    together = of(*tensors)
    assert together == [of(t)[0] for t in tensors]
    assert together[1] == tensors[1].numpy().tobytes(), "small ones are their bytes"


def test_a_tensor_of_several_real_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "PAGE_WORDS", 1 << 12)
    big = torch.arange((1 << 13) + 77)
    seen = {of(big)[0]}
    for place in (0, (1 << 12) - 1, 1 << 12, len(big) - 1):
        changed = big.clone()
        changed[place] += 1
        seen.add(of(changed)[0])
    assert len(seen) == 5


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pages, whatever the tensor's size."""
    taken: list[int] = []
    empty = torch.empty

    def counted(*shape: int, **more: torch.dtype) -> torch.Tensor:
        made = empty(*shape, **more)  # type: ignore[call-overload]
        taken.append(made.numel())
        return made  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, "empty", counted)
    of(torch.arange(100 * PAGE))
    assert taken == [PAGE] * 3


def test_shards_wait_for_the_device_once_and_read_the_rest() -> None:
    tensors = [torch.arange(50.0), torch.arange(3.0), torch.empty(0)]
    spec = ShardSpec({str(i): TensorSpec(tuple(t.shape), t.dtype) for i, t in enumerate(tensors)}, {"step": 3})
    host = shard_digests({"a": (tensors, spec)}, lambda t: False)
    assert host == {"a": shard_digest(tensors, spec)}
    mixed = shard_digests({"a": (tensors, spec), "b": (tensors[:1], None)}, lambda t: len(t) == 50)
    assert mixed["a"] == shard_digest(tensors, spec, {0: of(tensors[0])[0]}) != host["a"]
    for place in (0, 1):
        damaged = [t.clone() for t in tensors]
        damaged[place][1] += 1
        assert shard_digests({"a": (damaged, spec)}, lambda t: len(t) == 50)["a"] != mixed["a"]
    other = ShardSpec(spec.tensors, {"step": 4})
    assert shard_digests({"a": (tensors, other)}, lambda t: len(t) == 50)["a"] != mixed["a"]


def test_settle_comes_between_queueing_and_reading() -> None:
    calls: list[str] = []
    prints = Fingerprints(lambda: calls.append("settled"))
    prints.add(torch.arange(50))
    assert calls == []
    assert prints.results() == of(torch.arange(50)) and calls == ["settled"]
