"""``flashrecovery plan``: what the copies of a job cost, what it survives with them, for how long, and what is lost of
a day."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flashrecovery.cli.measured import NONE_SEEN, Measured, measure
from flashrecovery.cli.output import bytes_text, count_text, make_console, seconds_text
from flashrecovery.cli.plan_figure import days_text, write_figure
from flashrecovery.errors import ConfigError
from flashrecovery.events import RunFiles
from flashrecovery.plan.checkpoint_interval import DAY_S
from flashrecovery.plan.estimates import footprint
from flashrecovery.plan.estimates.copy_holders import domains
from flashrecovery.plan.estimates.footprint import Footprint, JobShape
from flashrecovery.plan.estimates.huggingface import ModelSize, model_size
from flashrecovery.plan.estimates.reliability import Conditions, Outlook, Unavailable, outlook, protections
from flashrecovery.plan.estimates.survival import Failures
from flashrecovery.plan.model_state import Sharding

NODE_FAILURES = 0.0025
PROCESS_FAILURES = 0.00021
"""A day of one node, and of one process: Llama 3's 466 interruptions in 54 days on 16,384 GPUs, 8 on a node, in the
shares that FlashRecovery found (section IV-A): 59.6 % hardware, 40.4 % software."""


class _Count(click.ParamType):  # type: ignore[type-arg]
    """A number, also with k, m, b or t for thousands, millions, billions or trillions."""

    name = "number"
    _UNITS = MappingProxyType({"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12})

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip().lower()
        try:
            return float(text[:-1]) * self._UNITS[text[-1]] if text[-1:] in self._UNITS else float(text)
        except ValueError as e:
            raise click.BadParameter(
                f"{value!r} is not a number; allowed: for example 70e9 or 70b (k, m, b, t)", ctx, param
            ) from e


@click.command()
@click.option("--parameters", type=_Count(), default=None, help="Parameters of the model, for example 70e9 or 70b.")
@click.option(
    "--hf-config",
    type=click.Path(path_type=Path),
    default=None,
    help="A Hugging Face config.json, in place of --parameters.",
)
@click.option("--gpus", type=int, default=None, help="In the whole job.")
@click.option(
    "--sharding",
    type=click.Choice([s.value for s in Sharding]),
    default=Sharding.OPTIMIZER.value,
    help="replicated: DDP. optimizer: ZeRO-1/2, Megatron's distributed optimizer. full: FSDP, ZeRO-3.",
)
@click.option("--tensor-parallel", type=int, default=1)
@click.option("--pipeline-parallel", type=int, default=1)
@click.option("--expert-parallel", type=int, default=1, help="Needs --hf-config, which knows the experts.")
@click.option("--gpus-per-node", type=int, default=None, help="Default: 8, or the number that --run has.")
@click.option("--step-s", type=float, default=None, help="Seconds a step; else from --run, or --tokens and --tflops.")
@click.option("--tokens", type=float, default=4e6, help="A step.")
@click.option("--tflops", type=float, default=400.0, help="What a GPU reaches.")
@click.option("--window", type=float, default=0.8, help="Fraction of a step before its gradients are synchronised.")
@click.option("--pcie-gb-s", type=float, default=50.0, help="Bandwidth from a GPU to the host.")
@click.option(
    "--network-gb-s", type=float, default=12.5, help="Bandwidth from node to node, on the network that copies use."
)
@click.option(
    "--storage-gb-s", type=float, default=10.0, help="Bandwidth of the checkpoint storage, for the whole job."
)
@click.option("--host-memory-gb", type=float, default=None, help="Memory of a node that copies may use: do they fit?")
@click.option("--parity-group", type=int, default=8, help="Most nodes in a parity group.")
@click.option(
    "--node-failures",
    type=float,
    default=None,
    help=f"Failures per day of one node; default: {NODE_FAILURES}, or from --run.",
)
@click.option(
    "--process-failures",
    type=float,
    default=None,
    help=f"Failures per day of one process; default: {PROCESS_FAILURES}, or from --run.",
)
@click.option(
    "--worse-nodes",
    multiple=True,
    metavar="COUNT:RATE",
    help="This many nodes of the job have this rate instead; repeatable.",
)
@click.option("--domain-nodes", type=int, default=0, help="Nodes behind one switch or in one rack; 0: none.")
@click.option(
    "--domain-failures", type=float, default=0.0, help="Failures per day of one switch or rack, with all its nodes."
)
@click.option("--shape", type=float, default=1.0, help="Weibull's c: rates are per day**c. 1: constant; more: wear.")
@click.option(
    "--copies-die-with-processes", is_flag=True, help="Copies are in the training processes, not in separate ones."
)
@click.option(
    "--recovery-s", type=float, default=None, help="Seconds of a recovery from memory; default: 30, or from --run."
)
@click.option("--restart-s", type=float, default=900.0, help="Seconds of a restart, without loading the checkpoint.")
@click.option(
    "--k0-s",
    type=float,
    default=None,
    help="Seconds that a checkpoint blocks training; default: computed, or from --run.",
)
@click.option("--repair-hours", type=float, default=24.0, help="Time until a failed node is back as a spare node.")
@click.option("--spares", type=int, default=2, help="Plan for 0 up to this many spare nodes.")
@click.option("--days", type=float, default=30.0, help="Horizon.")
@click.option("--threshold", type=float, default=0.9, help="State counts as safe above this probability of survival.")
@click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path),
    default=None,
    help="A run directory: use its measured ranks, step time, k0, recovery time and failures.",
)
@click.option("--figure", type=click.Path(path_type=Path), default=None, help="Draw a figure: FILE.svg, .png or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as one JSON object: bytes, seconds, days.")
def plan(as_json: bool, figure: Path | None, run_dir: Path | None, **options: Any) -> None:
    """Say what the copies of a job's state cost, what it survives with them, and what is lost of a day."""
    seen = _seen(run_dir)
    size = _size(options.pop("parameters"), options.pop("hf_config"), options["expert_parallel"])
    try:
        job = _job(options, size, seen)
        failures = _failures(options, job, seen)
        given = _conditions(options, seen)
    except ValueError as e:
        raise ConfigError(str(e)) from e
    if options["spares"] < 0:
        raise ConfigError(f"--spares {options['spares']}: 0 or more is allowed")
    found = [outlook(job, p, failures, given, options["spares"]) for p in protections(job)]
    possible = [o for o in found if isinstance(o, Outlook)]
    if figure is not None:
        write_figure(figure, _title(job), possible, given)
    if as_json:
        click.echo(json.dumps(_plain(job, found, failures, given, seen), indent=2, allow_nan=False))
        return
    console = make_console()
    console.print(_report(job, found, failures, given, seen))
    if figure is not None:
        console.print(f"Figure written to {figure}", highlight=False, markup=False)


# -- what was asked ---------------------------------------------------------------------------------------


def _seen(run_dir: Path | None) -> Measured | None:
    if run_dir is None:
        return None
    files = RunFiles(run_dir)
    found = measure(files.events(), time.time() if files.is_live() else None)
    if found.ranks == 0:
        raise ConfigError(f"--run {run_dir}: no rank reached its first step there; a job that has trained is needed")
    return found


def _size(parameters: float | None, config: Path | None, expert_parallel: int) -> ModelSize:
    either = ConfigError("plan: give either --parameters or --hf-config")
    if config is None:
        if parameters is None:
            raise either
        if not 0 < parameters < math.inf:
            raise ConfigError(f"--parameters {parameters:g}: more than 0 is allowed")
        if expert_parallel != 1:
            raise ConfigError(
                f"--expert-parallel {expert_parallel}: needs --hf-config, which gives the size of the experts"
            )
        return ModelSize(round(parameters))
    if parameters is not None:
        raise either
    path = config / "config.json" if config.is_dir() else config
    try:
        loaded = json.loads(path.read_text())
    except OSError as e:
        raise ConfigError(f"--hf-config {path}: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"--hf-config {path}: no JSON: {e}") from e
    if not isinstance(loaded, dict):
        raise ConfigError(f"--hf-config {path}: a JSON object is allowed")
    try:
        return model_size(loaded)
    except ValueError as e:
        raise ConfigError(f"--hf-config {path}: {e}") from e


def _job(options: dict[str, Any], size: ModelSize, seen: Measured | None) -> JobShape:
    gpus, local, step_s = options["gpus"], options["gpus_per_node"], options["step_s"]
    if gpus is None and seen is None:
        raise ConfigError("plan: give --gpus, or --run")
    gpus = gpus if gpus is not None else seen.ranks if seen is not None else 0
    local = local if local is not None else (seen.slots if seen is not None else 0) or 8
    if step_s is None and seen is not None and seen.step_s > 0:
        step_s = seen.step_s
    tokens, tflops = options["tokens"], options["tflops"]
    if step_s is None and not (0 < tokens < math.inf and 0 < tflops < math.inf):
        raise ConfigError(f"--tokens {tokens:g}, --tflops {tflops:g}: more than 0 is allowed")
    if step_s is None:
        step_s = footprint.step_s(size.active_parameters, tokens, max(gpus, 1), tflops * 1e12)
    return JobShape(
        parameters=float(size.parameters),
        expert_parameters=float(size.expert_parameters),
        gpus=gpus,
        sharding=Sharding(options["sharding"]),
        step_s=step_s,
        tensor_parallel=options["tensor_parallel"],
        pipeline_parallel=options["pipeline_parallel"],
        expert_parallel=options["expert_parallel"],
        gpus_per_node=local,
        window=options["window"],
        pcie_bytes_s=options["pcie_gb_s"] * 1e9,
        network_bytes_s=options["network_gb_s"] * 1e9,
    )


def _failures(options: dict[str, Any], job: JobShape, seen: Measured | None) -> Failures:
    node, process = options["node_failures"], options["process_failures"]
    if node is None:
        node = (seen.node_rate if seen is not None else None) or NODE_FAILURES
    if process is None:
        process = (seen.process_rate if seen is not None else None) or PROCESS_FAILURES
    size = options["domain_nodes"]
    if size < 0:
        raise ConfigError(f"--domain-nodes {size}: 0 (none) or more is allowed")
    if (size == 0) != (options["domain_failures"] == 0):
        raise ConfigError(
            f"--domain-nodes {size}, --domain-failures {options['domain_failures']:g}: both are needed, or neither"
        )
    return Failures(
        node_rates=_node_rates(job.nodes, node, options["worse_nodes"]),
        domain_of=domains(job.nodes, size),
        domain_rate=options["domain_failures"],
        process_rate=process,
        processes=job.gpus,
        shape=options["shape"],
    )


def _node_rates(nodes: int, rate: float, worse: tuple[str, ...]) -> tuple[float, ...]:
    """Nodes that are worse are spread evenly over the job."""
    rates = [rate] * nodes
    good = list(range(nodes))
    for text in worse:
        count, _, value = text.partition(":")
        try:
            number, its = int(count), float(value)
        except ValueError:
            raise ConfigError(f"--worse-nodes {text!r}: COUNT:RATE is allowed, for example 4:0.02") from None
        if not (0 < number <= len(good) and 0 <= its < math.inf):
            raise ConfigError(
                f"--worse-nodes {text!r}: 1 to {len(good)} nodes and a rate of 0 or more are allowed "
                f"(the job has {count_text(nodes, 'node', 'nodes')})"
            )
        chosen = [good[i * len(good) // number] for i in range(number)]
        for node in chosen:
            rates[node] = its
        good = [node for node in good if node not in set(chosen)]
    return tuple(rates)


def _conditions(options: dict[str, Any], seen: Measured | None) -> Conditions:
    recovery_s, k0_s = options["recovery_s"], options["k0_s"]
    if recovery_s is None:
        recovery_s = (seen.recovery_s if seen is not None else 0.0) or Conditions.recovery_s
    if k0_s is None and seen is not None:
        k0_s = seen.k0_s
    memory = options["host_memory_gb"]
    return Conditions(
        days=options["days"],
        threshold=options["threshold"],
        restart_s=options["restart_s"],
        recovery_s=recovery_s,
        repair_days=options["repair_hours"] / 24,
        storage_bytes_s=options["storage_gb_s"] * 1e9,
        k0_s=k0_s,
        parity_group=options["parity_group"],
        host_memory_bytes=None if memory is None else memory * 1e9,
        copies_die_with_processes=options["copies_die_with_processes"],
    )


# -- what is said -----------------------------------------------------------------------------------------


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _plain(
    job: JobShape, found: list[Outlook | Unavailable], failures: Failures, given: Conditions, seen: Measured | None
) -> dict[str, Any]:
    def cost(of: Footprint) -> dict[str, Any]:
        return {**dataclasses.asdict(of), "copy_s": of.copy_s, "hidden": of.hidden}

    entries: list[dict[str, Any]] = []
    for one in found:
        if isinstance(one, Unavailable):
            entries.append({"protection": one.protection.value, "unavailable": one.reason})
            continue
        entries.append(
            {
                "protection": one.protection.value,
                "group_nodes": one.group,
                "fits": one.fits,
                **cost(one.footprint),
                "unprotected_s": one.window_s,
                "without_repair": {"safe_days": _finite(one.safe_days), "survival": one.survival},
                "with_spares": [
                    {
                        "spares": s.spares,
                        "fatal_failures_per_day": s.fatal,
                        "safe_days": _finite(s.safe_days),
                        "survival": s.survival,
                        "checkpoint_interval_steps": _finite(s.interval_steps),
                        **{name: _finite(value) for name, value in dataclasses.asdict(s.losses).items()},
                        "lost_s": s.losses.lost_s,
                        "ettr": s.losses.ettr,
                    }
                    for s in one.with_spares
                ],
            }
        )
    return {
        **cost(footprint.footprint(job)),
        "step_s": job.step_s,
        "parameters": job.parameters,
        "gpus": job.gpus,
        "nodes": job.nodes,
        "failures_per_day": {
            "nodes": failures.a_day(failures.node_events, given.days),
            "domains": failures.a_day(failures.domain_events, given.days),
            "processes": failures.a_day(failures.process_events, given.days),
        },
        "days": given.days,
        "threshold": given.threshold,
        "measured": None if seen is None else dataclasses.asdict(seen),
        "protections": entries,
    }


def _title(job: JobShape) -> str:
    billions = f"{job.parameters / 1e9:.3g} billion" if job.parameters >= 1e8 else f"{job.parameters / 1e6:.3g} million"
    return f"{billions} parameters on {count_text(job.gpus, 'GPU', 'GPUs')}, {count_text(job.nodes, 'node', 'nodes')}"


def _report(
    job: JobShape, found: list[Outlook | Unavailable], failures: Failures, given: Conditions, seen: Measured | None
) -> Group:
    possible = [o for o in found if isinstance(o, Outlook)]
    parts: list[Any] = [_job_table(job, failures, given)]
    if seen is not None:
        parts.append(_seen_text(seen))
    parts += [_copies_table(possible, given), _survival_table(possible, given), _lost_table(possible)]
    notes = [f"{one.protection.value}: not possible: {one.reason}" for one in found if isinstance(one, Unavailable)]
    if any(not s.losses.first_order for o in possible for s in o.with_spares):
        notes.append(
            "(!) failures and checkpoints cost more than a fifth of the time: the equations, which are of first order, "
            "say too little there"
        )
    notes.append("fatal: failures that no copy in memory helps against; checkpoint.failures_per_day is this number")
    notes.append(
        "without repair: nothing that fails is ever replaced (REFT's equation (2)); with repair: it is replaced, and "
        "state is lost only if too much fails before the copies are whole again"
    )
    parts += [Text(note) for note in notes]
    return Group(*parts)


def _job_table(job: JobShape, failures: Failures, given: Conditions) -> Table:
    cost = footprint.footprint(job)
    table = Table(title=_title(job), show_header=False)
    daily = {
        "nodes": failures.a_day(failures.node_events, given.days),
        "switches or racks": failures.a_day(failures.domain_events, given.days),
        "processes": failures.a_day(failures.process_events, given.days),
    }
    rows = {
        "data-parallel ranks": f"{job.data_parallel:,}",
        "a step": seconds_text(job.step_s),
        "time for copies": f"{seconds_text(cost.window_s)} of a step of {seconds_text(job.step_s)}",
        "state that no other rank holds, a GPU": bytes_text(cost.unique_bytes),
        "failures a day": ", ".join(f"{value:.3g} {name}" for name, value in daily.items() if value),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _seen_text(seen: Measured) -> Text:
    node_days, process_days = seen.nodes * seen.days, seen.ranks * seen.days

    def rate(count: int, days: float, what: str) -> str:
        if days <= 0:
            return f"{what}: not known"
        if count == 0:
            return f"{what}: none in {days:.3g} days of one, so at most {NONE_SEEN / days:.2g} a day (95 %); not used"
        return f"{what}: {count} in {days:.3g} days of one"

    k0 = "not known" if seen.k0_s is None else seconds_text(seen.k0_s)
    parts = [
        f"step {seconds_text(seen.step_s)}" if seen.step_s > 0 else "step time not known",
        f"k0 {k0}",
        f"recovery from memory {seconds_text(seen.recovery_s)}" if seen.recovery_s > 0 else "no recovery from memory",
        rate(seen.node_failures, node_days, "node failures"),
        rate(seen.process_failures, process_days, "process failures"),
        f"{count_text(seen.injected, 'injected fault', 'injected faults')} not counted",
    ]
    return Text("measured: " + "; ".join(parts))


def _copies_table(found: list[Outlook], given: Conditions) -> Table:
    table = Table(title="what copies cost", box=None, pad_edge=False, header_style="bold")
    for name in ("protection", "group", "host memory, a node", "sent, a node and step", "a copy takes", "waits"):
        table.add_column(name, justify="left" if name == "protection" else "right")
    for one in found:
        cost, memory = one.footprint, bytes_text(one.footprint.node_memory_bytes)
        if given.host_memory_bytes is not None:
            part = cost.node_memory_bytes / given.host_memory_bytes
            memory += f" ({part:.0%}{'' if one.fits else ', does not fit'})"
        table.add_row(
            one.protection.value,
            str(one.group) if one.group else "-",
            memory,
            bytes_text(cost.node_network_bytes),
            f"{seconds_text(cost.copy_s)} ({seconds_text(cost.to_host_s)} to the host)",
            "no" if cost.hidden else f"{seconds_text(cost.copy_s - cost.window_s)} a step",
        )
    return table


def _survival_table(found: list[Outlook], given: Conditions) -> Table:
    table = Table(title=f"state survives, with a probability of {given.threshold:g}", box=None, pad_edge=False)
    table.header_style = "bold"
    spares = [s.spares for s in found[0].with_spares]
    names = ["protection", "without repair"]
    names += [f"with repair, {count_text(count, 'spare', 'spares')}" for count in spares]
    names += ["whole again after"]
    for name in names:
        table.add_column(name, justify="left" if name == "protection" else "right")
    for one in found:
        table.add_row(
            one.protection.value,
            days_text(one.safe_days),
            *(days_text(s.safe_days) for s in one.with_spares),
            seconds_text(one.window_s) if one.group else "-",
        )
    return table


def _lost_table(found: list[Outlook]) -> Table:
    table = Table(title="lost of a day, in minutes", box=None, pad_edge=False, header_style="bold")
    names = ("protection", "spares", "fatal a day", "checkpoint every", "recovery", "restart", "redone", "written")
    for name in (*names, "copies", "no node", "lost", "ETTR"):
        table.add_column(name, justify="left" if name == "protection" else "right", no_wrap=name == "ETTR")
    for one in found:
        for s in one.with_spares:
            lost = s.losses
            every = "never" if lost.interval_s == math.inf else days_text(lost.interval_s / DAY_S)
            parts = (lost.recovery_s, lost.restart_s, lost.rework_s, lost.checkpoint_s, lost.copies_s, lost.waiting_s)
            table.add_row(
                one.protection.value,
                str(s.spares),
                f"{s.fatal:.2g}",
                every,
                *(_minutes(part) for part in parts),
                _minutes(lost.lost_s),
                f"{lost.ettr:.4f}{'' if lost.first_order else ' (!)'}",
            )
    return table


def _minutes(seconds: float) -> str:
    minutes = seconds / 60
    return (
        "-" if seconds == 0 else "< 0.01" if minutes < 0.01 else f"{minutes:.2f}" if minutes < 10 else f"{minutes:.0f}"
    )
