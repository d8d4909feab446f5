"""Ray Train's loop in the process of a rank::

    python -m flashrecovery.ray.rank LOOP      # by the agent, with the variables of the rank's actor

``ray.train``'s functions find here what they find in an actor (``TrainFnUtils`` is Ray's own layer for that, in
ray/train/v2/_internal/execution/train_fn_utils.py); Ray itself is not connected in this process.
"""

from __future__ import annotations

import os
import pickle
import sys
from inspect import signature
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ray.air._internal import device_manager
from ray.train import Checkpoint
from ray.train.v2._internal.execution import train_fn_utils

import flashrecovery
from flashrecovery.ray.train import ABOUT_ENV, CALL_ENV, About, AskPreemption, TrainReport, unsupported
from flashrecovery.rpc.token import TOKEN_ENV


class RankUtils(train_fn_utils.LocalTrainFnUtils):  # type: ignore[misc]
    """What ``ray.train`` does in this process."""

    def __init__(self, about: About) -> None:
        super().__init__(
            about.experiment,
            world_size=dist.get_world_size(),
            world_rank=dist.get_rank(),
            local_rank=int(os.environ["LOCAL_RANK"]),
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            node_rank=int(os.environ["GROUP_RANK"]),
        )
        self._checkpoint = None if about.checkpoint is None else Checkpoint(about.checkpoint)
        self._key = (-1, 0)
        self._call = None
        if dist.get_rank() == 0:
            self._call = Client(f"\0{os.environ[CALL_ENV]}", "AF_UNIX", authkey=os.environ[TOKEN_ENV].encode())

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Any = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: Any = None,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: Any = None,
        validation: Any = False,
        **more: Any,
    ) -> None:
        """Rank 0's metrics, as Ray Train takes them, and its checkpoint; once for each step, however often that is
        attempted. Returns when Ray has taken them."""
        given = {"checkpoint_upload_fn": checkpoint_upload_fn, "validation": validation or None, **more}
        if getattr(checkpoint_upload_mode, "name", "SYNC") != "SYNC":
            given["checkpoint_upload_mode"] = checkpoint_upload_mode
        elif delete_local_checkpoint_after_upload:
            given["delete_local_checkpoint_after_upload"] = True
        for name in (name for name, value in given.items() if value is not None):
            raise unsupported(f"report({name}=...)", "its checkpoint is uploaded when report() returns, as by default")
        if checkpoint is not None and self._call is None:
            raise unsupported(
                f"report(checkpoint=...) on rank {dist.get_rank()}", "a checkpoint is taken from rank 0 only"
            )
        recovery = flashrecovery.init()
        if self._call is None or recovery.void:
            return
        version = recovery.version
        self._key = (version, self._key[1] + 1 if self._key[0] == version else 0)
        path = None if checkpoint is None else checkpoint.path
        self._call.send(TrainReport(self._key, dict(metrics), path, checkpoint_dir_name))
        self._call.recv()

    def get_checkpoint(self) -> Any:
        return self._checkpoint

    def get_preemption_info(self) -> Any:
        """As rank 0's actor knows it, on all ranks alike; to be called on all of them."""
        info = None
        if self._call is not None:
            self._call.send(AskPreemption())
            info = self._call.recv()
        return self.broadcast_from_rank_zero(info)

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        raise unsupported("ray.train.get_dataset_shard()", "read the data with a loader, in recovery.data(loader)")

    def get_all_reported_checkpoints(self, *_: Any, **__: Any) -> Any:
        raise unsupported("ray.train.get_all_reported_checkpoints()", "ask for it after fit()")

    def is_distributed(self) -> bool:
        return True

    def barrier(self) -> None:
        dist.barrier()

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        box = [data]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def main() -> None:
    """Run the loop."""
    pickled, config = pickle.loads(Path(sys.argv[1]).read_bytes())
    about: About = pickle.loads(bytes.fromhex(os.environ[ABOUT_ENV]))
    loop = pickle.loads(pickled)
    dist.init_process_group(about.backend)
    kind = about.devices[0].partition(":")[0]
    manager = device_manager.get_torch_device_manager_by_device_type(kind)
    import torch

    devices = [torch.device(device) for device in about.devices]
    manager.get_devices = lambda: devices
    device_manager._torch_device_manager = manager
    if kind != "cpu":
        manager.set_device(devices[0])
    train_fn_utils.set_train_fn_utils(RankUtils(about))
    if signature(loop).parameters:
        loop(config or {})
    else:
        loop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
