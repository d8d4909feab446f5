"""A Hugging Face Trainer script without a line of ours: ``trainer_unmodified.py --by deepspeed --zero 2 --output DIR``.

It goes on from the newest checkpoint in its folder, if there is one. Each rank prints what the Trainer logs, and at
the end the digest of all there is. ``--off``: with the key switched off.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, fsdp_utils
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

CONTEXT, VOCABULARY = 16, 64
_OF_THE_CLOCK = ("runtime", "per_second", "total_flos")


class Blocks(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(0, VOCABULARY, (count, CONTEXT), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index].clone()}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same, without a length."""

    def __iter__(self) -> Any:
        blocks = Blocks(30, 1)
        return (blocks[index] for index in range(30))


class Losses(TrainerCallback):  # type: ignore[misc]
    """Prints what is logged with all its bits: an evaluation in the line behind its step's, and much later when the
    training has ended."""

    def __init__(self) -> None:
        self.ended = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        for number, name in enumerate(("loss", "eval_loss")):
            if logs and name in logs:
                step, value = 2 * state.global_step + number + 1000 * self.ended, float(logs[name]).hex()
                print(f"rank={args.process_index} step={step} loss_hex={value}", flush=True)


def write_config(path: Path, zero: int, *, off: bool) -> str:
    """The JSON file that users have beside their script. Returns its path."""
    adamw = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": {"stage": zero},
        "flash_recovery": {"enabled": not off},
    }
    file = path / f"ds_config{os.environ.get('RANK', '0')}.json"
    file.write_text(json.dumps(config))
    return str(file)


def shard_on_cpus() -> None:
    """accelerate takes no notice of ``fsdp`` there."""
    made = Trainer.create_accelerator_and_postprocess

    def with_fsdp(trainer: Any) -> None:
        made(trainer)
        state = trainer.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"],
            cpu_ram_efficient_loading=False,
        )
        state.distributed_type = DistributedType.FSDP
        trainer.is_fsdp_enabled = True

    Trainer.create_accelerator_and_postprocess = with_fsdp


class Stop(TrainerCallback):  # type: ignore[misc]
    """The training ends early."""

    def __init__(self, at: int) -> None:
        self._at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        control.should_training_stop = state.global_step == self._at


class After(TrainerCallback):  # type: ignore[misc]
    """Decides something in ``event``, when that many lines have been logged."""

    def __init__(self, event: str, lines: int, decides: str) -> None:
        self._event, self._lines, self._decides = event, lines, decides

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        self._lines -= "loss" in (logs or {})
        self._look("on_log", control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._look("on_step_begin", control)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._look("on_pre_optimizer_step", control)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._look("on_step_end", control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._look("on_evaluate", control)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._look("on_save", control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._look("on_epoch_end", control)

    def _look(self, event: str, control: Any) -> None:
        if event == self._event and self._lines <= 0:
            setattr(control, self._decides, True)


class Folders(TrainerCallback):  # type: ignore[misc]
    """Makes the folder of a checkpoint before the Trainer asks whether it is there. With sharded checkpoints it makes
    it later, and what the ranks then take for the best one is a matter of luck."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if control.should_save:
            os.makedirs(Path(args.output_dir) / f"checkpoint-{state.global_step}", exist_ok=True)


def die_while_loading(rank: int, output: Path, *, half: bool) -> None:
    """Once: when this rank is to put in place what it has read of the best model; with ``half``, when it has done so
    and waits for the others."""
    real = fsdp_utils._set_model_state_dict

    def put(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options) if half else None
        died = output / "died"
        if int(os.environ["RANK"]) == rank and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result if half else real(*arguments, **options)

    fsdp_utils._set_model_state_dict = put


class Counted:
    """A metric with memory: it gets worse after a while, whatever the model does."""

    def __init__(self) -> None:
        self.calls, self.sums = 0, [0.0]

    def __call__(self, predicted: Any, compute_result: bool = True) -> dict[str, float]:
        self.calls += 1
        self.sums.append(0.5 * self.sums[-1] + float(predicted.predictions.sum()))
        return {"counted": -abs(self.calls - 2), "sum": self.sums[-1]}


counted = Counted()


def optimizer_state(trainer: Any) -> Any:
    """Of this rank's part."""
    engine = getattr(trainer, "deepspeed", None)
    optimizer = trainer.optimizer.optimizer if engine is None else engine.basic_optimizer
    return [
        [plain(state) for state in optimizer.state.values()],
        [{k: plain(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
    ]


def plain(value: Any) -> Any:
    """What the digest is made of."""
    if isinstance(value, torch.Tensor):
        return getattr(value, "_local_tensor", value).float().tolist()
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items() if not any(w in str(key) for w in _OF_THE_CLOCK)}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--by", choices=("deepspeed", "ddp", "fsdp"), default="deepspeed")
    flags.add_argument("--zero", type=int, default=2)
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--best", action="store_true", help="the best model comes back at the end")
    flags.add_argument("--die-before", type=int, default=-1, help="this rank, before it puts the best model in place")
    flags.add_argument("--die-half", type=int, default=-1, help="this rank, when it has, and others may not have")
    flags.add_argument("--save", type=int, default=4, help="steps between two checkpoints")
    flags.add_argument("--stop", type=int, default=0, help="training ends here")
    flags.add_argument("--set", type=json.loads, default={}, help="more of TrainingArguments, as JSON")
    flags.add_argument("--patience", type=int, default=0, help="of early stopping, which then follows a metric")
    flags.add_argument("--after", default="", help="in this event a callback decides something")
    flags.add_argument("--lines", type=int, default=3, help="when that many lines have been logged")
    flags.add_argument("--decides", default="should_training_stop", help="what")
    flags.add_argument("--stream", action="store_true", help="data without a length")
    flags.add_argument("--off", action="store_true")
    flags.add_argument("--output", type=Path, required=True)
    args = flags.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    given = {
        "output_dir": str(args.output),
        "deepspeed": write_config(args.output, args.zero, off=args.off) if args.by == "deepspeed" else None,
        "max_steps": args.steps,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 3,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": args.save,
        "save_strategy": "steps",
        "save_steps": args.save,
        "save_total_limit": 1,
        "load_best_model_at_end": args.best,
        "bf16": args.zero == 3,
        "use_cpu": not torch.cuda.is_available(),
        "seed": 1,
        "report_to": "none",
    }
    arguments = TrainingArguments(**{**given, **args.set})
    if args.by == "fsdp" and not torch.cuda.is_available():
        shard_on_cpus()
    for rank in {args.die_before, args.die_half} - {-1}:
        die_while_loading(rank, args.output, half=args.die_half >= 0)
    torch.manual_seed(0)
    sizes = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
    )
    losses = Losses()
    trainer = Trainer(
        model=GPT2LMHeadModel(sizes),
        args=arguments,
        train_dataset=Stream() if args.stream else Blocks(30, 1),
        eval_dataset=Blocks(8, 2),
        compute_metrics=counted if args.patience else None,
        callbacks=[
            losses,
            *[Folders()] * (args.off and args.by == "fsdp"),
            *[Stop(args.stop)] * (args.stop > 0),
            *[EarlyStoppingCallback(args.patience)] * (args.patience > 0),
            *[After(args.after, args.lines, args.decides)] * bool(args.after),
        ],
    )
    trained = trainer.train(resume_from_checkpoint=get_last_checkpoint(str(args.output)) is not None)
    losses.ended = True
    trainer.save_model()
    metrics = trainer.evaluate()
    ended = {
        "model": {name: getattr(p, "ds_tensor", p) for name, p in trainer.model.named_parameters()},
        "optimizer": optimizer_state(trainer),
        "history": trainer.state.log_history,
        "best": trainer.state.best_metric,
        "loss": trained.training_loss,
        "metrics": metrics,
        "metric": vars(counted),
        "next": torch.rand(4),
    }
    text = json.dumps(plain(ended), sort_keys=True)
    (args.output / f"state{arguments.process_index}.json").write_text(text)
    print(f"digest rank={arguments.process_index} {hashlib.sha256(text.encode()).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
