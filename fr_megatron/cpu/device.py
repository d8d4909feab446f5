"""``torch.cuda`` for a machine without a GPU, as far as megatron calls it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

_MEMORY = 1 << 34
"""Bytes that the "device" says it has."""


class _Device(str):
    """What ``torch.cuda.current_device()`` returns: good as a device, and ``f"cuda:{...}"`` has its number."""

    def __format__(self, spec: str) -> str:
        return "0"


class Stream:
    """Everything is done when the call returns."""

    cuda_stream = stream_id = 0
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes what ``torch.cuda.Stream`` takes."""

    def wait_stream(self, *_: Any) -> None:
        """Nothing is pending."""

    wait_event = synchronize = wait_stream

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return Event() if event is None else event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave."""


class Event:
    """A moment on the host."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = 0.0

    def record(self, *_: Any, **__: Any) -> None:
        self._at = time.perf_counter()

    def wait(self, *_: Any) -> None:
        """It has happened."""

    synchronize = wait

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds."""
        return (other._at - self._at) * 1e3


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _without_pinning(function: Callable[..., Any]) -> Callable[..., Any]:
    def unpinned(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return unpinned


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def install() -> None:
    """Replace them in ``torch``."""
    stream = Stream()
    properties = SimpleNamespace(
        major=8,
        minor=0,
        multi_processor_count=1,
        total_memory=_MEMORY,
        name="cpu",
        gcnArchName="cpu",  # read by torch.compile where torch is built without CUDA
    )
    cuda: Any = torch.cuda
    stand_ins: dict[str, Any] = {
        "is_available": _always(False),  # deepspeed has it ask for device_count() in this process and its children
        "current_device": _always(_Device("cpu")),
        "device_count": _always(1),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda *_: contextlib.nullcontext(),
        "current_stream": _always(stream),
        "default_stream": _always(stream),
        "is_current_stream_capturing": _always(False),
        "get_device_capability": _always((8, 0)),
        "get_device_name": _always("cpu"),
        "get_device_properties": _always(properties),
        "memory_stats": _always({}),
        "mem_get_info": _always((_MEMORY, _MEMORY)),
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "default_generators": (torch.default_generator,),
    }
    for name in ("set_device", "synchronize", "empty_cache", "set_stream", "reset_peak_memory_stats"):
        stand_ins[name] = _always(None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        stand_ins[name] = _always(0)
    for name, value in stand_ins.items():
        setattr(cuda, name, value)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(cuda.random, name, stand_ins[name])
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    unchanged: Any = lambda self, *_, **__: self  # noqa: E731 - becomes a method
    torch.Tensor.pin_memory = unchanged  # type: ignore[method-assign]
    torch.Tensor.cuda = unchanged  # type: ignore[method-assign]
    torch.nn.Module.cuda = unchanged  # type: ignore[method-assign]
