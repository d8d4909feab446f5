"""A GPT of megatron-core: its flags, groups, model chunks, optimizer and scheduler. Knows nothing of recovery."""

from __future__ import annotations

import argparse
import dataclasses
import random
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

import corpus
import training


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of all GPT examples, and Megatron's for the layout."""
    p = training.parser(description)
    p.add_argument("--micro-batches", type=int, default=2, help="batches a step, one after another")
    layout = p.add_argument_group("layout", "named as in Megatron-LM")
    layout.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N")
    layout.add_argument("--sequence-parallel", action="store_true")
    layout.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="N")
    layout.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, metavar="N")
    layout.add_argument("--context-parallel-size", type=int, default=1, metavar="N")
    layout.add_argument("--expert-model-parallel-size", type=int, default=1, metavar="N")
    layout.add_argument("--num-experts", type=int, metavar="N")
    layout.add_argument("--moe-token-dispatcher-type", choices=("allgather", "alltoall"), default="allgather")
    layout.add_argument("--moe-router-enable-expert-bias", action="store_true", help="instead of an auxiliary loss")
    layout.add_argument("--multi-latent-attention", action="store_true")
    layout.add_argument("--use-distributed-optimizer", action="store_true")
    layout.add_argument("--num-distributed-optimizer-instances", type=int, default=1, metavar="N")
    layout.add_argument("--overlap-grad-reduce", action="store_true")
    layout.add_argument("--overlap-param-gather", action="store_true")
    layout.add_argument("--ddp-bucket-size", type=int, metavar="ELEMENTS")
    sharded = layout.add_mutually_exclusive_group()
    sharded.add_argument("--use-torch-fsdp2", action="store_true")
    sharded.add_argument("--use-megatron-fsdp", action="store_true")
    layout.add_argument(
        "--data-parallel-sharding-strategy",
        choices=("optim", "optim_grads", "optim_grads_params"),
        default="optim_grads_params",
        help="with --use-megatron-fsdp",
    )
    precision = layout.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true")
    precision.add_argument("--fp16", action="store_true")
    return p


def start_groups(args: argparse.Namespace) -> None:
    """All of Megatron's process groups."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
    )


def dtype(args: argparse.Namespace) -> torch.dtype:
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def model_config(args: argparse.Namespace) -> TransformerConfig:
    """The sizes and the layout that the flags say; no fused kernels, which need a GPU or Transformer Engine."""
    cuda = torch.cuda.is_available()
    more: dict[str, Any] = {}
    if args.num_experts:
        more = {
            "num_moe_experts": args.num_experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": args.moe_token_dispatcher_type,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "moe_grouped_gemm": False,
            "add_bias_linear": False,
        }
    if args.moe_router_enable_expert_bias:
        more |= {
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_load_balancing_type": "none",
            "moe_router_bias_update_rate": 0.01,
        }
    if args.multi_latent_attention:
        head = args.width // args.heads
        more |= {
            "q_lora_rank": args.width // 2,
            "kv_lora_rank": args.width // 4,
            "qk_head_dim": head,
            "qk_pos_emb_head_dim": head // 2,
            "v_head_dim": head,
            "qk_layernorm": True,
        }
    if "transformer_impl" in {field.name for field in dataclasses.fields(TransformerConfig)}:  # from 0.14 on
        more["transformer_impl"] = "local"
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    return kind(
        num_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=args.heads,
        ffn_hidden_size=4 * args.width,
        hidden_dropout=args.dropout,
        attention_dropout=args.dropout,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        params_dtype=dtype(args),
        pipeline_dtype=dtype(args),
        autocast_dtype=dtype(args),
        bf16=args.bf16,
        fp16=args.fp16,
        use_cpu_initialization=not cuda,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        attention_softmax_in_fp32=True,
        # In one batch, two pipeline ranks with virtual stages would take each other's activations for gradients.
        batch_p2p_comm=args.num_virtual_stages_per_pipeline_rank is None,
        overlap_p2p_comm=args.num_virtual_stages_per_pipeline_rank is not None,
        **more,
    )


def build_chunks(args: argparse.Namespace, config: TransformerConfig) -> list[Any]:
    """This rank's part of the model: one chunk, or one for each virtual pipeline stage."""
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()  # as Megatron-LM
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    stages = args.num_virtual_stages_per_pipeline_rank
    models = [_model(args, config, stage if stages else None) for stage in range(stages or 1)]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=_use_distributed_optimizer(args),
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        bucket_size=args.ddp_bucket_size,
        check_for_nan_in_grad=False,
        **_sharding(args),
    )
    wrapper = _wrapper(args)
    chunks = [wrapper(config, ddp, model, disable_bucketing=i > 0) for i, model in enumerate(models)]
    # torch's FSDP2 reduces in the backward pass; megatron-core 0.16 cannot finalize its chunks ("force_all_reduce").
    config.finalize_model_grads_func = None if args.use_torch_fsdp2 else finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if stages else chunks[0].no_sync
    return chunks


def _sharding(args: argparse.Namespace) -> dict[str, Any]:
    if not args.use_megatron_fsdp:
        return {}
    strategy = args.data_parallel_sharding_strategy
    return {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}


def _use_distributed_optimizer(args: argparse.Namespace) -> bool:
    return bool(args.use_distributed_optimizer or args.use_megatron_fsdp)  # Megatron-FSDP has no other


def _wrapper(args: argparse.Namespace) -> Any:
    if args.use_torch_fsdp2:
        return TorchFullyShardedDataParallel
    if args.use_megatron_fsdp:
        from megatron.core.distributed import FullyShardedDataParallel  # 0.13 has none

        return FullyShardedDataParallel
    return DistributedDataParallel


def _model(args: argparse.Namespace, config: TransformerConfig, virtual_stage: int | None) -> torch.nn.Module:
    one_stage = {"ignore_virtual": virtual_stage is None, "vp_stage": virtual_stage}
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=args.num_experts,
            moe_grouped_gemm=False,
            qk_layernorm=args.multi_latent_attention,
            multi_latent_attention=args.multi_latent_attention,
        ),
        vocab_size=-(-corpus.VOCABULARY // 128) * 128,
        max_sequence_length=args.context,
        pre_process=parallel_state.is_pipeline_first_stage(**one_stage),
        post_process=parallel_state.is_pipeline_last_stage(**one_stage),
        share_embeddings_and_output_weights=args.tie_head,
        position_embedding_type="rope",
        vp_stage=virtual_stage,
    )
    model.model_type = ModelType.encoder_or_decoder
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())
    return Float16Module(config, model) if args.bf16 or args.fp16 else model


def build_optimizer(
    args: argparse.Namespace, config: TransformerConfig, chunks: list[Any]
) -> tuple[Any, OptimizerParamScheduler]:
    """Adam with clipping, a warm-up over the first tenth of the steps, then a cosine."""
    settings = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.lr / 10,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=dtype(args),
        initial_loss_scale=2.0**16,
        loss_scale_window=3,
        hysteresis=1,
        use_distributed_optimizer=_use_distributed_optimizer(args),
        **({"overlap_param_gather": True} if args.overlap_param_gather else {}),
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.lr / 10,
        lr_warmup_steps=max(1, min(100, args.steps // 10)),
        lr_decay_steps=max(2, args.steps),
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
