"""Several jobs at once, each in a separate thread, that end together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


def run_side_by_side(jobs: Sequence[Callable[[], None]], name: str) -> None:
    """Returns when all jobs have ended, and raises the first error. The first job runs in the caller's thread, the
    others in threads called ``name``."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as e:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(e)

    if not jobs:
        return
    threads = [threading.Thread(target=guarded, args=(job,), name=name, daemon=True) for job in jobs[1:]]
    for thread in threads:
        thread.start()
    guarded(jobs[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
