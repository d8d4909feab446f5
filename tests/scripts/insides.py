"""``insides.py FOLDER STEPS SCRIPT FLAGS...``: run a script, and at the beginning of each of these steps (``1,5``)
write down in ``FOLDER`` what the framework's objects are like inside (:mod:`tests.support.insides`)."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from flashrecovery.worker.loop import Loop
from tests.support.insides import PACKAGES, inside


def roots(adapters: list[Any]) -> Iterator[tuple[str, object]]:
    """What the adapters have of their framework."""
    for adapter in adapters:
        for name, value in vars(adapter).items():
            parts = value if isinstance(value, (list, tuple)) else [value]
            if parts and all(map(_is_of_framework, parts)):
                yield name.strip("_"), value


def _is_of_framework(value: object) -> bool:
    known = isinstance(value, (nn.Module, torch.optim.Optimizer)) and not isinstance(value, torch.Tensor)
    return known or f"{type(value).__module__}.".startswith(PACKAGES)


def main() -> None:
    folder, steps = Path(sys.argv[1]), {int(step) for step in sys.argv[2].split(",")}
    begin = Loop.begin

    def begin_and_tell(self: Any) -> None:
        gate = self.gate
        if gate.version in steps:
            found = inside(dict(roots(self._registry.adapters)))
            path = folder / f"rank{self._worker.rank}.step{gate.version}.gen{gate.generation}.json"
            path.write_text(json.dumps(found, indent=0))
        begin(self)

    Loop.begin = begin_and_tell  # type: ignore[method-assign]
    sys.argv = sys.argv[3:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
