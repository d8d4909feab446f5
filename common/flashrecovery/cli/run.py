"""``flashrecovery run``: torchrun's spelling wherever torchrun has the option, and other launchers' as they are.

What other launchers' options, variables and files mean is in :mod:`flashrecovery.launchers`; here everything becomes
one :class:`~flashrecovery.config.RunConfig`. The first that says something counts: these options, or their variables
``FLASHRECOVERY_RUN_<OPTION>``; those of another launcher's command line behind them; the configuration file;
torchrun's variables ``PET_<OPTION>``.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashrecovery.cli.closing import closing_line
from flashrecovery.cli.run_options import (
    ENVIRONMENT,
    OF_OTHER_LAUNCHERS,
    OWN,
    PLACES,
    SCRIPT,
    RunCommand,
    settings,
)
from flashrecovery.config import RunConfig, overlaid, read_config, run_config
from flashrecovery.errors import ConfigError
from flashrecovery.events import EventLogError, RunFiles
from flashrecovery.launchers import commands, hosts, torchrun
from flashrecovery.launchers.hosts import Hosts
from flashrecovery.launchers.launch import Options, Understood
from flashrecovery.rpc.quiet_grpc import import_grpc
from flashrecovery.rpc.token import TOKEN_ENV, new_token
from flashrecovery.runtime import early_signals
from flashrecovery.terminal import say
from flashrecovery.util.collector import uncollected

if TYPE_CHECKING:
    from flashrecovery.launchers.remote import HostOrder

_PATHS = ("hostfile", "run_dir", "token_file", "checkpoint_dir")


def _run(**given: Any) -> None:
    """Start SCRIPT on every rank, and keep the job going when ranks die.

    SCRIPT may be another launcher with its own arguments: `flashrecovery run --standby 1 -- torchrun ...`,
    `-- deepspeed ...`, `-- accelerate launch ...`.

    Exit code 0 only if every rank finished.
    """
    launch = launch_of(given)
    for notice in launch.notices:
        say(notice)
    os.environ.update(launch.environment)
    config = launch.config
    if config.auto == "print":
        if launch.hosts is not None:
            raise ConfigError("auto = 'print' looks at a script on this node: give no hosts")
        from flashrecovery.cli.auto_print import print_patch

        sys.exit(print_patch(config, launch.command))
    if launch.hosts is None and config.preflight:
        from flashrecovery.cli import preflight

        say(preflight.check(config.nproc_per_node, os.environ))
    if launch.hosts is None:
        early_signals.hold()
    with uncollected():
        import_grpc()
    path = config.run_dir or launch.runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    say(f"{config.world_size} ranks, {config.standby} standby, run directory {path}")
    began = time.time()
    if launch.hosts is None:
        with uncollected():
            from flashrecovery.job import run_job
        gc.freeze()  # what has been imported stays: the collector need not look at it again

        code, reason = asyncio.run(run_job(config, launch.command, path))
    else:
        from flashrecovery.launchers import remote

        orders = _orders(launch, launch.hosts, path)
        code, reason = asyncio.run(remote.run_on(orders, launch.shell))
    if code != 0:
        what = "the job failed: " if launch.hosts is None else ""
        say(f"{what}{reason}\nEvidence is kept in {path}")
    line = _closing(path, began)
    if line:
        say(line)
    sys.exit(code)


def _closing(path: Path, began: float) -> str:
    """The last line, if the job's log is here."""
    try:
        events = RunFiles(path).events()
    except (ConfigError, EventLogError):
        return ""
    return closing_line([event for event in events if event.time >= began], path)


run = RunCommand(
    "run",
    callback=_run,
    help=_run.__doc__,
    params=[*PLACES, *OWN, *OF_OTHER_LAUNCHERS, *SCRIPT],
    context_settings={"allow_interspersed_args": False, "auto_envvar_prefix": ENVIRONMENT},
)


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
    values = overlaid(values, settings(said.values))
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
        from flashrecovery.launchers import accelerate

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


def _orders(launch: Launch, on: Hosts, path: Path) -> list[HostOrder]:
    """The message to each host. It includes the token, so that all know it. Raises ConfigError."""
    from flashrecovery.launchers import remote

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
