"""Page-locked host memory: what a GPU copies into directly, and beside its kernels.

torch's own ``pin_memory`` cannot be shared with another process, rounds sizes up to powers of two (pytorch#95823), and
keeps what is freed. So memory that exists already is registered with CUDA instead.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch


def pin(owner: object, memory: torch.Tensor) -> bool:
    """Page-lock ``memory`` (contiguous, in host memory) for as long as ``owner`` lives. False, with a warning, if CUDA
    refuses: copies are then right, and slower."""
    cudart: Any = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code != 0:
        text = f"cudaHostRegister of {memory.nbytes} bytes failed with error {code}: copies of the state are slower"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return False
    # At the end of the process the driver goes first, and takes the registration with it.
    weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return True
