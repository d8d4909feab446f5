"""What is looked at several times in every step, through the compiled backend where it is loaded.

After a forward pass nothing of the interpreter is left in the processor's caches: a look that takes 10 us in a loop
takes 100 us in a training step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashrecovery.groups.native_build import loaded
from flashrecovery.state.exact import exact_contiguous


def glance_at_random(python_address: int, numpy_address: int) -> tuple[bytes, bytes, bytes] | None:
    """A few words of torch's, Python's and numpy's global stream each, which change whenever it is drawn from; None if
    that cannot be told so cheaply.

    The addresses are those of the Mersenne Twisters of ``random`` and ``numpy.random``; 0 if numpy's is not loaded.
    """
    module = loaded()
    if module is None:
        return None
    words: tuple[bytes, bytes, bytes] = module.glance_at_random(python_address, numpy_address)
    return words


def count_gradients(parameters: Sequence[torch.Tensor]) -> int:
    """How many of ``parameters`` have a gradient."""
    module = loaded()
    if module is None:
        return sum(p.grad is not None for p in parameters)
    return int(module.count_gradients(parameters))


def glance_at_tensors(tensors: Sequence[torch.Tensor | None], compared: int) -> int:
    """A number that changes when one of ``tensors`` is exchanged or changed.

    Args:
        compared: tensors in host memory of up to so many bytes are compared by content. Of others a change is seen by
            the version counter, which kernels that write behind autograd's back do not advance.
    """
    present = [t for t in tensors if t is not None]
    module = loaded()
    if module is not None:
        return hash((len(tensors), int(module.glance_at_tensors(present, compared))))
    looked = [
        (
            id(t),
            0 if t.is_inference() else t._version,
            exact_contiguous(t).view(-1).view(torch.uint8).numpy().tobytes()
            if t.device.type == "cpu" and t.nbytes <= compared and t.numel()
            else b"",
        )
        for t in present
    ]
    return hash((len(tensors), tuple(looked)))
