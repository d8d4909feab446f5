"""W&B's process is asked to finish the run when its rank is gone. (The real one: test_run_logs.py.)"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flashrecovery.worker.startup import wandb_service
from flashrecovery.worker.startup.wandb_service import finish_with_its_rank

RANK = """
import os, sys
from types import ModuleType, SimpleNamespace
from flashrecovery.worker.startup import wandb_service
wandb_service._teardown = lambda: b"finish"
module = ModuleType("service_process")
module.start_detached = lambda settings, *, idle_timeout: SimpleNamespace(
    token=SimpleNamespace(env_value="3-1-unix-" + sys.argv[1])
)
module.start = lambda settings: None
wandb_service.finish_with_its_rank(module)
module.start(None)
print("started", flush=True)
sys.stdin.read()
"""


def test_a_rank_that_is_killed_has_its_run_finished() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as service:
        service.bind(f"{folder}/socket")
        service.listen()
        service.settimeout(60)
        command = [sys.executable, "-c", RANK, f"{folder}/socket"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
            assert rank.stdout is not None and rank.stdout.readline() == b"started\n"
            rank.kill()
        connection, _ = service.accept()
        with connection:
            assert connection.recv(100) == b"finish"


def test_other_versions_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(settings: object) -> str:
        return f"{settings} attached"

    module: Any = ModuleType("service_process")
    module.start = before
    finish_with_its_rank(module)
    assert module.start is before, "it cannot be detached"
    by_port = SimpleNamespace(token=SimpleNamespace(env_value="3-1-tcp-localhost-1"))
    module.start_detached = lambda settings, **_: by_port
    finish_with_its_rank(module)
    monkeypatch.setattr(wandb_service, "_teardown", lambda: b"")
    assert module.start("settings") == "settings attached", "it would not be understood"
    monkeypatch.setattr(wandb_service, "_teardown", lambda: b"finish")
    assert module.start("settings") is by_port, "it ends by itself"


@pytest.mark.libraries
def test_the_request_is_wandbs_own() -> None:
    messages = pytest.importorskip("wandb.proto.wandb_server_pb2")
    sent = wandb_service._teardown()
    assert messages.ServerRequest.FromString(sent[5:]).inform_teardown.exit_code == 1 and sent[:1] == b"W"
