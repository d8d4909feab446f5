"""``flashrecovery shim``: stand-ins for torchrun, deepspeed and accelerate."""

from __future__ import annotations

from pathlib import Path

import click

from flashrecovery.cli.run import check_options
from flashrecovery.launchers import shim as programs


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def shim(directory: Path, options: tuple[str, ...]) -> None:
    """Write `torchrun`, `deepspeed` and `accelerate` into DIRECTORY, which pass on to `flashrecovery run OPTIONS`.

    Put first in PATH it makes an image's own scripts start their jobs with FlashRecovery.
    """
    check_options(options)
    for path in programs.write(directory, options):
        print(path)
    print(f'export PATH="{directory.resolve()}:$PATH"')
