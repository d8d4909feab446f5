"""Which adapter protects a model: its wrapper decides."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flashrecovery.adapter import TorchAdapter
from flashrecovery.errors import RegistrationError
from flashrecovery.torch_native.ddp import DDPAdapter
from flashrecovery.torch_native.fsdp2 import FSDP2Adapter
from flashrecovery.torch_native.plain import PlainAdapter
from flashrecovery.torch_native.support import check


def adapter_for(model: nn.Module, optimizers: Sequence[Optimizer]) -> TorchAdapter:
    """The adapter for ``model`` as it is wrapped.

    Raises:
        RegistrationError: ``model`` is no module, or an optimizer does not belong to it.
        UnsupportedError: FSDP1, DataParallel, a wrapper below the root, a compiled model elsewhere than
            just below DistributedDataParallel; named in the message.
    """
    if not isinstance(model, nn.Module):
        several = "; each model needs its own register(model=..., optimizer=...)"
        raise RegistrationError(
            f"model is a {type(model).__name__}, not a torch.nn.Module"
            f"{several if isinstance(model, (list, tuple, dict)) else ''}"
        )
    check(model)
    if isinstance(model, DistributedDataParallel):
        return DDPAdapter(model, optimizers)
    if isinstance(model, FSDPModule):
        return FSDP2Adapter(model, optimizers)
    return PlainAdapter(model, optimizers)
