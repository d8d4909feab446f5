"""A step that is cut short leaves its activations in frames, variables and graphs; they go before it is done again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flashrecovery.errors import UnsupportedError
from flashrecovery.worker.step import activation_release


class Stop(RuntimeError):
    """The stop of a step, wherever it strikes."""


class Kept:
    """Remembers, weakly, what a model has computed."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> None:
        self._seen.append(weakref.ref(tensor))

    @property
    def alive(self) -> int:
        assert self._seen
        return sum(t() is not None for t in self._seen)


KEPT = Kept()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        saved = x.exp()
        KEPT.add(saved)
        ctx.save_for_backward(saved)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(Doubled.apply(x)))  # tanh saves its result
            KEPT.add(x)
        return x


@pytest.fixture(autouse=True)
def _collected_by_hand() -> Iterator[None]:
    """Nothing may depend on the garbage collector, which does not know how full a GPU is."""
    global KEPT
    KEPT = Kept()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@contextmanager
def cut_short(left: Callable[[], int]) -> Iterator[None]:
    """As ``with step:``: the error is still on its way when the attempt's memory is let go. ``left()`` says how many
    tensors are there afterwards; none may be, and some must have been."""
    since = activation_release.sequence_number()
    try:
        yield
    except Stop as error:
        assert left() > 0, "nothing was held, so this proves nothing"
        activation_release.release(error, since)
        assert left() == 0


def _strike_in_gradient(parameter: torch.Tensor) -> None:
    def strike(grad: torch.Tensor) -> None:
        raise Stop

    parameter.register_hook(strike)


def test_a_loss_whose_backward_pass_was_not_made() -> None:
    net = Net()
    with cut_short(lambda: KEPT.alive):
        loss = net(torch.randn(2, 8)).square().mean()
        raise Stop
    assert loss.requires_grad and loss.item() >= 0  # the script may still look at it below the block


@pytest.mark.parametrize("layer", [0, -1])
def test_a_backward_pass_that_was_cut_short(layer: int) -> None:
    """Near its end and its beginning, below a function that has activations in its own variables."""
    net = Net()
    _strike_in_gradient(net.layers[layer].weight)
    with cut_short(lambda: KEPT.alive):
        loss = net(torch.randn(2, 8)).square().mean()
        _with_variables(loss)


def _with_variables(loss: torch.Tensor) -> None:
    activations = torch.randn(100) * loss.detach()
    KEPT.add(activations)
    loss.backward()


def test_views_containers_and_what_a_model_returns() -> None:
    net = Net()
    with cut_short(lambda: KEPT.alive):
        view = net(torch.randn(2, 8))[:, 1:].reshape(-1)[2:]
        assert view._is_view()
        raise Stop
    with cut_short(lambda: KEPT.alive):
        outputs = {"losses": [(net(torch.randn(2, 8)).sum(),)]}
        raise Stop
    assert len(outputs) == 1


def test_a_recomputed_forward_pass() -> None:
    net = Net()
    with cut_short(lambda: KEPT.alive):
        loss = net(checkpoint(net, torch.randn(2, 8, requires_grad=True), use_reentrant=False)).sum()
        raise Stop
    assert loss.requires_grad


def test_an_error_that_came_of_another_one() -> None:
    net = Net()
    with cut_short(lambda: KEPT.alive):
        try:
            stand(net)
        except ValueError as error:
            raise Stop from error


def stand(net: nn.Module) -> None:
    activations = net(torch.randn(2, 8))
    raise ValueError(tuple(activations.shape))


def test_a_graph_that_is_older_than_the_step_stays_whole() -> None:
    """A script may build one before its loop, and use it in every step."""
    scores = nn.Parameter(torch.randn(8))
    mask = torch.sigmoid(scores)
    want = torch.autograd.grad((mask * 3).sum(), scores, retain_graph=True)
    with cut_short(lambda: KEPT.alive):
        loss = (Doubled.apply(mask * 3) * mask).sum()
        raise Stop
    assert torch.equal(torch.autograd.grad((mask * 3).sum(), scores)[0], want[0])
    with pytest.raises(UnsupportedError, match="an attempt of a step that was given up"):
        loss.backward()


def test_nothing_is_kept_by_looking() -> None:
    """To look at the variables of a running function makes Python keep a copy of them (before 3.13)."""
    net, logits = Net(), Kept()
    with cut_short(lambda: KEPT.alive):
        out = net(torch.randn(2, 8)) * 2
        logits.add(out)
        raise Stop
    assert logits.alive == 1
    out = torch.zeros(3)
    assert logits.alive == 0 and out.sum() == 0


def test_what_a_script_has_got_from_locals_stays() -> None:
    net, rate = Net(), 0.5
    settings = locals()
    with cut_short(lambda: KEPT.alive):
        loss = net(torch.randn(2, 8)).sum() * rate
        raise Stop
    assert settings["rate"] == 0.5 and settings["net"] is net and loss.requires_grad


def test_a_generator_goes_on_that_an_error_has_passed_through() -> None:
    """It has caught the error, which someone has kept and raises the stop from."""
    errors: list[BaseException] = []

    def samples() -> Iterator[int]:
        for i in range(3):
            try:
                _fails()
            except ValueError as error:
                errors.append(error)
            yield i

    source, net = samples(), Net()
    assert next(source) == 0
    with cut_short(lambda: KEPT.alive):
        loss = net(torch.randn(2, 8)).sum()
        raise Stop from errors[0]
    assert list(source) == [1, 2] and loss.requires_grad


def _fails() -> None:
    raise ValueError


def test_the_variables_of_a_module_are_not_touched() -> None:
    source = "with cut_short(left):\n    loss = net(torch.randn(2, 8)).sum()\n    raise Stop\nafter = loss.item()\n"
    names = {"cut_short": cut_short, "left": lambda: KEPT.alive, "net": Net(), "torch": torch, "Stop": Stop}
    exec(compile(source, "script", "exec"), names)
    assert {"after", "loss", "net"} <= names.keys()


def test_what_a_script_registers_and_its_data_are_nobodys_graph() -> None:
    """Tensors without a graph, and objects that only look like containers."""
    since = activation_release.sequence_number()
    thing = SimpleNamespace(loss=torch.ones(3, requires_grad=True) * 2)
    plain = torch.arange(3)
    try:
        raise Stop
    except Stop as error:
        assert activation_release.release(error, since) == 0
    assert thing.loss.sum().backward() is None and plain.sum() == 3
