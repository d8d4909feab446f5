"""The command line of ``deepspeed`` (DeepSpeed 0.19, deepspeed/launcher/runner.py) in options of ``flashrecovery run``.

DeepSpeed gives each process ``--local_rank=N`` as the script's first argument, unless ``--no_local_rank`` is given, and
so does this. DeepSpeed is not imported; a unit test compares the options with those of the installed one.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from flashrecovery.errors import ConfigError
from flashrecovery.launchers.launch import Options, Understood
from flashrecovery.runtime.environment import LOCAL_RANK_MACRO

DEFAULT_HOSTFILE = Path("/job/hostfile")
_PASSED_ON = "include exclude num_nodes num_gpus master_addr master_port node_rank module no_python no_ssh force_multi"
_REFUSED = {
    "autotuning": "tune with the command `deepspeed`, then train with what it has found",
    "bind_cores_to_rank": "processes are not bound; let the script bind itself (os.sched_setaffinity, with LOCAL_RANK)",
    "bind_core_list": "processes are not bound; let the script bind itself (os.sched_setaffinity, with LOCAL_RANK)",
    "venv_script": "the interpreter of this process is used on all nodes; start the environment's own `flashrecovery`",
}
_NO_MEANING = {
    "save_pid": "the launcher's process id is in the run directory, in controller.json",
    "launcher_args": "see --remote-shell",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"deepspeed: {message}")


def parser() -> argparse.ArgumentParser:
    """The options of ``deepspeed``; what is not given is None."""
    p = _Parser(prog="deepspeed", add_help=False, argument_default=None)
    p.add_argument("-H", "--hostfile", type=Path)
    p.add_argument("-i", "--include")
    p.add_argument("-e", "--exclude")
    p.add_argument("--num_nodes", type=int)
    p.add_argument("--num_gpus", "--num_accelerators", type=int)
    p.add_argument("--master_port", type=int)
    p.add_argument("--master_addr")
    p.add_argument("--node_rank", type=int)
    p.add_argument("--launcher", default="pdsh")
    p.add_argument("--launcher_args")
    p.add_argument("--enable_each_rank_log")
    p.add_argument("--autotuning")
    p.add_argument("--bind_core_list")
    p.add_argument("--ssh_port", type=int)
    p.add_argument("--venv_script")
    p.add_argument("--log_level")
    flags = "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid bind_cores_to_rank"
    for name in flags.split():
        p.add_argument(f"--{name}", action="store_true", default=None)
    p.add_argument("-q", "--quiet", action="store_true", default=None)
    p.add_argument("user_script")
    p.add_argument("user_args", nargs=argparse.REMAINDER)
    return p


def understood(arguments: Sequence[str]) -> Understood:
    """What ``deepspeed ARGUMENTS`` is to do. Raises ConfigError."""
    given = {name: value for name, value in vars(parser().parse_args(arguments)).items() if value is not None}
    for name, instead in _REFUSED.items():
        if name in given:
            raise ConfigError(f"deepspeed --{name}: {instead}")
    useless = [(name, why) for name, why in _NO_MEANING.items() if name in given]
    notices = tuple(f"deepspeed --{name} has no meaning here: {why}" for name, why in useless)
    words = (given["user_script"], *given["user_args"])
    if "no_local_rank" not in given:
        words = (words[0], f"--local_rank={LOCAL_RANK_MACRO}", *words[1:])
    return Understood(_options(given), words, notices=notices)


def _options(given: dict[str, Any]) -> Options:
    options: Options = {name: given[name] for name in _PASSED_ON.split() if name in given}
    options = {name: value for name, value in options.items() if value not in ("", -1)}
    if given["launcher"].lower() != "pdsh":
        raise ConfigError(
            f"deepspeed --launcher {given['launcher']}: allowed: pdsh. Another program's command that starts one "
            "process on a host can be given: flashrecovery run --remote-shell COMMAND --hostfile FILE"
        )
    if "ssh_port" in given:
        options["remote_shell"] = shlex.join(["ssh", "-p", str(given["ssh_port"])])
    if given.get("enable_each_rank_log", "None") != "None":
        options["log_dir"] = given["enable_each_rank_log"]
    hostfile = given.get("hostfile", DEFAULT_HOSTFILE)
    if hostfile.is_file() or "hostfile" in given:
        options["hostfile"] = hostfile
    elif not {"include", "exclude", "num_gpus", "num_nodes"} & options.keys():
        options["nproc_per_node"] = "gpu"
    return options
