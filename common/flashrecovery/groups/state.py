"""What the functions of this package share within a process."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class GroupsState:
    """What the functions of this package share. ``lock`` guards all of it; never held while anything blocks."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    detached: bool = False
    groups: list[Any] = field(default_factory=list)  # registry.ManagedGroup, in creation order
    stores: list[Any] = field(default_factory=list)  # ours, around the default group's store
    abandonments: int = 0  # calls of abandon()
    reason: str = ""  # of the last one
    abandoning: threading.RLock = field(default_factory=threading.RLock)  # held by abandon() from the count to its end
    cleared: int = 0  # the calls that detach_all() has dealt with
    attaching: Any | None = None  # stores.StoresInUse of the generation that is being attached
    spread: Any | None = None  # ... of the groups that there are; None as long as those of the start have one store
    world: int = 0  # ranks of the default group
    members: tuple[int, ...] = ()  # ranks, as launched, of a job that has changed its size; () before
    me: int = 0  # of these
    shape: Any | None = None  # plan.replicas.ReplicaShape, of the launch of such a job
    made: Counter[str] = field(default_factory=Counter)  # groups made so far, by name
    changed: threading.Event = field(default_factory=threading.Event)
    log_start_wanted: bool = False
    log_replay_wanted: bytes | None = None
    control_wanted: bool = False
    abort_order: Any | None = None  # exchange.AbortOrder


STATE = GroupsState()
