"""Collectives below the block are found in the script's text, before its first step."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashrecovery.worker.script_text.post_step_collectives import communicates_below

SCRIPT = """
import functools
import torch
import torch.distributed as dist
from torch.distributed import all_reduce as reduce_all

def mean(loss):
    dist.all_reduce(loss)  # here: direct, deep, conditional, method, decorated, epochs, outer
    return loss

def evaluate(loss):
    return mean(loss)

@torch.no_grad()
def decorated_evaluation(loss):
    return mean(loss)

class Trainer:
    def __init__(self, step):
        self.step = step
    def train(self):
        for _ in range(3):
            with self.step:
                pass
            self.evaluate()
    def evaluate(self):
        return mean(1)
    def one(self):
        with self.step:
            pass

def direct(step):
    for _ in range(3):
        with step:
            pass
        mean(0)

def named(step):
    for _ in range(3):
        with step:
            pass
        reduce_all(0)  # here: named

def deep(step):
    for _ in range(3):
        with step:
            pass
        print(max(1, evaluate(0)))

def conditional(step):
    for k in range(3):
        if k >= 0:
            with step:
                pass
        if k % 1000 == 999:
            evaluate(0)

def method(step):
    Trainer(step).train()

def outer(step):
    trainer = Trainer(step)
    for _ in range(3):
        trainer.one()
        evaluate(0)

def decorated(step):
    for _ in range(3):
        with step:
            pass
        decorated_evaluation(0)

def epochs(step):
    for _ in range(2):
        for _ in range(3):
            with step:
                pass
        evaluate(0)

def above(step):
    for _ in range(3):
        step is None and mean(0)
        with step:
            mean(0)
    mean(0)

def harmless(step):
    for _ in range(3):
        with step:
            pass
        dist.barrier()
        print(dist.get_rank(), functools.reduce(max, [1]), [].append(1))
        unknown.all_reduce(0)

def in_several_places(step):
    for k in range(3):
        if k < 1:
            with step:
                mean(0)
            continue
        if k:
            with step, torch.no_grad():
                mean(0)
        with step:
            mean(0)

def recursive(step):
    def again():
        again()
    for _ in range(3):
        with step:
            pass
        again()
"""


class Found(Exception):
    pass


class Step:
    def __enter__(self) -> None:
        raise Found(communicates_below(sys._getframe(1)))

    def __exit__(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    file = tmp_path_factory.mktemp("script") / "train.py"
    file.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location("train_below", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FOUND = ["direct", "named", "deep", "conditional", "method", "outer", "decorated", "epochs"]


@pytest.mark.parametrize("loop", FOUND)
def test_found(loop: str, script: ModuleType) -> None:
    lines = SCRIPT.splitlines()
    (line,) = [n for n, text in enumerate(lines, 1) if "# here:" in text and loop in text.replace(",", " ").split()]
    with pytest.raises(Found) as found:
        getattr(script, loop)(Step())
    assert found.value.args == (f"{Path(str(script.__file__))}:{line}",)


@pytest.mark.parametrize("loop", ["above", "harmless", "in_several_places", "recursive"])
def test_nothing_found(loop: str, script: ModuleType) -> None:
    with pytest.raises(Found) as found:
        getattr(script, loop)(Step())
    assert found.value.args == (None,)
