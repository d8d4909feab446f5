"""Train a small GPT with Ray Train's ``TorchTrainer``, and keep training when a rank dies::

    python examples/gpt/train_ray.py --workers 4 --steps 200            # needs: pip install "ray[train]"
    python examples/gpt/train_ray.py --actors --workers 4 --steps 200   # train_ddp.py on a placement group's actors

The loop is as one writes it for Ray Train, with flashrecovery's lines in it; ``recoverable()`` is what makes its ranks
replaceable. Without a Ray cluster (RAY_ADDRESS) one is started on this machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """One rank."""
    import ray.train
    import ray.train.torch
    import torch

    import flashrecovery
    import training

    args = training.parser(None).parse_args(config["flags"])
    recovery = flashrecovery.init()
    device = ray.train.torch.get_device()
    model = ray.train.torch.prepare_model(training.build_model(args, device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = training.build_scheduler(optimizer, args.steps)
    recovery.register(model=model, optimizer=optimizer, scheduler=scheduler)

    training.seed_rank(args.seed)
    data = recovery.data(training.build_loader(args))
    log = training.StepLog(args)
    for step in recovery.steps(args.steps):
        with step:
            x, y = next(data)
            loss = model(x.to(device), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if step.committed:  # not of an attempt that is done again
            log.step(step.index, loss)
        if (step.index + 1) % config["report_every"] == 0:
            with TemporaryDirectory() as folder:
                checkpoint = None
                if ray.train.get_context().get_world_rank() == 0:
                    torch.save(model.state_dict(), Path(folder) / "model.pt")
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"step": step.index, "loss": loss.item()}, checkpoint=checkpoint)
    if args.digest:
        training.print_digest(model, optimizer)


def main() -> None:
    """Start the workers, and wait for them."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument(
        "--actors", action="store_true", help="train_ddp.py on actors of a placement group, without Ray Train"
    )
    p.add_argument("--cpus-per-worker", type=float, default=1.0)
    p.add_argument("--report-every", type=int, default=2, metavar="STEPS")
    p.add_argument("--options", default="--standby 1", help="of `flashrecovery adopt`")
    p.add_argument("--run-dir", type=Path, default=Path("runs/ray"))
    args, flags = p.parse_known_args()

    import ray

    import flashrecovery.ray

    ray.init(ignore_reinit_error=True)
    options, resources = args.options.split(), {"CPU": args.cpus_per_worker}
    if args.actors:
        command = [str(HERE / "train_ddp.py"), *flags]
        options += ["--run-dir", str(args.run_dir.absolute())]
        flashrecovery.ray.run(command, num_workers=args.workers, resources_per_worker=resources, options=options)
        return
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        flashrecovery.ray.recoverable(train_loop_per_worker, options=options, run_dir=args.run_dir),
        train_loop_config={"flags": flags, "report_every": args.report_every},
        scaling_config=ScalingConfig(num_workers=args.workers, resources_per_worker=resources),
        run_config=RunConfig(name="gpt", storage_path=str(args.run_dir.absolute() / "ray")),
    )
    result = trainer.fit()
    print("reported:", [metrics for _, metrics in result.best_checkpoints], file=sys.stderr)


if __name__ == "__main__":
    main()
