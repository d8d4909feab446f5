"""What of torch's inside is used, and where it differs between versions. Imports torch only to probe C++."""

from __future__ import annotations

from flashrecovery.capabilities import Capability, Framework, Way, capability
from flashrecovery.capabilities.probes import Assigned, Attributes, Defined, Live, Parameters

_C10D = "torch.distributed.distributed_c10d"
_CPP = "torch._C._distributed_c10d"
_DDP = "torch.nn.parallel.distributed"
_FSDP = "torch.distributed.fsdp._fully_shard."
_FSDP_STATE = _FSDP + "_fsdp_state"
_FSDP_GROUP = _FSDP + "_fsdp_param_group"

GROUP_CREATION = capability(
    "group creation",
    "every process group gets an inside that can be exchanged",
    Parameters(
        _C10D,
        "_new_process_group_helper",
        (
            *("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"),
            *("backend_options", "timeout", "pg_tag", "device_id", "group_desc"),
        ),
    ),
    Parameters(_C10D, "destroy_process_group", ("group",)),
    Parameters(_C10D, "Backend.register_backend", ("name", "func", "extended_api", "devices")),
    Defined(_C10D, ("BackendConfig", "Backend.backend_capability", "_get_default_store", "_resolve_process_group")),
    Attributes(_C10D, "_World", ("pg_map", "pg_backend_config", "pg_names", "pg_group_ranks", "pg_coalesce_state")),
    Defined(_C10D, ("_world",)),
)
TORCHCOMMS = capability(
    "torchcomms switch",
    "its backends are refused",
    Defined(_C10D, ("_use_torchcomms_enabled",)),
    otherwise="this torch cannot be told to use torchcomms in place of its own backends",
)
STORES = capability(
    "stores",
    "stores that survive their server, and one that wraps another",
    Live(_CPP, ("Store", "HashStore", "PrefixStore", "TCPStore", "get_debug_level", "DebugLevel.DETAIL")),
)
BARE_STORE = capability(
    "a store alone",
    "the process that hosts a store loads torch's C++ alone (flashrecovery/agent/stores/bare_torch.py)",
    Live("torch._C", ("_c10d_init",)),
    otherwise="each node's store imports all of torch",
)
GLOO = capability(
    "gloo over other devices",
    "gloo's connections can be cut and made again",
    Live(
        _CPP,
        (
            *("ProcessGroupGloo._Options", "ProcessGroupGloo.create_device", "ProcessGroupGloo.create_default_device"),
            *("ProcessGroupGloo._Options._devices", "ProcessGroupGloo._Options._threads"),
            "ProcessGroupGloo._Options._timeout",
        ),
    ),
)
SEQUENCE_NUMBERS = capability(
    "sequence numbers",
    "the ranks of a new inner backend agree on the number of its first operation",
    Live(_CPP, ("ProcessGroup._set_sequence_number_for_group", "Backend._set_sequence_number_for_group")),
    otherwise="they begin with 0 on every rank (torch 2.15)",
)
NCCL_BY_NAME = capability(
    "what nccl means",
    "a group gets the NCCL backend that torch would make for the name",
    Defined(_C10D, ("_create_nccl2_process_group", "Backend._ensure_backend_registered", "Backend._plugins")),
    otherwise="ProcessGroupNCCL, or ProcessGroupNCCL2 if TORCH_DIST_USE_NCCL2=1 asks for it (torch 2.14)",
)
FLIGHT_RECORDER_HOOK = capability(
    "flight recorder hook",
    "torch records no operation of a managed group that its inner backend records by itself",
    Defined(_C10D, ("_FR_SELF_RECORDING_BACKENDS",)),
    otherwise="this torch hooks no recorder to a group",
)
COALESCING = capability(
    "coalescing",
    "messages of a restore, all at once",
    Live(_CPP, ("ProcessGroup._start_coalescing", "ProcessGroup._end_coalescing", "ProcessGroup._get_backend")),
)
SYMMETRIC_MEMORY = capability(
    "symmetric memory",
    "it is refused when it is first used",
    Live(_CPP, ("_SymmetricMemory.rendezvous", "_SymmetricMemory.set_group_info")),
)
REDUCER = capability(
    "DDP's reducer",
    "an interrupted backward pass is undone by a new reducer with the same buckets",
    Parameters(
        _DDP,
        "DistributedDataParallel._ddp_init_helper",
        ("parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"),
    ),
    Attributes(
        _DDP,
        "DistributedDataParallel",
        (
            *("reducer", "logger", "static_graph", "mixed_precision", "process_group", "gradient_as_bucket_view"),
            *("_comm_hooks", "_has_rebuilt_buckets", "_build_params_for_reducer", "_module_parameters"),
            *("_build_debug_param_to_name_mapping", "_delay_all_reduce_params"),
            *("require_forward_param_sync", "require_backward_grad_sync"),
        ),
    ),
    Live(
        _CPP,
        (
            *("Reducer._remove_autograd_hooks", "Reducer._rebuild_buckets", "Reducer._get_zeros_like_grad_buckets"),
            *("Reducer._update_process_group", "Reducer._autograd_hook", "Reducer.prepare_for_forward"),
            *("Reducer.prepare_for_backward", "Logger._get_ddp_logging_data"),
        ),
    ),
    Assigned("torch.distributed.optim.apply_optimizer_in_backward", ("_in_backward_optimizers",)),
)
PYTHON_REDUCER = capability(
    "DDP's reducer in Python",
    "it is refused",
    Attributes(_DDP, "DistributedDataParallel", ("_use_python_reducer",)),
    otherwise="this torch has no such reducer",
)
_FSDP_INSIDE = (
    Attributes(_FSDP_STATE, "FSDPState", ("_lazy_init", "_is_root", "_state_ctx")),
    Attributes(_FSDP_STATE, "FSDPStateContext", ("is_last_backward", "post_optim_event")),
    Defined(_FSDP + "_fully_shard", ("FSDPModule._get_fsdp_state",)),
    Attributes(
        _FSDP_GROUP,
        "FSDPParamGroup",
        (
            *("_all_gather_result", "_all_reduce_state", "_all_reduce_hook", "_sharded_state", "_is_hsdp"),
            *("fsdp_params", "reduce_grads", "all_reduce_grads", "reshard_after_backward", "post_backward"),
        ),
    ),
    Attributes(
        _FSDP + "_fsdp_param",
        "FSDPParam",
        (
            *("_module_info", "_unsharded_param", "_sharded_post_forward_param", "_sharded_post_forward_param_data"),
            *("sharded_param", "unsharded_accumulated_grad", "grad_offload_event", "to_sharded"),
        ),
    ),
)
FSDP2 = Capability(
    "FSDP2's state",
    "an interrupted forward or backward pass is undone",
    (
        Way(
            "several groups",  # a list for each module, so that fully_shard can put its parameters on several meshes
            (*_FSDP_INSIDE, Attributes(_FSDP_STATE, "FSDPState", ("_fsdp_param_groups",))),
        ),
        Way(
            "one group",
            (*_FSDP_INSIDE, Attributes(_FSDP_STATE, "FSDPState", ("_fsdp_param_group",))),
        ),
    ),
)
_FSDP_ITERATION = (
    Attributes(_FSDP_STATE, "FSDPState", ("_comm_ctx", "_modules_to_run_forward", "_training_state")),
    Attributes(
        _FSDP_STATE,
        "FSDPStateContext",
        ("all_states", "iter_forward_root", "post_backward_final_callback_queued"),
    ),
    Attributes(_FSDP_GROUP, "FSDPCommContext", ("all_gather_state", "post_forward_order")),
    Attributes(
        _FSDP_GROUP,
        "FSDPParamGroup",
        (
            *("_post_reduce_event", "_reshard_after_forward_event", "_partial_reduce_output"),
            *("_post_forward_indices", "_training_state"),
        ),
    ),
)
FSDP2_ITERATION = Capability(
    "FSDP2's iteration",
    "where an interrupted forward or backward pass has come to is forgotten",
    (
        Way("its own", (Defined(_FSDP + "_fully_shard", ("FSDPModule.reset_iter_state",)),)),
        # To 2.12 it has to be done from outside, where 2.12 may have several reductions under way.
        Way("states", (*_FSDP_ITERATION, Attributes(_FSDP_GROUP, "FSDPCommContext", ("reduce_scatter_states",)))),
        Way("state", (*_FSDP_ITERATION, Attributes(_FSDP_GROUP, "FSDPCommContext", ("reduce_scatter_state",)))),
    ),
)
FSDP2_ACCUMULATION = capability(
    "FSDP2's accumulated gradients",
    "gradients of several backward passes that a unit keeps apart are dropped with an interrupted step",
    Defined(_FSDP + "_fsdp_param", ("FSDPParam.accumulate_unsharded_grad_if_needed",)),
    otherwise="they are the parameter's own .grad (torch 2.15)",
)
FSDP2_RESHARDING = capability(
    "FSDP2's parameters after a forward pass",
    "whether they stay gathered is as it was before an interrupted step",
    Attributes(_FSDP_STATE, "FSDPState", ("_auto_reshard_after_forward",)),
    Attributes(_FSDP_GROUP, "FSDPParamGroup", ("mesh_info", "post_forward_mesh_info")),
    Defined(_FSDP + "_fsdp_init", ("_get_post_forward_mesh_info",)),
    otherwise="what a step switches by set_reshard_after_forward() must be what the next one sets first",
)
FSDP2_RESIZING = capability(
    "FSDP2's sizes",
    "parameters, optimizer state and device meshes become those of another number of ranks",
    Attributes(
        "torch.distributed.device_mesh",
        "DeviceMesh",
        (
            *("_layout", "_rank_map", "_flatten_rank_map", "_rank", "_coordinate_on_dim", "_hash"),
            *("_root_mesh", "_flatten_mapping"),
        ),
    ),
    Attributes(_FSDP + "_fsdp_common", "FSDPMeshInfo", ("shard_mesh_size", "shard_mesh_rank")),
    Attributes(_FSDP + "_fsdp_common", "DDPMeshInfo", ("replicate_mesh_size", "replicate_mesh_rank")),
    Attributes(
        _FSDP_GROUP,
        "FSDPParamGroup",
        (
            *("mesh_info", "post_forward_mesh_info", "gradient_divide_factor"),
            *("_all_gather_comm", "_reduce_scatter_comm"),
        ),
    ),
    Attributes(
        _FSDP + "_fsdp_param",
        "FSDPParam",
        (
            *("mesh_info", "is_dtensor", "fsdp_placement", "offload_to_cpu", "_sharded_local_tensor", "_orig_size"),
            *("sharded_size", "contiguous_sharded_stride", "padded_sharded_param_size", "_sharded_param_data"),
            *("_sharding_spec", "all_gather_outputs", "_unsharded_inner_tensors"),
        ),
    ),
    Attributes("torch.nn.modules.module", "Module", ("_compiled_call_impl",)),
    Attributes("torch.distributed.tensor._dispatch", "OpDispatcher", ("sharding_propagator",)),
    Attributes("torch.distributed.tensor._sharding_prop", "ShardingPropagator", ("propagate_op_sharding",)),
    Attributes("torch.distributed.tensor._api", "DTensor", ("_spec", "_op_dispatcher")),
    Live("torch._C", ("_clear_DTensor_sharding_propagator_cache",)),
)
AUTOGRAD = capability(
    "autograd's graph",
    "what an interrupted step has saved is let go of",
    Live("torch._C._autograd", ("_get_sequence_nr",)),
    Live("torch._C", ("_functions.AccumulateGrad._sequence_nr",)),
    Live("torch.autograd", ("Variable._execution_engine",)),
)
TENSORS = capability(
    "tensors",
    "changes are seen, local parts and views found, operations of the optimizer told apart",
    Live("torch", ("Tensor._version", "Tensor._cdata", "Tensor._indices", "Tensor._values", "_foreach_copy_")),
    Live("torch.utils._pytree", ("tree_leaves",)),
    Live("torch.utils._python_dispatch", ("TorchDispatchMode",)),
    Live("torch._C", ("DisableTorchFunctionSubclass", "StorageBase._cdata")),
    Live("torch._ops", ("OpOverload",)),
    Attributes("torch._ops", "OpOverload", ("_schema",)),
    Attributes("torch.distributed.tensor._api", "DTensor", ("_local_tensor",)),
    Attributes("torch.nn.modules.module", "Module", ("_buffers", "_parameters")),
    Defined("torch.nn.modules.batchnorm", ("_NormBase",)),
)
STATE_BY_STEP = capability(
    "optimizer state by a step",
    "the step by which get_state_dict() makes an optimizer's state is told from one of training",
    Parameters("torch.distributed.checkpoint.state_dict", "_init_optim_state", ("optim",)),
    otherwise="get_state_dict(model, optimizer) outside of a step is refused as optimizer.step() is",
)
JOIN = capability(
    "join contexts",
    "a model in a join() context is refused before the first step",
    Attributes("torch.distributed.algorithms.join", "Joinable", ("_join_config",)),
    otherwise="a join() context is not seen",
)
SCALER = capability(
    "GradScaler's stages",
    "an interrupted step's stage is forgotten",
    Attributes("torch.amp.grad_scaler", "GradScaler", ("_per_optimizer_states",)),
)
LOADERS = capability(
    "DataLoader's iterators",
    "workers are renewed each epoch, batches are skipped without being loaded, and it is known how workers have ended "
    "and how far an iterator has come",
    Attributes("torch.utils.data.dataloader", "DataLoader", ("_iterator",)),
    Attributes("torch.utils.data.dataloader", "_BaseDataLoaderIter", ("_sampler_iter", "_num_yielded")),
    Attributes("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter", ("_workers", "_next_data")),
    Defined("torch.utils.data.dataloader", ("_MultiProcessingDataLoaderIter",)),
)
SCHEDULERS = capability(
    "schedulers' marks",
    "a learning rate is restored without a warning",
    Attributes("torch.optim.lr_scheduler", "LRScheduler", ("_last_lr",)),
    Assigned("torch.optim.lr_scheduler", ("_wrapped_by_lr_sched",)),
)
CUDA = capability(
    "CUDA's first use",
    "imports ahead of the script take no GPU",
    Defined("torch.cuda", ("_lazy_init",)),
)
COMPILED = capability(
    "compiled modules",
    "the module inside of one may be registered",
    Attributes("torch._dynamo.eval_frame", "OptimizedModule", ("_orig_mod",)),
    otherwise="the wrapper around a compiled module has to be registered",
)
COMPILATIONS = capability(
    "compilations",
    "a rank that compiles in the middle of training is given more time before it counts as hung",
    Defined(
        "torch._dynamo.callback",
        (
            "CompilationCallbackHandler.run_start_callbacks",
            "CompilationCallbackHandler.run_end_callbacks",
            "CompilationCallbackHandler.install_callbacks",
        ),
    ),
    otherwise="timeouts.hang_step_s has to allow for compilations after the first step",
)
LEARNED_SIZES = capability(
    "learned sizes",
    "a replacement compiles for the sizes that have turned out to vary",
    Defined(
        "torch._dynamo.pgo",
        (
            *("_CODE_STATE", "get_code_state", "CodeId.make", "CodeState", "auto_dynamic", "auto_unset"),
            *("FrameStateSizeEntry.__ior__", "InferStride"),
        ),
    ),
    Defined("torch._dynamo.utils", ("counters",)),
    otherwise="its compiled functions begin with fixed sizes, and may round otherwise than before",
)
INDUCTOR_FILES = capability(
    "Inductor's files",
    "a compiler that is killed leaves no part of a file in Inductor's cache",
    Attributes("torch._inductor.cpp_builder", "CppBuilder", ("build", "_target_file", "_output")),
    otherwise="a part that is left there may be taken for whole by later processes",
)
STAGING = capability(
    "DCP's stager",
    "an asynchronous save below a discarded attempt answers as the real one would",
    Attributes("torch.distributed.checkpoint.staging", "DefaultStager", ("_config",)),
    otherwise="it answers with a future alone",
)

TORCH = Framework(
    "torch",
    "torch",
    "torch",
    ("2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    (
        *(GROUP_CREATION, TORCHCOMMS, STORES, BARE_STORE, GLOO, SEQUENCE_NUMBERS),
        *(NCCL_BY_NAME, FLIGHT_RECORDER_HOOK, COALESCING, SYMMETRIC_MEMORY),
        *(REDUCER, PYTHON_REDUCER, FSDP2),
        *(
            FSDP2_ITERATION,
            FSDP2_ACCUMULATION,
            FSDP2_RESHARDING,
            FSDP2_RESIZING,
            AUTOGRAD,
            TENSORS,
            STATE_BY_STEP,
            JOIN,
            SCALER,
            LOADERS,
            SCHEDULERS,
            CUDA,
        ),
        *(COMPILED, COMPILATIONS, LEARNED_SIZES, INDUCTOR_FILES, STAGING),
    ),
)
GROUPS = (GROUP_CREATION, TORCHCOMMS, STORES, GLOO, COALESCING, SYMMETRIC_MEMORY)
"""What is needed for any group at all."""
STEPS = (AUTOGRAD, TENSORS, SCALER, LOADERS, SCHEDULERS, CUDA)
"""What is needed for any step at all; DDP's and FSDP2's when one of them is registered."""
