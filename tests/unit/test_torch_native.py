"""The torch_native adapters in one process: shards, hyper-parameters, buffers, moments, refusals."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.optim import SGD, Adam, AdamW, Optimizer

from flashrecovery.adapter import fsdp2_state
from flashrecovery.adapter.base import _LOOKS, TorchAdapter
from flashrecovery.adapter.buffers import COMPARED_BYTES
from flashrecovery.adapter.modes import ModeTracker
from flashrecovery.adapter.shards import FixedShard
from flashrecovery.errors import RegistrationError, RestoreError, StepInterrupted, UnsupportedError
from flashrecovery.state import codec
from flashrecovery.state.spec import ShardSpec
from flashrecovery.torch_native import DDPAdapter, FSDP2Adapter, ModuleAdapter, PlainAdapter, adapter_for, ddp_reducer
from flashrecovery.worker.data.forwards import Forwards
from flashrecovery.worker.local_state.own_hook import OwnHook


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 3)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("mask", torch.ones(2, 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)) + self.tied(x)
        return self.second(hidden)


class Recorder:
    def __init__(self) -> None:
        self.moments: list[str] = []
        self.interrupt = False

    def sealed(self, *, recheck: bool = False) -> None:
        self.moments.append("sealed")

    def evaluated(self) -> None:
        self.moments.append("evaluated")

    def synchronising(self) -> None:
        self.moments.append("synchronising")

    def mutating(self, by: Optimizer | None = None) -> None:
        if self.interrupt:
            raise StepInterrupted
        self.moments.append("mutating")

    def launched(self) -> None:
        """It has been."""

    def mutated(self) -> None:
        self.moments.append("mutated")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.randn(5, 3)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def content(adapter: TorchAdapter) -> list[Any]:
    return [(s.name, s.spec(), [t.clone() for t in s.tensors().values()]) for s in adapter.shards()]


def copy_into(adapter: TorchAdapter, saved: list[Any]) -> None:
    for shard, (name, spec, tensors) in zip(adapter.shards(), saved, strict=True):
        assert shard.name == name
        for live, tensor in zip(shard.allocate(spec).values(), tensors, strict=True):
            live.copy_(tensor)


def same(a: list[Any], b: list[Any]) -> bool:
    return all(
        x[:2] == y[:2] and all(torch.equal(t, u) for t, u in zip(x[2], y[2], strict=True))
        for x, y in zip(a, b, strict=True)
    )


# -- shards -----------------------------------------------------------------------------------------


def test_a_tied_parameter_is_one_shard_and_tensors_are_live() -> None:
    model = Net()
    optimizer = Adam(model.parameters())
    adapter = adapter_for(model, [optimizer])
    assert [s.name for s in adapter.shards()] == [f"param/{n}" for n, _ in model.named_parameters()]
    assert all(s.holders == (0,) for s in adapter.shards())
    first = adapter.shards()[0]
    assert list(first.tensors()) == ["param"] and first.values() == {}
    train(model, optimizer)
    assert list(first.tensors()) == ["param", "state/step", "state/exp_avg", "state/exp_avg_sq"]
    for tensor in first.tensors().values():
        tensor.zero_()
    assert not model.first.weight.any()
    assert optimizer.state[model.first.weight]["step"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Adam(p, amsgrad=True),
        lambda p: AdamW(p, fused=True),
        lambda p: SGD(p, lr=0.1, momentum=0.9),
        lambda p: SGD(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Rprop(p),
    ],
)
def test_a_fresh_optimizer_adopts_state_and_loses_it_again(make: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model.parameters())
    adapter = adapter_for(model, [optimizer])
    start = content(adapter)
    train(model, optimizer)
    train(model, optimizer)
    later = content(adapter)

    fresh = Net()
    fresh_optimizer = make(fresh.parameters())
    fresh_adapter = adapter_for(fresh, [fresh_optimizer])
    copy_into(fresh_adapter, later)
    assert same(content(fresh_adapter), later)
    fresh.load_state_dict({**fresh.state_dict(), **{k: v for k, v in model.state_dict().items() if "norm." in k}})
    torch.manual_seed(1)
    train(model, optimizer)
    torch.manual_seed(1)
    train(fresh, fresh_optimizer)
    assert same(content(fresh_adapter), content(adapter))

    copy_into(adapter, start)  # back to version 0: no state
    assert same(content(adapter), start)
    assert [list(s.tensors()) for s in adapter.shards()] == [list(t[1].tensors) for t in start]


class Counting(Adam):
    """Keeps plain values among its tensors."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
        return super().step(closure)

    def _init_group(self, group: Any, *lists: Any) -> Any:
        for p in group["params"]:
            if p.grad is not None and "step" not in self.state[p]:
                self.state[p] |= {
                    "step": torch.tensor(0.0),
                    "scale": 1.5,
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        return super()._init_group(group, *lists)


def entries(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """What a script sees that goes over ``optimizer.state``."""
    names = {p: name for name, p in model.named_parameters()}
    return [(names[p], list(state)) for p, state in optimizer.state.items()]


def test_a_fresh_optimizers_state_has_the_order_of_its_source() -> None:
    """A parameter that had its first gradient late stands at the end, in whatever order the shards arrive."""
    model, fresh = Net(), Net()
    optimizer, fresh_optimizer = Counting(model.parameters()), Counting(fresh.parameters())
    adapter, fresh_adapter = adapter_for(model, [optimizer]), adapter_for(fresh, [fresh_optimizer])
    late = model.first.weight
    late.requires_grad_(False)
    train(model, optimizer)
    content(adapter)  # as in every step
    late.requires_grad_(True)
    train(model, optimizer)
    saved = {name: (spec, tensors) for name, spec, tensors in content(adapter)}
    found = entries(model, optimizer)
    assert found[-1] == ("first.weight", ["count", "step", "scale", "exp_avg", "exp_avg_sq"])

    for shard in reversed(fresh_adapter.shards()):
        spec, tensors = saved[shard.name]
        for live, tensor in zip(shard.allocate(spec).values(), tensors, strict=True):
            live.data.copy_(tensor)
        assert shard.spec() == spec
    fresh_adapter.restore_common(adapter.capture_common())
    assert entries(fresh, fresh_optimizer) == found
    assert same(content(fresh_adapter), content(adapter))


def test_the_order_of_state_after_a_parameter_has_lost_it() -> None:
    """Back to a version before its first gradient, and on."""
    model = Net()
    optimizer = Adam(model.parameters())
    adapter = adapter_for(model, [optimizer])
    first = model.first.weight
    first.requires_grad_(False)
    train(model, optimizer)
    before = content(adapter)
    first.requires_grad_(True)
    for _ in range(2):
        train(model, optimizer)
        later = entries(model, optimizer)
        assert later[-1][0] == "first.weight"
        copy_into(adapter, before)
        adapter.restore_common(adapter.capture_common())
        assert entries(model, optimizer) == later[:-1]
    train(model, optimizer)
    loaded = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict({**loaded, "state": dict(reversed(loaded["state"].items()))})
    other = entries(model, optimizer)
    assert other[0][0] == "first.weight"
    copy_into(adapter, content(adapter))
    adapter.restore_common(adapter.capture_common())
    assert entries(model, optimizer) == other


def test_several_optimizers_and_parameters_without_one() -> None:
    model = Net()
    optimizers = [Adam(model.first.parameters()), SGD([*model.second.parameters()], lr=0.1, momentum=0.9)]
    adapter = adapter_for(model, optimizers)
    train(model, *optimizers)
    keys = {s.name: list(s.tensors()) for s in adapter.shards()}
    assert keys["param/second.bias"] == ["param", "state1/momentum_buffer"]
    assert keys["param/norm.weight"] == ["param"]
    assert keys["param/first.bias"][1:] == ["state/step", "state/exp_avg", "state/exp_avg_sq"]


def test_a_shard_of_another_shape_or_optimizer_is_refused() -> None:
    model = Net()
    adapter = adapter_for(model, [])
    spec = adapter.shards()[0].spec()
    with pytest.raises(RestoreError, match=r"\(4, 3\).*\(4,\)"):
        adapter.shards()[0].allocate(adapter.shards()[1].spec())
    with pytest.raises(RestoreError, match=r"no registered optimizer.*state/exp_avg"):
        adapter.shards()[0].allocate(ShardSpec({**spec.tensors, "state/exp_avg": spec.tensors["param"]}))


# -- hyper-parameters and gradients -----------------------------------------------------------------


def test_hyperparameters_come_back_exactly() -> None:
    model = Net()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.1), betas=(0.8, 0.9))
    rate = optimizer.param_groups[0]["lr"]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    adapter = adapter_for(model, [optimizer])
    saved = codec.dumps(adapter.capture_common())
    before = repr(optimizer.param_groups[0])
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    optimizer.param_groups[0].update(betas=(0.5, 0.5), extra=3)
    adapter.restore_common(codec.loads(saved))
    assert repr(optimizer.param_groups[0]) == before
    assert optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_there_or_not_as_at_the_boundary(set_to_none: bool) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    adapter = adapter_for(model, [optimizer])
    model(torch.randn(4, 3)).sum().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    state = adapter.capture_common()
    model(torch.randn(4, 3)).sum().backward()
    adapter.reset()
    adapter.restore_common(state)
    for parameter in model.parameters():
        assert parameter.grad is None if set_to_none else not parameter.grad.any()  # type: ignore[union-attr]


def test_another_number_of_groups_is_refused() -> None:
    model = Net()
    one = adapter_for(model, [SGD(model.parameters(), lr=0.1)])
    two = adapter_for(
        model, [SGD([{"params": model.first.parameters()}, {"params": model.second.parameters()}], lr=0.1)]
    )
    with pytest.raises(RestoreError, match="1 parameter groups, it has 2"):
        two.restore_common(one.capture_common())


# -- buffers ----------------------------------------------------------------------------------------


def test_only_changed_buffers_travel_and_all_come_back() -> None:
    model = Net()
    model.register_buffer("large", torch.zeros(COMPARED_BYTES))
    adapter = adapter_for(model, [])
    start = codec.dumps(adapter.capture_rank())
    model(torch.randn(5, 3))
    first = codec.dumps(adapter.capture_rank())
    changed = codec.loads(first)["buffers"]["changed"]
    assert set(changed) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    mean = model.norm.running_mean.clone()
    model(torch.randn(5, 3))
    model.large[5] = 1.0
    model.mask = torch.zeros(3)  # replaced, with another shape
    later = codec.dumps(adapter.capture_rank())
    assert {"large", "mask"} <= set(codec.loads(later)["buffers"]["changed"])

    adapter.restore_rank(codec.loads(first))
    assert torch.equal(model.norm.running_mean, mean)
    assert not model.large.any() and model.mask.shape == (2, 2)
    assert codec.dumps(adapter.capture_rank()) == first
    adapter.restore_rank(codec.loads(later))
    assert model.large.any() and model.mask.shape == (3,)
    adapter.restore_rank(codec.loads(start))
    assert codec.dumps(adapter.capture_rank()) == start
    assert torch.equal(model.norm.running_mean, torch.zeros(4))


def test_a_buffer_with_another_start_value_is_refused() -> None:
    adapter = adapter_for(Net(), [])
    other = Net()
    other.mask.fill_(3)
    with pytest.raises(RestoreError, match="'mask' starts with other values"):
        adapter_for(other, []).restore_rank(adapter.capture_rank())


def test_the_mode_of_every_module_comes_back() -> None:
    model = Net()
    model.norm.eval()
    adapter = adapter_for(model, [])
    state = codec.loads(codec.dumps(adapter.capture_rank()))
    model.eval()
    adapter.restore_rank(state)
    assert model.training and model.first.training and not model.norm.training
    with pytest.raises(RestoreError, match="modules"):
        ModeTracker(nn.Linear(1, 1)).restore(state["modes"])


def test_what_a_script_puts_into_the_model_later_is_named_where_it_is_missing() -> None:
    model, other = Net(), Net()
    trackers = [ModeTracker(each) for each in (model, other)]
    mark = trackers[0].mark()
    assert "changed" not in trackers[0].capture()
    prune.l1_unstructured(model.first, "weight", amount=0.5)
    model.norm = nn.LayerNorm(3)  # type: ignore[assignment]
    assert trackers[0].mark() != mark
    state = codec.loads(codec.dumps(trackers[0].capture()))
    trackers[0].restore(state)
    with pytest.raises(RestoreError, match=r"module 'norm', parameter 'first\.weight_orig'; a replacement has not"):
        trackers[1].restore(state)


def test_what_a_script_takes_out_of_the_model_later_is_named_where_it_still_is() -> None:
    """peft's ``delete_adapter``; a head that is used for the first steps only."""
    model, other = Net(), Net()
    for each in (model, other):
        each.head = nn.Linear(2, 2)  # type: ignore[assignment]
    trackers = [ModeTracker(each) for each in (model, other)]
    mark = trackers[0].mark()
    del model.head
    assert trackers[0].mark() != mark
    state = codec.loads(codec.dumps(trackers[0].capture()))
    trackers[0].restore(state)
    with pytest.raises(RestoreError, match=r"taken out of the model .*module 'head', parameter 'head\.bias'"):
        trackers[1].restore(state)
    del other.head  # the replacement has come to that line, too
    trackers[1].restore(state)


# -- moments ----------------------------------------------------------------------------------------


def test_a_watched_model_is_copied_and_saved_like_any_other() -> None:
    """As by a script that keeps the best one so far. What comes of it is watched by no one, and needs nothing of
    ours."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    optimizer = SGD(model.parameters(), lr=0.1)
    adapter, recorder = adapter_for(model, [optimizer]), Recorder()
    recorder.lock = threading.Lock()  # type: ignore[attr-defined] - real ones have some
    adapter.watch(recorder)
    Forwards([model])
    saved = pickle.dumps(model)
    assert b"flashrecovery" not in saved
    for other in (copy.deepcopy(model), pickle.loads(saved), copy.deepcopy(copy.deepcopy(model))):
        other(torch.ones(1, 3)).sum().backward()
        assert recorder.moments == [] and all(
            torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
        )
    model(torch.ones(1, 3)).sum().backward()
    assert recorder.moments == ["sealed", "synchronising", "sealed"]


def test_the_end_of_a_forward_pass_is_not_compiled_with_it() -> None:
    """As with accelerate, which compiles the wrapper with what is in it."""
    model = Net()
    adapter_for(model, [SGD(model.parameters(), lr=0.1)]).watch(Recorder())
    (hook,) = (one for one in model._forward_hooks.values() if isinstance(one, OwnHook))
    assert hook._function._torchdynamo_disable  # type: ignore[attr-defined]


def test_moments_of_a_step() -> None:
    model = Net()
    optimizers = [SGD(model.first.parameters(), lr=0.1), SGD(model.second.parameters(), lr=0.1)]
    adapter = adapter_for(model, optimizers)
    recorder = Recorder()
    adapter.watch(recorder)
    with torch.no_grad():
        model(torch.randn(2, 3))
    assert recorder.moments == ["evaluated"]
    recorder.moments.clear()
    train(model, *optimizers)
    forward = ["sealed", "synchronising", "sealed"]
    assert recorder.moments == [*forward, "mutating", "mutating", "mutated"]
    recorder.moments.clear()
    train(model, optimizers[0])  # one optimizer alone: not done, the end of the step says so
    train(model, *optimizers)
    assert recorder.moments == [*forward, "mutating", *forward, "mutating", "mutating", "mutated"]


@pytest.mark.parametrize("hooks", [{}, None])
def test_a_wrapper_of_an_optimizer_that_is_made_without_its_base(hooks: dict[int, Any] | None) -> None:
    """As Lookahead of other projects: it has plain dictionaries of hooks, or none."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, {}, {}  # type: ignore[assignment]
            if hooks is not None:
                self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = dict(hooks), dict(hooks)  # type: ignore[assignment]

    model = Net()
    wrapper = Wrapper(SGD(model.parameters(), lr=0.1))
    adapter, recorder = adapter_for(model, [wrapper]), Recorder()
    adapter.watch(recorder)
    assert list(adapter.stepped_by_others()) == [wrapper.inner]


class ReturnsParameter(nn.Module):
    """Its own parameter beside a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter]:
        return self.linear(x), self.linear.bias


def test_a_parameter_that_is_returned_gets_one_hook() -> None:
    """It outlives the step, unlike other outputs, and after a hundred steps it would have a hundred."""
    model = ReturnsParameter()
    optimizer = SGD(model.parameters(), lr=0.1)
    adapter, recorder = adapter_for(model, [optimizer]), Recorder()
    adapter.watch(recorder)
    moments = []
    for _ in range(100):
        recorder.moments.clear()
        output, bias = model(torch.ones(2, 3))
        (output.sum() + bias.square().sum()).backward()
        del output
        optimizer.step()
        moments.append(list(recorder.moments))
    assert moments[0].count("sealed") == 3 and moments == [moments[0]] * 100
    assert len(model.linear.bias._backward_hooks) == 1  # type: ignore[attr-defined]
    assert len(adapter._hooked) == 1  # what was new is gone


def test_of_several_micro_batches_only_the_last_one_synchronises(one_rank: None) -> None:
    """The copies of a version are waited for before that, and not after the first forward pass."""
    model = DistributedDataParallel(Net())
    adapter = adapter_for(model, [SGD(model.parameters(), lr=0.1)])
    recorder = Recorder()
    adapter.watch(recorder)
    with model.no_sync():
        model(torch.randn(2, 3)).sum().backward()
    assert recorder.moments == ["sealed", "sealed"]
    recorder.moments.clear()
    model(torch.randn(2, 3)).sum().backward()
    assert recorder.moments == ["sealed", "synchronising", "sealed"]


class Units(nn.Module):
    """Three units of FSDP2. ``skips``: the first one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (fully_shard(nn.Linear(3, 3)) for _ in range(3))
        fully_shard(self)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.third(self.second(x if self.skips else self.first(x)))
        return out


def units(monkeypatch: pytest.MonkeyPatch) -> tuple[Units, Callable[[], list[str]]]:
    """The model, and a backward pass of it that gives the order in which its units reduce, with "synchronising"."""
    model, recorder = Units(), Recorder()
    adapter = adapter_for(model, [SGD(model.parameters(), lr=0.1)])
    reduce = _fsdp_param_group.foreach_reduce

    def noted(parameters: list[Any], *arguments: Any, **named: Any) -> Any:
        recorder.moments.append(str(parameters[0]._param_fqn).partition(".")[0])
        return reduce(parameters, *arguments, **named)

    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", noted)
    adapter.watch(recorder)

    def run() -> list[str]:
        recorder.moments.clear()
        model(torch.randn(2, 3)).sum().backward()
        return [moment for moment in recorder.moments if moment != "sealed"]

    return model, run


def test_with_fsdp2_copies_are_waited_for_before_the_last_unit_reduces(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, run = units(monkeypatch)
    assert run() == ["third", "second", "synchronising", "first"]
    model.first.requires_grad_(False)
    assert run() == ["third", "synchronising", "second"], "a frozen one hands over nothing"
    model.first.requires_grad_(True)
    model.set_is_last_backward(False)
    assert run() == ["third", "second", "first"], "another pass follows"
    model.set_is_last_backward(True)
    model.set_requires_gradient_sync(False)
    assert run() == []


def test_the_unit_that_is_waited_for_is_given_back_as_it_was(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library's wrapper is called as before, whichever unit it is."""
    model, run = units(monkeypatch)
    first, second = list(fsdp2_state.groups(model))[:2]
    assert "post_backward" in vars(first) and "post_backward" not in vars(second)
    calls: list[str] = []
    original = second.post_backward
    second.post_backward = theirs = lambda *arguments: (calls.append("theirs"), original(*arguments))
    for frozen, there in ((True, False), (False, True)):
        model.first.requires_grad_(not frozen)
        run()
        assert (vars(second)["post_backward"] is theirs) is there and ("post_backward" in vars(first)) is there
    assert calls == ["theirs"] * 2


SWITCHES: dict[str, Callable[[Any], object]] = {
    "gradient sync": lambda model: model.set_requires_gradient_sync(False),
    "all-reduce": lambda model: model.set_requires_all_reduce(False),
    "reshard after backward": lambda model: model.set_reshard_after_backward(False),
    "reshard after forward": lambda model: model.set_reshard_after_forward(False),
    "of the root": lambda model: model.set_reshard_after_forward(True, recurse=False),
    "of one unit": lambda model: model.second.set_reshard_after_forward(False),
    "unshard in backward": lambda model: model.second.set_unshard_in_backward(False),
    "divide factor": lambda model: model.set_gradient_divide_factor(3.0),
    "sum": lambda model: model.second.set_force_sum_reduction_for_comms(True),
    "last backward": lambda model: model.set_is_last_backward(False),
}


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("switch", SWITCHES)
def test_what_a_step_switches_in_fsdp2_is_switched_back(switch: str, forward: bool, one_rank: None) -> None:
    """Libraries switch it back at the end of their part of a step alone, to which an interrupted one does not come."""

    def made() -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        model.second = fully_shard(model[1])
        return fully_shard(model)

    def flags(model: Any) -> list[Any]:
        every = fsdp2_state.states(model)
        names = ("post_forward_mesh_info", *fsdp2_state._GROUP_FLAGS)
        of_groups = [[bool(getattr(group, name)) for name in names] for group in fsdp2_state.groups(model)]
        return [of_groups, [s._auto_reshard_after_forward for s in every], every[0]._state_ctx.is_last_backward]

    model, other = made(), made()
    adapter = adapter_for(model, [SGD(model.parameters(), lr=0.1)])
    if forward:
        model(torch.randn(2, 3)).sum().backward()
    before, saved = flags(model), codec.loads(codec.dumps(adapter.capture_common()))
    assert adapter.capture_common()["fsdp"] == saved["fsdp"]
    SWITCHES[switch](model)
    assert flags(model) != before
    assert adapter.capture_common()["fsdp"] == fsdp2_state.capture_flags(model) != saved["fsdp"]
    adapter.restore_common(saved)
    assert flags(model) == before
    if not forward:  # a survivor has come to its first forward pass, and goes back to before it
        model(torch.randn(2, 3)).sum().backward()
        SWITCHES[switch](model)
        adapter.restore_common(saved)
        other(torch.randn(2, 3)).sum().backward()
        assert flags(model) == flags(other), "as in a process that comes to it now"


def test_what_an_evaluation_before_the_first_step_leaves_of_fsdp2_is_not_kept(one_rank: None) -> None:
    """In a replacement, which makes it again: else it would train with the root's parameters of then, and gather other
    ones ahead than the ranks that have not."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fully_shard(model[0])
    root: Any = fully_shard(model)
    adapter = adapter_for(model, [SGD(model.parameters(), lr=0.1)])
    saved = codec.loads(codec.dumps(adapter.capture_common()))
    with torch.no_grad():
        model(torch.randn(2, 3))
    context = root._get_fsdp_state()._comm_ctx
    groups = [*fsdp2_state.groups(root)]
    assert context.post_forward_order and any(group.is_unsharded for group in groups)
    adapter.restore_common(saved)
    assert not context.post_forward_order and not any(group._post_forward_indices for group in groups)
    assert all(group.is_sharded for group in groups)


def test_a_unit_without_gradients_is_no_sign_that_a_contribution_follows(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the core's barrier before the mutation takes its place."""
    model, run = units(monkeypatch)
    model.skips = True
    assert run() == ["third", "second"]


def test_an_interrupt_leaves_the_parameters_alone() -> None:
    model = Net()
    optimizer = Adam(model.parameters())
    adapter = adapter_for(model, [optimizer])
    recorder = Recorder()
    adapter.watch(recorder)
    recorder.interrupt = True
    before = content(adapter)
    with pytest.raises(StepInterrupted):
        train(model, optimizer)
    assert same(content(adapter), before)


def test_an_interrupted_step_leaves_nothing_of_a_grad_scaler_on_its_optimizer() -> None:
    """With a fused optimizer the scaler multiplies its scale by what it finds there, and deletes it after the step."""

    def trained(*, interrupted: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = Adam(model.parameters(), fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        adapter, recorder = PlainAdapter(model, [optimizer]), Recorder()
        adapter.watch(recorder)
        for attempt in range(3):
            recorder.interrupt = interrupted and attempt == 1
            for _ in range(1 + recorder.interrupt):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(2, 4)).sum()).backward()
                try:
                    scaler.step(optimizer)
                except StepInterrupted:
                    recorder.interrupt = False
                    adapter.reset()
                    continue
                scaler.update()
        assert not {"grad_scale", "found_inf"} & {*vars(optimizer)}
        return [parameter.detach() for parameter in model.parameters()]

    plain, redone = trained(interrupted=False), trained(interrupted=True)
    assert all(map(torch.equal, plain, redone))


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("raises", [True, False])
def test_fault_points_strike_once(phase: str, raises: bool) -> None:
    model = Net()
    optimizer = AdamW(model.parameters())
    adapter = adapter_for(model, [optimizer])
    adapter.watch(Recorder())
    struck: list[bool] = []

    def strike() -> None:
        parameters = list(model.parameters())
        states = [len(optimizer.state.get(p, {})) for p in parameters]
        struck.append(any(states) and not all(states))
        if raises:
            raise StepInterrupted

    adapter.fault_points()[phase](strike)
    if raises:
        with pytest.raises(StepInterrupted):
            train(model, optimizer)
        adapter.reset()
    else:
        train(model, optimizer)
    train(model, optimizer)
    assert len(struck) == 1
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_watching_is_cheap(one_rank: None) -> None:
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(70)]))
    optimizer = AdamW(model.parameters())
    adapter = adapter_for(model, [optimizer])
    adapter.watch(Recorder())
    times = []
    for _ in range(30):
        began = time.perf_counter()
        adapter.capture_common()
        adapter.capture_rank()
        times.append(time.perf_counter() - began)
    assert sorted(times)[3] < 2e-3  # about 60 us on an idle machine


def _peak_growth_bytes(action: Callable[[], object]) -> int:
    """By how much the process grew, at most, while ``action`` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = _of_status("VmRSS")
    action()
    return _of_status("VmHWM") - before


def _of_status(name: str) -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@pytest.mark.parametrize("views", [True, False])
def test_a_reducer_is_renewed_without_a_second_set_of_gradients(one_rank: None, views: bool) -> None:
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)), gradient_as_bucket_view=views
    )
    gradients = 2 * 4 * 4096 * 4096
    for _ in range(2):
        model(torch.randn(2, 4096)).sum().backward()
    layout = ddp_reducer.read_layout(model)
    assert sorted(i for bucket in layout for i in bucket) == [0, 1, 2, 3]
    assert _peak_growth_bytes(lambda: ddp_reducer.read_layout(model)) < gradients / 4
    assert _peak_growth_bytes(lambda: ddp_reducer.renew(model, layout)) < gradients / 4
    assert ddp_reducer.read_layout(model) == layout


@pytest.mark.parametrize("unused", [False, True])
def test_gradients_that_are_views_of_new_buckets_take_no_memory_before_their_use(one_rank: None, unused: bool) -> None:
    """Nothing is written to them: neither to the buckets that are rebuilt, nor from there to those that are kept."""
    net = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, find_unused_parameters=unused)
    for _ in range(2):
        model(torch.randn(2, 4096)).sum().backward()
    layout = ddp_reducer.read_layout(model)
    target = None if unused else layout  # never rebuilt
    ddp_reducer.renew(model, target, gradients=True)
    growth = _peak_growth_bytes(lambda: ddp_reducer.renew(model, target, gradients=True))
    assert growth < 4 * 4096 * 4096 / 4
    assert ddp_reducer.read_layout(model) == layout
    model.zero_grad(set_to_none=False)
    model(torch.ones(2, 4096)).sum().backward()
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net(torch.ones(2, 4096)).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, net.parameters(), strict=True) if p.grad is not None)
    assert len(found) == 4


@pytest.mark.parametrize("frozen", [["0.weight"], ["0.weight", "0.bias", "1.weight", "1.bias"]])
def test_a_reducer_is_renewed_while_the_script_has_parameters_frozen(one_rank: None, frozen: list[str]) -> None:
    """As in the generator's step of a GAN. One that DDP has not known as trainable stays outside."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))
    model = DistributedDataParallel(net)
    for _ in range(2):
        model(torch.randn(2, 3)).sum().backward()
    layout = ddp_reducer.read_layout(model)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in frozen)
    before = {name: p.requires_grad for name, p in net.named_parameters()}
    for target in (layout, None, layout):
        ddp_reducer.renew(model, target)
        assert {name: p.requires_grad for name, p in net.named_parameters()} == before
    assert ddp_reducer.read_layout(model) == layout
    net.requires_grad_(True)
    model(torch.randn(2, 3)).sum().backward()


def print_addresses_of_a_renewal() -> None:
    """Of this process: before, and while the new reducer is made; and how large the gradients are. Bytes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(4096, 4096), gradient_as_bucket_view=False)
    for _ in range(2):
        model(torch.randn(2, 4096)).sum().backward()
    layout = ddp_reducer.read_layout(model)
    make = model._ddp_init_helper

    def watched(*arguments: Any, **more: Any) -> Any:
        print(_of_status("VmSize"))
        return make(*arguments, **more)

    model._ddp_init_helper = watched  # type: ignore[method-assign]
    print(_of_status("VmSize"))
    ddp_reducer.renew(model, layout)
    print(4 * 4096 * 4096)
    dist.destroy_process_group()


def test_the_old_reducers_buckets_are_free_before_the_new_ones_are_made() -> None:
    """Those of the new one are not written before a backward pass, so that only their addresses show them here: those
    of a separate process, in which nothing else is freed or made. (The first allocation of a thread of gloo's or
    torch's, which may come late, would reserve 64 MB of addresses for it.)"""
    code = f"from {__name__} import print_addresses_of_a_renewal as look; look()"
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()  # gloo may print there, too
    before, while_made, gradients = (int(line) for line in lines if line.isdecimal())
    assert while_made < before - 1.5 * gradients, "the gradients, and the buckets beside them"


# -- changes before the optimizer -------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard, lambda net: net], ids=["ddp", "fsdp2", "plain"])
def test_what_a_script_changes_before_the_optimizer_is_seen(one_rank: None, wrap: Any) -> None:
    model = wrap(Net())
    optimizer = Counting(model.parameters())
    adapter = adapter_for(model, [optimizer])
    train(model, optimizer)

    @torch.no_grad()
    def seen(tensor: torch.Tensor) -> bool:
        before = adapter.touch_mark()
        tensor.mul_(0.5)
        return bool(adapter.touch_mark() != before)

    assert all(seen(p) for p in optimizer.param_groups[0]["params"])
    assert all(seen(state[key]) for state in optimizer.state.values() for key in ("exp_avg", "step"))
    before = adapter.touch_mark()
    model(torch.randn(5, 3)).square().sum().backward()
    assert adapter.touch_mark() == before


def test_nothing_is_seen_where_nothing_has_changed_however_often_one_looks(one_rank: None) -> None:
    """Also with state that is no tensor: it is looked up each time that the tensors are."""
    net = Net()
    model = fully_shard(net)
    optimizer = Counting(net.parameters())
    adapter = adapter_for(model, [optimizer])
    train(model, optimizer)
    assert len({adapter.touch_mark() for _ in range(3 * _LOOKS)}) == 1


def test_a_fixed_shard_shows_the_same_object_while_it_is_the_same_memory() -> None:
    tensor = torch.zeros(3)
    shard = FixedShard("weights", [0], tensor)
    (first,) = shard.watched()
    assert shard.tensors()["data"] is first and shard.watched()[0] is first
    tensor.data = torch.ones(3)
    assert shard.tensors()["data"] is not first and torch.equal(shard.tensors()["data"], tensor)


# -- which adapter ----------------------------------------------------------------------------------


def test_the_adapter_fits_the_wrapper(one_rank: None) -> None:
    ddp = adapter_for(DistributedDataParallel(Net()), [])
    assert isinstance(ddp, DDPAdapter) and ddp.sync_spans_world()
    assert ddp.shards()[0].name == "param/first.weight"
    net = Net()
    sharded = adapter_for(fully_shard(net), [Adam(net.parameters())])
    assert isinstance(sharded, FSDP2Adapter) and sharded.sync_spans_world()
    plain = adapter_for(Net(), [])
    assert isinstance(plain, PlainAdapter) and not plain.sync_spans_world()


def inner_ddp() -> nn.Module:
    return nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)))


def inner_fsdp() -> nn.Module:
    return nn.Sequential(fully_shard(nn.Linear(2, 2)))


def with_hook() -> nn.Module:
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook({"error": 0}, lambda state, bucket: torch.futures.Future())
    return model


def with_builtin_hook() -> nn.Module:
    model = DistributedDataParallel(nn.Linear(2, 2))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "DataParallel"),
        (lambda: torch.compile(nn.Linear(2, 2)), "torch.compile"),
        (inner_ddp, "below the root"),
        (inner_fsdp, "apply fully_shard to the root"),
        (lambda: DistributedDataParallel(nn.Linear(2, 2), static_graph=True), "static_graph"),
        (lambda: DistributedDataParallel(nn.Embedding(3, 2, sparse=True)), "sparse gradients"),
        (with_hook, r"hook .*its state, a dict"),
        (with_builtin_hook, "built-in communication hook"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(one_rank: None, make: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        adapter_for(make(), [])


def test_wrong_registrations() -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(RegistrationError, match="list"):
        adapter_for([], [])  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="twice"):
        adapter_for(model, [optimizer, optimizer])
    with pytest.raises(RegistrationError, match="does not belong"):
        adapter_for(model, [SGD(Net().parameters(), lr=0.1)])
    with pytest.raises(RegistrationError, match="StepLR"):
        adapter_for(model, [torch.optim.lr_scheduler.StepLR(optimizer, 3)])  # type: ignore[list-item]


def test_state_without_a_place_is_refused_after_the_first_step() -> None:
    model = Net()
    lbfgs = torch.optim.LBFGS(model.parameters())
    adapter = adapter_for(model, [lbfgs])
    adapter.watch(Recorder())
    with pytest.raises(UnsupportedError, match="closure"):
        lbfgs.step(lambda: torch.zeros(1))


# -- what no tensor shows ---------------------------------------------------------------------------


class Annealed(nn.Module):
    """Numbers among its attributes change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0
        self.kind, self.limit, self._private = "warm", None, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.dropout(self.linear(x)) * self.calls


def test_which_parameters_are_trained_comes_back() -> None:
    model = Annealed()
    model.linear.bias.requires_grad_(False)
    adapter, other = adapter_for(model, []), Annealed()
    other.linear.bias.requires_grad_(False)
    replacement = adapter_for(other, [])
    start, mark = codec.dumps(adapter.capture_rank()), adapter.local_state_mark()
    model.linear.weight.requires_grad_(False)
    model.linear.bias.requires_grad_(True)
    later = codec.dumps(adapter.capture_rank())
    assert adapter.local_state_mark() != mark
    replacement.restore_rank(codec.loads(later))
    assert not other.linear.weight.requires_grad and other.linear.bias.requires_grad
    adapter.restore_rank(codec.loads(start))
    assert model.linear.weight.requires_grad and not model.linear.bias.requires_grad
    assert adapter.local_state_mark() == mark


def test_numbers_and_texts_of_modules_come_back() -> None:
    model = Annealed()
    adapter, replacement = adapter_for(model, []), adapter_for(other := Annealed(), [])
    start, mark = codec.dumps(adapter.capture_rank()), adapter.local_state_mark()
    model(torch.ones(2)), model(torch.ones(2))
    model.dropout.p, model.kind, model.limit, model._private = 0.25, "hot", 3.5, 2
    assert adapter.local_state_mark() != mark
    later = codec.dumps(adapter.capture_rank())
    replacement.restore_rank(codec.loads(later))
    assert (other.calls, other.dropout.p, other.kind, other.limit) == (2, 0.25, "hot", 3.5) and other._private == 1
    adapter.restore_rank(codec.loads(start))
    assert (model.calls, model.dropout.p, model.kind, model.limit) == (0, 0.5, "warm", None) and model._private == 2
    assert adapter.local_state_mark() == mark


def test_an_attribute_may_be_deleted_or_become_something_else() -> None:
    model = Annealed()
    adapter = adapter_for(model, [])
    start = adapter.capture_rank()
    del model.kind
    model.limit = torch.ones(2)
    mark = adapter.local_state_mark()
    model.limit = torch.zeros(2)
    assert adapter.local_state_mark() == mark
    adapter.restore_rank(start)
    assert model.kind == "warm" and isinstance(model.limit, torch.Tensor)


def test_attributes_of_another_model_are_refused() -> None:
    adapter = adapter_for(Annealed(), [])
    state = adapter.capture_rank()
    with pytest.raises(RestoreError, match="no module 'unknown'"):
        adapter.restore_rank({**state, "attributes": {"unknown.calls": 1}})


class Tracking(ModuleAdapter):
    """Of a framework that tracks random streams by name, as Megatron and DeepSpeed do."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self.states = {name: torch.arange(5056, dtype=torch.uint8) for name in ("model", "experts")}

    def _tracked_streams(self) -> dict[str, torch.Tensor]:
        return self.states


def test_a_tracked_random_stream_that_moves_is_seen() -> None:
    adapter = Tracking()
    marks = [adapter.local_state_mark()]
    assert adapter.local_state_mark() == marks[0]
    adapter.states["experts"].data[5000] += 1  # no counter moves
    marks.append(adapter.local_state_mark())
    adapter.states["model"] = adapter.states["experts"].clone()
    marks.append(adapter.local_state_mark())
    del adapter.states["model"]
    marks.append(adapter.local_state_mark())
    assert all(one != other for one, other in itertools.combinations(marks, 2))
    adapter.states = {name: torch.arange(5056, dtype=torch.uint8) for name in ("model", "experts")}
    assert adapter.local_state_mark() == marks[0], "equal content in other tensors"
