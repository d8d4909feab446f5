"""Frees the activations of an interrupted step, so that they do not exist twice when the step is repeated.

A completed step frees its activations in the backward pass. After an interrupted step they are kept alive by the
references to the graph: the frames of the traceback, and the script's own variables (``loss``, ``logits``), which are
not overwritten before the end of the next forward pass. On a nearly full GPU, repeating the step would then run out of
memory, on every survivor.

So the frames are cleared, and the tensors saved by the nodes of the attempt's graphs are released. Older nodes are left
alone: a graph that a script built before its loop is used in every step.

This uses private parts of torch: the number of the next node, ``_sequence_nr`` and ``_raw_saved_*`` of a node; tested
with 2.13 and 2.14.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn

import torch

from flashrecovery.errors import UnsupportedError

_DEPTH = 3
"""Results of a model are tensors, or tensors in a dictionary of lists: deeper ones are not looked for."""

_MAY_GO_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_OWN_REFERENCES = 3
"""References to the copy of a frame's variables that do not count: the frame's, ours, and that of the function that
counts."""

_saved_names: dict[type, tuple[str, ...]] = {}
"""The attributes of each kind of node that hold saved tensors; to list them takes longer than all the rest."""


def sequence_number() -> int:
    """The number of the next node that this thread adds to a graph; it only grows."""
    return int(torch._C._autograd._get_sequence_nr())


def release(error: BaseException, since: int) -> int:
    """Let go of what the attempt that ended with ``error`` has left.

    To be called when nothing on the device or the network can touch it any more. Returns how many saved tensors were
    let go.

    Args:
        since: :func:`sequence_number` when the attempt began.
    """
    roots: list[Any] = []
    for frame in _frames(error):
        if not _cleared(frame):
            roots += [t.grad_fn for t in _tensors_of(frame) if t.grad_fn is not None]
    return sum(_empty(node) for node in _nodes(roots, since))


def _frames(error: BaseException) -> Iterator[FrameType]:
    """The frames through which ``error``, and every error that led to it, has passed."""
    todo, seen = [error], set[int]()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield from (frame for frame, _line in traceback.walk_tb(one.__traceback__))
        todo += [e for e in (one.__cause__, one.__context__) if e is not None]


def _cleared(frame: FrameType) -> bool:
    """False if it is still needed: by a function that runs (that of the ``with step:``, and what the script has put
    around it), or perhaps by a generator, which clearing would end."""
    if frame.f_code.co_flags & _MAY_GO_ON:
        return False
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True


def _tensors_of(frame: FrameType) -> list[torch.Tensor]:
    """The tensors in the variables of a frame that is still needed."""
    variables = frame.f_locals
    found = list(_tensors(list(variables.values()), _DEPTH))
    if (
        isinstance(variables, dict)
        and frame.f_code.co_flags & inspect.CO_OPTIMIZED
        and sys.getrefcount(variables) <= _OWN_REFERENCES
    ):
        # Before Python 3.13 this is a copy that the frame keeps, together with its contents. If other code has it, too,
        # the script has got it from locals().
        variables.clear()
    return found


def _tensors(values: Iterable[Any], depth: int) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth and isinstance(value, Mapping):
            yield from _tensors(list(value.values()), depth - 1)
        elif depth and isinstance(value, (list, tuple)):
            yield from _tensors(value, depth - 1)


def _nodes(roots: Iterable[Any], since: int) -> Iterator[Any]:
    """The nodes of the graphs that end in ``roots``, as far as they are not older than ``since``."""
    todo, seen = list(roots), set[Any]()
    while todo:
        node = todo.pop()
        if node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        yield node
        todo += [before for before, _ in node.next_functions if before is not None]


def _empty(node: Any) -> int:
    kind = type(node)
    if kind not in _saved_names:
        _saved_names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved"))
    count = 0
    for name in _saved_names[kind]:
        try:
            saved = getattr(node, name)
        except RuntimeError:
            continue  # the backward pass has come this far, and has freed it
        for one in saved if isinstance(saved, (list, tuple)) else (saved,):
            try:
                one.register_hooks(_nothing, _used_again)
            except RuntimeError:
                continue  # it holds no tensor, or other hooks have stored it elsewhere
            count += 1
    return count


def _nothing(_tensor: torch.Tensor) -> None:
    return None


def _used_again(_nothing: None) -> NoReturn:
    raise UnsupportedError(
        "a backward pass goes through a graph that was built in an attempt of a step that was given up; build it "
        "in the step that uses it (docs/limits.md)"
    )
