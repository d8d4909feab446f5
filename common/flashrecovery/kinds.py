"""The words that tell failures, notices, and commands to ranks apart, as enums.

Each word stands once, here; it is also what stands in events, in messages and on the terminal. The
docstring of a member says what it means and, after ``Do:``, what to do; scripts/generate_errors_docs.py writes
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
    """What has become of a rank, or why a recovery began."""

    KILLED = "killed"
    """A signal has ended the process.

    Do: see the evidence for the signal; 9 without a drill is mostly the kernel's out-of-memory killer.
    """
    EXIT = "exit"
    """The process has ended with an exit code, or without reaching its first step.

    Do: read the log of the rank in `logs/`.
    """
    EXCEPTION = "exception"
    """The script has raised an exception.

    Do: read the traceback in the event; if it comes back at the same step, correct the script or its data.
    """
    STOPPED = "stopped"
    """The process was stopped (SIGSTOP) for longer than `timeouts.stopped_s`.

    Do: find out what stops it, such as a debugger or a scheduler that suspends jobs.
    """
    HANG = "hang"
    """The rank makes no progress, and others wait for it.

    Do: read who waits for it, and in what; see hangs.md#who-is-to-blame.
    """
    NODE_LOST = "node_lost"
    """The rank was lost with its whole node.

    Do: look at the node before you give it back to jobs; see nodes.md#what-happens-when-a-node-is-lost.
    """
    UNRESPONSIVE = "unresponsive"
    """The rank missed the deadline of a command.

    Do: if it comes often on a busy host, raise the deadline that the evidence names.
    """
    COMMAND = "command"
    """A command failed on this rank, or the rank could not let go of what was under way.

    Do: read the reason in the evidence; the rank was replaced.
    """
    DEVICE = "device"
    """A device plugin reports a fatal finding.

    Do: keep the node out and have its device checked; see health.md.
    """
    CONTEXT_LOST = "context_lost"
    """The rank survived the failure of another one, and then every call to its device failed. It is replaced in the
    same recovery.

    Do: if it comes often, have the GPUs of that node and their NVLinks checked; see nodes.md#what-fails-together.
    """
    DEADLOCK_SUSPECTED = "deadlock_suspected"
    """Of a recovery: the ranks stand still and none is to blame. None is replaced and the step runs again.

    Do: if it comes back, look for collectives that some ranks skip; see hangs.md.
    """
    WARNING = "warning"
    """Of a recovery: the rank lives, but its node is given up on a device plugin's warning.

    Do: have the node's device checked; see health.md.
    """
    RESIZE = "resize"
    """Of a recovery: nothing has failed. Another number of replicas was ordered, or ranks come back.

    Do: nothing; see elastic.md.
    """
    REPLAN = "replan"
    """Of a recovery: nothing has failed. Another parallel layout was ordered.

    Do: nothing; see layouts.md.
    """
    HANDOFF = "handoff"
    """Of a recovery: nothing has failed. A node leaves, and processes on other nodes take over its ranks.

    Do: nothing; see nodes.md#a-node-is-to-leave.
    """
    CONTROLLER = "controller"
    """The rank was lost while there was no controller.

    Do: find out why the controller ended; see nodes.md#when-the-node-with-the-controller-is-lost.
    """


@dataclass(frozen=True)
class FailureTraits:
    """What follows from the kind of a failure.

    Attributes:
        own: It is the doing of the rank or its device, so the next process will mostly fail in the same way. It counts
            towards ``max_failures_per_step``; a failure from outside counts towards ``max_kills_per_step``.
        node_weight: What one such failure says against its node; 0: nothing.
    """

    own: bool = True
    node_weight: float = 0.0


TRAITS: Mapping[FailureKind, FailureTraits] = {
    FailureKind.KILLED: FailureTraits(own=False, node_weight=0.5),  # but for signals of its own doing
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
"""Of every kind."""


class Ordered(_Word):
    """What ranks are asked to do, and have to answer within a deadline."""

    HOLD = "hold"
    STOP = "stop"
    REPLACE = "replace"
    REGROUP = "regroup"
    RESTORE = "restore"
    STAGING = "staging"
    RESUME = "resume"
    KEEP_LAST = "keep_last"


class NoticeKind(_Word):
    """Something that an operator may want to know, and that changes nothing by itself."""

    ALL_ASKED_AGAIN = "all_asked_again"
    """No rank met a deadline, so all are asked once more before any is replaced.

    Do: if it comes often, look for a stalled host or network, or raise the deadline that the text names.
    """
    POST_STEP_CODE_SKIPPED = "post_step_code_skipped"
    """A rank died after its `with step:` block and before the next step. The text says what is not done again.

    Do: check what that code writes, such as a log line or a file; see recipes.md#below-the-block.
    """
    CHECKPOINT_DAMAGED = "checkpoint_damaged"
    """A checkpoint cannot be read, or is not what was written. The one before it is used.

    Do: check the storage; delete the damaged checkpoint.
    """
    CHECKPOINT_FAILED = "checkpoint_failed"
    """A checkpoint could not be written. Training goes on.

    Do: free space, or correct the permissions or the path that the text names.
    """
    COMMUNICATION_OUTSIDE = "communication_outside"
    """A collective runs outside the `with step:` block. Each step keeps a pre-step copy for it.

    Do: move the collective into the block, at the line that the text names, to save the copy.
    """
    WAITING = "waiting"
    """A rank has been at one line of the script for a while before the end of its first step.

    Do: nothing, if a model is built, compiled or loaded there; else look at that line.
    """
    CONTROLLER_ELECTED = "controller_elected"
    """The old controller was lost and another one leads.

    Do: nothing; replace the lost node; see nodes.md#when-the-node-with-the-controller-is-lost.
    """
    DATA_ENDED = "data_ended"
    """The data of a rank ended in a step in which it has not trained. If the others wait for it, the job ends
    within seconds.

    Do: give all ranks equally many batches, or have them agree on the end and leave in the same step.
    """
    DEADLOCK = "deadlock"
    """Ranks wait for each other in a circle.

    Do: look for collectives in different order on the ranks that the text names; see hangs.md.
    """
    DIGEST_MISMATCH = "digest_mismatch"
    """A shard did not arrive as it was sent. The next source is used.

    Do: if it comes back with the same node, check its memory and network.
    """
    FAULT_FIRED = "fault_fired"
    """An injected fault has struck.

    Do: nothing; this is your drill.
    """
    FAULT_IMPOSSIBLE = "fault_impossible"
    """The phase of an injected fault does not occur in this layout.

    Do: choose another phase; see operations.md#drills.
    """
    FAULT_NOT_FIRED = "fault_not_fired"
    """The job ended before an injected fault struck.

    Do: choose an earlier step or another phase; see operations.md#drills.
    """
    GENERATION_NOT_KEPT = "generation_not_kept"
    """The number of a generation could not be written to the run directory in time.

    Do: correct the run directory's storage; the number is unsafe only if all who know it are lost; see nodes.md.
    """
    HEALTH_FATAL = "health_fatal"
    """A device plugin reports a device that cannot be used.

    Do: have the device checked; its ranks are replaced; see health.md.
    """
    HEALTH_PLUGIN = "health_plugin"
    """A device plugin itself raises, hangs or answers again. The other plugins go on.

    Do: correct or update the plugin; see health.md.
    """
    HEALTH_WARNING = "health_warning"
    """A device plugin warns of a device. The node is the last to get ranks of a lost node.

    Do: have the device checked at the next chance; see health.md.
    """
    INTERNAL_INCONSISTENCY = "internal_inconsistency"
    """What the controller knows of the job contradicts itself. Training goes on; a recovery would fail by name.

    Do: report the bug with `events.jsonl`; start the job again with `--resume` at the next chance.
    """
    LAST_SAVE = "last_save"
    """The job ends before its last step. The text says which step is kept whole, or what is missing.

    Do: start again with `--resume`; see redundancy.md#a-job-that-ends-before-its-last-step.
    """
    RANK_LEFT = "rank_left"
    """The process of a rank that left an elastic job has ended; its exit code is in the text.

    Do: nothing, if the code is 0; else read the rank's log.
    """
    HOLD_FAILED = "hold_failed"
    """A rank could not stop before its next change of state.

    Do: read the reason; the rank is replaced, or the job ends if that cannot help.
    """
    JOINING_PROCESSES = "joining_processes"
    """Ranks of an elastic job come back and are built up beside training.

    Do: nothing; see elastic.md#growth.
    """
    JOINING_PROCESS_GIVEN_UP = "joining_process_given_up"
    """A joining process does not come. Training goes on without it.

    Do: correct the cause that the text gives; see elastic.md#growth.
    """
    NODE_EXCLUDED = "node_excluded"
    """A node that has failed repeatedly gets no ranks, or gets some because no other node has room.

    Do: repair the node, or take it out of the node-failure log; see nodes.md#nodes-that-have-failed-before.
    """
    NODE_LEAVES = "node_leaves"
    """A node is to leave. The text says what happens with its ranks, or why it does not leave.

    Do: bring a spare node if the text asks for one; see nodes.md#a-node-is-to-leave.
    """
    NODE_LEFT = "node_left"
    """A node has left the job; no rank was lost.

    Do: service the node.
    """
    NODE_FAILURE_LOG = "node_failure_log"
    """The node-failure log is damaged or cannot be used. Failures of nodes are not remembered.

    Do: correct or delete the file that the text names; see nodes.md#nodes-that-have-failed-before.
    """
    NODE_REPLACED = "node_replaced"
    """A node is given up, and its ranks go to other nodes.

    Do: look at the node before you give it back to jobs; see nodes.md.
    """
    NODE_UNHEARD = "node_unheard"
    """A node is silent, and nothing proves its death. It keeps its ranks.

    Do: check the network between the node and the controller; see nodes.md#who-is-lost-and-who-is-not.
    """
    NODE_USED_LAST = "node_used_last"
    """A node that has failed before gets ranks only if no other has room.

    Do: have the node checked; see nodes.md#nodes-that-have-failed-before.
    """
    FILE_KEPT = "file_kept"
    """The set-up of a replacement opens a file with "w" that has been written to since. It is kept and goes on at its
    end.

    Do: nothing; see recipes.md#logs-and-runs.
    """
    FENCE_TIMEOUT = "fence_timeout"
    """A process that is to be replaced has not ended yet, or its GPU memory is not free yet.

    Do: if it stays, look for a process in uninterruptible sleep on that node.
    """
    NOT_REPLANNED = "not_replanned"
    """A change of parallelism was not carried out, or another layout was taken. The text says why.

    Do: correct the cause, then order it again; see layouts.md.
    """
    NOT_RESIZED = "not_resized"
    """A resize was not carried out: state of the leaving ranks would have been lost.

    Do: let fewer replicas leave at a time; see elastic.md#on-command.
    """
    NOT_REGISTERED = "not_registered"
    """Something changes from step to step in the script and is not brought back by a recovery.

    Do: register what the text names; see limits.md#what-the-script-must-keep-to.
    """
    NOT_SAVED = "not_saved"
    """A file was not written after a discarded step, or a death cut a checkpoint of several ranks short.

    Do: nothing, if the step is done again and writes the file then; see recipes.md#below-the-block.
    """
    OTHER_COMMAND = "other_command"
    """A node runs another command than the first node.

    Do: start the same command on all nodes; all must use the same script and options.
    """
    CHECKPOINT_LAYOUT_MISMATCH = "checkpoint_layout_mismatch"
    """The checkpoint was written with another layout. Random numbers and data begin as in a new job.

    Do: nothing, if you changed the layout on purpose; else start with the old one.
    """
    OWN_OBJECTS = "own_objects"
    """Registered objects or optimizer settings differ between ranks. Each rank's own is protected.

    Do: say it with `per_rank=[...]`, if it is meant; else correct the script.
    """
    QUORUM_HELD = "quorum_held"
    """The controller hears more than half of its electors again and decides again.

    Do: nothing.
    """
    QUORUM_LOST = "quorum_lost"
    """The controller does not hear more than half of its electors. It decides nothing until it does.

    Do: check the network between the nodes; see nodes.md#when-the-node-with-the-controller-is-lost.
    """
    REDUNDANCY = "redundancy"
    """Which copies of state are kept, what memory they take, and what the job survives.

    Do: check that it is what you want; see redundancy.md#what-you-survive-and-for-how-long.
    """
    REGROUP_FAILED = "regroup_failed"
    """A rank could not form the process groups of a new generation.

    Do: read the reason; the next generation is tried; check the network if it comes back.
    """
    RESTORE_FAILED = "restore_failed"
    """A rank could not restore its state.

    Do: read the reason; another source or the checkpoint is used.
    """
    RESUMED = "resumed"
    """With `--resume`: the step at which the job begins and its source, or that there was nothing to resume.

    Do: check that it is the step you expect.
    """
    RESUME_FAILED = "resume_failed"
    """A rank could not go on after its state was restored.

    Do: read the reason; the rank is replaced, or the job ends if that cannot help.
    """
    SETUP_DIFFERS = "setup_differs"
    """The set-up of a replacement makes other collectives, draws other values, or cuts off other files than the process
    before it did. The text says where.

    Do: make the same collectives, names and logs in each process, also if a file is there already; see
    recipes.md#logs-and-runs.
    """
    SETUP_LOG_LOST = "setup_log_lost"
    """The record of a rank's set-up collectives is lost. Its replacement does not see what they returned.

    Do: nothing, unless set-up needs data from other ranks; give it to each rank by file or argument.
    """
    SETUP_LOG_TOO_LARGE = "setup_log_too_large"
    """Set-up collectives returned more than is recorded. A replacement does not see it.

    Do: give large set-up data to each rank by file, not by a collective.
    """
    SILENT_BUFFERS = "silent_buffers"
    """Buffers are changed by way of `.data`, which advances no version counter. They are compared by content.

    Do: nothing; change them in place with `no_grad()` to save the comparison.
    """
    SNAPSHOTS = "snapshots"
    """The snapshot process died and was started again; or, at a launch, the version from which it goes on.

    Do: if the process dies again, read its log; see redundancy.md#snapshots.
    """
    DEADLOCK_SUSPECTED = "deadlock_suspected"
    """The ranks stand still and none is to blame.

    Do: read who waits in what; see hangs.md#who-is-to-blame.
    """
    STEPS_ARE_CALLS = "steps_are_calls"
    """A step is a call of Megatron-LM's loop or of the Trainer, not an iteration.

    Do: nothing; use the number of the call in `--inject`.
    """
    START_AGAIN = "start_again"
    """A rank failed before anything was trained. All ranks start again.

    Do: read the failure; if it comes back, correct the script or the environment.
    """
    STAGING_FAILED = "staging_failed"
    """A rank could not write its state to its node's memory for a change of parallelism.

    Do: check the free memory of the node; see layouts.md.
    """
    STOP_FAILED = "stop_failed"
    """A rank could not stop its step.

    Do: read the reason; the rank is replaced, or the job ends if that cannot help.
    """
    STORE_RESTARTED = "store_restarted"
    """A TCPStore died and was started again.

    Do: nothing; look for a lack of memory on that node if it comes back.
    """
    STRAGGLER = "straggler"
    """A rank is slower than the others.

    Do: look at its node: clocks, temperature, other jobs; see hangs.md#slow-ranks.
    """
    TAKEN_OVER = "taken_over"
    """A new controller has taken the job over. The text says what it found.

    Do: nothing.
    """
    PRE_STEP_COPY_ENABLED = "pre_step_copy_enabled"
    """From now on each step keeps a pre-step copy. The text says why.

    Do: nothing, if the memory suffices; else remove the cause that the text names; see
    how_it_works.md#a-healthy-step.
    """
    UNPROTECTED = "unprotected"
    """The script takes no protected step: a failure now ends the job.

    Do: add `recovery.steps()`, or raise `timeouts.startup_s` if the first step takes longer; see recipes.md.
    """
    UNTESTED = "untested"
    """Torch or a framework has all that recovery uses, but this version was not tested.

    Do: run a drill first; see versions.md.
    """
    WAITING_FOR_NODE = "waiting_for_node"
    """A node is missing, and the job waits for it.

    Do: start the node; the job waits for `timeouts.node_wait_s`.
    """
    ZYGOTE = "zygote"
    """A module is imported by each process itself, or new interpreters are started in place of forks.

    Do: nothing; starts take longer; see operations.md#how-processes-are-started.
    """


def failed(asked: Ordered) -> NoticeKind:
    """The kind of failure of a rank that could not do what it was asked."""
    return NoticeKind(f"{asked}_failed")
