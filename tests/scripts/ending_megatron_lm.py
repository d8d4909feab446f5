"""pretrain_gpt.py of the Megatron-LM on the path, whose loop ends early. In the environment:

DIED: a file. Rank 1 dies once when its loop has decided to end; the file says that it has.
SIGNALLED: a file. Rank 1 alone gets SIGTERM once, in its third iteration; the file says that it has.
"""

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
from megatron.training import get_args, training

assert fr_megatron
died, signalled = Path(os.environ.get("DIED", "/")), Path(os.environ.get("SIGNALLED", "/"))
train, train_step = training.train, training.train_step


@functools.wraps(train_step)
def signalled_step(*args: Any, **kwargs: Any) -> Any:
    if dist.get_rank() == 1 and get_args().curr_iteration == 2 and not signalled.exists():
        signalled.touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return train_step(*args, **kwargs)


@functools.wraps(train)
def dying_train(*args: Any, **kwargs: Any) -> Any:
    try:
        return train(*args, **kwargs)
    except SystemExit:
        if dist.get_rank() == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        raise


training.train, training.train_step = dying_train, signalled_step
spec = find_spec("pretrain_gpt")
assert spec is not None and spec.origin is not None
runpy.run_path(spec.origin, run_name="__main__")
