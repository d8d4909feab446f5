"""How many iterations over torch's data loaders this process has begun."""

from __future__ import annotations


class LoaderIterations:
    """Counted by the hook that each of them calls
    (:func:`flashrecovery.worker.startup.import_time_hooks.install_loader_hook`)."""

    def __init__(self) -> None:
        self.begun = 0

    def count(self) -> None:
        """Another one begins."""
        self.begun += 1


ITERATIONS = LoaderIterations()
