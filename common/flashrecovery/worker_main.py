"""``python -m flashrecovery.worker_main``: the program of a training process.

The process is started by :mod:`flashrecovery.worker.startup.bootstrap`. What a script may come to lies above that, and
is handed to it here; it is imported when the script does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashrecovery.worker.startup import bootstrap
from flashrecovery.worker.startup.above import Above

if TYPE_CHECKING:
    from flashrecovery.worker.recovery import Recovery


def _init() -> Recovery:
    from flashrecovery import init

    return init()


def _protected_train(trainer: Any, train: Callable[..., Any]) -> Callable[..., Any]:
    from flashrecovery.trainer import protected_train

    return protected_train(trainer, train)


def _protected_fit(trainer: Any, fit: Callable[..., Any]) -> Callable[..., Any]:
    from flashrecovery.trainer.lightning_fit import protected_fit

    return protected_fit(trainer, fit)


if __name__ == "__main__":
    bootstrap.main(Above(init=_init, protected_train=_protected_train, protected_fit=_protected_fit))
