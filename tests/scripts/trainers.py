"""Trainers of the Hugging Face kind with state of their own, each in the way of ``--kind``::

    flashrecovery run --nproc-per-node 2 --standby 1 tests/scripts/trainers.py --kind teacher --output /tmp/out

``--switched-off``: without ``protect``. Every rank prints its losses, and a digest of all there is at the end.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from flashrecovery.trainer import protect

FEATURES, CLASSES, SAMPLES = 8, 4, 61
_OF_THE_CLOCK = ("runtime", "per_second", "step_time")


class Samples(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(FEATURES, generator=generator), "labels": torch.tensor(index % CLASSES)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 16), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        loss = torch.nn.functional.cross_entropy(logits, labels) if labels is not None else logits.sum()
        return {"loss": loss, "logits": logits}


class Losses(TrainerCallback):  # type: ignore[misc]
    """Prints each logged loss with all its bits."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        if logs and "loss" in logs:
            print(
                f"rank={args.process_index} step={state.global_step} loss_hex={float(logs['loss']).hex()}", flush=True
            )


class Baseline(Trainer):  # type: ignore[misc]
    """A moving average of the loss, a queue of what was seen, counts in nested containers, its own generator."""

    baseline = 0.0
    seen: dict[str, int] = {}  # noqa: RUF012 - the class's, as it happens

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generator = torch.Generator().manual_seed(self.args.process_index)
        self.queue: collections.deque[torch.Tensor] = collections.deque(maxlen=3)
        self.negatives = torch.zeros(8, FEATURES)
        self.view = self.negatives  # the same under another name
        self.averages: dict[str, Any] = {"train": collections.defaultdict(list)}

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        noise = torch.randn(FEATURES, generator=self.generator)
        near = torch.stack([*self.queue, *self.view, noise]).matmul(inputs["x"].T).mean()
        loss = outputs["loss"] * (1 + 0.1 * torch.tanh(near)) + (outputs["loss"] - self.baseline) ** 2
        if model.training:
            self.baseline = 0.9 * self.baseline + 0.1 * float(loss.detach())
            self.queue.append(inputs["x"].mean(0))
            self.negatives[len(self.averages["train"]["loss"]) % 8] = inputs["x"][0]
            self.averages["train"]["loss"].append(float(loss.detach()))
            self.seen["samples"] = self.seen.get("samples", 0) + len(inputs["x"])
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        losses = self.averages["train"].pop("loss", [])
        logs["mean"] = sum(losses) / max(len(losses), 1)
        logs["samples"] = self.seen.get("samples", 0)
        super().log(logs, *args, **kwargs)


class Follow(TrainerCallback):  # type: ignore[misc]
    """The teacher is an average of the weights, written as most do it."""

    def __init__(self, teacher: torch.nn.Module, every: int = 1) -> None:
        self.teacher, self.every = teacher, every

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            for mine, its in zip(self.teacher.parameters(), model.parameters(), strict=True):
                mine.data.mul_(0.9).add_(its.data, alpha=0.1)


class MeanTeacher(Trainer):  # type: ignore[misc]
    def __init__(self, *args: Any, every: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.add_callback(Follow(self.teacher, every))

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs)["logits"]
        loss = outputs["loss"] + (outputs["logits"] - wanted).pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class TeacherInside(MeanTeacher):
    """The average is formed within the step, from the fourth step on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, every=1 << 30, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step >= 3:
            for mine, its in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                mine.data.mul_(0.9).add_(its.data, alpha=0.1)
        return super().training_step(model, inputs, *args, **kwargs)


class LazyTeacher(MeanTeacher):
    """Makes its teacher in the first step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Trainer.__init__(self, *args, **kwargs)
        self.teacher = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if self.teacher is None:
            self.teacher = copy.deepcopy(self.model).requires_grad_(False).eval()
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


class SlowDown(TrainerCallback):  # type: ignore[misc]
    """The learning rate follows from the norms that the trainer has seen."""

    def __init__(self, trainer: NormHistory) -> None:
        self.trainer, self.changes = trainer, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        norms = self.trainer.norms[-3:]
        if len(norms) == 3 and norms[-1] > min(norms):
            self.changes += 1
            for group in kwargs["optimizer"].param_groups:
                group["lr"] *= 0.7


class NormHistory(Trainer):  # type: ignore[misc]
    """Looks at the gradients when the backward pass is over, which is late in a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norms: list[float] = []
        self.add_callback(SlowDown(self))

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.accelerator.sync_gradients:  # else they are each rank's own
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            self.norms.append(float(sum(grad.pow(2).sum() for grad in grads)))
        return loss


class Best(TrainerCallback):  # type: ignore[misc]
    """Keeps the best evaluation, and stops when it has not become better for a while."""

    def __init__(self) -> None:
        self.best, self.waited, self.of_steps = float("inf"), 0, [0.0]

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.of_steps.append(self.of_steps[-1] * 0.5 + state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **rest: Any) -> None:
        better = metrics["eval_loss"] < self.best - 1e-3
        self.best, self.waited = (metrics["eval_loss"], 0) if better else (self.best, self.waited + 1)
        if self.waited >= 2 and state.global_step >= 9:
            control.should_training_stop = True


def metrics_with_memory() -> Any:
    """A function with its own variables."""
    calls, sums = 0, []

    def compute(predicted: Any) -> dict[str, float]:
        nonlocal calls
        calls += 1
        sums.append(float(predicted.predictions.sum()))
        return {"calls": calls, "sum": sum(sums)}

    return compute


def permuted(seed: int) -> list[int]:
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed)).tolist()


class ByDifficulty(Sampler[int]):
    """Its order follows from its difficulty, which a callback sets."""

    def __init__(self, trainer: Any) -> None:
        self.difficulty = 1

    def __iter__(self) -> Any:
        return iter(permuted(self.difficulty))

    def __len__(self) -> int:
        return SAMPLES


class ReadingOn(ByDifficulty):
    """It looks at its difficulty again for each sample."""

    def __iter__(self) -> Any:
        for index in range(SAMPLES):
            yield (index * index + 7 * self.difficulty) % SAMPLES


class Counting(ByDifficulty):
    """Its order follows from how often it has been asked."""

    def __init__(self, trainer: Any) -> None:
        self.count = 0

    def __iter__(self) -> Any:
        self.count += 1
        return iter(permuted(self.count))


class Weighing(ByDifficulty):
    """What a callback sets is a tensor, which it writes into."""

    def __init__(self, trainer: Any) -> None:
        self.weights = torch.ones(SAMPLES)

    def __iter__(self) -> Any:
        return iter(torch.multinomial(self.weights, SAMPLES, generator=torch.Generator().manual_seed(3)).tolist())


class Drawing(ByDifficulty):
    """It draws from its own generator."""

    def __init__(self, trainer: Any) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Any:
        return iter(torch.randperm(SAMPLES, generator=self.generator).tolist())


class ByStep(ByDifficulty):
    """It looks at the trainer's step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __iter__(self) -> Any:
        return iter(permuted(self.trainer.state.global_step))


class ReadingTheStep(ByStep):
    """It looks at it for each sample, and counts."""

    def __iter__(self) -> Any:
        self.given = 0
        for index in range(SAMPLES):
            self.given += 1 + self.trainer.state.global_step // 2
            yield (index * index + self.given) % SAMPLES


class Harder(TrainerCallback):  # type: ignore[misc]
    """Sets a sampler's difficulty by what ``by`` names."""

    def __init__(self, sampler: Any, by: str) -> None:
        self.sampler, self.by = sampler, by

    def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self.by == "epochs":
            self.sampler.difficulty += 1
        elif self.by == "weights":
            self.sampler.weights[state.global_step :] += 5

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self.by == "steps":
            self.sampler.difficulty += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        if self.by == "losses" and logs and "loss" in logs:
            self.sampler.difficulty = int(logs["loss"] * 1e4)


class Sampled(Trainer):  # type: ignore[misc]
    """Notes the order in which it gets the samples of its sampler."""

    def __init__(self, *args: Any, sampler: Callable[[Any], Any], by: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sampler, self.by = sampler(self), by
        self.order: list[list[float]] = []
        self.add_callback(Harder(self.sampler, by))

    def _get_train_sampler(self, *_: Any) -> Any:
        return self.sampler

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.order.append(inputs["x"][:, 0].tolist())
        if self.by == "within":
            self.sampler.difficulty = self.sampler.difficulty * 3 % 1009 + 1
        return super().compute_loss(model, inputs, *args, **kwargs)


class Stored(Samples):
    """All of it in one tensor."""

    def __init__(self) -> None:
        self.data = torch.stack([super(Stored, self).__getitem__(index)["x"] for index in range(SAMPLES)])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.data[index], "labels": torch.tensor(index % CLASSES)}


class Rows(Trainer):  # type: ignore[misc]
    """Holds rows of its data, and parts and second names of what it changes in place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "train_dataset": Stored()})
        self.last = self.train_dataset.data[0]
        self.recent = [self.train_dataset.data[1], self.train_dataset.data[2]]
        self.memory = torch.zeros(4, FEATURES)
        self.row = self.memory[0]
        self.counts = numpy.zeros(4)
        self.same = {"counts": self.counts, "part": self.counts[1:3]}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        step = self.state.global_step
        data = self.train_dataset.data
        self.last, self.recent = data[3 * step % SAMPLES], [data[step % SAMPLES], self.last]
        self.row = self.memory[step % 4]
        self.row += inputs["x"].mean(0)
        self.counts[step % 4] += 1
        self.same["part"][0] += 0.5
        near = (self.last + self.recent[1] + self.memory.sum(0)) @ inputs["x"].T
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * (1 + 0.1 * torch.tanh(near.mean()) + 0.01 * self.same["counts"][1])


class TwoForwards(Trainer):  # type: ignore[misc]
    """A training step of its own: two forward passes, one of them with noise, and one backward pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = torch.ones(())

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        clean = model(**inputs)
        noisy = model(inputs["x"] + 0.1 * torch.randn_like(inputs["x"]), inputs["labels"])
        apart = (clean["logits"] - noisy["logits"]).pow(2).mean()
        loss = (clean["loss"] + self.scale * apart) / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        self.scale = self.scale * (1 + 0.01 * torch.tanh(apart.detach()))
        result: torch.Tensor = loss.detach()
        return result


class Iterating(Trainer):  # type: ignore[misc]
    """Takes from an iterator, and has a file open: neither can be brought back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unlabelled = itertools.cycle(range(5))
        self.notes = open(Path(self.args.output_dir) / f"notes{self.args.process_index}", "a")  # noqa: SIM115

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.notes.write(f"{next(self.unlabelled)}\n")
        return super().compute_loss(model, inputs, *args, **kwargs)


class TwoOptimizers(Trainer):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic = torch.nn.Linear(CLASSES, 1)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)


KINDS: dict[str, Callable[..., Any]] = {
    "baseline": Baseline,
    "teacher": MeanTeacher,
    "inside": TeacherInside,
    "lazy": LazyTeacher,
    "norms": NormHistory,
    "best": Trainer,
    "curriculum": functools.partial(Sampled, sampler=ByDifficulty, by="epochs"),
    "by-losses": functools.partial(Sampled, sampler=ByDifficulty, by="losses"),
    "reading-on": functools.partial(Sampled, sampler=ReadingOn, by="steps"),
    "reading-within": functools.partial(Sampled, sampler=ReadingOn, by="within"),
    "reading-the-step": functools.partial(Sampled, sampler=ReadingTheStep, by=""),
    "counting": functools.partial(Sampled, sampler=Counting, by=""),
    "weighing": functools.partial(Sampled, sampler=Weighing, by="weights"),
    "drawing": functools.partial(Sampled, sampler=Drawing, by=""),
    "by-step": functools.partial(Sampled, sampler=ByStep, by=""),
    "rows": Rows,
    "two-forwards": TwoForwards,
    "iterating": Iterating,
    "two-optimizers": TwoOptimizers,
}


def plain(value: Any) -> Any:
    """What the digest is made of."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    if isinstance(value, torch.nn.Module):
        return {name: tensor.tolist() for name, tensor in value.state_dict().items()}
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items() if not any(w in str(key) for w in _OF_THE_CLOCK)}
    if isinstance(value, (list, tuple, collections.deque)):
        return [plain(part) for part in value]
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--kind", choices=KINDS, default="baseline")
    flags.add_argument("--steps", type=int, default=12)
    flags.add_argument("--output", type=Path, required=True)
    flags.add_argument("--switched-off", action="store_true")
    args = flags.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=2,
        eval_strategy="steps" if args.kind == "best" else "no",
        eval_steps=3,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )
    trainer = KINDS[args.kind](
        model=Model(),
        args=arguments,
        train_dataset=Samples(),
        eval_dataset=Samples(),
        compute_metrics=metrics_with_memory(),
        callbacks=[Losses()],
    )
    best = Best()
    if args.kind == "best":
        trainer.add_callback(best)
    if not args.switched_off:
        protect(trainer)
    trainer.train()
    own = {name: value for name, value in vars(trainer).items() if name in _OWN}
    said = {
        "model": trainer.model,
        "optimizer": trainer.optimizer.optimizer.state_dict(),
        "history": trainer.state.log_history,
        "own": own,
        "seen": Baseline.seen,
        "best": vars(best),
        "data": getattr(trainer.train_dataset, "data", None),
        "next": torch.rand(4),
    }
    text = json.dumps(plain(said), sort_keys=True)
    (args.output / f"state{arguments.process_index}.json").write_text(text)
    print(f"digest rank={arguments.process_index} {hashlib.sha256(text.encode()).hexdigest()}", flush=True)


_OWN = frozenset(
    {
        *("baseline", "generator", "queue", "negatives", "view", "averages", "teacher", "norms", "scale", "order"),
        *("last", "recent", "memory", "row", "counts", "same"),
    }
)

if __name__ == "__main__":
    main()
