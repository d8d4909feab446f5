"""All that have heard of a generation lose power at once, and a node that was cut off is there: no number is used
twice.

The hosts are network namespaces, and share the run directory.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from flashrecovery.controller.storage.generation_file import FILE_NAME
from tests.support import hosts
from tests.support.elastic import SCRIPT
from tests.support.hosts import Network
from tests.support.jobs import Layout, check_clean
from tests.support.nodes import NodesJob, hosts_of_a_test

pytestmark = [
    pytest.mark.skipif(not hosts.available(), reason="network namespaces need CAP_NET_ADMIN"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
    pytest.mark.grid,
]
two_hosts = hosts_of_a_test(2)
STEPS, STEP_MS = 60, 200


def test_no_number_is_used_twice(two_hosts: Network, tmp_path: Path) -> None:
    """The second host is frozen, and the job goes on without it; then the first one, which alone knows of that, is
    started again."""
    config = tmp_path / "config.yaml"
    config.write_text("timeouts: {takeover_s: 5}\n")
    job = NodesJob(
        two_hosts,
        tmp_path / "run",
        Layout("elastic", str(SCRIPT), nproc=4),
        steps=STEPS,
        step_ms=STEP_MS,
        options=("--elastic", "1:4"),
        config=config,
    )
    job.wait_for_step(7)
    first, frozen = two_hosts.hosts
    job.signal_node(frozen, signal.SIGSTOP)
    job.wait_for("job_resized")
    job.wait_for("recovery_finished")
    (written,) = job.run_dir.rglob(FILE_NAME)
    on_disk = json.loads(written.read_text())
    assert on_disk.pop("launch") and on_disk == {"generation": 1, "restarts": 0}
    job.wait_for_step(job.of("recovery_finished")[-1]["resume_step"] + 5)
    reached = job.newest_step(first)
    job.kill_node(first)
    job.signal_node(frozen, signal.SIGCONT)
    job.start_again(first)
    began = job.wait_for("recovery_started", count=2)
    assert began["generation"] == 2, "its ranks have heard of none but the launch's"
    ended = job.wait(of=[first])
    assert ended.code == 0, ended.explain()
    assert "has found 2 of 4 ranks" in ended.notices("taken_over")[-1]["text"], ended.explain()
    assert ended.of("recovery_finished")[-1]["resume_step"] < reached, "what the lost ones had done is done again"
    assert json.loads(written.read_text())["generation"] >= 2
    check_clean(ended)
