"""Megatron-LM's loop in a job that may change its layout, as far as it can be seen without one: the flags, the layout
that its arguments say, and what a process of another layout is given."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashrecovery.config import ElasticSettings, ParallelismSettings
from flashrecovery.errors import ConfigError, JobFailedError, UnsupportedError
from flashrecovery.runtime import parallel_layout
from flashrecovery.runtime.environment import LAYOUT_ENV, STAGING_ENV
from fr_megatron import trackers
from fr_megatron.lm import replan
from fr_megatron.lm.layer_losses import LayerLosses
from fr_megatron.lm.replan import (
    LayoutLoop,
    begin,
    check_flags,
    check_late,
    check_model,
    known_facts,
    leave_out_loading,
    refused,
    take_layout,
)
from fr_megatron.lm.state import LMLoop, LMLoopAdapter

FITTING = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "global_batch_size": 24,
    "dataloader_type": None,
    "flash_recovery_parallelism": None,
}


@pytest.fixture(autouse=True)
def nothing_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which sizes may change is a process's own."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(parallel_layout, "_taken", set())


def flags(**others: Any) -> Any:
    return SimpleNamespace(**{**FITTING, **others})


def launched(least: int | None, elastic: ElasticSettings | None = None) -> Any:
    return SimpleNamespace(parallelism=None if least is None else ParallelismSettings(min=least), elastic=elastic)


def test_arguments_say_the_layout_that_the_job_has_changed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    args = flags(expert_tensor_parallel_size=2)
    take_layout(args)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    monkeypatch.setenv(LAYOUT_ENV, "tp=1,pp=1,dp=3")
    take_layout(args)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (1, 1)
    assert args.expert_tensor_parallel_size == 1


def test_context_parallelism_changes_where_there_is_some_at_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a layout without: a later one may have it again."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    take_layout(flags(context_parallel_size=1))
    assert parallel_layout.taken() == frozenset()
    for changed in ("", "tp=1,pp=1,cp=4,dp=1", "tp=1,pp=1,dp=4"):
        monkeypatch.setenv(LAYOUT_ENV, changed)
        monkeypatch.setattr(parallel_layout, "_taken", set())
        args = flags(context_parallel_size=2)
        take_layout(args)
        assert args.context_parallel_size == (parallel_layout.layout_sizes(changed).get("cp", 1) if changed else 2)
        assert parallel_layout.taken() == {"cp"}


def test_expert_parallelism_changes_where_there_are_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron trains them with tensor parallelism only if that divides sequences, too."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    take_layout(flags(num_experts=4, expert_model_parallel_size=1))
    assert parallel_layout.taken() == {"ep"}
    for changed, ep, sequences in (("tp=2,pp=1,dp=2", 1, True), ("tp=1,pp=1,ep=4,dp=4", 4, False)):
        monkeypatch.setenv(LAYOUT_ENV, changed)
        args = flags(num_experts=4, expert_model_parallel_size=2, sequence_parallel=False)
        take_layout(args)
        assert (args.expert_model_parallel_size, args.sequence_parallel) == (ep, sequences)
        dense = flags(num_experts=None, sequence_parallel=False)
        take_layout(dense)
        assert not dense.sequence_parallel


VIRTUAL = {"num_layers": 8, "micro_batch_size": 2, "overlap_p2p_comm": True, "microbatch_group_size_per_vp_stage": None}


@pytest.mark.parametrize(
    ("said", "changed", "stays"),
    [
        ({"num_layers_per_virtual_pipeline_stage": 2}, "tp=1,pp=2,dp=2", True),  # 12 micro-batches: 6 on a replica
        ({"num_virtual_stages_per_pipeline_rank": 2}, "tp=1,pp=2,dp=2", True),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "tp=2,pp=2,dp=1", True),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "tp=1,pp=4,dp=1", True),
        ({"num_layers_per_virtual_pipeline_stage": 2}, "tp=1,pp=1,dp=4", False),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "tp=1,pp=2,dp=4", False),  # 3 micro-batches on a replica
        ({"num_virtual_stages_per_pipeline_rank": 4}, "tp=1,pp=4,dp=1", False),  # 2 layers on a rank
        ({"num_layers_per_virtual_pipeline_stage": 4}, "tp=1,pp=4,dp=1", False),
        ({"num_virtual_stages_per_pipeline_rank": 2, "overlap_p2p_comm": False}, "tp=1,pp=2,dp=2", False),
        ({"num_virtual_stages_per_pipeline_rank": 2, "overlap_p2p_comm": False}, "tp=1,pp=4,dp=1", True),
        ({"num_virtual_stages_per_pipeline_rank": 2, "microbatch_group_size_per_vp_stage": 3}, "pp=2,tp=1,dp=4", True),
        ({"num_virtual_stages_per_pipeline_rank": 2, "microbatch_group_size_per_vp_stage": 5}, "pp=2,tp=1,dp=2", False),
        ({"num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": None}, "tp=1,pp=2,dp=2", True),  # own loop
        (
            {"num_virtual_stages_per_pipeline_rank": 2, "num_layers": None, "encoder_num_layers": 8},
            "tp=1,pp=2,dp=2",
            True,
        ),
        # Of 8 layers on four pipeline ranks at the launch, these were no virtual stages; with them, these are refused.
        ({"num_layers_per_virtual_pipeline_stage": 2, "num_experts": 4}, "tp=1,pp=2,dp=2", False),
        ({"num_layers_per_virtual_pipeline_stage": 2, "context_parallel_size": 2}, "tp=1,pp=2,cp=2,dp=1", False),
        ({"num_layers_per_virtual_pipeline_stage": 2, "context_parallel_size": 2}, "tp=1,pp=2,dp=2", True),
    ],
)
def test_virtual_stages_where_a_layout_can_have_them(
    said: dict[str, Any], changed: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it has none: Megatron would refuse the flags, or the schedule the micro-batches."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(LAYOUT_ENV, changed)
    args = flags(**VIRTUAL | said)
    take_layout(args)
    names = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    assert [getattr(args, name, None) for name in names] == [said.get(name) if stays else None for name in names]


def test_what_flags_say_better_than_the_model() -> None:
    """Its positions may be more than the samples have; and without tensor parallelism no rank keeps the flag."""
    for said, divides in (
        ({}, False),
        ({"sequence_parallel": False}, False),
        ({"sequence_parallel": True}, True),
        ({"num_experts": 4}, True),
    ):
        args = flags(seq_length=16, max_position_embeddings=64, **said)
        take_layout(args)
        args.sequence_parallel = False  # Megatron has validated it, without tensor parallelism
        assert known_facts(args) == {"sequence": 16, "sequence_parallel": divides}


def test_a_checkpoint_that_was_loaded_at_the_launch_is_not_loaded_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There may be newer ones by now. The time limit of a job counts from its launch."""
    module = SimpleNamespace(_TRAIN_START_TIME=1.0)
    monkeypatch.setitem(sys.modules, "megatron.training.training", module)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(STAGING_ENV, str(tmp_path))
    loaded = {"iteration": 7, "consumed_train_samples": 168, "skipped_train_samples": 0}
    loaded |= {"consumed_valid_samples": 12, "num_floating_point_operations_so_far": 9}
    first = flags(load="there")
    leave_out_loading(first)
    assert first.load == "there"
    vars(first).update(loaded)
    begin(first)
    begin(flags(load="there", **dict.fromkeys(loaded, 8)))  # a replacement may have loaded a newer one
    monkeypatch.setenv(LAYOUT_ENV, "tp=1,pp=1,dp=3")
    module._TRAIN_START_TIME = 5.0
    args = flags(load="there", **dict.fromkeys(loaded, 0))
    leave_out_loading(args)
    assert args.load is None
    begin(args)
    assert module._TRAIN_START_TIME == 1.0
    assert args.load == "there" and {name: getattr(args, name) for name in loaded} == loaded
    monkeypatch.setenv(STAGING_ENV, str(tmp_path / "another node"))
    with pytest.raises(UnsupportedError, match="no rank at the launch"):
        begin(args)
    known = next(tmp_path.iterdir()).read_text()
    monkeypatch.setattr(replan, "union", lambda mine: [*mine, known])  # a spare node hears of it from the others
    args = flags(load="there", **dict.fromkeys(loaded, 0))
    leave_out_loading(args)
    begin(args)
    assert {name: getattr(args, name) for name in loaded} == loaded


@pytest.mark.parametrize(
    ("said", "least", "words"),
    [(2, None, "start it with `flashrecovery run --parallelism 2`"), (2, 1, "the launcher says --parallelism 1")],
)
def test_a_flag_that_says_something_else(said: int, least: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_flags(flags(flash_recovery_parallelism=said), launched(least))


def test_with_replicas_that_leave() -> None:
    """Both flags together, with all that each of them allows alone."""
    elastic = ElasticSettings(min=1, max=2)
    for others in (
        {"flash_recovery_parallelism": 2},
        {"num_experts": 2, "expert_model_parallel_size": 2},
        {"context_parallel_size": 2},
        {"num_virtual_stages_per_pipeline_rank": 2},
    ):
        check_flags(flags(**others), launched(2, elastic))


def test_copies_that_a_single_rank_has_nobody_for() -> None:
    check_flags(flags(flash_recovery_redundancy="neighbor"), launched(2))
    with pytest.raises(ConfigError, match="2 or more, or auto"):
        check_flags(flags(flash_recovery_redundancy="neighbor"), launched(1))


def test_flags_that_fit() -> None:
    check_flags(flags(flash_recovery_parallelism=2), launched(2))
    check_flags(flags(load="there", dataloader_type="single", context_parallel_size=2), launched(1))
    check_flags(flags(sequence_parallel=True, num_attention_heads=6, seq_length=16), launched(1))  # the planner knows
    check_flags(flags(num_experts=2, expert_model_parallel_size=2), launched(1))
    check_flags(flags(moe_use_upcycling=True), launched(None))  # the layout does not change


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("pipeline_model_parallel_layout", "E|t", "--pipeline-model-parallel-layout"),
        ("hierarchical_context_parallel_sizes", [2, 2], "--hierarchical-context-parallel-sizes"),
        ("moe_use_upcycling", True, "--moe-use-upcycling"),
        ("num_distributed_optimizer_instances", 2, "several optimizer instances"),
        ("expert_tensor_parallel_size", 4, "--expert-tensor-parallel-size"),
        ("global_batch_size", None, "no --global-batch-size"),
        ("dataloader_type", "cyclic", "--dataloader-type cyclic"),
        ("padded_vocab_size", 128, "--padded-vocab-size"),
        ("finetune", True, "--finetune"),
        ("async_save", True, "--async-save"),
        ("flash_recovery_redundancy", "parity", "--flash-recovery-redundancy parity"),
    ],
)
def test_flags_that_do_not(name: str, value: Any, words: str) -> None:
    (text,) = refused(flags(**{name: value}))
    assert words in text
    with pytest.raises(UnsupportedError, match="another parallel layout"):
        check_flags(flags(**{name: value}), launched(1))


def test_what_a_script_has_set_after_its_flags_were_parsed() -> None:
    """Megatron has filled in the rest by then."""
    validated = {"dataloader_type": "single", "padded_vocab_size": 128, "expert_tensor_parallel_size": 2}
    check_late(flags(tensor_model_parallel_size=2, **validated))
    with pytest.raises(UnsupportedError, match="whose script has set --rampup-batch-size"):
        check_late(flags(tensor_model_parallel_size=2, **validated, rampup_batch_size=[2, 2, 100]))


@pytest.mark.parametrize(
    "name", ["num_experts", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"]
)
def test_experts_and_virtual_stages_are_said_on_the_command_line(name: str) -> None:
    """A layout is set before Megatron takes a script's defaults, which would not follow it."""
    said, later = (flags(dataloader_type="single", **others) for others in ({name: 2}, {}))
    for args in (said, later):
        take_layout(args)
    check_late(said)
    setattr(later, name, 2)
    with pytest.raises(UnsupportedError, match=f"has set --{name.replace('_', '-')} .allowed: on the command line"):
        check_late(later)


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("num_layers", "--num-layers"),
        ("micro_batch_size", "--micro-batch-size"),
        ("microbatch_group_size_per_vp_stage", "--microbatch-group-size-per-virtual-pipeline-stage"),
    ],
)
@pytest.mark.parametrize("virtual", [True, False])
def test_what_virtual_stages_follow_from_is_said_on_the_command_line(name: str, flag: str, virtual: bool) -> None:
    """Whether a layout can have them is decided when the flags are parsed. Without any, nothing is."""
    rest = {"dataloader_type": "single", "num_layers": 8, "micro_batch_size": 2}
    rest |= {"num_virtual_stages_per_pipeline_rank": 2} if virtual else {}
    said, later = flags(**{**rest, name: 4}), flags(**{**rest, name: None})
    for args in (said, later):
        take_layout(args)
    check_late(said)
    setattr(later, name, 4)
    if virtual:
        with pytest.raises(UnsupportedError, match=f"has set {flag} .allowed: on the command line"):
            check_late(later)
    else:
        check_late(later)


def test_layers_are_said_by_either_of_two_flags() -> None:
    """Megatron sets the other one to the same."""
    args = flags(dataloader_type="single", encoder_num_layers=8, micro_batch_size=2, num_layers=None)
    args.num_virtual_stages_per_pipeline_rank = 2
    take_layout(args)
    args.num_layers = 8
    check_late(args)


@pytest.mark.parametrize(
    ("said", "generation", "sizes", "refused"),
    [
        (None, 8, {}, True),
        ("8", 9, {}, True),
        ("1", 8, {}, False),
        (None, 10, {}, False),
        (None, 9, {"tensor_model_parallel_size": 2}, False),  # Megatron-LM has asked for it
        (None, 9, {"context_parallel_size": 2}, False),
    ],
)
def test_connections_that_megatron_asks_for_in_another_layout(
    said: str | None, generation: int, sizes: dict[str, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job without tensor and context parallelism may come to have some."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if said is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", said)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=generation))
    args = flags(**{"dataloader_type": "single", "tensor_model_parallel_size": 1, "num_layers": 8, **sizes})
    if refused:
        with pytest.raises(UnsupportedError, match=r"without CUDA_DEVICE_MAX_CONNECTIONS=1 on a GPU of compute cap"):
            check_late(args)
    else:
        check_late(args)


class Loaders:
    """Stands for the loop with this rank's loaders."""

    def __init__(self, count: int) -> None:
        self.streams, self.at = [None] * count, [0] * count

    def positions(self) -> list[int]:
        return list(self.at)

    def set_positions(self, positions: list[int]) -> None:
        assert len(positions) == len(self.streams)
        self.at = list(positions)


@pytest.fixture
def one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 1)


@pytest.mark.usefixtures("one_stage")
def test_ranks_without_loaders_count_along() -> None:
    loaders, without = Loaders(3), Loaders(0)
    reader, other = (LayoutLoop(flags(), some) for some in (loaders, without))  # type: ignore[arg-type]
    loaders.at = [24, 0, 0]
    reader.stepped(({}, 0))
    other.stepped(({}, 0))
    assert reader.positions() == other.positions() == [24, []]
    reader.set_positions([48, [6, 0]])
    assert loaders.at == [48, 6, 0]
    reader.set_positions([48, []])
    assert loaders.at == [48, 0, 0]
    other.set_positions([48, [6, 0]])
    assert other.positions() == [48, [6, 0]]


@pytest.mark.usefixtures("one_stage")
def test_a_loader_that_has_read_something_else() -> None:
    loop = LayoutLoop(flags(rank=0), Loaders(1))  # type: ignore[arg-type]
    with pytest.raises(JobFailedError, match="have had 24 samples"):
        loop.stepped(({}, 0))


def test_losses_of_experts_are_logged_as_in_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron divides them by the number of micro-batches; that of another size or layout is another one."""
    said: list[Any] = []

    def track(loss_scale: float, **others: Any) -> None:
        said.append((loss_scale, others))

    module = SimpleNamespace(track_moe_metrics=track)
    monkeypatch.setitem(sys.modules, "megatron.training.training", module)
    monkeypatch.setattr(trackers, "of_one_stage", lambda: said.append("one stage"))
    loop = LayerLosses(flags(num_experts=4))
    loop.adopt({"z_loss": {}}, 3)
    with loop.logging():
        module.track_moe_metrics(loss_scale=1 / 4, iteration=7)
    assert said == ["one stage", (1 / 3, {"iteration": 7})] and module.track_moe_metrics is track
    assert not loop.entries
    loop.adopt({"z_loss": {}}, 3)
    with pytest.raises(OSError), loop.logging():
        raise OSError
    assert loop.entries  # the log is made again
    assert module.track_moe_metrics is track
    with LayerLosses(flags()).logging():  # without experts nothing is touched
        assert module.track_moe_metrics is track


def test_experts_whose_losses_are_kept_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.models.gpt import GPTModel

    model: Any = object.__new__(GPTModel)
    for experts in (None, 4):
        model.__dict__["config"] = SimpleNamespace(num_moe_experts=experts)
        check_model([model])
    monkeypatch.setattr(replan, "METRICS", SimpleNamespace(takes=lambda way: way == "entries"))
    with pytest.raises(UnsupportedError, match="--num-experts, with a megatron-core that keeps"):
        check_model([model])
    model.__dict__["config"] = SimpleNamespace(num_moe_experts=None)
    check_model([model])
    with pytest.raises(UnsupportedError, match="with the model object"):
        check_model([object()])


def loop() -> LMLoop:
    pytest.importorskip("megatron.core")
    from megatron.core.rerun_state_machine import RerunMode

    names = ("current_iteration", "first_iteration_complete", "rerun_requested", "checkpoint_requested")
    names += ("restart_again_requested", "continue_requested")
    machine = SimpleNamespace(**dict.fromkeys(names, 0), mode=RerunMode.DISABLED, large_value_counts={}, max_values={})
    layouts = LayoutLoop(flags(), Loaders(0))  # type: ignore[arg-type]
    elastic: Any = SimpleNamespace(losses=LayerLosses(flags()))
    return LMLoop(SimpleNamespace(consumed_valid_samples=0), SimpleNamespace(_timers={}), machine, elastic, layouts)


def test_a_process_of_another_layout_gets_what_all_ranks_have_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own rank-local state is that of its script's start, and is restored last."""
    before, after = LMLoopAdapter(loop()), LMLoopAdapter(loop())
    old, new = before._state, after._state
    old.finished(3, ({"lm loss": torch.tensor(2.5)}, True, False, False, 0, 1.5, 0, 0))
    old.logging({"lm loss": torch.tensor(7.5), "advanced iterations": 3})
    old._args.consumed_valid_samples = 6
    values = torch.tensor([0.5, 1.5])
    entries = {"balance": {"values": values, "reduce_group": None, "avg_group": None}}
    monkeypatch.setattr(trackers, "save", lambda: {"of a step": "under way"})
    given: list[Any] = []
    monkeypatch.setattr(trackers, "load", given.append)
    assert old.layouts and old.elastic and new.layouts and new.elastic
    old.layouts.set_positions([96, [6, 0]])
    old.elastic.losses.adopt(entries, 3)
    start = after.capture_rank()
    after.restore_common(before.capture_common())
    after.restore_rank(start)
    assert new.overflows == {3}
    new.resume()
    assert new.result == old.result and new._args.consumed_valid_samples == 6
    assert new.layouts.positions() == [96, [6, 0]] and new.elastic.losses.micro_batches == 3
    assert given[-1] == new.elastic.losses.entries == entries
    totals: dict[str, Any] = {}
    new.logging(totals)
    assert totals == {"lm loss": torch.tensor(7.5), "advanced iterations": 3}
    after.restore_rank(start)  # of its own layout, later: nothing of before is left
    assert new.overflows == set()
