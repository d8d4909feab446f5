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
from flashrecovery.events import ControllerStarted, RunFiles
from flashrecovery.snapshot.files import LAST_CHECKPOINT


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def checkpoints(directory: Path, as_json: bool) -> None:
    """List the checkpoints in DIRECTORY, and compare all of them with the digests with which they were written. Of a
    run directory, the snapshots in it and the checkpoints of its job.

    Exit code 1 if the newest of them is damaged, or there are none.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory")
    from flashrecovery.redundancy.checkpoint.verify import checkpoints_in, snapshots_in

    elsewhere = _checkpoint_dir(RunFiles(directory))
    places = [directory] if elsewhere is None or elsewhere == directory.resolve() else [directory, elsewhere]
    places += [last] if (last := directory / LAST_CHECKPOINT).is_dir() else []
    everything = [*(saved for place in places for saved in checkpoints_in(place)), *snapshots_in(directory)]
    found = sorted(everything, key=lambda saved: saved.version)
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
        click.echo(f"no checkpoints or snapshots in {' or '.join(map(str, places))}")
    sys.exit(0 if found and not found[-1].wrong else 1)


def _checkpoint_dir(files: RunFiles) -> Path | None:
    """Where the job of this run directory has written its checkpoints, as its newest launch says; None: nowhere, or it
    is no run directory."""
    if not files.events_path.exists():
        return None
    said = [e.checkpoint_dir for e in files.events() if isinstance(e, ControllerStarted) and e.checkpoint_dir]
    return Path(said[-1]) if said else None
