"""The loops of ``loops.py`` with DeepSpeed and with megatron-core, and some more that only these have.

A framework is one class here: how the network is wrapped, what backward and the optimizer's step are called, and what
there is at the end.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.scripts import loops, proof


class Framework:
    """What the loops need.

    ``micro_batches``: of one optimizer step, as the framework is told. ``whole``: no other rank is needed for a forward
    pass.
    """

    whole = True
    micro_batches = 1
    recovery: Any
    net: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def zero_grad(self) -> None:
        """Before the first micro-batch."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def evaluated(self, batch: Tensor) -> Tensor:
        result: Tensor = self.model(batch)
        return result

    @contextlib.contextmanager
    def unsynchronised(self) -> Iterator[None]:
        """Around all micro-batches but the last."""
        yield

    def end(self) -> dict[str, object]:
        """This rank's state, without the network's."""
        return {}


class DeepSpeed(Framework):
    """Each micro-batch is followed by ``engine.step()``, which steps after the last."""

    stage = 0

    def __init__(self, net: nn.Module) -> None:
        import deepspeed

        import fr_deepspeed  # noqa: F401 - engine.recovery

        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.micro_batches,
            "steps_per_print": 10**6,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage},
            "flash_recovery": {"enabled": True},
        }
        self.net = net
        self.engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
        self.model, self.optimizer, self.recovery = self.engine, self.engine.basic_optimizer, self.engine.recovery

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def step(self) -> None:
        self.engine.step()

    def end(self) -> dict[str, object]:
        names = ("global_steps", "micro_steps", "global_samples", "skipped_steps")
        return {"counters": {name: getattr(self.engine, name) for name in names}}


class Zero1(DeepSpeed):
    stage = 1


class Zero2(DeepSpeed):
    stage = 2


class Zero3(DeepSpeed):
    stage = 3
    whole = False


class Megatron(Framework):
    """megatron-core's DistributedDataParallel and distributed optimizer around a network that knows nothing of them;
    with timers, and a scheduler that it steps."""

    distributed = True
    overlaps = False

    def __init__(self, net: nn.Module) -> None:
        import fr_megatron  # first: it brings the stand-ins of FR_MEGATRON_CPU=1

        # isort: split

        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.timers import Timers
        from megatron.core.transformer.transformer_config import TransformerConfig

        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1, use_cpu_initialization=True)
        config.timers = Timers(2, "minmax")
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=self.distributed,
            overlap_grad_reduce=self.overlaps,
            overlap_param_gather=self.overlaps,
        )
        self.net = net
        for parameter in net.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        self.chunk = DistributedDataParallel(config, ddp, net)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            min_lr=0.0001,
            clip_grad=1.0,
            use_distributed_optimizer=self.distributed,
            overlap_param_gather=self.overlaps,
        )
        self.whole = get_megatron_optimizer(settings, [self.chunk])
        (inner,) = self.whole.chained_optimizers
        self.scheduler = OptimizerParamScheduler(
            self.whole, 0.0, 0.01, 0.0001, 3, 60, "cosine", 0.01, 0.01, 0, "constant"
        )
        self.model, self.optimizer = self.chunk, inner.optimizer
        self.recovery = fr_megatron.attach(self.chunk, self.whole, self.scheduler)

    def zero_grad(self) -> None:
        self.chunk.zero_grad_buffer()
        self.whole.zero_grad()

    def step(self) -> None:
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.chunk])
        self.whole.step()
        self.scheduler.step(1)

    @contextlib.contextmanager
    def unsynchronised(self) -> Iterator[None]:
        with self.chunk.no_sync():
            yield

    def end(self) -> dict[str, object]:
        return {"scheduler": [self.scheduler.num_steps, self.scheduler.max_lr]}


class MegatronFP32(Megatron):
    """Every rank steps on all parameters: ``FP32Optimizer``."""

    distributed = False


class MegatronOverlaps(Megatron):
    """Hooks of the forward pass gather the parameters."""

    overlaps = True
    whole = False


FRAMEWORKS = {
    "zero0": DeepSpeed,
    "zero1": Zero1,
    "zero2": Zero2,
    "zero3": Zero3,
    "megatron": Megatron,
    "fp32": MegatronFP32,
    "overlaps": MegatronOverlaps,
}
loops.FRAMEWORKS.update(FRAMEWORKS)  # type: ignore[arg-type]


class GrowingBatch(loops.Loop):
    """DeepSpeed: one micro-batch more a step, now and then."""

    def gradients(self, step: int) -> tuple[Tensor, Tensor]:
        for _ in range(self.framework.engine.gradient_accumulation_steps()):  # type: ignore[attr-defined]
            result = super().gradients(step)
        return result

    def below(self, step: int) -> None:
        if self.due(step):
            engine = self.framework.engine  # type: ignore[attr-defined]
            engine.set_train_batch_size(engine.train_batch_size() + 4 * self.world)

    def end(self) -> dict[str, object]:
        return {**super().end(), "batch size": self.framework.engine.train_batch_size()}  # type: ignore[attr-defined]


class HighestRate(loops.MeanLoss):
    """Megatron: the scheduler's highest learning rate is lowered by hand."""

    def below(self, step: int) -> None:
        if self.due(step):
            self.framework.scheduler.max_lr *= 0.7  # type: ignore[attr-defined]


class UnhookedEvaluation(loops.Loop):
    """Megatron: an evaluation at the beginning of each step, without the hooks that gather parameters."""

    def batch(self, step: int) -> Tensor:
        batch = super().batch(step)
        chunk = self.framework.chunk  # type: ignore[attr-defined]
        chunk.disable_forward_pre_hook()
        self.net.eval()
        with torch.no_grad():
            found = self.net(batch).sum()
            dist.all_reduce(found)
        self.net.train()
        chunk.enable_forward_pre_hook()
        return batch


class WeightsAbove(loops.Loop):
    """The weights that the network computes with are made smaller between ``for`` and ``with``, now and then. The step
    makes them again from what it steps on, where that is something else."""

    def above(self, step: int) -> None:
        super().above(step)
        if self.due(step):
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.mul_(0.9)


class MomentumSet(loops.Loop):
    """DeepSpeed: Adam's average of the gradients is halved at the beginning of a step, now and then, by the functions
    that DeepSpeed has for it."""

    def batch(self, step: int) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

        if self.due(step):
            for parameter in self.net.parameters():
                average = safe_get_full_optimizer_state(parameter, "exp_avg")
                assert average is not None
                safe_set_full_optimizer_state(parameter, 0.5 * average, "exp_avg")
        return super().batch(step)


class _Attached:
    """The framework has registered model and optimizer."""

    def register(self: Any) -> None:
        if self.objects:
            own = (
                {"per_rank": self.own}
                if self.own and "per_rank" in signature(self.recovery.register).parameters
                else {}
            )
            self.recovery.register(**self.objects, **own)


MORE: dict[str, type[loops.Loop]] = {
    "growing-batch": GrowingBatch,
    "highest-rate": HighestRate,
    "unhooked-evaluation": UnhookedEvaluation,
    "weights-above": WeightsAbove,
    "momentum-set": MomentumSet,
}
LOOPS: dict[str, Any] = {
    name: type(loop.__name__, (_Attached, loop), {})
    for name, loop in {**loops.LOOPS, **MORE}.items()
    if loop.only == loops.Loop.only or loop is loops.FreezesLater
}


def main() -> None:
    parser = proof.flags(__doc__)
    parser.add_argument("--loop", choices=LOOPS, default="plain")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="zero2")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    Framework.micro_batches = 3 if args.loop == "accumulation" else 1
    loop = LOOPS[args.loop](args.framework)
    framework = loop.framework
    kills = proof.Kills(args.kill, loop.recovery)
    kills.in_backward_of(loop.net.norm)

    for step in loop.recovery.steps(args.steps):
        kills.step = step.index
        loop.above(step.index)
        with step:
            kills.at("data")
            framework.zero_grad()
            batch, loss = loop.gradients(step.index)
            loop.before(step.index, loss)
            proof.say_step(step.index, batch, loss, loop.optimizer.param_groups[0]["lr"])
            framework.step()
            kills.at("optimizer")
            loop.after(step.index)
        kills.at("below")
        loop.below(step.index)
        kills.at("end")

    proof.say_end(loop.net, loop.optimizer, {**framework.end(), **loop.end()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
