"""Objects that Hugging Face accelerate has prepared: what of them is protected, and how their loaders are read.

Accelerate wraps the objects that a script gives it, and keeps its own counters: how many micro-batches have been
accumulated, and whether the loader has just given its last batch. They decide whether gradients are synchronised, so
they belong to the state. Its loader communicates when an epoch begins, to make the order of samples equal on all ranks;
a rank that is handed a batch again would not take part in that. So this is done once, before the first step.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from flashrecovery.capabilities.of_trainer import ACCELERATE, LOADERS, STATE
from flashrecovery.errors import DataSourceError, RegistrationError
from flashrecovery.worker.local_state.grad_scaler import settled

_SYNCHRONISED = "sync_gradients"
_CHECKPOINTS = "checkpoints"
_JUMPS = (ast.Break, ast.Continue, ast.Return, ast.Raise)


def _kinds(module: str, *names: str) -> tuple[type, ...]:
    """Classes of accelerate; none if the script has not imported it."""
    loaded = sys.modules.get(module)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))


def unwrapped(optimizers: Sequence[Optimizer], objects: dict[str, Any]) -> tuple[list[Optimizer], dict[str, Any]]:
    """What ``register()`` gets, with accelerate's wrappers taken off.

    Raises:
        RegistrationError: an optimizer that accelerate has prepared, without the Accelerator that drives it.
    """
    wrapped = _kinds("accelerate.optimizer", "AcceleratedOptimizer")
    accelerators = _kinds("accelerate.accelerator", "Accelerator")
    found = {name: Counters(o) if isinstance(o, accelerators) else o for name, o in objects.items()}
    if any(isinstance(o, wrapped) for o in optimizers) and not any(isinstance(o, Counters) for o in found.values()):
        raise RegistrationError(
            "the optimizer has been prepared by accelerate, whose counters decide when it steps: give the Accelerator, "
            "too: recovery.register(model=model, optimizer=optimizer, accelerator=accelerator)"
        )
    return [getattr(o, "optimizer") if isinstance(o, wrapped) else o for o in optimizers], found  # noqa: B009


def scheduler_inside(thing: Any) -> Any:
    """The schedule that accelerate steps with its optimizers; other things as they are."""
    wrapped: Any = _kinds("accelerate.scheduler", "AcceleratedScheduler")
    return thing.scheduler if isinstance(thing, wrapped) else thing


def drives(optimizer: Optimizer) -> bool:
    """Whether accelerate decides when ``optimizer`` steps."""
    return isinstance(optimizer, _kinds("accelerate.optimizer", "AcceleratedOptimizer"))


def is_accumulating() -> bool:
    """Whether the optimizers that accelerate drives leave out a step that is called now."""
    (state,) = _kinds("accelerate.state", "GradientState") or (None,)
    return state is not None and not getattr(state(), _SYNCHRONISED)


class Counters:
    """The counters of an Accelerator, with those of its loaders and optimizers, and its gradient scaler.

    Raises UnsupportedError that names what of its inside this version of accelerate lacks."""

    def __init__(self, accelerator: Any) -> None:
        ACCELERATE.require((STATE, LOADERS))
        self._accelerator = accelerator
        self._triggered: tuple[torch.Tensor | None, int | None] = None, None

    def state_dict(self) -> dict[str, Any]:
        """The state at a step's end. Raises RegistrationError in the middle of an accumulation."""
        accelerator = self._accelerator
        if not accelerator.gradient_state.sync_gradients:
            raise RegistrationError(
                "a step has ended while accelerate is still accumulating gradients, which could not be restored: put "
                "all micro-batches of one optimizer step into one `with step:` (at the end of an epoch, too: there "
                "accelerate steps early, unless its GradientAccumulationPlugin has sync_with_dataloader=False)"
            )
        return {
            "step": accelerator.step,
            "sync_gradients": accelerator.gradient_state.sync_gradients,
            "loaders": [mark(loader) for loader in accelerator._dataloaders],
            "saved": accelerator.project_configuration.iteration,
            "triggered": self._trigger(),
            "skipped": [bool(getattr(o, "_is_overflow", False)) for o in accelerator._optimizers],
            "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        accelerator = self._accelerator
        accelerator.step = state["step"]
        accelerator.gradient_state._set_sync_gradients(state["sync_gradients"])
        for loader, value in zip(accelerator._dataloaders, state["loaders"], strict=True):
            set_mark(loader, value)
        accelerator.project_configuration.iteration = state["saved"]
        triggered = state["triggered"]
        accelerator.flag_tensor = None if triggered is None else torch.tensor(triggered, device=accelerator.device)
        for optimizer, skipped in zip(accelerator._optimizers, state["skipped"], strict=True):
            optimizer._is_overflow = skipped
        if state["scaler"] is not None:
            settled(accelerator.scaler).load_state_dict(state["scaler"])

    def _trigger(self) -> int | None:
        """What ``set_trigger()`` has set. A change creates a new tensor, which is read once: it may be on a GPU."""
        tensor = self._accelerator.flag_tensor
        if tensor is not self._triggered[0]:
            self._triggered = tensor, None if tensor is None else int(tensor)
        return self._triggered[1]


_there: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
"""For Accelerators that number their checkpoints: the folders that were there before the first step."""


def note_checkpoints(objects: Iterable[Any], noted: Callable[[str, Callable[[], str]], str | None]) -> None:
    """Before the first step: which checkpoints are there that no step of this job has made.

    Args:
        noted: gives what a function gave in the first process of this rank; see :meth:`.Recovery.noted`.
    """
    kinds: Any = _kinds("accelerate.accelerator", "Accelerator")
    for accelerator in objects:
        if isinstance(accelerator, kinds):
            config = accelerator.project_configuration
            if config.automatic_checkpoint_naming and config.project_dir is not None:
                folder = os.path.join(config.project_dir, _CHECKPOINTS)
                text = noted(f"accelerate's checkpoints in {folder}", functools.partial(_names_in, folder))
                if text is not None:
                    _there[accelerator] = frozenset(json.loads(text))


def _names_in(folder: str) -> str:
    return json.dumps(sorted(os.listdir(folder)) if os.path.isdir(folder) else [])


def saved_again(save_state: Callable[..., Any]) -> Callable[..., Any]:
    """``Accelerator.save_state``, which refuses a folder of the number that is due. One that an attempt has left that
    does not count, and is made again, is taken away before."""

    @functools.wraps(save_state)
    def save(accelerator: Any, *arguments: Any, **options: Any) -> Any:
        config, there = accelerator.project_configuration, _there.get(accelerator)
        name = f"checkpoint_{config.iteration}"
        if there is not None and name not in there:
            left = os.path.join(config.project_dir, _CHECKPOINTS, name)
            aside = os.path.join(config.project_dir, f".{name}.{os.getpid()}")
            with contextlib.suppress(FileNotFoundError):  # or another rank does it
                os.rename(left, aside)
                shutil.rmtree(aside)
        return save_state(accelerator, *arguments, **options)

    return save


def check_rest(loaders: Iterable[Any], steps: int | None, texts: Callable[[], Iterable[str]]) -> None:
    """``steps``: how many the script takes, None if that is not known. ``texts`` gives those of the files that have its
    running functions.

    Raises:
        RegistrationError: accelerate will take a step with what is left at the end of an epoch, and the script does not
            look whether it has.
    """
    for loader in loaders:
        gradients: Any = getattr(getattr(loader, "shard", None), "gradient_state", None)
        micro_batches = int(getattr(gradients, "num_steps", 1))
        if micro_batches < 2 or not gradients.sync_with_dataloader or isinstance(loader.dataset, IterableDataset):
            continue
        rest = len(loader) % micro_batches
        reached = steps is None or steps * micro_batches > len(loader)
        if rest and reached and not any(_ends_with_accelerates_step(text) for text in texts()):
            raise RegistrationError(
                f"accelerate's loader has {len(loader)} batches, which is no multiple of gradient_accumulation_steps = "
                f"{micro_batches}: at the end of each epoch accelerate steps with the {rest} that are left, in the "
                "middle of a `with step:`; use GradientAccumulationPlugin(num_steps=..., sync_with_dataloader=False), "
                "or end the block where accelerator.sync_gradients is true"
            )


def _ends_with_accelerates_step(text: str) -> bool:
    """Whether a script looks at ``sync_gradients`` for more than what it does besides (it clips where it is true)."""
    if _SYNCHRONISED not in text:
        return False
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a notebook's cell: cannot be read
        return True
    besides = {
        id(node)
        for choice in ast.walk(tree)
        if isinstance(choice, ast.If) and not any(isinstance(n, _JUMPS) for n in ast.walk(choice))
        for node in ast.walk(choice.test)
    }
    named = (n for n in ast.walk(tree) if _SYNCHRONISED in (getattr(n, "attr", ""), getattr(n, "id", "")))
    return any(id(node) not in besides for node in named)


def mark(loader: Any) -> tuple[bool, int, bool, int]:
    """What a loader tells the Accelerator about the batch that it has just given, whether it is being read, and how
    often it has been."""
    end, remainder = bool(getattr(loader, "end_of_dataloader", False)), int(getattr(loader, "remainder", -1))
    return end, remainder, _is_read(loader), int(getattr(loader, "iteration", 0))


def set_mark(loader: Any, value: tuple[bool, int, bool, int]) -> None:
    """Tell the Accelerator again what a loader has told it about a batch. (An evaluation that was interrupted has not
    told it that it ends: its end would count for the loader that is read around it.)"""
    loader.end_of_dataloader, loader.remainder, read, loader.iteration = value
    if read != _is_read(loader):
        (loader.gradient_state._add_dataloader if read else loader.gradient_state._remove_dataloader)(loader)


def _is_read(loader: Any) -> bool:
    gradients = getattr(loader, "gradient_state", None)
    return gradients is not None and any(one is loader for one in gradients.dataloader_references)


def readable(loader: Iterable[Any], *, counts: bool = False) -> Iterable[Any]:
    """``loader``, or what stands for it if accelerate has prepared it. May communicate, so call it on all ranks.

    Args:
        counts: sampler and data set get the epoch from the loader's own count, as in accelerate.

    Raises:
        DataSourceError: a loader of accelerate that communicates with every batch, or with more than its order.
    """
    if not isinstance(loader, _kinds("accelerate.data_loader", "DataLoaderAdapter")):
        return loader
    name = type(loader).__name__
    if name != "DataLoaderShard":
        raise DataSourceError(
            f"accelerate's {name} in recovery.data(): its ranks communicate in every fetch, and a rank that is handed "
            "a batch again would not; use DataLoaderConfiguration(dispatch_batches=False)"
        )
    return PreparedLoader(loader, counts=counts)


class PreparedLoader:
    """Reads an accelerate ``DataLoaderShard``: the same batches with the same counters, without communication.

    It does not read one batch ahead, as that loader does, where the number of batches is known.
    """

    def __init__(self, shard: Any, *, counts: bool = False) -> None:
        self.shard = shard
        self._counts = counts
        self._agree()

    def _agree(self) -> None:
        """Do once, on all ranks, what the shard does at the beginning of each epoch: afterwards the order goes on
        equally."""
        kinds = [str(getattr(kind, "value", kind)) for kind in self.shard.rng_types or ()]
        if [k for k in kinds if k != "generator"]:
            raise DataSourceError(
                f"accelerate's loader has rng_types={kinds}: it would overwrite the random numbers of all ranks "
                'whenever an epoch begins; use Accelerator(rng_types=["generator"]), the default'
            )
        if kinds:
            sys.modules["accelerate.data_loader"].synchronize_rng_states(kinds, self.shard.synchronized_generator)
        self.shard.rng_types = None
        sampler: Any = self.shard.get_sampler()
        seeds: Any = _kinds("accelerate.data_loader", "SeedableRandomSampler")
        if isinstance(sampler, seeds) and sampler.generator is None:
            sampler.generator = torch.Generator(torch.get_default_device())  # as it does later, and seeds it then

    @property
    def dataset(self) -> Any:
        return self.shard.dataset

    @property
    def batch_sampler(self) -> Any:
        return self.shard.batch_sampler

    def set_epoch(self, epoch: int) -> None:
        self.shard.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.shard)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.shard.dataset, IterableDataset):
            return iter(self.shard)
        if self._counts:
            self.shard.set_epoch(self.shard.iteration)
        return ShardIterator(self.shard)


class ShardIterator:
    """One epoch. ``inner``: the iterator of the loader that accelerate has wrapped."""

    def __init__(self, shard: Any) -> None:
        shard.begin()
        self._shard = shard
        self._length = len(shard.base_dataloader)
        self._index = 0
        self.inner = iter(shard.base_dataloader)
        for _ in range(shard.skip_batches):
            next(self.inner, None)
            self._index += 1

    def __iter__(self) -> ShardIterator:
        return self

    def skipped(self, count: int) -> None:
        """``count`` batches have been taken from the sampler."""
        self._index += count

    def __next__(self) -> Any:
        shard = self._shard
        try:
            batch = next(self.inner)
        except StopIteration:
            if self._index <= self._length:
                self._index = self._length + 1
                shard.iteration += 1
                shard.end()
            raise
        self._index += 1
        set_mark(shard, (self._index == self._length, shard.remainder, True, shard.iteration))
        if shard.device is None:
            return batch
        send = sys.modules["accelerate.data_loader"].send_to_device
        return send(batch, shard.device, non_blocking=shard._non_blocking)
