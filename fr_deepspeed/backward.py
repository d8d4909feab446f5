"""What an interrupted backward pass leaves in DeepSpeed's optimizer wrapper (ZeRO 1 to 3)."""

from __future__ import annotations

from typing import Any

from fr_deepspeed.capabilities import COALESCED, GRADIENT_HOOKS


def reset_backward_hooks(optimizer: Any) -> None:
    """Set the backward hooks' state back. An interrupted backward pass leaves its depth behind, and the next one would
    never run its epilogue."""
    if GRADIENT_HOOKS.takes("kept"):
        state = optimizer._backward_hook_state
        state.backward_active_depth = 0
        state.remaining_grad_acc_hooks = 0
        state.reset_for_new_step()
    optimizer._is_gradient_accumulation_boundary = True
    if COALESCED.way is not None:
        optimizer._coalesce_grad_reduction = False
    optimizer.overflow = False
