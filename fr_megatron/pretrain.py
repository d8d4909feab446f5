"""``megatron.training.pretrain`` with recovery on, for scripts that call it themselves; and what a Megatron-LM calls
that has the flag itself (``patches/megatron/0001``)."""

from __future__ import annotations

import os
from typing import Any

from flashrecovery.adapter import CHANNEL_ENV
from flashrecovery.errors import ConfigError
from fr_megatron.lm import hooks


def pretrain(*args: Any, **kwargs: Any) -> Any:
    """Call ``megatron.training.pretrain``, with the arguments that it takes, as if ``--flash-recovery`` were on the
    command line. The other flags, ``--flash-recovery-redundancy`` and so on, are read from there.

    Raises:
        ConfigError: the script was not started by ``flashrecovery run``, or a flag is wrong.
        UnsupportedError: a version or setting of Megatron-LM that cannot be protected, by name.
    """
    if CHANNEL_ENV not in os.environ:
        raise ConfigError(
            "fr_megatron.pretrain: start the script with `flashrecovery run` in place of torchrun; "
            "without recovery, call megatron.training.pretrain"
        )
    from megatron.training import global_vars, training

    parsed = getattr(global_vars, "_GLOBAL_ARGS", None)
    if parsed is None:
        hooks.require()
    else:  # core 0.20: the script parses its flags before it calls pretrain()
        hooks.install_loop(parsed)
    return training.pretrain(*args, **kwargs)


def protect_loop(args: Any) -> None:
    """Protect Megatron-LM's training loop. ``args``: its parsed flags. A second call changes nothing.

    Raises:
        ConfigError: the script was not started by ``flashrecovery run``, or a flag is wrong.
        UnsupportedError: a version or setting of Megatron-LM that cannot be protected, by name.
    """
    hooks.install_loop(args)
