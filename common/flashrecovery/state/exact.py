"""Copies of tensors, bit for bit.

Of most dtypes every copy of torch's is exact. Of a few it is not: whatever copies a bool, ``clone()`` included, writes
1 for each byte that is not 0, and there are such bytes (gloo adds bools up as bytes). Of integers of less than 8 bits
there are no copies at all. These are copied as bytes.
"""

from __future__ import annotations

import torch

_SMALL = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
_AS_BYTES = frozenset(getattr(torch, name) for name in ("bool", *_SMALL) if hasattr(torch, name))


def copied_as_bytes(dtype: torch.dtype) -> bool:
    """Whether copies of tensors of ``dtype`` have to be made of :func:`exact`."""
    return dtype in _AS_BYTES


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without autograd's history, as what torch copies bit for bit, which for some dtypes is its bytes; of
    the same shape and strides, sharing memory and version counter."""
    tensor = tensor.detach()
    return tensor.view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor


def exact_clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor``, with its strides if it is dense."""
    return exact(tensor).clone().view(tensor.dtype)


def exact_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy that is contiguous, and neither a conjugated nor a negated view."""
    return exact(tensor).resolve_conj().resolve_neg().contiguous().view(tensor.dtype)


def exact_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Write ``source`` into ``target``, which is of the same shape and dtype. Several elements of ``target`` may lie in
    one place (``expand()``)."""
    into, what = exact(target), exact(source)
    for dim, (size, stride) in enumerate(zip(into.shape, into.stride(), strict=True)):
        if stride == 0 and size > 1:
            into, what = into.narrow(dim, 0, 1), what.narrow(dim, 0, 1)
    with torch.no_grad():
        into.copy_(what)
