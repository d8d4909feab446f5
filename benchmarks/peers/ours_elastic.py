"""FlashRecovery without any room for the dead rank: the others go on in their processes, with the same global batch.

``--config`` says ``replace: never``, so that a rank that could be replaced on this one machine is not.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch.distributed as dist

import corpus
import flashrecovery
import workload
from data import BlockDataset
from harness import Launch
from peers import Peer, ours
from workload import Job

LEAST = 2


def start(job: Job, launch: Launch, layout: str) -> None:
    """``flashrecovery run --elastic``; JSON is YAML."""
    config = Path(job.directory) / "elastic.yaml"
    config.write_text(json.dumps({"elastic": {"min": LEAST, "max": job.world, "replace": "never"}}))
    options = ("--config", str(config), "--elastic", f"{LEAST}:{job.world}")
    ours.start(job.with_layout(layout), launch, standby=0, script=__file__, options=options)


_SETTINGS = "--elastic 2:4, no replacement"
DDP = Peer(
    name="FlashRecovery elastic, 4 -> 3",
    start=partial(start, layout="ddp"),
    settings=_SETTINGS,
    first=3,
    whole=None,
)
FSDP2 = Peer(
    name="FlashRecovery elastic, FSDP2, 4 -> 3",
    start=partial(start, layout="fsdp"),
    settings=f"{_SETTINGS}; shards laid out again",
    first=3,
    whole=None,
)


def main() -> None:
    """Train."""
    job = Job.from_env()
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    gpt = workload.build_model(job)
    model = ours.wrap(gpt, job)
    optimizer = workload.build_optimizer(gpt)
    recovery.register(model=model, optimizer=optimizer)
    dataset = BlockDataset(corpus.prepare(None, corpus.default_data_dir(), 8 << 20), job.context)
    batches = recovery.elastic_batches(
        dataset, global_batch=job.batch_size * job.world, micro_batch=job.batch_size, seed=0
    )
    first = gpt.blocks[0] if job.layout == "fsdp" else workload.first_parameter(gpt)
    probe = workload.Probe(job, dist.get_rank(), first)
    committed = None
    for step in recovery.steps(job.steps):
        if committed is not None and step.index == committed + 1:
            probe.end(committed)
        with step:
            probe.begin(step.index)
            optimizer.zero_grad()
            for batch in batches.of(step.index):
                x, y = batch.data
                (model(x, y) * batch.weight).backward()
            workload.think(job)
            optimizer.step()
        committed = step.index
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
