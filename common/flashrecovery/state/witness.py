"""The end of rank-local state: what this rank's shared objects were like when the rank-local state's version was
complete.

Rank-local state is sealed before its step is over, and mostly counts as it is: then only these bytes are written again
when the version is complete. A replacement is given its peers' objects; the witness of the dead rank says whether they
are the ones that it had.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

LENGTH = 16
"""Bytes at the end of every rank-local state."""

UNKNOWN = bytes(LENGTH)
"""The version was not complete yet when the rank-local state was sealed, or there are no shared objects."""

_MAGIC = b"FRw1"


def of(digests: Mapping[str, str]) -> bytes:
    """The witness of objects with these digests, by name."""
    if not digests:
        return UNKNOWN
    text = ";".join(f"{name}={digest}" for name, digest in sorted(digests.items()))
    return _MAGIC + xxhash.xxh3_128_digest(text.encode())[: LENGTH - len(_MAGIC)]


def found(local_state: bytes) -> bytes:
    """The witness at the end of ``local_state``; :data:`UNKNOWN` if there is none."""
    end = local_state[-LENGTH:]
    return end if end.startswith(_MAGIC) else UNKNOWN


def put(local_state: bytes, witness: bytes) -> bytes:
    """``local_state`` with another witness at its end."""
    return local_state[:-LENGTH] + witness
