"""Which Trainers are protected. Trainers are stood in for: what happens in their loops, the conformance tests show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery.errors import UnsupportedError
from flashrecovery.trainer import plain, protect


def trainer(kind: str) -> Any:
    accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=None), distributed_type=SimpleNamespace(value=kind)
    )
    return SimpleNamespace(accelerator=accelerator)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "init", lambda: SimpleNamespace(enabled=True))


@pytest.mark.usefixtures("live")
@pytest.mark.parametrize("kind", ["NO", "MEGATRON_LM", "XLA"])
def test_other_kinds_of_training_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"trains by {kind}; allowed: DEEPSPEED, MULTI_CPU"):
        protect(trainer(kind))


def test_nothing_is_touched_under_another_launcher() -> None:
    found = trainer("MULTI_GPU")
    before = vars(found).copy()
    protect(found)
    assert vars(found) == before
