"""One worker's part in the job: the step transaction, and the hand-over to recovery when a step is stopped.

The training thread runs all of this. A step is ``begin`` .. ``end``; the adapter reports the moments in between
(:class:`~flashrecovery.worker.adapter.StepHooks`). When the step is stopped, wherever the training thread is, it
unwinds to ``end``, and :mod:`.recover` carries out the controller's commands until the next ``resume``.
"""

from __future__ import annotations

import atexit
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.config import Settings
from flashrecovery.errors import JobFailedError, RegistrationError, StepInterrupted
from flashrecovery.page import Page
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.redundancy import checkpoint
from flashrecovery.worker.channel import Channel
from flashrecovery.worker.control import Control
from flashrecovery.worker.copies import Copies, anywhere
from flashrecovery.worker.data import DataStream, Position
from flashrecovery.worker.device import DeviceClock
from flashrecovery.worker.faults import Faults
from flashrecovery.worker.gate import Gate
from flashrecovery.worker.overhead import TimedHooks
from flashrecovery.worker.recover import Recoverer
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.rng import RngState

log = logging.getLogger("flashrecovery")

_LONGEST_PAUSE_S = 0.1
"""A thread that sleeps for a millisecond on a busy host is back by then."""

Drawn = tuple[RngState, list[Position], list[Any]]
"""Where the random number streams and the data streams stand, and the marks of the adapters."""


class Connection:
    """What the bootstrap has set up before the script runs. ``at_script_end``: it calls these when the script has ended
    well."""

    def __init__(self, channel: Channel, page: Page, rank: int, generation: int, detached: bool) -> None:
        self.channel = channel
        self.page = page
        self.rank = rank
        self.generation = generation
        self.detached = detached
        self.at_script_end: list[Callable[[], None]] = []


class Session:
    """Implements StepHooks for the adapters."""

    def __init__(self, connection: Connection, settings: Settings) -> None:
        from flashrecovery.torch_native import adapter_for

        self.connection = connection
        self.settings = settings
        self.rank = connection.rank
        self.gate = Gate(connection.page)
        self.gate.generation = connection.generation
        self.registry = Registry(self.rank, _world_size_env(), adapter_for)
        self.faults = Faults(self.notice)
        self.control = Control(
            connection.channel,
            self.gate,
            settings.timeouts,
            self.faults.arm,
            self._announce_checkpoint,
            self._keep_undo,
        )
        self.device = DeviceClock()
        self.copies: Copies | None = None
        self._recoverer: Recoverer | None = None
        self._written: Drawn | None = None  # what the capsule in the page says, of this step
        self._at_seal: Drawn | None = None  # the same at the end of the forward pass
        self._ops_at_mutation = 0
        self._failures_before = 0
        self._hook_fired = False
        self._explicit_barrier = False
        self._told_modules = False
        self._failing = False
        self.control.start()

    # -- the loop ---------------------------------------------------------------------------------

    def add_stream(self, stream: DataStream) -> None:
        """Raises RegistrationError after the first step: a replacement could not find its place in it."""
        if self._recoverer is not None:
            raise RegistrationError("recovery.data() after the first step; call it before, once for each data source")
        stream.before_fetch = self._at_data
        self.registry.streams.append(stream)

    def open(self, num_steps: int | None) -> None:
        """First step asked for: say what there is, and wait for the word to begin. ``num_steps``: None where the
        script's end is the end of the steps."""
        if self._recoverer is not None:
            raise JobFailedError("recovery.steps() can be run through only once in a process")
        self.registry.close()
        self._check_world()
        on_kept = self.connection.page.set_kept
        self.copies = Copies(self.registry, self.settings, self._checkpoint_published, self._checkpoint_failed, on_kept)
        self._explicit_barrier = self._needs_barrier(self.copies)
        self._recoverer = Recoverer(self)
        for adapter in self.registry.adapters:
            adapter.watch(TimedHooks(self, self.gate.overhead))
        if self.rank == 0 and not self.connection.detached:
            self.notice("redundancy", self.copies.describe())
        self._recoverer.join(num_steps)

    def finished(self, num_steps: int) -> bool:
        """True when all steps are committed on all ranks (waits for the others, and recovers if one of them fails)."""
        assert self._recoverer is not None
        while True:
            if self.gate.stopped:
                self.recover()
            elif self.gate.version < num_steps:
                return False
            elif self._recoverer.wait_for_release():
                self._close()
                return True

    def recover(self) -> None:
        """Carry out the controller's commands, outside a step, until the next resume."""
        assert self._recoverer is not None
        self._recoverer.run()

    def at_script_end(self, callback: Callable[[], None]) -> None:
        """Call it when the script has come to its end, not when it fails."""
        self.connection.at_script_end.append(callback)

    def leave_early(self) -> None:
        """The loop has been left, by ``break`` or by an exception (the generator cannot tell which).

        So nothing is waited for here: if every rank leaves, the job is through with its steps; if this process ends
        with its exception, it is a failure like any other.
        """
        assert self._recoverer is not None
        if not self._failing:
            self._recoverer.tell_done()
            atexit.register(self._close)

    def _close(self) -> None:
        if self.copies is not None:
            self.copies.close()

    def begin(self) -> None:
        """Tag i. A stop that comes just before is noticed in the body, at the latest at its commit."""
        self._written = self._at_seal = None
        self._hook_fired = False
        self._failures_before = groups.failure_count()
        self.faults.hit("between", self.gate.version)
        self.gate.begin()
        self.faults.begin_step(self.gate.version, self.registry.adapters)

    def end(self, error: BaseException | None) -> bool:
        """Commit, or recover. Returns True if ``error`` was only the sign of a stop."""
        if error is None:
            try:
                self._commit()
                return True
            except StepInterrupted:
                log.debug("step %d was stopped before its mutation", self.gate.version)
            except RuntimeError as e:  # a communication error of the copies; anything else is raised again
                if not self._is_stop(e):
                    self._failing = True
                    raise
        elif not self._is_stop(error):
            self._failing = True
            return False
        self._failing = True
        self.recover()
        self._failing = False
        return True

    def _is_stop(self, error: BaseException) -> bool:
        """Whether ``error`` is the consequence of a stop (or the first sign of one), and not the script's own."""
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            return False
        return self.gate.stopped or self._stop_follows(error)

    def _stop_follows(self, error: BaseException) -> bool:
        """A failed collective is mostly a dead peer's: the controller is about to say stop."""
        seen: BaseException | None = error
        while seen is not None and not groups.is_communication_error(seen):
            seen = seen.__cause__ or seen.__context__
        if seen is None:
            return False
        self.connection.channel.send(pb.FromWorker(suspect=pb.Suspect(error=str(seen))))
        return self._wait_for_stop()

    def _wait_for_stop(self) -> bool:
        """Whether the stop comes in time. The clock stands while nobody could say it: while the agent hears no
        controller, and while this process is halted with its whole node (which one long pause in here shows). It also
        stands once the controller has said hold: what it waits for until the stop has deadlines of its own."""
        left_s, last = self.settings.timeouts.peer_error_wait_s, time.monotonic()
        while not self.gate.stopped and left_s > 0:
            time.sleep(0.001)
            now = time.monotonic()
            if self.control.controller_heard and not self.gate.held:
                left_s -= min(now - last, _LONGEST_PAUSE_S)
            last = now
        return self.gate.stopped

    # -- StepHooks --------------------------------------------------------------------------------

    def sealed(self, *, recheck: bool = False) -> None:
        """Forward is over: publish the capsule of version i+1, and see that the copies of version i are complete."""
        assert self.copies is not None
        self.gate.check()
        self.gate.page.beat()
        self._hook_fired = True
        now = self._drawn()
        if recheck and now == self._at_seal:
            return
        self._at_seal = now
        if self.registry.habits.early_seal:
            self._seal(self.gate.version + 1, now)
        self.copies.wait()

    def mutating(self) -> None:
        """Before the first mutation of a step."""
        assert self.copies is not None
        if self.gate.mutating:
            return
        self.gate.overhead.aside(self.device.before_mutation)
        self._refuse_failed_collectives()
        self.gate.check()
        version = self.gate.version
        self.faults.hit("optimizer-start", version)
        seen_forward = self._hook_fired
        if not seen_forward:
            # The adapter has seen no forward pass: nothing yet says that every rank has come this far.
            self.sealed()
        if self.copies.capsules_only:
            self._send_capsule(version + 1)
        if not seen_forward or self._explicit_barrier:
            self._barrier()
        habits = self.registry.habits
        if habits.undo:
            self.copies.enable_undo()
        elif not habits.known:
            # The first step seals when it ends: whoever has left it could not go on with a rank that dies in it.
            self.copies.enable_undo(brief=True)
        else:
            self.copies.disable_undo()
        self.copies.before_mutation(version)
        self._ops_at_mutation = groups.operation_count()
        self.gate.mutate()

    def _send_capsule(self, version: int) -> None:
        """What is sealed goes to another node, before anybody can need it."""
        assert self.copies is not None
        final = self.registry.habits.early_seal
        now = self._drawn()
        if final and self._written != now:
            self._seal(version, now)
        self.copies.send_capsule(version, final=final)

    def mutated(self) -> None:
        """Kept for adapters: the optimizers are done; the commit follows at the end of the step."""

    def _seal(self, version: int, drawn: Drawn) -> None:
        self.registry.mark_data(version)
        data = self.registry.capture_capsule(drawn[0])
        self.registry.capsule.keep(version, data)
        self.gate.page.write_capsule(version, data)
        self._written = drawn

    def seal_start(self) -> None:
        """Version 0: what the script has set up."""
        self._seal(0, self._drawn())
        self.registry.common.keep(0, self.registry.capture_common())

    def _drawn(self) -> Drawn:
        """Changes whenever random numbers or data are drawn, or an adapter's part of the capsule changes."""
        registry = self.registry
        return RngState.now(), [s.position for s in registry.streams], [a.capsule_mark() for a in registry.adapters]

    def _needs_barrier(self, copies: Copies) -> bool:
        """Whether the gradient synchronisation is not enough before the first mutation. A collective.

        Who leaves it knows that all ranks have sealed, not that all can leave it: what the dead rank still had to send
        to one of them is lost. That rank then stays a version behind, which is harmless only if whoever is ahead has
        all of its shards, or can go back.
        """
        registry = self.registry
        everywhere = all(len(s.holders) == registry.world_size for s in registry.tensor_shards())
        apart = anywhere(not everywhere) and not copies.keeps_undo
        # Who passes it knows that every rank's capsule has arrived.
        apart = apart or copies.capsules_only
        return registry.world_size > 1 and (apart or not all(a.sync_spans_world() for a in registry.adapters))

    def _barrier(self) -> None:
        """Nobody passes it before all have come. If a peer dies in it and another rank has passed it, so may this one.

        Raises what says that the step is void.
        """
        group = groups.control_group()
        if group is None:
            return
        try:
            with self.gate.in_barrier():
                group.barrier().wait()
        except RuntimeError as e:
            if not self._is_stop(e):
                raise
            self.gate.check()

    def _commit(self) -> None:
        """Tag i+1: everything of version i+1 is in place."""
        assert self.copies is not None
        version = self.gate.version
        self.faults.hit("commit", version)
        self.gate.check()
        mutated = self.gate.mutating
        if not mutated:
            # Nothing in such a step says that all ranks have come this far, with the copies of its version.
            self._refuse_failed_collectives()
            self.copies.wait()
            self._barrier()
        now = self._drawn()
        if self._written != now:
            self._seal(version + 1, now)
        if mutated:
            self._learn(early=self._at_seal == now, quiet=groups.operation_count() == self._ops_at_mutation)
        self.registry.common.keep(version + 1, self.registry.capture_common())
        go_on = self.gate.commit()
        if not self._told_modules:
            self._tell_modules()
        if go_on:
            self.copies.save_checkpoint_if_due(self.gate.version, self.gate.generation)
            self.copies.start(self.gate.version)

    def _refuse_failed_collectives(self) -> None:
        """A step in which a collective failed is void, also if its body has swallowed the error."""
        if groups.failure_count() == self._failures_before or self.gate.stopped:
            return
        if not self._wait_for_stop():
            raise JobFailedError(
                f"a collective failed in step {self.gate.version}, and the step's body swallowed the error"
            )
        self.gate.check()

    def _learn(self, *, early: bool, quiet: bool) -> None:
        """What this step has shown: does it draw random numbers or data, or communicate, after its mutation began?

        Such steps cannot be completed from what peers hold, so from then on every rank keeps its own pre-step copy.
        """
        habits = self.registry.habits
        habits.early_seal = early and (habits.early_seal or not habits.known)
        habits.known = True
        if early and quiet:
            return
        what = "communicates" if early else "draws random numbers or data"
        if not habits.undo:
            habits.undo = True
            self.notice("undo_enabled", f"the step {what} late; an own pre-step copy is kept from now on")

    def _keep_undo(self) -> None:
        """From the control thread: another rank's steps need it."""
        self.registry.habits.undo = True

    # -- messages ---------------------------------------------------------------------------------

    def notice(self, kind: str, text: str, fault: pb.Fault | None = None) -> None:
        """Something that belongs into the events."""
        message = pb.Notice(rank=self.rank, kind=kind, text=text, fault=fault)
        self.connection.channel.send(pb.FromWorker(notice=message))

    def _announce_checkpoint(self, version: int) -> None:
        """From the control thread."""
        if self.copies is not None and self.copies.checkpoint is not None:
            self.copies.checkpoint.announce(version)

    def _checkpoint_published(self, saved: checkpoint.Published) -> None:
        message = pb.CheckpointSaved(
            version=saved.version, path=str(saved.path), seconds=saved.seconds, k0_s=saved.k0_s
        )
        self.connection.channel.send(pb.FromWorker(checkpoint=message))

    def _checkpoint_failed(self, error: BaseException) -> None:
        self.notice("checkpoint_failed", f"{type(error).__name__}: {error}")

    def _tell_modules(self) -> None:
        """What a standby should import: all that this process has loaded by the end of its first step."""
        self._told_modules = True
        names = [n for n, m in list(sys.modules.items()) if m is not None and not n.startswith("__")]
        self.connection.channel.send(pb.FromWorker(modules=pb.Modules(names=names)))

    def next_command(self) -> pb.Command:
        """Waits for the next command that the training thread has to carry out."""
        return self.control.inbox.get()

    def _at_data(self) -> None:
        self.gate.check()
        self.gate.page.beat()
        self.faults.hit("data", self.gate.version)

    def _check_world(self) -> None:
        """The process group must be the world that the launcher started. Raises JobFailedError."""
        if not dist.is_initialized():
            if self.registry.world_size > 1:
                raise JobFailedError(
                    f"WORLD_SIZE is {self.registry.world_size} but torch.distributed is not initialised; "
                    "call init_process_group() before recovery.steps()"
                )
            return
        if dist.get_rank() != self.rank or dist.get_world_size() != self.registry.world_size:
            raise JobFailedError(
                f"the process group says rank {dist.get_rank()} of {dist.get_world_size()}, the launcher rank "
                f"{self.rank} of {self.registry.world_size}; use init_process_group() with the launcher's environment"
            )


def _world_size_env() -> int:
    import os

    return int(os.environ.get("WORLD_SIZE", "1"))
