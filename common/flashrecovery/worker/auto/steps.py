"""``--auto``: a plain PyTorch script without a line of recovery in it.

Its loops are led back (:mod:`.loops`), and what it trains and keeps is found (:mod:`.found`) and registered at its
first step, and a table of it is printed there. State that cannot be protected is refused, by name.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.optim import Optimizer

from flashrecovery.config import prints_patch
from flashrecovery.errors import RegistrationError, UnsupportedError
from flashrecovery.terminal import say
from flashrecovery.worker.auto.found import Found, find, refuse_closures
from flashrecovery.worker.auto.printed import print_patch
from flashrecovery.worker.auto.report import table
from flashrecovery.worker.data import accelerate
from flashrecovery.worker.own_loops.loops import LOOPS
from flashrecovery.worker.own_loops.rewrite import Makes
from flashrecovery.worker.recovery import Recovery
from flashrecovery.worker.script_checks.unprotected_steps import is_made_by_step
from flashrecovery.worker.script_text.script_frames import place_of

BY_HAND = (
    "write the lines by hand: recovery = flashrecovery.init(); recovery.register(model=model, optimizer=optimizer); "
    "for step in recovery.steps(total): with step: (one optimizer step, with its data from recovery.data(loader)); "
    "see docs/tutorial.md"
)


MadeElsewhere = Callable[[bytes, str], Makes]


class AutoProtection:
    """The protection of one process.

    Args:
        init: ``flashrecovery.init()``.
        first_step_begins: called before the first protected step.
        made_elsewhere: which functions that a file (its text and name) imports from the script's own modules make the
            calls of a step.
    """

    def __init__(
        self, init: Callable[[], Recovery], first_step_begins: Callable[[], None], made_elsewhere: MadeElsewhere
    ) -> None:
        self._init = init
        self._of_steps = (first_step_begins, made_elsewhere)
        self._begun = False

    def begin(self) -> None:
        """The script has reached its first protected loop."""
        if self._begun:
            return
        self._begun, recovery = True, self._init()
        if recovery.enabled and not recovery.takes_steps:
            recovery.protect_own_loops(AutoSteps(recovery, *self._of_steps))

    def check_step(self, frame: types.FrameType, optimizer: Optimizer) -> None:
        """``optimizer`` steps, called from ``frame``. Raises UnsupportedError if that is before the first protected
        step, and in no loop that is led back."""
        if is_made_by_step():
            return  # the script reads a checkpoint
        recovery = self._init()
        if not recovery.takes_steps and recovery.version < 0:
            refuse_closures("the optimizer", optimizer)
            LOOPS.refuse_call(frame, BY_HAND)


class AutoSteps:
    """Steps of torch's optimizers: each round of the loop that calls one ends a step. Args: see
    :class:`AutoProtection`."""

    by_hand = BY_HAND

    def __init__(
        self, recovery: Recovery, first_step_begins: Callable[[], None], made_elsewhere: MadeElsewhere
    ) -> None:
        self._recovery = recovery
        self._found = Found()
        self._by_accelerate = False
        self._first_step_begins = first_step_begins
        self._made_elsewhere = made_elsewhere

    def check_first(self, check: Callable[[], None]) -> None:
        """A step outside of the loops is refused before the first protected one: :meth:`AutoProtection.check_step`."""

    def is_whole(self) -> bool:
        """accelerate leaves out the optimizer's step in all rounds of an accumulation but the last."""
        return not (self._by_accelerate and accelerate.is_accumulating())

    def prepare(self, frame: types.FrameType, *, last: bool) -> None:
        """Register what there is. Raises UnsupportedError with file and line."""
        try:
            found = find(frame, self._registered).without(self._found)
            if last:
                self._first_step_begins()
                self._check(found)
            if last and prints_patch(os.environ):
                print_patch(self._found + found, self._made_elsewhere)
            self._register(found)
        except (RegistrationError, UnsupportedError) as e:
            raise UnsupportedError(f"--auto, {frame.f_code.co_filename}:{frame.f_lineno}: {e}; {BY_HAND}") from e
        self._found += found
        optimizers = [one for model in self._found.models for one in model.optimizers.values()]
        self._by_accelerate = any(map(accelerate.drives, optimizers))
        if last and self._is_first():
            say(table(self._found, place_of(frame, frame.f_lineno), LOOPS.described()))

    @property
    def _registered(self) -> Sequence[object]:
        return self._recovery.registered

    def _is_first(self) -> bool:
        return self._recovery.first_launch and (not dist.is_initialized() or dist.get_rank() == 0)

    def _check(self, found: Found) -> None:
        if found.models and LOOPS.loops_around_step():
            raise UnsupportedError(
                f"{', '.join(model.path for model in found.models)}: made in the loop at {LOOPS.loops_around_step()}, "
                "again in each of its rounds; create the trained objects above it"
            )
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if alone and not self._recovery.has_checkpoints:
            several = int(os.environ.get("WORLD_SIZE", "1"))
            if several > 1 and not dist.is_initialized():
                raise UnsupportedError(
                    f"the script has not called init_process_group(): each of the {several} processes trains alone, so "
                    "that nothing of its state is replicated; make the process group, and use DistributedDataParallel "
                    "or fully_shard"
                )
            raise UnsupportedError(
                "there is one process, so that nothing of its state is replicated: start two or more "
                "(--nproc-per-node 2, with DistributedDataParallel or fully_shard), or give --checkpoint-dir"
            )
        if not found.models and not any(hasattr(one, "parameters") for one in self._registered):
            raise UnsupportedError("no model with an optimizer is found among the variables of the running functions")

    def _register(self, found: Found) -> None:
        accelerators = {name: one for name, one in found.objects.items() if type(one).__name__ == "Accelerator"}
        for number, model in enumerate(found.models):
            more = accelerators if number == 0 else {}
            self._recovery.register(model=model.module, optimizer=list(model.optimizers.values()), **more)
        rest = {name: one for name, one in found.objects.items() if name not in accelerators}
        if rest:
            self._recovery.register(**rest)
