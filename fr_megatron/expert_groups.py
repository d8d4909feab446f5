"""Hyper-parameters and loss scalers where experts have their own optimizer in one layout, and none in another.

With expert parallelism Megatron steps on the experts by their own optimizer: their gradients are reduced over
fewer ranks. Without it (``expert_model_parallel_size`` 1) they are parameters like all others, in the groups of these:

======================  ==============================================================
expert parallelism      ``[[decayed, not decayed], [decayed, of experts]]``
none                    ``[[decayed, not decayed]]``
======================  ==============================================================

So a group of one layout is the one with the same multipliers in another, and where two become one they have to say the
same. Megatron's scheduler sets them alike; a script need not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flashrecovery.errors import RestoreError

ParameterGroup = Mapping[str, Any]
"""A parameter group without its parameters."""

_EXPERT = "is_expert_parallel"
_KIND = ("wd_mult", "lr_mult", "is_decoupled_lr", "default_config")
"""What tells groups apart that an optimizer has."""


def check_alike(groups: Sequence[Sequence[ParameterGroup]], scalers: Mapping[str, Any]) -> None:
    """``groups``: by optimizer. ``scalers``: the state of the loss scalers, by the optimizers' numbers.

    Raises RestoreError if the experts' are not what the others' are: in a layout in which they have one optimizer there
    would be one value for both."""
    of_all = [group for some in groups for group in some]
    for group in of_all:
        for other in _of_kind(group, of_all):
            if odd := sorted(name for name in {**group, **other} if name != _EXPERT and _differ(group, other, name)):
                name = odd[0]
                raise RestoreError(
                    f"the experts' optimizer has another {name!r} than that of the other parameters "
                    f"({other.get(name)!r} and {group.get(name)!r}), and in another layout there may be one for both"
                )
    for number, state in scalers.items():
        first = next(iter(scalers))
        if state != scalers[first]:
            raise RestoreError(
                f"the loss scalers of optimizers {first} and {number} differ ({scalers[first]!r} and {state!r}), and "
                "in another layout there may be one for both"
            )


def groups_for(
    mine: Sequence[Sequence[ParameterGroup]], saved: Sequence[Sequence[ParameterGroup]]
) -> list[list[dict[str, Any]]]:
    """The values of ``saved``, of another layout, for the groups ``mine``; both by optimizer. Where there are as many
    optimizers, they are those of the same numbers.

    Raises RestoreError if one of mine is like none of them, or like several."""
    if len(mine) == len(saved):
        return [[dict(group) for group in some] for some in saved]
    everybody = [group for some in saved for group in some]
    return [[_found(group, everybody) for group in some] for some in mine]


def scalers_for(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The states of loss scalers by the numbers of the optimizers that there are; those of another layout are alike.

    Raises RestoreError if nothing was saved."""
    if mine.keys() <= saved.keys():
        return saved
    if not saved:
        raise RestoreError("loss scalers are there, and the state of none has been kept")
    return dict.fromkeys(mine, next(iter(saved.values())))


def _found(group: ParameterGroup, everybody: Sequence[ParameterGroup]) -> dict[str, Any]:
    own = bool(group.get(_EXPERT))
    like = [other for other in everybody if _kind(other) == _kind(group)]
    found = [other for other in like if bool(other.get(_EXPERT)) == own] or like
    if len(found) != 1:
        shown = {name: group.get(name) for name in (*_KIND, _EXPERT)}
        raise RestoreError(f"parameter groups as {shown}: {len(found)} of the other layout are so; one is expected")
    return {**found[0], _EXPERT: group[_EXPERT]} if _EXPERT in group else dict(found[0])


def _of_kind(group: ParameterGroup, groups: Sequence[ParameterGroup]) -> Iterator[ParameterGroup]:
    """Those of experts that are otherwise like ``group``, which is of none."""
    for other in groups:
        if not group.get(_EXPERT) and other.get(_EXPERT) and _kind(other) == _kind(group):
            yield other


def _kind(group: ParameterGroup) -> tuple[Any, ...]:
    return tuple(group.get(name) for name in _KIND)


def _differ(one: ParameterGroup, other: ParameterGroup, name: str) -> bool:
    return name not in one or name not in other or bool(one[name] != other[name])
