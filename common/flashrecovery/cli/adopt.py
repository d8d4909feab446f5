"""``flashrecovery adopt``: a rank that a cluster's launcher has started (srun, mpirun, ...), with `run`'s options."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from flashrecovery.adopt.guard import guard_task
from flashrecovery.adopt.launch import TaskLaunch, placed
from flashrecovery.cli.run_options import ENVIRONMENT, OWN, SCRIPT, RunCommand, settings
from flashrecovery.config import load_run_config
from flashrecovery.errors import ConfigError
from flashrecovery.runtime.task import task_of
from flashrecovery.terminal import say


def _adopt(
    config_file: Path | None, module: bool | None, script: str, script_args: tuple[str, ...], **options: Any
) -> None:
    """Run SCRIPT as the rank that a launcher has started this process for, and keep the job going when ranks die.

    The launcher starts one task for each rank: `srun ... flashrecovery adopt train.py`, `mpirun ... flashrecovery adopt
    train.py`. A small process stays in each task's place until the job's end, and ends with its code; so the launcher
    does not notice that a rank has died.
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    task = task_of(os.environ)
    config = load_run_config(config_file, placed(task, settings(given), os.environ))
    if config.elastic is not None:
        raise ConfigError(
            f"elastic = {config.elastic.text}: not with ranks that a launcher has started ({task.launcher}); use "
            "`flashrecovery run`"
        )
    if config.preflight:
        raise ConfigError(
            f"preflight = true: not with ranks that a launcher has started ({task.launcher}), because each task is one "
            "rank; use `flashrecovery run`"
        )
    if config.auto == "print":
        raise ConfigError(
            f"auto = 'print': not with ranks that a launcher has started ({task.launcher}); use `flashrecovery run "
            "--auto=print`"
        )
    if not module and not Path(script).is_file():
        raise ConfigError(f"script {script!r} does not exist (working directory: {os.getcwd()})")
    path = config.run_dir or Path("runs") / re.sub(r"[^\w.-]", "-", task.job)
    command = ["-m", script, *script_args] if module else [script, *script_args]
    launch = TaskLaunch(task, config, command, path.absolute())
    if task.rank == 0:
        ranks = f"{config.world_size} ranks, started by {task.launcher}"
        say(f"{ranks}, {config.standby} standby, run directory {path}")
    sys.exit(guard_task(task, launch))


adopt = RunCommand(
    "adopt",
    callback=_adopt,
    help=_adopt.__doc__,
    params=[*OWN, *SCRIPT],
    context_settings={"allow_interspersed_args": False, "auto_envvar_prefix": ENVIRONMENT},
)
