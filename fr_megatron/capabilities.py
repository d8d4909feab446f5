"""What of megatron-core's inside is used, and where it differs between versions. Imports nothing of megatron.

The functions of Megatron-LM's training loop are in :mod:`fr_megatron.lm.hooks`.
"""

from __future__ import annotations

from flashrecovery.capabilities import Capability, Framework, Way, capability
from flashrecovery.capabilities.probes import Assigned, Attributes, Defined, Parameters

_DDP = "megatron.core.distributed.distributed_data_parallel"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp."
_OPTIMIZER = "megatron.core.optimizer."
_RANDOM = "megatron.core.tensor_parallel.random"
_CHECKPOINTS = "megatron.core.dist_checkpointing."
_EXPERTS = "megatron.core.transformer.moe."

WRAPPER = capability(
    "the wrapper's groups and buffers",
    "which rank holds which parameter, and where its gradients are",
    Attributes(
        _DDP,
        "DistributedDataParallel",
        (
            *("dp_cp_group", "expt_dp_group", "intra_dp_cp_group", "intra_expt_dp_group", "inter_dist_opt_group"),
            *("params_with_grad", "buffers", "expert_parallel_buffers", "bucket_groups"),
            *("expert_parallel_bucket_groups", "remove_forward_pre_hook_handles", "disable_forward_pre_hook"),
        ),
    ),
)
_GROUP = "_ParamAndGradBucketGroup"
_HANDLES = Attributes(
    _BUFFER,
    _GROUP,
    (
        *("grad_reduce_handle", "param_gather_handle", "param_gather_dispatched", "is_last_microbatch"),
        *("start_grad_sync", "reset"),
    ),
)
BUCKETS = Capability(
    "groups of buckets",
    "an interrupted reduction or all-gather is forgotten",
    (
        Way(
            "counting",
            (
                _HANDLES,
                Attributes(
                    _BUFFER,
                    _GROUP,
                    ("per_param_grad_ready_counts", "golden_per_param_grad_ready_counts", "is_first_batch"),
                ),
            ),
        ),
        # To 0.15: which gradients are ready, instead of how often each gets ready.
        Way("listing", (_HANDLES, Attributes(_BUFFER, _GROUP, ("params_with_grad",)))),
    ),
)
OPTIMIZERS = capability(
    "the optimizers' parameters",
    "what is stepped on for each parameter of the model",
    Attributes(
        _OPTIMIZER + "distrib_optimizer",
        "DistributedOptimizer",
        (
            *("model_fp32_groups", "shard_fp32_groups", "model_float16_groups", "shard_fp32_from_float16_groups"),
            *("is_stub_optimizer", "per_model_bucket_groups", "_get_model_param_range_map"),
            "_copy_main_params_to_model_params",
        ),
    ),
    Attributes(
        _OPTIMIZER + "optimizer",
        "Float16OptimizerWithFloat16Params",
        ("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups"),
    ),
    Attributes(_OPTIMIZER + "optimizer", "ChainedOptimizer", ("chained_optimizers",)),
    Attributes(_OPTIMIZER + "optimizer", "MegatronOptimizer", ("reload_model_params",)),
)
STREAMS = Capability(
    "tracked random streams",
    "an interrupted forward pass was in one of them",
    (
        Way(
            "named",
            (
                Defined(_RANDOM, ("convert_cuda_rng_state",)),
                Attributes(_RANDOM, "CudaRNGStatesTracker", ("_current_state_name", "get_states", "set_states")),
            ),
        ),
        # To 0.15: a tracker knows only its states, and a stream's one is noted when it is left.
        Way("states", (Attributes(_RANDOM, "CudaRNGStatesTracker", ("states_", "get_states", "set_states")),)),
    ),
)
CALCULATOR = capability(
    "the number of micro-batches",
    "a ramp-up of the batch size goes back with the step",
    Defined("megatron.core.num_microbatches_calculator", ("_GLOBAL_NUM_MICROBATCHES_CALCULATOR",)),
)
TIMERS = capability(
    "timers",
    "one that was running would refuse to be started again",
    Attributes("megatron.core.timers", "Timers", ("_timers",)),
    Attributes("megatron.core.timers", "Timer", ("_started",)),
)
FOLLOWED = capability(
    "what is noted of the data-parallel size",
    "an elastic job goes on with fewer",
    Defined("megatron.core.parallel_state", ("_DATA_PARALLEL_GLOBAL_RANKS", "get_expert_tensor_parallel_world_size")),
    Attributes(_BUFFER, "_ParamAndGradBuffer", ("data_parallel_world_size", "gradient_scaling_factor", "buckets")),
    Attributes(_BUFFER, "_ParamAndGradBucket", ("gradient_scaling_factor",)),
    Attributes(
        "megatron.core.num_microbatches_calculator",
        "ConstantNumMicroBatchesCalculator",
        ("num_micro_batches", "current_global_batch_size", "current_running_global_batch_size", "micro_batch_size"),
    ),
    Attributes(_RANDOM, "CudaRNGStatesTracker", ("reset", "add", "get_states")),
    otherwise="an elastic job is refused",
)


def _made(*parameters: str) -> Parameters:
    """The buffer's ``__init__`` with these in the place of the parameters of the model."""
    return Parameters(
        _BUFFER,
        "_ParamAndGradBuffer.__init__",
        (
            *("ddp_config", "param_dtype", "grad_dtype", parameters[0], "data_parallel_group", "bucket_size"),
            *("param_to_name", "gradient_scaling_factor", "param_indices", "nccl_ub", "pg_collection"),
            *parameters[1:],
        ),
    )


_REFORMED = (
    Attributes(
        _BUFFER,
        "_ParamAndGradBuffer",
        ("param_index_map", "param_data", "tp_group", "dp_cp_group", "nccl_ub", "param_indices", "params"),
    ),
    Attributes(_BUFFER, "_ParamAndGradBucket", ("offset", "numel_unpadded")),
    Parameters(_BUFFER, "partition_buckets", ("buffers", "force_single_bucket_group")),
    Parameters(
        _OPTIMIZER + "distrib_optimizer",
        "DistributedOptimizer.__init__",
        (
            *("optimizer", "config", "grad_scaler", "init_state_fn", "model_chunks", "per_model_buffers"),
            *("data_parallel_group", "data_parallel_group_gloo", "data_parallel_group_idx"),
            "distributed_optimizer_instance_id",
        ),
    ),
    Attributes(
        _OPTIMIZER + "distrib_optimizer",
        "DistributedOptimizer",
        (
            *("model_param_gbuf_map", "per_model_buffers", "data_parallel_group", "data_parallel_group_gloo"),
            *("data_parallel_group_idx", "distributed_optimizer_instance_id", "model_chunks"),
        ),
    ),
)
REFORM = Capability(
    "the making of buffers and distributed optimizer",
    "they are re-created for another number of ranks, by their own __init__",
    (
        # From 0.18 on the optimizer says where parameters lie, before there are buffers.
        Way(
            "laid out",
            (
                _made("params_with_names", "param_layout"),
                Parameters(
                    _OPTIMIZER + "distrib_optimizer",
                    "DistributedOptimizer._compute_per_buffer_param_layout",
                    ("params", "bucket_size", "data_parallel_world_size", "ddp_config", "param_indices"),
                ),
                Attributes(_DDP, "DistributedDataParallel", ("full_param_layout",)),
                *_REFORMED,
            ),
        ),
        Way("named", (_made("params_with_names"), *_REFORMED)),  # 0.17
        Way("there", (_made("params"), *_REFORMED)),  # to 0.16
    ),
    otherwise="an elastic job with the distributed optimizer is refused",
)
METRICS = Capability(
    "losses of experts for the log",
    "a replacement reduces them with the others",
    (
        Way(
            "entries",
            (
                Defined(_EXPERTS + "moe_utils", ("get_moe_metrics_tracker",)),
                Defined(_EXPERTS + "moe_logging", ("MetricEntry",)),
                Attributes(_EXPERTS + "moe_logging", "MoEMetricsTracker", ("_metrics",)),
            ),
        ),
        Way("dictionary", (Defined(_EXPERTS + "moe_utils", ("get_moe_layer_wise_logging_tracker",)),)),
    ),
)
CHECKPOINTS = capability(
    "boxes of a checkpoint",
    "the fallback checkpoint in Megatron's own format",
    Defined(_CHECKPOINTS + "strategies.checkpointable", ("LocalShardsContainer", "CheckpointableShardedTensor")),
    Defined(_CHECKPOINTS + "strategies.torch", ("MCoreSavePlanner", "MCoreLoadPlanner")),
    otherwise="the fallback checkpoint is the core's own, which the same layout reads",
)
MEGATRON_FSDP = capability(
    "Megatron-FSDP's pipelines",
    "what is under way is forgotten (needed with --use-megatron-fsdp only)",
    Attributes(
        _FSDP + "megatron_fsdp",
        "MegatronFSDP",
        (
            *("_replace_param_with_distributed_if_needed", "raw_param", "_params_require_handle_grad"),
            *("_root_pre_backward_hook_issued", "microbatch_count", "synchronize_param_gather", "zero_grad_buffer"),
            *("all_gather_pipeline", "grad_reduce_pipeline"),
        ),
    ),
    Assigned(_FSDP + "megatron_fsdp", ("_training_state",)),
    Attributes(
        _FSDP + "param_and_grad_buffer",
        "AllGatherPipeline",
        ("param_gather_event_map", "bucket_status", "bucket_can_be_released"),
    ),
    Parameters(_FSDP + "param_and_grad_buffer", "AllGatherPipeline.wait_bucket_ready", ("bucket_id", "bwd")),
    Attributes(
        _FSDP + "param_and_grad_buffer",
        "GradReducePipeline",
        ("grad_reduce_queue", "bucket_grad_ready_params", "bucket_status", "get_fsdp_buffer"),
    ),
    otherwise="such a model is refused",
)
ARGUMENTS = capability(
    "Megatron-LM's arguments",
    "whether the script has parsed its flags before it calls pretrain()",
    Defined("megatron.training.global_vars", ("_GLOBAL_ARGS",)),
    otherwise="no Megatron-LM is there, only megatron-core",
)
PACKED = capability(
    "Megatron-LM's counts of packed samples",
    "they start again with a step that is made again",
    Defined("megatron.training.training", ("_seqlen_stats_in_iteration", "_seqlen_stats_active")),
    otherwise="this Megatron-LM, if there is one, counts none",
)
EVERY_MODEL = (WRAPPER, BUCKETS, OPTIMIZERS, STREAMS, CALCULATOR, TIMERS, METRICS, CHECKPOINTS)
MEGATRON = Framework(
    "megatron-core",
    "megatron-core",
    "megatron.core",
    ("0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.19.2", "0.20.0"),
    (*EVERY_MODEL, FOLLOWED, REFORM, MEGATRON_FSDP, ARGUMENTS, PACKED),
)
