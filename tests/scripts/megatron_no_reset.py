"""The megatron-core example without the reset of what a failure leaves half-finished in Megatron."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

import fr_megatron  # noqa: F401 - first: it brings the stand-ins of FR_MEGATRON_CPU=1

# isort: split

import pretrain_gpt
from fr_megatron.adapter import MegatronAdapter

if __name__ == "__main__":
    MegatronAdapter._reset_framework = lambda self: None  # type: ignore[method-assign]
    pretrain_gpt.main()
