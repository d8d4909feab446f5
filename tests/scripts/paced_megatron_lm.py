"""pretrain_gpt.py of the Megatron-LM on the path, unmodified, whose functions take a while: so a test has the time to
do something in one of them.

The flags of the parser below are this script's own.
"""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
import time
from importlib.util import find_spec
from typing import Any

import fr_megatron  # first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

from megatron.training import training

assert fr_megatron
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--steps", type=int, default=12, help="iterations")
parser.add_argument("--step-time", type=int, default=0, help="milliseconds that a step takes longer")
parser.add_argument("--evaluation-time", type=int, default=0, help="milliseconds that an evaluation takes longer")
parser.add_argument("--save-time", type=int, default=0, help="milliseconds that a checkpoint takes longer")
own, others = parser.parse_known_args()
sys.argv[1:] = [*others, f"--train-iters={own.steps}"]


def slower(name: str, milliseconds: int, *, said: bool = False) -> None:
    """Replace one of the loop's functions. ``said``: when it begins, that is printed."""
    original = getattr(training, name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if said:
            print(f"begins: {name}", flush=True)
        time.sleep(milliseconds / 1e3)
        return original(*args, **kwargs)

    setattr(training, name, function)


slower("train_step", own.step_time)
slower("evaluate", own.evaluation_time, said=True)
slower("save_checkpoint", own.save_time, said=True)
spec = find_spec("pretrain_gpt")
assert spec is not None and spec.origin is not None
runpy.run_path(spec.origin, run_name="__main__")
