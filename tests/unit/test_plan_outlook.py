"""``flashrecovery plan`` as a whole: the parts together, what it refuses, its picture, the documentation's numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from flashrecovery.cli.plan import NODE_FAILURES, PROCESS_FAILURES, plan
from flashrecovery.cli.plan_figure import days_text
from flashrecovery.errors import ConfigError
from flashrecovery.plan.estimates.copy_holders import Guard, Protection, domains
from flashrecovery.plan.estimates.footprint import JobShape, step_s
from flashrecovery.plan.estimates.reliability import Conditions, Outlook, Unavailable, guards, outlook, protections
from flashrecovery.plan.estimates.survival import Failures
from flashrecovery.plan.model_state import Sharding

DOCS = Path(__file__).resolve().parents[2] / "docs"
JOB = JobShape(70e9, 1024, Sharding.OPTIMIZER, 4.1, tensor_parallel=8)
ARGUMENTS = ["--parameters", "70e9", "--gpus", "1024", "--tensor-parallel", "8"]


def failing(job: JobShape, **changes: Any) -> Failures:
    usual = Failures((NODE_FAILURES,) * job.nodes, domains(job.nodes, 0), 0.0, PROCESS_FAILURES, job.gpus)
    return dataclasses.replace(usual, **changes)


def of(job: JobShape, protection: Protection, spares: int = 2, **given: Any) -> Outlook:
    found = outlook(job, protection, failing(job), Conditions(**given), spares)
    assert isinstance(found, Outlook)
    return found


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(plan, arguments, catch_exceptions=False)


def said(*arguments: str) -> dict[str, Any]:
    found = json.loads(invoke(*arguments, "--json").output, parse_constant=lambda name: pytest.fail(name))
    assert isinstance(found, dict)
    return found


# -- the parts together -----------------------------------------------------------------------------------


def test_more_protection_and_more_spares_lose_less() -> None:
    checkpoint, neighbour, one, two = (of(JOB, p) for p in protections(JOB))
    for worse, better in ((checkpoint, one), (one, two), (checkpoint, neighbour)):
        assert worse.safe_days < better.safe_days and worse.survival < better.survival
        for a, b in zip(worse.with_spares, better.with_spares, strict=True):
            assert a.fatal > b.fatal and a.losses.ettr < b.losses.ettr and a.losses.interval_s < b.losses.interval_s
    for found in (neighbour, one, two):
        for fewer, more in zip(found.with_spares, found.with_spares[1:], strict=False):
            assert fewer.fatal > more.fatal and fewer.safe_days < more.safe_days
            assert fewer.losses.ettr < more.losses.ettr
    assert checkpoint.with_spares[0].fatal == pytest.approx(128 * NODE_FAILURES + 1024 * PROCESS_FAILURES)
    assert checkpoint.safe_days == pytest.approx(checkpoint.with_spares[0].safe_days), "nothing is left to repair"
    assert neighbour.without_repair(neighbour.safe_days) == pytest.approx(0.9)
    assert neighbour.with_repair(neighbour.with_spares[-1].safe_days) == pytest.approx(0.9)


def test_state_with_replicas_needs_no_copies() -> None:
    job = dataclasses.replace(JOB, sharding=Sharding.REPLICATED)
    assert protections(job) == (Protection.CHECKPOINT, Protection.REPLICA)
    found = of(job, Protection.REPLICA)
    assert found.footprint.node_memory_bytes == 0 and found.group == 128
    assert found.with_spares[0].fatal < 1e-100 and found.with_spares[0].losses.interval_s > 1e9


def test_one_node_is_lost_with_all_copies() -> None:
    job = dataclasses.replace(JOB, gpus=8)
    for protection in protections(job)[1:]:
        assert guards(job, protection, failing(job), 8) == (Guard((0,), 0),)
    assert of(job, Protection.NEIGHBOUR).with_spares[0].fatal == pytest.approx(NODE_FAILURES)
    few = dataclasses.replace(JOB, gpus=16)
    found = outlook(few, Protection.PARITY_2, failing(few), Conditions(), 0)
    assert isinstance(found, Unavailable) and "at least 3 nodes that hold shards of one kind" in found.reason


def test_copies_in_processes_die_with_them() -> None:
    beside, inside = (of(JOB, Protection.NEIGHBOUR, copies_die_with_processes=die) for die in (False, True))
    assert inside.safe_days < beside.safe_days and inside.with_spares[2].fatal > beside.with_spares[2].fatal
    alike = outlook(
        JOB,
        Protection.NEIGHBOUR,
        failing(JOB, node_rates=(NODE_FAILURES + 8 * PROCESS_FAILURES,) * 128),
        Conditions(),
        0,
    )
    assert isinstance(alike, Outlook) and alike.safe_days == inside.safe_days, "as if each took its node's copies"
    every, same = (of(JOB, Protection.CHECKPOINT, copies_die_with_processes=die) for die in (False, True))
    assert every.survival == same.survival, "there each failure counts already"


def test_a_checkpoint_is_written_and_read() -> None:
    slow, fast = (of(JOB, Protection.CHECKPOINT, storage_bytes_s=s) for s in (1e9, 1e12))
    assert slow.with_spares[0].losses.interval_s == pytest.approx(14 * 70e9 / 1e9)
    assert fast.with_spares[0].losses.interval_s < slow.with_spares[0].losses.interval_s
    assert slow.with_spares[0].losses.restart_s > fast.with_spares[0].losses.restart_s
    assert of(JOB, Protection.CHECKPOINT, k0_s=50.0).with_spares[0].losses.interval_s > 1000


def test_copies_that_do_not_hide_cost_time() -> None:
    fast = JobShape(7e9, 4096, Sharding.OPTIMIZER, 0.1)
    found = of(fast, Protection.NEIGHBOUR)
    wait = found.footprint.copy_s - found.footprint.window_s
    assert wait > 0 and found.with_spares[2].losses.copies_s > 0.5 * 86_400 * wait / (0.1 + wait)
    assert of(fast, Protection.CHECKPOINT).with_spares[2].losses.copies_s == 0


def test_rates_that_change_are_averaged_over_the_horizon() -> None:
    found = outlook(JOB, Protection.CHECKPOINT, failing(JOB, shape=2.0), Conditions(days=10.0), 0)
    assert isinstance(found, Outlook)
    assert found.with_spares[0].fatal == pytest.approx((128 * NODE_FAILURES + 1024 * PROCESS_FAILURES) * 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"days": 0.0}, "days = 0: more than 0"),
        ({"threshold": 1.0}, "threshold = 1: a probability between 0 and 1"),
        ({"repair_days": -1.0}, "repair = -1 days: 0 or more"),
        ({"k0_s": math.nan}, "k0 = nan s: 0 or more"),
        ({"parity_group": 1}, "parity group = 1: 2 nodes or more"),
        ({"host_memory_bytes": 0.0}, "host memory = 0 bytes: more than 0"),
        ({"storage_bytes_s": 0.0}, "storage bandwidth = 0: more than 0"),
    ],
)
def test_conditions_that_cannot_be(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Conditions(**change)  # type: ignore[arg-type]


# -- the command ------------------------------------------------------------------------------------------


def test_json_says_what_the_functions_say() -> None:
    found = said(*ARGUMENTS, "--step-s", "4.1", "--host-memory-gb", "300", "--spares", "1")
    assert [p["protection"] for p in found["protections"]] == ["checkpoint", "neighbour", "parity-1", "parity-2"]
    assert found["nodes"] == 128 and found["failures_per_day"]["nodes"] == pytest.approx(128 * NODE_FAILURES)
    one, expected = found["protections"][2], of(JOB, Protection.PARITY_1, 1)
    assert one["node_memory_bytes"] == expected.footprint.node_memory_bytes and one["fits"] is True
    assert found["protections"][1]["fits"] is False
    assert one["without_repair"] == {"safe_days": expected.safe_days, "survival": expected.survival}
    assert [s["ettr"] for s in one["with_spares"]] == [s.losses.ettr for s in expected.with_spares]
    assert [s["fatal_failures_per_day"] for s in one["with_spares"]] == [s.fatal for s in expected.with_spares]
    never = said("--parameters", "1e9", "--gpus", "8", "--node-failures", "0", "--process-failures", "0")
    assert never["protections"][1]["with_spares"][0]["interval_s"] is None, "JSON has no infinity"


@pytest.mark.parametrize(
    ("flag", "value", "given"),
    [
        ("--repair-hours", "12", {"repair_days": 0.5}),
        ("--parity-group", "4", {"parity_group": 4}),
        ("--restart-s", "100", {"restart_s": 100.0}),
        ("--recovery-s", "99", {"recovery_s": 99.0}),
        ("--k0-s", "9", {"k0_s": 9.0}),
        ("--storage-gb-s", "1", {"storage_bytes_s": 1e9}),
        ("--threshold", "0.5", {"threshold": 0.5}),
        ("--days", "3", {"days": 3.0}),
        ("--copies-die-with-processes", None, {"copies_die_with_processes": True}),
    ],
)
def test_every_option_reaches_the_plan(flag: str, value: str | None, given: dict[str, Any]) -> None:
    found = said(*ARGUMENTS, "--step-s", "4.1", "--spares", "0", flag, *([] if value is None else [value]))
    for entry, protection in zip(found["protections"], protections(JOB), strict=True):
        expected, usual = of(JOB, protection, 0, **given), of(JOB, protection, 0)
        assert entry["with_spares"][0]["ettr"] == expected.with_spares[0].losses.ettr
        assert entry["with_spares"][0]["safe_days"] == expected.with_spares[0].safe_days
        assert entry["with_spares"][0]["survival"] == expected.with_spares[0].survival
        if protection is Protection.PARITY_1:
            assert expected.with_spares != usual.with_spares, "an option that changes something"


def test_the_tables_have_the_same_numbers() -> None:
    shown = invoke(*ARGUMENTS, "--step-s", "4.1", "--host-memory-gb", "300").output
    expected = of(JOB, Protection.PARITY_1)
    line = next(line for line in shown.splitlines() if re.match(r"parity-1 +2 ", line))
    assert f"{expected.with_spares[2].fatal:.2g}" in line and f"{expected.with_spares[2].losses.ettr:.4f}" in line
    assert days_text(expected.safe_days) in shown and "(102%, does not fit)" in shown
    many = " ".join(invoke(*ARGUMENTS, "--node-failures", "0.2").output.split())
    assert "(!)" in many and "say too little" in many
    small = invoke("--parameters", "7e9", "--gpus", "16").output
    assert "parity-2: not possible: parity 2 over groups of 2 nodes" in small


def test_worse_nodes_and_racks_are_worse() -> None:
    def safe(*more: str) -> float:
        return float(said(*ARGUMENTS, *more)["protections"][2]["with_spares"][-1]["safe_days"])

    assert safe("--worse-nodes", "4:0.1") < safe()
    assert safe("--domain-nodes", "16", "--domain-failures", "0.001") < safe()
    assert safe("--worse-nodes", "64:0.005", "--worse-nodes", "64:0.005") == pytest.approx(
        safe("--node-failures", "0.005")
    )


def test_a_hugging_face_config_gives_parameters_and_experts(tmp_path: Path) -> None:
    config = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    found = said("--hf-config", str(tmp_path), "--gpus", "64", "--expert-parallel", "8")
    assert found["parameters"] == 46_702_792_704
    assert found["step_s"] == step_s(12_879_925_248, 4e6, 64, 400e12), "a step computes with what a token meets"
    job = JobShape(46_702_792_704, 64, Sharding.OPTIMIZER, 1.0, expert_parallel=8, expert_parameters=45_097_156_608)
    assert found["own_bytes"] == of(job, Protection.NEIGHBOUR).footprint.own_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8"], "give either --parameters or --hf-config"),
        (["--parameters", "7e9"], "give --gpus, or --run"),
        (["--parameters", "nan", "--gpus", "8"], "--parameters nan: more than 0 is allowed"),
        (["--parameters", "7e9", "--gpus", "8", "--expert-parallel", "8"], "--expert-parallel 8: needs --hf-config"),
        (["--hf-config", "missing.json", "--gpus", "8"], "--hf-config missing.json: No such file"),
        (["--parameters", "7e9", "--gpus", "8", "--spares", "-1"], "--spares -1: 0 or more is allowed"),
        (["--parameters", "7e9", "--gpus", "8", "--worse-nodes", "x"], "--worse-nodes 'x': COUNT:RATE is allowed"),
        (["--parameters", "7e9", "--gpus", "8", "--worse-nodes", "2:0.1"], "'2:0.1': 1 to 1 nodes and a rate"),
        (["--parameters", "7e9", "--gpus", "8", "--domain-nodes", "4"], "--domain-nodes 4, --domain-failures 0: both"),
        (["--parameters", "7e9", "--gpus", "8", "--shape", "0"], "shape = 0: more than 0 and at most 10"),
        (["--parameters", "7e9", "--gpus", "8", "--figure", "a.txt"], "--figure a.txt: a file that ends in .svg, .png"),
        (["--parameters", "7e9", "--run", "nowhere"], "nowhere is not a run directory"),
    ],
)
def test_bad_input_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        invoke(*arguments)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "no JSON"), ("[]", "a JSON object is allowed"), ("{}", "model_type")]
)
def test_a_config_that_is_none_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"--hf-config {path}: .*{message}"):
        invoke("--hf-config", str(path), "--gpus", "8")


@pytest.mark.parametrize(
    ("days", "text"),
    [(0.01, "14.4 min"), (0.5, "12 h"), (16.2, "16.2 days"), (1000, "2.74 years"), (math.inf, "> 270 years")],
)
def test_how_days_are_said(days: float, text: str) -> None:
    assert days_text(days) == text


# -- the picture ------------------------------------------------------------------------------------------


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib is needed, .* pip install 'flashrecovery\[plot\]'"):
        invoke(*ARGUMENTS, "--figure", str(tmp_path / "plan.svg"))


def test_the_picture_has_labels_with_units_and_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'plot'")
    path, again = tmp_path / "plan.svg", tmp_path / "again.svg"
    invoke(*ARGUMENTS, "--step-s", "4.1", "--figure", str(path))
    invoke(*ARGUMENTS, "--step-s", "4.1", "--figure", str(again))
    drawn, expected = path.read_text(), of(JOB, Protection.PARITY_1)
    for text in ("days (logarithmic)", "probability that no state was lost", "minutes lost of a day", "parity-1"):
        assert text in drawn
    assert days_text(expected.safe_days) in drawn and f"ETTR {expected.with_spares[-1].losses.ettr:.4f}" in drawn
    assert again.read_text() == drawn, "the same plan gives the same picture"
    png = tmp_path / "plan.png"
    invoke("--parameters", "1e9", "--gpus", "8", "--sharding", "replicated", "--figure", str(png), "--spares", "0")
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="No such file or directory"):
        invoke(*ARGUMENTS, "--figure", str(tmp_path / "missing" / "plan.svg"))


# -- the documentation ------------------------------------------------------------------------------------

MODELS = {"7B": (7e9, 1, 1, 4e6, 256), "70B": (70e9, 8, 1, 4e6, 1024), "405B": (405e9, 8, 16, 16e6, 4096)}
"""Parameters, tensor and pipeline parallel size, tokens a step, GPUs."""
SPARES = 4


def rows(name: str) -> list[str]:
    parameters, tensor, pipeline, tokens, gpus = MODELS[name]
    step = step_s(parameters, tokens, gpus, 400e12)
    sizes = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
    job = JobShape(parameters, gpus, Sharding.OPTIMIZER, step, network_bytes_s=400e9, **sizes)
    lines = []
    for protection in protections(job):
        found = of(job, protection, SPARES)
        last = found.with_spares[-1]
        cells = [
            name,
            f"{gpus:,}",
            protection.value,
            f"{found.footprint.node_memory_bytes / 1e9:.0f}",
            f"{found.footprint.node_network_bytes / 1e9:.1f}",
            f"{100 * found.footprint.copy_s / found.footprint.window_s:.0f} %",
            days_text(found.safe_days),
            days_text(last.safe_days),
            f"{last.fatal:.2g}",
            f"{last.losses.lost_s / 60:.1f}",
            f"{last.losses.ettr:.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def test_the_table_in_the_documentation_is_what_the_plan_says() -> None:
    expected, text = [line for name in MODELS for line in rows(name)], (DOCS / "redundancy.md").read_text()
    assert not [line for line in expected if line not in text], "\n" + "\n".join(expected)


def test_the_picture_in_the_documentation_has_the_numbers_of_the_plan() -> None:
    drawn = (DOCS / "plan_70b.svg").read_text()
    job = dataclasses.replace(JOB, step_s=step_s(70e9, 4e6, 1024, 400e12), network_bytes_s=400e9)
    for protection in protections(job):
        found = of(job, protection, SPARES)
        assert days_text(found.safe_days) in drawn and days_text(found.with_spares[-1].safe_days) in drawn.replace(
            "&gt;", ">"
        )
        assert f"ETTR {found.with_spares[-1].losses.ettr:.4f}" in drawn
