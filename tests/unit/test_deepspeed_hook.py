"""Attaching an engine: once, in time, and with a clear word where it is too late. No process group is made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import flashrecovery
from flashrecovery import Recovery
from flashrecovery.capabilities.patches import PatchTable
from flashrecovery.errors import ConfigError, RegistrationError
from fr_deepspeed import attach, hook

ENABLED = {"flash_recovery": {"enabled": True}}


class FakeEngine:
    """What :func:`attach` looks at before the adapter is made."""

    def __init__(self, config: dict[str, Any] = ENABLED, micro_steps: int = 0, **attributes: Any) -> None:
        self.config = config
        self.micro_steps = micro_steps
        self.lr_scheduler = None
        self.pipeline_parallelism = False
        vars(self).update(attributes)

    def step(self) -> None:
        pass


class FakeRecovery(Recovery):
    """Live, without a launcher."""

    def __init__(self) -> None:
        super().__init__(None)
        self.adapters: list[object] = []

    enabled = True  # type: ignore[assignment]

    def register_adapter(self, adapter: Any, **objects: Any) -> None:
        self.adapters.append(adapter)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> FakeRecovery:
    """As under ``flashrecovery run``, with an adapter that knows nothing of DeepSpeed, and no engine yet."""
    monkeypatch.setattr(sys.modules["fr_deepspeed.attach"], "_newest", None)
    recovery = FakeRecovery()
    monkeypatch.setattr(flashrecovery, "init", lambda **overrides: recovery)
    adapter = ModuleType("fr_deepspeed.adapter")
    adapter.adapter_for = lambda engine: "adapter"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fr_deepspeed.adapter", adapter)
    return recovery


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that looks like deepspeed, wrapped."""
    monkeypatch.setattr(hook, "PATCHES", PatchTable("deepspeed", []))
    module: Any = ModuleType("deepspeed")
    module.DeepSpeedEngine = type("DeepSpeedEngine", (FakeEngine,), {})
    module.initialize = lambda **kwargs: (module.DeepSpeedEngine(**kwargs), None, None, None)
    hook.install(module)
    yield module


def test_initialize_attaches_once(module: Any, live: FakeRecovery) -> None:
    hook.install(module)
    engine = module.initialize()[0]
    assert engine.recovery is live and live.adapters == ["adapter"]


def test_a_deepspeed_that_attaches_itself_and_the_wrapper_agree(
    module: Any, live: FakeRecovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = module.DeepSpeedEngine()
    first = attach(engine)
    assert attach(engine) is first is live
    assert live.adapters == ["adapter"]


def test_an_engine_made_before_the_wrapper_is_attached_by_hand(module: Any, live: FakeRecovery) -> None:
    engine = module.DeepSpeedEngine()
    with pytest.raises(RegistrationError, match=r"fr_deepspeed\.attach\(engine\) before its first step"):
        _ = engine.recovery
    attach(engine)
    assert engine.recovery is live


@pytest.mark.parametrize("trace", [{"micro_steps": 1}, {"agg_train_loss": 2.5}], ids=["micro-steps", "pipeline"])
def test_an_engine_that_has_trained_is_too_late(trace: dict[str, Any], live: FakeRecovery) -> None:
    with pytest.raises(RegistrationError, match="comes too late: this engine has trained already"):
        attach(FakeEngine(**trace))
    assert not live.adapters


def test_another_attribute_of_this_name_is_not_overwritten(live: FakeRecovery) -> None:
    with pytest.raises(RegistrationError, match="'recovery' of type str"):
        attach(FakeEngine(recovery="mine"))


def test_a_wrong_block_is_refused_before_anything_else(live: FakeRecovery) -> None:
    with pytest.raises(ConfigError, match="did you mean 'enabled'"):
        attach(FakeEngine({"flash_recovery": {"enable": True}}, micro_steps=3))


def test_switched_off_nothing_is_asked_of_the_engine(live: FakeRecovery) -> None:
    engine = FakeEngine({}, micro_steps=3)
    assert not attach(engine).enabled and not live.adapters
