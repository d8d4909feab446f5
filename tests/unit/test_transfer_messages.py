"""Cutting a payload into messages: both sides agree, nothing is lost, nothing is sent twice."""

from __future__ import annotations

import math
import random
import unittest.mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrecovery.state.digest import sha256_tensors, shard_digest, tensor_digest
from flashrecovery.state.exact import exact_contiguous
from flashrecovery.state.spec import ShardSpec, TensorSpec, decode_spec, encode_spec
from flashrecovery.worker.transfer import chunks
from flashrecovery.worker.transfer.chunks import DIRECT_BYTES, PACK_BYTES, messages
from flashrecovery.worker.transfer.direct_reads import Arrivals

sizes = st.one_of(
    st.integers(0, 4096),
    st.sampled_from([DIRECT_BYTES - 1, DIRECT_BYTES, PACK_BYTES, PACK_BYTES + 1, 3 * PACK_BYTES]),
)


@given(st.lists(sizes, max_size=80))
def test_messages_cover_every_byte_once_and_stay_small(nbytes: list[int]) -> None:
    cut = list(messages([TensorSpec((n,), torch.uint8) for n in nbytes]))
    covered: dict[int, int] = {}
    for message in cut:
        assert 0 < message.nbytes <= PACK_BYTES
        assert message.nbytes == sum(p.nbytes for p in message.pieces)
        for piece in message.pieces:
            assert piece.start == covered.get(piece.index, 0)
            covered[piece.index] = piece.start + piece.nbytes
    assert covered == {i: n for i, n in enumerate(nbytes) if n}


def test_small_tensors_share_one_message() -> None:
    assert len(list(messages([TensorSpec((100,), torch.float32)] * 1000))) == 1


def test_drills_can_make_messages_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes are those of the call, not those that the module was imported with."""
    monkeypatch.setattr(chunks, "PACK_BYTES", 1000)
    monkeypatch.setattr(chunks, "DIRECT_BYTES", 100)
    specs = [TensorSpec((n,), torch.uint8) for n in (99, 99, 2500)]
    assert [message.nbytes for message in messages(specs)] == [198, 1000, 1000, 500]


def test_small_tensors_come_first() -> None:
    """Or each shard that has some would be whole only with the last one."""
    cut = list(messages([TensorSpec((n,), torch.uint8) for n in (DIRECT_BYTES, 1, DIRECT_BYTES, 1)]))
    assert [[piece.index for piece in message.pieces] for message in cut] == [[1, 3], [0], [2]]


def test_a_message_has_whole_elements() -> None:
    specs = [TensorSpec((1000,), torch.complex128), TensorSpec((7,), torch.float64)]
    assert [m.nbytes for m in messages(specs, 1001)] == [56, *[992] * 16, 128]
    assert [m.nbytes for m in messages(specs, 5)] == [*[16] * 1000, *[8] * 7]


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """Of any order of its dimensions, with steps, or expanded."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    tensor = torch.arange(math.prod(shape) * 8, dtype=torch.int16).view(*shape, 8)[..., :: draw(st.integers(1, 3))]
    if draw(st.booleans()):
        tensor = tensor[..., :1].expand(*shape, draw(st.integers(1, 4)))
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


@given(strided(), st.data())
def test_rows_are_the_elements_of_a_strided_tensor(tensor: torch.Tensor, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    views = list(chunks.rows(tensor, start, stop))
    assert [x for view in views for x in view.flatten().tolist()] == tensor.flatten().tolist()[start:stop]
    assert len(views) <= 2 * tensor.dim()
    assert all(view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for view in views)


@given(strided(), st.integers(1, 64), st.randoms())
def test_of_a_strided_tensor_no_more_is_copied_than_the_message(
    tensor: torch.Tensor, most: int, order: random.Random
) -> None:
    """In whatever order the messages come, as they do from several holders."""
    copied = []

    def counted(part: torch.Tensor) -> torch.Tensor:
        copied.append(part.numel() * part.element_size())
        return exact_contiguous(part)

    target = torch.zeros_like(tensor)
    cut = list(messages([TensorSpec(tuple(tensor.shape), tensor.dtype)], most))
    order.shuffle(cut)
    with unittest.mock.patch.object(chunks, "exact_contiguous", counted):
        for message in cut:
            buffer = torch.empty(message.nbytes, dtype=torch.uint8)
            chunks.pack(message, [tensor], buffer)
            chunks.unpack(message, [target], buffer)
    assert torch.equal(target, tensor) and max(copied) <= max(most, tensor.element_size())


def test_shards_are_told_in_the_order_in_which_they_are_whole() -> None:
    arrivals = Arrivals([4, 4, 0, 0, 4])
    for tensor, nbytes in ((4, 4), (0, 3), (1, 4), (0, 1)):
        arrivals.add(tensor, nbytes)
    assert list(arrivals.as_completed([[0, 2], [1], [3], [], [4]])) == [3, 2, 4, 1, 0]


def test_shards_that_will_not_come_are_waited_for_no_longer() -> None:
    arrivals = Arrivals([4, 4])
    arrivals.add(1, 4)
    whole = arrivals.as_completed([[0], [1]])
    assert next(whole) == 1
    arrivals.fail()
    assert list(whole) == []


def test_a_spec_survives_encoding() -> None:
    spec = ShardSpec(
        {"p": TensorSpec((2, 3), torch.bfloat16), "s": TensorSpec((), torch.float32)},
        {"step": 3, "betas": (0.9, 0.99)},
    )
    assert decode_spec(encode_spec(spec)) == spec


def test_digests_look_at_values_not_at_memory_layout() -> None:
    t = torch.randn(5, 7)
    assert tensor_digest(t.t()) == tensor_digest(t.t().contiguous()) != tensor_digest(t)
    assert tensor_digest(torch.tensor(1.0)) != tensor_digest(torch.tensor(-1.0))
    zero, minus = torch.tensor(0.0), torch.tensor(-0.0)
    assert tensor_digest(zero) != tensor_digest(minus)  # bits, not values that compare equal


def test_shard_digest_covers_structure_and_values() -> None:
    t = torch.ones(4)
    a = ShardSpec({"x": TensorSpec((4,), torch.float32)}, {"step": 1})
    b = ShardSpec({"x": TensorSpec((4,), torch.float32)}, {"step": 2})
    c = ShardSpec({"x": TensorSpec((2, 2), torch.float32)}, {"step": 1})
    assert len({shard_digest([t], s) for s in (a, b, c, None)}) == 4


def test_sha256_depends_on_names_and_bits_only() -> None:
    t = torch.randn(3, 3)
    assert sha256_tensors({"a": t, "b": t.t()}) == sha256_tensors({"b": t.t().contiguous(), "a": t.clone()})
    assert sha256_tensors({"a": t}) != sha256_tensors({"b": t})
