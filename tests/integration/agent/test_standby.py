"""A warm standby that fills a rank: the script's own modules find there what they find in every rank."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from tests.support.jobs import Layout, RunningJob, check_clean, check_recovered

MODULE = """
import os, sys
STEPS = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 10_000
RANK = os.environ.get("RANK", "none")
WORLD = os.environ.get("WORLD_SIZE", "none")
SEEN = (sys.argv[0].rpartition("/")[2], STEPS, RANK, WORLD)
"""
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import beside, elsewhere, package.inner
import flashrecovery

dist.init_process_group("gloo")
rank = str(dist.get_rank())
for module in (beside, elsewhere, package.inner):
    print("seen", module.__name__, *module.SEEN, flush=True)
recovery = flashrecovery.init()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recovery.register(model=model, optimizer=optimizer)
for step in recovery.steps(beside.STEPS):
    with step:
        optimizer.zero_grad()
        while step.index == 3 and not os.path.exists(sys.argv[-1]):
            time.sleep(0.02)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    print(f"step={step.index}", flush=True)
dist.destroy_process_group()
"""


def test_the_scripts_own_modules_are_imported_by_the_script(tmp_path: Path) -> None:
    """Beside the script, in a package there, and in another folder of the module path, as an editable install is."""
    source, other, go = tmp_path / "source", tmp_path / "other", tmp_path / "go"
    (source / "package").mkdir(parents=True)
    other.mkdir()
    (source / "script.py").write_text(SCRIPT)
    (source / "package" / "__init__.py").write_text("")
    for path in (source / "beside.py", source / "package" / "inner.py", other / "elsewhere.py"):
        path.write_text(MODULE)
    job = RunningJob(
        tmp_path / "run",
        Layout("imports", "", nproc=2),
        script=source / "script.py",
        flags=["--steps", "6", str(go)],
        standby=1,
        own_imports=True,
        env={"PYTHONPATH": f"{other}:{os.environ.get('PYTHONPATH', '')}"},
    )
    job.wait_for_step(2)
    _wait_for_a_warm_standby(job)
    job.kill(1)
    job.wait_for("recovery_started")
    go.touch()
    done = job.wait()
    assert done.code == 0, done.explain()
    check_recovered(done, {1})
    seen = re.findall(r"seen (\S+) (\S+) (\d+) (\S+) (\S+)", _logs(done.run_dir, 1))
    expected = {(name, "script.py", "6", "1", "2") for name in ("beside", "elsewhere", "package.inner")}
    assert len(seen) == 6 and set(seen) == expected, done.explain()
    check_clean(done)


def _wait_for_a_warm_standby(job: RunningJob) -> None:
    deadline = time.monotonic() + 90
    while not [e for e in job.events() if e["event"] == "standby_ready" and e["ready"] >= 1]:
        assert time.monotonic() < deadline and job.popen.poll() is None, job.wait(1).explain()
        time.sleep(0.05)


def _logs(run_dir: Path, rank: int) -> str:
    return "\n".join(p.read_text() for p in sorted((run_dir / "logs").glob(f"rank{rank}.*.log")))
