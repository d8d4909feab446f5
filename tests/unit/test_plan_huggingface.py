"""Parameters of a model from its config.json: as many as transformers 5.23 has built from the same keys."""

from __future__ import annotations

from typing import Any

import pytest

from flashrecovery.plan.estimates.huggingface import ModelSize, model_size

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DEEPSEEK = {
    **SMALL,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
BIASED = {"head_dim": 24, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
OPT = {"vocab_size": 1000, "hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama_3(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**LLAMA_3, **sizes, "num_attention_heads": heads}


@pytest.mark.parametrize(
    ("config", "parameters", "in_experts"),
    [
        (llama_3(4096, 14336, 32, 32), 8_030_261_248, 0),
        (llama_3(8192, 28672, 80, 64), 70_553_706_496, 0),
        (llama_3(16384, 53248, 126, 128), 405_853_388_800, 0),
        ({**SMALL, "model_type": "llama", **BIASED}, 145_280, 0),
        ({**SMALL, "model_type": "mistral"}, 195_904, 0),
        ({**SMALL, "model_type": "phi3"}, 195_904, 0),
        ({**SMALL, "model_type": "qwen2"}, 196_160, 0),
        ({**SMALL, "model_type": "qwen2", "tie_word_embeddings": True}, 132_160, 0),
        ({**SMALL, "model_type": "qwen3", "head_dim": 32}, 220_608, 0),
        ({**SMALL, "model_type": "olmo2"}, 196_096, 0),
        ({**SMALL, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 32}, 148_288, 0),
        ({**SMALL, "model_type": "gemma2", "num_key_value_heads": 1, "head_dim": 32}, 148_544, 0),
        ({**SMALL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, 497_984, 344_064),
        (
            {
                **SMALL,
                **EXPERTS,
                "model_type": "qwen2_moe",
                "num_hidden_layers": 3,
                "shared_expert_intermediate_size": 80,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
            379_008,
            165_888,
        ),
        (
            {
                **SMALL,
                **EXPERTS,
                "model_type": "qwen3_moe",
                "num_hidden_layers": 5,
                "head_dim": 16,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [1],
            },
            332_000,
            55_296,
        ),
        ({**DEEPSEEK, "model_type": "deepseek_v3"}, 441_568, 221_184),
        ({**DEEPSEEK, "model_type": "deepseek_v3", "attention_bias": True}, 442_016, 221_184),
        ({**DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None, "n_shared_experts": 2}, 478_336, 221_184),
        (
            {
                "model_type": "gpt2",
                "vocab_size": 50257,
                "n_positions": 1024,
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
            },
            124_439_808,
            0,
        ),
        ({**SMALL, "model_type": "gpt_neox", "intermediate_size": 256}, 228_096, 0),
        ({**SMALL, "model_type": "gpt_neox", "intermediate_size": 256, "attention_bias": False}, 227_584, 0),
        ({"model_type": "bloom", "vocab_size": 1000, "hidden_size": 64, "n_layer": 2, "n_head": 4}, 164_224, 0),
        ({**OPT, "model_type": "opt", "max_position_embeddings": 128, "word_embed_proj_dim": 64}, 172_416, 0),
        (
            {
                **OPT,
                "model_type": "opt",
                "max_position_embeddings": 128,
                "word_embed_proj_dim": 32,
                "do_layer_norm_before": False,
            },
            144_384,
            0,
        ),
    ],
)
def test_as_many_as_transformers_builds(config: dict[str, Any], parameters: int, in_experts: int) -> None:
    found = model_size(config)
    assert (found.parameters, found.expert_parameters) == (parameters, in_experts)
    assert found.active_parameters <= found.parameters
    assert (found.active_parameters == found.parameters) == (in_experts == 0)


def test_of_the_experts_a_token_meets_those_that_are_chosen() -> None:
    found = model_size({**SMALL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})
    assert found.parameters - found.active_parameters == found.expert_parameters * 6 // 8
    assert ModelSize(10).active_parameters == 10


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type = None: allowed: bloom, deepseek_v2"),
        ({"model_type": "mamba"}, "model_type = 'mamba': allowed: .*; or give the number of parameters"),
        ({"model_type": "llama", "hidden_size": 64}, "num_hidden_layers is missing: a whole number is needed"),
        ({**SMALL, "model_type": "llama", "hidden_size": "64"}, "hidden_size = '64': a whole number, 0 or more, is"),
        ({**SMALL, "model_type": "llama", "hidden_size": True}, "hidden_size = True: a whole number"),
        ({**SMALL, "model_type": "llama", "vocab_size": 0}, "vocab_size = 0: a whole number, 1 or more, is allowed"),
        (
            {**SMALL, "model_type": "llama", "hidden_size": 66},
            r"num_attention_heads = 4: a divisor of hidden_size \(66\)",
        ),
        ({**SMALL, "model_type": "llama", "tie_word_embeddings": 1}, "tie_word_embeddings = 1: true or false"),
        (
            {**SMALL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9},
            r"num_experts_per_tok = 9: at most the number of experts \(8\)",
        ),
        (
            {**SMALL, **EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": 1},
            "mlp_only_layers = 1: a list of layers is allowed",
        ),
    ],
)
def test_what_is_not_known_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_size(config)
