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

    def count_abandonment(self, reason: str) -> None:
        """Communication is abandoned once more."""
        self.abandonments += 1
        self.reason = reason

    def keep_to(self, order: Any) -> None:
        """From now on every abandonment keeps to this exchange.AbortOrder."""
        self.abort_order = order

    def clear_abandonments(self) -> None:
        """Every group is detached: those so far are dealt with."""
        self.cleared = self.abandonments

    def begin_attach(self, stores: Any) -> None:
        """A generation is being attached, over these stores."""
        self.attaching = stores
        self.changed.clear()

    def end_attach(self) -> None:
        """It is attached, or has failed."""
        self.attaching = None

    def spread_over(self, stores: Any | None) -> None:
        """The groups that there are find each other in these."""
        self.spread = stores

    def set_detached(self, on: bool) -> None:
        """Whether groups made from now on stand alone."""
        self.detached = on

    def want_control_group(self, wanted: bool) -> None:
        """Whether a group over all ranks is made together with the default group."""
        self.control_wanted = wanted

    def group_made(self, name: str, size: int) -> None:
        """One more of this name; the first one is the default group."""
        self.world = max(self.world, size)
        self.made[name] += 1

    def resized(self, members: tuple[int, ...], me: int, shape: Any) -> None:
        """The job consists of these ranks."""
        self.members, self.me, self.shape = members, me, shape

    def want_log_start(self, wanted: bool) -> None:
        """Whether the set-up log begins as soon as the extension is loaded."""
        self.log_start_wanted = wanted

    def want_log_replay(self, log: bytes) -> None:
        """From what the extension answers as soon as it is loaded."""
        self.log_replay_wanted = log

    def take_log_wishes(self) -> tuple[bool, bytes | None]:
        """Both, once."""
        wishes = self.log_start_wanted, self.log_replay_wanted
        self.log_start_wanted, self.log_replay_wanted = False, None
        return wishes


STATE = GroupsState()
