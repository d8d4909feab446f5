"""A drill strikes in a model that torch compiles, or says that it has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flashrecovery.adapter.faults import in_backward, in_forward, middle_module
from flashrecovery.kinds import NoticeKind
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.worker.control.fault_injection import Faults, InjectedFault
from tests.support.adapters import AdapterStandIn


class Around(nn.Module):
    """In the place of DistributedDataParallel."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(x)
        return result


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))


def test_of_a_compiled_model_what_is_around_it_is_taken() -> None:
    plain = network()
    assert middle_module(plain) is plain[2][0]  # type: ignore[index]
    parts = network()
    parts[2].compile(backend="eager")
    assert middle_module(parts) in (parts[0], parts[3])
    whole = network()
    around = Around(whole)
    whole.compile(backend="eager")
    assert middle_module(whole, around) is around
    made: Any = torch.compile(network(), backend="eager")
    assert middle_module(made) is made


@pytest.mark.parametrize("arm", [in_forward, in_backward])
def test_it_strikes_in_a_model_that_was_compiled_in_place(arm: Callable[..., None]) -> None:
    inner = network()
    around = Around(inner)
    inner.compile(backend="eager")
    around(torch.ones(1, 2)).sum().backward()  # compiled now
    struck: list[int] = []
    arm(inner, lambda: struck.append(1), around)
    for _ in range(2):
        around(torch.ones(1, 2)).sum().backward()
    assert struck == [1]


class Deaf(AdapterStandIn):
    """An adapter whose model never comes to the place."""

    def fault_points(self) -> dict[str, Callable[[Callable[[], None]], None]]:
        return {"forward": lambda callback: None}


def test_one_that_has_not_struck_in_its_step_says_so() -> None:
    told: list[tuple[NoticeKind, str]] = []
    faults = Faults(lambda kind, text, fault: told.append((kind, text)))
    faults.arm(pb.Fault(phase="forward", step=2, fault="raise"))
    for step in (1, 2, 2):  # redone after a recovery
        faults.begin_step(step, [Deaf()])
    assert not told
    faults.begin_step(3, [Deaf()])
    faults.begin_step(4, [Deaf()])
    ((kind, text),) = told
    assert kind is NoticeKind.FAULT_IMPOSSIBLE and "'forward' has not been seen in step 2" in text


class Later(AdapterStandIn):
    """An adapter whose model comes to the place only when the test calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.strike: Callable[[], None] = lambda: None

    def fault_points(self) -> dict[str, Callable[[Callable[[], None]], None]]:
        return {"forward": lambda callback: setattr(self, "strike", callback)}


def test_one_that_strikes_in_a_later_step_names_that_step_and_no_cause_that_is_not_known() -> None:
    """As where steps are calls of a Trainer, and one is a log."""
    told: list[tuple[NoticeKind, str]] = []
    faults, adapter = Faults(lambda kind, text, fault: told.append((kind, text))), Later()
    faults.arm(pb.Fault(phase="forward", step=3, fault="raise"))
    for step in (3, 4):
        faults.begin_step(step, [adapter])
    with pytest.raises(InjectedFault):
        adapter.strike()
    (missed, why), (fired, where) = told
    assert missed is NoticeKind.FAULT_IMPOSSIBLE and "not been seen in step 3, which was a call without it" in why
    assert fired is NoticeKind.FAULT_FIRED and where == "raise at forward, step 4"


class Resetting(AdapterStandIn):
    """An adapter whose optimizer's traps go with the reset of a recovery, and whose others stay."""

    def __init__(self) -> None:
        super().__init__()
        self.traps: list[Callable[[], None]] = []

    def fault_points(self) -> dict[str, Callable[[Callable[[], None]], None]]:
        return {"optimizer": self.traps.append}


@pytest.mark.parametrize("reset", [True, False])
def test_one_of_an_attempt_that_is_done_again_strikes_then_and_once(reset: bool) -> None:
    told: list[NoticeKind] = []
    adapter, faults = Resetting(), Faults(lambda kind, text, fault: told.append(kind))
    faults.arm(pb.Fault(phase="optimizer", step=2, fault="raise"))
    faults.begin_step(2, [adapter])
    if reset:
        adapter.traps.clear()
    faults.begin_step(2, [adapter])
    with pytest.raises(InjectedFault):
        adapter.traps[0]()
    for trap in adapter.traps:
        trap()
    assert told == [NoticeKind.FAULT_FIRED]
