"""``make gpu-check`` can be begun when a GPU is there: its jobs, over the fake of NCCL on a CPU, its report and its
budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import gpu_check
from tests.support.jobs import ROOT

NONE = ("--layouts", "--scenarios", "--elastic", "--no-overhead")


def _begun(out: Path, *options: str) -> dict[str, str]:
    """What the program says of each job that it begins."""
    program = [sys.executable, "-m", "tests.gpu_check", "--fake", "--begin", "--job-seconds", "150"]
    done = subprocess.run([*program, *options, "--out", str(out)], cwd=ROOT, capture_output=True, text=True)
    assert (out / "report.json").exists(), done.stdout + done.stderr
    begun: dict[str, str] = json.loads((out / "report.json").read_text())["begun"]
    assert done.returncode == (1 if any(begun.values()) else 0), done.stdout + done.stderr
    return begun


def test_a_job_is_begun(tmp_path: Path) -> None:
    """The quickest way to know that the program, its scripts and its report fit together."""
    assert _begun(tmp_path / "out", *NONE, "--scenarios", "domain") == {"domain": ""}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.deepspeed
@pytest.mark.megatron
def test_every_job_is_begun(tmp_path: Path) -> None:
    begun = _begun(tmp_path / "out")
    jobs = {*gpu_check.LAYOUTS, *gpu_check.gpu_elastic.KINDS, *gpu_check.gpu_elastic.REPLANNED, "overhead, 2 ranks"}
    jobs |= {name for name, scenario in gpu_check.SCENARIOS.items() if scenario.possible}
    assert begun == dict.fromkeys(jobs, "")


def _case(name: str, expected_s: float, needs: str = "") -> gpu_check.Case:
    return gpu_check.Case("part", name, expected_s, needs=needs)


def test_what_does_not_fit_into_the_budget_is_left_out_and_what_is_shorter_is_not() -> None:
    cases = [_case("one", 300), _case("long", 500), _case("absent", 10, "no.such.package"), _case("two", 300)]
    lines = gpu_check.plan(cases, 720).splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines[:4]] == [
        "300 s",
        "left out, the time would be up",
        "needs no.such.package",
        "300 s",
    ]
    assert lines[4] == "10.0 of 12.0 minutes"


def test_estimates_are_as_good_as_those_before_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everything takes twice as long, half as much is begun."""
    now = 0.0
    done = []

    def run_part(name: str) -> Any:
        nonlocal now
        now += 200.0
        done.append(name)
        (tmp_path / "seen").write_text((tmp_path / "report.json").read_text() if len(done) > 1 else "")
        return gpu_check.PartResult(name, {"seconds": 200.0})

    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: now)
    monkeypatch.setattr(gpu_check, "run_part", run_part)
    check = gpu_check.Check(tmp_path, 1, 400.0, 720.0)
    for number in range(7):
        check.run(_case(f"part{number}", 100.0))
        check.write()
    assert done == ["part0", "part1", "part2"], "600 of 720 s are over, and the next one takes 200"
    assert check.left_out == ["part3", "part4", "part5", "part6"] and check.good
    assert [part["name"] for part in json.loads((tmp_path / "seen").read_text())["parts"]] == ["part0", "part1"]


def test_by_the_estimates_what_tells_most_ends_within_the_budget_of_one_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all packages that there can be."""
    monkeypatch.setattr(gpu_check, "installed", lambda _package: True)
    monkeypatch.setattr(sys, "argv", ["check", "--plan"])
    assert gpu_check.main() == 0
    *lines, total = capsys.readouterr().out.splitlines()
    kept = [line[:28].strip() for line in lines if line.endswith(" s")]
    assert {*gpu_check.PARTS, *gpu_check.FIRST, *gpu_check.SCENARIOS, "overhead, 1 ranks"} <= {*kept}, lines
    assert float(total.split()[0]) <= 12.0
