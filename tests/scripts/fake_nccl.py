"""Runs a script with the fake of NCCL in place of gloo: ``fake_nccl.py SCRIPT ARGUMENTS``."""

from __future__ import annotations

import runpy
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support import fake_nccl


def main() -> None:
    fake_nccl.install()
    init = dist.init_process_group

    @wraps(init)
    def init_process_group(backend: str | None = None, *arguments: Any, **more: Any) -> Any:
        return init(fake_nccl.BACKEND if backend == "gloo" else backend, *arguments, **more)

    dist.init_process_group = init_process_group
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
