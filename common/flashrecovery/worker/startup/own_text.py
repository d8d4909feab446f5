"""The text of the script and of its own modules, with the loops that take its steps under recovery.

Rewritten is what speaks of DeepSpeed and makes a step's calls (:mod:`flashrecovery.worker.own_loops.rewrite`). Where no
engine is protected, the rewritten text does what it did before. Nothing of it is kept on disk.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

from flashrecovery.worker.preimport.own_files import FRAMEWORKS, is_own_file

_CALLS = (b".backward(", b".step(", b"epoch")
_replacement = False


def compiled_text(text: bytes, file: str) -> CodeType:
    """Raises SyntaxError as the compiler does."""
    if b"deepspeed" in text.lower() or (b"engine" in text and any(call in text for call in _CALLS)):
        from flashrecovery.worker.own_loops.rewrite import rewrite

        rewritten = rewrite(text, file)
        if rewritten.loops or rewritten.iterators:
            from flashrecovery.worker.own_loops.loops import LOOPS

            LOOPS.take(rewritten, file, replacement=_replacement)
            return compile(rewritten.tree, file, "exec", dont_inherit=True)
    return compile(text, file, "exec", dont_inherit=True)


class OwnModules(MetaPathFinder):
    """Finds the script's own modules before anybody else does. ``folders``: where they lie."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = [os.path.abspath(folder) for folder in folders]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in FRAMEWORKS:
            return None
        places = self._folders if path is None else [place for place in path if is_own_file(os.path.join(place, "x"))]
        spec = PathFinder.find_spec(fullname, places, target) if places else None
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = _OwnText(spec.loader.name, spec.loader.path)
        return spec


class _OwnText(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        text = self.get_data(self.path)
        return (
            compiled_text(text, self.path) if all(call in text for call in _CALLS[:2]) else super().get_code(fullname)
        )


def find_own_modules(*, replacement: bool) -> None:
    """From now on, before the script's first line. ``replacement``: this is not the first process of its rank."""
    global _replacement
    _replacement = replacement
    own = [place for place in sys.path if place and is_own_file(os.path.join(place, "x")) and os.path.isdir(place)]
    sys.meta_path.insert(0, OwnModules(own))


def script_is_over() -> None:
    """All that it has printed is shown."""
    loops = sys.modules.get("flashrecovery.worker.own_loops.loops")
    if loops is not None:
        loops.LOOPS.output.show_all()
