"""Which optimizers' steps the device itself may keep from being applied, and how their flags are tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flashrecovery.plan.device_barrier import (
    FOUND_INF,
    OTHER_FLAGS,
    OptimizerFacts,
    StepFacts,
    step_needs_host,
    why_host,
)
from flashrecovery.worker.local_state.own_hook import not_traced
from flashrecovery.worker.step import flag_probe
from flashrecovery.worker.step.device_barrier import facts_of, is_complete
from flashrecovery.worker.step.flag_probe import refusal

FUSED = OptimizerFacts("torch.optim.adamw.AdamW")


@pytest.mark.parametrize("kind", sorted(FOUND_INF))
def test_torchs_fused_optimizers_may_be_held_back(kind: str) -> None:
    assert why_host(replace(FUSED, kind=kind)) == ""


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "torch.optim.rmsprop.RMSprop"},
        {"kind": "mine.AdamW"},
        *({"kind": kind} for kind in OTHER_FLAGS),
        {"fused": False},
        {"differentiable": True},
        {"plain": False},
        {"devices": 2},
        {"other_hooks": 1},
        {"complete": False},
        {"compiled": True},
    ],
    ids=str,
)
def test_for_all_others_the_host_waits_with_a_reason(other: dict[str, Any]) -> None:
    assert why_host(replace(FUSED, **other))


@pytest.mark.parametrize("other", [{"communicates": True}, {"touched": True}, {"known": False}], ids=str)
def test_in_some_steps_the_host_waits_for_any_optimizer(other: dict[str, bool]) -> None:
    assert not step_needs_host(StepFacts())
    assert step_needs_host(replace(StepFacts(), **other))


def _made(kind: type[Optimizer], dtype: torch.dtype = torch.float32, **options: Any) -> Optimizer:
    """One that has taken a step. Its hooks are those that an adapter has registered."""
    parameters = [nn.Parameter(torch.ones(5, dtype=dtype)), nn.Parameter(torch.ones(3, 2, dtype=dtype))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = kind(parameters, **options)
    optimizer.step()
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


KINDS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Adam, {}),
    (Adam, {"amsgrad": True, "maximize": True}),
    (AdamW, {"lr": torch.tensor(0.0)}),
    (SGD, {"lr": 0.0}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (Adagrad, {"weight_decay": 0.1}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_their_flag_is_honoured_and_nothing_of_the_scripts_is_touched(
    kind: type[Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """The real kernels, also with a rate of 0, in which no step shows in the script's own parameters."""
    if dtype is torch.bfloat16 and options.get("momentum"):
        pytest.skip("torch 2.13 on CPUs: this momentum depends on what memory held (findings/)")
    optimizer = _made(kind, dtype, fused=True, **options)
    assert why_host(facts_of(optimizer)) == ""
    before = repr(optimizer.state_dict()), repr(optimizer.param_groups), torch.get_rng_state()
    steps: list[Optimizer] = []
    with register_optimizer_step_pre_hook(lambda one, *_: steps.append(one)):
        assert refusal(optimizer) == ""
    after = repr(optimizer.state_dict()), repr(optimizer.param_groups), torch.get_rng_state()
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])
    assert not steps, "no hook of the process has seen the probe"


@pytest.mark.parametrize("way", ["the method", "a function that calls it"])
def test_the_step_that_torch_compile_has_made_is_told_from_any_other(way: str) -> None:
    """A graph that was made while no flag was set must not be trusted to read one."""
    optimizer, reasons = _made(AdamW, fused=True), list[str]()
    own = not_traced(lambda one, *_: reasons.append(why_host(facts_of(one))))
    hook = optimizer.register_step_pre_hook(own)
    optimizer._optimizer_step_pre_hooks.pop(next(iter(optimizer._optimizer_step_pre_hooks)))  # as many as an adapter's
    optimizer.step()
    compiled = torch.compile(optimizer.step if way == "the method" else lambda: optimizer.step(), backend="eager")
    compiled()
    compiled()
    optimizer.step()
    hook.remove()
    plain = ["torch.compile" in reason for reason in reasons]
    assert plain == [False, True, True, False] and reasons[0] == "", reasons


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_parameters_of_fsdp2_are_left_to_the_host(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Linear(3, 2), mesh=mesh)
    optimizer = AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    assert why_host(facts_of(optimizer)) == "its parameters or gradients are not plain dense tensors"


@pytest.mark.parametrize("name", sorted(OTHER_FLAGS))
def test_optimizers_of_apex_and_transformer_engine_are_left_to_the_host_by_name(name: str) -> None:
    """They are told by their class, as it is imported: neither is installed here."""
    module, _, kind = name.rpartition(".")
    optimizer = _made(type(kind, (AdamW,), {"__module__": module}), fused=True)
    assert why_host(facts_of(optimizer)) == f"its flag ({OTHER_FLAGS[name]}) has not been tried with this"


class Heedless(AdamW):
    """Its flag is given to kernels that do not look at it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found, self.found_inf = getattr(self, "found_inf", None), None
        super().step()
        if found is not None:
            self.found_inf = found


class CountsOn(AdamW):
    """It does nothing but counts its steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["taken"] = self.param_groups[0].get("taken", 0) + 1


class LetsNanThrough(AdamW):
    """The gradient is added, times 0."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=0.0)


class NeverMoves(AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("step", torch.zeros(()))


class Shifts(AdamW):
    """With a flag at all, its bits are others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        flag = getattr(self, "found_inf", None)
        if flag is not None and not flag:
            self.param_groups[0]["params"][0].add_(0.5)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Heedless, "with the flag set has changed something"),
        (CountsOn, "with the flag set has changed something"),
        (LetsNanThrough, "with the flag set has changed something"),
        (NeverMoves, "with the flag unset has changed nothing"),
        (Shifts, "differs from one without a flag"),
    ],
)
def test_a_flag_that_is_not_honoured_is_found(kind: type[Optimizer], why: str) -> None:
    assert why in refusal(_made(kind, fused=True))


def test_without_fused_kernels_the_probe_fails_and_says_so() -> None:
    optimizer = _made(AdamW, foreach=True)
    assert "the probe failed: AssertionError" in refusal(optimizer)
    assert why_host(facts_of(optimizer))


def test_what_an_optimizer_is_like() -> None:
    optimizer = _made(SGD, lr=0.1, momentum=0.9, fused=True)
    assert is_complete(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    assert facts_of(optimizer).other_hooks == 1
    late = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [late]})
    assert not is_complete(optimizer), "its momentum would be made in a step that does nothing"
    late.grad = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
    assert not facts_of(optimizer).plain
    assert is_complete(_made(SGD, lr=0.1, fused=True)), "there is none"


def test_another_kernel_is_tried_again_and_another_rate_is_not() -> None:
    optimizer = _made(AdamW, fused=True)
    known = flag_probe.signature(optimizer)
    optimizer.param_groups[0]["lr"] = 0.7
    optimizer.param_groups[0]["weight_decay"] = 0.3
    assert flag_probe.signature(optimizer) == known
    optimizer.param_groups[0]["amsgrad"] = True
    assert flag_probe.signature(optimizer) != known
