"""Which exceptions mean that communication failed, told by their type."""

from __future__ import annotations

import torch.distributed as dist


def is_communication_error(error: BaseException) -> bool:
    """True if a collective, a connection or a store failed: a dead peer, or :func:`~.abandon`.

    Our backend turns gloo's plain ``RuntimeError`` into ``DistBackendError``, so the type tells. Misuse (wrong shapes,
    unknown ranks) has other types.
    """
    return isinstance(error, dist.DistError)


def follows_communication_error(error: BaseException) -> bool:
    """True if it is one, or has been raised where one was handled."""
    seen: BaseException | None = error
    while seen is not None and not is_communication_error(seen):
        seen = seen.__cause__ or seen.__context__
    return seen is not None
