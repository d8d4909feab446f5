"""Jobs of several nodes, each node a host of :mod:`tests.support.hosts`, and what to do to a node."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flashrecovery.terminal import unwrapped
from tests.support import shared_imports
from tests.support.hosts import Host, Network, network
from tests.support.jobs import (
    GPT,
    MARKER,
    PROGRAM,
    SMALL,
    Job,
    Layout,
    References,
    marked_processes,
    read_digests,
    read_events,
)

TOKEN = "the-token-of-this-test-job"
PORT = 29400


class NodesJob:
    """A job on the hosts of ``net``: ``nnodes`` of them hold ranks, the others (or ``spare`` of them) are spare. The
    first one has the controller, and if it is ``alone``, nothing else. ``config``: a file for all of them. ``small``:
    what makes the script's model small."""

    def __init__(
        self,
        net: Network,
        run_dir: Path,
        layout: Layout,
        *,
        nnodes: int = 2,
        spare: int | None = None,
        steps: int = 40,
        step_ms: int = 100,
        options: Sequence[str] = (),
        config: Path | None = None,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        tokens: Mapping[str, str] | None = None,
        alone: bool = False,
        small: Sequence[str] = SMALL,
    ) -> None:
        self.net = net
        self.run_dir = run_dir
        self.marker = uuid.uuid4().hex
        self.popens: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {}
        self._began = time.monotonic()
        self._outputs = run_dir.parent / f"{run_dir.name}-output"
        self._outputs.mkdir(parents=True)
        members = net.hosts[1:] if alone else net.hosts
        members = members if spare is None else members[: nnodes + spare]
        self._address = f"{net.hosts[0].address}:{PORT}"
        self._shape = ["--nnodes", str(nnodes), "--spare-nodes", str(len(members) - nnodes)]
        self._shape += ["--nproc-per-node", str(layout.nproc // nnodes), "--run-dir", str(run_dir)]
        self._shape += ["--config", str(config)] if config is not None else []
        if alone:
            self.start_controller()
        for number, host in enumerate(members):
            command = [*PROGRAM, "run", *self._shape]
            command += ["--node-rank", str(number), "--node-name", host.name, "--controller", self._address, *options]
            command += [str(GPT / layout.script), *small, "--steps", str(steps), "--step-time", str(step_ms)]
            command += [*layout.flags, *flags]
            own = {"FLASHRECOVERY_TOKEN": (tokens or {}).get(host.name, TOKEN)}
            own["OMP_NUM_THREADS"] = "1"  # each host takes the machine's processors for its own
            self._start(host, command, {**own, **(env or {})})

    def _start(self, host: Host, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._started[host.name] = (command, env)
        inherited = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
        env = {**inherited, "PYTHONFAULTHANDLER": "1", MARKER: self.marker, **env}
        with open(self._outputs / host.name, "ab") as out:
            self.popens[host.name] = _forked(host, command, env, out.fileno()) or subprocess.Popen(
                [*host.command, *command],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=env,
            )

    def start_again(self, host: Host) -> None:
        """The same command on the same host, as a scheduler starts what has ended there."""
        self.popens[host.name].wait()
        self._start(host, *self._started[host.name])

    def start_controller(self) -> None:
        """A stand-alone one on the first host; for a second time after it was killed."""
        host = self.net.hosts[0]
        command = [*PROGRAM, "controller", *self._shape]
        self._start(host, [*command, "--bind", self._address], {"FLASHRECOVERY_TOKEN": TOKEN})

    # -- looking ----------------------------------------------------------------------------------

    def events(self) -> list[dict[str, Any]]:
        """Of all controllers, one after the other."""
        elected = sorted(
            (p for p in self.run_dir.glob("term*") if p.is_dir()), key=lambda p: int(p.name.removeprefix("term"))
        )
        return [e for d in (self.run_dir, *elected) for e in read_events(d)]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.events() if e["event"] == name]

    def logs(self) -> list[Path]:
        return sorted(self.run_dir.glob("nodes/*/logs/rank*.log"))

    def newest_step(self, host: Host | None = None) -> int:
        """The newest step in the logs, of one host or of all; -1 before the first."""
        newest = -1
        for log in self.logs():
            if host is None or log.parts[-3] == host.name:
                found = re.findall(r"(?:step=|iteration +)(\d+)[ /]", log.read_text())
                newest = max(newest, int(found[-1]) if found else -1)
        return newest

    def wait_for_step(self, step: int, timeout_s: float = 120) -> None:
        self._wait(lambda: self.newest_step() >= step, f"step {step}", timeout_s)

    def wait_for(self, event: str, count: int = 1, timeout_s: float = 120) -> dict[str, Any]:
        """The ``count``-th event of this name."""
        self._wait(lambda: len(self.of(event)) >= count, f"event {event}", timeout_s)
        return self.of(event)[count - 1]

    def wait_for_join(self, host: Host, count: int, timeout_s: float = 60) -> None:
        """Until a controller has taken it in for the ``count``-th time."""

        def joined() -> bool:
            return bool(sum(e["node"] == host.name for e in self.of("node_joined")) >= count)

        self._wait(joined, f"node {host.name}", timeout_s)

    def wait_for_notice(self, kind: str, timeout_s: float = 60) -> None:
        self._wait(lambda: any(e["kind"] == kind for e in self.of("notice")), f"notice {kind}", timeout_s)

    def _wait(self, condition: Any, what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline or all(p.poll() is not None for p in self.popens.values()):
                raise AssertionError(f"{what} has not come\n{self.stop().explain()}\n{self.output()}")
            time.sleep(0.02)

    def output(self) -> str:
        """Of every node."""
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self._outputs.iterdir()))

    def output_of(self, host: Host) -> str:
        return unwrapped((self._outputs / host.name).read_text())

    def agent_ports(self, host: Host) -> list[int]:
        """TCP ports on which controller and agent listen there, but for the TCPStore (see docs/security.md)."""
        shown = subprocess.run([*host.command, "ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
        own = [line.split()[3] for line in shown.splitlines() if f"pid={self.popens[host.name].pid}," in line]
        return sorted({int(a.rpartition(":")[2]) for a in own if not a.startswith(("*", "[::]", "0.0.0.0"))})

    def directory(self) -> Path:
        """Of the newest controller."""
        return max(self.run_dir.glob("**/controller.json"), key=lambda p: p.stat().st_mtime).parent

    def controller_host(self) -> Host:
        """Where the newest controller is."""
        address = json.loads((self.directory() / "controller.json").read_text())["address"]
        return next(h for h in self.net.hosts if address.startswith(f"{h.address}:"))

    def _rank_table(self) -> Any:
        """The newest one. A new controller publishes it once it has found the ranks."""
        self._wait(lambda: (self.directory() / "ranktable.json").exists(), "the rank table", 30)
        return json.loads((self.directory() / "ranktable.json").read_text())

    def rank_hosts(self) -> dict[int, Host]:
        """Where each rank is, as the newest rank table has it."""
        table = self._rank_table()
        by_name = {h.name: h for h in self.net.hosts}
        return {r["rank"]: by_name[r["node"]] for r in table["ranks"]}

    # -- doing ------------------------------------------------------------------------------------

    def pids(self, host: Host) -> list[int]:
        """Of the job's processes that run there."""
        return [pid for pid in marked_processes(self.marker) if _namespace(pid) == host.namespace]

    def kill_node(self, host: Host) -> None:
        """SIGKILL to every process of the job that runs there, at once: the host has lost its power."""
        for pid in self.pids(host):
            os.kill(pid, signal.SIGKILL)
        self.popens[host.name].wait()

    def signal_node(self, host: Host, number: signal.Signals) -> None:
        """To every process of the job that runs there: with SIGSTOP the host is frozen, but its kernel answers."""
        for pid in self.pids(host):
            os.kill(pid, number)

    def kill_worker(self, host: Host, rank: int) -> None:
        """SIGKILL to the process of ``rank``, which is on ``host``."""
        self.signal_worker(host, rank, signal.SIGKILL)

    def signal_worker(self, host: Host, rank: int, number: signal.Signals) -> None:
        table = self._rank_table()
        (pid,) = (r["pid"] for r in table["ranks"] if r["rank"] == rank and r["node"] == host.name)
        os.kill(pid, number)

    def worker_pids(self, host: Host) -> list[int]:
        """The processes that fill ranks there, as the newest rank table has it."""
        return [r["pid"] for r in self._rank_table()["ranks"] if r["node"] == host.name]

    def kill_agent(self, host: Host) -> None:
        """SIGKILL to the agent alone."""
        self.signal_agent(host, signal.SIGKILL)

    def signal_agent(self, host: Host, number: signal.Signals) -> None:
        """To the agent alone, which may be the controller as well."""
        os.kill(self.popens[host.name].pid, number)

    def codes(self) -> dict[str, int | None]:
        """How each node's launcher has ended; None: it runs."""
        return {name: p.poll() for name, p in self.popens.items()}

    def wait(self, timeout_s: float = 180, of: Sequence[Host] = ()) -> Job:
        """Until the launchers of ``of`` (default: of all hosts) have ended; then what is left is stopped."""
        deadline = time.monotonic() + timeout_s
        names = [h.name for h in of] or list(self.popens)
        while time.monotonic() < deadline and any(self.popens[n].poll() is None for n in names):
            time.sleep(0.02)
        return self.stop(names[0])

    def stop(self, counts: str = "") -> Job:
        """End what still runs; how the node ``counts`` (default: the first) ended counts for the job (-1000: it
        hung)."""
        code = self.popens[counts or self.net.hosts[0].name].poll()
        for popen in self.popens.values():
            if popen.poll() is None:
                popen.terminate()
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline and any(p.poll() is None for p in self.popens.values()):
            time.sleep(0.02)
        for pid in marked_processes(self.marker):
            os.kill(pid, signal.SIGKILL)
        for popen in self.popens.values():
            popen.wait()
        seconds = time.monotonic() - self._began
        job = Job(
            code=-1000 if code is None else code,
            output=self.output(),
            run_dir=self.run_dir,
            seconds=seconds,
            marker=self.marker,
            events=self.events(),
        )
        read_digests(job, self.logs())
        return job


def hosts_of_a_test(number: int) -> Any:
    """A fixture: that many hosts, new ones for each test."""

    @pytest.fixture
    def net() -> Iterator[Network]:
        with network(number) as made:
            yield made

    return net


def references_of_a_module(steps: int, nnodes: Callable[[Layout], int] = lambda layout: 2, spare: int = 0) -> Any:
    """A fixture: the same launches without a fault, on as many nodes as ``nnodes`` says, and ``spare`` ones."""

    @pytest.fixture(scope="module")
    def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
        def launch(run_dir: Path, layout: Layout) -> Job:
            with network(nnodes(layout) + spare) as net:
                return NodesJob(net, run_dir, layout, nnodes=nnodes(layout), steps=steps).wait()

        return References(lambda: tmp_path_factory.mktemp("reference"), launch)

    return reference


def _forked(host: Host, command: Sequence[str], env: Mapping[str, str], out: int) -> shared_imports.Forked | None:
    """The launcher of a node with one import of torch for all; None: it needs an interpreter for itself."""
    program, arguments = command[: len(PROGRAM)], command[len(PROGRAM) :]
    if (*program,) != PROGRAM or arguments[0] != "run" or not shared_imports.possible(env):
        return None
    return shared_imports.images.start(arguments, env, out, host.namespace)


def _namespace(pid: int) -> str:
    found = subprocess.run(["ip", "netns", "identify", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip()
