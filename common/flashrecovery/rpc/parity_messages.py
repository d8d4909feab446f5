"""Parity's facts and orders (:mod:`flashrecovery.plan.parity.decodable`) as messages of the protocol, and back."""

from __future__ import annotations

from flashrecovery.plan.parity.decodable import DecodeOrder, EncodingHeld, ParityHeld, Told
from flashrecovery.proto import flashrecovery_pb2 as pb


def parity_message(held: ParityHeld | None) -> pb.Parity:
    """What a rank says; of None, that it keeps no parity. Its own number is that of the sender."""
    if held is None:
        return pb.Parity()
    return pb.Parity(
        ranks=held.ranks,
        losses=held.losses,
        max_size=held.max_size,
        own=[pb.OwnBytes(version=version, nbytes=nbytes) for version, nbytes in sorted(held.own.items())],
        encodings=[
            pb.Encoding(key=e.key, sizes=e.sizes, losses=e.losses, bucket=e.bucket, p=sorted(e.p), q=sorted(e.q))
            for e in held.encodings
        ],
        told=[
            pb.Told(owner=t.owner, version=t.version, shards=[n for n, _ in t.shards], nbytes=[b for _, b in t.shards])
            for t in held.told
        ],
        doubted=sorted(held.doubted),
    )


def parity_held(rank: int, message: pb.Parity) -> ParityHeld | None:
    """What ``rank`` has said; None if it keeps no parity."""
    if not message.ranks:
        return None
    return ParityHeld(
        rank,
        tuple(message.ranks),
        message.losses,
        message.max_size,
        {own.version: own.nbytes for own in message.own},
        tuple(
            EncodingHeld(e.key, tuple(e.sizes), e.losses, e.bucket, frozenset(e.p), frozenset(e.q))
            for e in message.encodings
        ),
        tuple(Told(t.owner, t.version, tuple(zip(t.shards, t.nbytes, strict=True))) for t in message.told),
        frozenset(message.doubted),
    )


def decode_message(order: DecodeOrder) -> pb.Decode:
    """The message to all members of the group."""
    return pb.Decode(
        ranks=order.ranks,
        key=order.key,
        sizes=order.sizes,
        losses=order.losses,
        bucket=order.bucket,
        lost=order.lost,
        p=order.p,
        q=order.q,
        tellers=order.tellers,
    )


def decode_order(message: pb.Decode, version: int) -> DecodeOrder:
    """The received message, for the ``version`` of the restore."""
    return DecodeOrder(
        tuple(message.ranks),
        message.key,
        tuple(message.sizes),
        message.losses,
        message.bucket,
        version,
        tuple(message.lost),
        tuple(message.p),
        tuple(message.q),
        tuple(message.tellers),
    )
