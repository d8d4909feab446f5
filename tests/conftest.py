"""What holds in all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.validated import install

settings.register_profile("busy machines", deadline=None)  # a timing decides no test
settings.load_profile("busy machines")

install()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is made here lives as long as the process. The collector does not look at it, now or in any test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
