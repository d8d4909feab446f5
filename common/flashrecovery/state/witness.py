"""The end of a capsule: what this rank's shared objects were like when the capsule's version was complete.

A capsule is sealed before its step is over, and mostly counts as it is: then only these bytes are written again when
the version is complete. A replacement is given its peers' objects; the witness of the dead rank says whether they are
the ones that it had.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

LENGTH = 16
"""Bytes at the end of every capsule."""

UNKNOWN = bytes(LENGTH)
"""The version was not complete yet when the capsule was sealed, or there are no shared objects."""

_MAGIC = b"FRw1"


def of(digests: Mapping[str, str]) -> bytes:
    """The witness of objects with these digests, by name."""
    if not digests:
        return UNKNOWN
    text = ";".join(f"{name}={digest}" for name, digest in sorted(digests.items()))
    return _MAGIC + xxhash.xxh3_128_digest(text.encode())[: LENGTH - len(_MAGIC)]


def found(capsule: bytes) -> bytes:
    """The witness at the end of ``capsule``; :data:`UNKNOWN` if there is none."""
    end = capsule[-LENGTH:]
    return end if end.startswith(_MAGIC) else UNKNOWN


def put(capsule: bytes, witness: bytes) -> bytes:
    """``capsule`` with another witness at its end."""
    return capsule[:-LENGTH] + witness
