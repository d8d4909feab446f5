"""The agent's connection to the controller, for as long as the job runs: made, watched, made again.

Messages are carried by a :class:`~flashrecovery.runtime.link.Link`, so a broken connection loses none. While the
controller is not heard, :mod:`.controller_watch` finds out this node's status, and which controller it is to follow.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from contextlib import aclosing
from typing import Any

import grpc

from flashrecovery.agent.agent import Agent
from flashrecovery.agent.controller_link.backoff import Backoff, next_attempt_s
from flashrecovery.agent.controller_link.controller_watch import ControllerWatch, Lead, Leave
from flashrecovery.agent.controller_link.lease import ControllerLease
from flashrecovery.agent.peers.client import CONTROLLER_KEY, UNREACHED, Asking, probe
from flashrecovery.agent.peers.election import Election
from flashrecovery.agent.peers.relay import Relay
from flashrecovery.config import Timeouts
from flashrecovery.errors import AuthenticationError, ConfigError, ProtocolError, StrangerError
from flashrecovery.heartbeat.sender import HeartbeatSender
from flashrecovery.plan.membership.membership import FRESH
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import CONTROLLER, Access, agent_at
from flashrecovery.rpc.log_throttle import Complaints
from flashrecovery.rpc.message_auth import SealedCall
from flashrecovery.runtime.addresses import split_address
from flashrecovery.runtime.link import Link
from flashrecovery.util.clock import lease_clock

ATTEMPT_S = 1.0
"""A connection attempt without any answer is replaced by a new one after this time."""
_BUSY_S = 5.0
"""A controller whose port accepts but that says nothing is busy: thousands of new connections would not help it."""
_NAME_TAKEN_S = 3.0
"""An agent whose name is taken for so long is refused: the name belongs to another agent, and not to its own connection
from before it was started again."""
_AWAITED_S = 4.0
"""A controller that has not taken this node in by then is said to be waited for, ..."""
_AWAITED_AGAIN_S = 60.0
"""... and again after so long."""
_TELL_S = 0.1
"""Pace of telling the workers whether a controller is heard."""

log = logging.getLogger("flashrecovery")


class ControllerSession:
    """Runs the agent under the controller at ``address``. ``alone``: there is one node only.

    Attributes:
        election: this node's vote, and the controller that it follows.
        relay: carries other agents' sessions to that controller.
    """

    def __init__(
        self,
        address: str,
        access: Access,
        agent: Agent,
        limits: Timeouts,
        lead: Lead,
        leave: Leave,
        *,
        alone: bool = False,
    ) -> None:
        self._access = access
        self._agent = agent
        self._alone = alone
        self._peer_port = 0
        self._limits = limits
        self._hearing = ControllerLease(limits)
        silent_s = self._hearing.nothing_came_s
        self.election = Election(agent.node, agent.incarnation, silent_s, limits.lease_s, self.drop, address)
        self._lookout = ControllerWatch(
            agent, self, self._hearing, self.election, access, limits, lead, leave, alone=alone
        )
        self.relay = Relay(agent.node, access)
        self._way = self._through = ""
        self._move: asyncio.Task[None] | None = None
        self._suspended = False
        self._gathering = False
        self._link: Link[pb.AgentMessage, pb.Command] = Link()
        self._vouches: dict[int, asyncio.Future[bool]] = {}
        self._vouch_numbers = itertools.count(1)
        self._joined = False
        self._controller = ""
        self._fresh = False
        self._attempt: asyncio.Task[None] | None = None
        self._attempt_at = 0.0
        self._name_taken_at: float | None = None
        self._answered = False
        self._at_once = asyncio.Event()
        self._stranger = False
        self._complaints = Complaints(log)
        self._heartbeats = HeartbeatSender(access.token, self._heard_at_least_at, self.drop)
        self._backoff = Backoff()
        agent.connect(self._send, self._send_heartbeat)

    @property
    def joined(self) -> bool:
        """Whether a controller has taken this agent in."""
        return self._joined

    @property
    def suspended(self) -> bool:
        """Whether the controller is there, and does not know whether its electors still hear it."""
        return self._suspended

    @property
    def gathering(self) -> bool:
        """Whether the controller, for all that it has said, does not know the job yet."""
        return self._gathering

    @property
    def stranger(self) -> bool:
        """Whether another process answers at the controller's address."""
        return self._stranger

    @property
    def stranded(self) -> bool:
        """Whether this agent waits for a controller, and knows no agent that could name another one: the job has not
        begun where it is."""
        if not self._joined:
            return True
        heard = self._fresh and self._hearing.silent_s < self._limits.lease_s
        return not (heard or self.election.electors or self._agent.in_job)

    @property
    def _address(self) -> str:
        return self.election.controller

    def _send(self, message: pb.AgentMessage) -> None:
        message.age_base = time.monotonic()
        self._link.send(message)

    def _send_heartbeat(self, message: pb.AgentMessage) -> None:
        if not self._fresh or self._heartbeats.carry(message.heartbeat):
            return
        if self._backoff.due(time.monotonic(), self._hearing.silent_s):
            self._link.send_now_or_never(message)

    async def run(self, peer_port: int = 0) -> str | None:
        """Follow the controllers of the job until the agent has finished; returns its reason (None: the job has ended
        well). ``peer_port``: where this node serves other agents; 0: nowhere.

        Raises:
            ConfigError: no controller was found, or it refuses this node.
        """
        self._peer_port = peer_port
        watch = asyncio.create_task(self._lookout.run()) if not self._alone else None
        telling = asyncio.create_task(self._tell_workers())
        awaiting = asyncio.create_task(self._tell_who_is_awaited())
        for task in (watch, telling, awaiting):
            if task is not None:
                task.add_done_callback(self._must_not_fail)
        try:
            while not self._agent.finished.done():
                await self._connect()
                self._give_up_if_late()
                await self._pause(next_attempt_s(self._hearing.silent_s, self._limits, answered=self._answered))
            return self._agent.finished.result()
        finally:
            ending = {task for task in (watch, telling, awaiting, self._move) if task is not None}
            for task in ending:
                task.cancel()
            await asyncio.wait(ending)

    def _must_not_fail(self, task: asyncio.Task[None]) -> None:
        """A node whose watch has failed would not halt when it is cut off; so the agent ends."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._agent.finished.done():
            self._agent.finished.set_exception(error)

    async def _pause(self, seconds: float) -> None:
        """Before the next connection, unless there is another controller to follow now."""
        other = asyncio.create_task(self._at_once.wait())
        ends: set[asyncio.Future[Any]] = {other, self._agent.finished}
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        other.cancel()
        self._at_once.clear()

    async def _connect(self) -> None:
        """One connection, to its end."""
        self._attempt_at, self._answered = time.monotonic(), False
        self._way, self._through = self._through, ""
        self._attempt = asyncio.create_task(self._converse_through(self._way) if self._way else self._converse())
        ends: set[asyncio.Future[Any]] = {self._attempt, self._agent.finished}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self._fresh = False
        self._heartbeats.forget()
        if not self._attempt.done():
            self._attempt.cancel()
            await asyncio.wait({self._attempt})
        if self._attempt.cancelled():
            log.debug("the connection to %s was dropped", self._address)
            return
        # Not awaited: an error raised through here would keep this frame, this frame the task and the task the error,
        # and until the garbage collector comes by, the dead channel tries again, and connects beside the next one.
        error = self._attempt.exception()
        if not self._way:
            self._stranger = isinstance(error, StrangerError)
        if error is not None:
            self._refused(error)

    def _refused(self, error: BaseException) -> None:
        """The connection has ended in an error; raises it unless another attempt may do better.

        A status is not sealed, so whatever it says, it says only that this connection has ended.
        """
        if isinstance(error, StrangerError) and not self._joined:
            raise ConfigError(f"--controller {self._address}: {error}") from error
        if isinstance(error, StrangerError):
            # This agent's controller is no longer there. Other agents may know where it is now.
            self._complaints.add("the process at the expected address is not of this job: %s", error)
        elif isinstance(error, AuthenticationError):
            self._complaints.add("the connection to %s is dropped: %s", self._address, error)
        elif not isinstance(error, grpc.aio.AioRpcError):
            raise error

    def _refused_by(self, message: pb.Refused) -> None:
        """The controller itself refuses this node; raises its words unless another attempt may do better."""
        refused = f"the controller at {self._address} refuses this node: {message.reason}"
        if message.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
            raise ProtocolError(refused)
        if message.code == grpc.StatusCode.ALREADY_EXISTS.value[0]:
            self._name_taken_at = self._name_taken_at or self._attempt_at
            if time.monotonic() - self._name_taken_at <= _NAME_TAKEN_S:
                return
        raise ConfigError(refused)

    async def _converse(self) -> None:
        async with self._access.dial(self._address, CONTROLLER, ATTEMPT_S) as channel:
            self._stranger = False
            stub = rpc.ControllerStub(channel)
            request = pb.WhoRequest(promised=self.election.promised)
            who: pb.WhoReply = await stub.Who(request, timeout=ATTEMPT_S)
            if not self.election.follows(who.term, known=self._controller in ("", who.incarnation)):
                log.debug("the controller at %s, of term %d, is not the one to follow", self._address, who.term)
                return
            if self._controller and who.incarnation != self._controller:
                self._link = Link()  # a new one: Register tells it the current state; messages in flight are void
                self._gathering = True  # until it says otherwise
            self._controller = who.incarnation
            self.relay.follow(self._address, who.incarnation)
            await self._talk(stub.Session())

    async def _converse_through(self, relay: str) -> None:
        """Talk to the controller through the agent at ``relay``, in this connection only: the next one is direct
        again."""
        async with self._access.dial(relay, agent_at(relay), ATTEMPT_S) as channel:
            known = ((CONTROLLER_KEY, self._controller),)
            await self._talk(rpc.PeerStub(channel).Relay(metadata=known))

    async def _talk(self, call: SealedCall) -> None:
        speaking = asyncio.create_task(self._speak(call))
        speaking.add_done_callback(lambda _: call.cancel())
        try:
            async for command in call:
                self._heard(command)
        finally:
            # Ours to end: gRPC leaves a request iterator waiting for ever when the other side ends the call.
            speaking.cancel()
            await asyncio.wait({speaking})
            if not speaking.cancelled():
                speaking.result()

    async def _speak(self, call: SealedCall) -> None:
        """Send this agent's messages, for as long as the connection holds."""
        try:
            register = self._agent.register(self._peer_port)
            self._lookout.registers()
            await call.write(pb.AgentMessage(register=register, sent_at=lease_clock()))
            async with aclosing(self._link.outgoing()) as messages:
                async for message in messages:
                    await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as e:
            log.debug("the connection to %s ends while it is written to: %r", self._address, e)  # the reader learns why

    def _heard(self, command: pb.Command) -> None:
        self._answered = True
        body = command.WhichOneof("body")
        if body == "refused":
            self._refused_by(command.refused)
            return
        if body == "heartbeat":
            self._suspended, self._gathering = command.heartbeat.suspended, command.heartbeat.gathering
        if self._suspended and command.sequence == 0:
            self._heard_suspended(command)
            return  # whether there is another one, the watch will find
        self._joined, self._name_taken_at = True, None
        if body == "fence":
            # Before the link: to a node that it has declared dead, the controller counts from one again.
            log.warning("%s", command.fence.reason)
            self._agent.fence()
            self._hearing.answered(command.echo)
            self._link = Link()
            self._lookout.fenced()
            self.drop()  # and connect as the node that it is now
            return
        new = self._link.accept(command)
        self._hearing.came()
        if not self._suspended:
            self._heard_on_stream(command)
        if not new:
            return
        if body == "vouched":
            asked = self._vouches.pop(command.vouched.number, None)
            if asked is not None and not asked.done():
                asked.set_result(command.vouched.heard)
        elif body == "electors":
            self.election.learn(command.electors)
            self._heartbeats.ask_for_echoes(wanted=self.election.is_elector)
            self._send(pb.AgentMessage(electors_known=pb.ElectorsKnown(version=command.electors.version)))
        elif body == "go_through":
            self._move = asyncio.create_task(self._go_through(command.go_through, self._attempt))
            self._move.add_done_callback(self._must_not_fail)
        else:
            self._agent.handle(command)

    def _heard_on_stream(self, command: pb.Command) -> None:
        """The controller is there, and may decide."""
        beat = command.HasField("heartbeat")
        first, self._fresh = not self._fresh, True
        self._heard_at_least_at(command.echo)
        if first and beat:
            host, _ = split_address(self._address, "--controller")
            self._heartbeats.invited(host, command.heartbeat, self._link, carried=bool(self._way))
        if beat and self.election.is_elector:  # it counts on its electors by what they bring back
            self._link.send_now_or_never(pb.AgentMessage())

    def _heard_suspended(self, command: pb.Command) -> None:
        """The controller is there, but decides nothing until it knows that its electors have heard it. An elector that
        answers votes for no other candidate for a while, so it answers only where no other candidate waits for its
        vote."""
        if self.election.is_elector and not self.election.is_wanted():
            self._link.accept(command)
            self._hearing.came()
            self._link.send_now_or_never(pb.AgentMessage())

    async def vouch(self, asking: Asking, wait_s: float) -> bool:
        """Tell the controller that another node lives, if this one hears it. Whether it has answered."""
        if not self._fresh or self._suspended or self._hearing.silent_s >= FRESH * self._limits.lease_s:
            return False
        number = next(self._vouch_numbers)
        asked = self._vouches[number] = asyncio.get_running_loop().create_future()
        vouch = pb.Vouch(number=number, node=asking.node, incarnation=asking.incarnation)
        self._link.send_now_or_never(pb.AgentMessage(vouch=vouch))
        try:
            return await asyncio.wait_for(asked, wait_s)
        except asyncio.TimeoutError:
            return False
        finally:
            self._vouches.pop(number, None)

    async def _go_through(self, there: pb.GoThrough, connection: asyncio.Task[None] | None) -> None:
        """Reconnect through that agent, if it can be reached and ``connection`` is still the current one."""
        seen = await probe(there.peer, self._access, ATTEMPT_S)
        if not seen.reachable:
            log.warning("node %s, the relay for this node, cannot be reached: %s", there.node, seen.evidence)
        elif connection is self._attempt and self._fresh:
            self._through = there.peer
            self.drop()
            self._at_once.set()

    def _heard_at_least_at(self, when: float) -> None:
        """The controller has answered something that was sent at that time. Only while the connection holds: what
        counts after that comes on a new one."""
        if self._fresh:
            self._lookout.heard(when, gathering=self._gathering)

    def _give_up_if_late(self) -> None:
        missed_s = time.monotonic() - self._hearing.missed_since
        if not self._joined and missed_s > self._limits.rendezvous_s:
            raise ConfigError(
                f"--controller {self._address}: no answer there for {self._limits.rendezvous_s:g} s "
                "(timeouts.rendezvous_s)"
            )
        if self._joined and missed_s > self._limits.controller_gone_s:
            raise ProtocolError(
                f"the controller at {self._address} has been gone for {missed_s:.0f} s (timeouts.controller_gone_s)"
            )

    async def _tell_who_is_awaited(self) -> None:
        """While no controller has taken this node in."""
        await asyncio.sleep(_AWAITED_S)
        while not self._joined:
            left_s = self._limits.rendezvous_s - (time.monotonic() - self._hearing.missed_since)
            log.warning(
                "waiting for a controller at %s: none of this job has answered yet; this node gives up in %.0f s "
                "(timeouts.rendezvous_s)",
                self._address,
                max(left_s, 0.0),
            )
            await asyncio.sleep(_AWAITED_AGAIN_S)

    async def _tell_workers(self) -> None:
        """Whether there is a controller that could stop them."""
        while True:
            heard = self._fresh and self._hearing.silent_s < self._limits.node_silence_s
            self._agent.controller_heard(heard and not self._gathering)
            self._hearing.look_at_clock()
            self._lookout.lend()
            await asyncio.sleep(_TELL_S)

    def drop(self) -> None:
        """End the connection, so that a new one is made. What is still on its way in this one may be older than the
        controller's verdict."""
        if self._attempt is not None:
            self._attempt.cancel()

    def drop_if_stuck(self, silent_s: float, *, port_accepts: bool) -> None:
        """End the connection if it has brought nothing for too long (``silent_s``), or does not come about. A
        controller whose port accepts has more time."""
        stale = self._fresh and silent_s >= (_BUSY_S if port_accepts else self._limits.node_silence_s)
        late = not self._fresh and time.monotonic() - self._attempt_at > ATTEMPT_S
        if stale or late:
            self.drop()

    def join(self, address: str) -> bool:
        """The job runs already, under the controller at ``address``; where this agent began, there is none. Returns
        whether that is news."""
        if address == self._address:
            return False
        self.election.forget()
        self.follow(0, address)
        return True

    def follow(self, term: int, address: str) -> None:
        """Go over to the controller of that term (0: the job's first one), which listens at ``address`` (HOST:PORT)."""
        log.warning("follows the controller%s at %s", f" of term {term}" if term else "", address)
        self.election.follow(term, address)
        self._suspended, self._gathering = False, True
        self._lookout.follows_another()
        self._controller = ""  # any incarnation there
        self._link = Link()
        self.drop()
        self._at_once.set()


async def answers(address: str, access: Access) -> bool:
    """Whether a controller of this job listens at ``address`` (HOST:PORT)."""
    try:
        async with access.dial(address, CONTROLLER, ATTEMPT_S) as channel:
            await rpc.ControllerStub(channel).Who(pb.WhoRequest(), timeout=ATTEMPT_S)
    except UNREACHED as e:
        log.debug("no controller of this job answers at %s: %r", address, e)
        return False
    return True
