"""Mends taken out, to see how long the search takes to notice. Nothing of the product is changed for good."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import Parameter, signature
from types import FunctionType, MappingProxyType
from typing import Any
from unittest.mock import patch

from flashrecovery.agent.agent import Agent
from flashrecovery.agent.controller_link import controller_watch, session
from flashrecovery.agent.controller_link.lease import ControllerLease
from flashrecovery.controller import recovery
from flashrecovery.controller.machine import Machine
from flashrecovery.controller.recovery import RecoverySteps
from flashrecovery.controller.service.elector_set import ElectorSet
from flashrecovery.controller.state import restore_plan
from flashrecovery.controller.state.outbox import Outbox
from flashrecovery.plan.membership.liveness import Liveness
from flashrecovery.plan.membership.membership import Reach
from flashrecovery.rpc import handshake
from flashrecovery.runtime.page import _COMMITTED, _GENERATION, Page
from flashrecovery.util.clock import lease_clock
from flashrecovery.worker.control.gate import Gate
from flashrecovery.worker.local_state.step_profile import StepProfile
from tests.simulation import content
from tests.simulation.content import Own
from tests.simulation.worker import Drawn, ModelWorker


def instead(owner: Any, name: str, stand_in: Any) -> Any:
    """``stand_in`` in the place of ``owner``'s function, which may be called in the same ways: else what is noticed
    would be that it cannot be called.

    Raises TypeError: it may not, because the function's parameters have changed.
    """
    was = getattr(owner, name)
    if isinstance(was, FunctionType) and _parameters(was) != _parameters(stand_in):
        raise TypeError(f"{name}{signature(was)}: the stand-in takes {signature(stand_in)}")
    return patch.object(owner, name, stand_in)


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, bool]]:
    """What matters to a caller; the names only of those that may be given by name alone."""
    found = signature(function).parameters.values()
    named = [p.name if p.kind is Parameter.KEYWORD_ONLY or p.default is not Parameter.empty else "" for p in found]
    return [(name, p.kind, p.default is Parameter.empty) for name, p in zip(named, found, strict=True)]


def _hold(self: Gate, generation: int) -> tuple[bool, bool, int]:
    """Does not remember by which generation: an older resume clears it."""
    self._held = True
    return self._stepping or self._done, self._mutating, self.version


def _resume_next(send: Callable[..., Any]) -> Callable[..., Any]:
    def sent(self: RecoverySteps, version: int, now: float) -> Any:
        return send(self, version + 1 if self._job.recovery is not None else version, now)

    return sent


def _lost_at_once(is_lost: Callable[..., bool]) -> Callable[..., bool]:
    """A failure that comes to a controller which is still looking for the job's ranks is one of the start."""

    def lost(self: Machine, message: Any, now: float, node: str) -> bool:
        launched, self.job.launched = self.job.launched, True
        try:
            return is_lost(self, message, now, node)
        finally:
            self.job.launched = launched

    return lost


def _one_by_one(expired: Callable[..., Any]) -> Callable[..., Any]:
    """Of those that miss a deadline only the first is a victim; the others get the time again."""

    def first(self: Outbox, now: float) -> Any:
        found = expired(self, now)
        return found[:1] if isinstance(found, list) else found

    return first


async def _raised(self: ElectorSet, promised: int, ask: object) -> bool:
    """Takes the term that an agent has promised to someone, without asking for it."""
    self._quorum.renewed(promised)
    return True


def _arrived(self: ElectorSet, node: str, sent_at: float) -> None:
    """Whatever arrives counts as sent and heard now."""
    record = self._job.nodes.get(node)
    if record is not None and record.alive:
        self._echoed[node, record.incarnation] = lease_clock()


def _believes(judge: Callable[..., Any]) -> Callable[..., Any]:
    """A broken connection, and a refusal, is proof."""

    def judged(self: Liveness, name: str, last: Any, asked_at: float, now: float) -> Any:
        if not last.connected:
            last.heard_at = min(last.heard_at, now - self._limits.node_silence_s)
        return judge(self, name, last, asked_at, now)

    return judged


def _with_ranks(neighbours: Callable[[Agent], list[str]]) -> Callable[[Agent], list[str]]:
    """Those only that have ranks themselves."""
    return lambda self: [peer for peer in neighbours(self) if peer not in self._table.others]


def _any_door(seen: object, electors: object, node: str) -> Reach:
    """Any process that is refused takes the controller for dead, and asks no one."""
    return Reach(enough=True, vouched=False)


def _any_time(self: ControllerLease) -> float:
    """Any process that finds the door open after a standstill goes on."""
    return lease_clock()


def _frozen(which: int) -> int:
    """No time passes for a host that is suspended."""
    return time.monotonic_ns()


def _proof_with_key(proof: Callable[[bytes, bytes], bytes]) -> Callable[[bytes, bytes], bytes]:
    """Both sides show what they know by sending it."""
    return lambda key, transcript: key + proof(key, transcript)


def _drawn(self: ModelWorker) -> Drawn:
    """Whether something has changed is seen by random numbers and data only."""
    return Own(self.now.own.random, self.now.own.position, 0), 0


def _committed_first(self: Page) -> tuple[int, int]:
    """The generation is read after the version, so it may be newer."""
    committed = self._words[_COMMITTED]
    return self._words[_GENERATION], committed


async def _agreed(self: ModelWorker, mine: object) -> None:
    """No one asks whether the ranks agree."""


REMOVED: dict[str, Callable[[], Any]] = {
    "hold remembers its generation": lambda: instead(Gate, "hold", _hold),
    "rank-local states of late steps do not count": lambda: instead(restore_plan, "_forget_early", lambda records: ""),
    "own copies in steps that may be late": lambda: instead(
        StepProfile, "needs_undo", property(lambda self: self.undo)
    ),
    "the clock stands without a controller": lambda: instead(Agent, "controller_heard", lambda self, heard: None),
    "a version is complete at its hand-out": lambda: _early_completion(),
    "resume at the cut": lambda: instead(RecoverySteps, "send_resume", _resume_next(RecoverySteps.send_resume)),
    "failures before the take-over": lambda: instead(Machine, "_is_lost", _lost_at_once(Machine._is_lost)),
    "victims of one moment together": lambda: instead(Outbox, "expired", _one_by_one(Outbox.expired)),
    "a new term by votes": lambda: instead(ElectorSet, "renew", _raised),
    "heard counts from the sending": lambda: instead(ElectorSet, "echoed", _arrived),
    "a broken connection is no proof": lambda: instead(Liveness, "_judge", _believes(Liveness._judge)),
    "a closed door is no proof": lambda: instead(controller_watch, "reach", _any_door),
    "no secret is sent": lambda: instead(handshake, "_proof", _proof_with_key(handshake._proof)),
    "an open door is no excuse after a standstill": lambda: instead(ControllerLease, "look_at_clock", _any_time),
    "a newer generation is no excuse after a standstill": lambda: instead(
        Agent, "generation", property(lambda self: 1 << 30)
    ),
    "leases go on while the host is suspended": lambda: instead(time, "clock_gettime_ns", _frozen),
    "a node with all ranks knows of others": lambda: instead(Agent, "neighbours", _with_ranks(Agent.neighbours)),
    "the lease in the page": lambda: instead(Page, "lend", lambda self, until: None),
    "what changes after the optimizer is sealed again": lambda: instead(ModelWorker, "drawn", _drawn),
    "registered objects are compared": lambda: instead(ModelWorker, "_unequal", lambda self, values: False),
    "a drain that is not quiet is a failure": lambda: instead(ModelWorker, "_quiet", lambda self: True),
    "a new controller hears of checkpoints": lambda: instead(
        Machine, "_hear_of_checkpoint", lambda self, node, saved: None
    ),
    "a batch is digested whole": lambda: instead(content, "digest_of", lambda batch: hash((batch[:8], batch[-8:]))),
    "the version is read between two looks at the generation": lambda: instead(Page, "_committed_in", _committed_first),
    "agreement is shown after a recovery": lambda: instead(ModelWorker, "_agree", _agreed),
    "a new term by votes, heard from the sending": lambda: _both(
        "a new term by votes", "heard counts from the sending"
    ),
}
"""By name: what is patched away."""


@contextmanager
def _both(*names: str) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(REMOVED[name]())
        yield


@contextmanager
def _early_completion() -> Iterator[None]:
    settle = ModelWorker._settle
    commit = ModelWorker._body

    async def body(self: ModelWorker, step: int) -> None:
        await commit(self, step)
        self._complete(self.gate.version)
        self._complete_already = True  # type: ignore[attr-defined]

    def settled(self: ModelWorker) -> None:
        if getattr(self, "_complete_already", False) and self._committed:
            self._complete = lambda version: None  # type: ignore[method-assign]
            try:
                settle(self)
            finally:
                del self._complete
        else:
            settle(self)

    with instead(ModelWorker, "_body", body), instead(ModelWorker, "_settle", settled):
        yield


def _commits_twice(commit: Callable[..., bool]) -> Callable[..., bool]:
    def committed(self: Gate, *, outside: bool = False) -> bool:
        self._version += self._version == 3
        return commit(self, outside=outside)

    return committed


def _goes_back(follow: Callable[..., None]) -> Callable[..., None]:
    def followed(self: session.ControllerSession, term: int, address: str) -> None:
        follow(self, term, address)
        self.election.term -= 1

    return followed


def _same_generation(enter: Callable[..., None]) -> Callable[..., None]:
    def entered(self: RecoverySteps, cause: str, now: float, victims: Any = ()) -> None:
        self._job.generation -= 1
        enter(self, cause, now, victims)

    return entered


def _says_too_much(find: Callable[..., None]) -> Callable[..., None]:
    def heard(self: Machine, message: Any, now: float, node: str = "") -> None:
        for health in message.ranks:
            health.committed += 1
        find(self, message, now, node)

    return heard


def _from_the_disk(
    records: Any, checkpoint: tuple[int, str] | None, layout: Any = (), removed: Any = MappingProxyType({})
) -> restore_plan.Decision:
    if checkpoint is None:
        return restore_plan.decide(records, checkpoint, layout, removed)
    return restore_plan.Decision.from_checkpoint(checkpoint, records, "it is there")


def _over_at_once(self: RecoverySteps, resume_step: int) -> bool:
    return True


BREAKS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a commit counts twice": ("growth", lambda: instead(Gate, "commit", _commits_twice(Gate.commit))),
    "an agent goes back a term": (
        "growth",
        lambda: instead(session.ControllerSession, "follow", _goes_back(session.ControllerSession.follow)),
    ),
    "a recovery in the old generation": (
        "growth",
        lambda: instead(RecoverySteps, "enter", _same_generation(RecoverySteps.enter)),
    ),
    "a commit that was not": (
        "believed",
        lambda: instead(Machine, "on_heartbeat", _says_too_much(Machine.on_heartbeat)),
    ),
    "over before a step": ("finished", lambda: instead(RecoverySteps, "_all_have_gone_on", _over_at_once)),
    "the checkpoint is taken first": ("fallback", lambda: instead(recovery, "decide", _from_the_disk)),
}
"""Mistakes that no one has made, each with the law that notices it: laws can fail."""
