"""What the example's batch script does when something ends, with stand-ins for Slurm's commands and for flashrecovery.

tests/integration/launchers/test_slurm.py runs it on a real Slurm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from flashrecovery.config import load_run_config
from tests.support.jobs import ROOT

SCRIPT = ROOT / "examples" / "gpt" / "slurm" / "gpt.sbatch"
NODES = ("n1", "n2", "n3")
_PROGRAMS = {
    "scontrol": """
case $* in
    "show hostnames "*) echo "$3" | tr , '\\n' ;;
    *"show node "*) echo "NodeName=$4 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=$4" ;;
    *) echo "scontrol $*" >>called ;;
esac""",
    "squeue": "cat members",
    "sbatch": 'echo "sbatch $*" >>called',
    # a node's step: until someone writes its exit code, or for ever
    "srun": """
node=${3#--nodelist=}
echo "srun $node" >>called
while [ ! -e end-$node ]; do sleep 0.05; done
code=$(cat end-$node); rm end-$node; exit $code""",
    "flashrecovery": """
echo "flashrecovery $*" >>called
echo $$ >controller
trap 'echo told to stop >>called; exit 1' TERM
while [ ! -e end-controller ]; do sleep 0.05; done
exit $(cat end-controller)""",
}


class Script:
    """The script under way, in ``folder``."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        for name, text in _PROGRAMS.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        (folder / "members").write_text(",".join(NODES))
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": ",".join(NODES), "SLURMD_NODENAME": "n1"}
        slurm |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_EXAMPLE_DIR": str(SCRIPT.parent), "NPROC": "8"}
        path = {"PATH": f"{programs}:{os.environ['PATH']}"}
        self._out = open(folder / "output", "w")  # noqa: SIM115 - closed in wait()
        self.popen = subprocess.Popen(
            ["bash", str(SCRIPT), "train.py", "--steps", "9"],
            cwd=folder,
            env={**path, **slurm, **env},
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.wait_for(lambda: self.called("srun") == 3 and (folder / "controller").exists())

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "slurm-7"

    def calls(self) -> list[str]:
        path = self.folder / "called"
        return path.read_text().splitlines() if path.exists() else []

    def called(self, beginning: str) -> int:
        return sum(line.startswith(beginning) for line in self.calls())

    def end(self, what: str, code: int) -> None:
        """A node's step, or ``controller``."""
        (self.folder / f"end-{what}.new").write_text(str(code))
        (self.folder / f"end-{what}.new").rename(self.folder / f"end-{what}")

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{self.calls()}\n{(self.folder / 'output').read_text()}"
            time.sleep(0.02)

    def wait(self) -> int:
        code = self.popen.wait(30)
        self._out.close()
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    scripts = []

    def begin(**env: str) -> Script:
        scripts.append(Script(tmp_path, **env))
        return scripts[-1]

    yield begin
    for script in scripts:
        try:
            os.killpg(script.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        script.popen.wait()


def _finish(script: Script) -> None:
    script.end("controller", 0)
    for node in NODES:
        script.end(node, 0)


def test_a_job_that_finishes(start: Callable[..., Script]) -> None:
    script = start()
    token = script.run_dir / "token"
    assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) == 32
    config = load_run_config(script.run_dir / "job.yaml", {})
    assert (config.nnodes, config.spare_nodes, config.nproc_per_node) == (2, 1, 8)
    assert config.controller == "10.0.0.1:20007" and config.token_file == token and config.resume
    assert config.checkpoint.dir == script.run_dir / "checkpoints" and config.checkpoint.interval_s == "auto"
    assert yaml.safe_load((script.run_dir / "job.yaml").read_text())["embed_controller"] is False
    _finish(script)
    assert script.wait() == 0
    assert token.read_text() not in "".join(script.calls())
    assert script.called("scontrol requeue") == 0


def test_a_step_that_ends_is_started_again(start: Callable[..., Script]) -> None:
    script = start()
    script.end("n2", 137)
    script.wait_for(lambda: script.called("srun n2") == 2)
    _finish(script)
    assert script.wait() == 0


def test_a_node_that_slurm_has_taken_from_the_job(start: Callable[..., Script]) -> None:
    """Its srun hangs for ever. Another job is submitted for it, and nothing more is started there."""
    script = start(REPLACE="--time=1-0 --qos=high")
    (script.folder / "members").write_text("n1,n3")
    script.wait_for(lambda: script.called("sbatch") == 1)
    spare = next(line for line in script.calls() if line.startswith("sbatch"))
    assert spare == f"sbatch --time=1-0 --qos=high {SCRIPT.parent}/spare.sbatch train.py --steps 9"
    assert script.called("srun n2") == 1
    _finish(script)
    assert script.wait() == 0


def test_srun_finds_its_node_lost_and_says_nothing_of_it(start: Callable[..., Script]) -> None:
    """It ends with code 0, as after a job that has ended."""
    script = start(REPLACE="--time=1-0")
    (script.folder / "members").write_text("n1,n3")
    script.end("n2", 0)
    script.wait_for(lambda: script.called("sbatch --time=1-0") == 1)
    _finish(script)
    assert script.wait() == 0
    assert script.called("srun n2") == 1


def test_slurmctld_does_not_answer(start: Callable[..., Script]) -> None:
    """That says nothing of the nodes."""
    script = start(REPLACE="--time=1-0")
    (script.folder / "members").unlink()
    script.end("n2", 137)
    script.wait_for(lambda: script.called("srun n2") == 2)
    assert script.called("sbatch") == 0
    _finish(script)
    assert script.wait() == 0


def test_a_controller_that_is_killed(start: Callable[..., Script]) -> None:
    script = start()
    os.kill(int((script.folder / "controller").read_text()), signal.SIGKILL)
    script.wait_for(lambda: script.called("flashrecovery controller") == 2)
    _finish(script)
    assert script.wait() == 0


@pytest.mark.parametrize(("restarts", "again"), [("", 1), ("2", 1), ("3", 0)])
def test_a_job_that_fails(restarts: str, again: int, start: Callable[..., Script]) -> None:
    """It is queued again, three times by default."""
    script = start(**({"SLURM_RESTART_COUNT": restarts} if restarts else {}))
    for node in NODES:
        script.end(node, 1)
    script.end("controller", 1)
    assert script.wait() == 1
    assert script.called("scontrol requeue 7") == again


def test_the_time_limit_is_near(start: Callable[..., Script]) -> None:
    script = start(SLURM_RESTART_COUNT="99")
    os.kill(script.popen.pid, signal.SIGUSR1)
    assert script.wait() == 1
    assert script.called("told to stop") == 1 and script.called("scontrol requeue 7") == 1


def test_something_is_configured_wrongly(start: Callable[..., Script]) -> None:
    """It would be each time: not queued again."""
    script = start()
    script.end("n2", 2)
    assert script.wait() == 2
    assert script.called("told to stop") == 1 and script.called("scontrol requeue") == 0


@pytest.mark.parametrize(("spare", "words"), [("3", "none is left to train on"), ("7", "none is left")])
def test_too_many_spare_nodes(spare: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SPARE_NODES": spare, "SLURM_SUBMIT_DIR": str(tmp_path)}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
    done = subprocess.run(["bash", str(SCRIPT), "train.py"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and words in done.stderr
