"""Fallback checkpoints, as tests read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashrecovery.redundancy.checkpoint import reader
from flashrecovery.redundancy.checkpoint.manifest import StoredCheckpoint
from flashrecovery.state.shard import Shard


def load(path: Path, shards: Sequence[Shard], **options: Any) -> reader.PlainState:
    """Open the checkpoint there, and load it. See :func:`.reader.load`."""
    return reader.load(StoredCheckpoint.open(path), shards, **options)
