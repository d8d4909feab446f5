"""Makes what stands inside a managed group, under a store prefix of one generation: stock gloo and NCCL backends, or
for the recovery's own groups one of ours that connects only those ranks that talk to each other."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

import torch

from flashrecovery.groups import torch_private
from flashrecovery.groups.peer_names import own_address
from flashrecovery.groups.torch_private import GroupRequest, HashStore, PrefixStore, Store


@dataclass
class Inners:
    """The inner backends of one group, by device type, and the gloo devices whose waits can be given up."""

    backends: list[tuple[str, Any]] = field(default_factory=list)
    devices: list[Any] = field(default_factory=list)


def make_inners(
    native: Any,
    request: GroupRequest,
    store: Store,
    timeout: datetime.timedelta,
    connect_timeout: datetime.timedelta,
    device_in_use: torch.device | None,
) -> Inners:
    """Connect this rank with its peers in the group; gloo blocks until all of them take part.

    ``timeout`` is the operations' (seconds to minutes), ``connect_timeout`` bounds the connection phase.
    ``device_in_use`` is the accelerator that this process uses, if any: a group on it is connected here and not by its
    first operation, which nothing could interrupt. A group of one rank needs neither peers nor ``store``.
    """
    if request.size == 1:
        store = HashStore()
    inners = Inners()
    made: dict[str, Any] = {}
    for device, kind in sorted(request.kinds.items()):  # "cpu" first: the last one serves tensor-less operations
        if kind not in made:
            prefixed = PrefixStore(f"{device}/", store)
            if request.sparse:
                made[kind] = native.sparse_backend(prefixed, request.rank, request.size, own_address(native), timeout)
            elif kind == "gloo":
                made[kind], devices = torch_private.gloo_backend(
                    native.address_store(prefixed, request.size),
                    request.rank,
                    request.size,
                    timeout,
                    request.ranks,
                    request.name,
                    native.shared_device,
                    lambda d: native.wrap_device(d, connect_timeout),
                )
                inners.devices.extend(devices)
            else:
                made[kind] = torch_private.nccl_backend(prefixed, request, timeout, request.device_id or device_in_use)
        inners.backends.append((device, made[kind]))
    return inners
