"""Iterators that a step asks for their next element, and that are not led back: ``next(batches)`` in a module without
the loop, or in a library. Of most kinds it can be seen that they have gone on, without asking them for anything."""

from __future__ import annotations

import csv
import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from flashrecovery.worker.local_state.fingerprints import plain_mark
from flashrecovery.worker.own_loops.loop_data import OwnIterator
from flashrecovery.worker.script_text.script_frames import is_own

_DEPTH = 4
_READER = type(csv.reader(()))
_COUNTED = frozenset(
    (type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")), type(iter({})), type(reversed([])))
)


def progress(iterators: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Each of ``iterators`` with how far it has come, by path; without those of the script's own classes, whose
    attributes say that."""
    return {
        path: (one, mark)
        for path, one in iterators.items()
        if isinstance(one, Iterator) and not isinstance(one, OwnIterator) and not is_own(type(one))
        if (mark := _mark(one, _DEPTH)) is not None
    }


def gone_on(before: Mapping[str, tuple[object, object]], now: Mapping[str, tuple[object, object]]) -> dict[str, object]:
    """Those that are the same, and have come further."""
    return {
        path: one
        for path, (one, mark) in now.items()
        if path in before and before[path][0] is one and before[path][1] != mark
    }


def _mark(one: Any, depth: int) -> object:
    """None: nothing is known of such iterators."""
    if isinstance(one, types.GeneratorType):
        frame = one.gi_frame
        if frame is None or not depth:
            return "ended"
        within = (*frame.f_locals.values(), one.gi_yieldfrom)
        inner = [_mark(value, depth - 1) for value in within if isinstance(value, Iterator)]
        values = [plain_mark(value) for value in frame.f_locals.values() if not isinstance(value, Iterator)]
        return frame.f_lasti, inner, values
    if isinstance(one, itertools.count):
        return repr(one)
    if type(one) in _COUNTED:
        return one.__length_hint__()
    if isinstance(one, _READER):
        return one.line_num
    return one._num_yielded if hasattr(one, "_num_yielded") else None  # a DataLoader's
