"""Which adapter protects a model: its wrapper decides."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from flashrecovery.adapter import TorchAdapter
from flashrecovery.errors import RegistrationError, UnsupportedError
from flashrecovery.torch_native.ddp import DDPAdapter
from flashrecovery.torch_native.fsdp2 import FSDP2Adapter
from flashrecovery.torch_native.plain import PlainAdapter


def adapter_for(model: nn.Module, optimizers: Sequence[Optimizer]) -> TorchAdapter:
    """The adapter for ``model`` as it is wrapped.

    Raises:
        RegistrationError: ``model`` is no module, or an optimizer does not belong to it.
        UnsupportedError: FSDP1, DataParallel, a wrapper below the root, a compiled model elsewhere than
            just below DistributedDataParallel; named in the message.
    """
    if not isinstance(model, nn.Module):
        raise RegistrationError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    _refuse_wrappers(model)
    if isinstance(model, DistributedDataParallel):
        return DDPAdapter(model, optimizers)
    if isinstance(model, FSDPModule):
        return FSDP2Adapter(model, optimizers)
    return PlainAdapter(model, optimizers)


def _refuse_wrappers(model: nn.Module) -> None:
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
