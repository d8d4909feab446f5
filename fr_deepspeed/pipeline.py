"""PipelineEngine: what a schedule leaves half-finished.

Each stage holds its own layers; a shard is replicated over the stage's data-parallel group only. No synchronisation
of a step spans the stages, so the core adds a barrier before the optimizer.
"""

from __future__ import annotations

from typing import Any


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


def loss_of(engine: Any) -> float | None:
    """What the newest ``train_batch`` has returned on every rank, float32; None before the first."""
    return None if engine.agg_train_loss is None else float(engine.agg_train_loss)
