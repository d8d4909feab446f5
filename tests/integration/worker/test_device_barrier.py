"""Steps of torch's fused optimizers that are held back, over the fake's stream: the real kernels, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from flashrecovery.groups import accelerator, native_build
from flashrecovery.worker.step import device_barrier, flag_probe
from flashrecovery.worker.step.device_barrier import DeviceBarrier
from tests.support import fake_nccl
from tests.support.fake_nccl import held_back
from tests.support.fake_nccl.held_back import FakeHold

KINDS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Adam, {"amsgrad": True}),
    (AdamW, {"lr": torch.tensor(0.25)}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1}),
    (Adagrad, {"lr": 0.1}),
]
ALL = pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", None))


@pytest.fixture(scope="module")
def module() -> Any:
    fake_nccl.build()
    return native_build.load(fake_nccl.EXTENSION)


@pytest.fixture
def device(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in held_back.PATCHED:
        monkeypatch.setattr(torch, name, getattr(torch, name))
    held_back.queue_kernels(module)
    before = accelerator.accelerator()
    accelerator.use(fake_nccl.FakeDevice(module))
    yield
    accelerator.use(before)
    module.run_ahead(False)
    assert FakeHold.holding is None, "a test has left a stream held back"


class Training:
    """One optimizer with its parameters, and a barrier."""

    def __init__(self, kind: type[Optimizer], options: dict[str, Any]) -> None:
        self.told: list[str] = []
        self.barrier = DeviceBarrier(self.told.append, on=True)
        self.parameters = [nn.Parameter(torch.linspace(-1, 1, size)) for size in (5, 70)]
        self.optimizer = kind(self.parameters, fused=True, **_own(options))
        self.optimizer.register_step_pre_hook(lambda *_: None)  # where an adapter has its own
        self.optimizer.register_step_post_hook(lambda *_: None)
        self.gradients(1.0)
        self.optimizer.step()

    def gradients(self, factor: float) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.linspace(-2, 3, parameter.numel()) * factor

    def held_back(self, *, void: bool, launch: Callable[[], object] | None = None) -> None:
        assert self.barrier.guards(self.optimizer), self.told
        self.barrier.begin(self.optimizer)
        (launch or self.optimizer.step)()
        self.barrier.wait()
        self.barrier.end(void=void)

    def content(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        return [t.detach().clone() for t in (*self.parameters, *(v for s in states for v in s.values()))]


def _own(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@ALL
def test_what_is_held_back_is_what_it_is_without(device: None, kind: type[Optimizer], options: dict[str, Any]) -> None:
    held, plain = Training(kind, options), Training(kind, options)
    for factor in (0.5, 2.0):
        held.gradients(factor)
        held.held_back(void=False)
        plain.gradients(factor)
        plain.optimizer.step()
        assert _same(held.content(), plain.content())
    assert "found_inf" not in vars(held.optimizer)
    (told,) = held.told
    assert "the device keeps its step back" in told


@ALL
@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_a_void_step_has_not_been(device: None, kind: type[Optimizer], options: dict[str, Any], factor: float) -> None:
    """Also with the gradients that an abort leaves; and the next one is as if it had never been launched."""
    held, plain = Training(kind, options), Training(kind, options)
    before = held.content()
    for _ in range(2):
        held.gradients(factor)
        held.held_back(void=True)
        assert _same(held.content(), before)
    for one in (held, plain):
        one.gradients(3.0)
    held.held_back(void=False)
    plain.optimizer.step()
    assert _same(held.content(), plain.content())


def test_nothing_happens_before_it_is_let_go(device: None) -> None:
    one = Training(AdamW, {})
    before = one.content()
    assert one.barrier.guards(one.optimizer)
    one.barrier.begin(one.optimizer)
    one.optimizer.step()
    time.sleep(0.05)
    assert _same(one.content(), before) and one.barrier.holding
    one.barrier.end(void=False)
    assert not _same(one.content(), before) and not one.barrier.holding


@pytest.mark.parametrize("void", [True, False])
@pytest.mark.parametrize("overflows", [True, False])
def test_a_step_that_overflows_anyway_is_none(device: None, void: bool, overflows: bool) -> None:
    """``found_inf`` is the script's own, as a GradScaler sets it; it finds it again as it was."""
    one = Training(AdamW, {})
    before = one.content()
    scripts = torch.tensor([1.0 if overflows else 0.0])
    one.optimizer.found_inf = scripts  # type: ignore[attr-defined]
    one.gradients(1.0)
    one.held_back(void=void)
    assert _same(one.content(), before) == (void or overflows)
    assert one.optimizer.found_inf is scripts and scripts.item() == overflows  # type: ignore[attr-defined]


def test_a_grad_scaler_skips_what_it_would_skip(device: None) -> None:
    held, plain = Training(Adam, {}), Training(Adam, {})
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) for _ in range(2)]
    for factor in (8.0, float("inf"), 8.0):
        for one, scaler in zip((held, plain), scalers, strict=True):
            one.gradients(factor)
            scaler.scale(torch.ones(()))
            if one is held:
                assert held.barrier.guards(held.optimizer)
                begin = held.optimizer.register_step_pre_hook(lambda o, *_: held.barrier.begin(o))
                end = held.optimizer.register_step_post_hook(lambda *_: held.barrier.end(void=False))
                scaler.step(one.optimizer)
                begin.remove()
                end.remove()
            else:
                scaler.step(one.optimizer)
            scaler.update()
        assert _same(held.content(), plain.content()) and scalers[0].get_scale() == scalers[1].get_scale()


def test_a_host_that_waits_for_the_stream_itself_is_let_go_and_the_step_is_done_again(
    device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kernel's launch that synchronises would: without a bound it would wait for ever."""
    monkeypatch.setattr(accelerator, "PATIENCE_S", 0.2)
    held, plain = Training(AdamW, {}), Training(AdamW, {})

    def launch() -> None:
        held.optimizer.step()
        assert FakeHold.holding is not None
        FakeHold.holding.drain()

    held.held_back(void=False, launch=launch)
    plain.optimizer.step()
    assert _same(held.content(), plain.content())
    assert not held.barrier.guards(held.optimizer), "the host waits from now on"
    assert len(held.told) == 2 and "did not come to the end of the launches" in held.told[1]


def test_a_void_step_whose_hold_is_over_is_not_done_again(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "PATIENCE_S", 0.1)
    one = Training(AdamW, {})
    before = one.content()
    one.held_back(void=True, launch=lambda: (one.optimizer.step(), time.sleep(0.3)))
    assert _same(one.content(), before)


def test_without_a_device_nothing_is_held_back() -> None:
    one = Training(AdamW, {})
    assert not one.barrier.guards(one.optimizer) and not one.told


def test_where_it_is_not_asked_for_neither(device: None) -> None:
    one = Training(AdamW, {})
    assert not DeviceBarrier(one.told.append, on=False).guards(one.optimizer) and not one.told


def test_a_first_step_makes_the_state_and_is_waited_for(device: None) -> None:
    one = Training(SGD, {"lr": 0.1, "momentum": 0.9})
    one.optimizer.state.clear()
    assert not one.barrier.guards(one.optimizer) and not one.told, "this passes, so nothing is said"
    one.optimizer.step()
    assert one.barrier.guards(one.optimizer)


class Heedless(AdamW):
    """A class of its own module, which passes for torch's; its kernels look at no flag."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found = vars(self).pop("found_inf", None)
        super().step()
        if found is not None:
            self.found_inf = found


def test_a_flag_that_is_not_honoured_is_not_trusted(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_barrier, "why_host", lambda facts: "")
    one = Training(Heedless, {})
    assert not one.barrier.guards(one.optimizer)
    assert one.told == [
        "the host waits before each step of Heedless: a step with the flag set has changed something (torch.float32, "
        "cpu)"
    ]


@pytest.mark.parametrize("broken", ["the stream does not wait", "the flag does not come to the device"])
def test_a_stream_that_is_not_held_is_found(device: None, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        def done(self) -> bool:
            return True

    if broken == "the stream does not wait":
        monkeypatch.setattr(FakeHold, "mark", lambda self: Done())
    else:
        come = FakeHold._come_to_it
        monkeypatch.setattr(
            FakeHold, "_come_to_it", lambda self, number, before: (come(self, number, before), self.flag.fill_(0))
        )
    one = Training(AdamW, {})
    assert not one.barrier.guards(one.optimizer)
    assert one.told[0].endswith(broken)


def test_other_kernels_are_tried_again(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[Optimizer] = []
    monkeypatch.setattr(flag_probe, "refusal", lambda optimizer: probes.append(optimizer) or "")
    one = Training(AdamW, {})
    for _ in range(3):
        assert one.barrier.guards(one.optimizer)
    assert len(probes) == 1
    one.optimizer.param_groups[0]["maximize"] = True
    assert one.barrier.guards(one.optimizer) and len(probes) == 2
    assert one.barrier.guards(Training(AdamW, {}).optimizer) and len(probes) == 3


def test_a_hold_ends_once_and_the_number_grows() -> None:
    """The word and the flag as the device reads them."""
    native, words = native_build.native(), torch.zeros(2, dtype=torch.int32)
    hold = native.stream_hold(words.data_ptr(), timedelta(seconds=0.1))
    for number in (1, 2):
        assert native.stream_hold_begin(hold) == number
        assert words[0] == number - 1
        assert native.stream_hold_end(hold, number == 1)
        assert not native.stream_hold_end(hold, True)
        assert words[0] == number and words[1:].view(torch.float32).item() == (number == 1)
    native.stream_hold_begin(hold)
    deadline = time.monotonic() + 5
    while words[0] != 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert words[0] == 3 and words[1:].view(torch.float32).item() == 1, "by itself, and void"
    assert not native.stream_hold_end(hold, False)
