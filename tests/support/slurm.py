"""A real Slurm cluster on this machine: slurmctld, and one slurmd for each host of :mod:`tests.support.hosts`.

Every host has its own network, host name, munged and configuration file, and all of it lies in one temporary directory;
nothing of the machine's own Slurm, if it has one, is touched. Needs root, and Debian's packages slurmctld, slurmd,
slurm-client and munge.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from tests.support import hosts
from tests.support.hosts import Host

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scontrol", "ip", "unshare")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL")
NODE_TIMEOUT_S = 10
"""After this time without a word slurmctld takes a node for lost."""
_START_S = 60
_CONFIGURATION = """\
ClusterName=fr
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/%host/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
SlurmctldTimeout=30
SlurmdTimeout={timeout}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/builtin
TopologyPlugin=topology/tree
SlurmdParameters=config_overrides
DebugFlags=NO_CONF_HASH
ReturnToService=2
KillWait=5
NodeName={nodes} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; "" if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return "" if hosts.available() else "network namespaces need CAP_NET_ADMIN"


class Cluster:
    """The first host has slurmctld; the others are compute nodes, on the switches ``leaf0``, ``leaf1``, ... in turn."""

    def __init__(self, net: hosts.Network, folder: Path, switches: int = 2) -> None:
        self.folder = folder
        self.controller, *self.nodes = net.hosts
        self._daemons: dict[str, list[subprocess.Popen[bytes]]] = {h.name: [] for h in net.hosts}
        self._etc = [Path("/etc/netns") / h.namespace for h in net.hosts]
        self._key = secrets.token_bytes(64)
        leaves = [[n.name for n in self.nodes[i::switches]] for i in range(switches)]
        self._topology = "".join(f"SwitchName=leaf{i} Nodes={','.join(names)}\n" for i, names in enumerate(leaves))
        self._topology += f"SwitchName=core Switches=leaf[0-{switches - 1}]\n"

    def start(self) -> None:
        names = "".join(f"{h.address} {h.name}\n" for h in (self.controller, *self.nodes))
        text = _CONFIGURATION.format(
            controller=self.controller.name,
            folder=self.folder,
            timeout=NODE_TIMEOUT_S,
            nodes=",".join(n.name for n in self.nodes),
        )
        (self.folder / "state").mkdir()
        for host, etc in zip((self.controller, *self.nodes), self._etc, strict=True):
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")  # `ip netns exec` puts it over /etc/hosts
            own = self.folder / host.name
            own.mkdir()
            (own / "slurm.conf").write_text(text.replace("%host", host.name))
            (own / "topology.conf").write_text(self._topology)
            (own / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not used; no look at what is mounted
            self._start_munged(host)
        self._daemon(self.controller, ["slurmctld", "-D", "-i"])
        for node in self.nodes:
            self._daemon(node, ["slurmd", "-D", "-N", node.name])
        self.wait(lambda: all(self.state_of(n) == "idle" for n in self.nodes), "all nodes are idle", _START_S)

    def start_node(self, node: Host) -> None:
        """A node that was killed is back."""
        self._start_munged(node)
        self._daemon(node, ["slurmd", "-D", "-N", node.name])
        self.wait(lambda: self.state_of(node) in ("idle", "allocated"), f"{node.name} is back", _START_S)

    def stop(self) -> None:
        """End every process of every host, no matter who started it, and take the files in /etc away."""
        for host in (self.controller, *self.nodes):
            self.kill(host, lambda _: True)
        for etc in self._etc:
            shutil.rmtree(etc, ignore_errors=True)
        with suppress(OSError):  # others may have theirs in it
            self._etc[0].parent.rmdir()

    # -- looking ----------------------------------------------------------------------------------

    def pids(self, host: Host) -> dict[int, str]:
        """Pid -> command line of what runs on the host."""
        found = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True)
        lines = {}
        for pid in map(int, found.stdout.split()):
            try:
                lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it has ended meanwhile
        return lines

    def state_of(self, node: Host) -> str:
        """Such as idle, allocated, down; "" while slurmctld does not answer."""
        return self.ask("sinfo", "--noheader", f"--nodes={node.name}", "--format=%T").strip().rstrip("*")

    def job_field(self, job: int, field: str) -> str:
        """Of ``scontrol show job``: JobState, NodeList, Restarts, ..."""
        found = re.search(rf"\b{field}=(\S*)", self.ask("scontrol", "--oneliner", "show", "job", str(job)))
        return found.group(1) if found else ""

    def ask(self, *command: str) -> str:
        """The output of one of Slurm's commands, "" if it fails."""
        done = subprocess.run(
            [*self.controller.command, *command], capture_output=True, text=True, check=False, env=self._env()
        )
        return done.stdout if done.returncode == 0 else ""

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {timeout_s:g} s\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """The last lines of every daemon."""
        files = sorted(self.folder.rglob("*.log"))
        return "\n".join(f"--- {f.relative_to(self.folder)}\n{f.read_text(errors='replace')[-2500:]}" for f in files)

    # -- doing ------------------------------------------------------------------------------------

    def submit(self, command: Sequence[str], env: Mapping[str, str], folder: Path) -> int:
        """``sbatch`` with these arguments, from ``folder``. Returns the number of the job."""
        done = subprocess.run(
            [*self.controller.command, "sbatch", "--parsable", *command],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **self._env(), **env},
            cwd=folder,
        )
        assert done.returncode == 0, f"sbatch: {done.stderr}\n{self.logs()}"
        return int(done.stdout.split(";")[0])

    def kill(self, host: Host, which: Callable[[str], bool]) -> list[str]:
        """SIGKILL to all processes of the host whose command line is chosen; what was killed."""
        killed = {}
        for pid, line in self.pids(host).items():
            if which(line):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                killed[pid] = line
        for popen in self._daemons[host.name]:
            if popen.pid in killed:
                popen.wait()
        return list(killed.values())

    def kill_step(self, node: Host) -> list[str]:
        """What the job runs there, and Slurm's own process for it; slurmd lives."""
        return self.kill(node, lambda line: not re.match(r"\S*(slurmd|munged) ", line))

    def crash(self, node: Host) -> list[str]:
        """Everything on the node at once: its power has gone."""
        return self.kill(node, lambda _: True)

    def _env(self, host: Host | None = None) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / (host or self.controller).name / "slurm.conf")}

    def _daemon(self, host: Host, command: Sequence[str]) -> None:
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host.name, *command]
        with open(self.folder / f"{host.name}-{command[0]}.out", "ab") as out:
            self._daemons[host.name].append(
                subprocess.Popen(
                    [*host.command, *named],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=self._env(host),
                )
            )

    def _start_munged(self, host: Host) -> None:
        """One for each host: a daemon accepts no credential twice, and some are for several hosts."""
        own = self.folder / host.name
        key = own / "munge.key"
        if not key.exists():
            key.touch(0o400)
            key.write_bytes(self._key)
        socket = own / "munge.socket"
        files = {"socket": socket, "key-file": key, "pid-file": own / "munge.pid", "log-file": own / "munge.log"}
        files["seed-file"] = own / "munge.seed"
        options = [f"--{name}={path}" for name, path in files.items()]
        socket.unlink(missing_ok=True)
        self._daemon(host, ["munged", "--foreground", "--force", *options])
        self.wait(socket.exists, f"munged of {host.name}", _START_S)


@contextmanager
def cluster(nodes: int) -> Iterator[Cluster]:
    """``nodes`` compute nodes and one more host for slurmctld."""
    folder = Path(mkdtemp(prefix="fr-slurm-"))  # not under pytest's: a socket's path is 108 bytes at most
    folder.chmod(0o755)
    try:
        with hosts.network(nodes + 1) as net:
            found = Cluster(net, folder)
            try:
                found.start()
                yield found
            finally:
                found.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
