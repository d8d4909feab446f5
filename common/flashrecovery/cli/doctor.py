"""``flashrecovery doctor``: what of this machine helps or hinders a recovery, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence

import click
from rich.table import Table
from rich.text import Text

from flashrecovery.capabilities.finding import Finding, Level
from flashrecovery.cli import adapter_checks, checks, health_checks
from flashrecovery.cli.output import count_text, make_console
from flashrecovery.terminal import say

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@click.command()
@click.option("--build", is_flag=True, help="Compile the process-group backend now, if it is not compiled yet.")
@click.option("--nccl", is_flag=True, help="Check NCCL's environment even without an NVIDIA device.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Print every check with its meaning.")
def doctor(build: bool, nccl: bool, as_json: bool, verbose: bool) -> None:
    """Say what of the environment helps or hinders. Exit code 1 if something makes recovery impossible."""
    findings = list(examine(build, nccl))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(f) for f in findings], indent=2))
    else:
        _show(findings, verbose)
    if any(f.level is Level.FAIL for f in findings):
        sys.exit(1)


def examine(build: bool = False, nccl: bool = False) -> Iterator[Finding]:
    """All findings, one check after the other."""
    yield from checks.python()
    torch = checks.torch_version()
    yield from torch
    yield from checks.frameworks()
    yield from checks.patches()
    yield from adapter_checks.adapters()
    if all(f.level is not Level.FAIL for f in torch):  # else the group code cannot even be imported
        backend = checks.backend(build, say)
        yield from backend
        yield from checks.compiler(built=all(f.level is Level.OK for f in backend))
        yield from checks.nccl_backend(os.environ)
        yield from checks.nccl(os.environ, nccl)
        yield from checks.barrier()
    yield from health_checks.plugins()
    yield from checks.grpc_loopback()
    yield from checks.kernel()
    yield from checks.limits()
    yield from checks.memory()
    yield from checks.clock()
    yield from checks.threads(os.environ, len(os.sched_getaffinity(0)))
    yield from checks.own_name(os.environ)


def _show(findings: list[Finding], verbose: bool) -> None:
    console = make_console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for f in findings if verbose else list(summary(findings)):
        text = Text(f.found)
        if f.meaning:
            text.append(f"  {f.meaning}", style="dim")
        if f.advice:
            text.append(f"\n-> {f.advice}", style=_STYLES[f.level])
        table.add_row(Text(f.level.value, style=_STYLES[f.level]), f.check, text)
    console.print(table)
    count = {level: sum(f.level is level for f in findings) for level in Level}
    warnings, failures = (count_text(count[level], word, f"{word}s") for level, word in _COUNTED)
    verdict = f"{count[Level.OK]} ok, {warnings}, {failures}" + ("" if verbose else "  (-v: every check)")
    console.print(Text(verdict, style="bold"))


_COUNTED = ((Level.WARN, "warning"), (Level.FAIL, "failure"))


def summary(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Warnings, failures and advice as they are; of what is well one line for each thing that was looked at
    ("torch: stores" belongs to torch), without its meaning."""
    of_thing: dict[str, list[Finding]] = {}
    for f in findings:
        if f.level is Level.OK and not f.advice:
            of_thing.setdefault(f.check.partition(":")[0], []).append(f)
    for f in findings:
        if f.level is not Level.OK or f.advice:
            yield f
            continue
        thing = f.check.partition(":")[0]
        first, *others = of_thing.pop(thing, [None])
        if first is not None:
            own = first.found if first.check == thing else count_text(len(others) + 1, "check", "checks")
            more = (
                f", {count_text(len(others), 'check', 'checks')} of its inside"
                if others and first.check == thing
                else ""
            )
            yield Finding(thing, Level.OK, own + more, "")
