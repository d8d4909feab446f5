"""Module buffers: rank-only state (a BatchNorm's running statistics differ between ranks), part of the rank-local
state.

Most buffers never change (masks, rotary tables). Only those that have changed since the start travel; for the others
the rank-local state holds a digest, which proves that a replacement's script has built the same ones. The start values
are kept (one copy of all buffers), so that a survivor can also roll back to a version at which a buffer was still
unchanged.

That a buffer has changed is mostly seen by its version counter. A script that writes through ``.data`` (an average
over time in a forward pass, say) does not advance that, and to compare all buffers in every step would take too long.
So it is *learned* which ones change silently: in some steps, the first among them, all are looked at closely, and what
has been found once to have changed behind its counter's back is compared by content at every look from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import xxhash
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from flashrecovery.errors import DivergedError, RestoreError
from flashrecovery.state.digest import byte_view
from flashrecovery.state.exact import exact, exact_clone, exact_contiguous, exact_copy
from flashrecovery.worker.local_state.version_counters import BufferTable

COMPARED_BYTES = 64 << 10
"""Up to this size a buffer's content is always compared; in larger ones a change is seen by the version counter, unless
they have been found to change silently."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Two tensors of integers, of equal shape and dtype and on one device."""


@dataclass
class _Tracked:
    fqn: str
    module: nn.Module
    name: str
    base: torch.Tensor | None
    """Copy of the start value; None if there was none (a buffer registered as None)."""
    base_digest: str
    is_norm: bool
    seen: torch.Tensor | None = None
    """The tensor object last looked at; together with its version counters it tells whether the buffer has changed."""
    seen_versions: tuple[int, int] = (0, 0)
    changed: bool = False
    copy: torch.Tensor | None = None
    """Copy of the current content, made when it last changed."""
    words: tuple[int, torch.Tensor, torch.Tensor] | None = None
    """For a small buffer: its address, and views of its live and its known content as words, by which the two are
    compared."""
    silent: bool = False
    """Whether the buffer has changed without its version counter."""
    doubtful: bool = False
    """... and perhaps did so in steps before it was found."""

    @property
    def live(self) -> torch.Tensor | None:
        return self.module._buffers.get(self.name)

    def versions(self, live: torch.Tensor | None) -> tuple[int, int]:
        """BatchNorm's kernels advance no counter of the statistics, but with them the number of batches is changed."""
        batches = _version(self.module._buffers.get("num_batches_tracked")) if self.is_norm else 0
        return _version(live), batches

    def always_compared(self, live: torch.Tensor) -> bool:
        return self.silent or self.is_norm or live.nbytes <= COMPARED_BYTES

    def in_glance(self, live: torch.Tensor) -> bool:
        """Whether each :meth:`BufferTracker.mark` sees the content in any case."""
        return live.is_cpu and live.is_contiguous() and (self.is_norm or not _is_large(live))

    def to_compare(self, live: torch.Tensor) -> Pair | None:
        """The content, and what it was when it was last looked at; None if they cannot be alike."""
        if self.words is not None and self.words[0] == live.data_ptr():
            return self.words[1], self.words[2]
        known = self.copy if self.changed else self.base
        if known is None or not _alike(live, known):
            return None
        words = _integers(live), _integers(known)
        if live.is_contiguous() and not _is_large(live):
            self.words = live.data_ptr(), *words
        return words

    def note(self, live: torch.Tensor | None, versions: tuple[int, int]) -> None:
        """The buffer has changed; ``live`` is its content."""
        self.changed = True
        if live is not None and self.copy is not None and _laid_out_alike(self.copy, live):
            exact_copy(self.copy, live)  # new memory would cost several times as much as the copy
        else:
            self.copy = None if live is None else exact_clone(live)
        self.looked_at(live, versions)

    def looked_at(self, live: torch.Tensor | None, versions: tuple[int, int]) -> None:
        self.seen, self.seen_versions, self.words = live, versions, None


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
                base = None if buffer is None else exact_clone(buffer)
                fqn = f"{prefix}.{name}" if prefix else name
                self._tracked[fqn] = item = _Tracked(
                    fqn, module, name, base, digest(base), isinstance(module, _NormBase)
                )
                item.looked_at(buffer, item.versions(buffer))
        self._all = BufferTable([(i.module._buffers, i.name) for i in self._tracked.values()])
        large = [
            (i.module._buffers, i.name)
            for i in self._tracked.values()
            if i.is_norm and i.base is not None and i.base.nbytes > COMPARED_BYTES
        ]
        self._large_norms = BufferTable(large) if large else None
        self._silent: list[_Tracked] = []
        self._silent_changes = 0
        self._began = False  # what the script does before its first step says nothing of its steps
        self._closely = False
        self._looked_closely = False  # the last look was at all contents ...
        self._sure = False  # ... and so none had changed unseen when this step was yielded

    # -- what changes silently --------------------------------------------------------------------

    def look_closely(self, closely: bool) -> None:
        """A step begins. ``closely``: in it, each :meth:`mark` compares all buffers by content."""
        self._sure, self._looked_closely = self._looked_closely, False
        self._closely = closely

    @property
    def silent(self) -> list[str]:
        """The buffers that have been found to change without their version counters."""
        return sorted(item.fqn for item in self._silent)

    def adopt_silent(self, names: Iterable[str]) -> None:
        """Other ranks, or other processes of this one, have found them. Names of other buffers are passed over."""
        for name in names:
            if name in self._tracked:
                self._learn(self._tracked[name], doubtful=False)

    def _learn(self, item: _Tracked, *, doubtful: bool) -> None:
        if not item.silent:
            item.silent, item.doubtful = True, doubtful
            self._silent.append(item)

    # -- looks ------------------------------------------------------------------------------------

    def mark(self) -> int:
        """A number that changes when a buffer is changed or exchanged; much cheaper than :meth:`capture`."""
        self._silent_changes += self._refresh(self._tracked.values() if self._closely else self._silent, closely=True)
        if self._closely:
            self._looked_closely = self._sure = True
        seen = self._all.digest(COMPARED_BYTES)
        if self._silent_changes:
            seen = hash((seen, self._silent_changes))
        return seen if self._large_norms is None else hash((seen, self._large_norms.digest(1 << 62)))

    def capture(self) -> dict[str, Any]:
        """``{"changed": {fqn: tensor or None}, "digests": {fqn: digest of the unchanged}, "silent": [fqn], "sure":
        bool}``; the tensors are copies, to be read before the next look. ``sure``: no buffer can have changed
        unseen."""
        changed: dict[str, torch.Tensor | None] = {}
        digests: dict[str, str] = {}
        self._refresh(self._tracked.values(), closely=not self._began)
        for fqn, item in self._tracked.items():
            if item.changed:
                changed[fqn] = item.copy
            else:
                digests[fqn] = item.base_digest
        self._looked_closely |= not self._began
        self._began = True
        return {"changed": changed, "digests": digests, "silent": self.silent, "sure": self._looked_closely}

    def nbytes(self) -> dict[str, int]:
        """What the newest :meth:`capture` has to carry, by name."""
        return {i.fqn: i.copy.nbytes for i in self._tracked.values() if i.changed and i.copy is not None}

    def moved(self) -> list[str]:
        """The buffers whose content, at the newest :meth:`capture`, was not that of the start. (DDP writes to all of
        them when it broadcasts them.)"""
        changed = [item for item in self._tracked.values() if item.changed]
        pairs = [None if i.copy is None or i.base is None else (i.copy, i.base) for i in changed]
        alike = [pair if pair is not None and _alike(*pair) else None for pair in pairs]
        return [item.fqn for item, same in zip(changed, all_equal(alike), strict=True) if not same]

    def _refresh(self, items: Iterable[_Tracked], *, closely: bool) -> int:
        """Note what has changed since the last look. Returns of how many buffers only the content has shown it."""
        unmoved: list[tuple[_Tracked, torch.Tensor, tuple[int, int]]] = []  # by their counters
        for item in items:
            live = item.live
            versions = item.versions(live)
            if live is not item.seen or versions != item.seen_versions:
                item.note(live, versions)
            elif live is not None and (closely or item.always_compared(live)):
                unmoved.append((item, live, versions))
        equal = all_equal([item.to_compare(live) for item, live, _ in unmoved])
        silently = [found for found, same in zip(unmoved, equal, strict=True) if not same]
        for item, live, versions in silently:
            if self._began and not item.in_glance(live):
                self._learn(item, doubtful=not (self._sure or self._looked_closely))
            item.note(live, versions)
        return len(silently)

    # -- restore ----------------------------------------------------------------------------------

    def restore(self, state: dict[str, Any]) -> None:
        """Bring every buffer to ``state``.

        Raises:
            RestoreError: other buffers than when captured, or one that never changed has another start value here.
            DivergedError: one has been found since to change silently, and perhaps had before ``state`` was captured.
        """
        changed: dict[str, torch.Tensor | None] = state["changed"]
        digests: dict[str, str] = state["digests"]
        names = set(changed) | set(digests)
        if names != set(self._tracked):
            difference = sorted(names ^ set(self._tracked))
            raise RestoreError(
                f"the model's buffers differ from those of the failed process: {difference}; build the same model in "
                "every process"
            )
        self.adopt_silent(state.get("silent", ()))
        self._refresh(self._tracked.values(), closely=True)
        if not state.get("sure"):
            self._refuse_doubtful(known=state.get("silent", ()))
        for fqn, item in self._tracked.items():
            if fqn in changed:
                _write(item, changed[fqn])
                item.note(item.live, item.versions(item.live))
            else:
                if digests[fqn] != item.base_digest:
                    raise RestoreError(
                        f"buffer {fqn!r} starts with other values than in the failed process; build it with fixed seeds"
                    )
                if item.changed:
                    _write(item, item.base)
                    item.changed, item.copy = False, None
        for item in self._tracked.values():
            item.looked_at(item.live, item.versions(item.live))  # after all writes: a norm's buffers share a counter
        self._looked_closely = True

    def _refuse_doubtful(self, known: Collection[str]) -> None:
        """``known``: what was known to be silent when the state was captured that this rank goes back to."""
        doubtful = sorted(item.fqn for item in self._silent if item.doubtful and item.fqn not in known)
        if doubtful:
            raise DivergedError(
                f"the buffers {doubtful} are changed without their version counters (through `.data`), but were not "
                "in the first step. Since which step is not known, and so not what they were like in the step that the "
                "ranks have to go back to. Write to them under torch.no_grad() instead of through .data "
                "(docs/limits.md)"
            )


def all_equal(pairs: Sequence[Pair | None]) -> list[bool]:
    """For each pair, whether its two tensors are equal; None counts as different.

    The host waits once for each device that is not the CPU, however many pairs lie there: one wait a buffer is what
    makes a model of many small buffers slow.
    """
    equal = [False] * len(pairs)
    on_devices: dict[torch.device, list[tuple[int, Pair]]] = {}
    for i, pair in enumerate(pairs):
        if pair is None:
            continue
        if pair[0].is_cpu:
            equal[i] = torch.equal(*pair)
        else:
            on_devices.setdefault(pair[0].device, []).append((i, pair))
    for placed in on_devices.values():
        for (i, _), same in zip(placed, equal_on_device([pair for _, pair in placed]), strict=True):
            equal[i] = same
    return equal


def equal_on_device(pairs: Sequence[Pair]) -> list[bool]:
    """The same for tensors on one device: one flag for each pair is computed there, and all flags come to the host at
    once."""
    return cast("list[bool]", torch.stack([(one == other).all() for one, other in pairs]).tolist())


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _laid_out_alike(copy: torch.Tensor, live: torch.Tensor) -> bool:
    """Whether a copy of ``live`` can take the place of ``copy``."""
    plain = not (live.is_conj() or live.is_neg() or copy.is_conj() or copy.is_neg())
    return plain and live.layout == torch.strided and _alike(copy, live) and copy.stride() == live.stride()


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as integers: NaN is equal to itself then, and 0.0 is not to -0.0. They are compared one by
    one, so those of a large tensor are as wide as possible. Of a contiguous tensor they are a view."""
    if not _is_large(tensor):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return exact(tensor)
        if tensor.is_floating_point() and not tensor.is_neg():
            return tensor.view(_INTEGERS[tensor.itemsize])
    flat = byte_view(exact_contiguous(tensor))
    wide = flat.numel() % 8 == 0 and flat.storage_offset() % 8 == 0
    return flat.view(torch.int64) if wide else flat


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.nbytes > COMPARED_BYTES


def _version(tensor: torch.Tensor | None) -> int:
    if tensor is None or tensor.is_inference():
        return 0
    return tensor._version


def _write(item: _Tracked, value: torch.Tensor | None) -> None:
    live = item.live
    if value is None:
        item.module._buffers[item.name] = None
    elif live is not None and live.shape == value.shape and live.dtype == value.dtype:
        exact_copy(live, value)
    else:
        device = value.device if item.base is None else item.base.device
        item.module._buffers[item.name] = exact_clone(value).to(device)


def digest(tensor: torch.Tensor | None) -> str:
    """xxh3 of shape, dtype and content; "" for None."""
    if tensor is None:
        return ""
    host = exact_contiguous(tensor).cpu()
    header = f"{tuple(host.shape)}{host.dtype}".encode()
    raw = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else b""
    return xxhash.xxh3_64_hexdigest(header + bytes(raw))
