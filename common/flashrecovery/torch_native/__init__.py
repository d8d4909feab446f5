"""Adapters for plain PyTorch: DistributedDataParallel, FSDP2 and HSDP (``fully_shard``), and bare modules."""

from __future__ import annotations

from flashrecovery.adapter import TorchAdapter
from flashrecovery.torch_native.adapter import adapter_for
from flashrecovery.torch_native.ddp import DDPAdapter
from flashrecovery.torch_native.fsdp2 import FSDP2Adapter
from flashrecovery.torch_native.plain import ModuleAdapter, PlainAdapter

__all__ = ["DDPAdapter", "FSDP2Adapter", "ModuleAdapter", "PlainAdapter", "TorchAdapter", "adapter_for"]
