"""What must hold before the first step; everything else is refused with an error that says what to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import xxhash

from flashrecovery.errors import JobFailedError, RegistrationError
from flashrecovery.worker.consistency import all_equal
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.script_checks.wrapped_module import wrapper_of

_SETTING = "setting of model "


def check_world(rank: int, world_size: int) -> None:
    """The process group must be the world that the launcher started. Raises JobFailedError."""
    if not dist.is_initialized():
        if world_size > 1:
            raise JobFailedError(
                f"WORLD_SIZE is {world_size} but torch.distributed is not initialised; "
                "call init_process_group() before recovery.steps()"
            )
        return
    if dist.get_rank() != rank or dist.get_world_size() != world_size:
        raise JobFailedError(
            f"the process group says rank {dist.get_rank()} of {dist.get_world_size()}, the launcher rank "
            f"{rank} of {world_size}; use init_process_group() with the launcher's environment"
        )


def check_wrappers(models: Sequence[torch.nn.Module]) -> None:
    """Raises RegistrationError if one of ``models`` has been wrapped since it was registered."""
    for model in models:
        wrapper = wrapper_of(model)
        if wrapper is not model:
            raise RegistrationError(
                f"the registered {type(model).__name__} has been wrapped in a {type(wrapper).__name__} afterwards: "
                "register it after that, recovery.register(model=<the wrapper>, optimizer=optimizer)"
            )


def find_own(registry: Registry) -> tuple[list[str], list[str]]:
    """The registered objects and the settings (:meth:`.Registry.settings`) that differ between the ranks from the
    start; a collective.

    Raises:
        RegistrationError: they are too large to be each rank's own.
    """
    states, settings = registry.shared_states(), registry.settings()
    everything = [*((n, s) for n, s in states.items()), *((f"{_SETTING}{n}", s) for n, s in settings.items())]
    found = all_equal.unequal({name: xxhash.xxh3_128_hexdigest(state) for name, state in everything})
    differing = [name for name in found if not name.startswith(_SETTING)]
    size = sum(len(states[name]) for name in differing)
    most = registry.local_state_limit // 2
    if size > most:
        raise RegistrationError(
            f"the registered objects {differing} are not equal on all ranks and take {size:,} bytes; at most "
            f"{most:,} bytes of a rank's own can be kept. Make them equal, or keep large parts out "
            "of their state_dict()"
        )
    return differing, [name.removeprefix(_SETTING) for name in found if name.startswith(_SETTING)]
