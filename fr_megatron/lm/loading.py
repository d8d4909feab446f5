"""Which checkpoint Megatron-LM loads in a process that takes a dead one's place.

With ``--load`` (mostly the directory of ``--save``) Megatron takes the newest. A replacement would find one that the
job has written itself since: another iteration to begin with, and what a rank receives while it is loaded is known for
the launch's alone. So a replacement loads what the job was launched with, and nothing where there was nothing; its
state it gets from the other ranks in any case.

Of non-persistent checkpoints (``--non-persistent-ckpt-type global``) Megatron keeps the newest alone, and loads it in
place of another one that is older. A replacement leaves out one that was not the launch's; and where the launch's would
be removed by the job itself, a replacement could not load it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashrecovery.adapter.loop import union
from flashrecovery.errors import UnsupportedError

_TRACKER = "latest_checkpointed_iteration.txt"
_NOTHING = ".nothing-at-the-launch"
"""A directory that is not there."""
_BESIDE = "non_persistent"
"""Where non-persistent checkpoints are, within the directory, if nothing else is said (Megatron-LM core 0.16)."""
_LOADED, _LOADED_BESIDE = "load", "beside"
"""What the ranks say in one collective."""


@contextmanager
def as_at_the_launch(args: Any) -> Iterator[None]:
    """Megatron sets up model and optimizer within, and loads with ``args``, its own. A collective, to which a
    replacement gets the launch's answer.

    Raises UnsupportedError: the launch would load a non-persistent checkpoint, which the job itself then removes."""
    load, step, kind = args.load, getattr(args, "ckpt_step", None), getattr(args, "non_persistent_ckpt_type", None)
    beside = kind == "global"
    if load is None or (step and not beside):
        yield
        return
    now = "" if step else newest(Path(load))
    now_beside = newest(_folder_beside(args, load)) if beside else ""
    said = union([f"{_LOADED} {now}", f"{_LOADED_BESIDE} {now_beside}"])
    launched, launched_beside = _greatest(said, _LOADED), _greatest(said, _LOADED_BESIDE)
    if launched_beside and int(launched_beside) >= (step or _iteration(launched)):
        _check_stays(args, int(launched_beside))
        args.ckpt_step = int(launched_beside)  # of another one of that iteration or a later one, that would be loaded
    else:
        if launched_beside != now_beside:
            args.non_persistent_ckpt_type = None
        if launched != now and launched.isdecimal():
            args.ckpt_step = int(launched)
        elif launched != now:
            args.load = str(Path(load) / _NOTHING)
    try:
        yield
    finally:
        args.load, args.ckpt_step = load, step
        if beside:
            args.non_persistent_ckpt_type = kind


def _greatest(said: list[str], what: str) -> str:
    """The greatest of the ranks' answers; a rank that does not see the directory's file has ""."""
    return max(text.partition(" ")[2] for text in said if text.partition(" ")[0] == what)


def _iteration(newest: str) -> int:
    """As Megatron counts it: a release has none, and nothing is less than any."""
    return int(newest) if newest.isdecimal() else 0 if newest else -1


def _folder_beside(args: Any, where: str) -> Path:
    return Path(getattr(args, "non_persistent_global_ckpt_dir", None) or Path(where) / _BESIDE).resolve()


def _check_stays(args: Any, iteration: int) -> None:
    folder, save = _folder_beside(args, args.load), getattr(args, "save", None)
    if save and getattr(args, "non_persistent_save_interval", None) and _folder_beside(args, save) == folder:
        raise UnsupportedError(
            f"flash-recovery does not support: --load of the non-persistent checkpoint of iteration {iteration} in "
            f"{folder} by a job with --non-persistent-save-interval, which removes it (a replacement "
            "loads what the launch has loaded); allowed: without that interval, or where a persistent one is newer"
        )


def newest(folder: Path) -> str:
    """The iteration of the newest checkpoint, filled up so that the largest text is the newest; "release" of one
    without, "" where there is none."""
    try:
        said = (folder / _TRACKER).read_text().strip()
    except FileNotFoundError:
        return ""
    return said.zfill(20) if said.isdecimal() else said
