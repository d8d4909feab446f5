"""What lies above the start of a training process, and is called from there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashrecovery.worker.recovery import Recovery

Train = Callable[..., Any]


@dataclass(frozen=True)
class Above:
    """Each function imports what it needs, so that a script that does not come to it imports nothing.

    Attributes:
        init: ``flashrecovery.init()``.
        protected_train: of a Trainer and its class's ``train``, bound to it: what is to be called in the place of that.
        protected_fit: likewise of Lightning's Trainer and ``fit``.
    """

    init: Callable[[], Recovery]
    protected_train: Callable[[Any, Train], Train]
    protected_fit: Callable[[Any, Train], Train]
