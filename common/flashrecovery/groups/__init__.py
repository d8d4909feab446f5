"""Process groups whose inside can be exchanged.

Frameworks keep handles to process groups everywhere: in DDP reducers, FSDP states, device meshes, caches, closures.
When a rank dies, none of these handles has to change. Every stock ``ProcessGroup`` carries a small C++ backend of ours
that forwards to a stock gloo or NCCL backend; a recovery abandons what is under way (:func:`abandon`), puts a local
stand-in inside (:func:`detach_all`), and connects again under a new generation (:func:`attach`). A replacement runs the
user's script from the top with detached groups and attaches at the same point. See ``docs/groups.md``.
"""

from flashrecovery.groups.accelerator import lost_context
from flashrecovery.groups.backends_in_use import BackendInUse, backends_in_use, what_nccl_means
from flashrecovery.groups.device_group import DeviceGroup, device_group
from flashrecovery.groups.exchange import (
    ENOUGH_FREE_BYTES,
    AttachReport,
    DrainReport,
    abandon,
    attach,
    detach_all,
    drain,
    follows_communication_error,
    is_communication_error,
    may_connect_beside_aborts,
    stuck_aborts,
    use_abort_order,
)
from flashrecovery.groups.native_build import build
from flashrecovery.groups.registry import (
    EVERYBODY,
    UNKNOWN,
    GroupProgress,
    ManagedGroup,
    OpInfo,
    abandonment_count,
    apart_from_steps,
    between_steps,
    control_group,
    create_control_group,
    failure_count,
    groups,
    install,
    last_abandonment,
    main_op,
    operation_count,
    raised_count,
    reported_errors,
    set_between_hook,
    set_detached,
    set_operation_hook,
    set_outside_hook,
    stand_in,
    stand_in_count,
    underway_ns,
    watch_outside,
)
from flashrecovery.groups.resizing import described, numbers, numbers_now, refuse_partial, resize
from flashrecovery.groups.setup_log import replay_setup_log, setup_difference, start_setup_log, take_setup_log
from flashrecovery.groups.stores import Servers
from flashrecovery.groups.torch_private import before_destruction, named_group

__all__ = [
    "ENOUGH_FREE_BYTES",
    "EVERYBODY",
    "UNKNOWN",
    "AttachReport",
    "BackendInUse",
    "DeviceGroup",
    "DrainReport",
    "GroupProgress",
    "ManagedGroup",
    "OpInfo",
    "Servers",
    "abandon",
    "abandonment_count",
    "apart_from_steps",
    "attach",
    "backends_in_use",
    "before_destruction",
    "between_steps",
    "build",
    "control_group",
    "create_control_group",
    "described",
    "detach_all",
    "device_group",
    "drain",
    "failure_count",
    "follows_communication_error",
    "groups",
    "install",
    "is_communication_error",
    "last_abandonment",
    "lost_context",
    "main_op",
    "may_connect_beside_aborts",
    "named_group",
    "numbers",
    "numbers_now",
    "operation_count",
    "raised_count",
    "refuse_partial",
    "replay_setup_log",
    "reported_errors",
    "resize",
    "set_between_hook",
    "set_detached",
    "set_operation_hook",
    "set_outside_hook",
    "setup_difference",
    "stand_in",
    "stand_in_count",
    "start_setup_log",
    "stuck_aborts",
    "take_setup_log",
    "underway_ns",
    "use_abort_order",
    "watch_outside",
    "what_nccl_means",
]
