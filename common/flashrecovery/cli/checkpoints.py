"""``flashrecovery checkpoints``: what a job could go on from, and whether it is whole."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from flashrecovery.cli.output import bytes_text, make_console
from flashrecovery.errors import ConfigError


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def checkpoints(directory: Path, as_json: bool) -> None:
    """List the checkpoints in DIRECTORY, and the snapshots if it is a run directory, and compare all of it with the
    digests with which it was written.

    Exit code 1 if the newest of them is damaged, or there are none.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory")
    from flashrecovery.redundancy.verify import checkpoints_in, snapshots_in

    found = sorted([*checkpoints_in(directory), *snapshots_in(directory)], key=lambda saved: saved.version)
    if as_json:
        click.echo(json.dumps([{**dataclasses.asdict(s), "path": str(s.path)} for s in found], indent=2))
    elif found:
        table = Table("version", "kind", "ranks", "format", "size", "state", "where", box=None)
        for saved in found:
            state = "whole" if not saved.wrong else "; ".join(saved.wrong[:3])
            more = f" and {len(saved.wrong) - 3} more" if len(saved.wrong) > 3 else ""
            table.add_row(
                *(f"{saved.version:,}", saved.kind, str(saved.ranks or "?"), saved.form or "core"),
                *(bytes_text(saved.nbytes), escape(state + more), escape(str(saved.path))),
            )
        make_console().print(table)
    else:
        click.echo(f"no checkpoints or snapshots in {directory}")
    sys.exit(0 if found and not found[-1].wrong else 1)
