"""Which modules become the same here as in live workers: they are imported in a forked process first.

A script may have changed a package before it, or a function of the package, imported another module that reads this
(:mod:`.import_outcomes`). Such a module, and each that imports it, is left to the script. An import cannot be undone,
hence the fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

from flashrecovery.runtime.process_control import die_with_parent, redirect_output
from flashrecovery.worker.preimport.import_outcomes import UNKNOWN, ImportOutcomes
from flashrecovery.worker.preimport.preimport import with_packages

_TRIES = 6
"""Trials that find a module to be another one. Each takes as long as the imports."""
_LONGEST_S = 120.0
ImportThem = Callable[[Sequence[str], Callable[[str, "BaseException | None"], None]], object]
"""Imports modules, and calls the function after each, with its name."""


@dataclass(frozen=True)
class _Other:
    """With the import of ``name``, ``module`` has become other than in the workers, and ``digest`` is what it is.
    ``name`` empty: all are equal."""

    name: str = ""
    module: str = ""
    digest: int = 0


class _OtherError(BaseException):
    """A module is other than in the workers. A BaseException: no library catches it."""

    def __init__(self, other: _Other) -> None:
        super().__init__(other)
        self.other = other


def equal_ones(names: Sequence[str], outcomes: Mapping[str, int], import_them: ImportThem) -> list[str]:
    """Those of ``names`` that can be imported here without a module becoming other than ``outcomes`` say. Modules that
    are not in ``outcomes`` were there before the workers' scripts began, or vary from worker to worker. One that varies
    from trial to trial, as by the time, is not compared.

    Prints which are left out. A trial that ends in another way, or takes too long, leaves all out. Where too many
    import one that is other, those that are left are imported ahead, and that one with them.
    """
    left, compared = list(names), dict(outcomes)
    seen: dict[str, int] = {}  # what modules were found to be in a trial before
    for _ in range(_TRIES):
        found = _tried(left, compared, import_them) if left else _Other()
        if found is None:
            print(
                f"what workers have imported is left to each rank ({len(left)} modules): a trial has failed", flush=True
            )
            return []
        if not found.name:
            return left
        before = seen.get(found.module)
        seen[found.module] = found.digest
        if before is not None and before != found.digest:
            del compared[found.module]
        elif before is not None or compared[found.module] == UNKNOWN:
            print(
                f"{found.name} is left to each rank: imported ahead, {found.module} is other than in the workers",
                flush=True,
            )
            left = [one for one in left if found.name not in with_packages(one)]
    print(f"after {_TRIES} trials {len(left)} modules are imported ahead, which import some of these", flush=True)
    return left


def _tried(names: Sequence[str], outcomes: Mapping[str, int], import_them: ImportThem) -> _Other | None:
    """The first of ``names`` with which a module becomes other. None: it is not known."""
    read, write = os.pipe()
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(own)
            redirect_output(os.open(os.devnull, os.O_WRONLY))
            os.write(write, json.dumps(astuple(_first_other(names, outcomes, import_them))).encode())
        finally:
            os._exit(0)  # no exit handler of a library may run
    os.close(write)
    try:
        said = _all_of(read)
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still the child's
        os.waitpid(pid, 0)
    return None if not said else _Other(*json.loads(said))


def _first_other(names: Sequence[str], outcomes: Mapping[str, int], import_them: ImportThem) -> _Other:
    watch = ImportOutcomes()
    seen: set[str] = set()

    def tried(name: str, error: BaseException | None) -> None:
        watch.look()
        for module in watch.digests.keys() - seen:
            seen.add(module)
            wanted = outcomes.get(module)
            if wanted is not None and (wanted == UNKNOWN or wanted != watch.digests[module]):
                raise _OtherError(_Other(name, module, watch.digests[module]))

    watch.start()
    try:
        import_them(names, tried)
    except _OtherError as e:
        return e.other
    return _Other()


def _all_of(read: int) -> bytes:
    """What is written into the pipe until it is closed; empty if that takes too long."""
    said, deadline = b"", time.monotonic() + _LONGEST_S
    while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(read, 4096)
        if not part:
            return said
        said += part
    return b""
