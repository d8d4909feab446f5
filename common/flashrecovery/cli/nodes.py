"""``flashrecovery nodes``: which nodes have failed, in which jobs, and what jobs make of it."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from flashrecovery.cli.output import count_text, make_console
from flashrecovery.controller.storage.node_failure_file import FILE_NAME, forget_marks, read_marks
from flashrecovery.errors import ConfigError
from flashrecovery.plan.membership.node_failures import NodeMark, Rating, Use, may_be_used_again, ratings

_NO_RATING = Rating(Use.NORMAL, 0.0, 0, 0, "nothing that still counts")


@click.command()
@click.argument("path", metavar="[FILE|RUN_DIR]", type=click.Path(path_type=Path), default=Path("runs"))
@click.option(
    "--forget", "forgotten", multiple=True, metavar="NODE", help="Forget the recorded failures of a node (repeatable)."
)
@click.option("--marks", "each", is_flag=True, help="Show every failure.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def nodes(path: Path, forgotten: tuple[str, ...], each: bool, as_json: bool) -> None:
    """Show what is remembered of nodes' failures: in FILE, or beside RUN_DIR, or in the folder of run directories
    (runs)."""
    file = _file(path)
    try:
        if forgotten:
            count = forget_marks(file, forgotten)
            click.echo(f"forgotten: {count_text(count, 'failure', 'failures')} of {', '.join(forgotten)}")
            return
        known = read_marks(file)
    except OSError as e:
        raise ConfigError(f"{file} cannot be used: {e.strerror or e}") from e
    now = time.time()
    rated = ratings(known.marks, now)
    if as_json:
        click.echo(json.dumps(_facts(known.marks, rated, now), indent=2))
        return
    if known.damage:
        click.echo(f"{known.damage}; the next job sets it aside")
    if not known.marks:
        click.echo(f"no failures of nodes in {file}")
        return
    table = Table("node", "use", "last", "why", box=None)
    last = {mark.node: mark.time for mark in sorted(known.marks, key=lambda m: m.time)}
    for node in sorted(last, key=lambda n: (-rated.get(n, _NO_RATING).score, n)):
        rating = rated.get(node, _NO_RATING)
        back = may_be_used_again(known.marks, node, now)
        why = rating.reason + (f"; used last again in {back / 86400:.1f} days" if back else "")
        table.add_row(escape(node), rating.use.value, _when(last[node]), escape(why))
    make_console().print(table)
    if each:
        for mark in sorted(known.marks, key=lambda m: m.time):
            click.echo(f"{_when(mark.time)}  {mark.node}  {mark.kind}  {mark.job} ({mark.generation})  {mark.detail}")


def _file(path: Path) -> Path:
    """Raises ConfigError if there is none."""
    for file in (path, path / FILE_NAME, path.absolute().parent / FILE_NAME):
        if file.is_file():
            return file
    raise ConfigError(
        f"{path}: no {FILE_NAME} here or beside it, so no failures of nodes have been remembered. To switch it on for "
        f"later jobs: touch {path.absolute().parent / FILE_NAME}, or set node_failure_log in the configuration"
    )


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _facts(marks: tuple[NodeMark, ...], rated: dict[str, Rating], now: float) -> dict[str, object]:
    return {
        node: {
            **dataclasses.asdict(rating),
            "used_last_in_s": may_be_used_again(marks, node, now),
            "marks": [dataclasses.asdict(mark) for mark in marks if mark.node == node],
        }
        for node, rating in rated.items()
    }
