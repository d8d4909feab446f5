"""How many parameters a model has, from its Hugging Face ``config.json``.

Counted as ``transformers`` builds the model: embeddings, attention (with grouped or latent keys and values), MLP or
experts, norms, and the output layer if it is not the embedding. An architecture that is not known here is refused: a
guess would be a wrong plan that looks like a right one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters.

    Attributes:
        parameters: of the whole model.
        expert_parameters: those of them that are in experts, and so are divided by expert parallelism.
        active_parameters: those that one token meets; they are what a step computes with.
    """

    parameters: int
    expert_parameters: int = 0
    active_parameters: int = 0

    def __post_init__(self) -> None:
        if self.active_parameters == 0:
            object.__setattr__(self, "active_parameters", self.parameters)


def model_size(config: Mapping[str, Any]) -> ModelSize:
    """The size of a decoder model.

    Raises ValueError, which names the architecture or the key, its value and what is allowed.
    """
    kind = config.get("model_type")
    if kind not in _COUNT:
        raise ValueError(
            f"model_type = {kind!r}: allowed: {', '.join(sorted(_COUNT))}; or give the number of parameters"
        )
    return _COUNT[kind](config)


def _number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of ``names`` that is there and not null."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} = {value!r}: a whole number, 0 or more, is allowed")
        return value
    if default is None:
        raise ValueError(f"{names[0]} is missing: a whole number is needed")
    return default


def _positive(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    value = _number(config, *names, default=default)
    if value == 0:
        raise ValueError(f"{next(n for n in names if config.get(n) == 0)} = 0: a whole number, 1 or more, is allowed")
    return value


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: true or false is allowed")
    return value


def _linear(into: int, out: int, bias: bool) -> int:
    return into * out + (out if bias else 0)


@dataclass(frozen=True)
class _Style:
    """What decoders of the LLaMA family differ in. ``norms``: of the hidden size, in a layer."""

    norms: int = 2
    qkv_bias: bool = False
    head_norms: bool = False
    """Norms of queries and keys, of the size of a head."""
    projection_norms: bool = False
    """The same, of the size of all heads."""
    attention_bias: bool = False
    """The key ``attention_bias`` decides of biases."""
    mlp_bias: bool = False
    """And ``mlp_bias`` of those of the MLP."""
    tied: bool = False
    """What ``tie_word_embeddings`` is where it is not said."""
    default_head: int | None = None


def _attention(config: Mapping[str, Any], style: _Style) -> int:
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    kv_heads = _positive(config, "num_key_value_heads", default=heads)
    if config.get("head_dim") is None and style.default_head is None and hidden % heads:
        raise ValueError(f"num_attention_heads = {heads}: a divisor of hidden_size ({hidden}) is allowed")
    head = _positive(config, "head_dim", default=style.default_head or hidden // heads)
    by_key = style.attention_bias and _flag(config, "attention_bias", False)
    count = _linear(hidden, (heads + 2 * kv_heads) * head, by_key or style.qkv_bias)
    count += _linear(heads * head, hidden, by_key)
    if style.head_norms:
        count += 2 * head
    if style.projection_norms:
        count += (heads + kv_heads) * head
    return count


def _gated(hidden: int, inner: int, bias: bool = False) -> int:
    """Gate, up and down."""
    return 2 * _linear(hidden, inner, bias) + _linear(inner, hidden, bias)


def _outside(config: Mapping[str, Any], tied: bool) -> int:
    """Embedding, last norm and output layer."""
    hidden, words = _positive(config, "hidden_size"), _positive(config, "vocab_size")
    return words * hidden * (1 if _flag(config, "tie_word_embeddings", tied) else 2) + hidden


def _dense(style: _Style) -> Callable[[Mapping[str, Any]], ModelSize]:
    def count(config: Mapping[str, Any]) -> ModelSize:
        hidden, layers = _positive(config, "hidden_size"), _positive(config, "num_hidden_layers")
        mlp_bias = style.mlp_bias and _flag(config, "mlp_bias", False)
        mlp = _gated(hidden, _positive(config, "intermediate_size"), mlp_bias)
        layer = _attention(config, style) + mlp + style.norms * hidden
        return ModelSize(layers * layer + _outside(config, style.tied))

    return count


def _with_experts(
    config: Mapping[str, Any], attention: int, dense_layers: int, dense_mlp: int, expert: int, shared: int, router: int
) -> ModelSize:
    """``expert``, ``shared``: of one expert, and of what every token meets beside them in such a layer."""
    hidden, layers = _positive(config, "hidden_size"), _positive(config, "num_hidden_layers")
    experts = _positive(config, "n_routed_experts", "num_experts", "num_local_experts")
    chosen = _positive(config, "num_experts_per_tok")
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok = {chosen}: at most the number of experts ({experts}) is allowed")
    sparse = layers - dense_layers
    common = layers * (attention + 2 * hidden) + dense_layers * dense_mlp + sparse * (shared + router)
    common += _outside(config, False)
    return ModelSize(
        parameters=common + sparse * experts * expert,
        expert_parameters=sparse * experts * expert,
        active_parameters=common + sparse * chosen * expert,
    )


def _mixtral(config: Mapping[str, Any]) -> ModelSize:
    hidden, inner = _positive(config, "hidden_size"), _positive(config, "intermediate_size")
    router = _positive(config, "num_local_experts") * hidden
    return _with_experts(config, _attention(config, _Style()), 0, 0, _gated(hidden, inner), 0, router)


def _dense_among_sparse(config: Mapping[str, Any], layers: int) -> int:
    """How many layers of Qwen's have no experts."""
    step, plain = _positive(config, "decoder_sparse_step", default=1), config.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise ValueError(f"mlp_only_layers = {plain!r}: a list of layers is allowed")
    return sum(1 for i in range(layers) if i in plain or (i + 1) % step)


def _qwen_moe(shared_expert: bool, style: _Style) -> Callable[[Mapping[str, Any]], ModelSize]:
    def count(config: Mapping[str, Any]) -> ModelSize:
        hidden, layers = _positive(config, "hidden_size"), _positive(config, "num_hidden_layers")
        shared = 0
        if shared_expert:  # and its gate
            shared = _gated(hidden, _positive(config, "shared_expert_intermediate_size")) + hidden
        return _with_experts(
            config,
            _attention(config, style),
            _dense_among_sparse(config, layers),
            _gated(hidden, _positive(config, "intermediate_size")),
            _gated(hidden, _positive(config, "moe_intermediate_size")),
            shared,
            _positive(config, "num_experts", "num_local_experts") * hidden,
        )

    return count


def _deepseek(config: Mapping[str, Any]) -> ModelSize:
    """V2 and V3; multi-token prediction layers, which ``transformers`` does not build, are not counted."""
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    rope, nope = _positive(config, "qk_rope_head_dim"), _positive(config, "qk_nope_head_dim")
    value, kv_rank = _positive(config, "v_head_dim"), _positive(config, "kv_lora_rank")
    q_rank = _number(config, "q_lora_rank", default=0)
    bias = _flag(config, "attention_bias", False)
    if q_rank:
        attention = _linear(hidden, q_rank, bias) + q_rank + q_rank * heads * (nope + rope)
    else:
        attention = hidden * heads * (nope + rope)
    attention += _linear(hidden, kv_rank + rope, bias) + kv_rank + kv_rank * heads * (nope + value)
    attention += _linear(heads * value, hidden, bias)
    inner = _positive(config, "moe_intermediate_size")
    return _with_experts(
        config,
        attention,
        min(_number(config, "first_k_dense_replace"), _positive(config, "num_hidden_layers")),
        _gated(hidden, _positive(config, "intermediate_size")),
        _gated(hidden, inner),
        _gated(hidden, inner * _number(config, "n_shared_experts", default=0)),
        _positive(config, "n_routed_experts") * hidden,
    )


def _plain_layer(hidden: int, inner: int, bias: bool) -> int:
    """GPT-2's kind: attention without groups, two linear layers, two norms with biases."""
    attention = _linear(hidden, 3 * hidden, bias) + _linear(hidden, hidden, bias)
    return attention + _linear(hidden, inner, bias) + _linear(inner, hidden, bias) + 4 * hidden


def _gpt2(config: Mapping[str, Any]) -> ModelSize:
    hidden, layers = _positive(config, "n_embd", "hidden_size"), _positive(config, "n_layer", "num_hidden_layers")
    words, positions = _positive(config, "vocab_size"), _positive(config, "n_positions", "max_position_embeddings")
    layer = _plain_layer(hidden, _positive(config, "n_inner", default=4 * hidden), True)
    head = 0 if _flag(config, "tie_word_embeddings", True) else words * hidden
    return ModelSize(layers * layer + (words + positions) * hidden + 2 * hidden + head)


def _gpt_neox(config: Mapping[str, Any]) -> ModelSize:
    hidden, layers = _positive(config, "hidden_size"), _positive(config, "num_hidden_layers")
    inner = _positive(config, "intermediate_size")
    layer = _plain_layer(hidden, inner, True)
    if not _flag(config, "attention_bias", True):
        layer -= 4 * hidden
    return ModelSize(layers * layer + _outside(config, False) + hidden)


def _bloom(config: Mapping[str, Any]) -> ModelSize:
    hidden, layers = _positive(config, "hidden_size", "n_embed"), _positive(config, "n_layer", "num_hidden_layers")
    words = _positive(config, "vocab_size")
    head = 0 if _flag(config, "tie_word_embeddings", True) else words * hidden
    return ModelSize(layers * _plain_layer(hidden, 4 * hidden, True) + words * hidden + 4 * hidden + head)


def _opt(config: Mapping[str, Any]) -> ModelSize:
    hidden, layers = _positive(config, "hidden_size"), _positive(config, "num_hidden_layers")
    words, positions = _positive(config, "vocab_size"), _positive(config, "max_position_embeddings")
    width = _positive(config, "word_embed_proj_dim", default=hidden)
    bias = _flag(config, "enable_bias", True)
    affine = _flag(config, "layer_norm_elementwise_affine", True)
    layer = _plain_layer(hidden, _positive(config, "ffn_dim"), bias) - (0 if affine else 4 * hidden)
    count = layers * layer + words * width + (positions + 2) * hidden
    if width != hidden:
        count += 2 * width * hidden
    if _flag(config, "do_layer_norm_before", True) and not _flag(config, "_remove_final_layer_norm", False) and affine:
        count += 2 * hidden
    return ModelSize(count + (0 if _flag(config, "tie_word_embeddings", True) else words * width))


_COUNT: dict[Any, Callable[[Mapping[str, Any]], ModelSize]] = {
    "llama": _dense(_Style(attention_bias=True, mlp_bias=True)),
    "mistral": _dense(_Style()),
    "qwen2": _dense(_Style(qkv_bias=True)),
    "qwen3": _dense(_Style(head_norms=True, attention_bias=True, default_head=128)),
    "gemma": _dense(_Style(attention_bias=True, tied=True, default_head=256)),
    "gemma2": _dense(_Style(norms=4, attention_bias=True, tied=True, default_head=256)),
    "phi3": _dense(_Style()),
    "olmo2": _dense(_Style(projection_norms=True, attention_bias=True)),
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe(True, _Style(qkv_bias=True)),
    "qwen3_moe": _qwen_moe(False, _Style(head_norms=True, attention_bias=True)),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
    "opt": _opt,
}
