"""The DeepSpeed example without the reset of what a failure leaves half-finished in the engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

import train_deepspeed
from fr_deepspeed.engine import EngineAdapter

if __name__ == "__main__":
    EngineAdapter._reset_framework = lambda self: None  # type: ignore[method-assign]
    train_deepspeed.main()
