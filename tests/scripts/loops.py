"""Training loops as people write them, each with one thing that changes state at an unusual moment.

``--loop NAME`` chooses the class of :data:`LOOPS`: the plain loop is :class:`Loop`, and a subclass says what its loop
does differently. Several names, joined by ``+``, are one loop that does all of it. ``main`` is the loop itself.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import flashrecovery

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.scripts import proof

WIDTH = 16


class Net(nn.Module):
    """A small network with dropout. ``bias`` is a buffer that a script may train by hand, as experts' biases are."""

    def __init__(self, batch_norm: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(2 * WIDTH) if batch_norm else nn.LayerNorm(2 * WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(2 * WIDTH, 4)
        self.register_buffer("bias", torch.zeros(4))
        self.checkpointed = checkpointed
        self.chosen = torch.zeros(4)
        """How often each output was the largest in the newest forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, WIDTH)
        hidden = checkpoint(self.middle, x, use_reentrant=False) if self.checkpointed else self.middle(x)
        logits = self.down(hidden) + self.bias
        self.chosen = torch.bincount(logits.detach().argmax(-1), minlength=4).float()
        return logits

    def middle(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(nn.functional.gelu(self.norm(self.up(x))))
        return result


class Ddp:
    """The framework: wraps the network and takes the optimizer's steps.

    ``whole``: no other rank is needed for a forward pass.
    """

    whole = True

    def __init__(self, net: Net) -> None:
        self.recovery = flashrecovery.init()
        self.net = net
        self.model: nn.Module = self.wrapped(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def wrapped(self, net: Net) -> nn.Module:
        return DistributedDataParallel(net, forward_sync_buffers=False)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def evaluated(self, batch: Tensor) -> Tensor:
        result: Tensor = self.net(batch)
        return result

    @contextlib.contextmanager
    def unsynchronised(self) -> Iterator[None]:
        """Gradients are added up on this rank only."""
        assert isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync():
            yield


class Fsdp2(Ddp):
    """Each rank has a part of every parameter."""

    whole = False

    def evaluated(self, batch: Tensor) -> Tensor:
        result = super().evaluated(batch)
        self.net.reshard()  # type: ignore[operator]  # else the root's weights are not gathered again after the optimizer
        return result

    def wrapped(self, net: Net) -> nn.Module:
        fully_shard(net.up)
        return fully_shard(net)

    @contextlib.contextmanager
    def unsynchronised(self) -> Iterator[None]:
        self.net.set_requires_gradient_sync(False)  # type: ignore[operator]
        yield
        self.net.set_requires_gradient_sync(True)  # type: ignore[operator]


FRAMEWORKS = {"ddp": Ddp, "fsdp2": Fsdp2}


class Kept:
    """A value of the script, as a registered object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": copy.deepcopy(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = copy.deepcopy(state["value"])


class Loop:
    """The plain loop. ``every``: its unusual thing happens in each step of this number, and not in the first."""

    every = 3
    sample = WIDTH  # numbers of a sample
    slow: str | None = None  # see ReduceBelow
    kills: proof.Kills
    only = tuple(FRAMEWORKS)  # frameworks in which the loop can be written
    touches_now_and_then = False  # it changes tensors above its block in the steps of its unusual thing

    def __init__(self, framework: str) -> None:
        torch.manual_seed(1)
        self.net = self.build()
        self.framework = FRAMEWORKS[framework](self.net)
        self.model, self.optimizer = self.framework.model, self.framework.optimizer
        self.recovery = self.framework.recovery
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.dataset = torch.randn(96, self.sample, generator=torch.Generator().manual_seed(2))
        sampler: DistributedSampler[Any] = DistributedSampler(self.dataset, seed=3)  # type: ignore[arg-type]
        self.data = self.recovery.data(DataLoader(self.dataset, batch_size=4, sampler=sampler))  # type: ignore[arg-type]
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(100 + self.rank)
        self.objects: dict[str, Any] = {}
        self.own: tuple[str, ...] = ()
        self.prepare()
        self.register()

    def register(self) -> None:
        own = {"per_rank": self.own} if self.own and "per_rank" in signature(self.recovery.register).parameters else {}
        self.recovery.register(model=self.model, optimizer=self.optimizer, **self.objects, **own)

    def due(self, step: int) -> bool:
        return step % self.every == self.every - 1

    def end(self) -> dict[str, object]:
        """What there is at the end besides model, optimizer and global random streams."""
        objects = {n: o.state_dict() if hasattr(o, "state_dict") else o for n, o in self.objects.items()}
        return {"data": tuple(self.data.position), **objects}

    # -- what a loop may do differently -----------------------------------------------------------

    def build(self) -> Net:
        return Net()

    def prepare(self) -> None:
        """Make the script's own objects: ``objects``, and in ``own`` the names of those that differ between ranks."""

    def above(self, step: int) -> None:
        """Between ``for`` and ``with``."""

    def batch(self, step: int) -> Tensor:
        batch: Tensor = next(self.data)
        return batch

    def loss(self, batch: Tensor, step: int) -> Tensor:
        result: Tensor = self.model(batch).square().mean()
        return result

    def gradients(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch as it came, and the loss."""
        batch = self.batch(step)
        came = batch.clone()
        loss = self.loss(batch, step)
        self.framework.backward(loss)
        return came, loss

    def before(self, step: int, loss: Tensor) -> None:
        """In the block, before the optimizer."""

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def optimize(self) -> None:
        self.optimizer.step()

    def after(self, step: int) -> None:
        """In the block, after the optimizer."""

    def below(self, step: int) -> None:
        """Below the block. It also runs after an attempt that failed."""

    def leaves(self, step: int) -> bool:
        """Whether the loop ends here, below the block."""
        return False


class ExpertBias(Loop):
    """A buffer is changed after the optimizer, by what all ranks have counted (DeepSeek's and Megatron's balancing of
    experts without an auxiliary loss)."""

    def after(self, step: int) -> None:
        super().after(step)
        counts = self.net.chosen.clone()
        dist.all_reduce(counts)
        with torch.no_grad():
            self.net.bias += 0.01 * torch.sign(counts.mean() - counts)


class RankBias(Loop):
    """The same, by this rank alone: nothing is communicated, and the buffers differ."""

    def after(self, step: int) -> None:
        super().after(step)
        with torch.no_grad():
            self.net.bias += 0.01 * torch.sign(self.net.chosen.mean() - self.net.chosen)


class ReplacedBuffers(Loop):
    """The same with new tensors in the place of the old ones. What each rank has counted is set to zero below the
    block."""

    def build(self) -> Net:
        net = super().build()
        net.register_buffer("load", torch.zeros(4))
        return net

    def loss(self, batch: Tensor, step: int) -> Tensor:
        loss = super().loss(batch, step)
        self.net.load = self.net.load + self.net.chosen
        return loss

    def after(self, step: int) -> None:
        super().after(step)
        counts = self.net.load.clone()
        dist.all_reduce(counts)
        self.net.bias = self.net.bias + 0.01 * torch.sign(counts.mean() - counts)

    def below(self, step: int) -> None:
        super().below(step)
        self.net.load = torch.zeros_like(self.net.load)


class SchedulerBelow(Loop):
    def prepare(self) -> None:
        super().prepare()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.9)
        self.objects["scheduler"] = self.scheduler

    def below(self, step: int) -> None:
        super().below(step)
        self.scheduler.step()


class Evaluating(Loop):
    """Evaluates now and then, with a DataLoader: each ``iter()`` of one draws a random number."""

    def prepare(self) -> None:
        super().prepare()
        self.held_out = DataLoader(self.dataset[:8], batch_size=4, shuffle=True)  # type: ignore[arg-type]
        self.objects["found"] = Kept([])

    def evaluation(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.objects["found"].value.append(sum(self.evaluate(batch) for batch in self.held_out))
        self.model.train()

    def evaluate(self, batch: Tensor) -> float:
        """A count, which depends neither on the order nor on what is rounded: both differ between ranks."""
        return float((self.framework.evaluated(batch) > 0).sum())


class EvaluationBelow(Evaluating):
    """Below the block, where nothing may communicate: a network of which each rank has a part is not asked."""

    def below(self, step: int) -> None:
        super().below(step)
        if self.due(step):
            self.evaluation()

    def evaluate(self, batch: Tensor) -> float:
        return super().evaluate(batch) if self.framework.whole else float((batch > 0).sum())


class EvaluationInside(Evaluating):
    """In the block, between the backward pass and the optimizer."""

    def before(self, step: int, loss: Tensor) -> None:
        super().before(step, loss)
        if self.due(step):
            self.evaluation()


class LateDraws(Loop):
    """Random numbers after the optimizer, in every ninth step."""

    every = 9

    def after(self, step: int) -> None:
        super().after(step)
        if self.due(step):
            torch.rand(3), random.random(), np.random.rand()


class InPlaceBatches(Loop):
    """numpy writes into the middle of a batch, unseen by torch."""

    sample = 16384

    def loss(self, batch: Tensor, step: int) -> Tensor:
        batch.numpy()[2, 8000:8100] *= 0.5
        return super().loss(batch, step)


class PythonAndNumpy(Loop):
    """Random numbers of Python and numpy, in the step."""

    def loss(self, batch: Tensor, step: int) -> Tensor:
        noise = torch.from_numpy(np.random.randn(*batch.shape)).float()
        return super().loss(batch * random.gauss(1.0, 0.1) + 0.1 * noise, step)


class EmaOfRankBuffers(Loop):
    """An average over time of a BatchNorm's statistics, which differ between ranks."""

    def build(self) -> Net:
        return Net(batch_norm=True)

    def prepare(self) -> None:
        super().prepare()
        self.objects["ema"] = Kept(torch.zeros(2 * WIDTH))
        self.own += ("ema",)

    def after(self, step: int) -> None:
        super().after(step)
        self.objects["ema"].value.lerp_(self.net.norm.running_mean, 0.1)  # type: ignore[arg-type]


class Live(Kept):
    """Its state is the value itself, which is written where it lies."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}


class LargeOwnState(Loop):
    """Each rank has a memory of what it has seen, some MiB of it: in a tensor that is written through numpy, and in a
    queue of arrays. Some of it changes after the optimizer."""

    rows = 1 << 18

    def prepare(self) -> None:
        super().prepare()
        self.memory = torch.zeros(self.rows, WIDTH // 4)
        self.queue = collections.deque([np.zeros(1 << 14) for _ in range(16)], maxlen=16)
        self.objects["memory"], self.objects["queue"] = Live(self.memory), Live(self.queue)
        self.own += ("memory", "queue")

    def loss(self, batch: Tensor, step: int) -> Tensor:
        memory, queue = self.objects["memory"].value, self.objects["queue"].value
        row = step * 1009 % self.rows
        # No version counter shows it.
        np.asarray(memory)[row : row + 100] = float(batch.sum()) + dist.get_rank()
        known = float(memory[:: 1 << 12].sum()) + float(queue[step % 16].sum())
        return super().loss(batch, step) * (1.0 + 1e-3 * math.tanh(known))

    def after(self, step: int) -> None:
        super().after(step)
        memory, queue = self.objects["memory"].value, self.objects["queue"].value
        queue.append(queue[0] + float(memory[step * 1009 % self.rows].sum()))
        if step % 3 == 1:
            np.asarray(memory)[:: 1 << 12] += 0.5


class Averaged(Loop):
    """``swa_utils.AveragedModel``: parameters that no optimizer has, and a counter in a buffer."""

    only = ("ddp",)

    def prepare(self) -> None:
        super().prepare()
        self.averaged = AveragedModel(self.net, use_buffers=True)
        self.recovery.register(model=self.averaged)

    def end(self) -> dict[str, object]:
        return {**super().end(), "averaged": self.averaged.state_dict()}


class AveragedInBlock(Averaged):
    def after(self, step: int) -> None:
        super().after(step)
        self.averaged.update_parameters(self.net)


class AveragedBelow(Averaged):
    def below(self, step: int) -> None:
        super().below(step)
        if self.due(step):
            self.averaged.update_parameters(self.net)


class Accumulation(Loop):
    """Three micro-batches; only the last one's gradients are synchronised."""

    def gradients(self, step: int) -> tuple[Tensor, Tensor]:
        batches, losses = [], []
        for micro in range(3):
            with contextlib.nullcontext() if micro == 2 else self.framework.unsynchronised():
                batch, loss = super().gradients(step)
            batches.append(batch)
            losses.append(loss)
        return torch.stack(batches), torch.stack(losses).mean()


class MeanLoss(Loop):
    """All ranks know the mean of their losses."""

    mean = 0.0

    def before(self, step: int, loss: Tensor) -> None:
        super().before(step, loss)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.mean = float(mean) / self.world


class RateByHand(MeanLoss):
    """The next step's learning rate, from this step's loss."""

    def after(self, step: int) -> None:
        super().after(step)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1.0 + self.mean)


class RateByHandBelow(MeanLoss):
    def below(self, step: int) -> None:
        super().below(step)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1.0 + self.mean)


class EditedGroups(Loop):
    """Options of the optimizer change while it runs."""

    def before(self, step: int, loss: Tensor) -> None:
        super().before(step, loss)
        if self.due(step):
            group = self.optimizer.param_groups[0]
            group["weight_decay"] = 2 * group["weight_decay"]
            group["betas"] = (group["betas"][0] * 0.99, group["betas"][1])


class Generators(Loop):
    """The script's own generator, another on each rank, in the block and below it."""

    def prepare(self) -> None:
        super().prepare()
        self.augment = torch.Generator().manual_seed(200 + self.rank)
        self.objects["augment"] = self.augment

    def loss(self, batch: Tensor, step: int) -> Tensor:
        return super().loss(batch + 0.1 * torch.randn(batch.shape, generator=self.augment), step)

    def below(self, step: int) -> None:
        super().below(step)
        if self.due(step):
            torch.rand(2, generator=self.augment)


class RunningAverage(MeanLoss):
    """Of the mean loss, in a registered object."""

    def prepare(self) -> None:
        super().prepare()
        self.average = self.objects["average"] = Kept(0.0)

    def after(self, step: int) -> None:
        super().after(step)
        self.average.value = 0.9 * self.average.value + 0.1 * self.mean


class RunningAverageBelow(MeanLoss):
    def prepare(self) -> None:
        super().prepare()
        self.average = self.objects["average"] = Kept(0.0)

    def below(self, step: int) -> None:
        super().below(step)
        self.average.value = 0.9 * self.average.value + 0.1 * self.mean


class BestOfRankZero(Loop):
    """The lowest loss so far, which only rank 0 notes."""

    def prepare(self) -> None:
        super().prepare()
        self.objects["best"] = Kept(float("inf"))
        self.own += ("best",)

    def before(self, step: int, loss: Tensor) -> None:
        super().before(step, loss)
        self.newest = float(loss.detach())

    def after(self, step: int) -> None:
        super().after(step)
        best = self.objects["best"]
        if self.rank == 0:
            best.value = min(best.value, self.newest)


class SkipsTogether(Loop):
    """All ranks leave out the optimizer's step where the loss of one of them is far above the average of its own."""

    def prepare(self) -> None:
        super().prepare()
        self.average = self.objects["average"] = Kept(0.0)
        self.own += ("average",)

    def loss(self, batch: Tensor, step: int) -> Tensor:
        loss = super().loss(batch, step)
        return 4 * loss if self.due(step) and self.rank == 1 else loss

    def before(self, step: int, loss: Tensor) -> None:
        super().before(step, loss)
        value = float(loss.detach())
        spike = torch.tensor(float(step > 0 and value > 2 * self.average.value))
        dist.all_reduce(spike)
        self.skips = bool(spike)
        if not self.skips:
            self.average.value = value if step == 0 else 0.9 * self.average.value + 0.1 * value

    def optimize(self) -> None:
        if self.skips:
            self.optimizer.zero_grad()
        else:
            super().optimize()


class PlainSkips(SkipsTogether):
    """No one is informed of the average."""

    def prepare(self) -> None:
        super().prepare()
        self.average = self.objects.pop("average")
        self.own = tuple(name for name in self.own if name != "average")


class SkipsAlone(Loop):
    """Rank 0 leaves out the backward pass and the optimizer in one step, and the others do not."""

    left_out = False

    def gradients(self, step: int) -> tuple[Tensor, Tensor]:
        self.left_out = step == 5 and self.rank == 0
        if not self.left_out:
            return super().gradients(step)
        batch = self.batch(step)
        return batch.clone(), self.loss(batch, step)

    def optimize(self) -> None:
        if not self.left_out:
            super().optimize()


class PackedDocuments(Loop):
    """Documents of any length in rows of one. The one that does not fit in any more is kept for the next row, in the
    generator's frame."""

    def prepare(self) -> None:
        super().prepare()
        self.packed: Iterator[Tensor] = self.recovery.data(packed(self.documents()))

    def documents(self) -> Iterator[Tensor]:
        for number in itertools.count(self.rank, self.world):
            row = self.dataset[number % len(self.dataset)]
            yield row[: 3 + number * 5 % (self.sample - 3)]

    def batch(self, step: int) -> Tensor:
        return next(self.packed)


class PacksOutside(PackedDocuments):
    """The same around what is protected."""

    def prepare(self) -> None:
        Loop.prepare(self)
        self.packed = packed(self.documents())

    def documents(self) -> Iterator[Tensor]:
        for batch in self.data:
            yield from batch[:, :11]


def packed(documents: Iterator[Tensor], length: int = 2 * WIDTH) -> Iterator[Tensor]:
    row: list[Tensor] = []
    for document in documents:
        if sum(map(len, row)) + len(document) > length:
            yield nn.functional.pad(torch.cat(row), (0, length - sum(map(len, row))))
            row = []
        row.append(document)


class DiffersFromTheStart(Loop):
    """A registered object of which no one says that it is each rank's own."""

    def prepare(self) -> None:
        super().prepare()
        self.objects["seen"] = Kept(self.rank)

    def before(self, step: int, loss: Tensor) -> None:
        super().before(step, loss)
        self.objects["seen"].value += self.world


class DiffersLater(Loop):
    """The same, from the first step on."""

    def prepare(self) -> None:
        super().prepare()
        self.objects["lowest"] = Kept(float("inf"))

    def before(self, step: int, loss: Tensor) -> None:
        super().before(step, loss)
        lowest = self.objects["lowest"]
        lowest.value = min(lowest.value, float(loss.detach()))


class RandomBatches(Loop):
    """nanoGPT's ``get_batch``: random places of the data, drawn in the step."""

    def batch(self, step: int) -> Tensor:
        return self.dataset[torch.randint(len(self.dataset), (4,))]


class EmaModule(Loop):
    """A second module, registered as an object."""

    only = ("ddp",)

    def prepare(self) -> None:
        super().prepare()
        self.ema = copy.deepcopy(self.net).requires_grad_(False)
        self.objects["ema_module"] = self.ema

    def after(self, step: int) -> None:
        super().after(step)
        with torch.no_grad():
            for mean, parameter in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)


class CheckpointedBatchNorm(Loop):
    """The second forward pass, in the backward pass, changes the statistics again."""

    def build(self) -> Net:
        return Net(batch_norm=True, checkpointed=True)


class PrefetchBelow(Loop):
    """The next step's batch is fetched below the block."""

    def prepare(self) -> None:
        super().prepare()
        self.objects["next"] = Kept(next(self.data))
        self.own += ("next",)

    def batch(self, step: int) -> Tensor:
        batch: Tensor = self.objects["next"].value
        return batch

    def below(self, step: int) -> None:
        super().below(step)
        self.objects["next"].value = next(self.data)


class DrawsAbove(Loop):
    """Random numbers between ``for`` and ``with``."""

    def above(self, step: int) -> None:
        super().above(step)
        self.factor = 1.0 + 0.1 * float(torch.rand(1)) + 0.1 * random.random()

    def loss(self, batch: Tensor, step: int) -> Tensor:
        return super().loss(batch * self.factor, step)


class DecaySometimes(Loop):
    """What the optimizer steps on is made smaller between ``for`` and ``with``, now and then."""

    touches_now_and_then = True

    def above(self, step: int) -> None:
        super().above(step)
        if self.due(step):
            decay(self.optimizer)


class DecayAbove(Loop):
    """The same in each step, from the first one on."""

    def above(self, step: int) -> None:
        super().above(step)
        decay(self.optimizer)


def decay(optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)


class MomentumEdited(Loop):
    """Adam's average of the gradients is halved between ``for`` and ``with``, now and then."""

    touches_now_and_then = True

    def above(self, step: int) -> None:
        super().above(step)
        if self.due(step):
            for state in self.optimizer.state.values():
                state["exp_avg"].mul_(0.5)


class SilentCodebook(Loop):
    """VQ-VAE's: averages over time that the forward pass writes through ``.data``, which no version counter counts.
    The buffer is too large to be compared in every step."""

    writes = True

    def build(self) -> Net:
        net = super().build()
        net.register_buffer("codebook", torch.zeros(1024, 2 * WIDTH))
        net.norm.register_forward_hook(self.quantise)
        return net

    def quantise(self, _module: nn.Module, _inputs: object, hidden: Tensor) -> Tensor:
        if self.net.training and self.writes:
            self.net.codebook.data.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return hidden + self.net.codebook.mean(0)


class SilentQueue(Loop):
    """MoCo's, written after the optimizer through ``.data``."""

    def build(self) -> Net:
        net = super().build()
        net.register_buffer("queue", torch.zeros(2048, WIDTH))
        return net

    def loss(self, batch: Tensor, step: int) -> Tensor:
        self.newest_key = batch.detach().mean(0)
        return super().loss(batch + self.net.queue.mean(0), step)

    def after(self, step: int) -> None:
        super().after(step)
        self.net.queue.data[step % 2048] = 100 * self.newest_key


class SilentFirstOnRankZero(SilentCodebook):
    """The other ranks begin to write theirs when they have heard of rank 0's."""

    def above(self, step: int) -> None:
        super().above(step)
        self.writes = self.rank == 0 or step >= 5


class SilentLater(SilentCodebook):
    """It is written from step 5 on, long after the first one."""

    def above(self, step: int) -> None:
        super().above(step)
        self.writes = step >= 5


class TwoOptimizers(Loop):
    """A critic is trained in the same step, before the network: two passes follow an optimizer's step."""

    only = ("ddp",)

    def prepare(self) -> None:
        super().prepare()
        self.critic = DistributedDataParallel(Net())
        self.critic_optimizer = torch.optim.RMSprop(self.critic.parameters(), lr=0.01)

    def register(self) -> None:
        super().register()
        self.recovery.register(model=self.critic, optimizer=self.critic_optimizer)

    def loss(self, batch: Tensor, step: int) -> Tensor:
        self.critic_optimizer.zero_grad()
        made = batch * (1 + self.model(batch).detach().mean())
        (self.critic(made).square().mean() - self.critic(batch).mean()).backward()
        self.critic_optimizer.step()
        return super().loss(batch, step) - self.critic(batch * (1 + self.model(batch).mean())).mean()

    def end(self) -> dict[str, object]:
        return {
            **super().end(),
            "critic": self.critic.state_dict(),
            "critic_optimizer": self.critic_optimizer.state_dict(),
        }


class Scaler(Loop):
    """Mixed precision's scaler: a step whose gradients have no numbers is left out."""

    def prepare(self) -> None:
        super().prepare()
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**100, growth_factor=2.0**30, backoff_factor=2.0**-40, growth_interval=2
        )
        self.objects["scaler"] = self.scaler

    def gradients(self, step: int) -> tuple[Tensor, Tensor]:
        batch = self.batch(step)
        came = batch.clone()
        loss = self.loss(batch, step)
        self.framework.backward(self.scaler.scale(loss))
        return came, loss

    def optimize(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class SpectralNorm(Loop):
    only = ("ddp",)

    def build(self) -> Net:
        net = super().build()
        nn.utils.parametrizations.spectral_norm(net.down)
        return net


class PrunedLater(Loop):
    """A layer is pruned from step 5 on, which gives it another parameter and a hook."""

    only = ("ddp",)

    def above(self, step: int) -> None:
        super().above(step)
        if step == 5:
            prune.l1_unstructured(self.net.down, "weight", amount=0.5)


class GroupLater(Loop):
    """Parameters are unfrozen in step 5."""

    only = ("ddp",)

    def prepare(self) -> None:
        super().prepare()
        later = set(self.net.down.parameters())
        self.later = [p for p in self.net.parameters() if p in later]
        self.optimizer = torch.optim.AdamW([p for p in self.net.parameters() if p not in later], lr=0.01)

    def above(self, step: int) -> None:
        super().above(step)
        if step == 5:
            self.optimizer.add_param_group({"params": self.later})


class FreezesLater(Loop):
    """Parameters are frozen from step 5 on. (DistributedDataParallel wants to know of those beforehand.)"""

    only = ("fsdp2",)

    def above(self, step: int) -> None:
        super().above(step)
        if step == 5:
            self.net.down.requires_grad_(False)


class ModuleCounter(Loop):
    """A number that is an attribute of a module changes in each forward pass."""

    def build(self) -> Net:
        net = super().build()
        net.norm.calls = 0
        net.norm.register_forward_hook(self.count)
        return net

    def count(self, module: nn.Module, _inputs: object, hidden: Tensor) -> Tensor:
        if module.training:
            module.calls += 1
        return hidden * (1 + 0.1 * module.calls)


class LaterNumbers(MeanLoss):
    """Numbers that the model gets while it is trained: one in the first step, one below the block now and then."""

    def loss(self, batch: Tensor, step: int) -> Tensor:
        self.net.seen = getattr(self.net, "seen", 0) + 1
        return super().loss(batch * (1 + 0.1 * self.net.seen + getattr(self.net, "average", 0.0)), step)

    def below(self, step: int) -> None:
        super().below(step)
        if self.due(step):
            self.net.average = 0.9 * getattr(self.net, "average", 0.0) + 0.1 * self.mean


class CarriedHidden(Loop):
    """Back-propagation through time that is cut off: what the network has computed is the next step's input."""

    hidden = torch.zeros(4)

    def loss(self, batch: Tensor, step: int) -> Tensor:
        self.hidden = self.model(batch + self.hidden.mean()).mean(0)
        loss = self.hidden.square().mean()
        self.hidden = self.hidden.detach()
        return loss


class ForgottenGenerator(Loop):
    """Random numbers of a generator that is not registered."""

    def prepare(self) -> None:
        super().prepare()
        self.forgotten = np.random.default_rng(self.rank)

    def loss(self, batch: Tensor, step: int) -> Tensor:
        return super().loss(batch * float(self.forgotten.random()), step)


class ForgottenData(Loop):
    """Batches of a loader that recovery has not been given."""

    def prepare(self) -> None:
        super().prepare()
        self.batches = itertools.cycle(self.data.loader)

    def batch(self, step: int) -> Tensor:
        batch: Tensor = next(self.batches)
        return batch


class ForgottenOptimizer(TwoOptimizers):
    def register(self) -> None:
        Loop.register(self)


class ForgottenAverage(Loop):
    only = ("ddp",)

    def prepare(self) -> None:
        super().prepare()
        self.averaged = AveragedModel(self.net, use_buffers=True)

    def after(self, step: int) -> None:
        super().after(step)
        self.averaged.update_parameters(self.net)

    def end(self) -> dict[str, object]:
        return {**super().end(), "averaged": self.averaged.state_dict()}


class DrawsBetween(RandomBatches):
    """Random numbers between the backward pass and the optimizer: the next batches follow from them."""

    def before(self, step: int, loss: Tensor) -> None:
        super().before(step, loss)
        torch.rand(3)


class PlainVariable(RandomBatches):
    """nanoGPT's ``iter_num``: the learning rate depends on it, nothing is informed of it, and in a replacement it is
    0."""

    iter_num = 0

    def before(self, step: int, loss: Tensor) -> None:
        super().before(step, loss)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.iter_num)

    def below(self, step: int) -> None:
        super().below(step)
        self.iter_num += 1


class PlainRateBelow(Loop):
    """The same below the block: the first step after a recovery still has the right learning rate."""

    iter_num = 0

    def below(self, step: int) -> None:
        super().below(step)
        self.iter_num += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.iter_num)


class PlainCounter(Loop):
    """Counts its steps in a plain variable, and does something at the eighth one."""

    counter = 0

    def below(self, step: int) -> None:
        super().below(step)
        self.counter += 1
        if self.counter == 8:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5


class WeightsOfOneRank(Loop):
    """In one step rank 2 changes its weights, as memory that has gone wrong does."""

    def after(self, step: int) -> None:
        super().after(step)
        if self.rank == 2 and step == 5:
            with torch.no_grad():
                self.net.down.bias.add_(0.125)


class FoundByRankZero(Loop):
    """A registered object that only rank 0 changes, once, and nothing is said of that."""

    def prepare(self) -> None:
        super().prepare()
        self.objects["found"] = Kept(0)

    def below(self, step: int) -> None:
        super().below(step)
        if self.rank == 0 and step == 5:
            self.objects["found"].value = 1


class ReduceAbove(MeanLoss):
    """Collectives between ``for`` and ``with``."""

    def above(self, step: int) -> None:
        super().above(step)
        there = torch.ones(1)
        dist.all_reduce(there)


class ReduceBelow(EvaluationBelow):
    """The ranks add up what their evaluations have found, below the block. With ``--slow PLACE``, all but rank 1 are
    late there once, and so hear of its death before they communicate."""

    def after(self, step: int) -> None:
        super().after(step)
        self.late("after", step)

    def below(self, step: int) -> None:
        self.late("below", step)
        super().below(step)

    def late(self, place: str, step: int) -> None:
        if self.slow == place and step == 5 and self.rank != 1 and self.recovery.generation == 0:
            time.sleep(2)

    def evaluate(self, batch: Tensor) -> float:
        total = torch.tensor(super().evaluate(batch))
        dist.all_reduce(total)
        return float(total)


class MeanBelow(ReduceBelow):
    """Only the mean of the losses, in each step, and no random numbers."""

    def prepare(self) -> None:
        self.average = self.objects["average"] = Kept(0.0)

    def before(self, step: int, loss: Tensor) -> None:
        super().before(step, loss)
        self.newest = loss.detach().clone()

    def below(self, step: int) -> None:
        self.late("below", step)
        dist.all_reduce(self.newest)
        self.average.value = 0.9 * self.average.value + 0.1 * float(self.newest)


class LeavesBelow(Loop):
    """Rank 0 leaves the loop if another rank does not answer, below the block."""

    def leaves(self, step: int) -> bool:
        there = torch.ones(1)
        dist.all_reduce(there)
        return self.rank == 0 and float(there) < self.world


class AccumulatesAcross(Loop):
    """Every micro-batch is its own step; the optimizer steps at every third one."""

    def gradients(self, step: int) -> tuple[Tensor, Tensor]:
        if step % 3 == 0:
            self.optimizer.zero_grad()
        self.boundary = step % 3 == 2
        return super().gradients(step)

    def clear(self) -> None:
        """Not yet."""

    def optimize(self) -> None:
        if self.boundary:
            super().optimize()


class TensorRate(Loop):
    """The learning rate is a tensor."""

    def prepare(self) -> None:
        super().prepare()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=torch.tensor(0.01))
        self.objects["schedule"] = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))

    def below(self, step: int) -> None:
        super().below(step)
        self.objects["schedule"].step()


class SeveralOptimizers(Loop):
    """Muon for the matrices, another one for the rest."""

    only = ("ddp",)

    def prepare(self) -> None:
        super().prepare()
        parameters = list(self.net.parameters())
        self.optimizer = torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01)
        self.second = torch.optim.NAdam([p for p in parameters if p.ndim != 2], lr=0.01)

    def register(self) -> None:
        self.recovery.register(model=self.model, optimizer=[self.optimizer, self.second], **self.objects)

    def optimize(self) -> None:
        super().optimize()
        self.second.step()
        self.second.zero_grad()

    def end(self) -> dict[str, object]:
        return {**super().end(), "second": self.second.state_dict()}


class OwnerMomentum(torch.optim.Optimizer):
    """Each rank owns whole parameters: it alone has their momentum, steps on them and sends them to the others, as in
    a layer-wise Muon. After ``moves`` steps others own them."""

    moves = 4

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.02, "momentum": 0.9})
        self.sending: Callable[[], None] = lambda: None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            first = int(group["taken"] > self.moves)
            for number, parameter in enumerate(group["params"]):
                if (number + first) % world == rank:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.mul_(group["momentum"]).add_(parameter.grad)
                    parameter.sub_(momentum, alpha=group["lr"])
            for number, parameter in enumerate(group["params"]):
                if number == 1:
                    self.sending()
                dist.broadcast(parameter, (number + first) % world)


class CountingMomentum(torch.optim.Optimizer):
    """Counts its steps in each group that has parameters, as FusedAdam of apex and Transformer Engine does."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.1)
                parameter.sub_(momentum / (1 - 0.9 ** group["step"]), alpha=group["lr"])


class Another(Loop):
    """``others``: further models, each with its own optimizer."""

    only = ("ddp",)

    def __init__(self, framework: str) -> None:
        self.others: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        super().__init__(framework)

    def register(self) -> None:
        super().register()
        for model, optimizer in self.others.values():
            self.recovery.register(model=model, optimizer=optimizer)

    def before(self, step: int, loss: Tensor) -> None:
        super().before(step, loss)
        for model, optimizer in self.others.values():
            optimizer.zero_grad()
            model(self.seen).square().mean().backward()

    def loss(self, batch: Tensor, step: int) -> Tensor:
        self.seen = batch
        return super().loss(batch, step)

    def optimize(self) -> None:
        super().optimize()
        for _, optimizer in self.others.values():
            optimizer.step()

    def end(self) -> dict[str, object]:
        found = {}
        for name, (model, optimizer) in self.others.items():
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            states = [dict(optimizer.state.get(parameter, {})) for parameter in model.parameters()]
            found[name] = ([*model.parameters()], states, groups)
        return {**super().end(), **found}


class OwnedParameters(Another):
    """Which rank has the momentum of a parameter is only known when it is there."""

    def prepare(self) -> None:
        super().prepare()
        torch.manual_seed(5)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4)))
        optimizer = OwnerMomentum(model.parameters())
        optimizer.sending = lambda: self.kills.at(proof.BROADCAST)
        self.others["owned"] = model, optimizer


class LocalWeights(Another):
    """Local SGD: a model that no wrapper keeps equal, averaged every few steps."""

    def prepare(self) -> None:
        super().prepare()
        torch.manual_seed(6)
        self.local = nn.Linear(WIDTH, 4)
        self.others["local"] = self.local, torch.optim.AdamW(self.local.parameters(), lr=0.01)

    def after(self, step: int) -> None:
        super().after(step)
        if self.due(step):
            with torch.no_grad():
                for parameter in self.local.parameters():
                    dist.all_reduce(parameter)
                    parameter /= self.world


class CountsInGroups(Another):
    """Replicas whose parameters are in other groups on each rank: one of these is empty on all but rank 0. A setting of
    the groups differs from the start."""

    def prepare(self) -> None:
        super().prepare()
        torch.manual_seed(7)
        model = nn.Linear(WIDTH, 4)
        decayed, others = ([model.weight], [model.bias]) if self.rank == 0 else ([model.weight, model.bias], [])
        self.counted = model
        groups = [{"params": decayed, "of": self.rank}, {"params": others, "of": self.rank}]
        self.others["counted"] = model, CountingMomentum(groups)

    def before(self, step: int, loss: Tensor) -> None:
        super().before(step, loss)
        for parameter in self.counted.parameters():
            dist.all_reduce(parameter.grad)


def fixed_or_any(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend of ``torch.compile`` whose kernels for any size round otherwise than those for a fixed one."""
    if not any(isinstance(one, torch.SymInt) for one in inputs):
        return graph.forward
    return lambda *arguments: tuple(one * (1 + 2**-20) for one in graph.forward(*arguments))


def weighted(outputs: Tensor) -> Tensor:
    return outputs.square().sum(-1) * 0.5


class CompiledSizes(Loop):
    """A compiled function whose input has other sizes in each step and within it: from its second call on, Dynamo's
    kernel is for any size."""

    def prepare(self) -> None:
        super().prepare()
        self.weighted = torch.compile(weighted, backend=fixed_or_any)

    def loss(self, batch: Tensor, step: int) -> Tensor:
        outputs = self.model(batch)
        sizes = (2 + step % 3, 2 + (step + 1) % 3)
        return torch.stack([self.weighted(outputs[:size]).mean() for size in sizes]).sum() + outputs.sum() * 0.001


def spread(noise: Tensor, scale: Tensor) -> Tensor:
    return (noise * scale).var(1)


class CompiledByInductor(Loop):
    """The same with Inductor: of a variance it makes another kernel for any length than for a fixed one."""

    only = ("ddp",)

    def prepare(self) -> None:
        super().prepare()
        self.spread = torch.compile(spread)

    def loss(self, batch: Tensor, step: int) -> Tensor:
        outputs = self.model(batch)
        length = (16, 200, 1000, 120)[step % 4]
        noise = torch.randn(4, length, 64, generator=torch.Generator().manual_seed(step))
        result: Tensor = self.spread(noise, outputs.mean()).square().sum() + outputs.square().mean()
        return result


LOOPS: dict[str, type[Loop]] = {
    "plain": Loop,
    "expert-bias": ExpertBias,
    "rank-bias": RankBias,
    "scheduler-below": SchedulerBelow,
    "evaluation-below": EvaluationBelow,
    "evaluation-inside": EvaluationInside,
    "late-draws": LateDraws,
    "in-place-batches": InPlaceBatches,
    "python-and-numpy": PythonAndNumpy,
    "ema-of-rank-buffers": EmaOfRankBuffers,
    "large-own-state": LargeOwnState,
    "averaged-in-block": AveragedInBlock,
    "averaged-below": AveragedBelow,
    "accumulation": Accumulation,
    "rate-by-hand": RateByHand,
    "rate-by-hand-below": RateByHandBelow,
    "edited-groups": EditedGroups,
    "generators": Generators,
    "running-average": RunningAverage,
    "running-average-below": RunningAverageBelow,
    "best-of-rank-zero": BestOfRankZero,
    "replaced-buffers": ReplacedBuffers,
    "skips-together": SkipsTogether,
    "packed-documents": PackedDocuments,
    "differs-from-the-start": DiffersFromTheStart,
    "random-batches": RandomBatches,
    "ema-module": EmaModule,
    "checkpointed-batch-norm": CheckpointedBatchNorm,
    "prefetch-below": PrefetchBelow,
    "draws-above": DrawsAbove,
    "decay-sometimes": DecaySometimes,
    "decay-above": DecayAbove,
    "momentum-edited": MomentumEdited,
    "silent-codebook": SilentCodebook,
    "silent-queue": SilentQueue,
    "silent-first-on-rank-zero": SilentFirstOnRankZero,
    "draws-between": DrawsBetween,
    "two-optimizers": TwoOptimizers,
    "scaler": Scaler,
    "spectral-norm": SpectralNorm,
    "freezes-later": FreezesLater,
    "module-counter": ModuleCounter,
    "later-numbers": LaterNumbers,
    "tensor-rate": TensorRate,
    "several-optimizers": SeveralOptimizers,
    "owned-parameters": OwnedParameters,
    "local-weights": LocalWeights,
    "counts-in-groups": CountsInGroups,
    "compiled-sizes": CompiledSizes,
    "compiled-by-inductor": CompiledByInductor,
}
UNPROTECTED: dict[str, type[Loop]] = {
    "plain-variable": PlainVariable,
    "plain-rate-below": PlainRateBelow,
    "plain-counter": PlainCounter,
    "plain-skips": PlainSkips,
    "skips-alone": SkipsAlone,
    "packs-outside": PacksOutside,
    "weights-of-one-rank": WeightsOfOneRank,
    "found-by-rank-zero": FoundByRankZero,
    "reduce-above": ReduceAbove,
    "differs-later": DiffersLater,
    "reduce-below": ReduceBelow,
    "mean-below": MeanBelow,
    "leaves-below": LeavesBelow,
    "silent-later": SilentLater,
    "group-later": GroupLater,
    "pruned-later": PrunedLater,
    "accumulates-across": AccumulatesAcross,
    "carried-hidden": CarriedHidden,
    "forgotten-generator": ForgottenGenerator,
    "forgotten-data": ForgottenData,
    "forgotten-optimizer": ForgottenOptimizer,
    "forgotten-average": ForgottenAverage,
}
"""Loops that change or send what no process knows of. The job has to say so."""


def loop_class(names: str) -> type[Loop]:
    """One loop, or several in one: every one of them does its unusual thing."""
    return type(names, tuple((LOOPS | UNPROTECTED)[name] for name in names.split("+")), {})


def main() -> None:
    parser = proof.flags(__doc__)
    parser.add_argument("--loop", type=loop_class, default="plain", metavar="NAME[+NAME...]")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="ddp")
    parser.add_argument("--slow", choices=("after", "below"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    loop = args.loop(args.framework)
    loop.slow = args.slow
    loop.kills = kills = proof.Kills(args.kill, loop.recovery, args.pause)
    kills.in_backward_of(loop.net.norm)

    for step in loop.recovery.steps(args.steps):
        kills.step = step.index
        loop.above(step.index)
        with step:
            kills.at("data")
            loop.clear()
            batch, loss = loop.gradients(step.index)
            loop.before(step.index, loss)
            proof.say_step(step.index, batch, loss, loop.optimizer.param_groups[0]["lr"])
            loop.optimize()
            kills.at("optimizer")
            loop.after(step.index)
        kills.at("below")
        loop.below(step.index)
        kills.at("end")
        if loop.leaves(step.index):
            break

    proof.say_end(loop.model, loop.optimizer, loop.end())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
