"""What communicates past the process groups is refused when it is first used, in any script. Stand-ins have the names
that DeepEP and Transformer Engine have; symmetric memory is torch's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashrecovery.errors import UnsupportedError
from flashrecovery.groups import torch_private

SETUP = """
import torch
import torch.distributed as dist
from flashrecovery import groups
groups.install(control_group=False)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
MODULES = {
    "deep_ep/__init__.py": "from .buffer import Buffer\nfrom .hybrid_ep_buffer import HybridEPBuffer\n",
    "deep_ep/buffer.py": "class Buffer:\n    def __init__(self, group): pass\n",
    "deep_ep/hybrid_ep_buffer.py": "class HybridEPBuffer:\n    def __init__(self, group): pass\n",
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch/__init__.py": "from .module.base import initialize_ub\nfrom .fp8 import *\n",
    "transformer_engine/pytorch/module/__init__.py": "",
    "transformer_engine/pytorch/module/base.py": "def initialize_ub(shape, tp_size): pass\n",
    "transformer_engine/pytorch/quantization.py": """
class Recipe:
    def __init__(self, delayed): self.is_delayed = delayed
    def delayed(self): return self.is_delayed
class FP8GlobalStateManager:
    seen = []
    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta):
        cls.seen.append(fp8_meta)
        return "added"
""",
    "transformer_engine/pytorch/fp8.py": "from .quantization import *\n",
}


def run(tmp_path: Path, body: str) -> str:
    """What ``body`` prints, and what it raises."""
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "script.py").write_text(SETUP + body)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=120, check=False
    )
    raised = [line for line in done.stderr.splitlines() if "Error: " in line]
    return "\n".join([*done.stdout.splitlines(), *raised])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "import torch.distributed._symmetric_memory as symmetric\n"
            "symmetric.rendezvous(torch.ones(4), dist.group.WORLD)",
            "symmetric memory",
        ),
        ("import deep_ep\ndeep_ep.Buffer(dist.group.WORLD)", "DeepEP (deep_ep.buffer.Buffer)"),
        (
            "import deep_ep\ndeep_ep.HybridEPBuffer(dist.group.WORLD)",
            "HybridEP (deep_ep.hybrid_ep_buffer.HybridEPBuffer)",
        ),
        ("import transformer_engine.pytorch as te\nte.initialize_ub([1, 2], 2)", "userbuffers (initialize_ub)"),
        (
            "import transformer_engine.pytorch as te\nfrom transformer_engine.pytorch.quantization import Recipe\n"
            "te.FP8GlobalStateManager.add_fp8_tensors_to_global_buffer({'recipe': Recipe(True)})",
            "delayed scaling (fp8 with the recipe DelayedScaling)",
        ),
        (
            "import transformer_engine.pytorch as te\n"
            "te.FP8GlobalStateManager.add_fp8_tensors_to_global_buffer({'recipe': object()})",
            "delayed scaling (fp8 with the recipe DelayedScaling)",
        ),
    ],
)
def test_it_is_refused_by_name(body: str, words: str, tmp_path: Path) -> None:
    said = run(tmp_path, body)
    assert "flashrecovery.errors.UnsupportedError: " in said and words in said, said


def test_other_recipes_of_fp8_and_what_is_only_imported_go_on(tmp_path: Path) -> None:
    body = (
        "import deep_ep, transformer_engine.pytorch as te\nfrom transformer_engine.pytorch.quantization import Recipe\n"
        "manager = te.FP8GlobalStateManager\n"
        "print(manager.add_fp8_tensors_to_global_buffer({'recipe': Recipe(False)}), len(manager.seen))\n"
    )
    assert run(tmp_path, body).splitlines()[-1] == "added 1"  # older versions of gloo print there, too


GRAPHS = """
from flashrecovery.groups import refusals
class Graph:  # in place of torch's CUDAGraph, which a CPU cannot make
    def capture_begin(self, pool=None, capture_error_mode="global"):
        self.mode = capture_error_mode
    def capture_end(self):
        return "captured"
refusals._graphs(Graph, groups.operation_count)
dist.all_reduce(torch.ones(1))
graph = Graph()
graph.capture_begin(capture_error_mode="relaxed")
print(graph.mode, graph.capture_end())
"""


def test_a_graph_without_a_collective_in_it_goes_on(tmp_path: Path) -> None:
    assert run(tmp_path, GRAPHS).splitlines()[-1] == "relaxed captured"


def test_a_graph_with_collectives_in_it_is_refused(tmp_path: Path) -> None:
    body = "graph.capture_begin()\ndist.all_reduce(torch.ones(1))\ndist.barrier()\ngraph.capture_end()\n"
    said = run(tmp_path, GRAPHS + body)
    assert "flashrecovery.errors.UnsupportedError: a CUDA graph with 2 collectives in it" in said, said


# -- backends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nccl", *torch_private.NCCL_CLASSES])
def test_each_of_torchs_backends_for_nccl_may_be_asked_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in torch_private.NCCL_CLASSES.values():
        monkeypatch.setattr(torch_private.dist, name, object, raising=False)
    torch_private.refuse_unsupported({"cpu": "gloo", "cuda": kind})


def test_other_backends_are_named() -> None:
    with pytest.raises(UnsupportedError, match="process-group backend mpi cannot be recovered"):
        torch_private.refuse_unsupported({"cuda": "mpi"})


def test_a_backend_that_this_torch_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_private.dist, "ProcessGroupNCCL2", raising=False)
    with pytest.raises(UnsupportedError, match=r"process-group backend nccl2: torch .* has no ProcessGroupNCCL2"):
        torch_private.refuse_unsupported({"cuda": "nccl2"})
