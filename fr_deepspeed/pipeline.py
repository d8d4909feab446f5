"""PipelineEngine: what a schedule leaves half-finished.

Each stage holds its own layers; a shard is replicated over the stage's data-parallel group only. No synchronisation
of a step spans the stages, so the core adds a barrier before the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch


def reset_schedule(engine: Any) -> None:
    """Drop buffers and pending transfers. Neighbouring stages tell each other the shapes again, since a replacement has
    not heard of them."""
    from deepspeed.runtime.pipe import p2p

    p2p._async.clear()
    engine.num_pipe_buffers = 0
    for buffers in engine.pipe_buffers.values():
        buffers.clear()
    engine.reset_activation_shape()
    engine.first_gradient_send = True
    engine.fwd_outputs = []
    engine.total_loss = engine.total_additional_losses = None
    engine._force_grad_boundary = False
    engine.eval_return_logits = False
    engine.outputs = None


def capture_pipeline(engine: Any) -> dict[str, Any]:
    """What the stages have in common: the loss that the newest ``train_batch`` has returned on every rank (None before
    the first), and the number of forward passes, from which ``seed_layers`` makes its seeds."""
    loss = engine.agg_train_loss
    return {"loss": None if loss is None else float(loss), "micro_offset": engine.module.micro_offset}


def restore_pipeline(engine: Any, state: dict[str, Any]) -> None:
    """Set what :func:`capture_pipeline` has found."""
    loss = state["loss"]
    engine.agg_train_loss = None if loss is None else torch.tensor(loss, device=engine.device)
    engine.module.micro_offset = state["micro_offset"]
