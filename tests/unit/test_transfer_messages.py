"""Cutting a payload into messages: both sides agree, nothing is lost, nothing is sent twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrecovery.state.digest import sha256_tensors, shard_digest, tensor_digest
from flashrecovery.state.spec import ShardSpec, TensorSpec, decode_spec, encode_spec
from flashrecovery.worker.transfer import chunks
from flashrecovery.worker.transfer.chunks import DIRECT_BYTES, PACK_BYTES, messages

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
    assert [message.nbytes for message in messages(specs)] == [1000, 1000, 500, 198]


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
