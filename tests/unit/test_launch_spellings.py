"""What ``flashrecovery run`` makes of launchers' command lines, variables and files, before anything is started."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from flashrecovery.cli.run import Launch, check_options, launch_of, run
from flashrecovery.errors import ConfigError
from flashrecovery.launchers import accelerate_launch, deepspeed, remote, shim
from flashrecovery.launchers.hosts import found
from flashrecovery.runtime.environment import with_local_rank

POOL = "n0 slots=4\nn1 slots=4\nn2 slots=4\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script and a hostfile, and no launcher's variables."""
    for name in [name for name in os.environ if name.startswith(("PET_", "FLASHRECOVERY_", "CUDA_VISIBLE"))]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text(POOL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(*words: str) -> Launch:
    with run.make_context("run", list(words)) as context:
        return launch_of(context.params)


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        launch(*words)
    return str(caught.value)


# -- torchrun ----------------------------------------------------------------------------------------------

TORCHRUN = ["--nproc_per_node=3", "--max-restarts=1", "train.py", "--nproc-per-node", "9"]


@pytest.mark.parametrize(
    "before",
    [
        [],
        ["--", "torchrun"],
        ["/opt/conda/bin/torchrun"],
        ["--", "python", "-m", "torch.distributed.run"],
        ["--", "python3.11", "-u", "-m", "torch.distributed.run"],
        ["-m", "torch.distributed.run"],
        ["--", "python", "-m", "torch.distributed.launch", "--use_env"],
    ],
)
def test_torchruns_command_line(before: list[str]) -> None:
    found = launch("--standby", "1", *before, *TORCHRUN)
    assert found.command == ["train.py", "--nproc-per-node", "9"]
    assert (found.config.nproc_per_node, found.config.max_restarts, found.config.standby) == (3, 1, 1)


def test_the_old_launchers_local_rank() -> None:
    found = launch("--", "python", "-m", "torch.distributed.launch", "--nproc_per_node", "2", "train.py", "-x")
    assert found.command == ["train.py", "--local-rank=${local_rank}", "-x"]
    assert [with_local_rank(word, {"LOCAL_RANK": "3"}) for word in found.command[1:]] == ["--local-rank=3", "-x"]


def test_options_before_another_launcher_count_more() -> None:
    found = launch("--nproc-per-node", "2", "--inject", "rank=0", "--", "torchrun", "--inject", "rank=1", *TORCHRUN)
    assert found.config.nproc_per_node == 2
    assert [fault.rank for fault in found.config.inject] == [1, 0]


def test_a_variable_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHRECOVERY_RUN_INJECT", "rank=0,at=backward,step=1")
    assert len(launch("--", "torchrun", "train.py").config.inject) == 1
    assert len(launch("train.py").config.inject) == 1


def test_what_counts_more_than_what(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options, their variables, another launcher's options, the file, torchrun's variables."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    monkeypatch.setenv("PET_ROLE", "worker")
    assert launch("train.py").config.nproc_per_node == 2
    (folder / "c.yaml").write_text("nproc_per_node: 3\nrun_id: mine")
    monkeypatch.setenv("PET_RDZV_ID", "theirs")
    config = launch("--config", "c.yaml", "train.py").config
    assert (config.nproc_per_node, config.role, config.run_id) == (3, "worker", "mine")
    torchrun = ["--", "torchrun", "--nproc-per-node", "4", "train.py"]
    assert launch("--config", "c.yaml", *torchrun).config.nproc_per_node == 4
    monkeypatch.setenv("FLASHRECOVERY_RUN_NPROC_PER_NODE", "5")
    monkeypatch.setenv("FLASHRECOVERY_RUN_STANDBY", "2")
    config = launch("--config", "c.yaml", *torchrun).config
    assert (config.nproc_per_node, config.standby) == (5, 2)
    assert launch("--nproc-per-node", "6", *torchrun).config.nproc_per_node == 6


def test_where_the_variables_say_that_nodes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubeflow's Trainer sets them; not where the controller is said to be elsewhere."""
    variables = {"NNODES": "2", "NPROC_PER_NODE": "4", "NODE_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(f"PET_{name}", value)
    config = launch("train.py").config
    assert (config.nnodes, config.node_rank, config.controller, config.master_port) == (2, 1, "n0:29500", 0)
    config = launch("--controller", "c", "train.py").config
    assert (config.nnodes, config.controller, config.master_port) == (2, "c:29400", 0)


def test_modules_and_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch("-m", "pkg.train", "a").command == ["-m", "pkg.train", "a"]
    assert launch("--", "python", "-u", "train.py", "a").command == ["train.py", "a"]
    assert launch("--no-python", "--", "python", "-m", "pkg", "a").command == ["-m", "pkg", "a"]
    program = folder / "mytrain"
    program.write_text("#!/usr/bin/env python3\nprint()")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert launch("--no-python", "mytrain", "a").command == [str(program), "a"]
    monkeypatch.setenv("PET_MODULE", "1")
    assert launch("pkg.train").command == ["-m", "pkg.train"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--no-python", "bash", "run.sh"], "--no-python 'bash': no Python program"),
        (["--no-python", "nowhere"], "'nowhere': there is no such program"),
        (["--no-python", "-m", "pkg"], "only one of them"),
        (["--", "python", "-c", "pass"], "allowed: python [-u] SCRIPT"),
        (["nowhere.py"], "'nowhere.py' does not exist"),
        (["--", "torchrun", "--numa-binding", "node", "train.py"], "--numa-binding"),
    ],
)
def test_what_cannot_be_started(words: list[str], expected: str) -> None:
    assert expected in refused(*words)


# -- deepspeed ----------------------------------------------------------------------------------------------


def test_the_options_are_deepspeeds() -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    import argparse
    from unittest.mock import patch

    theirs: list[argparse.Action] = []
    with patch.object(argparse.ArgumentParser, "parse_args", lambda self, args=None: theirs.extend(self._actions)):
        runner.parse_args([])
    ours = {name: action for action in deepspeed.parser()._actions for name in action.option_strings}
    names = {name: action for action in theirs for name in action.option_strings if action.dest != "help"}
    assert {name: action.nargs == 0 for name, action in names.items()} == {n: a.nargs == 0 for n, a in ours.items()}


def test_a_hostfile_starts_agents_on_its_hosts() -> None:
    found = launch("--standby", "1", "--hostfile", "hosts", "--spare-nodes", "1", "train.py", "-x")
    config = found.config
    assert (config.nnodes, config.spare_nodes, config.nproc_per_node, config.controller) == (2, 1, 4, "n0:29400")
    assert found.hosts is not None and found.hosts.here is None and [*found.hosts.resources] == ["n0", "n1", "n2"]
    assert found.shell == ["ssh"] and found.command == ["train.py", "-x"]


def test_deepspeeds_command_line() -> None:
    words = ["-H", "hosts", "-i", "n2@n1", "--master_port", "7", "--ssh_port", "23", "--launcher", "PDSH", "train.py"]
    found = launch("--", "deepspeed", *words, "--deepspeed", "c.json")
    assert found.command == ["train.py", "--local_rank=${local_rank}", "--deepspeed", "c.json"]
    assert found.config.controller == "n1:7" and found.shell == ["ssh", "-p", "23"] and found.config.master_port == 0
    assert found.hosts is not None and [*found.hosts.resources] == ["n1", "n2"]
    alone = launch("--", "deepspeed", "--num_gpus=2", "--no_local_rank", "--module", "pkg", "-x")
    assert alone.command == ["-m", "pkg", "-x"] and alone.config.nproc_per_node == 2 and alone.hosts is None
    assert alone.environment == {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_a_host_by_itself() -> None:
    found = launch("--hostfile", "hosts", "--exclude", "n0@n1:0@n2:3", "--no-ssh", "--node-rank", "1", "train.py")
    config = found.config
    assert found.hosts is None and found.environment == {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    assert (config.nnodes, config.nproc_per_node, config.node_rank, config.node_name) == (2, 3, 1, "n2")
    assert config.controller == "n1:29400"


def test_a_host_finds_itself_in_the_hostfile(folder: Path) -> None:
    assert found({"hostfile": folder / "hosts", "no_ssh": True}, {}, lambda host: host == "n2").here == 2
    with pytest.raises(ConfigError, match="0 of the hosts n0, n1, n2 are this one; say which with --node-rank"):
        found({"hostfile": folder / "hosts", "no_ssh": True}, {}, lambda host: False)


def test_what_the_configuration_file_says_of_hosts(folder: Path) -> None:
    (folder / "c.yaml").write_text("spare_nodes: 1\ncontroller: n2:7\nstandby: 3")
    config = launch("--hostfile", "hosts", "--config", "c.yaml", "train.py").config
    assert (config.nnodes, config.spare_nodes, config.controller, config.standby) == (2, 1, "n2:7", 3)


def test_a_single_host_is_this_one_unless_it_is_said() -> None:
    here = launch("--hostfile", "hosts", "--include", "n1:1,3", "train.py")
    assert here.hosts is None and here.environment == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert (here.config.nnodes, here.config.nproc_per_node, here.config.controller) == (1, 2, None)
    there = launch("--hostfile", "hosts", "--include", "n1", "--force-multi", "--remote-shell", "a b", "train.py")
    assert there.hosts is not None and there.shell == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--hostfile", "nowhere", "train.py"], "--hostfile nowhere: No such file"),
        (["--hostfile", "hosts", "--nnodes", "2", "train.py"], "--nnodes 2: the hostfile and its filters say it"),
        (["--hostfile", "hosts", "--exclude", "n1:0", "train.py"], "n0: 4, n1: 3, n2: 4"),
        (["--hostfile", "hosts", "--spare-nodes", "3", "train.py"], "at most 2 of the hosts can be spare"),
        (["--hostfile", "hosts", "--no-ssh", "--node-rank", "3", "train.py"], "--node-rank 3: allowed: 0 to 2"),
        (["--num-nodes", "2", "train.py"], "--num-nodes 2 needs --hostfile"),
        (["--", "deepspeed", "--launcher", "openmpi", "train.py"], "--launcher openmpi: allowed: pdsh"),
        (["--", "deepspeed", "--autotuning", "run", "train.py"], "--autotuning"),
        (["--", "deepspeed", "--bind_cores_to_rank", "train.py"], "--bind_cores_to_rank"),
        (["--", "deepspeed", "--nonsense", "train.py"], "deepspeed: "),
    ],
)
def test_wrong_hosts_are_named(words: list[str], expected: str) -> None:
    assert expected in refused(*words)


def test_a_first_host_that_others_cannot_reach(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=1\nn1 slots=1\n")
    assert "the first host is localhost" in refused("--hostfile", "hosts", "train.py")
    assert launch("--hostfile", "hosts", "--controller", "n1", "train.py").config.controller == "n1:29400"


def test_the_variables_of_torchrun_do_not_count_beside_a_hostfile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "7")
    monkeypatch.setenv("PET_MASTER_ADDR", "elsewhere")
    config = launch("--hostfile", "hosts", "train.py").config
    assert (config.nnodes, config.controller) == (3, "n0:29400")


def test_what_hosts_are_told(folder: Path) -> None:
    """As DeepSpeed: chosen variables, those of .deepspeed_env, and the folder in PYTHONPATH."""
    (folder / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\nA=b=c\n")
    (folder / "home").mkdir()
    environ = {"PATH": "/bin", "NCCL_DEBUG": "WARN", "SECRET": "x", "PYTHONPATH": "/p"}
    told = remote.exported(environ, folder, folder / "home")
    assert told == {"PATH": "/bin", "NCCL_DEBUG": "INFO", "A": "b=c", "PYTHONPATH": f"{folder}:/p"}
    (folder / ".deepspeed_env").write_text("A\n")
    with pytest.raises(ConfigError, match=r"\.deepspeed_env, line 1: 'A' is not NAME=VALUE"):
        remote.exported(environ, folder, folder / "home")


def test_nothing_secret_is_in_the_command() -> None:
    order = remote.HostOrder("n0", "the-token", "/f", {"A": "b c"}, {}, ["train.py"], "/out")
    words = remote.command_for(["ssh", "-p", "23"], order.name, "/p:/q")
    assert words[:4] == ["ssh", "-p", "23", "n0"] and words[-1] == "flashrecovery.launchers.node"
    assert "the-token" not in " ".join(words) and json.loads(order.line())["token"] == "the-token"


# -- accelerate -----------------------------------------------------------------------------------------------

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
num_machines: 2
num_processes: 8
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29555
mixed_precision: bf16
main_training_function: main
use_cpu: false
{more}
"""
ZERO = "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 4, deepspeed_multinode_launcher: standard}"
FSDP = "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}"


@pytest.fixture(autouse=True)
def no_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration file of this machine's user."""
    monkeypatch.setenv("HF_HOME", "/nonexistent")


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        (
            "DEEPSPEED",
            ZERO,
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
                "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
            },
        ),
        ("FSDP", FSDP, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}),
        ("MULTI_GPU", "dynamo_config: {dynamo_backend: INDUCTOR}", {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
    ],
)
def test_accelerates_configuration(kind: str, more: str, expected: dict[str, str], folder: Path) -> None:
    pytest.importorskip("accelerate")
    (folder / "a.yaml").write_text(ACCELERATE.format(kind=kind, more=more))
    found = accelerate_launch.understood(["--config_file", "a.yaml", "--tee", "3", "train.py", "-x"])
    shape = {"nnodes": "2", "nproc_per_node": "4", "node_rank": 1, "tee": "3"}
    meeting = {"rdzv_backend": "static", "master_addr": "10.0.0.1", "master_port": 29555}
    assert found["options"] == {**shape, **meeting} and found["words"] == ["train.py", "-x"]
    expected = {**expected, "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert {name: found["environment"].get(name) for name in expected} == expected
    assert not {"MASTER_ADDR", "MASTER_PORT"} & found["environment"].keys()


def test_an_accelerate_configuration_file(folder: Path) -> None:
    pytest.importorskip("accelerate")
    (folder / "a.yaml").write_text(ACCELERATE.format(kind="FSDP", more=FSDP))
    found = launch("--accelerate-config", "a.yaml", "--standby", "1", "train.py", "-x")
    config = found.config
    assert (config.nnodes, config.nproc_per_node, config.node_rank, config.standby) == (2, 4, 1, 1)
    assert config.controller == "10.0.0.1:29555" and found.command == ["train.py", "-x"]
    assert found.environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"


def test_accelerates_command_line(folder: Path) -> None:
    """Its own options count more than its file, and ours more than both. With a hostfile it starts the others."""
    pytest.importorskip("accelerate")
    more = f"deepspeed_config: {{deepspeed_hostfile: {folder}/hosts, deepspeed_inclusion_filter: n0@n1}}"
    (folder / "a.yaml").write_text(ACCELERATE.format(kind="DEEPSPEED", more=more))
    given = ["--", "accelerate", "launch", "--config_file", "a.yaml", "--mixed_precision", "fp16", "train.py"]
    found = launch("--standby", "1", *given)
    assert found.hosts is not None and [*found.hosts.resources] == ["n0", "n1"] and found.config.standby == 1
    assert found.environment["ACCELERATE_MIXED_PRECISION"] == "fp16" and found.config.node_rank is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--accelerate-config", "nowhere", "train.py"], "--accelerate-config nowhere: there is no such file"),
        (["--accelerate-config", "hosts", "--", "torchrun", "train.py"], "not allowed before another launcher"),
        (["--", "accelerate", "launch", "--num_processes"], "refused by accelerate itself"),
    ],
)
def test_what_accelerate_refuses(words: list[str], expected: str) -> None:
    pytest.importorskip("accelerate")
    assert expected in refused(*words)


@pytest.mark.parametrize(
    ("kind", "processes", "expected"), [("MULTI_GPU", 7, "every one of the 2 machines"), ("XLA", 8, "TPUs")]
)
def test_what_is_refused_of_accelerate(kind: str, processes: int, expected: str, folder: Path) -> None:
    pytest.importorskip("accelerate")
    text = ACCELERATE.format(kind=kind, more="").replace("num_processes: 8", f"num_processes: {processes}")
    (folder / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=expected):
        accelerate_launch.understood(["--config_file", "a.yaml", "train.py"])


# -- stand-ins ------------------------------------------------------------------------------------------------


def test_stand_ins_pass_on(folder: Path) -> None:
    """Their own text, run by a shell, with a program in the interpreter's place that prints its arguments."""
    paths = shim.write(folder / "shims", ["--standby", "1", "--run-dir", "a b"])
    assert [path.name for path in paths] == [*shim.PROGRAMS]
    real = folder / "real"
    real.mkdir()
    (real / "accelerate").write_text('#!/bin/sh\nprintf "real:%s\\n" "$@"\n')
    (real / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    for path in real.iterdir():
        path.chmod(0o755)
    for path in paths:
        path.write_text(path.read_text().replace(sys.executable, str(real / "python")))
    before = ["-m", "flashrecovery.run", "--standby", "1", "--run-dir", "a b", "--"]

    def run_it(*words: str) -> list[str]:
        env = {**os.environ, "PATH": f"{folder / 'shims'}:{real}:{os.environ['PATH']}"}
        return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.splitlines()

    assert run_it("torchrun", "--x", "a b") == [*before, "torchrun", "--x", "a b"]
    assert run_it("deepspeed", "t.py") == [*before, "deepspeed", "t.py"]
    assert run_it("accelerate", "launch", "t.py") == [*before, "accelerate", "launch", "t.py"]
    assert run_it("accelerate", "env", "a b") == ["real:env", "real:a b"]


def test_stand_ins_replace_no_other_program(folder: Path) -> None:
    shim.write(folder / "shims", [])
    shim.write(folder / "shims", ["--standby", "2"])
    assert "--standby 2" in (folder / "shims" / "torchrun").read_text()
    (folder / "shims" / "deepspeed").write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match="deepspeed is another program"):
        shim.write(folder / "shims", [])


@pytest.mark.parametrize("options", [["--standbi", "1"], ["--standby", "1", "train.py"], ["--standby"]])
def test_stand_ins_options_are_checked_when_they_are_written(options: list[str]) -> None:
    check_options(["--standby", "1", "--inject", "rank=0"])
    with pytest.raises(ConfigError, match=r"standb|train\.py"):
        check_options(options)


def test_unknown_options_are_named() -> None:
    with pytest.raises(click.UsageError, match="--rdzv-endpont"):
        launch("--rdzv-endpont", "a:1", "train.py")


# -- agents on other hosts ---------------------------------------------------------------------------------------


def _started(folder: Path, *endings: str) -> tuple[int, str]:
    """Hosts whose side of the connection is a shell with these commands."""
    shell = folder / "remote"
    cases = "\n".join(f"h{number}) {ending} ;;" for number, ending in enumerate(endings))
    shell.write_text(f"#!/bin/sh\nread order\ncase $1 in\n{cases}\nesac\n")
    shell.chmod(0o755)
    orders = [
        remote.HostOrder(f"h{number}", "t", str(folder), {"PYTHONPATH": ""}, {}, ["train.py"], str(folder / "out"))
        for number in range(len(endings))
    ]
    return asyncio.run(remote.run_on(orders, [str(shell)]))


_UP, _ENDED = f"echo '{remote.UP}'", f"echo '{remote.ENDED}'"


@pytest.mark.parametrize(
    ("endings", "code", "expected"),
    [
        ([f"{_UP}; {_ENDED}; exit 0", f"{_UP}; {_ENDED}; exit 1"], 0, ""),
        ([f"{_UP}; {_ENDED}; exit 1", f"{_UP}; {_ENDED}; exit 1"], 1, "exit codes h0: 1, h1: 1"),
        ([f"{_UP}; exit 255", f"{_UP}; {_ENDED}; exit 0"], 0, ""),
        ([f"{_UP}; exit 255", f"{_UP}; {_ENDED}; exit 1"], 1, "connections to h0 are lost"),
        (
            ["exit 255", f"{_UP}; read word; [ $word = stop ] && exit 1"],
            1,
            "host h0 could not be started (exit code 255)",
        ),
        ([f"{_UP}; exit 2", f"{_UP}; read word; [ $word = stop ] && exit 1"], 2, "host h0 was refused"),
    ],
)
def test_how_agents_on_other_hosts_end(
    endings: list[str], code: int, expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found, reason = _started(folder, *endings)
    assert found == code and expected in reason and bool(reason) == bool(expected)
    assert "flashrecovery" not in capfd.readouterr().out


def test_a_remote_shell_that_is_not_there(folder: Path) -> None:
    order = remote.HostOrder("h0", "t", str(folder), {"PYTHONPATH": ""}, {}, ["train.py"], str(folder / "out"))
    found, reason = asyncio.run(remote.run_on([order], ["nowhere-to-be-found"]))
    assert found == 1 and "host h0 could not be started (exit code 127)" in reason


def test_a_hosts_agent_gets_its_order(folder: Path) -> None:
    """The host's side, with an agent that is refused at once; what it writes comes by file."""
    order = remote.HostOrder(
        "h0",
        "the-token-of-this-test",
        str(folder),
        {"A": "b"},
        {"nnodes": "x"},
        ["train.py"],
        str(folder / "o" / "out"),
    )
    done = subprocess.run(
        [sys.executable, "-m", "flashrecovery.launchers.node"], input=order.line(), capture_output=True, check=False
    )
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 2 and lines[0] == remote.UP and lines[-1] == remote.ENDED
    assert "nnodes = 'x'" in lines[1] and "nnodes = 'x'" in (folder / "o" / "out").read_text()
