"""``--auto``: a plain PyTorch script without a line of recovery in it.

Its loops are led back (:mod:`.loops`), and what it trains and keeps is found (:mod:`.found`) and registered at its
first step, from which it is told in a table. What cannot be protected is refused there, by name.
"""

from __future__ import annotations

import importlib
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
from flashrecovery.worker.own_loops.loops import LOOPS
from flashrecovery.worker.own_loops.rewrite import Makes
from flashrecovery.worker.recovery import Recovery
from flashrecovery.worker.script_text.script_frames import place_of

BY_HAND = (
    "write the lines by hand: recovery = flashrecovery.init(); recovery.register(model=model, optimizer=optimizer); "
    "for step in recovery.steps(total): with step: (one optimizer step, with its data from recovery.data(loader)); "
    "see docs/tutorial.md"
)


def _init() -> Recovery:
    """``flashrecovery.init()``, by its name: it lies above what starts a process, and so above this."""
    recovery: Recovery = importlib.import_module("flashrecovery").init()
    return recovery


class AutoSteps:
    """Steps of torch's optimizers: each round of the loop that calls one ends a step."""

    by_hand = BY_HAND
    before_step: Callable[[], None] | None = None

    def __init__(self) -> None:
        self._recovery: Recovery | None = None
        self._found = Found()
        self.first_step_begins: Callable[[], None] | None = None
        self.made_elsewhere: Callable[[bytes, str], Makes] | None = None
        """Which functions that a file imports from the script's own modules make the calls of a step."""

    def is_whole(self) -> bool:
        return True

    def begin(self) -> None:
        """The script comes to the first of its loops that are led back."""
        if self._recovery is None:
            self._recovery = _init()
            if self._recovery.enabled and not self._recovery.takes_steps:
                self._recovery.protect_own_loops(self)

    def prepare(self, frame: types.FrameType, *, last: bool) -> None:
        """Register what there is. Raises UnsupportedError with file and line."""
        try:
            found = find(frame, self._registered).without(self._found)
            if last:
                if self.first_step_begins is not None:
                    self.first_step_begins()
                self._check(found)
            if last and prints_patch(os.environ):
                print_patch(self._found + found, self.made_elsewhere)
            self._register(found)
        except (RegistrationError, UnsupportedError) as e:
            raise UnsupportedError(f"--auto, {frame.f_code.co_filename}:{frame.f_lineno}: {e}; {BY_HAND}") from e
        self._found += found
        if last and self._is_first():
            say(table(self._found, place_of(frame, frame.f_lineno), LOOPS.described()))

    @property
    def _registered(self) -> Sequence[object]:
        assert self._recovery is not None
        return self._recovery.registered

    def _is_first(self) -> bool:
        assert self._recovery is not None
        return self._recovery.first_launch and (not dist.is_initialized() or dist.get_rank() == 0)

    def _check(self, found: Found) -> None:
        assert self._recovery is not None
        if found.models and LOOPS.loops_around_step():
            raise UnsupportedError(
                f"{', '.join(model.path for model in found.models)}: made in the loop at {LOOPS.loops_around_step()}, "
                "anew in each of its rounds; make what is trained above it"
            )
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if alone and not self._recovery.has_checkpoints:
            raise UnsupportedError(
                "there is one process, so that nothing of its state is replicated: start two or more "
                "(--nproc-per-node 2, with DistributedDataParallel or fully_shard), or give --checkpoint-dir"
            )
        if not found.models and not any(hasattr(one, "parameters") for one in self._registered):
            raise UnsupportedError("no model with an optimizer is found among the variables of the running functions")

    def _register(self, found: Found) -> None:
        assert self._recovery is not None
        accelerators = {name: one for name, one in found.objects.items() if type(one).__name__ == "Accelerator"}
        for number, model in enumerate(found.models):
            more = accelerators if number == 0 else {}
            self._recovery.register(model=model.module, optimizer=list(model.optimizers.values()), **more)
        rest = {name: one for name, one in found.objects.items() if name not in accelerators}
        if rest:
            self._recovery.register(**rest)

    def check_step(self, frame: types.FrameType, optimizer: Optimizer) -> None:
        """``optimizer`` steps, called from ``frame``. Raises UnsupportedError if that is before the first protected
        step, and in no loop that is led back."""
        recovery = _init()
        if not recovery.takes_steps and recovery.version < 0:
            refuse_closures("the optimizer", optimizer)
            LOOPS.refuse_call(frame, BY_HAND)


AUTO = AutoSteps()
