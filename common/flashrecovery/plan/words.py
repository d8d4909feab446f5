"""How ranks and shards are named to people: short, and bounded however large the world is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

HOW_TO_PROTECT = (
    "take its steps in recovery.steps() (plain PyTorch, DeepSpeed's three calls), set flash_recovery.enabled in the "
    "configuration of DeepSpeed, or give Megatron-LM --flash-recovery"
)
"""What a script without a protected step lacks."""
_SHOWN_RANKS = 4
_SHOWN_SHARDS = 3


def step_text(step: int, iteration: int = -1) -> str:
    """``step 30``; where steps are a framework's calls, ``iteration 15 (call 30)``. ``iteration``: as that framework
    numbers it in its log; -1: it is not known, or steps are steps."""
    return f"step {step:,}" if iteration < 0 else f"iteration {iteration:,} (call {step:,})"


def raised_text(what: str, message: str) -> str:
    """``ValueError: bad sample``; some exceptions have no message."""
    return f"{what}: {message}" if message else what


def failed_text(kind: str, evidence: str) -> str:
    """``killed by SIGKILL``, ``hang: in no collective``: the kind is said once."""
    return evidence if evidence.startswith(f"{kind} ") else f"{kind}: {evidence}"


def join(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def shortened(parts: Sequence[str], shown: int) -> str:
    """At most ``shown`` parts, then how many more."""
    if len(parts) <= shown:
        return join(parts)
    return f"{', '.join(parts[:shown])} and {len(parts) - shown:,} more"


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0, 1, 2, 3 and 12 more``."""
    ordered = sorted(set(ranks))
    return ("rank " if len(ordered) == 1 else "ranks ") + shortened([str(r) for r in ordered], _SHOWN_RANKS)


def shard_text(shard: str, owners: Iterable[int]) -> str:
    """``rank 3's shard 'x'`` or ``shard 'x' of ranks 0, 1 and 2``."""
    ordered = sorted(set(owners))
    if len(ordered) == 1:
        return f"rank {ordered[0]}'s shard {shard!r}"
    return f"shard {shard!r} of {ranks_text(ordered)}"


def missing_text(missing: Iterable[tuple[int, str]]) -> str:
    """(rank, shard) pairs grouped by rank: ``rank 3: 'a', 'b' and 48 more; rank 4: ...; and 1,198 more
    ranks``."""
    by_rank: dict[int, list[str]] = defaultdict(list)
    for rank, shard in missing:
        by_rank[rank].append(repr(shard))
    groups = [f"rank {r}: {shortened(sorted(names), _SHOWN_SHARDS)}" for r, names in sorted(by_rank.items())]
    rest = len(groups) - _SHOWN_RANKS
    text = "; ".join(groups[:_SHOWN_RANKS])
    return text if rest <= 0 else f"{text}; and {rest:,} more ranks"
