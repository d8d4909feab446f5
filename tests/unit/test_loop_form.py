"""Loops that count along with the steps are refused."""

from __future__ import annotations

import ast

import pytest

from flashrecovery.errors import RegistrationError
from flashrecovery.worker.script_text import script_frames


def check(header: str) -> None:
    loop = ast.parse(f"{header}\n    pass").body[0]
    assert isinstance(loop, ast.For)
    script_frames.check(loop, "train.py:7", lambda name: name in ("steps", "self.given"))


@pytest.mark.parametrize(
    "header",
    [
        "for step in recovery.steps(9):",
        "for step in tqdm(recovery.steps(9)):",
        "for step in steps:",
        "for i, batch in enumerate(batches):",
        "for a, b in zip(losses, others):",
    ],
)
def test_allowed(header: str) -> None:
    check(header)


@pytest.mark.parametrize(
    ("header", "by"),
    [
        ("for step, batch in zip(recovery.steps(9), loader):", "zip"),
        ("for batch, step in zip(loader, recovery.steps(9)):", "zip"),
        ("for i, step in enumerate(recovery.steps(9)):", "enumerate"),
        ("for i, step in enumerate(steps):", "enumerate"),
        ("for i, step in enumerate(self.given, 1):", "enumerate"),
        ("for i, step in tqdm(enumerate(recovery.steps(9))):", "enumerate"),
        ("for i, step in enumerate(tqdm(recovery.steps(9))):", "enumerate"),
        ("for step in itertools.islice(flash.recovery.steps(9), 3):", "islice"),
        ("for i, (step, batch) in enumerate(zip(steps, loader)):", "enumerate"),
    ],
)
def test_refused(header: str, by: str) -> None:
    with pytest.raises(RegistrationError, match=rf"train\.py:7: .*{by}\(\) knows nothing of that"):
        check(header)
