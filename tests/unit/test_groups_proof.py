"""The keyed hash under the proofs of the groups' own connections."""

from __future__ import annotations

import pytest

from flashrecovery.groups.native_build import native

KEY = bytes(range(16))
VECTORS = {
    0: "a3817f04ba25a8e66df67214c7550293",
    1: "da87c1d86b99af44347659119b22fc45",
    7: "a1f1ebbed8dbc153c0b84aa61ff08239",
    8: "3b62a9ba6258f5610f83e264f31497b4",
    9: "264499060ad9baabc47f8b02bb6d71ed",
    15: "5493e99933b0a8117e08ec0f97cfc3d9",
    16: "6ee2a4ca67b054bbfd3315bf85230577",
    17: "473d06e8738db89854c066c47ae47740",
    55: "67f14984c7da791248e32bb5922583da",
    56: "1938f2cf72d54ee97e94166fa91d2a36",
    63: "5150d1772f50834a503e069a973fbd7c",
}
"""Of the bytes 0, 1, 2, ..., by their number: SipHash-2-4 with 128 bits of output, from the reference implementation's
vectors_sip128; OpenSSL's SIPHASH (size 16) gives the same."""


@pytest.mark.parametrize("size", VECTORS)
def test_it_is_siphash_2_4_128(size: int) -> None:
    assert native().siphash(KEY, bytes(range(size))).hex() == VECTORS[size]


def test_each_bit_of_key_and_message_counts() -> None:
    message = bytes(range(56))
    seen = {native().siphash(KEY, message)}
    for bit in range(8 * len(KEY)):
        seen.add(native().siphash(_flipped(KEY, bit), message))
    for bit in range(8 * len(message)):
        seen.add(native().siphash(KEY, _flipped(message, bit)))
    assert len(seen) == 1 + 8 * (len(KEY) + len(message))


def _flipped(data: bytes, bit: int) -> bytes:
    return (int.from_bytes(data, "little") ^ 1 << bit).to_bytes(len(data), "little")


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_key_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(RuntimeError, match="a key has 16 bytes"):
        native().siphash(bytes(size), b"")
