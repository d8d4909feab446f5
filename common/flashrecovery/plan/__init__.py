"""Pure decisions: from which version does the job resume, and which rank sends which bytes to which? No I/O in here.

Section III-E of the FlashRecovery paper reads step tags: if every survivor is still in forward or backward of
step i, the job resumes from the state of step i; if some rank has already updated, the others finish and it
resumes from i+1. Tags are a shorthand for the real question: *which versions of each shard do the live ranks
still hold?* This package answers that question itself, and so covers every layout and every mixture with one
rule:

    resume = the newest version k such that for every shard of every rank some live holder has (shard, k)

A rank that stops in step ``i`` before its mutation holds its shards LIVE at i; one that was stopped while it
changed them is torn and holds nothing live; pre-step copies, neighbour copies, the agent's rank-local state pages and
checkpoints add further versions. In plain data parallelism this is the paper's rule. With ZeRO or FSDP a survivor
that is already at i+1 goes back to its own pre-step copy of i when a victim's unique shard exists only at i. With
expert groups nothing changes: a shard is a name, and every rank that holds that name at that version is a replica.

:func:`newest_cut` finds k and says why it is not newer; :func:`plan_restore` then finds for every shard that
a rank lacks at k the cheapest source: what the rank holds itself, otherwise a holder chosen such that the
busiest sender sends as little as possible. Each missing shard crosses the wire exactly once per rank that
lost it: bytes on the wire = bytes lost.
"""

from flashrecovery.plan.restore.consistent_cut import newest_cut, plain_reason
from flashrecovery.plan.restore.restore_plan import plan_restore
from flashrecovery.plan.restore.types import (
    Cut,
    Holding,
    Kind,
    LocalRestore,
    Need,
    NoCut,
    NoSourceError,
    RangedTransfer,
    RestorePlan,
    Transfer,
)

__all__ = [
    "Cut",
    "Holding",
    "Kind",
    "LocalRestore",
    "Need",
    "NoCut",
    "NoSourceError",
    "RangedTransfer",
    "RestorePlan",
    "Transfer",
    "newest_cut",
    "plain_reason",
    "plan_restore",
]
