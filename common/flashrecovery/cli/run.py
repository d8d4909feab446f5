"""``flashrecovery run``: torchrun's spelling wherever torchrun has the option, and other launchers' as they are.

What other launchers' options, variables and files mean is in :mod:`flashrecovery.launchers`; here everything becomes
one :class:`~flashrecovery.config.RunConfig`. The first that says something counts: these options, or their variables
``FLASHRECOVERY_RUN_<OPTION>``; those of another launcher's command line behind them; the configuration file;
torchrun's variables ``PET_<OPTION>``.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from flashrecovery.cli.quiet import import_grpc
from flashrecovery.config import CONTROLLER_PORT, RunConfig, overlaid, parse_fault, read_config, run_config
from flashrecovery.errors import ConfigError
from flashrecovery.launchers import accelerate, commands, hosts, remote, torchrun
from flashrecovery.launchers.hosts import Hosts
from flashrecovery.launchers.launch import Options, Understood
from flashrecovery.security import TOKEN_ENV, new_token

_NOT_SETTINGS = ("config_file", "accelerate_config", "module", "no_python", "script", "script_args", "remote_shell")
_PATHS = ("hostfile", "run_dir", "token_file", "checkpoint_dir")


def _both(name: str) -> tuple[str, ...]:
    """``--a-b`` and, as torchrun takes it, too, ``--a_b``."""
    return (f"--{name}", f"--{name.replace('-', '_')}") if "-" in name else (f"--{name}",)


@click.command(context_settings={"allow_interspersed_args": False, "auto_envvar_prefix": "FLASHRECOVERY_RUN"})
@click.option(*_both("nproc-per-node"), default=None, help="Processes on this node: a number, gpu, cpu, auto.")
@click.option("--nnodes", default=None, help="Nodes that hold ranks; MIN:MAX: MIN of them, the others are spare.")
@click.option(
    *_both("spare-nodes"), type=int, default=None, help="Further nodes that wait for one of these to be lost."
)
@click.option(*_both("node-rank"), type=int, default=None, help="This node's number; default: as they come.")
@click.option("--spare", is_flag=True, default=None, help="This node is a spare one.")
@click.option("--node-name", default=None, help="This node's name, unique in the job; default: the host name.")
@click.option("--node-address", default=None, help="This node's address for the others.")
@click.option("--failure-domain", default=None, help="What fails together with this node: its switch, its rack.")
@click.option("--slots", type=int, default=None, help="Ranks that this node can hold.")
@click.option(
    *_both("master-port"), type=int, default=None, help="Port of the TCPStore, 0: any free one; see --master-addr."
)
@click.option(
    "--controller",
    default=None,
    help=f"HOST[:PORT] of the controller, on one of the nodes (several nodes); port {CONTROLLER_PORT} by default.",
)
@click.option(*_both("rdzv-endpoint"), default=None, help="Of torchrun: several nodes' controller is there.")
@click.option(
    *_both("master-addr"), default=None, help="Of torchrun: several nodes' controller is there, at --master-port."
)
@click.option(*_both("rdzv-backend"), default=None, help="Of torchrun: static | c10d; the controller does its work.")
@click.option(*_both("rdzv-id"), default=None, help="Of torchrun: TORCHELASTIC_RUN_ID. The token tells jobs apart.")
@click.option(*_both("rdzv-conf"), default=None, help="Of torchrun: join_timeout=SECONDS, for timeouts.rendezvous_s.")
@click.option("--standalone", is_flag=True, default=None, help="Of torchrun: one node, the default.")
@click.option(*_both("local-addr"), default=None, help="Of torchrun: --node-address.")
@click.option("--role", default=None, help="Of torchrun: ROLE_NAME.")
@click.option(*_both("log-dir"), default=None, help="Of torchrun: where run directories are made (default: runs).")
@click.option("-r", "--redirects", default=None, help="Of torchrun: 3 shows no rank; logs are always written.")
@click.option("-t", "--tee", default=None, help="Of torchrun: 1, 2, 3 show all ranks; logs are always written.")
@click.option(*_both("local-ranks-filter"), default=None, help="Of torchrun: 0 shows rank 0, other numbers all ranks.")
@click.option(*_both("shutdown-timeout"), default=None, help="Of torchrun: timeouts.shutdown_grace_s, at most 4.")
@click.option(*_both("signals-to-handle"), default=None, help="Of torchrun: those that end a job.")
@click.option(*_both("run-path"), is_flag=True, default=None, help="Of torchrun: as always here.")
@click.option(*_both("no-python"), is_flag=True, default=None, help="Of torchrun: SCRIPT is a program, in Python.")
@click.option(*_both("monitor-interval"), default=None, help="Of torchrun: no meaning here.")
@click.option(*_both("event-log-handler"), default=None, help="Of torchrun: no meaning here.")
@click.option(*_both("duplicate-stdout-filters"), default=None, help="Of torchrun: no meaning here.")
@click.option(*_both("duplicate-stderr-filters"), default=None, help="Of torchrun: no meaning here.")
@click.option(*_both("logs-specs"), default=None, help="Of torchrun: refused.")
@click.option(*_both("numa-binding"), default=None, help="Of torchrun: refused.")
@click.option(*_both("virtual-local-rank"), is_flag=True, default=None, help="Of torchrun: refused.")
@click.option("-H", "--hostfile", type=click.Path(path_type=Path), default=None, help="Hosts, as for `deepspeed`.")
@click.option("-i", "--include", default=None, help="Of the hostfile: HOST[:SLOT,SLOT...]@HOST...")
@click.option("-e", "--exclude", default=None, help="The same, to be left out.")
@click.option(*_both("num-nodes"), type=int, default=None, help="Only the first hosts of the hostfile.")
@click.option(*_both("num-gpus"), "--num_accelerators", type=int, default=None, help="Only the first GPUs of a host.")
@click.option(*_both("no-ssh"), is_flag=True, default=None, help="With --hostfile: this command is run on every host.")
@click.option(*_both("force-multi"), is_flag=True, default=None, help="Use --remote-shell for a single host, too.")
@click.option("--remote-shell", default=None, help="With --hostfile: what starts a program on a host (default: ssh).")
@click.option(
    "--accelerate-config", type=click.Path(path_type=Path), default=None, help="A configuration file of accelerate."
)
@click.option("--embed-controller/--no-embed-controller", default=None, help="Run the controller here if HOST is here.")
@click.option("--token-file", type=click.Path(path_type=Path), default=None, help="The token that all nodes share.")
@click.option(*_both("start-method"), default=None, help="zygote: fork workers where that is safe | spawn")
@click.option("--standby", type=int, default=None, help="Pre-warmed processes to keep.")
@click.option("--standby-device", is_flag=True, default=None, help="Each local rank's standby uses its GPU at once.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Events, logs, rank table.")
@click.option("--log", type=click.Choice(["0", "all", "none"]), default=None, help="Ranks whose output is shown live.")
@click.option("--health", default=None, help="Device plugins: auto | none | NAME,NAME")
@click.option(*_both("max-restarts"), type=int, default=None, help="Restarts before the first step.")
@click.option("--redundancy", default=None, help="auto | replica | neighbor | parity | none")
@click.option("--parity", type=int, default=None, help="With --redundancy parity: losses of a group at once, 1 | 2")
@click.option("--undo", default=None, help="Own pre-step copy: auto | always | never")
@click.option("--snapshots", default=None, help="Copies that outlive all processes: auto | always | never")
@click.option("--hang-timeout", type=float, default=None, help="Seconds without progress that are never a hang.")
@click.option("--checkpoint-dir", type=click.Path(path_type=Path), default=None, help="Fallback checkpoints.")
@click.option("--checkpoint-interval", default=None, help="Seconds between fallback checkpoints, or `auto`.")
@click.option("--resume", is_flag=True, default=None, help="Go on from the newest snapshots or checkpoint.")
@click.option("--observe-port", type=int, default=None, help="Serve metrics and a web page here; 0: any free port.")
@click.option("--observe-host", default=None, help="Address to serve them on (default 127.0.0.1).")
@click.option("--config", "config_file", type=click.Path(path_type=Path), default=None, help="YAML with any key.")
@click.option("--inject", multiple=True, help="Drill: rank=R,fault=sigkill,at=PHASE,step=I (repeatable).")
@click.option("-m", "--module", is_flag=True, default=None, help="The script is a module, as in `python -m`.")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def run(**given: Any) -> None:
    """Start SCRIPT on every rank, and keep the job going when ranks die.

    SCRIPT may be another launcher with its own arguments: `flashrecovery run --standby 1 -- torchrun ...`,
    `-- deepspeed ...`, `-- accelerate launch ...`.

    Exit code 0 only if every rank finished.
    """
    launch = launch_of(given)
    for notice in launch.notices:
        print(f"flashrecovery: {notice}", file=sys.stderr)
    os.environ.update(launch.environment)
    config = launch.config
    import_grpc()
    path = config.run_dir or launch.runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    print(
        f"flashrecovery: {config.world_size} ranks, {config.standby} standby, run directory {path}",
        file=sys.stderr,
    )
    if launch.hosts is None:
        from flashrecovery.job import run_job

        code, reason = asyncio.run(run_job(config, launch.command, path))
    else:
        orders = _orders(launch, launch.hosts, path)
        code, reason = asyncio.run(remote.run_on(orders, launch.shell))
    if code != 0:
        what = "the job failed: " if launch.hosts is None else ""
        print(f"flashrecovery: {what}{reason}\nEvidence is kept in {path}", file=sys.stderr)
    sys.exit(code)


@dataclass(frozen=True)
class Launch:
    """What is to be started. ``hosts``: where agents are to be started by ``shell``; None: one here."""

    config: RunConfig
    command: list[str]
    environment: dict[str, str]
    notices: tuple[str, ...]
    runs: Path
    hosts: Hosts | None
    shell: list[str]


def launch_of(given: Options) -> Launch:
    """Everything that is said in one place. Raises ConfigError."""
    outer = {name: value for name, value in given.items() if value not in (None, ())}
    known = _understood({**outer, "script_args": given["script_args"]})
    options = known.options
    command = _command(options, known.words)
    file = options.pop("config_file", None)
    values = read_config(file)
    shell = shlex.split(options.pop("remote_shell", "ssh"))
    environment = dict(known.environment)
    started: Hosts | None = None
    if hosts.asked_for(options):
        found = hosts.found(options, values)
        options |= found.options
        if found.here is None:
            started = found
        else:
            options |= found.own_options(found.here)
            environment |= found.environment(found.here)
    else:
        options = {**_below(torchrun.from_environment(os.environ), {*options, *values}), **options}
    said = torchrun.translated(options, values)
    values = overlaid(values, _settings(said.values))
    config = run_config(values, "command line" if file is None else str(file))
    notices = (*known.notices, *said.notices)
    return Launch(config, command, environment, notices, said.runs or Path("runs"), started, shell)


def _understood(given: Options) -> Understood:
    """The options, the script and its arguments, with what another launcher's command line or file says below them."""
    words = (given["script"], *given["script_args"])
    outer = {name: value for name, value in given.items() if name not in ("script", "script_args")}
    module = bool(outer.get("module"))
    config = outer.pop("accelerate_config", None)
    known = commands.understood(words, _torchrun, module=module)
    if config is not None:
        if known is not None:
            raise ConfigError(f"--accelerate-config {config}: not allowed before another launcher ({words[0]})")
        known = accelerate.with_config(config, words, module=module)
    elif known is not None:
        outer.pop("module", None)
    if known is None:
        return Understood(outer, words)
    inner: Options = {name: Path(value) if name in _PATHS else value for name, value in known.options.items()}
    faults = (*inner.get("inject", ()), *outer.get("inject", ()))
    options = {**inner, **outer}
    if faults:
        options["inject"] = faults
    return Understood(options, known.words, known.environment, known.notices)


def _torchrun(arguments: Sequence[str]) -> Understood:
    """torchrun's arguments, which are those of this command. Variables have been read for it already."""
    with run.make_context("torchrun", list(arguments), auto_envvar_prefix=None) as context:
        return _understood({name: value for name, value in context.params.items() if value is not None})


def _command(options: Options, words: tuple[str, ...]) -> list[str]:
    """The script and its arguments, for the workers. Raises ConfigError."""
    pet = torchrun.from_environment(os.environ)
    module = options.pop("module", pet.get("module", False))
    no_python = options.pop("no_python", pet.get("no_python", False))
    if module and no_python:
        raise ConfigError("--no-python and --module: only one of them is allowed")
    if no_python or not (module or Path(words[0]).is_file()):
        program = commands.python_program(words, required=no_python)
        if program is not None:
            module, words = program.options.get("module", False), program.words
    if not module and not Path(words[0]).is_file():
        raise ConfigError(f"script {words[0]!r} does not exist (working directory: {os.getcwd()})")
    return ["-m", *words] if module else list(words)


def _below(pet: Options, above: set[str]) -> Options:
    """torchrun's variables, without those that options or the configuration file say in their own words."""
    same = {"rdzv_id": "run_id", "local_addr": "node_address", "tee": "log", "redirects": "log", "log_dir": "run_dir"}
    meeting = ("rdzv_endpoint", "master_addr", "master_port")
    left = {n: v for n, v in pet.items() if n not in ("module", "no_python") and not {n, same.get(n, n)} & above}
    if {"controller", *meeting} & above:
        left = {name: value for name, value in left.items() if name not in meeting}
    if "spare_nodes" in above and ":" in left.get("nnodes", ""):
        left["nnodes"] = left["nnodes"].split(":")[0]
    return left


def _settings(options: Options) -> dict[str, Any]:
    """Options in the shape of :class:`RunConfig`."""
    values = {name: value for name, value in options.items() if name not in _NOT_SETTINGS}
    inject: tuple[str, ...] = values.pop("inject", ())
    if inject:
        values["inject"] = [parse_fault(text).model_dump() for text in inject]
    if "hang_timeout" in values:
        values["timeouts"] = {**values.get("timeouts", {}), "hang_floor_s": values.pop("hang_timeout")}
    if "snapshots" in values:
        values["snapshots"] = {"keep": values.pop("snapshots")}
    checkpoint: dict[str, Any] = {}
    if "checkpoint_dir" in values:
        checkpoint["dir"] = values.pop("checkpoint_dir")
    if "checkpoint_interval" in values:
        checkpoint["interval_s"] = _interval(values.pop("checkpoint_interval"))
    if checkpoint:
        values["checkpoint"] = checkpoint
    observe = {key: values.pop(f"observe_{key}") for key in ("port", "host") if f"observe_{key}" in values}
    if observe:
        values["observe"] = observe
    return values


def _interval(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError as e:
        raise ConfigError(f"--checkpoint-interval {text!r}: allowed: seconds, or auto") from e


def _orders(launch: Launch, on: Hosts, path: Path) -> list[remote.HostOrder]:
    """What each host is told. The token goes with it, so all know it. Raises ConfigError."""
    folder = Path.cwd()
    exported = {**remote.exported(os.environ, folder, Path.home()), **launch.environment}
    token = _token(launch.config.token_file)
    values = launch.config.model_dump(mode="json", exclude_unset=True, exclude={"token_file"})
    command = ["--module", *launch.command[1:]] if launch.command[0] == "-m" else launch.command
    run_dir = path.absolute()
    return [
        remote.HostOrder(
            name=host,
            token=token,
            folder=str(folder),
            environment={**exported, **on.environment(rank)},
            config={**values, "run_dir": str(run_dir), "node_rank": rank, "node_name": host},
            command=command,
            output=str(run_dir / "nodes" / f"{host}.out"),
        )
        for rank, host in enumerate(on.resources)
    ]


def _token(file: Path | None) -> str:
    """The token that is given here, or a new one."""
    if file is None:
        return os.environ.get(TOKEN_ENV, "").strip() or new_token()
    try:
        return file.read_text().strip()
    except OSError as e:
        raise ConfigError(f"--token-file {file}: {e.strerror}") from e


def check_options(options: Sequence[str]) -> None:
    """Whether ``flashrecovery run`` takes these options, and they are nothing but options. Raises ConfigError."""
    try:
        with run.make_context("flashrecovery run", [*options, "script.py"]) as context:
            script = context.params["script"]
    except click.UsageError as e:
        raise ConfigError(f"{shlex.join(options)}: {e.format_message()}") from e
    if script != "script.py" or context.params["script_args"]:
        raise ConfigError(f"{shlex.join(options)}: only options of `flashrecovery run` are allowed, not {script!r}")
