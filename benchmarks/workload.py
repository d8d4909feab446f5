"""The job that every system of the comparison runs: the example's GPT and data, a step log, one SIGKILL.

A worker finds its :class:`Job` in the environment. It writes each finished step with the machine-wide
monotonic clock to a separate file, and the victim kills itself with SIGKILL from a gradient hook in the
first block, while backward is under way and before its last gradients have been exchanged. So the kill is
the same for all systems and uses nothing of any of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from harness import EXAMPLE, JOB_ENV

sys.path.append(str(EXAMPLE))

import corpus
from data import BlockDataset, make_loader
from model import GPT, GPTConfig


@dataclass(frozen=True)
class Job:
    """One launch.

    Attributes:
        directory: where step logs and the time of the kill are written.
        world: ranks that train.
        steps: steps to train.
        victim: rank that dies in the first step after :attr:`arm_file` has been made.
        kill_at: ``backward``, or ``between`` steps (for systems that do badly with a kill in a collective).
        batch_size: blocks per rank and step; ``context`` tokens each.
        step_time_ms: sleep in each step, for the computation an accelerator would do.
        layout: ``ddp`` or ``fsdp`` (only for FlashRecovery's own measurements).
        ballast_bytes: further resident memory of the victim.
        whole_node: the victim's launcher, which is its parent process, dies with it.
    """

    directory: str
    world: int = 4
    steps: int = 1000
    victim: int = 1
    kill_at: str = "backward"
    batch_size: int = 2
    context: int = 128
    layers: int = 4
    width: int = 128
    step_time_ms: float = 0.0
    layout: str = "ddp"
    ballast_bytes: int = 0
    whole_node: bool = False

    def with_layout(self, layout: str) -> Job:
        """The same job in another layout."""
        return replace(self, layout=layout)

    def with_its_launcher(self) -> Job:
        """The same job, with the loss of a whole node."""
        return replace(self, whole_node=True)

    def to_env(self) -> dict[str, str]:
        """The variable in which a worker finds this job."""
        return {JOB_ENV: json.dumps(asdict(self))}

    @staticmethod
    def from_env() -> Job:
        """The job of this worker. Raises KeyError outside of a benchmark."""
        return Job(**json.loads(os.environ[JOB_ENV]))

    @property
    def arm_file(self) -> Path:
        """Made by the benchmark when the victim shall die."""
        return Path(self.directory) / "armed"

    @property
    def kill_file(self) -> Path:
        """Written by the victim at its death: ``{"t": <monotonic clock, s>, "step": <index>}``."""
        return Path(self.directory) / "killed.json"


def build_model(job: Job) -> GPT:
    """Equal initial weights on every rank."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=corpus.VOCABULARY, context=job.context, layers=job.layers, width=job.width))


def build_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW, so that there is state to lose."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def build_loader(job: Job, rank: int, world: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """The example's data: bytes of Python's own sources."""
    prefix = corpus.prepare(None, corpus.default_data_dir(), 8 << 20)
    dataset = BlockDataset(prefix, job.context)
    return make_loader(dataset, rank=rank, world=world, batch_size=job.batch_size, seed=0)


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """Epoch after epoch."""
    epoch = 0
    while True:
        sampler: Any = loader.sampler
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def first_parameter(model: GPT) -> torch.nn.Parameter:
    """The one whose gradient is among the last."""
    return model.blocks[0].get_parameter("norm1.weight")


class Probe:
    """What a worker reports: each finished step, and its own death, when the gradient of ``first`` is there; of a
    module, which FSDP2 needs, that of its output."""

    def __init__(self, job: Job, rank: int, first: torch.nn.Parameter | torch.nn.Module) -> None:
        self.job = job
        self.rank = rank
        self.log: IO[str] = open(Path(job.directory) / f"steps.{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115
        self.step = 0
        self.doomed = False
        if isinstance(first, torch.nn.Module):
            first.register_forward_hook(lambda _, __, output: self._watch(output))
        else:
            self._watch(first)

    def _watch(self, tensor: Tensor) -> None:
        tensor.register_hook(self._backward_has_come_to_the_first_block)

    def begin(self, step: int) -> None:
        """A step starts. The victim dies in this step's backward, once in the life of the job."""
        self.step = step
        victim = self.rank == self.job.victim
        self.doomed = victim and self.job.arm_file.exists() and not self.job.kill_file.exists()
        if self.doomed and self.job.kill_at == "between":
            self._die()

    def end(self, step: int) -> None:
        """A step has been committed."""
        cpu = {"own_s": time.thread_time(), "all_s": time.process_time()}
        self.log.write(json.dumps({"rank": self.rank, "step": step, "t": time.monotonic(), **cpu}) + "\n")

    def _backward_has_come_to_the_first_block(self, _: Tensor) -> None:
        if self.doomed:
            self._die()

    def _die(self) -> None:
        self.job.kill_file.write_text(json.dumps({"t": time.monotonic(), "step": self.step}))
        if self.job.whole_node:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def think(job: Job) -> None:
    """The part of a step that is no work for this machine's cores."""
    if job.step_time_ms:
        time.sleep(job.step_time_ms / 1e3)
