"""The fallback checkpoint in Megatron's own format, which ``megatron.core.dist_checkpointing.load`` reads, in whatever
layout: the model, the optimizer as Megatron writes it with ``distrib_optim_sharding_type: fully_reshardable``, the
scheduler.

``dist_checkpointing.save`` plans collectively, gathers the distributed optimizer's parts, and asks all ranks in every
step whether they have finished; an asynchronous one, too. Here every rank writes its own pieces (:mod:`.pieces`) beside
training, and the core joins them. Reading needs no communication either.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery.adapter import (
    CheckpointFormat,
    layout_of,
    new_state_tensor,
    plain,
    read_into,
    write_durably,
    write_part,
)
from flashrecovery.errors import RestoreError, UnsupportedError
from fr_megatron.capabilities import CHECKPOINTS
from fr_megatron.optimizers import Names, inner_optimizers, is_distributed
from fr_megatron.pieces import Piece, Stepped, described, find_stepped, pieces

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""What Megatron-LM calls the metadata of a sharded state dict; with it a checkpoint is read again."""
_COMMON = "common.pt"
_OWN = "flash_recovery"
"""The key, in the common part, of what a basic optimizer keeps of each parameter."""


class MegatronCheckpoint(CheckpointFormat):
    """The fallback checkpoint of this rank's model chunks (in Megatron's DistributedDataParallel), optimizer and
    scheduler."""

    name = "megatron"

    def __init__(self, chunks: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._stepped = find_stepped(inner_optimizers(optimizer), Names(chunks))

    @staticmethod
    def fits(chunks: Sequence[Any]) -> bool:
        """Whether Megatron can describe the chunks."""
        from megatron.core.distributed import DistributedDataParallel

        return CHECKPOINTS.way is not None and all(
            type(chunk) is DistributedDataParallel and hasattr(chunk.module, "sharded_state_dict") for chunk in chunks
        )

    def layout(self) -> str:
        from megatron.core import parallel_state as state

        config = self._chunks[0].ddp_config
        sizes = {
            "ranks": dist.get_world_size(),
            "tp": state.get_tensor_model_parallel_world_size(),
            "pp": state.get_pipeline_model_parallel_world_size(),
            "vpp": len(self._chunks),
            "cp": state.get_context_parallel_world_size(),
            "ep": state.get_expert_model_parallel_world_size(),
            "etp": state.get_expert_tensor_parallel_world_size(),
            "dp": state.get_data_parallel_world_size(),
        }
        if config.use_distributed_optimizer:
            sizes["instances"] = config.num_distributed_optimizer_instances
            sizes["bucket"] = config.bucket_size or 0
            sizes["padded"] = int(config.pad_buckets_for_high_nccl_busbw)
        return " ".join(f"{name}={size}" for name, size in sizes.items())

    # -- writing ----------------------------------------------------------------------------------

    def capture(
        self, directory: Path, tag: str, copy: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[Path], None]:
        rank = dist.get_rank()
        try:
            parts = described(self._chunks, METADATA)
            found = [(piece, copy(piece.tensor)) for piece in pieces(parts, self._stepped, written=True)]
            objects = _objects(parts)
            common = self._common(parts) if rank == 0 else None
        except _errors() as e:
            return _failing(RestoreError(f"Megatron cannot describe its state: {type(e).__name__}: {e}"))

        def write(path: Path) -> None:
            tensors = _boxes((piece, piece.of(host)) for piece, host in found)
            write_part({**tensors, **objects}, path / f"megatron-{rank}", _part_planner())
            found.clear()
            if common is not None:
                write_durably(path / _COMMON, common)
                write_durably(path / "metadata.json", _config())

        return write

    def _common(self, parts: Sequence[tuple[Any, Any]]) -> bytes:
        """What Megatron stores once."""
        optimizers = [_plain_state(inner, parts) for inner in self._optimizer.chained_optimizers]
        common = {
            "checkpoint_version": 3.0,
            "content_metadata": METADATA,
            "optimizer": optimizers[0] if len(optimizers) == 1 else dict(enumerate(optimizers)),
            _OWN: _kept_of_each(self._stepped),
        }
        if self._scheduler is not None:
            common["opt_param_scheduler"] = self._scheduler.state_dict()
        data = io.BytesIO()
        torch.save(common, data)
        return data.getvalue()

    # -- reading ----------------------------------------------------------------------------------

    def load(self, directory: Path, tag: str) -> None:
        path = directory / tag
        try:
            common = torch.load(path / _COMMON, map_location="cpu", weights_only=True)
            for own in self._stepped:
                _make_room(own, common[_OWN])
            wanted = list(pieces(described(self._chunks, METADATA), self._stepped, written=False))
            _check_whole(path, {piece.key for piece in wanted})
            with torch.no_grad():
                read_into(_boxes((piece, piece.of(piece.tensor)) for piece in wanted), path, _load_planner(wanted))
        except _errors() as e:
            raise RestoreError(f"checkpoint {path} cannot be loaded: {type(e).__name__}: {e}") from e


# -- what Megatron stores once ----------------------------------------------------------------------


def _plain_state(inner: Any, parts: Sequence[tuple[Any, Any]]) -> Any:
    """One of Megatron's optimizers without the tensors: hyper-parameters, number of steps, loss scaler."""
    from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base

    if inner.is_stub_optimizer:
        return {}
    if is_distributed(inner):
        return {**inner.state_dict(), "param_state_sharding_type": METADATA["distrib_optim_sharding_type"]}
    model = {str(number): leaf for number, (_, leaf) in enumerate(parts)}
    _, persistent = extract_nonpersistent(inner.sharded_state_dict(model, metadata=dict(METADATA)))
    return extract_sharded_base(persistent)[1]


def _kept_of_each(stepped: Sequence[Stepped]) -> dict[str, dict[str, Any]]:
    """What the basic optimizer keeps of every parameter, in its order: the kind of a tensor like the parameter, or the
    value of anything else (the number of steps), which is the same for all: Megatron demands it."""
    kept: dict[str, dict[str, Any]] = {}
    own = next((s for s in stepped if s.state), None)
    if own is None:
        return kept
    for name, value in own.state.items():
        what = f"optimizer state {name!r}"
        if isinstance(value, torch.Tensor):
            kept[name] = {"layout": layout_of(own.main, value, what), "dtype": str(value.dtype).partition(".")[2]}
            if value.shape == own.main.shape:
                continue
        kept.setdefault(name, {})["value"] = plain(value, what)
    return kept


def _make_room(own: Stepped, kept: Mapping[str, Mapping[str, Any]]) -> None:
    """The state of one parameter as it was kept: values, and tensors whose content is yet to be read."""
    old, new = own.state, {}
    for name, entry in kept.items():
        like, value = entry.get("layout"), entry.get("value")
        if like is None:
            new[name] = value
            continue
        dtype = getattr(torch, entry["dtype"])
        shape = tuple(own.main.shape if value is None else value.shape)
        live = old.get(name)
        if not (isinstance(live, torch.Tensor) and tuple(live.shape) == shape and live.dtype == dtype):
            live = new_state_tensor(own.main, shape, dtype, like)
        new[name] = live if value is None else live.copy_(value)
    if new:
        own.inner.optimizer.state[own.main] = new
    else:
        own.inner.optimizer.state.pop(own.main, None)


# -- torch.distributed.checkpoint -------------------------------------------------------------------


def _boxes(found: Iterable[tuple[Piece, torch.Tensor]]) -> dict[str, Any]:
    """The pieces by key, in the classes by which Megatron shows them to torch."""
    from megatron.core.dist_checkpointing.strategies.checkpointable import LocalShardsContainer

    boxes = defaultdict(list)
    for piece, data in found:
        boxes[piece.key].append(_box(piece, data))
    return {key: LocalShardsContainer(several) for key, several in boxes.items()}


def _box(piece: Piece, data: torch.Tensor) -> Any:
    from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor

    return CheckpointableShardedTensor.from_sh_ten(_sharded(piece, data))


def _sharded(piece: Piece, data: torch.Tensor | None) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor(
        key=piece.key,
        data=data,
        dtype=piece.tensor.dtype,
        local_shape=piece.shape,
        global_shape=piece.whole,
        global_offset=piece.offset,
        axis_fragmentations=None,
        allow_shape_mismatch=piece.flexible,
    )


def _objects(parts: Sequence[tuple[Any, Any]]) -> dict[str, io.BytesIO]:
    """What the model keeps that is no tensor (extra state of modules), as Megatron writes it."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica

    found = {}
    for _, leaf in parts:
        if isinstance(leaf, ShardedObject) and is_main_replica(leaf.replica_id):
            found[leaf.unique_key] = io.BytesIO()
            torch.save([leaf.data], found[leaf.unique_key])
    return found


def _part_planner() -> Any:
    """Plans what one rank writes. Other ranks have the rest, so it is not complained of as missing."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

    class PartPlanner(MCoreSavePlanner):  # type: ignore[misc]
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = create_default_global_save_plan(all_plans)
            metadata.planner_data = {key: (key,) for key in metadata.state_dict_metadata}
            self.global_plan, self.metadata = plans, metadata
            return plans, metadata

    return PartPlanner(flatten_state_dict=False)


def _load_planner(wanted: Sequence[Piece]) -> Any:
    """Megatron's: shapes must be equal, but for a padded vocabulary."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner

    tensors = {piece.key: _sharded(piece, None) for piece in wanted}
    for piece in wanted:
        if piece.flexible:
            piece.tensor.zero_()
    return MCoreLoadPlanner(
        shapes_validation_sharded_tensors=[t for t in tensors.values() if not t.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={k: t for k, t in tensors.items() if t.allow_shape_mismatch},
    )


def _check_whole(path: Path, keys: Iterable[str]) -> None:
    """Raises RestoreError if the checkpoint lacks something: torch would leave it as it is."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    for key in sorted(keys):
        entry = stored.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise RestoreError(f"checkpoint {path} is of another model or optimizer: it lacks {key!r}")
        if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
            raise RestoreError(f"checkpoint {path} has only a part of {key!r}")


def _config() -> bytes:
    from megatron.core.dist_checkpointing.core import CheckpointingConfig

    return json.dumps(asdict(CheckpointingConfig("torch_dist"))).encode()


def _errors() -> tuple[type[Exception], ...]:
    """What Megatron and torch raise for what they cannot describe, and for files that are damaged, missing or of
    another job."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    reading = (OSError, EOFError, pickle.UnpicklingError)
    describing = (UnsupportedError, CheckpointingException, KeyError, ValueError, TypeError, AssertionError)
    return *describing, RuntimeError, *reading


def _failing(error: Exception) -> Callable[[Path], None]:
    """Training goes on, the checkpoint is reported as failed."""

    def write(path: Path) -> None:
        raise error

    return write
