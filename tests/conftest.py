"""What holds in all tests."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from multiprocessing import util

import pytest
from hypothesis import settings

from tests.support.validated import install

_LAST_PRIORITY = -100
"""That with which ``multiprocessing`` removes its directory."""
settings.register_profile("busy machines", deadline=None)  # a timing decides no test
settings.load_profile("busy machines")

install()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is made here lives as long as the process. The collector does not look at it, now or in any test. And torch
    computes in one thread: tensors of tests are small, and threads that wait for work keep the processors busy."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers of one run must find the same names."""
    placed = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if placed:
        raise pytest.UsageError(f"{placed[0]}: a case that is named by an address; give it a name by `ids=` or a key")


@pytest.fixture(scope="session", autouse=True)
def directory_of_sockets(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that are forked here inherit where ``multiprocessing`` has its sockets. A loader's worker with one of
    its own leaves it (``/tmp/pymp-...``) if it is told to end while its queue's thread sends its first batch."""
    util.get_temp_dir()
    yield
    if hasattr(request.config, "workerinput"):  # a process of xdist, which may end without its exit handlers
        util._run_finalizers(_LAST_PRIORITY)


@pytest.fixture(scope="module", autouse=True)
def no_poller_of_grpc() -> Iterator[None]:
    """gRPC's thread for asyncio ends with the last object that uses it, which may wait for the collector. A test that
    forks beside it (a DataLoader) may hang: gRPC leaves out its handlers of forks then ("skipping fork() handlers").
    Ranks have no gRPC."""
    yield
    if any("_poll_wrapper" in thread.name for thread in threading.enumerate()):
        gc.collect()
