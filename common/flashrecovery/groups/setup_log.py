"""The results of set-up collectives, recorded for a later replacement of this rank.

A replacement runs the user's script from the top while no peer takes part. A configuration that was broadcast,
gathered objects, an agreed flag: each must be what the dead rank had got. So from the start to the first step the
results of every collective are recorded by group and number, and a replacement's stand-ins answer from that record.
Tensors over 1 MiB, parameters mostly, are not kept: state is restored from the peers anyway. Pickled objects of any
size are, up to 32 MiB in all. The record is plain binary; nothing in it is unpickled.
"""

from __future__ import annotations

from flashrecovery.groups import native_build
from flashrecovery.groups.registry import native
from flashrecovery.groups.state import STATE

_EMPTY = b"FRSETUP2" + bytes(8)


def start_setup_log() -> None:
    """Record from now on; what had been recorded before is dropped."""
    if native_build.loaded() is None:
        STATE.want_log_start(True)
    else:
        native().log_start()


def take_setup_log() -> bytes:
    """Stop recording and return the record."""
    if native_build.loaded() is None:
        STATE.want_log_start(False)
        return _EMPTY
    return bytes(native().log_take())


def replay_setup_log(log: bytes) -> None:
    """Let detached groups answer from ``log`` until they are attached.

    A collective that is not the recorded one (another operation, dtype or shape) then raises
    :class:`~flashrecovery.errors.SetupDiffersError`: what comes next in the log was meant for others.
    """
    STATE.want_log_replay(log)
    if native_build.loaded() is not None:
        native()


def setup_difference() -> str:
    """Where the set-up collectives of this replacement differ from those of the rank that it replaces, as text.

    Returns "" if no difference was seen; one that has been seen is of an object that this rank itself sends, or of
    collectives that are not made this time. To be asked when the set-up is over, before the groups are attached.
    """
    return "" if native_build.loaded() is None else str(native().log_difference())
