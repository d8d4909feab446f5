"""The DeepSpeed example in fp16 on a CPU.

DeepSpeed refuses fp16 on a CPU without native fp16 arithmetic. Torch computes it on every CPU, only slower, and the
dynamic loss scale is the same code everywhere; so the refusal is lifted here, and nothing else is changed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

from deepspeed.accelerator import get_accelerator

import train_deepspeed


def main() -> None:
    """As the example, with ``--precision fp16``."""
    get_accelerator().is_fp16_supported = lambda: True
    train_deepspeed.main()


if __name__ == "__main__":
    main()
