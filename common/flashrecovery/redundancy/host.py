"""What writing a checkpoint needs of this host: copies in its memory."""

from __future__ import annotations

from typing import Any

import torch


class HostCopies:
    """Copies tensors to host memory, the same tensor only once."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or key not in self._made:
            on_host = tensor.device.type == "cpu"
            self._made[key] = tensor.clone(memory_format=torch.contiguous_format) if on_host else tensor.cpu()
        return self._made[key]
