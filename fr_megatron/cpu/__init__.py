"""Stand-ins that let megatron-core run on a CPU with gloo: for development and continuous integration only.

Megatron names CUDA in hundreds of places and has no other device. With ``FR_MEGATRON_CPU=1`` in the environment,
importing :mod:`fr_megatron` (before megatron) makes these changes, in this process only; nothing on disk is edited:

================  ===================================================================================================
:mod:`.constants` string constants of megatron's compiled code: ``"cuda"`` becomes ``"cpu"``
:mod:`.device`    ``torch.cuda``: streams and events that do nothing, memory sizes of zero, one "device", whose random
                  generator is the host's; ``.cuda()`` and pinned memory change nothing
:mod:`.lm`        Megatron-LM: its assertion that there is CUDA, its compilers, a name of Python 3.12; it refuses to
                  begin without ``--use-cpu-initialization``
:mod:`.fallbacks` what megatron-core has only with Transformer Engine or a GPU: a norm under sequence parallelism,
                  attention under context parallelism, names that are bound only with Transformer Engine, NCCL's
                  division while it sums (Megatron-FSDP), memory that a stage frees while it is being sent
================  ===================================================================================================

What this cannot show: host and device streams are one, so nothing is asynchronous to the host; and all random numbers
come from one generator, where a GPU has two.
"""

from __future__ import annotations

import os
import sys

import torch

from fr_megatron.cpu import constants, device, fallbacks, lm


def install(variable: str) -> None:
    """Make all changes, which the environment's ``variable`` has asked for. Idempotent.

    Raises:
        RuntimeError: there is a CUDA device, or megatron has been imported already.
    """
    if constants.installed():
        return
    if torch.cuda.is_available():
        raise RuntimeError(f"{variable}=1 is for machines without a CUDA device, and this one has one")
    if "megatron.core" in sys.modules:
        raise RuntimeError(f"{variable}=1 comes too late: megatron.core has been imported; import fr_megatron first")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron's jit_fuser is torch.compile, which asks for a GPU
    device.install()
    constants.install()
    fallbacks.install()
    lm.install(variable)
