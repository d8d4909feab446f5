"""Where a script has called something from, by the frames of the training process."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Set
from pathlib import Path
from types import FrameType

from flashrecovery.worker.preimport.preimport import Installed

TRACKERS = frozenset({"aim", "clearml", "comet_ml", "mlflow", "neptune", "swanlab", "tensorboard", "tensorboardX"})
TRACKER_MODULES = (
    *("wandb", "trackio", "torch.utils.tensorboard"),
    *("transformers.training_args", "transformers.integrations.integration_utils"),
)
"""Installed packages that draw the ids of runs, and name folders by the time, in the script's place."""
_STDLIB = os.path.dirname(os.path.realpath(os.__file__)) + os.sep
_FRAMES = 6


@functools.lru_cache(maxsize=64)
def text_of(file: str) -> ast.Module | None:
    """The text of a script's file; None for a notebook's cell, or code that was made by a program."""
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


class CallSites:
    """Tells the script's own files from those that are installed."""

    def __init__(self, installed: Installed) -> None:
        self._installed = installed
        self._of_python: dict[str, bool] = {}

    def caller(self, frame: FrameType | None) -> FrameType | None:
        """The first frame from here outwards that is none of Python's own modules."""
        while frame is not None and self._is_python(frame.f_code.co_filename):
            frame = frame.f_back
        return frame

    def own(self, frame: FrameType | None) -> FrameType | None:
        """The caller, if it is in one of the script's own files."""
        caller = self.caller(frame)
        if caller is None or self._installed.has_file(caller.f_code.co_filename):
            return None
        return caller

    def naming(self, frame: FrameType | None, through: Set[str]) -> FrameType | None:
        """The file that called through these modules of Python, if it is one of the script's own files, or a tracker
        of experiments."""
        caller = frame
        while caller is not None and str(caller.f_globals.get("__name__")) in through:
            caller = caller.f_back
        if caller is None or self._is_python(caller.f_code.co_filename):
            return None
        if not self._installed.has_file(caller.f_code.co_filename):
            return caller
        module = str(caller.f_globals.get("__name__", ""))
        tracks = module.partition(".")[0] in TRACKERS or module.startswith(TRACKER_MODULES)
        return caller if tracks else None

    def is_own(self, caller: FrameType) -> bool:
        """Whether it is in one of the script's own files."""
        return not self._installed.has_file(caller.f_code.co_filename)

    def key(self, caller: FrameType) -> str:
        """The lines that have led to this call: the caller's, and the script's own outside of it."""
        lines = [f"{caller.f_code.co_filename}:{caller.f_lineno}"]
        frame = caller.f_back
        while frame is not None and len(lines) < _FRAMES:
            if not self._installed.has_file(frame.f_code.co_filename):
                lines.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
            frame = frame.f_back
        return "<".join(lines)

    def _is_python(self, file: str) -> bool:
        known = self._of_python.get(file)
        if known is None:
            packages = "site-packages" in file or "dist-packages" in file
            known = file.startswith("<") or (os.path.realpath(file).startswith(_STDLIB) and not packages)
            self._of_python[file] = known
        return known
