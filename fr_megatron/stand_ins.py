"""Whether this process runs megatron on a CPU, for development (``FR_MEGATRON_CPU=1``), and the way to it.

The stand-ins for a GPU themselves, :mod:`fr_megatron.cpu`, are in the repository only: no wheel contains them.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from flashrecovery.errors import ConfigError

VARIABLE = "FR_MEGATRON_CPU"
PARTS = ("constants", "device", "fallbacks", "lm")
"""What is installed, as ``flashrecovery doctor`` lists it."""


def wanted() -> bool:
    """Whether the environment asks for the stand-ins."""
    return os.environ.get(VARIABLE) == "1"


def install() -> None:
    """Make all changes. Idempotent.

    Raises:
        ConfigError: this installation does not contain the stand-ins.
        RuntimeError: there is a CUDA device, or megatron has been imported already.
    """
    if find_spec("fr_megatron.cpu") is None:
        raise ConfigError(
            f"{VARIABLE}=1 lets megatron run without a GPU, for development, and what it needs is not part of the "
            "installed package: install from a checkout of the repository (pip install --editable .), or unset it"
        )
    from fr_megatron import cpu

    cpu.install(VARIABLE)
