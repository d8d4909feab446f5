"""State in forms of which torch's own operations do not make equal copies, all in one job:

* a buffer of bools whose bytes are not only 0 and 1 (gloo adds bools up as bytes)
* optimizer state in subclasses of Tensor that implement no operation at all: one within another, around a DTensor and
  within one, with an enumeration, a dataclass and a dtype among what they say of themselves
* optimizers that keep something in their attributes: weights in fp32, an optimizer within, objects, a table by id(),
  functions and iterators that count
* torch's ``get_state_dict()`` above the block, which makes the optimizer's state by its own step, and
  ``set_state_dict()``

``--refused`` chooses a form that is to be refused by name, before the second step.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import flashrecovery

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.scripts import proof

WIDTH = 8


class Rounding(enum.Enum):
    NEAREST = 1
    TO_ZERO = 2


@dataclasses.dataclass(frozen=True)
class Grid:
    """What a packed tensor says of itself."""

    levels: int
    rounding: Rounding
    shown_as: torch.dtype


class Strict(Tensor):
    """Shown as one tensor, and implements nothing."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{cls.__name__}: {func}")


class Packed(Strict):
    """Codes and a scale."""

    codes: Tensor
    scale: Tensor
    grid: Grid

    def __new__(cls, codes: Tensor, scale: Tensor, grid: Grid) -> Packed:
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=grid.shown_as, device=codes.device)
        made.codes, made.scale, made.grid = codes, scale, grid
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"grid": self.grid}

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Packed:
        return cls(parts["codes"], parts["scale"], meta["grid"])

    def value(self) -> Tensor:
        return self.codes.float() * self.scale

    def set(self, value: Tensor) -> None:
        self.scale.copy_(value.abs().max().clamp(min=1e-12) / self.grid.levels)
        self.codes.copy_((value / self.scale).round())


class Twice(Strict):
    """A packed tensor, and what it leaves out: a tensor, or a DTensor, placed like the parameter."""

    packed: Packed
    rest: Tensor

    def __new__(cls, packed: Packed, rest: Tensor) -> Twice:
        made = Tensor._make_wrapper_subclass(cls, rest.shape, dtype=rest.dtype, device=rest.device)
        made.packed, made.rest = packed, rest
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed", "rest"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Any], meta: Any, size: Any, stride: Any) -> Twice:
        return cls(parts["packed"], parts["rest"])


class Unnamed(Strict):
    """A subclass that does not say what it consists of."""

    def __new__(cls, inner: Tensor) -> Unnamed:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made


class PackedSGD(torch.optim.Optimizer):
    """Momentum in a packed tensor, within a DTensor where the parameter is one; a second one with its error beside."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = _placed(_packed(parameter), parameter)
                    state["precise"] = Twice(_packed(parameter), torch.zeros_like(parameter))
                weight, gradient = _local(parameter), _local(parameter.grad)
                momentum, precise = _local(state["momentum"]), state["precise"]
                rest = _local(precise.rest)
                value = momentum.value() * 0.9 + gradient
                momentum.set(value)
                exact = (precise.packed.value() + rest) * 0.5 + gradient
                precise.packed.set(exact)
                rest.copy_(exact - precise.packed.value())
                weight.sub_(value + exact, alpha=group["lr"])


class Masters(torch.optim.Optimizer):
    """Keeps fp32 copies of the weights in an attribute, in the layout of apex's FusedAdam with ``master_weights``: a
    group that counts its steps, and a buffer for the overflow."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})
        self.master_weights = True
        self.param_groups_master = [
            {"params": [p.detach().clone().float() for p in group["params"]]} for group in self.param_groups
        ]
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int)
        self._step_supports_amp_scaling = True
        self.multi_tensor_adam = torch._foreach_mul_

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group, masters in zip(self.param_groups, self.param_groups_master, strict=True):
            group["step"] = group.get("step", 0) + 1
            for parameter, master in zip(group["params"], masters["params"], strict=True):
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg"].mul_(group["betas"][0]).add_(parameter.grad)
                master.sub_(state["exp_avg"] * (1 + 1 / group["step"]), alpha=group["lr"])
                parameter.copy_(master.bfloat16())


class Norms:
    """An object of an optimizer."""

    def __init__(self) -> None:
        self.largest = 0.0
        self.of: dict[Tensor, float] = {}
        self.recent: deque[float] = deque(maxlen=3)


class Kinds:
    """What an optimizer may have besides numbers and lists; :meth:`factor` uses all of it."""

    def __init__(self) -> None:
        self.numbers = itertools.count(0.5, 0.25)
        self.schedule, self.halved = _counting(), functools.partial(_counted, [0])
        self.seen, self.array, self.bytes = {0}, np.zeros(2), bytearray(1)
        self.rounding, self.share = [Rounding.NEAREST], [Fraction(0)]
        self.at: dict[tuple[int, int], int] = {}
        self.draw = random.Random(3).random

    def factor(self) -> float:
        self.seen.add(len(self.seen))
        self.array += 0.5
        self.bytes[0] += 1
        self.rounding[0] = Rounding.TO_ZERO if self.rounding[0] is Rounding.NEAREST else Rounding.NEAREST
        self.share[0] += Fraction(1, 3)
        self.at[1, 2] = self.at.get((1, 2), 0) + 1
        parts = (next(self.numbers), self.schedule(), self.halved(), len(self.seen), self.array[0], self.bytes[0])
        more = (self.rounding[0].value, self.share[0], self.at[1, 2], self.draw())
        return 1 + float(sum((*parts, *more))) / 1000


def _counting() -> Callable[[], int]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


def _counted(numbers: list[int]) -> int:
    numbers[0] += 1
    return numbers[0]


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, which it steps; keeps slow weights by parameter in an attribute from its first step on,
    counts, draws from its own generator, and has objects and a table by id()."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner
        self.calls = 0
        self.slow: dict[Tensor, Tensor] = {}
        self.norms, self.kinds = Norms(), Kinds()
        self.generator = torch.Generator()
        self.factors = {id(p): 1 + number / 10 for number, p in enumerate(self.param_groups[0]["params"])}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.inner.step()
        self.calls += 1
        factor = self.kinds.factor()
        if self.calls % 2 or torch.rand((), generator=self.generator) > 0.9:
            return
        for parameter in self.param_groups[0]["params"]:
            slow = self.slow.setdefault(parameter, parameter.detach().clone())
            norm = float(_local(parameter).norm())
            self.norms.of[parameter] = norm
            self.norms.largest = max(self.norms.largest, norm)
            self.norms.recent.append(norm)
            slow.lerp_(parameter, 0.5 * factor * self.factors[id(parameter)])
            parameter.copy_(slow)


class Refused(PackedSGD):
    """Keeps state that no one can copy."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["odd"] = Unnamed(torch.zeros(2))


def _packed(parameter: Tensor) -> Packed:
    local = _local(parameter)
    grid = Grid(levels=127, rounding=Rounding.TO_ZERO, shown_as=torch.bfloat16)
    return Packed(torch.zeros(local.shape, dtype=torch.int8), torch.ones(()), grid)


def _placed(local: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    spec = parameter._spec
    assert spec.tensor_meta is not None
    meta = type(spec.tensor_meta)(parameter.shape, parameter.stride(), local.dtype)
    return DTensor(local, type(spec)(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)


def _local(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 4)
        self.middle = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.register_buffer("seen", torch.zeros(8, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.middle(torch.tanh(self.up(x)))))


def main() -> None:
    parser = proof.flags(__doc__)
    parser.add_argument("--framework", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--refused", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    torch.manual_seed(0)
    net = Net()
    sharded = args.framework == "fsdp2"
    model = fully_shard(net) if sharded else DistributedDataParallel(net, broadcast_buffers=False)
    # torch can make a state dict of ordinary state only
    kinds = [Refused if args.refused else PackedSGD, torch.optim.AdamW]
    optimizers = [kind(m.parameters(), lr=0.01) for kind, m in zip(kinds, (net.up, net.down), strict=True)]
    optimizers.append(Lookahead(Masters(net.middle.parameters())))
    recovery.register(model=model, optimizer=optimizers)
    kills = proof.Kills(args.kill, recovery, args.pause)
    kills.in_backward_of(net.up)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + dist.get_rank())
    for step in recovery.steps(args.steps):
        kills.step = step.index
        if step.index % 4 == 0:
            weights, moments = get_state_dict(net.down, optimizers[1])
            set_state_dict(net.down, optimizers[1], model_state_dict=weights, optim_state_dict=moments)
        with step:
            kills.at("data")
            batch = torch.randn(4, WIDTH)
            loss = model(batch).square().mean()
            proof.say_step(step.index, batch, loss, 0)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            net.seen[step.index % 8] = True
            dist.all_reduce(net.seen)
            for optimizer in optimizers:
                optimizer.step()
            kills.at("optimizer")
        kills.at("below")
        kills.at("end")
    ahead = optimizers[2]
    masters = ahead.inner
    more = {
        "second": dict(enumerate(optimizers[1].state.values())),
        "slow": [[*ahead.slow.values()], ahead.calls, ahead.generator, vars(ahead.norms)["recent"]],
        "norms": [ahead.norms.largest, [*ahead.norms.of.values()], [*ahead.factors.values()]],
        "masters": [[group["params"] for group in masters.param_groups_master], [*masters.state.values()]],
        "counted": [group["step"] for group in masters.param_groups],
    }
    proof.say_end(net, optimizers[0], more)


if __name__ == "__main__":
    main()
