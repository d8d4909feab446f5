"""Where the training thread is, as the control thread tells it while the training thread stands still."""

from __future__ import annotations

import threading
import traceback

from flashrecovery import groups
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.thread_stack import thread_stack

_FRAMES = 8
"""The innermost frames of the stack that are reported."""


def hang_report(rank: int, training_thread: threading.Thread) -> pb.HangReport:
    """Operations that have not finished, how far each group has come, and the stack if nothing is under way."""
    message = pb.HangReport(rank=rank, answered=True)
    under_way: list[tuple[float, pb.Operation]] = []
    for group in groups.groups():
        if group.size == 1:
            continue
        progress = group.progress
        pairs = [pb.PairProgress(peer=p, sent=s, received=r) for p, (s, r) in progress.pairs.items()]
        message.groups.add(
            group=group.name, members=group.members, size=group.size, collectives=progress.collectives, pairs=pairs
        )
        under_way += [(op.since, _operation(op, group.members)) for op in group.pending]
    message.operations.extend(operation for _, operation in sorted(under_way, key=lambda entry: entry[0]))
    if not any(operation.certain for operation in message.operations):
        message.stack = _stack(training_thread)
    return message


def _operation(op: groups.OpInfo, members: int) -> pb.Operation:
    return pb.Operation(
        group=op.group,
        members=members,
        op=op.op,
        peer=op.peer,
        number=op.number,
        certain=op.certain,
    )


def _stack(thread: threading.Thread) -> str:
    """As :func:`traceback.format_stack` writes it."""
    inner = thread_stack(thread.ident or 0)[:_FRAMES]
    frames = [traceback.FrameSummary(place.file, place.line or 0, place.function) for place in reversed(inner)]
    return "".join(traceback.StackSummary.from_list(frames).format())
