"""pretrain_gpt.py of the Megatron-LM on the path, of which rank 1 dies once when its loop has decided to end early. The
file that ``DIED`` in the environment names says that it has."""

from __future__ import annotations

import functools
import os
import runpy
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fr_megatron  # first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import torch.distributed as dist
from megatron.training import training

assert fr_megatron
died = Path(os.environ["DIED"])
train = training.train


@functools.wraps(train)
def dying_train(*args: Any, **kwargs: Any) -> Any:
    try:
        return train(*args, **kwargs)
    except SystemExit:
        if dist.get_rank() == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        raise


training.train = dying_train
spec = find_spec("pretrain_gpt")
assert spec is not None and spec.origin is not None
runpy.run_path(spec.origin, run_name="__main__")
