"""``flashrecovery controller``: the controller alone, outside of the nodes that train."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import click

from flashrecovery.config import load_run_config
from flashrecovery.errors import ConfigError
from flashrecovery.rpc.quiet_grpc import import_grpc
from flashrecovery.terminal import say


@click.command()
@click.option("--bind", "controller", required=True, help="HOST[:PORT] to listen on; the nodes' --controller.")
@click.option("--nnodes", type=int, default=None, help="Nodes that hold ranks.")
@click.option("--spare-nodes", type=int, default=None, help="Spare nodes, which take over the ranks of lost nodes.")
@click.option("--nproc-per-node", "--nproc_per_node", type=int, default=None, help="Processes on each node.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Events, rank table.")
@click.option(
    "--token-file", type=click.Path(path_type=Path), default=None, help="File with the token that all nodes share."
)
@click.option("--config", "config_file", type=click.Path(path_type=Path), default=None, help="YAML with any key.")
def controller(controller: str, config_file: Path | None, **options: object) -> None:
    """Run the controller of one job, to the job's end. Its nodes run `flashrecovery run --controller HOST:PORT`."""
    import_grpc()
    from flashrecovery.job import run_controller
    from flashrecovery.runtime.addresses import is_here, resolve, split_address

    given = {"controller": controller, **options}
    config = load_run_config(config_file, {k: v for k, v in given.items() if v is not None})
    host, _ = split_address(controller, "--bind")
    if not is_here(resolve(host, "--bind")):
        raise ConfigError(f"--bind {controller}: {host} is no address of this host")
    path = config.run_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-controller"
    say(f"controller at {controller}, run directory {path}")
    code, reason = asyncio.run(run_controller(config, path))
    if code != 0:
        say(f"the job failed: {reason}\nEvidence is kept in {path}")
    sys.exit(code)
