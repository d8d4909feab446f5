"""The rank table on its way out: the file for everybody, and to each agent its part, if that has changed.

After the loss of one rank a handful of agents have to learn something new, however many there are. The file is written
by a separate thread, so that neither its size nor the file system delays the controller.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flashrecovery.controller.state.job_state import AGENT
from flashrecovery.controller.state.outbox import Publish
from flashrecovery.controller.state.rank_table import Parts, affected, row
from flashrecovery.events import RunDir
from flashrecovery.proto import flashrecovery_pb2 as pb

log = logging.getLogger("flashrecovery")


class RankTablePublisher:
    """Publishes the rank table of one job."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="flashrecovery-rank-table")
        self._newest: Publish | None = None
        self._parts: Parts | None = None
        self._told: dict[str, object] = {}
        self._rows: list[tuple[pb.RankEntry | None, dict[str, Any]]] = []  # of the file; the writer's, by rank

    def publish(self, action: Publish, agents: Mapping[str, object]) -> Iterable[tuple[str, pb.Command]]:
        """Have the file written, and say what to send to which agent. ``agents``: their links, by node; another link is
        another agent, which knows nothing yet."""
        self._newest = action
        self._writer.submit(self._write, action)
        old, new = self._parts, Parts(action.table)
        changed = affected(old, new) if old is not None else set(agents)
        wanting = [
            n for n, link in agents.items() if n in changed or not new.has_ranks(n) or self._told.get(n) is not link
        ]
        self._parts, self._told = new, dict(agents)
        for node in wanting:
            yield node, pb.Command(generation=action.generation, rank=AGENT, rank_table=new.part_for(node))

    def _write(self, action: Publish) -> None:
        if action is not self._newest:
            return  # a newer one waits behind this one
        try:
            self._run_dir.write_rank_table(action.generation, self._rows_of(action.table.entries))
        except OSError as e:
            log.error("the rank table of generation %d cannot be written: %s", action.generation, e)

    def _rows_of(self, entries: Sequence[pb.RankEntry]) -> list[dict[str, Any]]:
        """Made again only for entries that are not in the file yet: this thread's work holds up the controller's."""
        before = self._rows if len(self._rows) == len(entries) else [(None, {})] * len(entries)
        pairs = zip(entries, before, strict=True)
        self._rows = [(entry, known if entry is of else row(entry)) for entry, (of, known) in pairs]
        return [known for _, known in self._rows]

    def close(self) -> None:
        """The newest table is in its file."""
        self._writer.shutdown()
