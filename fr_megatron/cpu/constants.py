"""Rewrites the string constants of megatron's modules while they are imported: no source is copied, and no line numbers
matter, so it works for every version."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

PACKAGES = ("megatron", "gpt_builders", "model_provider", "pretrain_gpt")
REPLACED = {
    "cuda": "cpu",
    "cuda:": "cpu:",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


def rewritten(code: CodeType) -> CodeType:
    """``code`` and all code inside of it with other constants; itself if nothing has to be replaced."""
    constants = tuple(_constant(c) for c in code.co_consts)
    if all(new is old for new, old in zip(constants, code.co_consts, strict=True)):
        return code
    return code.replace(co_consts=constants)


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return rewritten(value)
    if isinstance(value, str):
        return REPLACED.get(value, value)
    if type(value) in (tuple, frozenset):
        items = type(value)(_constant(v) for v in value)
        return value if items == value else items
    return value


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        return None if code is None else rewritten(code)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """From now on, megatron's modules are imported so."""
    sys.meta_path.insert(0, _Finder())


def installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)
