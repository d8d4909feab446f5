"""A bucket of parity from all columns of a stripe, and the missing columns from those that are left. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from flashrecovery.errors import RestoreError
from flashrecovery.plan.parity.code import ROW, ParityLayout, StripePart
from flashrecovery.redundancy.parity.frames import digest
from flashrecovery.redundancy.parity.xor import Buffer, Xor, xor


def encode_bucket(
    layout: ParityLayout,
    stripe: int,
    part: StripePart,
    bucket: int,
    columns: Mapping[int, Buffer],
    compute: Xor | None = None,
) -> bytearray:
    """A bucket of parity from all of the stripe's columns."""
    arithmetic = compute or xor()
    total = bytearray(layout.parity_length(stripe, part, bucket))
    _add(arithmetic, layout, part, total, columns)
    return total


def decode_bucket(
    layout: ParityLayout,
    stripe: int,
    bucket: int,
    columns: Mapping[int, Buffer],
    parity: Mapping[StripePart, Buffer],
    digests: Mapping[int, bytes] | None = None,
    compute: Xor | None = None,
) -> dict[int, memoryview]:
    """The columns of a stripe's bucket that are not given, from those that are and as much parity as there are missing
    ones; all of one version.

    Args:
        digests: of the missing columns, as the store of a parity has them (``ParityStore.data_digest()``).

    Raises:
        RestoreError: not enough parity, or what comes out is wrong; nothing is returned then.
    """
    arithmetic = compute or xor()
    lengths = [layout.data_length(stripe, bucket, column) for column in range(layout.columns)]
    missing = [column for column, length in enumerate(lengths) if length and column not in columns]
    place = f"bucket {bucket} of stripe {stripe}"
    if wrong := [c for c, data in columns.items() if len(data) != lengths[c]]:
        raise RestoreError(f"{place}: columns {wrong} do not have the lengths of this layout")
    if len(missing) > len(parity):
        raise RestoreError(f"{place}: columns {missing} are missing, and there are {len(parity)} parities")
    if wrong_parts := [p.value for p, data in parity.items() if len(data) != layout.parity_length(stripe, p, bucket)]:
        raise RestoreError(f"{place}: {wrong_parts} do not have the lengths of this layout")
    used = {part: parity[part] for part in (StripePart.P, StripePart.Q) if part in parity}
    while len(used) > len(missing):
        used.popitem()
    rest: dict[StripePart, bytearray] = {}
    for part, content in used.items():
        rest[part] = bytearray(content)
        _add(arithmetic, layout, part, rest[part], columns)
    found: dict[int, memoryview] = {}
    if len(missing) == 2:
        found = _unzip(arithmetic, missing[0], missing[1], max(lengths[c] for c in missing), rest)
    for column, (part, left) in zip(missing, rest.items(), strict=True) if len(missing) == 1 else ():
        shift = layout.shift(part, column)
        found[column] = memoryview(left)[shift:]
        if not _zero(memoryview(left)[:shift]):
            raise RestoreError(f"{place}: what is left for column {column} begins too early")
    result = {}
    for column, data in found.items():
        result[column] = data[: lengths[column]]
        if not _zero(data[lengths[column] :]):
            raise RestoreError(f"{place}: what comes out for column {column} is longer than it was")
        if digests is not None and digests.get(column) != digest(result[column]):
            raise RestoreError(f"{place}: what comes out for column {column} does not have its digest")
    return result


def _unzip(compute: Xor, a: int, b: int, longest: int, rest: Mapping[StripePart, bytearray]) -> dict[int, memoryview]:
    """Columns a < b from what is left of P and Q without the others."""
    size = -(-longest // ROW) * ROW
    p, q = bytearray(size), bytearray(size)
    from_p, from_q = memoryview(rest[StripePart.P])[:size], memoryview(rest[StripePart.Q])[a * ROW : a * ROW + size]
    p[: len(from_p)], q[: len(from_q)] = from_p, from_q
    compute.unzip(p, q, b - a)
    return {a: memoryview(q), b: memoryview(p)}


def _add(compute: Xor, layout: ParityLayout, part: StripePart, total: bytearray, columns: Mapping[int, Buffer]) -> None:
    """Add the columns to a bucket of parity; those of one length and place in one go."""
    view = memoryview(total)
    together: dict[tuple[int, int], list[Buffer]] = {}
    for column, data in columns.items():
        if len(data):
            together.setdefault((layout.shift(part, column), len(data)), []).append(data)
    for (shift, length), buffers in together.items():
        compute.many(view[shift : shift + length], buffers)


def _zero(view: memoryview) -> bool:
    return bytes(view) == bytes(len(view))
