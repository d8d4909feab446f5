"""What becomes of a change of the parallel layout, when all ranks are stopped (:mod:`..relayout.next_step` decides)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from flashrecovery.controller.state.saved_state import SavedState


@dataclass(frozen=True)
class KeepLayout:
    """The layout does not change now. ``given_up``: why it never will, though it was commanded; "": it may, later."""

    given_up: str = ""


@dataclass(frozen=True)
class StartLayout:
    """All ranks start in the next layout, with this. ``once_more``: they had started in it, or in the one before."""

    kept: SavedState
    once_more: bool = False


@dataclass(frozen=True)
class WriteState:
    """The state of this version is written into the staging area; then the next layout starts."""

    version: int


@dataclass(frozen=True)
class CannotChange:
    """The job fails."""

    why: str


RelayoutStep: TypeAlias = KeepLayout | StartLayout | WriteState | CannotChange
