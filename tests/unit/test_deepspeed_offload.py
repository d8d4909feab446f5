"""What is refused of an offloaded optimizer, with stand-ins: none of this needs deepspeed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashrecovery.errors import UnsupportedError
from fr_deepspeed.offload import check_gradients, device_of


def test_offload_needs_a_gradient_of_every_parameter() -> None:
    names = {0: "a", 1: "b"}
    zero = SimpleNamespace(norm_for_param_grads={0: 1.0}, param_names=names, get_param_id=lambda p: p)
    check_gradients(zero, [0])
    with pytest.raises(UnsupportedError, match=r"\(b\) has no gradient in a step"):
        check_gradients(zero, [0, 1])


def test_where_an_offload_goes() -> None:
    assert device_of(None) == "none"
    assert device_of(SimpleNamespace(device="cpu")) == device_of(SimpleNamespace(device=SimpleNamespace(value="cpu")))
