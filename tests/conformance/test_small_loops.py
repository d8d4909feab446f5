"""A hundred small loops by ``--auto``: killed, they end with what plain processes end with, or they are refused before
the first step. None is silently different."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.small_loops import HELPERS, LOOPS, script
from tests.support.jobs import ENVIRONMENT, Layout, check_clean, run_job
from tests.support.unmodified import lines, printed

TIMEOUT_S = 240
REFUSED = (
    "accumulate_islice",
    *("closure_sgd", "dispatch_dict", "generator_steps", "hyper_search", "lambda_step", "lbfgs", "map_steps"),
    *("freeze_later", "recurrent_hidden"),  # one optimizer for two DistributedDataParallels
    *("file_readline", "other_module_iterator", "recursion", "threads", "unrolled"),
    *("generator_send", "list_islice", "seeds_spawned"),
)
LATE = ("reset_optimizer",)
"""What they do is not known before: refused when it comes to it."""
NAMED = ("criterion_lambda", "linked_objects", "rolled_back")
"""What they carry can neither be made again nor found: `not_registered` says so as soon as it is exchanged, and their
end may be another one."""
KILLS = ((1, "backward", 3), (0, "forward", 7), (1, "below", 9), (0, "optimizer", 11))
FEWER = {"compiled": 2, "early_stopping": 3, "several_optimizers": 3}
"""How many of them strike in a loop that does not come to all of them."""

pytestmark = [pytest.mark.grid, pytest.mark.timeout(3 * TIMEOUT_S)]


def plain(path: Path, files: Path) -> list[str]:
    """What two processes print that no one protects."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SMALL_LOOPS": str(files)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env={**os.environ, **ENVIRONMENT, **own, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    return [one.communicate(timeout=TIMEOUT_S)[0] for one in processes]


@pytest.mark.parametrize("name", LOOPS)
def test_small_loop(name: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script(name))
    (tmp_path / "helpers.py").write_text(HELPERS)
    folders = [tmp_path / "plain", tmp_path / "files"]
    for folder in folders:
        folder.mkdir()
    inject = [f"rank={rank},fault=sigkill,at={at},step={step}" for rank, at, step in KILLS]
    env = {"SMALL_LOOPS": str(folders[1])}
    layout = Layout(name, "", nproc=2)
    job = run_job(
        tmp_path / "run", layout, script=path, inject=inject, options=("--auto",), timeout_s=TIMEOUT_S, env=env
    )
    check_clean(job)
    if name in LATE:
        assert job.code != 0 and "this optimizer is not registered" in job.output, job.explain()
        return
    if name in REFUSED:
        assert job.code != 0 and re.search(r"UnsupportedError: .*train\.py:\d+", job.output), job.explain()
        assert not job.notices("fault_fired") and not job.of("recovery_started"), job.explain()
        return
    if name in NAMED:
        assert any("not brought back by a recovery" in e["text"] for e in job.notices("not_registered")), job.explain()
        return
    assert job.code == 0 and len(job.notices("fault_fired")) == FEWER.get(name, len(KILLS)), job.explain()
    for rank, text in enumerate(plain(path, folders[0])):
        assert printed(job, rank) == lines(text), job.explain()
        assert f"digest rank={rank} {job.digests[rank]}" in text, job.explain()
