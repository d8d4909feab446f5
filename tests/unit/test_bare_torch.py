"""A store without the rest of torch serves like any other; where that has not been seen, torch is imported."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import time
from datetime import timedelta

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from flashrecovery.agent.stores import bare_torch
from flashrecovery.agent.stores.store import StoreServer

RELEASE = ".".join(torch.__version__.split(".")[:2])


def _serves(server: StoreServer) -> None:
    client = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60))
    client.set("fr/gen1/0/a", "value")
    client.wait(["fr/gen1/0/a"])
    assert client.get("fr/gen1/0/a") == b"value" and client.add("n", 2) == 2 and client.list_keys()
    assert client.compare_set("b", "", "c") == b"c" and client.delete_key("n")


def _has_all_of_torch(pid: int) -> bool:
    """This library is loaded by the package's first lines, and by no other library."""
    return any("libtorch_global_deps" in mapped.path for mapped in psutil.Process(pid).memory_maps())


def test_a_store_serves_with_little_of_torch_and_is_started_again_with_all_of_it() -> None:
    server = StoreServer("127.0.0.1", 0)
    try:
        _serves(server)
        assert _has_all_of_torch(server.pid) == (RELEASE not in bare_torch.SEEN)
        psutil.Process(server.pid).kill()
        deadline = time.monotonic() + 10
        while not (died := server.revive()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert died
        _serves(server)
        assert _has_all_of_torch(server.pid)
    finally:
        server.close()


CHECK = """
import sys
from datetime import timedelta
from flashrecovery.agent.stores.bare_torch import tcp_store
from flashrecovery.agent.stores.store_server import Sweep
store = tcp_store(whole=False)("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
sweep = Sweep(store)
for generation in (1, 2, 3):
    store.set(f"fr/gen{generation}/0/a", "value")
    sweep()
sweep()
assert [key for key in store.list_keys() if "gen" in key] == ["fr/gen3/0/a"], store.list_keys()
try:
    store.wait(["never"], timedelta(seconds=0.01))
except RuntimeError:
    print("ends in order", "torch.nn" in sys.modules)
del store
"""


def test_a_store_sweeps_and_ends_in_order_with_little_of_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"ends in order {RELEASE not in bare_torch.SEEN}\n"), done.stderr


@pytest.mark.parametrize(
    ("version", "seen"), [("2.13.0", True), ("2.13.1+cu130", True), ("2.130.0", False), ("2.14.0", False)]
)
def test_what_has_not_been_seen_imports_torch(version: str, seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    monkeypatch.setattr(bare_torch, "_bare", lambda: "bare")
    assert bare_torch.tcp_store(whole=False) == ("bare" if seen else TCPStore)
    assert bare_torch.tcp_store(whole=True) is TCPStore
