"""``flashrecovery groups``: which of torch's backends stand in a job's process groups, and on which devices."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from flashrecovery.cli.output import make_console
from flashrecovery.errors import ConfigError
from flashrecovery.events import GroupBackend, JobStarted, RunFiles
from flashrecovery.plan.words import ranks_text


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def groups(run_dir: Path, as_json: bool) -> None:
    """Show what stood in the process groups of the job in RUN_DIR when its newest launch came to its first step."""
    found = _newest(run_dir)
    if as_json:
        click.echo(json.dumps([one.model_dump() for one in found], indent=2))
        return
    table = Table("backend", "class", "device", "chosen by", "groups", "ranks", box=None)
    for one in found:
        device, chosen_by = one.device or ("not known yet" if one.chosen_by else "host memory"), one.chosen_by or "-"
        table.add_row(
            *(escape(text) for text in (one.name, one.torch_class, device, chosen_by)),
            str(one.groups),
            ranks_text(one.ranks),
        )
    make_console().print(table)


def _newest(run_dir: Path) -> list[GroupBackend]:
    """Raises ConfigError if no job has come to a step there."""
    started = [event for event in RunFiles(run_dir).events() if isinstance(event, JobStarted)]
    if not started:
        raise ConfigError(f"{run_dir}: no job has come to its first step there")
    return started[-1].backends
