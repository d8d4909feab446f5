"""TRL's trainers with models that are made here, by ``--kind``; what they print is what ``trainers.py`` prints.

``--steps``: optimizer steps. Those that generate do so with GPT-2's own ``generate()``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from flashrecovery.trainer import protect
from tests.scripts.trainer_unmodified import shard_on_cpus
from tests.scripts.trainers import Losses, plain

WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(126))]
SAMPLES = 67


def _tokenizer() -> Any:
    text = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    text.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=text, pad_token="<pad>", eos_token="<eos>")


def _lines(*names: str, **more: list[Any]) -> Any:
    generator = torch.Generator().manual_seed(3)

    def draw(limit: int) -> int:
        return int(torch.randint(0, limit, (1,), generator=generator))

    texts = {n: [" ".join(f"w{draw(126)}" for _ in range(3 + draw(6))) + " " for _ in range(SAMPLES)] for n in names}
    return Dataset.from_dict({**texts, **more})


def _sizes(**more: Any) -> Any:
    return GPT2Config(
        vocab_size=128,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        **more,
    )


def _model() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(_sizes())


class Reward:
    """Of a completion: how many of its words are even, by a scale that follows what it has seen."""

    __name__ = "even"

    def __init__(self) -> None:
        self.mean = 0.0

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        found = [sum(int(word[1:]) % 2 == 0 for word in text.split() if word[0] == "w") for text in completions]
        self.mean = 0.9 * self.mean + 0.1 * sum(found) / len(found)
        return [one - self.mean for one in found]


def _sft(common: dict[str, Any], rest: dict[str, Any]) -> Any:
    return SFTTrainer(model=_model(), args=SFTConfig(**common), train_dataset=_lines("text"), **rest)


def _sft_packed(common: dict[str, Any], rest: dict[str, Any]) -> Any:
    """Rows of several texts each."""
    args = SFTConfig(**{**common, "max_length": 16}, packing=True)
    return SFTTrainer(model=_model(), args=args, train_dataset=_lines("text"), **rest)


def _sft_lora(common: dict[str, Any], rest: dict[str, Any]) -> Any:
    from peft import LoraConfig

    adapters: Any = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    args = SFTConfig(**common)
    return SFTTrainer(model=_model(), args=args, train_dataset=_lines("text"), peft_config=adapters, **rest)


def _sft_lora_zero3(common: dict[str, Any], rest: dict[str, Any]) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    config = {
        "train_micro_batch_size_per_gpu": common["per_device_train_batch_size"],
        "gradient_accumulation_steps": common["gradient_accumulation_steps"],
        "steps_per_print": 10**6,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": common["learning_rate"], "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
        "flash_recovery": {"enabled": True},
    }
    return _sft_lora({**common, "bf16": True, "deepspeed": config}, rest)


def _dpo_zero2(common: dict[str, Any], rest: dict[str, Any]) -> Any:
    """By the file that users have, with LoRA: the reference is the model without it."""
    from peft import LoraConfig

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    adapters: Any = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    optimizer = {"type": "AdamW", "params": {"lr": common["learning_rate"], "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": optimizer,
        "zero_optimization": {"stage": 2},
        "flash_recovery": {"enabled": True},
    }
    file = Path(common["output_dir"]) / f"ds_config{os.environ['RANK']}.json"
    file.write_text(json.dumps(config))
    args = DPOConfig(**{**common, "deepspeed": str(file)})
    data = _lines("prompt", "chosen", "rejected")
    return DPOTrainer(model=_model(), args=args, train_dataset=data, peft_config=adapters, **rest)


def _dpo_lora(common: dict[str, Any], rest: dict[str, Any]) -> Any:
    from peft import LoraConfig

    adapters: Any = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    data = _lines("prompt", "chosen", "rejected")
    return DPOTrainer(model=_model(), args=DPOConfig(**common), train_dataset=data, peft_config=adapters, **rest)


def _dpo_precomputed(common: dict[str, Any], rest: dict[str, Any]) -> Any:
    """What the reference says is computed once, and lies in a file beside the data."""
    output = Path(common["output_dir"])
    data = load_dataset("json", data_files=str(output / "data.json"), cache_dir=str(output / "cache"), split="train")
    args = DPOConfig(**common, precompute_ref_log_probs=True)
    return DPOTrainer(model=_model(), args=args, train_dataset=data, **rest)


def _dpo(common: dict[str, Any], rest: dict[str, Any]) -> Any:
    """The reference follows the model."""
    data = _lines("prompt", "chosen", "rejected")
    args = DPOConfig(**common, sync_ref_model=True, ref_model_sync_steps=3)
    return DPOTrainer(model=_model(), ref_model=_model(), args=args, train_dataset=data, **rest)


def _kto(common: dict[str, Any], rest: dict[str, Any]) -> Any:
    data = _lines("prompt", "completion", label=[bool(n % 3) for n in range(SAMPLES)])
    return KTOTrainer(model=_model(), ref_model=_model(), args=KTOConfig(**common), train_dataset=data, **rest)


def _reward(common: dict[str, Any], rest: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(_sizes(num_labels=1))
    data = _lines("prompt", "chosen", "rejected")
    return RewardTrainer(model=model, args=RewardConfig(**common), train_dataset=data, **rest)


def _generating(common: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in common.items() if name != "max_length"}
    return {**kept, "num_generations": 2, "max_completion_length": 8}


def _saved(common: dict[str, Any]) -> str:
    """The reference is read from the same file. (Once there are process groups, rank 0 alone would write.)"""
    start = Path(common["output_dir"]) / f"start{os.environ['RANK']}"
    _model().save_pretrained(start)
    return str(start)


def _grpo(common: dict[str, Any], rest: dict[str, Any]) -> Any:
    """What was generated is used in several steps, and the reference follows the model."""
    start = _saved(common)
    args = GRPOConfig(
        **_generating(common),
        steps_per_generation=4,
        num_iterations=2,
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=3,
    )
    return GRPOTrainer(model=start, reward_funcs=[Reward()], args=args, train_dataset=_lines("prompt"), **rest)


def _rloo(common: dict[str, Any], rest: dict[str, Any]) -> Any:
    start = _saved(common)
    args = RLOOConfig(**_generating(common))
    return RLOOTrainer(model=start, reward_funcs=[Reward()], args=args, train_dataset=_lines("prompt"), **rest)


KINDS: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "sft": _sft,
    "sft-packed": _sft_packed,
    "sft-lora": _sft_lora,
    "zero3-lora": _sft_lora_zero3,
    "dpo": _dpo,
    "dpo-lora": _dpo_lora,
    "dpo-precomputed": _dpo_precomputed,
    "zero2-dpo": _dpo_zero2,
    "kto": _kto,
    "reward": _reward,
    "grpo": _grpo,
    "rloo": _rloo,
}


def _state_of(trainer: Any) -> Any:
    engine = getattr(trainer, "deepspeed", None)
    if engine is None:
        return trainer.optimizer.optimizer.state_dict()
    basic = engine.basic_optimizer
    return [[*basic.state.values()], [{k: v for k, v in g.items() if k != "params"} for g in basic.param_groups]]


def _own_part(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--kind", choices=KINDS, required=True)
    flags.add_argument("--steps", type=int, default=12)
    flags.add_argument("--output", type=Path, required=True)
    flags.add_argument("--unmodified", action="store_true", help="without protect(): what is in the config is enough")
    flags.add_argument("--fsdp", action="store_true", help="by FSDP2")
    args = flags.parse_args()
    if args.fsdp and not torch.cuda.is_available():
        shard_on_cpus()
    logging.set_verbosity_error()
    common = {
        "output_dir": str(args.output),
        "max_steps": args.steps,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 1,
        "max_length": 32,
        "gradient_checkpointing": False,
    }
    trainer = KINDS[args.kind](common, {"processing_class": _tokenizer(), "callbacks": [Losses()]})
    if not args.unmodified:
        protect(trainer)
    trainer.train()
    said = {
        "model": {name: getattr(p, "ds_tensor", p) for name, p in trainer.model.named_parameters()},
        "optimizer": _state_of(trainer),
        "history": [
            {k: v for k, v in entry.items() if k != "total_flos" or not getattr(trainer, "deepspeed", None)}
            for entry in trainer.state.log_history
        ],  # ZeRO-3: the Trainer counts operations by the parameters that are whole at the moment
        "metrics": trainer._metrics,
        "reference": getattr(trainer, "ref_model", None),
        "rewards": [getattr(function, "mean", None) for function in getattr(trainer, "reward_funcs", ())],
        "steps": getattr(trainer, "_step", None),
        "next": torch.rand(4),
    }
    text = json.dumps(plain(tree_map(_own_part, said)), sort_keys=True)
    rank = trainer.args.process_index
    (args.output / f"state{rank}.json").write_text(text)
    print(f"digest rank={rank} {hashlib.sha256(text.encode()).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
