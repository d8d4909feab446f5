"""Which environment variables a script changes, up to the end of its first step.

A process that imports ahead of its script (:mod:`.preimport_script`) must not import a module that reads such a
variable: it is unknown whether the script sets it before or after that import. Variables set by libraries do not count:
the libraries set them wherever they are imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from types import FrameType
from typing import Any

from flashrecovery.worker.preimport.preimport import Installed

_BETWEEN = frozenset(function.__code__.co_filename for function in (type(os.environ).setdefault, MutableMapping.update))
"""Files whose functions stand between what changes the environment and the change."""


class EnvironmentWatch:
    """``changed``: variables, and what they were set to last; None: removed."""

    def __init__(self, installed: Installed) -> None:
        self._installed = installed
        self.changed: dict[str, str | None] = {}
        self._restore: Callable[[], None] = lambda: None

    def start(self) -> None:
        """From now on, until :meth:`stop`."""
        kind: Any = type(os.environ)
        set_before, delete_before, watch = kind.__setitem__, kind.__delitem__, self

        def set_item(self: Mapping[str, str], key: str, value: str) -> None:
            set_before(self, key, value)
            watch._note(self, key, value, sys._getframe(1))

        def delete_item(self: Mapping[str, str], key: str) -> None:
            delete_before(self, key)
            watch._note(self, key, None, sys._getframe(1))

        def restore() -> None:
            kind.__setitem__, kind.__delitem__ = set_before, delete_before

        kind.__setitem__, kind.__delitem__ = set_item, delete_item
        self._restore = restore

    def stop(self) -> None:
        """Nothing is noted any more. Idempotent."""
        self._restore()

    def _note(self, where: object, key: str, value: str | None, frame: FrameType | None) -> None:
        if where is not os.environ:
            return
        while frame is not None and frame.f_code.co_filename in _BETWEEN:
            frame = frame.f_back
        if frame is not None and not self._installed.has_file(frame.f_code.co_filename):
            self.changed[key] = value
