"""A rank dies while there is no controller: the survivors wait for one, however long, instead of failing one by one."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

from tests.support.controllers import TOKEN, controller
from tests.support.jobs import DDP, RunningJob, check_recovered, check_same, read_events, run_job

PEER_ERROR_WAIT_S = 1.5
CONFIG = {"timeouts": {"peer_error_wait_s": PEER_ERROR_WAIT_S}}
FLAGS = ["--step-time", "100"]
STEPS = 40


def test_a_rank_dies_while_the_controller_is_away(tmp_path: Path) -> None:
    reference = run_job(tmp_path / "reference", DDP, steps=STEPS, standby=0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    known = tmp_path / "controller"
    job = RunningJob(
        tmp_path / "run",
        DDP,
        steps=STEPS,
        flags=FLAGS,
        config=CONFIG,
        options=["--no-embed-controller", "--controller", address],
        env=TOKEN,
    )
    with controller(known, address) as first:
        job.wait_for_step(5)
        table = json.loads((known / "ranktable.json").read_text())
        first.send_signal(signal.SIGKILL)
        first.wait()
        os.kill(next(r["pid"] for r in table["ranks"] if r["rank"] == 1), signal.SIGKILL)
        time.sleep(4 * PEER_ERROR_WAIT_S)
        with controller(known, address):
            ended = job.wait()
    ended.events = read_events(known)
    check_same(ended, reference)
    check_recovered(ended, [1])
    assert all(e["victims"] == [1] for e in ended.of("recovery_finished")), ended.explain()
