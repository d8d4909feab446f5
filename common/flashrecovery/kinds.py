"""The words that tell failures, notices, and commands to ranks apart, as enums.

Each word stands once, here; it is also what stands in events, in messages and on the terminal. docs/operations.md
explains every one.
"""

from __future__ import annotations

from enum import Enum


class _Word(str, Enum):
    """An enum whose members print as their value, also in formatted strings."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self.value), spec)


class FailureKind(_Word):
    """What has become of a rank, or why a recovery began."""

    KILLED = "killed"
    EXIT = "exit"
    EXCEPTION = "exception"
    STOPPED = "stopped"
    HANG = "hang"
    NODE_LOST = "node_lost"
    UNRESPONSIVE = "unresponsive"
    COMMAND = "command"
    DEVICE = "device"
    STANDSTILL = "standstill"
    WARNING = "warning"
    """The rank lives, but its node is given up on a device plugin's warning."""
    RESIZE = "resize"
    """No failure: somebody has commanded another number of replicas."""
    REPLAN = "replan"
    """No failure: somebody has commanded another parallel layout."""
    HANDOFF = "handoff"
    """No failure: a node is to leave, and other processes take over its ranks."""
    CONTROLLER = "controller"
    """The rank was lost while there was no controller."""


class Ordered(_Word):
    """What ranks are asked to do, and have to answer within a deadline."""

    HOLD = "hold"
    STOP = "stop"
    REPLACE = "replace"
    REGROUP = "regroup"
    RESTORE = "restore"
    STASH = "stash"
    RESUME = "resume"
    KEEP_LAST = "keep_last"


class NoticeKind(_Word):
    """Something that an operator may want to know, and that changes nothing by itself."""

    ALL_ASKED_AGAIN = "all_asked_again"
    BELOW_CUT_SHORT = "below_cut_short"
    CHECKPOINT_DAMAGED = "checkpoint_damaged"
    CHECKPOINT_FAILED = "checkpoint_failed"
    COMMUNICATION_OUTSIDE = "communication_outside"
    WAITING = "waiting"
    CONTROLLER_ELECTED = "controller_elected"
    DATA_ENDED = "data_ended"
    DEADLOCK = "deadlock"
    DIGEST_MISMATCH = "digest_mismatch"
    FAULT_FIRED = "fault_fired"
    FAULT_IMPOSSIBLE = "fault_impossible"
    FAULT_NOT_FIRED = "fault_not_fired"
    GENERATION_NOT_KEPT = "generation_not_kept"
    HEALTH_FATAL = "health_fatal"
    HEALTH_PLUGIN = "health_plugin"
    HEALTH_WARNING = "health_warning"
    LAST_SAVE = "last_save"
    LEFT = "left"
    HOLD_FAILED = "hold_failed"
    NEWCOMERS = "newcomers"
    NEWCOMER_GIVEN_UP = "newcomer_given_up"
    NODE_EXCLUDED = "node_excluded"
    NODE_LEAVES = "node_leaves"
    NODE_LEFT = "node_left"
    NODE_MARKS = "node_marks"
    NODE_REPLACED = "node_replaced"
    NODE_UNHEARD = "node_unheard"
    NODE_USED_LAST = "node_used_last"
    NOT_FENCED = "not_fenced"
    NOT_REPLANNED = "not_replanned"
    NOT_RESIZED = "not_resized"
    NOT_REGISTERED = "not_registered"
    NOT_SAVED = "not_saved"
    OTHER_COMMAND = "other_command"
    OTHER_LAYOUT = "other_layout"
    OWN_OBJECTS = "own_objects"
    QUORUM_HELD = "quorum_held"
    QUORUM_LOST = "quorum_lost"
    REDUNDANCY = "redundancy"
    REGROUP_FAILED = "regroup_failed"
    RESTORE_FAILED = "restore_failed"
    RESUMED = "resumed"
    RESUME_FAILED = "resume_failed"
    SETUP_LOG_LOST = "setup_log_lost"
    SETUP_LOG_TOO_LARGE = "setup_log_too_large"
    SILENT_BUFFERS = "silent_buffers"
    SNAPSHOTS = "snapshots"
    STANDSTILL = "standstill"
    STEPS_ARE_CALLS = "steps_are_calls"
    START_AGAIN = "start_again"
    STASH_FAILED = "stash_failed"
    STOP_FAILED = "stop_failed"
    STORE_RESTARTED = "store_restarted"
    STRAGGLER = "straggler"
    TAKEN_OVER = "taken_over"
    UNDO_ENABLED = "undo_enabled"
    UNPROTECTED = "unprotected"
    UNTESTED = "untested"
    WAITING_FOR_NODE = "waiting_for_node"
    ZYGOTE = "zygote"


def failed(asked: Ordered) -> NoticeKind:
    """The kind of failure of a rank that could not do what it was asked."""
    return NoticeKind(f"{asked}_failed")
