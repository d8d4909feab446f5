"""Runs a script with the fake of NCCL in place of gloo: ``fake_nccl.py SCRIPT ARGUMENTS``.

Or ``fake_nccl.py ARGUMENTS`` with the script in ``FAKE_NCCL_SCRIPT``.

``FAKE_NCCL_BREAK=RANK:STEP``: after that optimizer step of the rank's first process its connections break.
``FAKE_NCCL_STICKY=RANK:STEP``: there a kernel fails, and with it every later call of the process to the device.
``FAKE_NCCL_KERNEL=RANK:STEP``: there a kernel is launched that never ends.
``FAKE_NCCL_DEVICE_MS=RANK:MILLISECONDS[:STEPS],...``: so long the rank's device computes in each of its (first) steps.
``FAKE_NCCL_NVLINK=RANKS:DIRECTORY``: that many ranks after each other have GPUs that are joined by NVLink.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support import fake_nccl, optimizers


def _in_time(variable: str, strike: Callable[[], None]) -> None:
    rank, _, step = os.environ.get(variable, "").partition(":")
    if rank != os.environ["RANK"] or os.environ.get("FLASHRECOVERY_GENERATION") != "0":
        return
    steps = itertools.count(1)

    def stepped(*_: Any) -> None:
        if next(steps) == int(step):
            strike()

    register_optimizer_step_post_hook(stepped)


def _compute(module: Any) -> None:
    """The host does not wait for what the device computes."""
    for text in filter(None, os.environ.get("FAKE_NCCL_DEVICE_MS", "").split(",")):
        rank, milliseconds, *most = text.split(":")
        if rank != os.environ["RANK"]:
            continue
        left = itertools.count(int(most[0]) if most else sys.maxsize, -1)

        def stepped(*_: Any, seconds: float = float(milliseconds) / 1e3, left: Iterator[int] = left) -> None:
            if next(left) > 0:
                module.launch_kernel(seconds)

        register_optimizer_step_post_hook(stepped)


def _join_domain() -> None:
    """Tell the others of the domain which process this rank has; the fake looks for those that have ended."""
    ranks, _, directory = os.environ.get("FAKE_NCCL_NVLINK", "").partition(":")
    if not ranks:
        return
    rank = int(os.environ["RANK"])
    domain = Path(directory) / str(rank // int(ranks))
    domain.mkdir(parents=True, exist_ok=True)
    (domain / f"{rank}.{os.getpid()}").touch()
    os.environ["FAKE_NCCL_DOMAIN"] = str(domain)


def main() -> None:
    module = fake_nccl.install()
    _join_domain()
    _in_time("FAKE_NCCL_BREAK", module.break_network)
    _in_time("FAKE_NCCL_STICKY", module.fail_kernels)
    _in_time("FAKE_NCCL_KERNEL", lambda: module.launch_kernel(-1.0))
    _compute(module)
    init = dist.init_process_group

    @wraps(init)
    def init_process_group(backend: str | None = None, *arguments: Any, **more: Any) -> Any:
        return init(fake_nccl.backend_name() if backend == "gloo" else backend, *arguments, **more)

    dist.init_process_group = init_process_group
    optimizers.choose()
    script = os.environ.get("FAKE_NCCL_SCRIPT")
    sys.argv = sys.argv[1:] if script is None else [script, *sys.argv[1:]]
    script = sys.argv[0]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
