"""What your own loop keeps in Megatron's objects: a step that is cut short leaves it as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fr_megatron import own_loop
from fr_megatron.own_loop import OwnLoop


def loop(monkeypatch: pytest.MonkeyPatch, *configs: Any) -> OwnLoop:
    pytest.importorskip("megatron.core")
    monkeypatch.setattr(own_loop, "_replicas", lambda: 2)
    return OwnLoop([SimpleNamespace(config=config) for config in configs])


def test_an_evaluation_that_is_cut_short_leaves_the_reduction_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interleaved schedule puts the functions aside while it only goes forward."""
    config = SimpleNamespace(grad_sync_func=None, param_sync_func=None)
    made = loop(monkeypatch, config, config)
    made.capture_common()  # at the start: the script has not said it yet
    config.grad_sync_func = [print, print]
    made.restore_common(made.capture_common())
    assert config.grad_sync_func == [print, print] and config.param_sync_func is None
    state = made.capture_common()
    config.grad_sync_func = None
    made.restore_common(state)
    assert config.grad_sync_func == [print, print]


def test_what_the_script_has_said_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step, before which nothing was known; and a replacement knows nothing of before."""
    config = SimpleNamespace(grad_sync_func=None)
    made = loop(monkeypatch, config)
    state = made.capture_common()
    config.grad_sync_func = print
    made.restore_common(state)
    assert config.grad_sync_func is print
    replacement = loop(monkeypatch, SimpleNamespace(grad_sync_func=None))
    replacement.restore_common(state)
    bare = OwnLoop([object()])
    bare.restore_common({**bare.capture_common(), "hooked": [False]})
