"""ZeRO-1 and 2 for another number of replicas: the optimizer wrapper is rebuilt, into the object that there is.

What has a handle of the wrapper (the engine, a scheduler, the script) keeps it, and what builds it is DeepSpeed's own
code: its ``__init__``, as the engine calls it. So all that a wrapper derives from the size is what it would be in a job
that was started so: partitions, padding, buckets, offsets, gradient hooks. Its weights come from the parameters, its
master weights are rounded copies of them, and optimizer state is empty: all three are filled by the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn

from flashrecovery.adapter import give_up_state
from flashrecovery.adapter.elastic import ShardPlace


def reform(engine: Any, place: ShardPlace) -> None:
    """Build the engine's ZeRO optimizer for this ``place``, which need not be that in its groups. No communication.

    The engine's own numbers of ranks must be right already (:func:`fr_deepspeed.elastic.resize_engine`), and nothing
    may be half-finished. Settings that the script has made by methods stay.
    """
    from deepspeed.runtime import engine as module
    from deepspeed.runtime.zero import stage_1_and_2

    zero, basic = engine.optimizer, engine.basic_optimizer
    kept = {name: getattr(zero, name) for name in _KEPT}
    for partition in zero.single_partition_of_fp32_groups:
        give_up_state(basic, partition)
    zero.destroy()  # its hooks at the parameters
    for group, parameters in zip(basic.param_groups, zero.bit16_groups, strict=True):
        group["params"] = list(parameters)
    kind = module.DeepSpeedZeroOptimizer

    def build(*args: Any, **kwargs: Any) -> Any:
        kind.__init__(zero, *args, **kwargs)
        return zero

    with _trained([p for group in zero.bit16_groups for p in group]), as_member_at(place, stage_1_and_2):
        module.DeepSpeedZeroOptimizer = build
        try:
            engine._configure_zero_optimizer(basic)
        finally:
            module.DeepSpeedZeroOptimizer = kind
    vars(zero).update(kept)
    if engine._support_torch_style_backward:
        zero.register_grad_acc_post_hook(engine._backward_post_hook)


_KEPT = ("loss_scaler", "dynamic_loss_scale", "custom_loss_scaler", "external_loss_scale")
"""What a script may have a handle of, or has set by a method."""


@contextmanager
def as_member_at(place: ShardPlace, *modules: Any) -> Iterator[None]:
    """Within, these modules of DeepSpeed see every process group as one in which this rank has this ``place``. Their
    barriers return at once: DeepSpeed calls them while it makes partitions, without exchanging anything, but here each
    rank makes its partitions at its own time."""
    before = [module.dist for module in modules]
    for module in modules:
        module.dist = _AtPlace(module.dist, place)
    try:
        yield
    finally:
        for module, communication in zip(modules, before, strict=True):
            module.dist = communication


class _AtPlace(ModuleType):
    """A module as it is, but for rank, size and the barrier."""

    def __init__(self, module: ModuleType, place: ShardPlace) -> None:
        super().__init__(module.__name__)
        self._module, self._place = module, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_rank(self, group: Any = None) -> int:
        return self._place.number

    def get_world_size(self, group: Any = None) -> int:
        return self._place.ranks

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Returns at once."""


@contextmanager
def _trained(parameters: list[nn.Parameter]) -> Iterator[None]:
    """A wrapper takes in what is trained when it is made; what the script has frozen since then belongs to it all the
    same."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
