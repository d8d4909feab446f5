"""``flashrecovery strategies``: the ranked ways, the reasons, and what is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from flashrecovery import events as ev
from flashrecovery.cli.strategies import strategies
from flashrecovery.errors import ConfigError
from flashrecovery.plan.strategy.strategy import NothingFitsError
from tests.support.history_samples import at

LARGE: dict[str, Any] = {
    "layers": 80,
    "hidden": 8192,
    "heads": 64,
    "kv_heads": 8,
    "inner": 28672,
    "vocab": 128256,
    "sequence": 8192,
    "batch": 2304,
}


def ask(tmp_path: Path, model: dict[str, Any], *options: str) -> Result:
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(model))
    return CliRunner().invoke(strategies, [str(path), *options], env={"COLUMNS": "200"})


def test_the_fastest_that_fits_is_the_first(tmp_path: Path) -> None:
    done = ask(tmp_path, LARGE, "--ranks", "512", "--memory-gib", "80", "--json")
    assert done.exit_code == 0, done.exception
    told = json.loads(done.output)
    times = [each["step_s"] for each in told["ranked"]]
    assert len(times) == 10 and times == sorted(times) and told["best"] == told["ranked"][0]
    assert all(each["memory_bytes"] <= 80 * 2**30 for each in told["ranked"])
    assert "2304 samples" in told["why"][1]
    shown = ask(tmp_path, LARGE, "--ranks", "512", "--memory-gib", "80", "--top", "3")
    assert shown.exit_code == 0 and "1*" in shown.output and told["why"][0] in shown.output, shown.output


def test_what_the_job_has_is_kept_where_that_is_good_enough(tmp_path: Path) -> None:
    best = json.loads(ask(tmp_path, LARGE, "--ranks", "512", "--memory-gib", "80", "--json").output)["best"]["strategy"]
    current = ",".join(f"{name}={size}" for name, size in best.items())
    done = ask(tmp_path, LARGE, "--ranks", "448", "--memory-gib", "80", "--current", current, "--json")
    told = json.loads(done.output)
    assert {n: told["best"]["strategy"][n] for n in ("tp", "pp", "cp", "ep")} == {
        n: best[n] for n in ("tp", "pp", "cp", "ep")
    }
    assert any("replicas leave" in line for line in told["why"]), told["why"]


def test_experts(tmp_path: Path) -> None:
    model = {**LARGE, "hidden": 4096, "heads": 32, "inner": 14336, "layers": 32, "experts": 8, "experts_per_token": 2}
    done = ask(tmp_path, model, "--ranks", "64", "--memory-gib", "80", "--json", "--top", "1000")
    assert {each["strategy"]["ep"] for each in json.loads(done.output)["ranked"]} >= {2, 4, 8}, done.output


def test_it_is_quick_for_18_000_ranks(tmp_path: Path) -> None:
    began = time.process_time()
    done = ask(tmp_path, LARGE, "--ranks", "18432", "--memory-gib", "80")
    assert done.exit_code == 0 and time.process_time() - began < 1.0, time.process_time() - began


def test_nothing_fits(tmp_path: Path) -> None:
    done = ask(tmp_path, LARGE, "--ranks", "2", "--memory-gib", "80")
    assert isinstance(done.exception, NothingFitsError) and "a GPU has 80 GiB" in str(done.exception)


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        ({**LARGE, "colour": 3}, (), "colour: Extra inputs are not permitted"),
        ({k: v for k, v in LARGE.items() if k != "layers"}, (), "layers: Field required"),
        ({**LARGE, "kv_heads": 7}, (), "kv_heads = 7: a divisor of heads"),
        (LARGE, ("--current", "tp=0"), "--current tp=0"),
        (LARGE, ("--current", "xp=2"), "--current xp=2"),
        (LARGE, ("--run", "nowhere"), "--run needs --current"),
        (LARGE, ("--run", "nowhere", "--current", "dp=2"), "is not a run directory"),
        (LARGE, ("--memory-gib", "0"), "more than 0 is allowed"),
    ],
)
def test_what_is_refused(model: dict[str, Any], options: tuple[str, ...], why: str, tmp_path: Path) -> None:
    done = ask(tmp_path, model, "--ranks", "8", "--memory-gib", "80", *options)
    assert isinstance(done.exception, ConfigError) and why in str(done.exception), done.exception


def test_costs_are_fitted_to_what_a_job_has_measured(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    events = [
        *(at(0, ev.NodeJoined(node=f"node{i}", slots=8)) for i in range(4)),
        at(100, ev.JobStarted(world_size=32, seconds=100.0)),
        at(200, ev.CheckpointSaved(version=5, path="c/5", seconds=30.0, k0_s=1.0, step_s=777.0)),
    ]
    (run_dir / "events.jsonl").write_text("".join(event.model_dump_json() + "\n" for event in events))
    fixed = ("--ranks", "32", "--memory-gib", "200", "--run", str(run_dir), "--json", "--top", "1000")
    done = ask(tmp_path, LARGE, *fixed, "--current", "tp=8,dp=4")
    assert done.exit_code == 0, done.exception
    same = {"tp": 8, "pp": 1, "cp": 1, "ep": 1, "dp": 4, "micro_batch": 1}
    (mine,) = [each for each in json.loads(done.output)["ranked"] if each["strategy"] == same]
    assert abs(mine["step_s"] - 777) < 1
    other = ask(tmp_path, LARGE, *fixed, "--current", "tp=8,dp=2")
    assert isinstance(other.exception, ConfigError) and "a job of 32 ranks, and --current has 16" in str(
        other.exception
    )
