"""``flashrecovery checkpoint``: what a checkpoint holds, and the same checkpoint for another number of ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Table

from flashrecovery.cli.output import bytes_text, count_text, make_console
from flashrecovery.plan.words import shortened

if TYPE_CHECKING:
    from flashrecovery.redundancy.checkpoint.contents import Contents, TensorFacts

_BOXES_SHOWN = 4


@click.group()
def checkpoint() -> None:
    """Show the content of a checkpoint, or rewrite it for another number of ranks. (`checkpoints` lists and checks
    them.)"""


@checkpoint.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON, with all tensor slices.")
def show(path: Path, as_json: bool) -> None:
    """Show what a checkpoint holds: its version, how many ranks have written it, the tensors, and which boxes of them
    are in which rank's files. PATH is a checkpoint, or a directory of which the newest one is shown. No tensor is
    read."""
    import torch

    from flashrecovery.redundancy.checkpoint.contents import contents
    from flashrecovery.redundancy.checkpoint.convert import found_in

    found = contents(found_in(path))
    if as_json:
        click.echo(json.dumps(_plain(found), indent=2))
        return
    console = make_console()
    sizes = "readable by any number of ranks" if found.any_size else f"readable by {found.ranks} ranks"
    own = "" if found.own_state else ", without random number states and data positions of the ranks"
    form = f", in the format {found.form!r}" if found.form else ""
    console.print(f"{found.path}: version {found.version:,}, of {found.ranks} ranks{form}{own}; {sizes}", markup=False)
    nbytes = sum(math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in found.tensors)
    console.print(f"{count_text(len(found.tensors), 'tensor', 'tensors')}, {bytes_text(nbytes)}", markup=False)
    table = Table("tensor", "shape", "type", "in the files of", box=None)
    for tensor in found.tensors:
        table.add_row(escape(tensor.name), str(list(tensor.shape)), tensor.dtype, escape(_where(tensor, found.ranks)))
    console.print(table)


@checkpoint.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--to-ranks", "ranks", type=click.IntRange(min=1), required=True, help="Number of ranks that will read it."
)
@click.option("--out", "directory", type=click.Path(path_type=Path), required=True, help="A new directory.")
def convert(path: Path, ranks: int, directory: Path) -> None:
    """Rewrite a checkpoint of an elastic job, as another number of ranks would have written it. PATH is a
    checkpoint, or a directory of which the newest one is taken; it stays as it is. What is read is checked.

    Elastic jobs read checkpoints of any size themselves: this is for storage close to the new ranks, and for tools.
    """
    from flashrecovery.redundancy.checkpoint.convert import convert as write_converted
    from flashrecovery.redundancy.checkpoint.convert import found_in

    click.echo(f"{write_converted(found_in(path), directory, ranks)}: for {ranks} ranks")


def _where(tensor: TensorFacts, ranks: int) -> str:
    if len(tensor.boxes) == ranks > 1 and len({tuple(boxes) for boxes in tensor.boxes.values()}) == 1:
        return f"all {ranks} ranks"
    found = [
        f"{rank}: {shortened([str(box) for box in boxes], _BOXES_SHOWN)}" if tensor.shape else str(rank)
        for rank, boxes in tensor.boxes.items()
    ]
    return shortened(found, _BOXES_SHOWN)


def _plain(found: Contents) -> dict[str, object]:
    return {
        "path": str(found.path),
        "version": found.version,
        "ranks": found.ranks,
        "format": found.form,
        "any_size": found.any_size,
        "own_state": found.own_state,
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "boxes": {
                    rank: [[list(box.low), list(box.high)] for box in boxes] for rank, boxes in tensor.boxes.items()
                },
            }
            for tensor in found.tensors
        ],
    }
