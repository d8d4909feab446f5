"""What the copies cost: the formula, the command, and the table in the documentation, which is made by it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from flashrecovery.cli.plan import plan
from flashrecovery.errors import ConfigError
from flashrecovery.plan.estimates.copy_holders import Protection
from flashrecovery.plan.estimates.footprint import Footprint, JobShape, footprint, step_s
from flashrecovery.plan.model_state import Sharding

DOCS = Path(__file__).resolve().parents[2] / "docs" / "redundancy.md"
JOB = JobShape(parameters=70e9, gpus=64, sharding=Sharding.OPTIMIZER, step_s=10.0, tensor_parallel=8)


def test_seventy_billion_parameters_on_64_gpus() -> None:
    cost = footprint(JOB)
    assert cost.unique_bytes == 70e9 * 12 / 64
    assert cost.own_bytes == cost.unique_bytes + 70e9 / 8 * 2
    assert cost.node_memory_bytes == 8 * 2 * (cost.own_bytes + cost.unique_bytes)
    assert cost.node_network_bytes == 8 * cost.unique_bytes
    assert cost.network_s == pytest.approx(8.4) and not cost.hidden and cost.window_s == 8.0
    assert footprint(dataclasses.replace(JOB, network_bytes_s=400e9)).hidden


def test_replicas_cost_nothing_and_one_node_sends_nothing() -> None:
    copies = footprint(dataclasses.replace(JOB, sharding=Sharding.REPLICATED))
    assert (copies.node_memory_bytes, copies.node_network_bytes, copies.copy_s) == (0, 0, 0) and copies.hidden
    alone = footprint(dataclasses.replace(JOB, sharding=Sharding.REPLICATED, gpus=8))
    assert alone.unique_bytes > 0, "one data-parallel rank has no replica"
    one_node = footprint(dataclasses.replace(JOB, gpus=8))
    assert one_node.node_network_bytes == 0 and one_node.node_memory_bytes == 8 * 2 * one_node.own_bytes


@given(st.sampled_from(Sharding), st.integers(1, 64), st.sampled_from([1, 2, 8]))
def test_more_data_parallel_ranks_never_cost_a_gpu_more(sharding: Sharding, data: int, tensor: int) -> None:
    def of(ranks: int) -> Footprint:
        return footprint(JobShape(7e9, 8 * tensor * ranks, sharding, 1.0, tensor_parallel=tensor))

    assert of(2 * data).unique_bytes <= of(data).unique_bytes
    assert of(2 * data).own_bytes <= of(data).own_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 60}, r"60 GPUs: a multiple of tensor x pipeline parallel size \(8\) is allowed"),
        ({"gpus": 20, "tensor_parallel": 1}, r"20 GPUs: a multiple of the GPUs per node \(8\) is allowed"),
        ({"parameters": 0}, "parameters = 0: more than 0 is allowed"),
        ({"window": 1.5}, "window = 1.5: more than 0 and at most 1 is allowed"),
    ],
)
def test_what_cannot_be_is_named(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(JOB, **change)  # type: ignore[arg-type]


def test_the_command_says_the_same() -> None:
    arguments = ["--parameters", "70e9", "--gpus", "64", "--tensor-parallel", "8", "--step-s", "10"]
    said = json.loads(CliRunner().invoke(plan, [*arguments, "--json"], catch_exceptions=False).output)
    cost = footprint(JOB)
    plain = {**dataclasses.asdict(cost), "copy_s": cost.copy_s, "hidden": False, "step_s": 10.0}
    assert {name: said[name] for name in plain} == plain
    shown = CliRunner().invoke(plan, arguments, catch_exceptions=False).output
    assert "97.8 GiB" in shown and "8.00 s of a step of 10.0 s" in shown
    with pytest.raises(ConfigError, match="60 GPUs"):
        CliRunner().invoke(plan, ["--parameters", "7e9", "--gpus", "60"], catch_exceptions=False)


def test_parity_keeps_less_and_sends_as_much() -> None:
    """Of W bytes of unique state on a node: parity 1 keeps W/(n-1) and sends W, parity 2 keeps 2W/(n-2) and sends
    2W."""
    neighbour, unique = footprint(JOB), 8 * footprint(JOB).unique_bytes
    for protection, kept, sent in (
        (Protection.PARITY_1, unique / 7, unique),
        (Protection.PARITY_2, unique / 3, unique * 7 / 6),
    ):
        cost = footprint(JOB, protection, 8)
        assert cost.node_memory_bytes == pytest.approx(8 * 2 * cost.own_bytes + 2 * kept)
        assert cost.node_network_bytes == pytest.approx(sent) and cost.node_memory_bytes < neighbour.node_memory_bytes
        assert cost.restore_s == neighbour.restore_s and cost.own_bytes == neighbour.own_bytes
        with pytest.raises(
            ValueError, match=f"groups of {protection.parity} nodes: {protection.parity + 1} nodes or more"
        ):
            footprint(JOB, protection, protection.parity)
    pair = footprint(JOB, Protection.PARITY_1, 2)
    assert pair == neighbour, "parity over two nodes is a copy on each other"
    nothing = footprint(JOB, Protection.CHECKPOINT)
    assert nothing.node_memory_bytes == nothing.node_network_bytes == nothing.copy_s == 0 and nothing.hidden
    alone = footprint(dataclasses.replace(JOB, gpus=8), Protection.PARITY_1, 8)
    assert alone.node_network_bytes == 0, "one node sends nothing"


def test_experts_are_sharded_and_count_as_unique_where_they_have_no_replica() -> None:
    dense = JobShape(10e9, 64, Sharding.OPTIMIZER, 1.0)
    experts = dataclasses.replace(dense, expert_parallel=8, expert_parameters=8e9)
    assert footprint(experts).unique_bytes == footprint(dense).unique_bytes
    assert footprint(experts).own_bytes == footprint(dense).unique_bytes + 2 * (2e9 + 1e9)
    replicated = dataclasses.replace(experts, sharding=Sharding.REPLICATED)
    assert footprint(replicated).unique_bytes == 0
    single = dataclasses.replace(replicated, expert_parallel=64)
    assert footprint(single).unique_bytes == 12 * 8e9 / 64
    assert footprint(single).own_bytes == 14 * (2e9 + 8e9 / 64), "then all that a rank has is kept"
    with pytest.raises(ValueError, match=r"expert parallel size = 7: a divisor of the data-parallel ranks \(64\)"):
        dataclasses.replace(experts, expert_parallel=7)
    with pytest.raises(ValueError, match="expert parameters = 2e"):
        dataclasses.replace(experts, expert_parameters=2e10)


def test_how_many_nodes_hold_shards_of_one_kind() -> None:
    def span(gpus: int, tensor: int, pipeline: int) -> int:
        shape = JobShape(7e9, gpus, Sharding.OPTIMIZER, 1.0, tensor_parallel=tensor, pipeline_parallel=pipeline)
        return shape.span

    assert span(64, 1, 1) == span(64, 8, 1) == 8
    assert span(4096, 8, 16) == 32, "a stage's nodes"
    assert span(64, 4, 2) == 4, "two data-parallel ranks on each node of a stage"
    assert span(16, 1, 4) == 1, "a stage's data-parallel ranks share a node"


# -- the table in the documentation -------------------------------------------------------------------

MODELS = {"7B": (7e9, 1, 1, 4e6), "70B": (70e9, 8, 1, 4e6), "405B": (405e9, 8, 16, 16e6)}
"""Parameters, tensor and pipeline parallel size, tokens a step."""


def row(name: str, gpus: int) -> str:
    parameters, tensor, pipeline, tokens = MODELS[name]
    job = JobShape(
        parameters,
        gpus,
        Sharding.OPTIMIZER,
        step_s(parameters, tokens, gpus, 400e12),
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
    )
    slow, fast = footprint(job), footprint(dataclasses.replace(job, network_bytes_s=8 * 50e9))
    cells = [
        name,
        f"{gpus:,}",
        f"{job.step_s:.2f}",
        f"{slow.unique_bytes / 1e9:.2f}",
        f"{slow.node_memory_bytes / 1e9:.0f}",
        f"{slow.node_network_bytes / 1e9:.1f}",
        *(f"{cost.copy_s:.2f} ({100 * cost.copy_s / cost.window_s:.0f} %)" for cost in (slow, fast)),
    ]
    return f"| {' | '.join(cells)} |"


def test_the_table_in_the_documentation_is_what_the_formula_says() -> None:
    rows = [row(name, gpus) for name in MODELS for gpus in (64, 256, 1024, 4096) if (name, gpus) != ("405B", 64)]
    missing = [line for line in rows if line not in DOCS.read_text()]
    assert not missing, "\n".join(rows)
