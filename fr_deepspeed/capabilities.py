"""What of DeepSpeed's inside is used, and where it differs between versions. Imports nothing of DeepSpeed.

Where an interrupted step leaves something, a version that keeps it elsewhere has to be another way, or be refused: what
is not set back would be added to the next step.
"""

from __future__ import annotations

from typing import Any

from flashrecovery.capabilities import Capability, Framework, Way, capability
from flashrecovery.capabilities.probes import Assigned, Attributes, Defined, Parameters

_ENGINE = "deepspeed.runtime.engine"
_BASE = "deepspeed.runtime.base_optimizer"
_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2"
_ZERO3 = "deepspeed.runtime.zero.stage3"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_PIPE = "deepspeed.runtime.pipe.engine"

# -- all stages -----------------------------------------------------------------------------------

ENGINE = capability(
    "the engine's counters",
    "a step that was cut short is not counted, a replacement counts as its peers",
    Attributes(
        _ENGINE,
        "DeepSpeedEngine",
        (
            *("global_steps", "global_samples", "micro_steps", "skipped_steps", "_step_applied", "losses"),
            *("_is_gradient_accumulation_boundary", "inside_no_sync_ctxt", "_config", "basic_optimizer"),
            *("moe_layers", "gate_modules", "has_moe_layers", "data_parallel_group", "_global_grad_norm"),
        ),
    ),
    Assigned("deepspeed.runtime.lr_schedules", ("_last_lr",)),
)
_ENGINE_FLAGS = Attributes(_ENGINE, "DeepSpeedEngine", ("_running_engine_backward", "_manual_backward_expected"))
BACKWARD = Capability(
    "the engine's backward pass",
    "an interrupted one is forgotten",
    (
        Way("counted", (_ENGINE_FLAGS, Attributes(_ENGINE, "DeepSpeedEngine", ("_running_engine_backward_count",)))),
        Way("noted", (_ENGINE_FLAGS,)),
        # To 0.17: engine.backward() calls the optimizer's and remembers nothing.
        Way("called", (Parameters(_ENGINE, "DeepSpeedEngine._do_optimizer_backward", ("loss", "retain_graph")),)),
    ),
)
UNMANAGED = capability(
    "backward passes that the script counts",
    "an interrupted step's are forgotten",
    Attributes(_ENGINE, "DeepSpeedEngine", ("_unmanaged_backward_count", "managed_gradient_accumulation")),
    otherwise="this DeepSpeed counts them itself",
)
ENGINE_STEP = capability(
    "the engine's mark of a step under way",
    "an interrupted step is forgotten",
    Attributes(_ENGINE, "DeepSpeedEngine", ("_running_engine_step",)),
    otherwise="this DeepSpeed sets none",
)
CHECKPOINTS = capability(
    "the engine's checkpoints",
    "what it would write is taken, without waiting for other ranks",
    Parameters(_ENGINE, "DeepSpeedEngine.save_checkpoint", ("save_dir", "tag", "client_state", "save_latest")),
    Parameters(_ENGINE, "DeepSpeedEngine.load_checkpoint", ("load_dir", "tag")),
    Defined(
        _ENGINE,
        (
            *("DeepSpeedEngine._optimizer_has_ckpt_event_prologue", "dist"),
            "DeepSpeedEngine._optimizer_has_ckpt_event_epilogue",
        ),
    ),
    Attributes(_ENGINE, "DeepSpeedEngine", ("checkpoint_engine",)),
)
SHARED_MEMORY = capability(
    "the shared-memory op",
    "it is left out: its segments are named by the first launch, and no survivor would make them again",
    Defined("deepspeed.comm.torch", ("build_shm_op",)),
    otherwise="this DeepSpeed has no such op",
)
RESIZE = capability(
    "the engine's numbers of ranks",
    "an elastic job goes on with fewer",
    Attributes(
        _ENGINE,
        "DeepSpeedEngine",
        (
            *("world_size", "global_rank", "dp_world_size", "seq_dp_world_size", "save_non_zero_checkpoint"),
            *("save_zero_checkpoint", "_configure_checkpointing", "gradient_average", "training_dataloader", "monitor"),
        ),
    ),
    Attributes("deepspeed.runtime.config", "DeepSpeedConfig", ("world_size", "global_rank", "train_batch_size")),
    Defined("deepspeed.utils.groups", ("_get_data_parallel_world_size", "_get_sequence_data_parallel_world_size")),
    Defined("deepspeed.monitor.monitor", ("MonitorMaster",)),
    otherwise="an elastic job is refused",
)
REFORM = capability(
    "the optimizer wrapper's making (ZeRO-1 and 2)",
    "it is re-created for fewer ranks, by the engine itself",
    Defined(_ENGINE, ("DeepSpeedEngine._configure_zero_optimizer", "DeepSpeedEngine._backward_post_hook")),
    Attributes(_ENGINE, "DeepSpeedEngine", ("_support_torch_style_backward",)),
    Defined(_ENGINE, ("DeepSpeedZeroOptimizer",)),
    Defined(_ZERO12, ("dist",)),
    Attributes(
        _ZERO12,
        "DeepSpeedZeroOptimizer",
        (
            *("destroy", "partition_count", "round_robin_bit16_offsets", "round_robin_bit16_meta", "loss_scaler"),
            *("dynamic_loss_scale", "custom_loss_scaler", "external_loss_scale", "param_names"),
        ),
    ),
    Defined(_BASE, ("BackwardHookStateManager.register_grad_acc_post_hook",)),
    otherwise="an elastic job is refused",
)
PIPELINE = capability(
    "the pipeline's schedule",
    "what an interrupted schedule leaves is dropped",
    Defined("deepspeed.runtime.pipe.p2p", ("_async",)),
    Attributes(
        _PIPE,
        "PipelineEngine",
        (
            *("_force_grad_boundary", "num_pipe_buffers", "pipe_buffers", "reset_activation_shape", "fwd_outputs"),
            *("first_gradient_send", "total_loss", "total_additional_losses", "eval_return_logits", "outputs"),
            *("agg_train_loss", "data_iterator", "set_dataiterator"),
        ),
    ),
)

# -- ZeRO 1 to 3 ----------------------------------------------------------------------------------

GRADIENT_HOOKS = Capability(
    "the gradient hooks' state (ZeRO-1 to 3)",
    "an interrupted backward pass leaves its depth, and the next one would never end",
    (
        Way(
            "kept",
            (
                Attributes(
                    _BASE,
                    "BackwardHookStateManager",
                    ("backward_active_depth", "remaining_grad_acc_hooks", "reset_for_new_step"),
                ),
                Assigned(_BASE, ("_backward_hook_state",)),
            ),
        ),
        # To 0.17: the optimizer's own backward() goes on when autograd's has ended.
        Way("called", (Parameters(_ZERO3, "DeepSpeedZeroOptimizer_Stage3.backward", ("loss", "retain_graph")),)),
    ),
)
MUON = capability(
    "Muon's momentum (ZeRO-1 to 3)",
    "it is written at one moment of a step, whose attempts may be given up before",
    Attributes(
        _ZERO12,
        "DeepSpeedZeroOptimizer",
        (*("_commit_muon_momentum", "_muon_pending_momentum", "_clear_muon_allgather_buffers", "_is_muon_group"),),
    ),
    Attributes(
        _ZERO3,
        "DeepSpeedZeroOptimizer_Stage3",
        ("_apply_muon_to_accumulated_grads", "_clear_muon_allgather_buffers"),
    ),
    otherwise="the optimizer Muon is refused",
)
COALESCED = capability(
    "coalesced reduction",
    "it is switched off after an interrupted step",
    Attributes(_ZERO12, "DeepSpeedZeroOptimizer", ("_coalesce_grad_reduction",)),
    Attributes(_ZERO3, "DeepSpeedZeroOptimizer_Stage3", ("_coalesce_grad_reduction",)),
    otherwise="this DeepSpeed reduces in every backward pass",
)
_PARTITIONS = Attributes(
    _ZERO12,
    "DeepSpeedZeroOptimizer",
    (
        *("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups", "real_dp_process_group"),
        *("params_already_reduced", "previous_reduced_grads", "extra_large_param_to_reduce", "averaged_gradients"),
        *("callback_queued", "micro_step_id", "reset_partition_gradient_structures", "_release_ipg_buffers"),
        *("_update_model_bit16_weights", "_lazy_init_hp_params_optimizer_state", "_hp_optimizer_states_linked"),
    ),
)
BUCKETS = Capability(
    "gradient buckets (ZeRO-1 and 2)",
    "what an interrupted backward pass has put into them is dropped",
    (
        Way(
            "by dtype",
            (
                _PARTITIONS,
                Attributes(_ZERO12, "DeepSpeedZeroOptimizer", ("ipg_buckets", "all_grad_tensors")),
                Attributes(_ZERO12, "IPGBucket", ("buffer", "index", "clear")),
            ),
        ),
        # To 0.16: one bucket, in attributes of the optimizer.
        Way(
            "one",
            (
                _PARTITIONS,
                Attributes(
                    _ZERO12,
                    "DeepSpeedZeroOptimizer",
                    (
                        *("ipg_buffer", "ipg_index", "elements_in_ipg_bucket", "grads_in_ipg_bucket"),
                        *("params_in_ipg_bucket", "ipg_bucket_has_moe_params"),
                    ),
                ),
            ),
        ),
    ),
)
BUCKET_EVENTS = capability(
    "events of the buckets (ZeRO-1 and 2)",
    "no rank waits for an abandoned reduction",
    Attributes(_ZERO12, "IPGBucket", ("reuse_events",)),
    otherwise="this DeepSpeed waits for the whole stream",
)
FLAT_GRADIENTS = capability(
    "flat gradient buffers (ZeRO-1 and 2)",
    "they are given back after an interrupted step",
    Defined(_ZERO12, ("DeepSpeedZeroOptimizer._release_preflattened_grad_buffers",)),
    otherwise="this DeepSpeed flattens gradients in the step",
)
OFFLOADED = capability(
    "offloaded gradients (ZeRO-1 and 2)",
    "what earlier micro-batches have left is dropped",
    Attributes(
        _ZERO12, "DeepSpeedZeroOptimizer", ("accumulated_grads_in_cpu", "norm_for_param_grads", "local_overflow")
    ),
)
OFFLOAD_EVENTS = capability(
    "events of offloaded gradients (ZeRO-1 and 2)",
    "no rank waits for an abandoned copy",
    Attributes(_ZERO12, "DeepSpeedZeroOptimizer", ("_pending_offload_events", "_offload_accumulated_param_ids")),
    otherwise="this DeepSpeed waits for the whole stream",
)
_SLICES = Attributes(
    _ZERO3,
    "DeepSpeedZeroOptimizer_Stage3",
    (
        *("fp16_groups", "fp32_partitioned_groups_flat", "dp_process_group", "params_already_reduced"),
        *("averaged_gradients", "param_reduce_events", "micro_step_id", "inf_or_nan_tracker", "parameter_offload"),
        *("norm_for_param_grads", "_reassign_or_swap_out_partitioned_parameters"),
    ),
)
BUCKETS3 = Capability(
    "gradient buckets (ZeRO-3)",
    "what an interrupted backward pass has put into them is dropped",
    (
        Way(
            "by dtype",
            (
                _SLICES,
                Attributes(_ZERO3, "DeepSpeedZeroOptimizer_Stage3", ("ipg_buckets",)),
                Attributes(_ZERO3, "IPGBucketZ3", ("params", "elements")),
            ),
        ),
        # To 0.16: one bucket.
        Way("one", (_SLICES, Attributes(_ZERO3, "DeepSpeedZeroOptimizer_Stage3", ("params_in_ipg_bucket",)))),
    ),
)
REDUCED3 = Capability(
    "whose gradients a step has reduced (ZeRO-3)",
    "a parameter without one is refused: the last step's gradient would be used again",
    (
        Way("noted", (Attributes(_ZERO3, "DeepSpeedZeroOptimizer_Stage3", ("_offload_boundary_param_ids",)),)),
        Way(
            "seen",
            (
                Parameters(
                    _ZERO3, "DeepSpeedZeroOptimizer_Stage3.partition_grads", ("params_to_release", "grad_partitions")
                ),
            ),
        ),
    ),
)
PARTITION_RANK = capability(
    "a parameter's own partition group (ZeRO-3)",
    "slices that are padding alone are told apart",
    Defined(_ZERO3, ("DeepSpeedZeroOptimizer_Stage3._get_param_partition_rank",)),
    otherwise="in this DeepSpeed it is the data-parallel group of all",
)
MANGLED = "_PartitionedParameterCoordinator__"
"""Prefix of the coordinator's name-mangled attributes."""
COORDINATOR = capability(
    "the coordinator of gathers (ZeRO-3)",
    "its trace and what it waits for are dropped",
    Attributes(
        _COORDINATOR,
        "PartitionedParameterCoordinator",
        (
            *(MANGLED + "inflight_param_registry", MANGLED + "ongoing_fetch_events", MANGLED + "trace_mode"),
            *(MANGLED + "step_id", MANGLED + "n_available_params", MANGLED + "step_id_module_fetched_for"),
            *(MANGLED + "params_to_release", "_clear_trace_structures"),
        ),
    ),
    Defined(_OFFLOAD, ("FWD_MODULE_STACK",)),
    Attributes(_OFFLOAD, "ZeROOrderedDict", ("_in_forward",)),
    Assigned(
        "deepspeed.runtime.zero.partition_parameters",
        (
            *("ds_status", "ds_secondary_tensor", "ds_active_sub_modules"),
            *("_external_params", "is_external_param"),
        ),
    ),
    Defined("deepspeed.runtime.zero.partition_parameters", ("register_external_parameter",)),
)
COORDINATOR_LEAVES = capability(
    "the coordinator's events of leaf modules (ZeRO-3)",
    "no rank waits for an abandoned gather",
    Attributes(_COORDINATOR, "PartitionedParameterCoordinator", (MANGLED + "ongoing_fetch_leaf_module_events",)),
    otherwise="this DeepSpeed keeps none",
)
COORDINATOR_BACKWARD = capability(
    "the coordinator's modules in backward (ZeRO-3)",
    "an interrupted backward pass is forgotten",
    Attributes(_COORDINATOR, "PartitionedParameterCoordinator", (MANGLED + "active_backward_submodules",)),
    otherwise="this DeepSpeed keeps none",
)

REFORM3 = capability(
    "slices and partitions (ZeRO-3)",
    "they are re-created for another number of ranks, by DeepSpeed's own methods",
    Attributes(
        _ZERO3,
        "DeepSpeedZeroOptimizer_Stage3",
        (
            *("trainable_param_groups", "fp16_groups", "fp16_partitioned_groups", "fp16_partitioned_groups_flat"),
            *("fp16_partitioned_groups_flat_numel", "fp16_partitioned_groups_flat_id", "fp32_partitioned_groups_flat"),
            *("next_swappable_fp32_partitioned_groups", "groups_padding", "sub_group_to_group_id", "partition_count"),
            *("sub_group_process_groups", "sub_group_partition_counts", "grad_position", "averaged_gradients"),
            *("gradient_accumulation_steps", "debug_fp16_grads", "sub_group_size", "param_names"),
            *("_create_fp16_partitions_with_defragmentation", "_setup_for_real_optimizer", "set_grad_positions"),
        ),
    ),
    Defined(_ZERO3, ("dist",)),
    Defined("deepspeed.runtime.zero.partition_parameters", ("dist",)),
    Assigned(
        "deepspeed.runtime.zero.partition_parameters",
        (
            *("ds_tensor", "ds_process_group", "ds_zero_partition_rank", "ds_zero_partition_world_size"),
            *("ds_secondary_tensor_group_size", "partition_numel", "rank_in_group", "num_ranks_in_param_group"),
        ),
    ),
    otherwise="an elastic job is refused",
)

ALL_STAGES = (ENGINE, BACKWARD, UNMANAGED, ENGINE_STEP, CHECKPOINTS, SHARED_MEMORY, RESIZE)
STAGE12 = (GRADIENT_HOOKS, COALESCED, MUON, BUCKETS, BUCKET_EVENTS, FLAT_GRADIENTS, OFFLOADED, OFFLOAD_EVENTS, REFORM)
STAGE3 = (
    *(GRADIENT_HOOKS, COALESCED, MUON, BUCKETS3, REDUCED3, PARTITION_RANK, COORDINATOR, COORDINATOR_LEAVES),
    *(COORDINATOR_BACKWARD, REFORM3),
)
DEEPSPEED = Framework(
    "DeepSpeed",
    "deepspeed",
    "deepspeed",
    ("0.16.9", "0.17.6", "0.19.0", "0.19.8"),
    tuple(dict.fromkeys((*ALL_STAGES, PIPELINE, *STAGE12, *STAGE3))),
)


def is_managed(engine: Any) -> bool:
    """Whether the engine decides itself which backward pass ends an accumulation, as all did to DeepSpeed 0.19.0."""
    return UNMANAGED.way is None or bool(engine.managed_gradient_accumulation())
