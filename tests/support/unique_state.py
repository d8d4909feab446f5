"""Layouts of DeepSpeed and Megatron in which ranks hold shards that no other rank has."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.support import megatron as mg
from tests.support.jobs import Layout

TIMEOUT_S = 400
DEEPSPEED = [Layout(f"zero{stage}", "train_deepspeed.py", ("--zero", str(stage))) for stage in (1, 2, 3)]
PIPELINE = Layout("zero1-pipeline", "train_deepspeed.py", ("--zero", "1", "--pipeline", "2"))
EXPERTS = Layout("zero2-moe", "train_deepspeed.py", ("--zero", "2", "--moe", "4"))
MEGATRON = [
    mg.DP4_DISTRIBUTED,
    mg.gpt("tp2-dp2-distributed", *mg.TP, *mg.DISTRIBUTED),
    mg.gpt("pp2-dp2-distributed", *mg.PP, *mg.DISTRIBUTED),
    mg.FSDP2_DP4,
    mg.MEGATRON_FSDP_DP4,
]
FRAMEWORKS = (*DEEPSPEED, PIPELINE, EXPERTS, *MEGATRON)
_MARKS = {"train_deepspeed.py": [pytest.mark.deepspeed], "pretrain_gpt.py": [pytest.mark.megatron]}


def marks(layout: Layout, *, quick: bool) -> list[pytest.MarkDecorator]:
    """Of a case with this layout."""
    return [*_MARKS.get(layout.script, []), *([] if quick else [pytest.mark.grid])]


def environment(layout: Layout) -> Mapping[str, str] | None:
    """In which the layout's script runs on a CPU."""
    return mg.ENVIRONMENT if layout.script == "pretrain_gpt.py" else None
