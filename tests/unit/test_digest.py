"""Digests are of values in index order, whatever way they are read."""

from __future__ import annotations

import pytest
import torch
import xxhash

from flashrecovery.state import digest


def test_a_view_and_its_copy_agree() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    assert digest.tensor_digest(whole.t()) == digest.tensor_digest(whole.t().contiguous())
    assert digest.tensor_digest(whole.t()) != digest.tensor_digest(whole)


@pytest.mark.parametrize("nbytes", [1, 6, 7, 8, 14, 20])
def test_what_is_read_in_pieces_is_the_same(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_PIECE", 7)
    content = torch.arange(nbytes, dtype=torch.uint8)
    hasher = xxhash.xxh3_128()
    for piece in digest._staged(content):
        assert len(piece) <= 7
        hasher.update(piece)
    assert hasher.hexdigest() == digest.tensor_digest(content)
