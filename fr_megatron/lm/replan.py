"""Megatron-LM's loop in a job that continues in another parallel layout (``--flash-recovery-parallelism MIN``).

The workers are restarted for the new layout, so Megatron's own arguments must describe that layout before Megatron
validates them; everything derived from them follows. The loop then iterates from its first iteration without computing
anything, as in a replacement, up to the call from which the job continues. There it needs the loop's state, which is
lost with a dead rank. So all ranks keep the same state, in a form that is valid in every layout:

=====================  ============================================================================================
losses of a step       sent by the last stage to the others, so that all ranks have the same sums for the log
loader positions       samples since the launch, over all replicas; ranks that read no data count, too, and learn
                       after an evaluation what rank 0 has read
losses of experts      for the log: as the last rank would log them, on all ranks (:mod:`.layer_losses`)
the rest               is the same on all ranks: skipped iterations, the state of the rerun state machine
=====================  ============================================================================================
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery import ParallelLayout, Recovery, layout
from flashrecovery.adapter.loop import union
from flashrecovery.adapter.relayout import STAGING_ENV, take_sizes
from flashrecovery.errors import ConfigError, JobFailedError, UnsupportedError
from fr_megatron.capabilities import METRICS
from fr_megatron.elastic import interleaves
from fr_megatron.lm.arguments import given
from fr_megatron.lm.elastic_loop import REFUSED, ElasticLoop
from fr_megatron.lm.layer_losses import has_experts

_EVEN = "its stages have as many layers each in every layout"
_OWN: dict[str, str] = {
    "pipeline_model_parallel_layout": _EVEN,
    "decoder_first_pipeline_num_layers": _EVEN,
    "decoder_last_pipeline_num_layers": _EVEN,
    "account_for_embedding_in_pipeline_split": _EVEN,
    "account_for_loss_in_pipeline_split": _EVEN,
    "heterogeneous_layers_config_path": "layers of several kinds",
    "heterogeneous_layers_config_encoded_json": "layers of several kinds",
    "hybrid_override_pattern": "layers of several kinds",
    "is_hybrid_model": "layers of several kinds",
    "multi_latent_attention": "not tried",
    "experimental_attention_variant": "not tried",
    "check_for_spiky_loss": "each rank remembers the largest loss that it has had itself",
    "check_for_large_grads": "each rank remembers the largest gradient that it has had itself",
    "log_max_attention_logit": "each rank has its own",
    "data_parallel_random_init": "not tried",
    "use_tp_pp_dp_mapping": "ranks are counted otherwise",
    "decrease_batch_size_if_needed": "the global batch follows the number of ranks",
    "rampup_batch_size": "the global batch changes",
    "overlap_param_gather": "not tried",
    "use_megatron_fsdp": "megatron-core's DistributedDataParallel is allowed",
    "use_torch_fsdp2": "megatron-core's DistributedDataParallel is allowed",
    "use_checkpoint_args": "the checkpoint says the layout",
    "yaml_cfg": "not tried",
    "moe_use_upcycling": "not tried",
    "hierarchical_context_parallel_sizes": "they are of one context-parallel size",
    "distribute_saved_activations": "needs tensor parallelism",
    "phase_transition_iterations": "not tried",
    "ckpt_convert_format": "not tried",
    "save_dgrads_interval": "files of the ranks of one layout",
    "save_wgrads_interval": "files of the ranks of one layout",
    "use_legacy_models": "not tried",
    "pretrained_checkpoint": "not tried",
    "finetune": "not tried",
}
"""Flags that are refused where they say anything, and why."""
_ONE: dict[str, str] = {
    "num_distributed_optimizer_instances": "several optimizer instances",
}
"""Sizes of which only 1 is allowed."""

_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
"""Flags that say virtual stages: layers of each, or how many of them a rank has."""
_ON_COMMAND_LINE = ("num_experts", *_VIRTUAL)
"""Flags by which other arguments are set to a layout before they are validated."""
_FITTED = ("num_layers", "micro_batch_size", "microbatch_group_size_per_vp_stage")
"""Flags by which it is seen whether a layout can have virtual stages."""
_PARSED = ("sequence_parallel", *_ON_COMMAND_LINE, *_FITTED)
_NAMES = {"microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage"}
"""Flags whose arguments have other names."""

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_CONNECTED = ("tensor_model_parallel_size", "context_parallel_size")
_BLACKWELL = 10
"""Compute capability."""

_LOADED = (
    "iteration",
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "num_floating_point_operations_so_far",
)
"""Arguments that a checkpoint sets."""
_BEGAN = "_TRAIN_START_TIME"
"""Where Megatron-LM has noted when it began."""
_BEGUN = ".megatron-lm-begun.json"
"""A file of the launch in the node's memory: what was loaded, and when it began. It stays as long as the agent does."""


def take_layout(args: Any) -> None:
    """Have ``args``, parsed and not validated yet, say the layout that the job has changed to, if it has. Which sizes
    may change, the launch's flags say, in every layout alike: context parallelism where there is some (it is other
    arithmetic, and not every attention has it), and expert parallelism where there are experts. With these, tensor
    parallelism needs sequence parallelism. What the flags say of that is noted: a script's defaults come later, and
    Megatron, which validates all of it then, keeps nothing of sequence parallelism without tensor parallelism."""
    _take_layout(args)
    args.flash_recovery_parsed = {name: getattr(args, name, None) for name in _PARSED}
    args.flash_recovery_parsed["num_layers"] = _layers(args)


def _take_layout(args: Any) -> None:
    if _size(args, "context_parallel_size") > 1:
        take_sizes("cp")
    if has_experts(args):
        take_sizes("ep")
    sizes = layout()
    if not sizes.changed:
        return
    if getattr(args, "expert_tensor_parallel_size", None) == args.tensor_model_parallel_size:
        args.expert_tensor_parallel_size = sizes.tp
    args.tensor_model_parallel_size = sizes.tp
    args.pipeline_model_parallel_size = sizes.pp
    args.context_parallel_size = sizes.cp
    args.expert_model_parallel_size = sizes.ep
    _fit_virtual_stages(args, sizes)
    if sizes.tp > 1 and has_experts(args):
        args.sequence_parallel = True


def _fit_virtual_stages(args: Any, sizes: ParallelLayout) -> None:
    """Virtual stages stay as the launch's flags say them. A layout that cannot have them so (its layers, or the
    micro-batches of a replica, are too few or not a multiple) has none, and none has them with experts or context
    parallelism: with ``--num-layers-per-virtual-pipeline-stage`` the launch may have had one on each rank, which is
    none, and fewer pipeline ranks would have several, which are refused. A script with its own loop, whose batch
    the flags do not say, has to see to it itself."""
    said = [getattr(args, name, None) for name in _VIRTUAL]
    if not any(said) or not args.global_batch_size:
        return
    least = 2 if args.overlap_p2p_comm else 3  # Megatron's rule
    layers = (_layers(args) or 0) // sizes.pp
    micro_batches = args.global_batch_size // (args.micro_batch_size * sizes.dp)
    at_once = getattr(args, "microbatch_group_size_per_vp_stage", None) or sizes.pp
    fits = sizes.pp >= least and interleaves(at_once, sizes.pp, micro_batches)
    fits = fits and sizes.cp == 1 and not has_experts(args)
    if not fits or any(layers % number for number in said if number):
        vars(args).update(dict.fromkeys(_VIRTUAL))


def _layers(args: Any) -> int | None:
    """One of two flags says them."""
    return getattr(args, "num_layers", None) or getattr(args, "encoder_num_layers", None)


def _size(args: Any, name: str) -> int:
    return int(getattr(args, name, None) or 1)


def known_facts(args: Any) -> Mapping[str, Any]:
    """What the flags say of the job better than its model does. ``args``: as the loop uses them. Whether
    tensor-parallel ranks divide sequences where there are any, they have said when they were parsed."""
    divides = bool(_parsed(args).get("sequence_parallel")) or has_experts(args)
    return {"sequence": args.seq_length, "sequence_parallel": divides}


def _parsed(args: Any) -> Mapping[str, Any]:
    """What :func:`take_layout` has noted; all as it is now where the flags were parsed in another way."""
    noted: Mapping[str, Any] = getattr(args, "flash_recovery_parsed", vars(args))
    return noted


def leave_out_loading(args: Any) -> None:
    """In another layout the loop loads no checkpoint: the newest one may have come since the launch. See
    :func:`begin`."""
    if layout().changed:
        args.flash_recovery_load, args.load = getattr(args, "load", None), None


def check_flags(args: Any, recovery: Recovery) -> None:
    """Whether a job with these flags can change its layout, if it is one whose layout may change.

    Raises:
        ConfigError: ``--flash-recovery-parallelism`` says something else than the launcher does.
        UnsupportedError: it cannot; with all flags that stand against it, and why.
    """
    said, launched = given(args, "parallelism"), recovery.parallelism
    if said is not None and launched is None:
        raise ConfigError(
            f"--flash-recovery-parallelism {said}: the layout of the job is fixed as it was launched; start it with "
            f"`flashrecovery run --parallelism {said}`"
        )
    if said is not None and launched is not None and launched.min != said:
        raise ConfigError(
            f"--flash-recovery-parallelism {said}, and the launcher says --parallelism {launched.min}: the same is "
            "allowed"
        )
    if launched is not None and launched.min < 2 and given(args, "redundancy") == "neighbor":
        raise ConfigError(
            "--flash-recovery-redundancy neighbor with --parallelism 1: a world of one rank has no peer to hold "
            "a copy; 2 or more, or auto, is allowed"
        )
    if launched is not None and (found := list(refused(args))):
        raise UnsupportedError(f"another parallel layout of Megatron-LM's loop with {'; '.join(found)}")


def check_late(args: Any) -> None:
    """Raises UnsupportedError for what cannot follow another layout, and has come into Megatron's arguments after the
    flags were parsed: a script's own defaults, say. ``args``: as the loop uses them."""
    virtual = any(getattr(args, name, None) for name in _VIRTUAL)
    names = (*_ON_COMMAND_LINE, *_FITTED) if virtual else _ON_COMMAND_LINE
    late = [name for name in names if getattr(args, name, None) and not _parsed(args).get(name)]
    found = [*_refused_always(args), *(f"{_flag(name)} (allowed: on the command line)" for name in late)]
    if found:
        raise UnsupportedError(
            f"another parallel layout of Megatron-LM's loop, whose script has set {'; '.join(found)}"
        )
    check_connections(args)


def check_connections(args: Any) -> None:
    """Raises UnsupportedError without ``CUDA_DEVICE_MAX_CONNECTIONS=1`` on a GPU before Blackwell. Megatron-LM
    (``validate_args``) asks for that where there is tensor or context parallelism: a job that was launched without
    either would find out in the layout that it has changed to."""
    if os.environ.get(_CONNECTIONS) == "1" or max(map(partial(_size, args), _CONNECTED)) > 1:
        return  # with either, Megatron-LM has said so itself
    generation = torch.cuda.get_device_properties(torch.cuda.current_device()).major
    if generation < _BLACKWELL:
        raise UnsupportedError(
            f"another parallel layout of Megatron-LM's loop without {_CONNECTIONS}=1 on a GPU of compute capability "
            f"{generation}.x: Megatron-LM asks for it in layouts with tensor or context parallelism; set it at the "
            "launch (the launcher hands the environment on)"
        )


def refused(args: Any) -> Iterator[str]:
    """What of the flags, parsed and not validated yet, cannot follow another layout, by name, and why."""
    yield from _refused_always(args)
    if args.global_batch_size is None:
        yield "no --global-batch-size (it would follow the number of ranks)"
    if getattr(args, "padded_vocab_size", None) is not None:
        yield "--padded-vocab-size (allowed: without it; Megatron pads it for the tensor parallel size)"


def _refused_always(args: Any) -> Iterator[str]:
    for name, why in {**REFUSED, **_OWN}.items():
        if getattr(args, name, None):
            yield f"{_flag(name)} ({why})"
    for name, why in _ONE.items():
        if (size := _size(args, name)) > 1:
            yield f"{_flag(name)} {size} ({why}; allowed: 1)"
    if getattr(args, "gtp_weight_remat_size", 1) > 1:  # core 0.20
        yield f"--gtp-weight-remat-size {args.gtp_weight_remat_size} (a parallelism that has not been tried)"
    if getattr(args, "non_persistent_ckpt_type", None) == "local":
        yield "--non-persistent-ckpt-type local (its files are of the launch's ranks; allowed: global)"
    if getattr(args, "expert_tensor_parallel_size", None) not in (None, args.tensor_model_parallel_size):
        yield "--expert-tensor-parallel-size (allowed: that of tensor parallelism)"
    if args.dataloader_type not in (None, "single"):
        yield f"--dataloader-type {args.dataloader_type} (its order depends on the number of ranks; allowed: single)"
    if (kind := given(args, "redundancy")) in ("replica", "parity"):
        yield f"--flash-recovery-redundancy {kind} (not every layout has it; allowed: auto, neighbor, none)"


def _flag(name: str) -> str:
    return f"--{_NAMES.get(name, name).replace('_', '-')}"


def check_model(chunks: Any) -> None:
    """Raises UnsupportedError for another model than GPT, and for experts whose losses are kept for the log in another
    way than is known."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.utils import unwrap_model

    for model in unwrap_model(chunks):
        if not isinstance(model, GPTModel):
            raise UnsupportedError(
                f"another parallel layout of Megatron-LM's loop with the model {type(model).__name__}, which has not "
                "been tried; GPTModel is allowed"
            )
        if getattr(model.config, "num_moe_experts", None) and not METRICS.takes("dictionary"):
            raise UnsupportedError(
                "another parallel layout of Megatron-LM's loop with --num-experts, with a megatron-core that keeps "
                "losses of experts in another way for the log (not tried; 0.16's is allowed)"
            )


def begin(args: Any) -> None:
    """The model is set up. ``args``: Megatron's; what a checkpoint has set at the launch, they say in every layout. And
    ``--exit-duration-in-mins`` counts from the launch. A collective, to which a replacement gets the answer.

    Raises UnsupportedError: on no node of the job is anything known of the launch."""
    training: Any = importlib.import_module("megatron.training.training")
    path = Path(os.environ[STAGING_ENV]) / _BEGUN
    if not layout().changed:
        if not path.exists():
            loaded = {name: getattr(args, name, None) for name in _LOADED}
            partial = path.with_name(f"{path.name}.{os.getpid()}")
            partial.write_text(json.dumps({"loaded": loaded, "time": getattr(training, _BEGAN, None)}))
            os.replace(partial, path)  # all ranks write the same
        return
    if not hasattr(args, "flash_recovery_load"):
        return  # parsed before the loop was protected: what it has loaded now is compared with the launch's
    args.load = args.flash_recovery_load
    known = union([path.read_text()] if path.exists() else [])  # a spare node has seen no launch
    if known:
        begun = json.loads(known[0])
        vars(args).update(begun["loaded"])
        setattr(training, _BEGAN, begun["time"])
    elif args.load is not None:
        raise UnsupportedError(
            "another parallel layout of a job that was launched with --load, on nodes that had no rank at the launch"
        )


def started_with(args: Any) -> dict[str, Any]:
    """What the loop begins with, and is the same in every layout. ``args``: Megatron's, with what was loaded."""
    said = ("train_iters", "train_samples", "eval_iters", "eval_interval", "log_interval", "save_interval", "data_path")
    return {name: getattr(args, name, None) for name in (*_LOADED, *said)}


class LayoutLoop:
    """What the loop of one process keeps in words of every layout.

    Args:
        args: Megatron's, as the loop uses them.
        own: the loop with the loaders of this rank.
    """

    def __init__(self, args: Any, own: ElasticLoop) -> None:
        self._args = args
        self._own = own
        self._trained = 0
        self._evaluated: list[int] = []  # of the loaders after the first one; [] before any of them has been read

    def stepped(self, returned: tuple[Any, ...]) -> tuple[Any, ...]:
        """``train_step`` has returned on this rank; what it is to return on all of them. A collective of the stages.

        Raises JobFailedError: the loader has not read one global batch."""
        self._trained += self._args.global_batch_size
        own = self._own.positions()
        if own and own[0] != self._trained:
            raise JobFailedError(
                f"the steps of this job have had {self._trained} samples, and the loader of rank {self._args.rank} has "
                f"read {own[0]}"
            )
        return self._losses(returned[0]), *returned[1:]

    @staticmethod
    def _losses(own: Any) -> Any:
        """The losses of the last stage."""
        from megatron.core import parallel_state as state

        if state.get_pipeline_model_parallel_world_size() == 1:
            return own
        found: list[Any] = [{name: loss.detach().cpu() for name, loss in own.items()}]
        last = state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(found, last, group=state.get_pipeline_model_parallel_group())
        return own if dist.get_rank() == last else {name: loss.cuda() for name, loss in found[0].items()}

    def evaluated(self) -> None:
        """An evaluation has been computed. A collective."""
        found: list[Any] = [self._own.positions()[1:]]
        dist.broadcast_object_list(found, 0)
        self._evaluated = list(found[0])

    def positions(self) -> list[Any]:
        """Where loaders stand."""
        return [self._trained, list(self._evaluated)]

    def set_positions(self, positions: list[Any]) -> None:
        """Go back, or forward, to the beginning of a call."""
        self._trained, self._evaluated = positions[0], list(positions[1])
        own = len(self._own.streams)
        others = self._evaluated or [0] * max(own - 1, 0)
        self._own.set_positions([self._trained, *others] if own else [])
