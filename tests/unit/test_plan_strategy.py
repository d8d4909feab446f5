"""Which way to lay a job out on the ranks that are left: all that divides, fitted costs, and the reasons."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecovery.plan.model_state import Sharding
from flashrecovery.plan.strategy.step_cost import MeasuredStep, Prices, choose, estimate, fit, memory_bytes
from flashrecovery.plan.strategy.strategy import (
    CLEARLY_FASTER,
    Excluded,
    Machines,
    ModelShape,
    NothingFitsError,
    Strategy,
    Workload,
    candidates,
    stays,
)

GIB = 2.0**30
LLAMA_70B = ModelShape.from_config(
    {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
    }
)
MIXTRAL = ModelShape.from_config(
    {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    }
)
WORK = Workload(LLAMA_70B, 8192, 2304)
H100 = 80 * GIB


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([LLAMA_70B, MIXTRAL]),
    st.integers(1, 300),
    st.sampled_from([1, 4, 8]),
    st.integers(1, 96),
    st.booleans(),
    st.sampled_from([1, 4]),
)
def test_all_candidates_divide_what_they_must(
    model: ModelShape, ranks: int, per_node: int, batch: int, uneven: bool, most_cp: int
) -> None:
    work = Workload(model, 4096, batch, uneven=uneven, most_cp=most_cp)
    found = list(candidates(work, ranks, per_node, Excluded()))
    assert len(set(found)) == len(found)
    for s in found:
        assert s.ranks <= ranks and s.tp <= per_node and s.cp <= most_cp
        assert model.heads % s.tp == model.kv_heads % s.tp == model.layers % s.pp == batch % s.micro_batch == 0
        batch_split = work.batch_split(s)
        assert sum(batch_split.count(r) for r in range(s.dp)) * s.micro_batch == batch, "the global batch is exact"
        assert min(batch_split.count(r) for r in range(s.dp)) > 0 and (uneven or batch_split.even)
        assert s.ep == 1 or (model.experts % s.ep == 0 and s.dp * s.cp % s.ep == 0)
    assert Strategy(dp=1) in found or ranks > 1, "one rank is always a candidate"


def test_replicas_leave_and_the_rest_stays() -> None:
    current = Strategy(tp=8, pp=4, dp=36)
    decision = choose(WORK, Machines(35 * 32, 8, H100), [MeasuredStep(current, 25.0)], current)
    assert decision.best.strategy == Strategy(tp=8, pp=4, dp=35) and decision.best is decision.keeping
    assert decision.lines[1] == "The global batch stays 2304 samples: replicas compute 66 or 65 micro-batches."
    assert "1 of 36 replicas leave: processes, models and what they hold stay." in decision.lines
    assert decision.best.step_s > 25.0


def test_another_strategy_has_to_be_clearly_faster() -> None:
    """All prices that could make the difference, one after the other."""
    current = Strategy(tp=8, pp=4, dp=36)
    changed, kept = 0, 0
    for factor in (1, 3, 10, 30, 100):
        prices = Prices(near_byte_s=factor / 200e9)
        decision = choose(WORK, Machines(36 * 32, 8, H100), current=current, prices=prices)
        assert decision.keeping is not None
        if decision.best.strategy.model_parallel == current.model_parallel:
            kept += 1
            assert decision.best.step_s * (1 - CLEARLY_FASTER) <= decision.fastest.step_s
            assert decision.best is decision.fastest or any("would be" in line for line in decision.lines)
        else:
            changed += 1
            assert decision.best is decision.fastest
            assert decision.best.step_s < (1 - CLEARLY_FASTER) * decision.keeping.step_s
            assert any("workers are restarted" in line for line in decision.lines)
            assert any("Keeping the model parallelism would be slower" in line for line in decision.lines)
    assert changed and kept


def test_what_does_not_fit_any_more_is_cut_in_another_way() -> None:
    current = Strategy(tp=8, pp=16, dp=2)
    decision = choose(WORK, Machines(96, 8, H100), [MeasuredStep(current, 300.0)], current)
    assert decision.keeping is None and decision.best.strategy.ranks <= 96
    assert "No strategy with the same model parallelism fits." in decision.lines


def test_it_says_why_nothing_fits() -> None:
    with pytest.raises(NothingFitsError) as caught:
        choose(WORK, Machines(4, 8, H100))
    assert "because a GPU has 80 GiB (such as dp 4, micro-batch 1, which needs" in caught.value.reasons[0]
    assert "pp does not divide 80 layers (such as pp 3)" in str(caught.value)
    assert "no way to train on 4 ranks fits" in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0.01, 1000), st.sampled_from([Strategy(8, 4, 1, 1, 36), Strategy(8, 1, 1, 1, 4), Strategy(1, 1, 1, 1, 9)])
)
def test_one_measured_step_is_given_back_and_scales_everything(step_s: float, strategy: Strategy) -> None:
    machines = Machines(strategy.ranks, 8, H100)
    prices = fit(WORK, machines, [MeasuredStep(strategy, step_s)])
    assert math.isclose(estimate(WORK, machines, strategy, prices).step_s, step_s, rel_tol=1e-3)
    assert math.isclose(
        prices.operation_s / Prices().operation_s, prices.near_byte_s / Prices().near_byte_s, rel_tol=0.01
    )


def test_measured_parts_and_other_strategies_tell_prices_apart() -> None:
    """Steps that come from known prices give these prices back."""
    true = Prices(1 / 250e12, 1 / 90e9, 1 / 12e9, 3e-4, activations=0.7)
    machines = Machines(1152, 8, H100)
    measured = []
    for strategy in (Strategy(8, 4, 1, 1, 36), Strategy(4, 8, 1, 1, 36), Strategy(8, 2, 1, 1, 72, 2)):
        e = estimate(WORK, machines, strategy, true)
        compute = e.compute_s + e.other_s
        memory = memory_bytes(WORK, strategy, true)
        measured.append(MeasuredStep(strategy, e.step_s, compute, e.data_s, e.tensor_s, memory))
    found = fit(WORK, machines, measured)
    for name in ("operation_s", "near_byte_s", "far_byte_s", "layer_s", "activations"):
        assert math.isclose(getattr(found, name), getattr(true, name), rel_tol=0.1), name
    other = Strategy(8, 8, 1, 1, 18)
    expected = estimate(WORK, machines, other, true)
    assert math.isclose(estimate(WORK, machines, other, found).step_s, expected.step_s, rel_tol=0.01)
    with pytest.raises(ValueError, match="step_s = 0 of tp 8, pp 8, dp 18"):
        fit(WORK, machines, [MeasuredStep(other, 0.0)])


def test_costs_go_the_right_way() -> None:
    machines, prices = Machines(1152, 8, H100), Prices()

    def of(work: Workload = WORK, **sizes: int) -> tuple[float, float]:
        e = estimate(work, machines, Strategy(**{"tp": 8, "pp": 4, "dp": 36, **sizes}), prices)
        return e.step_s, e.memory_bytes

    step, memory = of()
    assert of(dp=35)[0] > step and of(dp=12)[0] > 2 * step, "fewer replicas take longer"
    assert of(micro_batch=2)[1] > memory, "larger micro-batches need more memory"
    assert of(pp=8)[1] < memory and of(tp=4)[1] > memory
    recomputed = Workload(LLAMA_70B, 8192, 2304, recompute=True)
    assert of(recomputed)[0] > step and of(recomputed)[1] < memory
    replicated = Workload(LLAMA_70B, 8192, 2304, Sharding.REPLICATED)
    full = Workload(LLAMA_70B, 8192, 2304, Sharding.FULL)
    assert of(replicated)[1] > memory > of(full)[1] and of(full)[0] > step


def test_no_more_than_a_second_of_work_for_the_largest_jobs() -> None:
    """The number of candidates is bounded (no time is asserted here)."""
    decision = choose(WORK, Machines(18432, 8, H100), [MeasuredStep(Strategy(8, 16, 1, 1, 144), 6.0)])
    assert 100 < len(decision.ranked) < 20_000


def test_what_stays() -> None:
    a = Strategy(tp=8, pp=4, dp=3)
    assert stays(a, a) == "Nothing changes."
    assert stays(a, Strategy(tp=8, pp=4, dp=5)).startswith("2 of 5 replicas come: processes")
    assert "micro-batches have 2 samples in place of 1" in stays(a, Strategy(tp=8, pp=4, dp=3, micro_batch=2))
    assert stays(a, Strategy(tp=4, pp=8, dp=3)).startswith("tp from 8 to 4 and pp from 4 to 8: workers are restarted")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_heads = 3: a divisor of heads \(8\)"):
        ModelShape(1, 8, 8, 3, 8, 8, 8, 8)
    with pytest.raises(ValueError, match="layers = 0"):
        ModelShape(0, 8, 8, 8, 8, 8, 8, 8)
    with pytest.raises(ValueError, match="per_node = 0"):
        Machines(8, 0, H100)
    with pytest.raises(ValueError, match="model_type"):
        ModelShape.from_config({"model_type": "unheard-of"})
