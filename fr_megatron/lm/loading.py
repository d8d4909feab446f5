"""Which checkpoint Megatron-LM loads in a process that takes a dead one's place.

With ``--load`` (mostly the directory of ``--save``) Megatron takes the newest. A replacement would find one that the
job has written itself since: another iteration to begin with, and what a rank receives while it is loaded is known for
the launch's alone. So a replacement loads what the job was launched with, and nothing where there was nothing; its
state it gets from the other ranks in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashrecovery.adapter import union

_TRACKER = "latest_checkpointed_iteration.txt"
_NOTHING = ".nothing-at-the-launch"
"""A directory that is not there."""


@contextmanager
def as_at_the_launch(args: Any) -> Iterator[None]:
    """Megatron sets up model and optimizer within, and loads with ``args``, its own. A collective, to which a
    replacement gets the launch's answer."""
    load, step = args.load, getattr(args, "ckpt_step", None)
    if load is None or step:
        yield
        return
    now = _newest(Path(load))
    launched = max(union([now]))  # who does not see the directory's file has nothing
    if launched != now:
        if launched.isdecimal():
            args.ckpt_step = int(launched)
        else:
            args.load = str(Path(load) / _NOTHING)
    try:
        yield
    finally:
        args.load, args.ckpt_step = load, step


def _newest(folder: Path) -> str:
    """The iteration of the newest checkpoint, filled up so that the largest text is the newest; "release" of one
    without, "" where there is none."""
    try:
        said = (folder / _TRACKER).read_text().strip()
    except FileNotFoundError:
        return ""
    return said.zfill(20) if said.isdecimal() else said
