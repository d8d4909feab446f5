"""Steps that accelerate takes early, at the end of an epoch, are refused before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery.errors import RegistrationError
from flashrecovery.worker.data.accelerate import PreparedLoader, check_rest


def prepared(batches: int, micro_batches: int, *, synchronises: bool = True) -> PreparedLoader:
    accelerate = pytest.importorskip("accelerate")
    from torch.utils.data import DataLoader

    accelerate.state.GradientState._reset_state()
    plugin = accelerate.utils.GradientAccumulationPlugin(num_steps=micro_batches, sync_with_dataloader=synchronises)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    samples: Any = list(range(batches))
    return PreparedLoader(accelerator.prepare(DataLoader(samples)))


def test_refused_by_name() -> None:
    with pytest.raises(RegistrationError, match="7 batches, which is no multiple of gradient_accumulation_steps = 2"):
        check_rest([prepared(7, 2)], 9, lambda: ["for step in recovery.steps(9): pass"])


def test_a_script_that_only_clips_where_accelerate_steps_is_refused() -> None:
    clips = "if accelerator.sync_gradients:\n    accelerator.clip_grad_norm_(model.parameters(), 1.0)"
    with pytest.raises(RegistrationError, match="7 batches"):
        check_rest([prepared(7, 2)], 9, lambda: [clips])


def test_allowed() -> None:
    check_rest([prepared(8, 2)], None, list)
    check_rest([prepared(7, 1)], None, list)
    check_rest([prepared(7, 2)], 3, list)
    check_rest([prepared(7, 2, synchronises=False)], None, list)
    check_rest([prepared(7, 2)], 9, lambda: ["", "if accelerator.sync_gradients: break"])
    check_rest([prepared(7, 2)], 9, lambda: ["while not accelerator.sync_gradients: train()"])
    check_rest([prepared(7, 2)], 9, lambda: ["stepped = accelerator.sync_gradients"])
    check_rest([prepared(7, 2)], 9, lambda: ["%magic; accelerator.sync_gradients"])
    check_rest([[1, 2, 3], SimpleNamespace()], None, list)
