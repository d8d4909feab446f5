"""Train a small GPT-2 with the Hugging Face Trainer, and keep training when a rank dies::

    pip install transformers accelerate
    flashrecovery run --nproc-per-node 4 --standby 1 examples/gpt/train_hf.py --by ddp
    torchrun --nproc-per-node 4 examples/gpt/train_hf.py --by ddp        # the same script, without recovery

The model is made from a config, nothing is downloaded. What switches recovery on is ``protect(trainer)``. ``--by``
DeepSpeed (the default) takes ``ds_zero<N>.json`` beside this file, in which ``"flash_recovery": {"enabled": true}``
switches it on.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import corpus
import training
from data import BlockDataset
from flashrecovery.trainer import protect

_OF_THE_CLOCK = ("runtime", "per_second")
"""Parts of keys in the history that differ from launch to launch."""


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of text as the Trainer wants them. ``range_``: which of the data set's."""

    def __init__(self, blocks: Dataset[Any], range_: range) -> None:
        self._blocks = Subset(blocks, range_)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, _ = self._blocks[index]
        return {"input_ids": tokens, "labels": tokens.clone()}


class Losses(TrainerCallback):  # type: ignore[misc]  # untyped where transformers is not installed
    """Prints each logged loss with all its bits, on every rank."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        for name in ("loss", "eval_loss"):
            if logs and name in logs:
                value = float(logs[name])
                # An evaluation has its line beside its step's.
                step = 2 * state.global_step + (name == "eval_loss")
                training.emit(f"rank={args.process_index} step={step} {name}={value:.6f} loss_hex={value.hex()}")


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed config, with what the Trainer knows better set to ``auto``."""
    path = Path(__file__).with_name(f"ds_zero{args.zero}.json")
    config: dict[str, Any] = json.loads(path.read_text())
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
        config[key] = "auto"
    if args.own_optimizer:
        del config["optimizer"], config["scheduler"]
    else:
        config["optimizer"]["params"] |= {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
        config["scheduler"]["params"] = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    if args.switched_off:
        config["flash_recovery"]["enabled"] = False
    return config


def state(trainer: Any) -> Iterator[tuple[str, object]]:
    """What was trained, and the loop, at the end."""
    zero3 = False
    if trainer.deepspeed is None:
        yield from training.state(trainer.model_wrapped, trainer.optimizer.optimizer)
        yield "schedule", trainer.lr_scheduler.state_dict()
    else:
        import train_deepspeed

        yield from train_deepspeed.state(trainer.deepspeed)
        # The Trainer counts operations by the parameters that are whole at the moment: not always the same with ZeRO-3.
        zero3 = trainer.deepspeed.zero_optimization_stage() == 3
    unsteady = (*_OF_THE_CLOCK, "total_flos") if zero3 else _OF_THE_CLOCK
    history = [
        {k: v for k, v in entry.items() if not any(word in k for word in unsteady)}
        for entry in trainer.state.log_history
    ]
    yield "history", history
    for name in ("global_step", "epoch", "total_flos", "best_metric", "max_steps"):
        if name not in unsteady:
            yield name, getattr(trainer.state, name)
    yield "total_loss", trainer._total_loss_scalar


def main() -> None:
    """Train as the flags say."""
    flags = training.parser(__doc__)
    flags.add_argument("--by", choices=("deepspeed", "ddp"), default="deepspeed", help="what trains")
    flags.add_argument("--zero", type=int, default=2, choices=range(4), help="ZeRO stage")
    flags.add_argument("--accumulate", type=int, default=2, help="micro-batches an optimizer step")
    flags.add_argument("--blocks", type=int, default=100, help="blocks an epoch, of all ranks")
    flags.add_argument(
        "--own-optimizer", action="store_true", help="the Trainer's optimizer and schedule, not the config's"
    )
    flags.add_argument("--switched-off", action="store_true", help="flash_recovery.enabled = false, or no protect()")
    flags.add_argument("--output", type=Path, default=Path("runs/hf"), help="where the Trainer saves its checkpoints")
    args = flags.parse_args()
    if args.by == "deepspeed":
        import fr_deepspeed  # noqa: F401 - gives the engine its `recovery` under every launcher

    arguments = TrainingArguments(
        output_dir=str(args.output),
        deepspeed=read_config(args) if args.by == "deepspeed" else None,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.lr,
        warmup_steps=5,
        weight_decay=0.1,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=8,
        save_total_limit=1,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        seed=args.seed,
        data_seed=args.seed,
        disable_tqdm=True,
        report_to="none",
    )
    sizes = GPT2Config(
        vocab_size=corpus.VOCABULARY,
        n_positions=args.context,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.heads,
        bos_token_id=corpus.END_OF_DOCUMENT,
        eos_token_id=corpus.END_OF_DOCUMENT,
    )
    torch.manual_seed(args.seed)
    prefix = corpus.prepare(args.data, args.data_dir, int(args.corpus_mib * 2**20))
    blocks = BlockDataset(prefix, args.context)
    trainer = Trainer(
        model=GPT2LMHeadModel(sizes),
        args=arguments,
        train_dataset=Blocks(blocks, range(args.blocks)),
        eval_dataset=Blocks(blocks, range(args.blocks, args.blocks + 20)),
        callbacks=[Losses()] if args.log_all else None,
    )
    if args.by == "deepspeed" or not args.switched_off:
        protect(trainer)
    training.seed_rank(args.seed)
    result = trainer.train()
    trainer.evaluate()

    if args.digest:
        ended = [*state(trainer), ("training_loss", result.training_loss)]
        training.emit(f"digest rank={arguments.process_index} {training.digest(ended)}")


if __name__ == "__main__":
    main()
