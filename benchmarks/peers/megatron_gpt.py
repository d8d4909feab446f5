"""megatron-core on the same data: with FlashRecovery, and restarted by ``torchrun`` from a checkpoint a step.

TP 2 x DP 2, and DP 4 with the distributed optimizer in bf16. The restart's checkpoint is Megatron's own
(``dist_checkpointing``), every step, which is the most favourable interval for it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import workload
from harness import Launch
from peers import Peer, ours, torchrun_restart
from workload import Job

TENSOR = "megatron-tp2-dp2"
DISTRIBUTED = "megatron-dp4-distributed"
OVERLAPS = "megatron-dp4-overlaps"
RESTART = "-restart"
FLAGS = {
    TENSOR: ["--tensor-model-parallel-size=2"],
    DISTRIBUTED: ["--use-distributed-optimizer", "--bf16"],
    OVERLAPS: ["--use-distributed-optimizer", "--bf16", "--overlap-grad-reduce", "--overlap-param-gather"],
}
ENVIRONMENT = {"FR_MEGATRON_CPU": "1"}


def start_protected(job: Job, launch: Launch, layout: str, standby: int) -> None:
    """``flashrecovery run`` with that many standbys."""
    ours.start(replace(job, layout=layout), launch, standby, __file__, **ENVIRONMENT)


def start_restarted(job: Job, launch: Launch, layout: str) -> None:
    """``torchrun`` that restarts all workers."""
    torchrun_restart.start(replace(job, layout=layout + RESTART), launch, __file__, **ENVIRONMENT)


def start_bare(job: Job, launch: Launch, layout: str) -> None:
    """``torchrun`` without any protection."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.world}", __file__]
    launch.start(command, **ENVIRONMENT, **replace(job, layout=layout).to_env())


def _protected(name: str, layout: str) -> Peer:
    return Peer(
        name=f"megatron-core {name}, FlashRecovery, one standby",
        start=partial(start_protected, layout=layout, standby=1),
        settings="defaults; --standby 1",
        ready=ours.standby_ready,
        first=4,
        whole=4,
    )


def _restarted(name: str, layout: str) -> Peer:
    return Peer(
        name=f"megatron-core {name}, torchrun restart + dist_checkpointing",
        start=partial(start_restarted, layout=layout),
        settings="checkpoint each step, --max-restarts 3",
        first=4,
        whole=4,
    )


TENSOR_STANDBY, TENSOR_RESTARTED = _protected("TP2 x DP2", TENSOR), _restarted("TP2 x DP2", TENSOR)
DISTRIBUTED_STANDBY = _protected("DP4 distributed optimizer", DISTRIBUTED)
DISTRIBUTED_RESTARTED = _restarted("DP4 distributed optimizer", DISTRIBUTED)


def unique_bytes(job: Job) -> int:
    """What of a rank's state no other rank holds: fp32 copy, exp_avg and exp_avg_sq of its part."""
    return 12 * sum(p.numel() for p in workload.build_model(job).parameters()) // job.world


class Training:
    """The example's model, optimizer and data in the sizes of the job."""

    def __init__(self, job: Job) -> None:
        import fr_megatron.digest  # noqa: F401, I001 - first: it brings the stand-ins for a GPU

        import megatron_data
        import megatron_model
        import pretrain_gpt
        import training

        sizes = {
            "layers": job.layers,
            "width": job.width,
            "context": job.context,
            "batch-size": job.batch_size,
            "steps": job.steps,
        }
        flags = [f"--{name}={value}" for name, value in sizes.items()]
        self.job = job
        layout = job.layout.removesuffix(RESTART)
        self.args = megatron_model.parser(None).parse_args([*flags, "--micro-batches=1", *FLAGS[layout]])
        self.device = training.start_process_group()
        megatron_model.start_groups(self.args)
        config = megatron_model.model_config(self.args)
        self.chunks: list[Any] = megatron_model.build_chunks(self.args, config)
        self.optimizer, self.scheduler = megatron_model.build_optimizer(self.args, config, self.chunks)
        self.loader = megatron_data.build_loader(self.args)
        self._train_step = pretrain_gpt.train_step

    def step(self, batch: Any) -> None:
        """One optimizer step."""
        workload.think(self.job)
        self._train_step(self.args, self.chunks, self.optimizer, self.scheduler, [batch], self.device)

    def probe(self) -> workload.Probe:
        """Whose victim dies when backward comes to the first layer."""
        import torch.distributed as dist

        first = next(p for name, p in self.chunks[0].named_parameters() if "layers.0." in name)
        return workload.Probe(self.job, dist.get_rank(), first)


class Checkpoint:
    """Megatron's own, of one step at a time."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._directory = Path(training.job.directory) / "checkpoints"

    def _state(self, *, loading: bool) -> dict[str, Any]:
        chunk, optimizer = self._training.chunks[0].module, self._training.optimizer
        model = chunk.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
        return {
            "model": model,
            "optimizer": optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata),
            "scheduler": self._training.scheduler.state_dict(),
        }

    def load(self) -> int:
        """The step to go on with."""
        from megatron.core import dist_checkpointing

        steps = [int(p.name) for p in self._directory.glob("*") if (p / "whole").exists()]
        if not steps:
            return 0
        for inner in self._training.optimizer.chained_optimizers:
            if hasattr(inner, "_init_optimizer_states_with_dummy_values"):
                inner._init_optimizer_states_with_dummy_values()  # torch's Adam has no state to load into before a step
        state = dist_checkpointing.load(self._state(loading=True), str(self._directory / str(max(steps))))
        self._training.chunks[0].module.load_state_dict(state["model"])
        self._training.optimizer.load_state_dict(state["optimizer"])
        self._training.scheduler.load_state_dict(state["scheduler"])
        return max(steps)

    def save(self, step: int) -> None:
        """Begin with ``step`` from here."""
        import torch.distributed as dist
        from megatron.core import dist_checkpointing

        directory = self._directory / str(step)
        if dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)  # of an attempt that died
            directory.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(self._state(loading=False), str(directory))
        if dist.get_rank() == 0:
            (directory / "whole").touch()
            shutil.rmtree(self._directory / str(step - 2), ignore_errors=True)


def _protected_loop(training: Training) -> None:
    import fr_megatron

    recovery = fr_megatron.attach(training.chunks, training.optimizer, training.scheduler)
    batches = recovery.data(training.loader)
    probe = training.probe()
    committed = None
    for step in recovery.steps(training.job.steps):
        if committed is not None and step.index == committed + 1:
            probe.end(committed)
        with step:
            probe.begin(step.index)
            training.step(next(batches))
        committed = step.index


def _restartable_loop(training: Training) -> None:
    checkpoint = Checkpoint(training)
    first = checkpoint.load()
    batches: Iterator[Any] = workload.endless(training.loader)
    for _ in range(first):
        next(batches)
    probe = training.probe()
    for step in range(first, training.job.steps):
        probe.begin(step)
        training.step(next(batches))
        checkpoint.save(step + 1)
        probe.end(step)


def main() -> None:
    """Train."""
    import torch.distributed as dist

    job = Job.from_env()
    training = Training(job)
    _restartable_loop(training) if job.layout.endswith(RESTART) else _protected_loop(training)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
