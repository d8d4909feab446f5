"""Which wrappers around a model can be protected. Everything else is refused at start, with its name.

What DistributedDataParallel's and FSDP2's own options rule out is refused by their adapters.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flashrecovery.errors import UnsupportedError


def check(model: nn.Module) -> None:
    """Raises UnsupportedError that names the module whose wrapper cannot be protected."""
    sharded_root = isinstance(model, FSDPModule)
    for fqn, module in model.named_modules():
        where = f"the module {fqn!r}" if fqn else "the model"
        if isinstance(module, FullyShardedDataParallel):
            raise UnsupportedError(f"{where} is wrapped in FullyShardedDataParallel (FSDP1); use FSDP2 (fully_shard)")
        if isinstance(module, DataParallel):
            raise UnsupportedError(f"{where} is wrapped in DataParallel; use DistributedDataParallel")
        in_ddp = fqn == "module" and isinstance(model, DistributedDataParallel)
        if type(module).__name__ == "OptimizedModule" and not in_ddp:
            raise UnsupportedError(
                f"{where} is the result of torch.compile(model); compile in place with model.compile(), or wrap the "
                "result: DistributedDataParallel(torch.compile(model))"
            )
        if fqn and isinstance(module, DistributedDataParallel):
            raise UnsupportedError(f"{where} is a DistributedDataParallel below the root; wrap the whole model")
        if fqn and isinstance(module, FSDPModule) and not sharded_root:
            raise UnsupportedError(
                f"{where} has been given to fully_shard, the root has not; apply fully_shard to the root too"
            )
