"""Other launchers' commands, as people type them, with FlashRecovery below: a rank is killed, and the end is the same.

Each launch is that of ``examples/gpt/launchers``, by the launcher's own program or by its stand-in. The reference is
the same command without a fault.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts import Network, network
from tests.support.jobs import GPT, MARKER, SMALL, Job, RunningJob, check_fired, check_recovered, check_same

LAUNCHERS = GPT / "launchers"
STEPS = ("--steps", "8")
KILL = "rank=1,fault=sigkill,at=backward,step=4"
_SLOW = "--step-time=100"


class LauncherJob(RunningJob):
    """A job that another launcher's command starts. The run directory, and faults, are said by variables."""

    def __init__(
        self,
        run_dir: Path,
        command: Sequence[str],
        *,
        inject: str = "",
        env: Mapping[str, str] | None = None,
        marker: str = "",
    ) -> None:
        self.run_dir = run_dir
        self.marker = marker or uuid.uuid4().hex
        run_dir.parent.mkdir(exist_ok=True)
        variables = {
            "FLASHRECOVERY_RUN_RUN_DIR": str(run_dir),
            **({"FLASHRECOVERY_RUN_INJECT": inject} if inject else {}),
        }
        path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self._start(command, {**path, **variables, **(env or {})})

    def logs(self) -> list[Path]:
        """Of all nodes."""
        return [*super().logs(), *self.run_dir.glob("nodes/*/logs/rank*.log")]


def check_killed(folder: Path, command: Sequence[str], env: Mapping[str, str] | None = None) -> Job:
    """The command with a rank killed, and without, end with the same bits. Returns the job with the fault."""
    job = LauncherJob(folder / "run", command, inject=KILL, env=env).wait(170)
    assert job.code == 0, job.explain()
    check_fired(job)
    check_recovered(job, {1})
    reference = LauncherJob(folder / "reference", command, env=env).wait(170)
    assert not reference.of("failure_detected"), reference.explain()
    assert len(reference.digests) == 4, reference.explain()
    check_same(job, reference)
    return job


@pytest.mark.timeout(400)
@pytest.mark.grid
def test_a_script_that_calls_torchrun(tmp_path: Path) -> None:
    """By the stand-in, with torchrun's variables."""
    env = {"NPROC": "1", "PET_MONITOR_INTERVAL": "1", "FLASHRECOVERY_RUN_NPROC_PER_NODE": "4"}
    job = check_killed(tmp_path, [str(LAUNCHERS / "torchrun.sh"), *SMALL, *STEPS], env)
    assert "--monitor-interval has no meaning here" in job.output


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_the_module_as_torchs(tmp_path: Path) -> None:
    """``python -m flashrecovery.run`` for ``python -m torch.distributed.run``; all is said by PET_ variables."""
    env = {"PET_NPROC_PER_NODE": "4", "PET_STANDALONE": "1", "PET_RDZV_ID": "77", "PET_TEE": "3"}
    command = [sys.executable, "-m", "flashrecovery.run", "--standby=1", str(GPT / "train_ddp.py"), *SMALL, *STEPS]
    job = check_killed(tmp_path, command, env)
    assert "[rank3] " in job.output


@pytest.mark.grid
@pytest.mark.timeout(400)
@pytest.mark.accelerate
def test_accelerate_launch(tmp_path: Path) -> None:
    """Its own command line behind ``flashrecovery run --``, with its configuration file."""
    pytest.importorskip("accelerate")
    job = check_killed(tmp_path, [str(LAUNCHERS / "accelerate.sh"), *SMALL, *STEPS])
    assert "4 processes, precision bf16" in job.output, job.explain()


@pytest.mark.timeout(400)
@pytest.mark.accelerate
@pytest.mark.slow
def test_an_accelerate_configuration(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    config = ["--accelerate-config", str(LAUNCHERS / "accelerate.yaml"), "--standby", "1"]
    command = ["flashrecovery", "run", *config, str(GPT / "train_accelerate.py"), *SMALL, *STEPS]
    job = check_killed(tmp_path, command)
    assert "4 processes, precision bf16" in job.output, job.explain()


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_nemo_run(tmp_path: Path) -> None:
    """NeMo-Run starts ``torchrun``; the plugin has put the stand-in into its place."""
    pytest.importorskip("nemo_run")

    def run_it(name: str, *inject: str) -> Job:
        command = [sys.executable, str(LAUNCHERS / "nemo_run_plugin.py"), "--folder", str(tmp_path / name), *inject]
        env = {"NEMORUN_HOME": str(tmp_path / "home")}
        return LauncherJob(tmp_path / name / "run", [*command, "--", *SMALL, *STEPS], env=env).wait(170)

    job, reference = run_it("killed", "--inject", KILL), run_it("reference")
    check_fired(job)
    check_recovered(job, {1})
    assert len(reference.digests) == 4 and not reference.of("failure_detected"), reference.explain()
    check_same(job, reference)


# -- a hostfile ------------------------------------------------------------------------------------------------

_REMOTE_SHELL = """#!/bin/sh
# As ssh: nothing of this environment, the home folder, and the words joined for the shell there.
host=$1
shift
case $host in
{cases}
    *) echo "$0: $host: no such host" >&2; exit 255 ;;
esac
exec ip netns exec "$space" env -i HOME={home} PATH=/usr/bin:/bin:/usr/sbin:/sbin {marker} sh -c "cd; $*"
"""

_PATIENT = "timeouts: {node_silence_s: 9.0, lease_s: 5.0, node_probe_s: 3.0}"
"""On a busy machine a node may be silent for seconds, and another controller be elected: what other tests are about."""


@pytest.fixture
def net() -> Iterator[Network]:
    with network(3) as made:
        yield made


class Pool:
    """A hostfile of the hosts of ``net`` with two slots each, and what starts programs there."""

    def __init__(self, folder: Path, net: Network) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.marker = uuid.uuid4().hex
        self.hostfile = folder / "hostfile"
        self.hostfile.write_text("".join(f"{host.address} slots=2\n" for host in net.hosts))
        self.shell = folder / "remote"
        cases = "\n".join(f"    {host.address}) space={host.namespace} ;;" for host in net.hosts)
        text = _REMOTE_SHELL.format(cases=cases, home=Path.home(), marker=f"{MARKER}={self.marker}")
        self.shell.write_text(text)
        patient = folder / "patient.yaml"
        patient.write_text(_PATIENT)
        self.environment = {"REMOTE_SHELL": str(self.shell), "FLASHRECOVERY_RUN_CONFIG_FILE": str(patient)}
        self.shell.chmod(self.shell.stat().st_mode | stat.S_IXUSR)


namespaces = pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN")


def on_hosts(folder: Path, net: Network, command: Sequence[str], inject: str = "") -> LauncherJob:
    """``command`` with ``{hostfile}`` and ``{shell}`` filled in, in a separate folder."""
    pool = Pool(folder, net)
    words = [word.format(hostfile=pool.hostfile, shell=pool.shell) for word in command]
    return LauncherJob(folder / "run", words, inject=inject, env=pool.environment, marker=pool.marker)


@namespaces
@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deepspeed_with_a_hostfile(net: Network, tmp_path: Path) -> None:
    """ZeRO-2 on two hosts of two slots, the third one spare; every agent is started by the remote shell."""
    pytest.importorskip("deepspeed")
    command = [str(LAUNCHERS / "deepspeed.sh"), "{hostfile}", *SMALL, *STEPS]
    job = on_hosts(tmp_path / "killed", net, command, KILL).wait(280)
    assert job.code == 0, job.explain()
    check_fired(job)
    check_recovered(job, {1})
    assert {e["node"] for e in job.of("node_joined")} == {host.address for host in net.hosts}, job.explain()
    reference = on_hosts(tmp_path / "reference", net, command).wait(280)
    assert len(reference.digests) == 4 and not reference.of("failure_detected"), reference.explain()
    check_same(job, reference)


DDP_ON_HOSTS = ["flashrecovery", "run", "--hostfile", "{hostfile}", "--remote-shell", "{shell}", "--spare-nodes", "1"]
DDP_SCRIPT = [str(GPT / "train_ddp.py"), *SMALL, "--steps", "60", _SLOW]


@namespaces
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_job_outlives_the_terminal_that_started_it(net: Network, tmp_path: Path) -> None:
    """A rank is killed, then the launching process, and what it has started on one host; the agents go on."""
    reference = on_hosts(tmp_path / "reference", net, [*DDP_ON_HOSTS, *DDP_SCRIPT]).wait(200)
    assert reference.code == 0 and len(reference.digests) == 4, reference.explain()
    job = on_hosts(tmp_path / "killed", net, [*DDP_ON_HOSTS, *DDP_SCRIPT])
    job.wait_for_step(5, 170)
    job.kill(1)
    job.wait_for("recovery_finished")
    os.kill(job.popen.pid, signal.SIGKILL)
    os.kill(_connections(job)[0], signal.SIGKILL)
    assert job.popen.wait() == -signal.SIGKILL
    step = job.newest_step()
    assert step < 50
    _wait_for_end(job)
    ended = job.wait()
    ended.code = 0  # the launching process's own says nothing of the job
    check_recovered(ended, {1})
    check_same(ended, reference)


@namespaces
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_launching_process_ends_all_hosts_when_it_is_told_to(net: Network, tmp_path: Path) -> None:
    job = on_hosts(tmp_path / "job", net, [*DDP_ON_HOSTS, *DDP_SCRIPT])
    job.wait_for_step(3, 170)
    job.popen.terminate()
    ended = job.wait(15)
    assert ended.code == 1 and "stopped by a signal" in ended.output, ended.explain()
    assert not [pid for host in net.hosts for pid in _inside(host.namespace)], "processes are left on the hosts"


@namespaces
@pytest.mark.timeout(200)
def test_a_host_that_cannot_be_started_ends_the_launch(net: Network, tmp_path: Path) -> None:
    """No process waits for it: the other agents are asked to end."""
    pool = Pool(tmp_path / "job", net)
    pool.hostfile.write_text(pool.hostfile.read_text() + "10.77.0.99 slots=2\n")
    command = ["flashrecovery", "run", "--hostfile", str(pool.hostfile), "--remote-shell", str(pool.shell)]
    job = LauncherJob(tmp_path / "job" / "run", [*command, *DDP_SCRIPT], marker=pool.marker).wait(60)
    assert job.code == 1, job.explain()
    assert "10.77.0.99: no such host" in job.output, job.output
    assert "host 10.77.0.99 could not be started (exit code 255)" in job.output, job.output
    assert not [pid for host in net.hosts for pid in _inside(host.namespace)], "processes are left on the hosts"


@namespaces
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_hosts_that_start_themselves(net: Network, tmp_path: Path) -> None:
    """``--no-ssh``: the same command on each, which finds itself in the hostfile."""
    pair = net.part(2)

    def run_it(name: str, inject: str = "") -> Job:
        folder = tmp_path / name
        pool = Pool(folder, pair)
        script = [str(GPT / "train_ddp.py"), *SMALL, *STEPS]
        command = ["flashrecovery", "run", "--hostfile", str(pool.hostfile), "--no-ssh", "--standby", "1", *script]
        env = {"FLASHRECOVERY_TOKEN": "the-token-of-this-test", "GLOO_SOCKET_IFNAME": "eth0"}
        env |= {"FLASHRECOVERY_RUN_RUN_DIR": str(folder / "run"), **pool.environment}
        first, second = (
            LauncherJob(folder / name, [*host.command, *command], inject=inject, env=env)
            for name, host in zip(("run", "second"), pair.hosts, strict=True)
        )
        assert second.popen.wait(170) == 0
        return first.wait(10)

    job, reference = run_it("killed", KILL), run_it("reference")
    check_fired(job)
    check_recovered(job, {1})
    assert len(reference.digests) == 4, reference.explain()
    check_same(job, reference)


def _inside(namespace: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def _connections(job: LauncherJob) -> list[int]:
    """The hosts' sides of the connections: what the remote shell has started there."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if b"flashrecovery.launchers.node" in words and f"{MARKER}={job.marker}".encode() in environment:
            found.append(int(entry.name))
    return found


def _wait_for_end(job: LauncherJob) -> None:
    deadline = time.monotonic() + 120
    while not [e for e in job.events() if e["event"] in ("job_finished", "job_failed")]:
        assert time.monotonic() < deadline, "the job has not ended"
        time.sleep(0.1)
    time.sleep(3.0)  # the agents take their leave
