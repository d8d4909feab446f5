"""Programs with the names of the usual launchers, for images and scripts that cannot be edited: first in PATH, they
call ``flashrecovery run``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from flashrecovery.errors import ConfigError

PROGRAMS = ("torchrun", "deepspeed", "accelerate")
_MARK = "# Written by `flashrecovery shim`."
_PASSED_ON = """#!/bin/sh
{mark}
exec {run} -- {program} "$@"
"""
_ACCELERATE = """#!/bin/sh
{mark}
if [ "$1" = launch ]; then
    exec {run} -- accelerate "$@"
fi
here=$(cd "$(dirname "$0")" && pwd)
rest=
IFS=:
for folder in $PATH; do
    [ "$folder" = "$here" ] || rest=$rest${{rest:+:}}$folder
done
unset IFS
PATH=$rest exec accelerate "$@"
"""


def text(program: str, options: Sequence[str]) -> str:
    """The program: ``flashrecovery run OPTIONS -- PROGRAM ARGUMENTS``. Other commands of accelerate are left to it."""
    run = shlex.join([sys.executable, "-m", "flashrecovery.run", *options])
    template = _ACCELERATE if program == "accelerate" else _PASSED_ON
    return template.format(mark=_MARK, run=run, program=program)


def write(folder: Path, options: Sequence[str]) -> list[Path]:
    """Write the programs into ``folder``, which is made if need be. Programs of others are not replaced.

    Raises:
        ConfigError: another program of such a name is there, or the folder cannot be written.
    """
    paths = [folder / program for program in PROGRAMS]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            if path.exists() and _MARK not in path.read_text(errors="replace"):
                raise ConfigError(f"{path} is another program; choose another folder")
        for path in paths:
            path.write_text(text(path.name, options))
            path.chmod(0o755)
    except OSError as e:
        raise ConfigError(f"{folder} cannot be written: {e.strerror}") from e
    return paths
