"""One training process as its agent sees it: a standby that waits, or the process that fills a rank."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from flashrecovery.agent.processes.procfs import Statm
from flashrecovery.agent.processes.zygote_process import Child
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime import temp_dir
from flashrecovery.runtime.page import Page

_LENGTH = struct.Struct("<I")

log = logging.getLogger("flashrecovery")


def own_end(pid: int) -> int | None:
    """How the child ``pid`` has ended, as ``Popen.returncode``; None while it runs. It is not reaped."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class WorkerProcess:
    """A started process with its channel and its page. ``rank`` is None while it is a standby.

    Args:
        end_of: how the process with a pid has ended; another one where it is no child of the agent.
    """

    def __init__(
        self, child: Child, page: Page, sock: socket.socket, end_of: Callable[[int], int | None] = own_end
    ) -> None:
        self.child = child
        self._end_of = end_of
        self.page = page
        self.rank: int | None = None
        self.local_rank = 0
        self.generation = 0
        self.attempt = 0  # of the starts from the script's first line
        self.store = ("", 0)
        self.joining = False  # it is built up beside training, and its rank is no member of the job yet
        self.ready = False
        self.stepping = False
        self.resumed = False  # has it ever been?
        self.dead = False
        self.failed = False  # its failure has been reported
        self.knows_controller = True  # the last message to it said whether there is a controller
        self.last_words: pb.LastWords | None = None
        self.joined: pb.Joined | None = None  # as it is now
        self._next_needs: Sequence[pb.ShardNeed] = ()  # once it goes on, if nothing happens before
        self.done: pb.Done | None = None
        self.log = ""  # where it prints to
        self.released = False  # has been let out of its loop
        self._sock = sock
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[bytes] = []
        self._reader_task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def place(self) -> int:
        """The rank it fills; -1 for a standby."""
        return -1 if self.rank is None else self.rank

    @property
    def must_run(self) -> bool:
        """Whether it takes steps, or has taken all of them and is to end: stopped, it would keep everybody waiting. In
        a recovery its answers are waited for."""
        return not self.failed and (self.stepping or self.done is not None)

    @property
    def exited(self) -> bool:
        """Whether it was let out of its loop, and has run its script to the end."""
        return self.released and self.returncode == 0

    def take_rank(self, command: pb.Command, log: str) -> None:
        """It fills the rank of the command from now on, and prints into ``log``."""
        replace = command.replace
        self.rank, self.local_rank, self.generation = command.rank, replace.local_rank, command.generation
        self.store, self.attempt = (replace.store_host, replace.store_port), replace.attempt
        self.joining, self.log = replace.joining > 0, log

    def expect_death(self) -> None:
        """Its end is no news, and no failure: it is ended here, or belongs to the job no longer."""
        self.dead = True

    def has_failed(self) -> None:
        """Its failure is reported."""
        self.stepping, self.failed = False, True

    def has_warmed(self) -> None:
        """It waits for a rank."""
        self.ready = True

    def has_joined(self, joined: pb.Joined) -> None:
        """It is at its first step."""
        self.joined = joined

    def has_paused(self) -> None:
        """It waits before a step; a controller that comes now finds it waiting."""
        self.stepping = False

    def has_done(self, done: pb.Done) -> None:
        """It has taken all of its steps."""
        self.stepping, self.done = False, done

    def hear_last_words(self, words: pb.LastWords) -> None:
        """What its script has raised."""
        self.last_words = words

    def tell_of_controller(self, *, heard: bool) -> None:
        """Tell it whether a controller is there, if that is news to it."""
        if self.knows_controller is not heard:
            self.knows_controller = heard
            self.send(pb.ToWorker(controller=pb.ControllerHeard(heard=heard)))

    def become_member(self) -> None:
        """Its rank belongs to the job now, if it was built up beside training."""
        self.joining = False

    def replied(self, reply: pb.Reply) -> None:
        """It has said what it needs now, or will need as soon as it goes on: in an elastic job that changes with the
        size. A later controller receives that, and not what the process reported at its first step."""
        if reply.needs:
            self._need(reply.needs)
        if reply.next_needs:
            self._next_needs = list(reply.next_needs)

    def stops(self, *, released: bool) -> None:
        """The process has been asked to stop, or is let out of its loop (``released``). What was prepared is not used,
        unless the process reports it itself."""
        self.stepping, self.released = False, released
        self._next_needs = ()

    def goes_on(self) -> None:
        """It has been asked to resume."""
        self.stepping = self.resumed = True
        if self._next_needs:
            self._need(self._next_needs)
        self._next_needs = ()

    def _need(self, needs: Sequence[pb.ShardNeed]) -> None:
        if self.joined is None:
            return
        digests = {need.name: need.digest for need in self.joined.needs}
        joined = pb.Joined()
        joined.CopyFrom(self.joined)
        del joined.needs[:]
        for need in needs:
            joined.needs.add().CopyFrom(need)
            joined.needs[-1].digest = need.digest or digests.get(need.name, "")
        self.joined = joined

    async def connect(
        self,
        on_message: Callable[[WorkerProcess, pb.FromWorker], None],
        on_garbage: Callable[[WorkerProcess, str], None] = lambda process, _why: process.kill(),
    ) -> asyncio.Task[None]:
        """Begin to read the process's messages. Returns the task that does so, to its end, to :meth:`close`, or to what
        cannot be read (``on_garbage``)."""
        reader, self._writer = await asyncio.open_connection(sock=self._sock)
        self._writer.writelines(self._unsent)
        self._reader_task = asyncio.create_task(self._read(reader, on_message, on_garbage))
        return self._reader_task

    async def _read(
        self,
        reader: asyncio.StreamReader,
        on_message: Callable[[WorkerProcess, pb.FromWorker], None],
        on_garbage: Callable[[WorkerProcess, str], None],
    ) -> None:
        while True:
            try:
                head = await reader.readexactly(_LENGTH.size)
                data = await reader.readexactly(_LENGTH.unpack(head)[0])
            except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
                return
            try:
                message = pb.FromWorker.FromString(data)
            except DecodeError as e:  # this process only: the others are not affected
                log.error("process %d says what cannot be read, and is ended: %s", self.pid, e)
                on_garbage(self, f"it says what cannot be read ({e})")
                return
            on_message(self, message)

    async def hear_out(self, timeout_s: float, *, until_last_words: bool = False) -> None:
        """Handle what the dying process had still said. (A big process closes its channel late.)"""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not (until_last_words and self.last_words is not None):
            if self._reader_task is None or self._reader_task.done():
                return
            await asyncio.sleep(0.001)

    def send(self, message: pb.ToWorker) -> None:
        """Queue a message, also before :meth:`connect` is over; a dead process's end is noticed elsewhere."""
        data = message.SerializeToString()
        framed = _LENGTH.pack(len(data)) + data
        if self._writer is None:
            self._unsent.append(framed)
        elif not self._writer.is_closing():
            self._writer.write(framed)

    def signal(self, number: int) -> None:
        """To the process only."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def kill(self) -> None:
        """SIGKILL to the whole session, including data loader processes. Does nothing after :meth:`close`, which has
        released the pid: it may belong to another process by now."""
        if self.child.returncode is not None:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.signal(signal.SIGKILL)  # it was forked a moment ago, and leads no session yet

    async def gone(self, timeout_s: float) -> bool:
        """True once no thread of the process runs any more (its memory may still be being freed)."""
        try:
            statm = Statm(self.pid)
        except (ProcessLookupError, FileNotFoundError):
            return True
        deadline = time.monotonic() + timeout_s
        try:
            while not statm.dead():
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(0.001)
        finally:
            statm.close()
        return True

    @property
    def returncode(self) -> int | None:
        """As that of ``Popen``; None while the process runs. The kernel keeps the pid, and with it the number of the
        session, until :meth:`close`."""
        if self.child.returncode is not None:
            return self.child.returncode
        return self._end_of(self.pid)

    async def end(self, timeout_s: float) -> int | None:
        """Wait for it; the return code, or None if the process is still there after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while (code := self.returncode) is None:
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(0.01)
        return code

    def close(self) -> None:
        """Kill what is left of the session; then free the page, the channel, the pid, and the session's sockets."""
        self.kill()
        self.child.poll()
        if self._reader_task is not None:
            self._reader_task.cancel()
        if self._writer is not None:
            self._writer.close()
        else:
            self._sock.close()
        temp_dir.remove(self.page.temp_dir)
        self.page.close()
