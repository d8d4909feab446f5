"""``flashrecovery story``: what one rank of a job went through."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from flashrecovery.errors import ConfigError
from flashrecovery.events import RunFiles
from flashrecovery.observe import story as stories


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--rank", type=int, required=True, help="The rank's number at launch.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def story(run_dir: Path, rank: int, as_json: bool) -> None:
    """Show what RANK of the job in RUN_DIR went through, in order: failures, recoveries, changes of size."""
    events = RunFiles(run_dir).events()
    ranks = stories.world_size_of(events)
    if not 0 <= rank < ranks:
        raise ConfigError(f"--rank {rank}: the job in {run_dir} has {ranks} ranks; allowed: 0 to {ranks - 1}")
    for passage in stories.story(events, rank):
        if as_json:
            click.echo(json.dumps(dataclasses.asdict(passage)))
        else:
            click.echo(f"{passage.seconds:12.3f} s  generation {passage.generation:<3} {passage.text}")
