"""May the device itself keep an optimizer's step from being applied, or has the host to wait first? Pure.

No state may change before the gradients are whole. The host can wait for them before it calls the optimizer. Or it
launches the optimizer's kernels behind a wait of the stream, with a flag that makes them do nothing: torch's fused
optimizers read ``found_inf`` on the device, as ``torch.amp.GradScaler`` uses it. Then the launches are hidden behind
the backward pass. That is right only where every kernel of the step honours the flag and nothing else runs between the
launch and the decision, so everything that is not known to be so has the host wait.
"""

from __future__ import annotations

from dataclasses import dataclass

FOUND_INF = frozenset(
    {
        "torch.optim.adam.Adam",
        "torch.optim.adamw.AdamW",
        "torch.optim.sgd.SGD",
        "torch.optim.adagrad.Adagrad",
    }
)
"""Classes whose fused kernels read ``optimizer.found_inf`` (torch/optim/adam.py and the others, ``_fused_...``)."""

OTHER_FLAGS = {
    "apex.optimizers.fused_adam.FusedAdam": "noop_flag",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam": "noop_flag",
    "transformer_engine.pytorch.optimizers.fused_sgd.FusedSGD": "overflow_buf",
}
"""Classes that have such a flag, by another name, and with which this has not been run."""


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """What one optimizer is like.

    Attributes:
        kind: its class, with the module.
        fused: all of its groups have ``fused=True``.
        differentiable: one of its groups has ``differentiable=True``.
        plain: its parameters and gradients are dense tensors of torch itself, not DTensors or sparse.
        devices: on how many devices its parameters lie.
        other_hooks: hooks of its step that are not ours: they run between the launch and the decision.
        complete: it has the state of every parameter. What is made in a step would be there after a step that did
            nothing (the momentum of a first step would be what memory happened to hold).
        compiled: its step is called by what torch.compile has made, whose kernels no probe has tried.
    """

    kind: str
    fused: bool = True
    differentiable: bool = False
    plain: bool = True
    devices: int = 1
    other_hooks: int = 0
    complete: bool = True
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What there is to do before the state of this step may change.

    Attributes:
        communicates: the ranks have to hear of each other on the host (a barrier, a comparison, rank-local states).
        touched: the script has changed tensors of the shards before the optimizer.
        known: earlier steps have shown what this job's steps are like, and the ranks have compared their state.
    """

    communicates: bool = False
    touched: bool = False
    known: bool = True


def why_host(facts: OptimizerFacts) -> str:
    """Why the host waits before the step of this optimizer; "": the device may keep it from being applied, if a probe
    shows that the flag is honoured."""
    if facts.kind in OTHER_FLAGS:
        return f"its flag ({OTHER_FLAGS[facts.kind]}) has not been tried with this"
    if facts.kind not in FOUND_INF:
        return "its kernels have no flag that makes them do nothing"
    if not facts.fused:
        return "without fused=True its kernels read no flag"
    if facts.compiled:
        return "torch.compile has made its step, and a graph that was made without the flag may not read it"
    if facts.differentiable:
        return "differentiable=True"
    if not facts.plain:
        return "its parameters or gradients are not plain dense tensors"
    if facts.devices != 1:
        return f"its parameters lie on {facts.devices} devices"
    if facts.other_hooks:
        return "other hooks run around its step"
    if not facts.complete:
        return "it has not made the state of all parameters yet"
    return ""


def step_needs_host(facts: StepFacts) -> bool:
    """Whether the host waits before the state of this step may change, whichever the optimizer is."""
    return facts.communicates or facts.touched or not facts.known
