"""What ``torch.compile`` has learned while a script ran: which sizes and numbers vary from one call to the next.

Dynamo compiles a function for the sizes that it meets first and, when another one comes, for any ("automatic
dynamic"). The two kernels may round differently. A replacement that begins to learn with the step it comes into would
go on with other bits than the process before it, so what that one had learned is a part of its rank-local state, and
the replacement compiles from the first for what varies. A step that is done again must not begin with what the attempt
before it has learned, either. Kernels themselves are not brought: docs/limits.md.

Private to torch is ``torch._dynamo.pgo``, where all of it stands; tested with 2.13 and 2.14.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from flashrecovery.capabilities.of_torch import LEARNED_SIZES

log = logging.getLogger("flashrecovery")

CompiledName = tuple[str, int, str]
"""Digest of the file, first line, name. Dynamo's own key has a hash of the closure, too, which differs between
processes; closures of one function are taken together."""
Encoded = list[tuple[CompiledName, dict[str, list[Any]]]]
"""For each function, by the source of an input: its value, sizes and strides, if they have always been the same."""
_VARIES, _UNKNOWN = "varies", "unknown"


class DynamicShapes:
    """The dynamic shapes of this process. A check costs next to nothing while nothing is compiled."""

    def __init__(self) -> None:
        self._brought: dict[CompiledName, dict[str, Any]] = {}
        self._seen: tuple[object, int] = (None, -1)
        self._encoded: Encoded = []

    def capture(self) -> Encoded:
        """As plain values; empty where nothing has been compiled."""
        pgo = _pgo()
        if pgo is None or pgo._CODE_STATE is None:
            return []
        if self.stale:
            known = {key: dict(sources) for key, sources in self._brought.items()} if self._holds(pgo) else {}
            for code, state in pgo._CODE_STATE.items():
                _join(known.setdefault(_function(code), {}), state.automatic_dynamic)
            self._encoded = [(key, {s: _encode(e, pgo) for s, e in of.items()}) for key, of in known.items() if of]
            self._seen = _mark(pgo)
        return self._encoded

    @property
    def stale(self) -> bool:
        """Something has been compiled since the last look."""
        pgo = _pgo()
        if pgo is None or pgo._CODE_STATE is None:
            return False
        state, count = _mark(pgo)
        return state is not self._seen[0] or count != self._seen[1]

    def go_back(self, learned: Encoded) -> None:
        """The step that began with ``learned`` is done again. If it has taught more, all of this process's kernels are
        dropped: those of the new attempt are the ones that it would have had in the first one."""
        if dict(self.capture()) != dict(learned):
            log.info("what torch.compile has compiled in the attempt before is compiled again")
            self._brought = {}
            sys.modules["torch._dynamo"].reset()
            self.adopt(learned)

    def adopt(self, learned: Encoded) -> None:
        """This process goes on for another one, which had learned this."""
        if not learned or LEARNED_SIZES.missing():
            return
        from torch._dynamo import pgo

        for key, sources in learned:
            file, line, name = key
            _join(self._brought.setdefault((file, line, name), {}), {s: _decode(e, pgo) for s, e in sources.items()})
        known = _Brought(self._brought, pgo.CodeState)
        for code, state in pgo.get_code_state().items():
            _join(state.automatic_dynamic, self._brought.get(_function(code), {}))
            known[code] = state
        pgo._CODE_STATE = known
        self._seen = (None, -1)

    @staticmethod
    def _holds(pgo: Any) -> bool:
        """The script has not let Dynamo forget what was brought."""
        return isinstance(pgo._CODE_STATE, _Brought)


class _Brought(defaultdict[Any, Any]):
    """Dynamo's state of each function; one that has none yet begins with what was brought."""

    def __init__(self, brought: Mapping[CompiledName, Mapping[str, Any]], empty: Any) -> None:
        super().__init__(empty)
        self._of_function = brought

    def __missing__(self, code: Any) -> Any:
        state = super().__missing__(code)
        _join(state.automatic_dynamic, self._of_function.get(_function(code), {}))
        return state

    def __reduce__(self) -> Any:
        return defaultdict, (self.default_factory,), None, None, iter(self.items())


def _pgo() -> Any:
    """Dynamo's module if something has imported it, and it is as we know it."""
    pgo = sys.modules.get("torch._dynamo.pgo")
    return pgo if pgo is not None and hasattr(pgo, "_CODE_STATE") else None


def _mark(pgo: Any) -> tuple[object, int]:
    """Dynamo's state, and how often it has been asked to compile."""
    return pgo._CODE_STATE, sys.modules["torch._dynamo.utils"].counters["frames"]["total"]


def _function(code: Any) -> CompiledName:
    return code.file_hash, code.firstlineno, code.name


def _join(into: Any, sources: Mapping[str, Any]) -> None:
    """What has been the same in both has been the same."""
    for source, entry in sources.items():
        new = type(entry)(entry.scalar, entry.size, entry.stride)
        if source in into:
            new |= into[source]
        into[source] = new


def _encode(entry: Any, pgo: Any) -> list[Any]:
    def plain(value: Any) -> Any:
        if value is pgo.auto_dynamic:
            return _VARIES
        if value is pgo.auto_unset:
            return _UNKNOWN
        if isinstance(value, pgo.InferStride):
            return [value.dim]
        return tuple(map(plain, value)) if isinstance(value, tuple) else value

    return [plain(value) for value in (entry.scalar, entry.size, entry.stride)]


def _decode(values: list[Any], pgo: Any) -> Any:
    def real(value: Any) -> Any:
        if isinstance(value, str):
            return {_VARIES: pgo.auto_dynamic, _UNKNOWN: pgo.auto_unset}[value]
        if isinstance(value, list):
            return pgo.InferStride(*value)
        return tuple(map(real, value)) if isinstance(value, tuple) else value

    return pgo.FrameStateSizeEntry(*map(real, values))
