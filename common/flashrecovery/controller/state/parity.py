"""What the controller knows of parity. Nothing of it is imported before the first rank says that it keeps some."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from flashrecovery.proto import flashrecovery_pb2 as pb

if TYPE_CHECKING:
    from flashrecovery.plan.parity.decodable import Decodable, DecodeOrder, ParityHeld
    from flashrecovery.plan.parity.groups import Groups


def held_by(rank: int, message: pb.Parity | None) -> ParityHeld | None:
    """What ``rank`` has said; None if it keeps no parity, or has not said so."""
    if message is None or not message.ranks:
        return None
    from flashrecovery.plan.parity import groups  # noqa: F401 - now, and not amid a recovery
    from flashrecovery.rpc.parity_messages import parity_held

    return parity_held(rank, message)


def can_be_decoded(held: Collection[ParityHeld]) -> list[Decodable]:
    """See :func:`.decodable.decodable`."""
    if not held:
        return []
    from flashrecovery.plan.parity.decodable import decodable

    return decodable(held)


def orders_for(
    found: Collection[Decodable], version: int, lacking: Collection[tuple[int, str]]
) -> tuple[DecodeOrder, ...]:
    """See :func:`.decodable.needed`."""
    if not found:
        return ()
    from flashrecovery.plan.parity.decodable import needed

    return needed(found, version, lacking)


def why_not_decoded(held: Collection[ParityHeld]) -> str:
    """See :func:`.decodable.why_not`."""
    if not held:
        return ""
    from flashrecovery.plan.parity.decodable import why_not

    return why_not(held)


def decode_messages(orders: Iterable[DecodeOrder]) -> Mapping[int, pb.Decode]:
    """By the ranks that take part."""
    found: dict[int, pb.Decode] = {}
    for order in orders:
        from flashrecovery.rpc.parity_messages import decode_message

        found |= dict.fromkeys(order.ranks, decode_message(order))
    return found


def other_groups(held: Sequence[ParityHeld], domains: Sequence[str], nnodes: int, shared: Sequence[int]) -> Groups:
    """The parity groups from now on, where members of those of the launch have come to be on one failure domain.
    Empty: those of the launch, also where there is no way to have better ones.

    Args:
        domains: by rank, where it is.
        nnodes, shared: as of the launch, see :func:`.groups.launch_domains`.
    """
    if not held or nnodes == 1:
        return ()
    from flashrecovery.plan.parity.groups import groups_of_all, launch_domains

    losses, max_size = held[0].losses, held[0].max_size
    first = groups_of_all(launch_domains(len(domains), nnodes, shared), losses, max_size)
    if isinstance(first, str):
        return ()
    now = groups_of_all(domains, losses, max_size, [one.ranks for one in held])
    return () if isinstance(now, str) or now == first else now
