"""A device plugin's fatal finding in a real job: recovered before the process notices. The plugin is docs/health.md's,
installed as its own distribution."""

from __future__ import annotations

import os
from pathlib import Path

from tests.integration.launchers.test_launcher import TINY, ends, run_cli
from tests.support.jobs import ROOT, Layout, RunningJob, check_clean, check_recovered, run_job

TWO = Layout("two", "", nproc=2)
FLAGS = ("--steps", "40")
FAST = {"timeouts": {"health_s": 0.05}}


def install(site: Path) -> None:
    """The documented example, as `pip install` would leave it."""
    page = (ROOT / "docs" / "health.md").read_text()
    code = next(block for block in page.split("```python\n") if block.startswith("# drill.py"))
    info = site / "drill-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "drill.py").write_text(code.split("```")[0])
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: drill\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flashrecovery.health]\ndrill = drill:create\n")


def test_a_fatal_finding_recovers_the_devices_rank(tmp_path: Path) -> None:
    reference = run_job(tmp_path / "reference", TWO, script=TINY, flags=FLAGS, standby=0)
    assert reference.code == 0 and len(ends(reference)) == 2, reference.explain()
    install(tmp_path / "site")
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    broken = tmp_path / "broken"
    env = {"PYTHONPATH": path, "DRILL_FILE": str(broken)}
    flags, options = [*FLAGS, "--sleep", "0.05"], ["--health", "drill"]
    job = RunningJob(tmp_path / "run", TWO, script=TINY, flags=flags, standby=0, env=env, config=FAST, options=options)
    job.wait_for("job_started")
    job.wait_until_committed(2)
    victim = job.ranks()[1]
    broken.touch()
    job.wait_for("recovery_finished")
    assert job.ranks()[1] != victim
    ended = job.wait()
    assert ended.code == 0, ended.explain()
    (failure,) = ended.of("failure_detected")
    assert (failure["rank"], failure["kind"]) == (1, "device"), failure
    assert "broken on purpose [drill]" in failure["evidence"]
    check_recovered(ended, [1])
    assert ends(ended) == ends(reference), ended.explain()
    check_clean(ended)


def test_an_unknown_plugin_is_refused(tmp_path: Path) -> None:
    done = run_cli("run", "--health", "nvida", "--run-dir", str(tmp_path / "run"), str(TINY))
    assert done.returncode == 2 and "unknown device plugin 'nvida'; did you mean 'nvidia'?" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
