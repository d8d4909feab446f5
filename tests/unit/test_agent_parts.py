"""Parts of the agent: what /proc says, what is stopped, where workers stand, how fast a big process's death is seen."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from flashrecovery.agent.agent import Agent
from flashrecovery.agent.monitoring.hang import Looks, StopMonitor
from flashrecovery.agent.processes.death_watch import DeathWatch
from flashrecovery.agent.processes.logs import LogTail
from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.procfs import Exit, exit_of, is_exiting, is_stopped
from flashrecovery.agent.stores.identity import Identity
from flashrecovery.agent.stores.store import StoreServer
from flashrecovery.config import RunConfig, Timeouts
from flashrecovery.events import RunDir
from flashrecovery.groups.torch_private import TCPStore
from flashrecovery.health.findings import HealthFinding, Severity
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.lifeline import Lifeline
from flashrecovery.runtime.page import Page


def _sleeper(code: str = "import time; time.sleep(60)", *fds: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", f"print('up', flush=True); {code}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=fds)


def test_exit_status_is_known_before_the_process_is_reaped() -> None:
    for code, expected in (
        ("import os; os._exit(3)", Exit(3, None)),
        ("import os; os.kill(os.getpid(), 9)", Exit(None, 9)),
    ):
        p = _sleeper(code)
        deadline = time.monotonic() + 10
        while (found := exit_of(p.pid)) != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == expected
        p.wait()
        assert exit_of(p.pid) is None
    assert str(Exit(None, 9)) == "killed by SIGKILL" and str(Exit(3, None)) == "exit code 3"


def test_stopped_processes_are_seen() -> None:
    p = _sleeper()
    assert p.stdout is not None
    p.stdout.readline()
    assert not is_stopped(p.pid)
    os.kill(p.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while not is_stopped(p.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_stopped(p.pid)
    p.kill()
    p.wait()


def test_the_pid_of_a_process_is_kept_until_what_is_left_of_its_session_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its number might be another session's when the kill comes."""
    child = tmp_path / "child"
    code = f"sleep 60 & echo $! > {child}; exit 3"
    ours, theirs = socket.socketpair()
    popen = subprocess.Popen(["sh", "-c", code], start_new_session=True)
    process = WorkerProcess(popen, Page.create("test"), ours)
    with closing(theirs):
        assert asyncio.run(process.end(10)) == 3
        left = int(child.read_text())
        os.kill(left, 0)
        assert os.path.exists(f"/proc/{process.pid}"), "the pid is free, and the group may be another's"
        killed: list[int] = []
        real = os.killpg
        monkeypatch.setattr(os, "killpg", lambda group, number: (killed.append(group), real(group, number)))
        process.close()
        process.kill()
    assert killed == [process.pid] and process.returncode == 3 and not os.path.exists(f"/proc/{process.pid}")
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{left}") and not _is_zombie(left) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{left}") or _is_zombie(left)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


HOLD = "from flashrecovery.runtime.lifeline import Lifeline; Lifeline({fd}).hold(); "


@pytest.mark.parametrize("holds", [True, False], ids=["lifeline", "before it holds its lifeline"])
def test_death_of_a_process_with_much_memory_is_seen(holds: bool) -> None:
    async def run() -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        watch = DeathWatch(loop)
        page = Page.create("test")
        hold = HOLD.format(fd=page.fd) if holds else ""
        p = _sleeper(f"{hold}b = bytearray(1 << 30); print('full', flush=True); import time; time.sleep(60)", page.fd)
        assert p.stdout is not None
        seen: asyncio.Future[float] = loop.create_future()
        watch.add(p.pid, page.fd, seen.set_result)
        await loop.run_in_executor(None, lambda: (p.stdout.readline(), p.stdout.readline()))
        await asyncio.sleep(0.1)
        assert not seen.done()
        killed = time.monotonic()
        p.kill()
        late = await asyncio.wait_for(seen, 10)
        told = time.monotonic() - killed
        p.wait()
        gone = time.monotonic() - killed
        watch.close()
        page.close()
        return late, told, gone

    late, told, gone = asyncio.run(run())
    assert 0 <= late <= told <= gone
    if holds:
        assert told < gone, "told by the lifeline, while the kernel is still freeing the memory"


def test_a_lifeline_outlives_the_objects_of_the_interpreter_and_programs_that_are_replaced() -> None:
    """A clean exit cuts it, too; exec cuts it although the process lives, which the watch finds out."""
    for code, exits in (("pass", True), ("import os; os.execvp('sleep', ['sleep', '30'])", False)):
        page = Page.create("test")
        lifeline = Lifeline(page.fd)
        p = _sleeper(HOLD.format(fd=page.fd) + "import time; time.sleep(0.5); " + code, page.fd)
        deadline = time.monotonic() + 20
        while not lifeline.held() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lifeline.held() and not lifeline.cut(0.01)
        assert lifeline.cut(20)
        if not exits:
            assert not is_exiting(p.pid)
            p.kill()
        p.wait()
        assert is_exiting(p.pid)
        lifeline.close()
        page.close()


def test_a_process_that_ends_before_the_first_look_is_seen_by_its_lifeline() -> None:
    page = Page.create("test")
    _sleeper(HOLD.format(fd=page.fd), page.fd).wait()
    lifeline = Lifeline(page.fd)
    assert lifeline.held() and lifeline.cut(0.0) and lifeline.cut(0.0)
    lifeline.close()
    page.close()


class Worker:
    """A worker's process as far as a look at it goes; ``reply``: called when it is asked."""

    def __init__(self, pid: int, page: Page, reply: Callable[[], None] = lambda: None) -> None:
        self.pid, self.place, self.page, self.stepping, self.dead = pid, 3, page, True, False
        self.done: pb.Done | None = None
        self.failed = False
        self.send = lambda message: reply()

    must_run = WorkerProcess.must_run


@pytest.mark.parametrize("through", [False, True])
def test_a_process_that_is_stopped_for_too_long_is_a_victim(through: bool) -> None:
    """Also one that has taken all its steps: everybody waits for its end."""
    p, page = _sleeper(), Page.create("test")
    page.beat()
    worker: Any = Worker(p.pid, page)
    if through:
        worker.stepping, worker.done = False, pb.Done(rank=3, version=7)
    monitor, now = StopMonitor(Timeouts(stopped_s=2.0)), time.monotonic() + 10
    assert list(monitor.check([worker], now)) == []
    os.kill(p.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while not is_stopped(p.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(monitor.check([worker], now)) == [] and list(monitor.check([worker], now + 1.9)) == []
    ((found, evidence, age),) = monitor.check([worker], now + 2.1)
    assert found is worker and "SIGSTOP" in evidence and age > 11
    worker.failed = True  # as the agent notes when it reports it
    assert list(monitor.check([worker], now + 5)) == [], "once"
    p.kill()
    p.wait()
    page.close()


def test_workers_are_asked_where_they_stand_and_one_that_is_silent_is_not_waited_for() -> None:
    async def run() -> tuple[pb.HangReports, float]:
        page = Page.create("test")
        page.beat()
        workers: list[Any] = []
        looks = Looks(lambda: list(workers))

        def reply() -> None:
            asyncio.get_running_loop().call_soon(looks.answered, quick, pb.HangReport(answered=True, stack="here"))

        quick: Any = Worker(os.getpid(), page, reply)
        mute: Any = Worker(os.getppid(), page)
        began = time.monotonic()
        workers.append(quick)
        alone = await looks.look(pb.Look(number=1, answer_s=10.0))
        assert time.monotonic() - began < 5 and [r.answered for r in alone.ranks] == [True]
        workers.append(mute)
        found = await looks.look(pb.Look(number=2, answer_s=0.2))
        under_way = asyncio.create_task(looks.look(pb.Look(number=3, answer_s=0.2)))
        await asyncio.sleep(0.05)
        workers.clear()
        page.close()
        assert not (await under_way).ranks, "they have been replaced meanwhile: their pages are gone"
        return found, time.monotonic() - began

    found, seconds = asyncio.run(run())
    assert found.look == 2 and [(r.pid, r.answered, r.stack) for r in found.ranks] == [
        (os.getpid(), True, "here"),
        (os.getppid(), False, ""),
    ]
    assert all(r.rank == 3 and r.progress == 1 and r.age_s >= 0 for r in found.ranks) and seconds < 5


def test_a_log_of_a_replaced_process_is_closed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def follow() -> list[int]:
        tail = LogTail(tmp_path)
        before, opened = len(os.listdir("/proc/self/fd")), []
        for generation in range(4):
            log = tmp_path / f"rank0.gen{generation}.log"
            log.write_text(f"line {generation}\n")
            tail.follow(log, "[rank0]")
            for _ in range(20):
                tail.flush()
                tail._drop_ended()
            opened.append(len(os.listdir("/proc/self/fd")) - before)
        tail.close()
        return opened

    opened = asyncio.run(follow())
    assert opened[1:] == opened[:1] * 3
    assert capsys.readouterr().out.split("\n")[:4] == [f"[rank0] line {i}" for i in range(4)]


def test_what_an_earlier_launch_has_printed_is_not_shown_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "rank0.gen0.log"
    log.write_text("days ago\n")

    async def follow() -> None:
        tail = LogTail(tmp_path)
        with open(log, "a") as now:
            now.write("now\n")
        tail.follow(log, "[rank0]")
        tail.close()

    asyncio.run(follow())
    assert capsys.readouterr().out == "[rank0] now\n"


@asynccontextmanager
async def agent_of(path: Path) -> AsyncIterator[Agent]:
    """An agent with a controller that hears nothing."""
    config = RunConfig(nproc_per_node=1, health="none", start_method="spawn")
    with closing(RunDir(path / "run")) as run_dir:
        agent = Agent(config, ["train.py"], run_dir, Identity.of(config, "127.0.0.1"))
        agent.connect(lambda message: None, lambda heartbeat: None)
        yield agent
        await agent.shutdown(None)


def test_every_controller_is_told_what_marks_the_node(tmp_path: Path) -> None:
    async def registered() -> list[str]:
        async with agent_of(tmp_path) as agent:
            said = [agent.register().suspect]
            agent._health._on_finding(HealthFinding(Severity.FATAL, "npu", "npu 0", 0, "lost", "fallen off the bus"))
            agent._health._on_finding(HealthFinding(Severity.WARNING, "host", "disk", None, "full", "0.5 GiB free"))
            said.append(agent.register().suspect)
        return said

    assert asyncio.run(registered()) == ["", "host: disk: 0.5 GiB free [full]"]


def test_an_agent_remembers_the_newest_checkpoint_for_the_next_controller(tmp_path: Path) -> None:
    """Also one that another node has published; and it forgets that of another job."""

    async def remembered() -> list[int]:
        async with agent_of(tmp_path) as agent:
            versions = []
            for version in (5, 7, 6, -1, 2):
                agent.handle(pb.Command(rank=-1, saved=pb.CheckpointSaved(version=version, path="c")))
                register = agent.register()
                versions.append(register.checkpoint.version if register.HasField("checkpoint") else -1)
        return versions

    assert asyncio.run(remembered()) == [5, 7, 7, -1, 2]


@pytest.mark.parametrize("released", [True, False])
def test_the_next_controller_hears_how_a_process_has_ended(released: bool, tmp_path: Path) -> None:
    """Well, if it was let go before; else it has died, code 0 or not, and all that is left of it is its page."""

    async def registered() -> pb.Register:
        async with agent_of(tmp_path) as agent:
            ours, theirs = socket.socketpair()
            popen = subprocess.Popen(["true"])
            process = WorkerProcess(popen, Page.create("test"), ours)
            process.rank = 0
            await process.connect(lambda _process, _message: None)
            agent._ranks[0] = process
            if released:
                agent.handle(pb.Command(rank=0, release=pb.Release()))
            popen.wait()
            register = agent.register()
            theirs.close()
        return register

    register = asyncio.run(registered())
    assert [(w.released, w.exited) for w in register.workers] == [(True, True)] * released
    assert [page.rank for page in register.pages] == [0] * (not released)


def test_what_is_sent_to_a_standby_before_it_is_connected_arrives() -> None:
    """Two victims at once: the second takes a standby that was started a millisecond ago."""

    async def talk() -> list[str | None]:
        ours, theirs = socket.socketpair()
        popen = _sleeper()
        process = WorkerProcess(popen, Page.create("test"), ours)
        process.send(pb.ToWorker(assign=pb.Assign(rank=2)))
        await process.connect(lambda _process, _message: None)
        process.send(pb.ToWorker(command=pb.Command(rank=2)))
        reader, writer = await asyncio.open_connection(sock=theirs)
        kinds = []
        for _ in range(2):
            (length,) = struct.unpack("<I", await reader.readexactly(4))
            kinds.append(pb.ToWorker.FromString(await reader.readexactly(length)).WhichOneof("body"))
        writer.close()
        process.close()
        popen.kill()
        popen.wait()
        return kinds

    assert asyncio.run(talk()) == ["assign", "command"]


@pytest.mark.parametrize(("host", "reached"), [("127.0.0.1", False), ("10.1.2.3", True)])
def test_the_store_of_a_job_on_one_node_is_reached_from_there_only(host: str, reached: bool) -> None:
    with closing(StoreServer(host, 0)) as server:
        store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))
        store.set("key", "value")
        assert store.get("key") == b"value"
        for address in ("127.0.0.2", "::1"):  # other addresses than the one that it may listen on
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family) as s:
                assert (s.connect_ex((address, server.port)) == 0) is reached, address


def test_a_process_says_what_it_needs_now() -> None:
    """At its first step, of a stop, and of what will be so once it goes on, unless it is stopped before."""
    ours, theirs = socket.socketpair()
    popen = subprocess.Popen(["true"])
    process = WorkerProcess(popen, Page.create("test"), ours)

    def need(name: str, digest: str = "") -> pb.ShardNeed:
        return pb.ShardNeed(name=name, nbytes=1, digest=digest, sharded=True)

    def known() -> dict[str, str]:
        assert process.joined is not None
        return {need.name: need.digest for need in process.joined.needs}

    with closing(theirs):
        process.replied(pb.Reply(next_needs=[need("no one asks")]))
        process.stops(released=False)
        process.joined = first = pb.Joined(rank=1, steps=9, needs=[need("w#1/4"), need("common", "d")])
        process.replied(pb.Reply(next_needs=[need("w#1/3"), need("common")]))
        process.replied(pb.Reply())  # that what it has got is right
        assert known() == {"w#1/4": "", "common": "d"}, "it has not gone on yet"
        process.goes_on()
        assert known() == {"w#1/3": "", "common": "d"} and process.joined.steps == 9
        assert [need.name for need in first.needs] == ["w#1/4", "common"]
        process.replied(pb.Reply(next_needs=[need("w#1/2")]))
        process.stops(released=False)
        process.goes_on()
        assert known() == {"w#1/3": "", "common": "d"}, "a rank has died before"
        process.replied(pb.Reply(needs=[need("w#0/2"), need("common")]))
        assert known() == {"w#0/2": "", "common": "d"}
        popen.wait()
        process.close()


def test_a_process_whose_words_cannot_be_read_is_ended() -> None:
    """It alone."""

    async def talk() -> int:
        ours, theirs = socket.socketpair()
        popen = subprocess.Popen(["sleep", "60"], start_new_session=True)
        process = WorkerProcess(popen, Page.create("test"), ours)
        reading = await process.connect(lambda _process, _message: pytest.fail("nothing was said"))
        with closing(theirs):
            theirs.sendall(struct.pack("<I", 3) + b"\xff\xff\xff")
            await asyncio.wait_for(reading, 10)
        return popen.wait(10)

    assert asyncio.run(talk()) == -signal.SIGKILL
