"""What a forked process was forked with is collected at its end only where someone counts what is left."""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from flashrecovery.worker.startup.zygote import counts_what_is_left


def test_libraries_that_count_what_is_left_are_known_by_what_they_consist_of() -> None:
    assert torch.cuda is not None
    assert not counts_what_is_left([m for n, m in list(sys.modules.items()) if not n.startswith(("triton", "jax"))])
    within = ModuleType("triton._C.libtriton.ir")
    within.__dict__["load"] = type("nb_func", (), {"__module__": "nanobind"})()
    assert counts_what_is_left([ModuleType("other"), within])
    within.__dict__["__file__"] = "/somewhere/ir.py"
    assert not counts_what_is_left([within]), "no compiled module"
