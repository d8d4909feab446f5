"""Module buffers: rank-only state (a BatchNorm's running statistics differ between ranks), part of the capsule.

Most buffers never change (masks, rotary tables). Only those that have changed since the start travel; for the others
the capsule holds a digest, which proves that a replacement's script has built the same ones. The start values are kept
(one copy of all buffers), so that a survivor can also roll back to a version at which a buffer was still unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from flashrecovery.errors import RestoreError
from flashrecovery.worker.glance import glance_at_tensors

COMPARED_BYTES = 64 << 10
"""Up to this size a buffer's content is compared; in larger ones a change is seen by the version counter, which
kernels that write behind autograd's back (BatchNorm's) do not advance."""


@dataclass
class _Tracked:
    module: nn.Module
    name: str
    base: torch.Tensor | None
    """Copy of the start value; None if there was none (a buffer registered as None)."""
    base_digest: str
    seen: torch.Tensor | None
    """The tensor object last looked at; together with its version counter it tells whether the buffer has changed."""
    seen_version: int
    changed: bool = False
    copy: torch.Tensor | None = None
    """Copy of the current content, made when it last changed."""

    @property
    def live(self) -> torch.Tensor | None:
        return self.module._buffers.get(self.name)

    def silently_changed(self) -> bool:
        """Whether the content differs from what it was when last looked at, where that has to be compared."""
        live, known = self.live, self.copy if self.changed else self.base
        if live is None or known is None:
            return False
        if live.nbytes > COMPARED_BYTES and not isinstance(self.module, _NormBase):
            return False
        return not torch.equal(live, known)


class BufferTracker:
    """Captures and restores the buffers of ``root`` as far as they change."""

    def __init__(self, root: nn.Module) -> None:
        self._tracked: dict[str, _Tracked] = {}
        seen: set[int] = set()
        for prefix, module in root.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in seen:
                    continue
                if buffer is not None:
                    seen.add(id(buffer))
                base = None if buffer is None else buffer.detach().clone()
                fqn = f"{prefix}.{name}" if prefix else name
                self._tracked[fqn] = _Tracked(module, name, base, digest(base), buffer, _version(buffer))
        self._places = [(i.module._buffers, i.name) for i in self._tracked.values()]
        self._large_norms = [
            (i.module._buffers, i.name)
            for i in self._tracked.values()
            if isinstance(i.module, _NormBase) and i.base is not None and i.base.nbytes > COMPARED_BYTES
        ]

    def mark(self) -> int:
        """A number that changes when a buffer is changed or exchanged; much cheaper than :meth:`capture`."""
        seen = glance_at_tensors([buffers.get(name) for buffers, name in self._places], COMPARED_BYTES)
        if not self._large_norms:
            return seen
        return hash((seen, glance_at_tensors([buffers.get(name) for buffers, name in self._large_norms], 1 << 62)))

    def capture(self) -> dict[str, Any]:
        """``{"changed": {fqn: tensor or None}, "digests": {fqn: digest of the unchanged}}``; the tensors are copies
        that nobody writes to."""
        changed: dict[str, torch.Tensor | None] = {}
        digests: dict[str, str] = {}
        for fqn, item in self._tracked.items():
            self._refresh(item)
            if item.changed:
                changed[fqn] = item.copy
            else:
                digests[fqn] = item.base_digest
        return {"changed": changed, "digests": digests}

    def restore(self, state: dict[str, Any]) -> None:
        """Bring every buffer to ``state``.

        Raises:
            RestoreError: other buffers than when captured, or one that never changed has another start value here.
        """
        changed: dict[str, torch.Tensor | None] = state["changed"]
        digests: dict[str, str] = state["digests"]
        names = set(changed) | set(digests)
        if names != set(self._tracked):
            difference = sorted(names ^ set(self._tracked))
            raise RestoreError(f"the model's buffers differ from those of the failed process: {difference}")
        for fqn, item in self._tracked.items():
            if fqn in changed:
                _write(item, changed[fqn])
                item.changed = True
                item.copy = None if changed[fqn] is None else item.module._buffers[item.name].detach().clone()  # type: ignore[union-attr]
            else:
                if digests[fqn] != item.base_digest:
                    raise RestoreError(
                        f"buffer {fqn!r} starts with other values than in the failed process; build it with fixed seeds"
                    )
                self._refresh(item)
                if item.changed:
                    _write(item, item.base)
                    item.changed, item.copy = False, None
            item.seen, item.seen_version = item.live, _version(item.live)

    @staticmethod
    def _refresh(item: _Tracked) -> None:
        live = item.live
        version = _version(live)
        if live is item.seen and version == item.seen_version and not item.silently_changed():
            return
        item.seen, item.seen_version = live, version
        item.changed = True
        item.copy = None if live is None else live.detach().clone()


def _version(tensor: torch.Tensor | None) -> int:
    if tensor is None or tensor.is_inference():
        return 0
    return tensor._version


def _write(item: _Tracked, value: torch.Tensor | None) -> None:
    live = item.live
    if value is None:
        item.module._buffers[item.name] = None
    elif live is not None and live.shape == value.shape and live.dtype == value.dtype:
        with torch.no_grad():
            live.copy_(value)
    else:
        device = value.device if item.base is None else item.base.device
        item.module._buffers[item.name] = value.detach().clone().to(device)


def digest(tensor: torch.Tensor | None) -> str:
    """xxh3 of shape, dtype and content; "" for None."""
    if tensor is None:
        return ""
    host = tensor.detach().cpu().contiguous()
    header = f"{tuple(host.shape)}{host.dtype}".encode()
    raw = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else b""
    return xxhash.xxh3_64_hexdigest(header + bytes(raw))
