"""Where ``train()`` begins: at the first step, or at a checkpoint of the Trainer's own (``resume_from_checkpoint``).

A replacement runs ``train()`` again, when that checkpoint may have been deleted (``save_total_limit``), and another one
be the newest. So the first process of a rank notes where it begins, for its replacements: they go round the loop from
there, and read nothing of the checkpoint but what is noted, since model, optimizer and random streams are restored.

The Trainer sets the random streams again when it has fetched the first step's batches, which it trains on
afterwards. In a protected call both are one, so the call does it in between.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from flashrecovery.capabilities.of_trainer import RESUMING
from flashrecovery.errors import RegistrationError, UnsupportedError
from flashrecovery.trainer.data import WatchedLoader
from flashrecovery.worker.recovery import Recovery

_NAME = "the Trainer's start"
_STATE = "trainer_state.json"
_LOADS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler")


class Start:
    """The start of one ``train()`` of ``trainer``. ``resumes``: what the script has passed.

    Raises:
        UnsupportedError: the installed Trainer resumes in a way that is not known; or the job itself is resumed.
    """

    def __init__(self, trainer: Any, recovery: Recovery, resumes: str | bool | None) -> None:
        self._trainer = trainer
        self._is_replacement = recovery.is_replacement
        self._noted_state: str | None = None
        self._folder: str | None = None
        self.path = self._found(recovery, resumes)
        self.step = 0 if self._noted_state is None else int(json.loads(self._noted_state)["global_step"])
        """The Trainer's number of the first step is the next one."""
        self._random_state: Callable[[str], None] = trainer._load_rng_state
        self._amid_epoch = False
        if self.path is not None:
            trainer._load_rng_state = self._load_random_state
            if self._is_replacement:
                for name in _LOADS:
                    setattr(trainer, name, _nothing)

    def _found(self, recovery: Recovery, resumes: str | bool | None) -> str | None:
        """The checkpoint; in a replacement, the one with which its rank began."""
        if not self._is_replacement and not recovery.first_launch and resumes:
            raise UnsupportedError(
                f"resume_from_checkpoint = {resumes!r} in a job that is resumed by itself (--resume): which of the two "
                "is to go on is not known; leave one of them out"
            )
        text = recovery.noted(_NAME, lambda: json.dumps(_noted(self._trainer, resumes)))
        if text is None and resumes:
            raise UnsupportedError(
                f"resume_from_checkpoint = {resumes!r} in a replacement: what its rank began with is not known any more"
            )
        path, self._noted_state = (None, None) if text is None else json.loads(text)
        if path is not None and (missing := RESUMING.missing()):
            raise UnsupportedError(
                f"resume_from_checkpoint = {path!r}: this version of the Trainer does not resume in the way that is "
                f"known to recovery ({'; '.join(missing)})"
            )
        return None if path is None else str(path)

    @contextlib.contextmanager
    def begun(self) -> Iterator[str | None]:
        """While the Trainer trains. Gives what is to be passed to it."""
        if self.path is None:
            yield None
            return
        names = {"skip_first_batches": self._skipping}
        if self._is_replacement:
            names["deepspeed_load_checkpoint"] = lambda: _nothing
        module = importlib.import_module("transformers.trainer")
        before = {name: getattr(module, name) for name in names}
        for name, made in names.items():
            setattr(module, name, made())
        try:
            yield self._noted_folder() if self._is_replacement else self.path
        finally:
            self.is_known()
            for name, value in before.items():
                setattr(module, name, value)

    def _noted_folder(self) -> str:
        """With the state that was noted, and nothing else."""
        self._folder = tempfile.mkdtemp(prefix="flashrecovery-")
        with open(os.path.join(self._folder, _STATE), "w") as file:
            file.write(self._noted_state or "{}")
        return self._folder

    def is_known(self) -> None:
        """The loop is about to begin: the Trainer has read it. Idempotent."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _skipping(self) -> Callable[..., Any]:
        """accelerate's function; the stream of the Trainer's batches begins amid an epoch."""
        from accelerate import skip_first_batches

        def skip(loader: Any, num_batches: int = 0) -> Any:
            if not isinstance(loader, WatchedLoader):
                return skip_first_batches(loader, num_batches)
            self._amid_epoch = True
            return loader.begin_behind(skip_first_batches(loader.loader, num_batches), num_batches)

        return skip

    def _load_random_state(self, checkpoint: str | None) -> None:
        """In the Trainer's loop. Amid an epoch the first call does it."""
        if not self._amid_epoch and not self._is_replacement:
            self._random_state(self.path or "")

    def check(self, *, restored: bool) -> None:
        """Before a call is made. Raises RegistrationError if there is no state to go on with: a replacement has read
        none from the checkpoint, and has got none."""
        if self._is_replacement and self.path is not None and not restored:
            raise RegistrationError(f"this process has not read {self.path}, and no other rank has given it the state")

    def random_state(self) -> None:
        """In the first call, when its batches have been fetched."""
        if self._amid_epoch:
            self._random_state(self.path or "")


def _noted(trainer: Any, resumes: str | bool | None) -> tuple[str | None, str | None]:
    """The checkpoint, and its state without the history, which is restored."""
    from transformers.trainer_utils import get_last_checkpoint

    path = get_last_checkpoint(trainer.args.output_dir) if resumes is True else resumes or None
    if resumes is True and path is None:
        raise ValueError(f"No valid checkpoint found in output directory ({trainer.args.output_dir})")
    if path is None:
        return None, None
    with open(os.path.join(path, _STATE)) as file:
        state = json.load(file)
    return os.path.abspath(path), json.dumps({**state, "log_history": []})


def _nothing(*_: object, **__: object) -> None:
    """In the place of what reads a checkpoint: what it would read is restored."""
