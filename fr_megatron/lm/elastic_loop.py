"""Megatron-LM's loop in a job that changes its number of replicas (``--flash-recovery-elastic MIN:MAX``).

The global batch stays what it is. The loop asks for sizes at nearly all places when it needs them; what it has noted:

==========================  =======================================================================================
``args``                    ``rank``, ``world_size``, ``data_parallel_size``: set again
micro-batch calculator      micro-batches on a replica (:func:`fr_megatron.elastic.resize_calculator`)
the loop's own variable     it takes another number of micro-batches for a ramp-up of the batch size, of which it would
                            write a checkpoint, and which may only go up: where it compares, it sees the launch's
loaders                     Megatron's sequential sampler hands out one global order, which is followed in any size
random streams              seeded for each micro-batch, from the iteration and the micro-batch's number, and the model
                            chunk's
losses of experts           for the log: those of the step, in the size of the step (:mod:`.layer_losses`)
==========================  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import torch.distributed as dist

from flashrecovery import Recovery
from flashrecovery.adapter.loop import CallBatches
from flashrecovery.errors import ConfigError
from fr_megatron.elastic import resize_calculator, schedule_of, seed_tracked
from fr_megatron.lm.arguments import given
from fr_megatron.lm.elastic_data import FollowingLoader
from fr_megatron.lm.layer_losses import LayerLosses, kept_otherwise

REFUSED: dict[str, str] = {
    "full_validation": "its number of iterations follows the loaders",
    "multiple_validation_sets": "not tried",
    "iterations_to_skip": "they take samples outside of steps",
    "rl_use_sequence_packing": "the number of micro-batches is the samples' own",
    "perform_rl_step": "samples are made in the loop",
    "hybrid_context_parallel": "its own loader",
    "sft": "its averages are of each replica's own micro-batches",
    "vision_pretraining": "not tried",
    "log_straggler": "it has noted the ranks",
    "run_workload_inspector_server": "it has noted the rank",
    "inprocess_restart": "it restarts ranks itself",
    "enable_ft_package": "it restarts ranks itself",
    "async_save": "between its iterations it asks on all ranks whether writing is over",
    "ckpt_assume_constant_structure": "it keeps which rank writes which part of a checkpoint, as at the first one",
    "mtp_num_layers": "its losses are reduced over groups that are noted",
    "dsa_indexer_loss_coeff": "what layers have summed up of it for the log is each rank's own",
    "tensorboard_dir": "the last rank of the launch writes",
    "wandb_project": "the last rank of the launch writes",
}
"""Flags that are refused where they say anything, and why."""
_LARGEST = ("check_for_spiky_loss", "check_for_large_grads")
"""Flags by which a step is called faulty for a value far above those before, as this rank has seen them."""


def check_flag(args: Any, recovery: Recovery) -> None:
    """Raises ConfigError if ``--flash-recovery-elastic`` says something else than the launcher does."""
    said = given(args, "elastic")
    if said is None:
        return
    launched = recovery.elastic
    least, _, most = said.partition(":")
    if not (least.isdecimal() and most.isdecimal()):
        raise ConfigError(f"--flash-recovery-elastic {said}: MIN:MAX is needed, two numbers of replicas")
    text = f"{int(least)}:{int(most)}"
    if launched is None:
        raise ConfigError(
            f"--flash-recovery-elastic {said}: the job has not been launched as an elastic one; start it with "
            f"`flashrecovery run --elastic {text}`"
        )
    if launched.text != text:
        raise ConfigError(
            f"--flash-recovery-elastic {said}, and the launcher says --elastic {launched.text}: the same is allowed"
        )


def data_parallel_place() -> tuple[int, int]:
    """This rank's number among those that take their own samples, and how many there are."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


class ElasticLoop:
    """The elastic loop of one process.

    Args:
        args: Megatron's, as the loop uses them.
        chunks: the model chunks of this rank (several with a virtual pipeline).
        place: gives this rank's number among those that take their own samples, and how many there are.
        computing: how many ranks of a replica do.
        besides: what has to be the same on all ranks besides the batch.
    """

    def __init__(
        self,
        args: Any,
        recovery: Recovery,
        chunks: Sequence[Any],
        place: Callable[[], tuple[int, int]] = data_parallel_place,
        computing: int = 1,
        besides: Mapping[str, Any] | None = None,
    ) -> None:
        self._place = place
        self._args = args
        self._recovery = recovery
        self._chunks = {id(chunk): number for number, chunk in enumerate(chunks)}
        self._batches = CallBatches(
            global_batch=args.global_batch_size,
            micro_batch=args.micro_batch_size,
            seed=args.seed,
            place=place,
            seed_framework=seed_tracked,
            computing=computing,
            chunks=len(chunks),
            runs=schedule_of(chunks),
            besides=besides,
        )
        recovery.take_batches(self._batches)
        self.losses = LayerLosses(args)
        self.streams: list[FollowingLoader] = []
        self._launched: int | None = None  # micro-batches, while the loop compares them with those of before
        self._comparing = True

    # -- what is refused, and what follows --------------------------------------------------------

    def tied_to_size(self) -> Iterator[str]:
        """What of the loop cannot follow, by name, and why."""
        args = self._args
        for name, why in REFUSED.items():
            if getattr(args, name, None):
                yield f"--{name.replace('_', '-')} ({why})"
        if getattr(args, "gtp_weight_remat_size", 1) > 1:  # core 0.20
            yield f"--gtp-weight-remat-size {args.gtp_weight_remat_size} (a parallelism that has not been tried)"
        if getattr(args, "non_persistent_ckpt_type", None) == "local":
            yield "--non-persistent-ckpt-type local (its files are of the launch's ranks; allowed: global)"
        if kept_otherwise(args):
            yield (
                f"--num-experts {args.num_experts} with a megatron-core that keeps losses of experts in another way "
                "for the log (not tried; 0.16's is allowed)"
            )
        for name in _LARGEST:
            if self._recovery.has_checkpoints and getattr(args, name, None):
                yield (
                    f"--{name.replace('_', '-')} and fallback checkpoints (each rank remembers the largest that it has "
                    "had itself, and how many it has seen; allowed without checkpoint.dir)"
                )
        if args.dataloader_type != "single":
            yield (
                f"--dataloader-type {args.dataloader_type} (its order depends on the number of ranks; allowed: single)"
            )

    def only_as_launched(self) -> str:
        """What of the loop has not been tried with more replicas than the launch's, by name."""
        stages = self._args.pipeline_model_parallel_size
        return f"Megatron-LM's loop with --pipeline-model-parallel-size {stages} (allowed: 1)" if stages > 1 else ""

    def resized(self) -> None:
        """The process groups have other members."""
        args = self._args
        args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
        args.data_parallel_size = self._place()[1]
        resize_calculator()

    # -- micro-batches ----------------------------------------------------------------------------

    def training(self, micro_batches: int) -> None:
        """The loop is about to begin, with that many on a replica."""
        self._launched, self._comparing = micro_batches, True

    def updated(self, *, checks: bool) -> None:
        """The loop has brought the calculator up to date: first without, then with checks, and in between it compares
        with the iteration before."""
        self._comparing = not checks

    def seen(self, micro_batches: int) -> int:
        """The number that the loop should see, for that many on a replica."""
        return self._launched if self._comparing and self._launched is not None else micro_batches

    # -- samples ----------------------------------------------------------------------------------

    def followed(self, loaders: Any) -> Any:
        """The same structure of loaders (None where this rank reads nothing) with some that follow the size in their
        places."""
        if loaders is None:
            return None
        if isinstance(loaders, (list, tuple)):
            return type(loaders)(self.followed(loader) for loader in loaders)
        made = FollowingLoader(loaders, self._args.seed, self._place, self._batches.before_fetch)
        self.streams.append(made)
        return made

    def positions(self) -> list[int]:
        """Where the loaders stand."""
        return [stream.position for stream in self.streams]

    def set_positions(self, positions: list[int]) -> None:
        """Go back to the beginning of a call."""
        self._batches.give_up()
        for stream, position in zip(self.streams, positions, strict=True):
            stream.go_to(position)

    # -- calls ------------------------------------------------------------------------------------

    def evaluated(self) -> None:
        """An evaluation has been computed."""
        for stream in self.streams:
            stream.keep()

    def train_step(self, iteration: int, step: Callable[[Callable[..., Any]], Any], forward: Callable[..., Any]) -> Any:
        """Make one step with ``forward``, Megatron's forward_step_func, which computes one micro-batch."""

        @wraps(forward)
        def seeded(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            self._batches.micro_batch(self._chunks[id(model)])
            return forward(data_iterator, model, *args, **kwargs)

        self.set_positions(self.positions())  # an attempt that was cut short has read on
        self._batches.begin(iteration)
        returned = step(seeded)
        self._batches.end()
        self.evaluated()
        return returned
