"""Which files are the script's own, and which belong to what is installed. Without torch: it is asked before the script
runs, which may set what torch reads."""

from __future__ import annotations

import functools

from flashrecovery.worker.preimport.preimport import Installed

FRAMEWORKS = frozenset(
    ("accelerate", "deepspeed", "lightning", "lightning_fabric", "megatron", "pytorch_lightning", "torch")
) | frozenset(("transformers", "trl", "flashrecovery", "fr_deepspeed", "fr_megatron"))
"""Packages whose own loops are no script, wherever they lie: a checkout counts as installed, too."""


def is_own_file(file: str) -> bool:
    return bool(file) and not file.startswith("<") and not _installed().has_file(file)


@functools.cache
def _installed() -> Installed:
    return Installed()
