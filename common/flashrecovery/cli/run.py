"""``flashrecovery run``: torchrun's spelling wherever torchrun has the option."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from flashrecovery.config import CONTROLLER_PORT, load_run_config, parse_fault
from flashrecovery.errors import ConfigError
from flashrecovery.grpc_quiet import import_grpc


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--nproc-per-node", "--nproc_per_node", default=None, help="Processes on this node: a number, or `gpu`.")
@click.option("--nnodes", type=int, default=None, help="Nodes that hold ranks.")
@click.option("--spare-nodes", type=int, default=None, help="Further nodes that wait for one of these to be lost.")
@click.option("--node-rank", "--node_rank", type=int, default=None, help="This node's number; default: as they come.")
@click.option("--spare", is_flag=True, default=None, help="This node is a spare one.")
@click.option("--node-name", default=None, help="This node's name, unique in the job; default: the host name.")
@click.option("--node-address", default=None, help="This node's address for the others.")
@click.option("--failure-domain", default=None, help="What fails together with this node: its switch, its rack.")
@click.option("--slots", type=int, default=None, help="Ranks that this node can hold.")
@click.option("--master-port", "--master_port", type=int, default=None, help="Port of the TCPStore; 0: any free one.")
@click.option(
    "--controller",
    *("--rdzv-endpoint", "--rdzv_endpoint"),
    default=None,
    help=f"HOST[:PORT] of the controller, on one of the nodes (several nodes); port {CONTROLLER_PORT} by default.",
)
@click.option("--master-addr", "--master_addr", default=None, help="Of torchrun: several nodes' controller is there.")
@click.option("--rdzv-backend", "--rdzv_backend", expose_value=False, help="Of torchrun; not needed.")
@click.option("--rdzv-id", "--rdzv_id", expose_value=False, help="Of torchrun; not needed: the token tells jobs apart.")
@click.option("--standalone", is_flag=True, expose_value=False, help="Of torchrun: one node, the default.")
@click.option("--embed-controller/--no-embed-controller", default=None, help="Run the controller here if HOST is here.")
@click.option("--token-file", type=click.Path(path_type=Path), default=None, help="The token that all nodes share.")
@click.option(
    *("--start-method", "--start_method"), default=None, help="zygote: fork workers where that is safe | spawn"
)
@click.option("--standby", type=int, default=None, help="Pre-warmed processes to keep.")
@click.option("--standby-device", is_flag=True, default=None, help="Each local rank's standby uses its GPU at once.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Events, logs, rank table.")
@click.option("--log", type=click.Choice(["0", "all", "none"]), default=None, help="Ranks whose output is shown live.")
@click.option("--health", default=None, help="Device plugins: auto | none | NAME,NAME")
@click.option("--max-restarts", "--max_restarts", type=int, default=None, help="Restarts before the first step.")
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
@click.option("-m", "--module", is_flag=True, help="The script is a module, as in `python -m`.")
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def run(config_file: Path | None, module: bool, script: str, script_args: tuple[str, ...], **options: Any) -> None:
    """Start SCRIPT on every rank, and keep the job going when ranks die.

    Exit code 0 only if every rank finished.
    """
    config = load_run_config(config_file, _overrides(options))
    if not module and not Path(script).is_file():
        raise ConfigError(f"script {script!r} does not exist (working directory: {os.getcwd()})")
    import_grpc()
    from flashrecovery.job import run_job

    path = config.run_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    print(
        f"flashrecovery: {config.world_size} ranks, {config.standby} standby, run directory {path}",
        file=sys.stderr,
    )
    command = ["-m", script, *script_args] if module else [script, *script_args]
    code, reason = asyncio.run(run_job(config, command, path))
    if code != 0:
        print(f"flashrecovery: the job failed: {reason}\nEvidence is kept in {path}", file=sys.stderr)
    sys.exit(code)


def _overrides(options: dict[str, Any]) -> dict[str, Any]:
    """Command-line options that were given, in the shape of :class:`RunConfig`."""
    values = {k: v for k, v in options.items() if v is not None}
    inject: tuple[str, ...] = values.pop("inject", ())
    if inject:
        values["inject"] = [parse_fault(text).model_dump() for text in inject]
    address = values.pop("master_addr", None)
    if address is not None and values.get("nnodes", 1) > 1:
        values.setdefault("controller", address)
    if "nproc_per_node" in values:
        values["nproc_per_node"] = _nproc(values["nproc_per_node"])
    if "hang_timeout" in values:
        values["timeouts"] = {"hang_floor_s": values.pop("hang_timeout")}
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


def _nproc(text: str) -> int:
    """A number, or torchrun's ``gpu``, ``cpu``, ``auto``."""
    if text.isdigit():
        return int(text)
    if text not in ("gpu", "cpu", "auto"):
        raise ConfigError(f"--nproc-per-node {text!r}: allowed: a number >= 1, gpu, cpu, auto")
    if text != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
        if text == "gpu":
            raise ConfigError("--nproc-per-node gpu: torch sees no GPU on this machine")
    return os.cpu_count() or 1


def _interval(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError as e:
        raise ConfigError(f"--checkpoint-interval {text!r}: allowed: seconds, or auto") from e
