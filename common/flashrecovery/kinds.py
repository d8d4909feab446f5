"""Enums: the kinds of failures, of notices, and of commands to ranks.

Their values are also used in events, in messages and on the terminal. The docstring of a member says what it means
and, after ``Do:``, what to do; scripts/generate_errors_docs.py writes
docs/errors_and_notices.md from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class _Word(str, Enum):
    """An enum whose members print as their value, also in formatted strings."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self.value), spec)


class FailureKind(_Word):
    """How a rank failed, or why a recovery began."""

    KILLED = "killed"
    """A signal killed the process.

    Do: see the evidence for the signal. Signal 9 outside of a drill usually comes from the kernel's out-of-memory
        killer.
    """
    EXIT = "exit"
    """The process exited with an error code, or before it reached its first step.

    Do: read the log of the rank in `logs/`.
    """
    EXCEPTION = "exception"
    """The script raised an exception.

    Do: read the traceback in the event. If it happens again at the same step, fix the script or its data.
    """
    STOPPED = "stopped"
    """The process was stopped (SIGSTOP) for longer than `timeouts.stopped_s`.

    Do: find out what stops it, such as a debugger or a scheduler that suspends jobs.
    """
    HANG = "hang"
    """The rank makes no progress, and other ranks wait for it.

    Do: read which ranks wait for it, and in which operation; see hangs.md#who-is-to-blame.
    """
    NODE_LOST = "node_lost"
    """The rank was lost with its whole node.

    Do: check the node before other jobs use it; see nodes.md#what-happens-when-a-node-is-lost.
    """
    UNRESPONSIVE = "unresponsive"
    """The rank did not carry out a command before its deadline.

    Do: nothing. If it happens often on a busy host, raise the deadline that the evidence names.
    """
    COMMAND = "command"
    """A command failed on this rank, or the rank could not abort its pending operations.

    Do: read the reason in the evidence. The rank was replaced.
    """
    DEVICE = "device"
    """A device plugin reported a fatal problem of the rank's device.

    Do: exclude the node and check the device; see health.md.
    """
    CONTEXT_LOST = "context_lost"
    """Another rank failed, and since then every call to this rank's device fails. The rank is replaced in the same
    recovery.

    Do: if it happens often, check the GPUs of that node and their NVLinks; see nodes.md#what-fails-together.
    """
    DEADLOCK_SUSPECTED = "deadlock_suspected"
    """A recovery without a failed rank: all ranks are stuck, and none is at fault. None is replaced; the step runs
    again.

    Do: if it happens again, look for collectives that some ranks skip; see hangs.md.
    """
    WARNING = "warning"
    """A recovery without a failed rank: a device plugin warned, so the ranks of that node move to other nodes.

    Do: check the device of the node; see health.md.
    """
    RESIZE = "resize"
    """A recovery without a failed rank: the number of replicas was changed by command, or ranks come back.

    Do: nothing; see elastic.md.
    """
    REPLAN = "replan"
    """A recovery without a failed rank: the parallel layout was changed by command.

    Do: nothing; see layouts.md.
    """
    HANDOFF = "handoff"
    """A recovery without a failed rank: a node leaves, and processes on other nodes take over its ranks.

    Do: nothing; see nodes.md#a-node-is-to-leave.
    """
    CONTROLLER = "controller"
    """The rank was lost while the job had no controller.

    Do: find out why the controller ended; see nodes.md#when-the-node-with-the-controller-is-lost.
    """


@dataclass(frozen=True)
class FailureTraits:
    """What follows from the kind of a failure.

    Attributes:
        own: The rank or its device caused it, so the next process would probably fail in the same way. It counts
            towards ``max_failures_per_step``; a failure from outside counts towards ``max_kills_per_step``.
        node_weight: How much one such failure counts against its node; 0: not at all.
    """

    own: bool = True
    node_weight: float = 0.0


TRAITS: Mapping[FailureKind, FailureTraits] = {
    FailureKind.KILLED: FailureTraits(own=False, node_weight=0.5),  # except signals that it caused itself
    FailureKind.EXIT: FailureTraits(node_weight=0.25),
    FailureKind.EXCEPTION: FailureTraits(node_weight=0.25),
    FailureKind.STOPPED: FailureTraits(own=False, node_weight=0.5),
    FailureKind.HANG: FailureTraits(node_weight=1.0),
    FailureKind.NODE_LOST: FailureTraits(own=False, node_weight=1.0),
    FailureKind.UNRESPONSIVE: FailureTraits(node_weight=1.0),
    FailureKind.COMMAND: FailureTraits(),
    FailureKind.DEVICE: FailureTraits(node_weight=1.0),
    FailureKind.CONTEXT_LOST: FailureTraits(own=False),
    FailureKind.DEADLOCK_SUSPECTED: FailureTraits(),
    FailureKind.WARNING: FailureTraits(),
    FailureKind.RESIZE: FailureTraits(),
    FailureKind.REPLAN: FailureTraits(),
    FailureKind.HANDOFF: FailureTraits(),
    FailureKind.CONTROLLER: FailureTraits(),
}
"""The traits of every kind."""


class Ordered(_Word):
    """A command to ranks, which they must answer before a deadline."""

    HOLD = "hold"
    STOP = "stop"
    REPLACE = "replace"
    REGROUP = "regroup"
    RESTORE = "restore"
    STAGING = "staging"
    RESUME = "resume"
    KEEP_LAST = "keep_last"


class NoticeKind(_Word):
    """Information for an operator; a notice by itself changes nothing."""

    ALL_ASKED_AGAIN = "all_asked_again"
    """All ranks missed the same deadline. All get the command again before any is replaced.

    Do: if it happens often, look for a stalled host or network, or raise the deadline that the text names.
    """
    BARRIER = "barrier"
    """With `barrier: auto`: whether the host or the device waits for whole gradients before an optimizer changes the
    state, and why; see gpu.md#the-barrier.

    Do: to have the device wait, use a fused optimizer of torch (`fused=True`), if the text says that it is not one.
    """
    POST_STEP_CODE_SKIPPED = "post_step_code_skipped"
    """A rank died between its `with step:` block and the next step. The text says which code its replacement skips.

    Do: check what that code would have written, such as a log line or a file; see recipes.md#below-the-block.
    """
    CHECKPOINT_DAMAGED = "checkpoint_damaged"
    """A checkpoint cannot be read, or its content has changed. The previous one is used.

    Do: check the storage, and delete the damaged checkpoint.
    """
    CHECKPOINT_FAILED = "checkpoint_failed"
    """A checkpoint could not be written. Training continues.

    Do: free disk space, or correct the permissions or the path that the text names.
    """
    COMMUNICATION_OUTSIDE = "communication_outside"
    """A collective runs outside the `with step:` block. Because of it, each step keeps a pre-step copy.

    Do: to avoid the copy, move the collective into the block. The text names its line.
    """
    WAITING = "waiting"
    """A rank has not finished its first step, and has been at one line of the script for a while.

    Do: nothing, if that line builds, compiles or loads a model. Else look at that line.
    """
    CONTROLLER_ELECTED = "controller_elected"
    """The controller was lost, and another node runs it now.

    Do: replace the lost node; see nodes.md#when-the-node-with-the-controller-is-lost.
    """
    DATA_ENDED = "data_ended"
    """A rank ran out of data at the start of a step. If the other ranks wait for it, the job ends within seconds.

    Do: give all ranks the same number of batches, or let them agree on when to stop.
    """
    DEADLOCK = "deadlock"
    """Ranks wait for each other in a circle.

    Do: look for collectives that run in different order on the ranks that the text names; see hangs.md.
    """
    DIGEST_MISMATCH = "digest_mismatch"
    """A shard was changed in transfer. It is fetched from another source.

    Do: if it happens again with the same node, check its memory and network.
    """
    FAULT_FIRED = "fault_fired"
    """An injected fault took place.

    Do: nothing. This is your drill.
    """
    FAULT_IMPOSSIBLE = "fault_impossible"
    """An injected fault cannot take place: this layout does not have the phase that it names.

    Do: choose another phase; see operations.md#drills.
    """
    FAULT_NOT_FIRED = "fault_not_fired"
    """The job ended before an injected fault took place.

    Do: choose an earlier step or another phase; see operations.md#drills.
    """
    GENERATION_NOT_KEPT = "generation_not_kept"
    """The number of the new generation could not be written to the run directory in time.

    Do: repair the storage of the run directory. There is a risk only if all processes that know the number are lost;
    see nodes.md.
    """
    HEALTH_FATAL = "health_fatal"
    """A device plugin reports that a device is unusable. The ranks on it are replaced.

    Do: check the device; see health.md.
    """
    HEALTH_PLUGIN = "health_plugin"
    """A device plugin failed or hangs, or it works again. The other plugins keep running.

    Do: fix or update the plugin; see health.md.
    """
    HEALTH_WARNING = "health_warning"
    """A device plugin warns about a device. If another node is lost, this node is the last choice for its ranks.

    Do: check the device when you can; see health.md.
    """
    INTERNAL_INCONSISTENCY = "internal_inconsistency"
    """The controller found a contradiction in its own records. Training continues, but the next recovery would fail.

    Do: start the job again with `--resume` when you can. Report a bug and attach `events.jsonl`.
    """
    LAST_SAVE = "last_save"
    """The job ends before its last step. The text says which step was saved, or which part of it is missing.

    Do: start again with `--resume`; see redundancy.md#a-job-that-ends-before-its-last-step.
    """
    RANK_LEFT = "rank_left"
    """The process of a rank that left an elastic job has ended; its exit code is in the text.

    Do: nothing, if the code is 0. Else read the rank's log.
    """
    HOLD_FAILED = "hold_failed"
    """A rank could not pause before it changes its state.

    Do: read the reason; the rank is replaced, or the job ends if that cannot help.
    """
    JOINING_PROCESSES = "joining_processes"
    """Ranks of an elastic job come back. Their processes start while training continues.

    Do: nothing; see elastic.md#growth.
    """
    JOINING_PROCESS_GIVEN_UP = "joining_process_given_up"
    """A joining process failed to start. Training continues without it.

    Do: fix the cause that the text names; see elastic.md#growth.
    """
    NODE_EXCLUDED = "node_excluded"
    """A node that failed repeatedly gets no ranks. Or it gets some, because no other node has room.

    Do: repair the node, then remove it from the node-failure log; see nodes.md#nodes-that-have-failed-before.
    """
    NODE_LEAVES = "node_leaves"
    """A node was asked to leave. The text says what happens with its ranks, or why it cannot leave.

    Do: add a spare node if the text asks for one; see nodes.md#a-node-is-to-leave.
    """
    NODE_LEFT = "node_left"
    """A node left the job, and no rank was lost.

    Do: nothing. The node is free for maintenance.
    """
    NODE_FAILURE_LOG = "node_failure_log"
    """The node-failure log is damaged or cannot be written. Failures of nodes are not remembered.

    Do: fix or delete the file that the text names; see nodes.md#nodes-that-have-failed-before.
    """
    NODE_REPLACED = "node_replaced"
    """The job no longer uses a node. Its ranks move to other nodes.

    Do: check the node before other jobs use it; see nodes.md.
    """
    NODE_UNHEARD = "node_unheard"
    """The controller does not hear a node, but it may be alive. The node keeps its ranks.

    Do: check the network between the node and the controller; see nodes.md#who-is-lost-and-who-is-not.
    """
    NODE_USED_LAST = "node_used_last"
    """A node that failed before gets ranks only if no other node has room.

    Do: check the node; see nodes.md#nodes-that-have-failed-before.
    """
    FILE_KEPT = "file_kept"
    """A replacement opens a file with mode "w" in its set-up, and the dead process had written to it. The file is not
    truncated: the replacement appends to it.

    Do: nothing; see recipes.md#logs-and-runs.
    """
    FENCE_TIMEOUT = "fence_timeout"
    """A process that is being replaced has not ended yet, or its GPU memory is not free yet.

    Do: nothing; if the process never ends, its node is given up (`process_never_ends`).
    """
    PROCESS_NEVER_ENDS = "process_never_ends"
    """SIGKILL does not end a process: it is in uninterruptible sleep (state D). Its node is given up for this job.

    Do: check the mount or driver that the text names; the node usually has to be rebooted.
    """
    NOT_REPLANNED = "not_replanned"
    """A change of parallelism was not carried out, or a different layout was chosen. The text says why.

    Do: fix the cause, then give the command again; see layouts.md.
    """
    NOT_RESIZED = "not_resized"
    """A resize was not carried out, because state of the leaving ranks would have been lost.

    Do: remove fewer replicas at a time; see elastic.md#on-command.
    """
    NOT_REGISTERED = "not_registered"
    """Something in the script changes from step to step, and a recovery does not restore it.

    Do: register what the text names; see limits.md#what-the-script-must-keep-to.
    """
    NOT_SAVED = "not_saved"
    """The script did not write a file after a discarded step, or a rank died while several ranks wrote a checkpoint.

    Do: nothing, if the repeated step writes the file; see recipes.md#below-the-block.
    """
    OTHER_COMMAND = "other_command"
    """A node runs a different command than the first node.

    Do: start all nodes with the same script and the same options.
    """
    CHECKPOINT_LAYOUT_MISMATCH = "checkpoint_layout_mismatch"
    """The checkpoint was written with another layout. Random numbers and data start as in a new job.

    Do: nothing, if you changed the layout on purpose. Else start with the old layout.
    """
    OWN_OBJECTS = "own_objects"
    """Registered objects or optimizer settings differ between ranks. Each rank's own version is protected.

    Do: if this is intended, name them in `per_rank=[...]`. Else fix the script.
    """
    QUORUM_HELD = "quorum_held"
    """The controller hears a majority of its electors again, and works again.

    Do: nothing.
    """
    QUORUM_LOST = "quorum_lost"
    """The controller does not hear a majority of its electors. Until it does, it decides nothing.

    Do: check the network between the nodes; see nodes.md#when-the-node-with-the-controller-is-lost.
    """
    REDUNDANCY = "redundancy"
    """Which copies of the state are kept, how much memory they take, and which failures the job survives.

    Do: check whether that is what you want; see redundancy.md#what-you-survive-and-for-how-long.
    """
    REGROUP_FAILED = "regroup_failed"
    """A rank could not form its process groups again. The recovery tries again in the next generation.

    Do: read the reason. If it happens again, check the network.
    """
    RESTORE_FAILED = "restore_failed"
    """A rank could not restore its state. Another source or the checkpoint is used.

    Do: read the reason.
    """
    RESUMED = "resumed"
    """With `--resume`: the step from which the job continues and where it was found, or that there was nothing to
    resume.

    Do: check that it is the step that you expect.
    """
    RESUME_FAILED = "resume_failed"
    """A rank could not continue after its state was restored.

    Do: read the reason; the rank is replaced, or the job ends if that cannot help.
    """
    SETUP_DIFFERS = "setup_differs"
    """The set-up of a replacement differs from that of the dead process: fewer collectives, other random or clock
    values, or other files are truncated. The text says where.

    Do: let the set-up do the same in each process, whether or not a file exists already; see recipes.md#logs-and-runs.
    """
    SETUP_LOG_LOST = "setup_log_lost"
    """The results of a rank's set-up collectives are lost. Its replacement cannot get them again.

    Do: nothing, unless the set-up needs data from other ranks. If so, pass it in a file or an argument.
    """
    SETUP_LOG_TOO_LARGE = "setup_log_too_large"
    """Set-up collectives returned more data than is recorded. A replacement cannot get it.

    Do: pass large set-up data to each rank in a file, not by a collective.
    """
    SILENT_BUFFERS = "silent_buffers"
    """The script changes buffers through `.data`, which bypasses version counters. Their content is compared instead.

    Do: nothing. To avoid the comparison, change them in place under `no_grad()`.
    """
    SNAPSHOTS = "snapshots"
    """The snapshot process died and was restarted. Or, at a launch: the version from which the job continues.

    Do: if the process dies again, read its log; see redundancy.md#snapshots.
    """
    DEADLOCK_SUSPECTED = "deadlock_suspected"
    """All ranks are stuck, and none is at fault.

    Do: read which rank waits in which operation; see hangs.md#who-is-to-blame.
    """
    STEPS_ARE_CALLS = "steps_are_calls"
    """In this job a step is one call that Megatron-LM's loop or the Trainer makes, not an iteration.

    Do: nothing. Use the number of the call in `--inject`.
    """
    START_AGAIN = "start_again"
    """A rank failed before the first step was trained. All ranks start again.

    Do: read the failure. If it happens again, fix the script or the environment.
    """
    STAGING_FAILED = "staging_failed"
    """A rank could not write its state to its node's memory, so the parallel layout was not changed.

    Do: check the free memory of the node; see layouts.md.
    """
    STOP_FAILED = "stop_failed"
    """A rank could not stop its step.

    Do: read the reason; the rank is replaced, or the job ends if that cannot help.
    """
    STORE_RESTARTED = "store_restarted"
    """A TCPStore process died and was restarted.

    Do: nothing. If it happens again, check whether that node runs out of memory.
    """
    STRAGGLER = "straggler"
    """A rank is slower than the others.

    Do: check its node: clock rates, temperature, other jobs; see hangs.md#slow-ranks.
    """
    TAKEN_OVER = "taken_over"
    """A new controller took over the job. The text says what it found.

    Do: nothing.
    """
    PRE_STEP_COPY_ENABLED = "pre_step_copy_enabled"
    """From now on each step keeps a copy of the state before it (pre-step copy). The text says why.

    Do: nothing, if there is enough memory. Else fix the cause that the text names; see how_it_works.md#a-healthy-step.
    """
    UNPROTECTED = "unprotected"
    """The script has not entered a protected step, so a failure ends the job.

    Do: add `recovery.steps()`, or raise `timeouts.startup_s` if the first step takes longer; see recipes.md.
    """
    UNTESTED = "untested"
    """This version of torch or of a framework was not tested. It has every function that recovery uses.

    Do: run a drill before you rely on it; see versions.md.
    """
    WAITING_FOR_NODE = "waiting_for_node"
    """A node is missing, and the job waits for it.

    Do: start the node. The job waits for `timeouts.node_wait_s`.
    """
    ZYGOTE = "zygote"
    """Processes cannot be forked with all modules imported: each imports a module itself, or starts a new interpreter.

    Do: nothing, but processes start more slowly; see operations.md#how-processes-are-started.
    """


def failed(asked: Ordered) -> NoticeKind:
    """The notice that a rank failed to carry out a command."""
    return NoticeKind(f"{asked}_failed")
