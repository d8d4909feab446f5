"""Hooks that must be in place when a module is imported, without importing it ourselves.

``torch.distributed`` gets the exchangeable process groups before the script can make the first one. A framework adapter
registers an entry point in the group ``flashrecovery.import_hooks``: its name is the module to wait for, its value a
function that is called with the module once it has been imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from flashrecovery.util.import_hooks import install
from flashrecovery.worker.data.loader_iterations import ITERATIONS
from flashrecovery.worker.startup.above import Train

ENTRY_POINTS = "flashrecovery.import_hooks"


def install_adapter_hooks() -> None:
    """Install the framework adapters' import hooks. A standby does it before it imports anything: a module that has
    taken a function by its name from a framework keeps the function that was there.

    The adapters are imported here, and torch with them. Later would be in the middle of the script's imports: of the
    framework's own, or of ours."""
    install({entry.name: entry.load() for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)})


def install_group_hook(detached: bool, setup_log: bytes | None) -> None:
    """Exchangeable process groups, ``detached`` in a replacement, with what its predecessor's set-up had received."""

    def with_groups(_: ModuleType) -> None:
        from flashrecovery import groups

        groups.install()
        groups.set_detached(detached)
        if setup_log is not None:
            groups.replay_setup_log(setup_log)
        elif not detached:
            groups.start_setup_log()

    install({"torch.distributed.distributed_c10d": with_groups})


def install_spawn_hook() -> None:
    """``torch.multiprocessing.spawn`` starts its own ranks, which would wait for one another in the ranks' store."""

    def refused(function: object, *_args: object, **_options: object) -> None:
        from flashrecovery.errors import UnsupportedError

        name = getattr(function, "__qualname__", repr(function))
        raise UnsupportedError(
            f"torch.multiprocessing.spawn({name}) under `flashrecovery run`, which starts one process for each rank "
            f"itself, as torchrun does: call {name} directly, with int(os.environ['LOCAL_RANK']), and start as many "
            "ranks with --nproc-per-node; for processes that are no ranks: multiprocessing.get_context('spawn').Process"
        )

    def replace(module: ModuleType) -> None:
        for owner in (module, sys.modules.get("torch.multiprocessing")):
            for name in ("spawn", "start_processes"):
                if callable(getattr(owner, name, None)):
                    setattr(owner, name, refused)

    install({"torch.multiprocessing.spawn": replace})


def install_loader_hook() -> None:
    """Each iteration over a data loader is counted, and has new workers, with ``persistent_workers=True``, too.

    Workers draw a seed from the process's random numbers when they begin. Those that live on begin once: in a
    replacement later than in the process before it, or in an attempt that does not count, and all that is drawn
    afterwards would be other numbers. A worker's own random numbers could not be brought back either."""
    install({"torch.utils.data.dataloader": count_and_renew_workers})


def count_and_renew_workers(module: ModuleType) -> None:
    """What :func:`install_loader_hook` does to torch's module of data loaders."""
    own = module.DataLoader.__iter__

    @functools.wraps(own)
    def with_new_workers(loader: Any) -> Any:
        ITERATIONS.count()
        if loader.persistent_workers:
            loader._iterator = None
        return own(loader)

    module.DataLoader.__iter__ = with_new_workers


def install_save_hooks() -> None:
    """The script's saves and object collectives ask whether the attempt of the step counts
    (:mod:`flashrecovery.worker.step.post_step_code`)."""
    from flashrecovery.worker.step import post_step_code

    post_step_code.install_hooks()


def install_trainer_hook(protected_train: Callable[[Any, Train], Train]) -> None:
    """A Hugging Face Trainer whose DeepSpeed config enables recovery is protected when it begins to train.

    ``protected_train``: see :class:`.above.Above`."""

    install({"transformers.trainer": functools.partial(_protect, method="train", protected=protected_train)})


def _protect(module: ModuleType, *, method: str, protected: Callable[[Any, Train], Train]) -> None:
    """Have ``method`` of the module's Trainer do what ``protected`` makes of it."""
    own = getattr(module.Trainer, method)

    @functools.wraps(own)
    def call(trainer: object, *args: Any, **kwargs: Any) -> Any:
        return protected(trainer, functools.partial(own, trainer))(*args, **kwargs)

    setattr(module.Trainer, method, call)


def install_lightning_hook(protected_fit: Callable[[Any, Train], Train]) -> None:
    """Lightning's own Trainer is protected by ``--auto``, and without it refused: it would train unprotected.

    ``protected_fit``: see :class:`.above.Above`."""

    protect = functools.partial(_protect, method="fit", protected=protected_fit)

    def refused(*_arguments: object, **_more: object) -> None:
        from flashrecovery.errors import UnsupportedError

        raise UnsupportedError(
            "the Trainer of the package pytorch_lightning under `flashrecovery run`: its loop is not protected, and a "
            "rank that dies would take the job with it. Import it from lightning.pytorch, which is protected by --auto "
            "(docs/lightning.md), or start the script with torchrun"
        )

    def refuse(module: ModuleType) -> None:
        module.Trainer.fit = refused

    install({"lightning.pytorch.trainer.trainer": protect, "pytorch_lightning.trainer.trainer": refuse})
