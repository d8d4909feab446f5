"""What a strategy costs: seconds of a step and bytes on a GPU, fitted to the steps that the job has taken. Pure.

The time of a step is a sum of few terms, each an amount of work times a price: operations, bytes between GPUs of a
node, bytes between nodes, and something that a micro-batch costs in each layer however small it is. The amounts follow
from the strategy; the prices are fitted to measured steps, so that the model gives these back. One measured step scales
all prices alike; measured parts (compute, communication) or steps of several strategies tell them apart, as far as they
can.

Amounts are those of Megatron's layouts: 6 operations a parameter and token, and 12 a layer, hidden unit and pair of
tokens for causal attention's half; with tensor parallelism four all-reduces a layer (as many bytes with sequence
parallelism, as all-gather and reduce-scatter); a pipeline of p stages and m micro-batches takes m + p - 1 slots (1F1B,
Narayanan et al. 2021); activations of a layer take 34 bytes a token and hidden unit without those of attention itself
(Korthikanti et al. 2022, section 4), and are kept for as many micro-batches as there are stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

from flashrecovery.plan.model_state import OPTIMIZER_BYTES, WEIGHT_BYTES, Sharding
from flashrecovery.plan.strategy.strategy import (
    Estimate,
    Excluded,
    Machines,
    Strategy,
    StrategyChoice,
    Workload,
    candidates,
    decide,
)

GRADIENT_BYTES = 4
"""A parameter: gradients are added up in fp32."""
_ACTIVATION_BYTES = 34.0
_RECOMPUTED_BYTES = 2.0
_LOGIT_BYTES = 8.0
_RESERVED_BYTES = 2.0 * 2**30
"""The device's context, NCCL's buffers, fragmentation."""
_TRUST = 1e-6
"""How little the prices assumed beforehand weigh against measured ones."""


@dataclass(frozen=True)
class Prices:
    """Seconds for an operation, for a byte within a node, for a byte between nodes, for a micro-batch in a layer; and a
    factor on the bytes of activations."""

    operation_s: float = 1 / 400e12
    near_byte_s: float = 1 / 200e9
    far_byte_s: float = 1 / 40e9
    layer_s: float = 1e-4
    activations: float = 1.0


@dataclass(frozen=True)
class MeasuredStep:
    """Steps of the job as they were measured. 0: not measured.

    Attributes:
        step_s: a whole step.
        compute_s: of it, what computing takes, all micro-batches together, without the bubble.
        data_s: gradients and weights between replicas, as far as training waits for it.
        tensor_s: tensor, context and expert parallel traffic.
        memory_bytes: the most on a GPU.
    """

    strategy: Strategy
    step_s: float
    compute_s: float = 0.0
    data_s: float = 0.0
    tensor_s: float = 0.0
    memory_bytes: float = 0.0


@dataclass(frozen=True)
class _Amounts:
    """The amounts of a step: operations, bytes near and far, micro-batches times layers; by what they are for."""

    compute: tuple[float, float, float, float]
    bubble: tuple[float, float, float, float]
    tensor: tuple[float, float, float, float]
    data: tuple[float, float, float, float]

    @property
    def step(self) -> tuple[float, float, float, float]:
        a, b, c, d = (sum(column) for column in zip(self.compute, self.bubble, self.tensor, self.data, strict=True))
        return a, b, c, d


def _amounts(work: Workload, machines: Machines, strategy: Strategy) -> _Amounts:
    model, s = work.model, strategy
    slots = work.batch_split(s).accumulation
    tokens = s.micro_batch * work.sequence
    per_token = 6 * model.active_parameters + 6 * model.layers * model.hidden * work.sequence
    operations = per_token * tokens / (s.tp * s.pp * s.cp) * (4 / 3 if work.recompute else 1)
    layers, wide = model.layers / s.pp, tokens / s.cp * model.hidden * 2
    near_tensor = s.tp <= machines.per_node
    tensor = 4 * layers * 2 * (s.tp - 1) / s.tp * wide
    keys = 6 * layers * (s.cp - 1) / s.cp * tokens * 2 * model.hidden * model.kv_heads / model.heads / s.tp
    routed = 4 * layers * (s.ep - 1) / s.ep * wide * model.chosen / s.tp
    stages = 2 * wide / s.tp if s.pp > 1 else 0.0
    near_context, near_experts = s.tp * s.cp <= machines.per_node, s.tp * s.ep <= machines.per_node
    near = (tensor if near_tensor else 0.0) + (keys if near_context else 0.0) + (routed if near_experts else 0.0)
    far = tensor + keys + routed - near + stages
    replicas = s.dp * s.cp
    held = _held(work, s)
    between = (replicas - 1) / replicas * held * (GRADIENT_BYTES + WEIGHT_BYTES)
    if work.sharding is Sharding.FULL:  # weights are gathered in the forward and the backward of each micro-batch
        between += (replicas - 1) / replicas * held * WEIGHT_BYTES * (2 * slots - 1)
    near_data = s.ranks <= machines.per_node
    bubble = s.pp - 1
    return _Amounts(
        compute=(operations * slots, 0.0, 0.0, slots * layers),
        bubble=(operations * bubble, near * bubble, far * bubble, bubble * layers),
        tensor=(0.0, near * slots, far * slots, 0.0),
        data=(0.0, between if near_data else 0.0, 0.0 if near_data else between, 0.0),
    )


def _held(work: Workload, s: Strategy) -> float:
    """Parameters that the fullest GPU computes with: those of the first or last stage, with an embedding."""
    model = work.model
    outside = work.padded_vocab(s.tp) * model.hidden
    dense = max(0, model.parameters - model.expert_parameters - 2 * model.vocab * model.hidden)
    return (dense / s.pp + outside * (2 if s.pp == 1 else 1)) / s.tp + model.expert_parameters / (s.pp * s.tp * s.ep)


def memory_bytes(work: Workload, strategy: Strategy, prices: Prices) -> float:
    """What the fullest GPU needs."""
    model, s = work.model, strategy
    held, replicas = _held(work, s), s.dp * s.cp
    state = held * (WEIGHT_BYTES + GRADIENT_BYTES)
    state += held * OPTIMIZER_BYTES / (1 if work.sharding is Sharding.REPLICATED else replicas)
    if work.sharding is Sharding.FULL:
        layer = held / (model.layers / s.pp)  # gathered while it is computed with, and the next one
        state = held * (WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES) / replicas + 2 * layer * WEIGHT_BYTES
    tokens = s.micro_batch * work.sequence / s.cp
    layer_bytes = tokens * model.hidden * _ACTIVATION_BYTES / s.tp
    kept = tokens * model.hidden * _RECOMPUTED_BYTES if work.recompute else layer_bytes
    under_way = min(s.pp, work.batch_split(s).accumulation)
    activations = kept * model.layers / s.pp * under_way + (layer_bytes if work.recompute else 0.0)
    logits = tokens * work.padded_vocab(s.tp) / s.tp * _LOGIT_BYTES
    return state + prices.activations * (activations + logits) + _RESERVED_BYTES


def estimate(work: Workload, machines: Machines, strategy: Strategy, prices: Prices) -> Estimate:
    """Seconds and bytes of one strategy."""
    amounts = _amounts(work, machines, strategy)
    price = (prices.operation_s, prices.near_byte_s, prices.far_byte_s, prices.layer_s)
    compute, bubble, tensor, data = (
        sum(amount * each for amount, each in zip(column, price, strict=True))
        for column in (amounts.compute, amounts.bubble, amounts.tensor, amounts.data)
    )
    layers = prices.layer_s * amounts.compute[3]
    return Estimate(
        strategy=strategy,
        step_s=compute + bubble + tensor + data,
        compute_s=compute - layers,
        bubble_s=bubble,
        tensor_s=tensor,
        data_s=data,
        other_s=layers,
        memory_bytes=memory_bytes(work, strategy, prices),
    )


def get_ready() -> None:
    """Import what :func:`fit` computes with, so that no job does that while it recovers."""
    import numpy as np  # noqa: F401


def fit(work: Workload, machines: Machines, measured: Sequence[MeasuredStep], assumed: Prices | None = None) -> Prices:
    """Prices that give back what was measured, as near as can be to the ``assumed`` ones.

    Raises ValueError for a measured time that is not above 0.
    """
    import numpy as np

    assumed = assumed or Prices()
    before = np.array([assumed.operation_s, assumed.near_byte_s, assumed.far_byte_s, assumed.layer_s])
    rows: list[npt.NDArray[np.float64]] = []
    for one in measured:
        if not one.step_s > 0:
            raise ValueError(f"step_s = {one.step_s:g} of {one.strategy}: more than 0 is allowed")
        amounts = _amounts(work, machines, one.strategy)
        parts = [(amounts.step, one.step_s), (amounts.compute, one.compute_s)]
        parts += [(amounts.tensor, one.tensor_s), (amounts.data, one.data_s)]
        # Each row is one measurement divided by itself, so that all count alike; unknowns are factors on the prices.
        rows += [np.array(amount) * before / seconds for amount, seconds in parts if seconds > 0 and any(amount)]
    factors = _nonnegative(np.array(rows).reshape(-1, len(before)))
    operation, near, far, layer = (float(price) for price in before * factors)
    return Prices(operation, near, far, layer, _activations(work, measured, assumed))


def _nonnegative(
    rows: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Factors x >= 0 with ``rows @ x`` near 1, and x near one common factor, one coordinate after the other."""
    import numpy as np

    count = rows.shape[1]
    if not len(rows):
        return np.ones(count)
    scale = 1 / float(np.mean(rows.sum(axis=1)))  # all alike, as one measured step would have it
    square = rows.T @ rows + _TRUST * np.eye(count)
    target = rows.sum(axis=0) + _TRUST * scale
    x = np.full(count, scale)
    for _ in range(2000):
        before = x.copy()
        for i in range(count):
            x[i] = max(0.0, x[i] + (target[i] - square[i] @ x) / square[i, i])
        if np.abs(x - before).max() <= 1e-12 * max(1.0, float(x.max())):
            break
    return x


def _activations(work: Workload, measured: Sequence[MeasuredStep], assumed: Prices) -> float:
    """The factor with which no measured GPU has more than the model says."""
    factors = []
    for one in measured:
        if one.memory_bytes > 0:
            fixed = memory_bytes(work, one.strategy, replace(assumed, activations=0.0))
            variable = memory_bytes(work, one.strategy, replace(assumed, activations=1.0)) - fixed
            factors.append(max(0.0, (one.memory_bytes - fixed) / variable))
    return max(factors, default=assumed.activations)


def choose(
    work: Workload,
    machines: Machines,
    measured: Sequence[MeasuredStep] = (),
    current: Strategy | None = None,
    prices: Prices | None = None,
) -> StrategyChoice:
    """The strategy to go on with on these machines. ``measured``: of this job, to which the model is fitted; without
    any, ``prices``. ``current``: what it has; what can be kept of it is kept.

    Raises:
        NothingFitsError: with the reasons.
    """
    fitted = fit(work, machines, measured, prices) if measured else prices or Prices()
    excluded = Excluded()
    found = candidates(work, machines.ranks, machines.per_node, excluded)
    estimates = [estimate(work, machines, strategy, fitted) for strategy in found]
    return decide(work, machines, estimates, excluded, current)
