"""Settings of a Megatron model that are refused, by their names; the configuration is Megatron's own."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core.transformer import TransformerConfig

from fr_megatron.support import _unsupported, _unsupported_model


def config(**values: Any) -> TransformerConfig:
    """As it would be after Megatron's own checks, some of which need a GPU."""
    made = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    names = {f.name for f in fields(made)}
    for name, value in values.items():
        assert name in names, f"megatron-core has no {name} any more"
        setattr(made, name, value)
    return made


def test_a_plain_model_is_protected() -> None:
    assert list(_unsupported_model(config())) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_cuda_graph", True),
        ("external_cuda_graph", True),
        ("cuda_graph_impl", "local"),
        ("cuda_graph_impl", "transformer_engine"),
        ("tp_comm_overlap", True),
        ("moe_enable_deepep", True),
        ("moe_token_dispatcher_type", "flex"),
        ("symmetric_ar_type", "two_shot"),
        ("delay_wgrad_compute", True),
        ("defer_embedding_wgrad_compute", True),
        ("cpu_offloading", True),
    ],
)
def test_what_cannot_be_brought_back_is_named(name: str, value: Any) -> None:
    (found,) = _unsupported_model(config(**{name: value}))
    assert name.removeprefix("moe_enable_").removeprefix("moe_").split("_type")[0].lower() in found.lower(), found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_paged_stash", True),
        ("moe_expert_rank_capacity_factor", 1.5),
        ("gtp_weight_remat_size", 2),
        ("expert_gtp_weight_remat_size", 2),
        ("enable_mhc_connections", True),
        ("overlap_dispatch_backward_with_experts_wgrad", True),
    ],
)
def test_what_only_later_versions_have_is_named(name: str, value: Any) -> None:
    made = config()
    setattr(made, name, value)
    (found,) = _unsupported_model(made)
    assert name in found


def test_what_later_versions_have_is_looked_for_under_its_name() -> None:
    """A version that has the feature has the field: else it would be used without a word."""
    names = {f.name for f in fields(TransformerConfig)}
    if "moe_router_quantile_balancing_ema" in names:  # from 0.19 on
        assert {"moe_paged_stash", "gtp_weight_remat_size", "overlap_dispatch_backward_with_experts_wgrad"} <= names


def test_an_optimizer_step_that_is_captured_is_refused() -> None:
    from megatron.core.optimizer import ChainedOptimizer

    class OptimizerCudaGraphWrapper:
        def __call__(self) -> None: ...

    optimizer = ChainedOptimizer([])
    optimizer.step = OptimizerCudaGraphWrapper()
    (found,) = _unsupported([], optimizer)
    assert "OptimizerCudaGraphWrapper" in found


def test_an_fp8_recipe_with_a_history_is_refused_and_others_are_not() -> None:
    (found,) = _unsupported_model(config(fp8="e4m3", fp8_recipe="delayed"))
    assert "fp8_recipe='delayed'" in found
    assert list(_unsupported_model(config(fp8="e4m3", fp8_recipe="tensorwise"))) == []
