"""The targets can fail: a lock that is left out, and memory that is used after it was freed, in the product's code."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from flashrecovery import groups
from flashrecovery.groups import native_build
from tests.support.groups_ranks import run_ranks


@dataclass(frozen=True)
class Mutant:
    """``old`` stands once in ``file``; with ``new`` in its place, ``sanitizer`` must report ``title``."""

    sanitizer: str
    file: str
    old: str
    new: str
    title: str


MUTANTS = (
    Mutant(
        "thread",
        "lane.h",
        "    std::lock_guard<std::mutex> guard(queue_->mutex);\n    queue_->jobs.push_back({work, std::move(body)});",
        "    queue_->jobs.push_back({work, std::move(body)});\n    std::lock_guard<std::mutex> guard(queue_->mutex);",
        "data race",
    ),
    Mutant(
        "address",
        "transport.h",
        "\n    inner.reset();\n    lock.lock();\n    state_->buffers_.erase(position_);",
        "\n    inner.reset();\n    lock.lock();",
        "heap-use-after-free",
    ),
)


def _rank(rank: int, size: int, store: Store) -> None:
    """Operations of one lane; and of gloo, whose buffers a cut looks at."""
    groups.install()
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    control = groups.control_group()
    assert control is not None
    for _ in range(30):
        control.barrier().wait()
    dist.all_reduce(torch.ones(3))
    groups.abandon("over")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.title)
def test_a_fault_of_ours_is_reported(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.sanitizers import plugin

    if os.environ.get("FLASHRECOVERY_SANITIZE") != mutant.sanitizer:
        pytest.skip(f"needs the {mutant.sanitizer} sanitizer")
    sources = tmp_path / "native"
    shutil.copytree(native_build.BACKEND.sources, sources)
    text = (sources / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    (sources / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    monkeypatch.setattr(native_build, "BACKEND", replace(native_build.BACKEND, sources=sources))
    native_build.build(extension=native_build.BACKEND)
    ended = ""
    try:
        run_ranks(2, _rank)
    except AssertionError as error:
        ended = str(error)  # of the report, or it hangs
    titles = [report.title for report in plugin.take() if report.ours]
    assert any(mutant.title in title for title in titles), f"{titles}\n{ended}"
