"""``flashrecovery plan``: what the copies of a job will cost, before it is started."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click
from rich.table import Table

from flashrecovery.cli.output import bytes_text, make_console, seconds_text
from flashrecovery.errors import ConfigError
from flashrecovery.plan import footprint
from flashrecovery.plan.footprint import Footprint, JobShape, Sharding


@click.command()
@click.option("--parameters", type=float, required=True, help="Of the model, for example 70e9.")
@click.option("--gpus", type=int, required=True, help="In the whole job.")
@click.option(
    "--sharding",
    type=click.Choice([s.value for s in Sharding]),
    default=Sharding.OPTIMIZER.value,
    help="replicated: DDP. optimizer: ZeRO-1/2, Megatron's distributed optimizer. full: FSDP, ZeRO-3.",
)
@click.option("--tensor-parallel", type=int, default=1)
@click.option("--pipeline-parallel", type=int, default=1)
@click.option("--gpus-per-node", type=int, default=8)
@click.option("--step-s", type=float, default=None, help="Seconds a step; else from --tokens and --tflops.")
@click.option("--tokens", type=float, default=4e6, help="A step.")
@click.option("--tflops", type=float, default=400.0, help="What a GPU reaches.")
@click.option("--window", type=float, default=0.8, help="Part of a step before its gradients are synchronised.")
@click.option("--pcie-gb-s", type=float, default=50.0, help="From a GPU to the host.")
@click.option("--network-gb-s", type=float, default=12.5, help="From node to node, on the network that copies take.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as one JSON object: bytes and seconds.")
def plan(
    step_s: float | None,
    tokens: float,
    tflops: float,
    sharding: str,
    as_json: bool,
    pcie_gb_s: float,
    network_gb_s: float,
    **shape: Any,
) -> None:
    """Say what the copies of a job's state cost: host memory, network, and whether training waits for them."""
    if step_s is None and not (tokens > 0 and tflops > 0):
        raise ConfigError(f"--tokens {tokens:g}, --tflops {tflops:g}: more than 0 is allowed")
    try:
        if step_s is None:
            step_s = footprint.step_s(shape["parameters"], tokens, max(shape["gpus"], 1), tflops * 1e12)
        job = JobShape(
            sharding=Sharding(sharding),
            step_s=step_s,
            pcie_bytes_s=pcie_gb_s * 1e9,
            network_bytes_s=network_gb_s * 1e9,
            **shape,
        )
    except ValueError as e:
        raise ConfigError(str(e)) from e
    cost = footprint.footprint(job)
    if as_json:
        plain = {**dataclasses.asdict(cost), "copy_s": cost.copy_s, "hidden": cost.hidden, "step_s": job.step_s}
        click.echo(json.dumps(plain, indent=2))
    else:
        make_console().print(_table(job, cost))


def _table(job: JobShape, cost: Footprint) -> Table:
    table = Table(title=f"{job.parameters / 1e9:g} billion parameters on {job.gpus} GPUs", show_header=False)
    rows = {
        "data-parallel ranks": str(job.data_parallel),
        "state that no other rank holds, a GPU": bytes_text(cost.unique_bytes),
        "host memory, a node": bytes_text(cost.node_memory_bytes),
        "sent, a node and step": bytes_text(cost.node_network_bytes),
        "a copy takes": f"{seconds_text(cost.copy_s)} ({seconds_text(cost.to_host_s)} of it to the host)",
        "time for it": f"{seconds_text(cost.window_s)} of a step of {seconds_text(job.step_s)}",
        "training waits for it": "no" if cost.hidden else f"{seconds_text(cost.copy_s - cost.window_s)} a step",
        "a lost rank's state comes in": seconds_text(cost.restore_s),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
