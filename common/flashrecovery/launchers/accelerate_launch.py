"""Asks accelerate what ``accelerate launch`` would do with these arguments, and does not do it.

Run as a separate process by :mod:`.accelerate`. The arguments are parsed, the configuration file is read, and the
variables for the script are made by accelerate's own functions (accelerate 1.15: ``commands/launch.py``,
``utils/launch.py``); what its launchers would then do is left out.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from typing import Any

from flashrecovery.capabilities.of_trainer import ACCELERATE, LAUNCH
from flashrecovery.errors import ConfigError, FlashRecoveryError
from flashrecovery.launchers.accelerate import ANSWER_ENV

_OF_THE_AGENT = ("MASTER_ADDR", "MASTER_PORT", ANSWER_ENV)
"""Variables that are not the script's: the agent sets them for each rank."""
_STANDARD = "standard"
"""The way of DeepSpeed's launchers to start several nodes in which each node is started by itself."""


def main() -> None:
    """Write the answer, or an error message."""
    answers = int(os.environ.pop(ANSWER_ENV))
    try:
        answer = understood(sys.argv[1:])
    except (FlashRecoveryError, ValueError, AssertionError, OSError, ImportError, RuntimeError, TypeError) as e:
        answer = {"error": f"{e}" or repr(e)}
    with open(answers, "w") as out:
        json.dump(answer, out)


def understood(arguments: list[str]) -> dict[str, Any]:
    """Options of ``flashrecovery run``, the script, the variables that differ from this process's, and notices."""
    ACCELERATE.require((LAUNCH,))
    from accelerate.commands import launch
    from accelerate.utils import ComputeEnvironment

    args = launch.launch_command_parser().parse_args(arguments)
    written = frozenset(getattr(args, "nondefault", ()))
    args, defaults, from_file = launch._validate_launch_command(args)
    if args.tpu and not args.cpu:
        raise ConfigError("distributed_type XLA: TPUs are not supported")
    if defaults is not None and defaults.compute_environment != ComputeEnvironment.LOCAL_MACHINE:
        raise ConfigError(f"compute_environment {defaults.compute_environment.value}: allowed: LOCAL_MACHINE")
    options = _options(args, written)
    environment = _environment(launch, args, defaults, from_file)
    return {
        "options": options,
        "words": [args.training_script, *args.training_script_args],
        "environment": {
            name: value
            for name, value in environment.items()
            if os.environ.get(name) != value and name not in _OF_THE_AGENT
        },
        "notices": _notices(args, written),
    }


def _options(args: Namespace, written: frozenset[str]) -> dict[str, Any]:
    """The job's shape, and what accelerate passes on to torchrun."""
    machines, processes = int(args.num_machines or 1), max(1, int(args.num_processes or 1))
    if processes % machines:
        raise ConfigError(f"num_processes {processes}: every one of the {machines} machines needs the same number")
    options: dict[str, Any] = {name: True for name in ("module", "no_python") if getattr(args, name)}
    passed_on = {name: getattr(args, name) for name in ("max_restarts", "tee", "log_dir", "role") if name in written}
    options |= {name: value for name, value in passed_on.items() if value is not None}
    hostfile = _hostfile(args, machines)
    if hostfile is not None:
        options |= {"hostfile": hostfile, **_filters(args, processes // machines)}
    else:
        options |= {"nproc_per_node": str(processes // machines), "nnodes": str(machines)}
    if machines > 1:
        options |= {"rdzv_backend": args.rdzv_backend or "static"}
        options |= {"master_addr": args.main_process_ip} if args.main_process_ip else {}
        options |= {"master_port": args.main_process_port} if args.main_process_port else {}
        by_itself = hostfile is None or args.deepspeed_multinode_launcher == "nossh"
        if args.machine_rank is not None and by_itself:
            options |= {"node_rank": int(args.machine_rank)}
    return options


def _hostfile(args: Namespace, machines: int) -> str | None:
    """The hostfile from which one machine would start the others, if it would."""
    if machines == 1:
        return None
    if args.use_deepspeed and not args.cpu and args.deepspeed_multinode_launcher != _STANDARD:
        return str(args.deepspeed_hostfile) if args.deepspeed_hostfile is not None else None
    return str(args.mpirun_hostfile) if args.mpirun_hostfile is not None else None


def _filters(args: Namespace, each: int) -> dict[str, Any]:
    """As ``prepare_deepspeed_cmd_env`` passes them on to ``deepspeed``."""
    alone = {"no_ssh": True} if args.deepspeed_multinode_launcher == "nossh" else {}
    if args.deepspeed_exclusion_filter is not None:
        return {"exclude": str(args.deepspeed_exclusion_filter), **alone}
    if args.deepspeed_inclusion_filter is not None:
        return {"include": str(args.deepspeed_inclusion_filter), **alone}
    return {"num_gpus": each, **alone}


def _environment(launch: Any, args: Namespace, defaults: Any, from_file: bool) -> dict[str, str]:
    """The variables that accelerate would set, by its own functions (see ``launch_command``).

    They also look for a free port, in which a job that is started again under its controller's port must not fail.
    """
    args.main_process_port, args.mpirun_hostfile = 0, None
    args.machine_rank = args.machine_rank or 0
    if args.use_deepspeed and not args.cpu:
        fields = list(defaults.deepspeed_config) if defaults else []
        args.deepspeed_fields_from_accelerate_config = ",".join([*fields, *(["mixed_precision"] if from_file else [])])
        _, environment = launch.prepare_deepspeed_cmd_env(args)
    elif (args.use_fsdp or args.use_megatron_lm or args.multi_gpu) and not args.cpu:
        environment = launch.prepare_multi_gpu_env(args)
    else:
        _, environment = launch.prepare_simple_launcher_cmd_env(args)
        return dict(environment)
    if not launch.check_cuda_p2p_ib_support():
        environment = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", **environment}
    return dict(environment)


def _notices(args: Namespace, written: frozenset[str]) -> list[str]:
    found = []
    if "monitor_interval" in written:
        found.append("accelerate launch --monitor_interval has no meaning here: nothing is polled for")
    if args.rdzv_conf and "rdzv_conf" in written:
        found.append("accelerate launch --rdzv_conf has no meaning here: the nodes meet at the controller")
    return found


if __name__ == "__main__":
    main()
