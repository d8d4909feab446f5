"""Several model chunks on a rank (virtual pipelines) in an elastic job: each goes through all micro-batches, with
random streams of its own; and which sizes the interleaved schedule allows."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from flashrecovery.adapter.elastic import Forwards, FrameworkBatch
from flashrecovery.adapter.loop import CallBatches
from flashrecovery.errors import ConfigError, RegistrationError, UnsupportedError
from flashrecovery.plan.elastic.sample_order import exact_sizes
from flashrecovery.worker.data import global_batches as batches_of
from fr_megatron import elastic, shard_layout
from fr_megatron.optimizers import weights_name
from fr_megatron.shard_layout import OptimizerShardLayout, layout_of, names_of, numbered_buffers

GLOBAL, MICRO = 12, 1


def pairs(micro_batches: int) -> bool:
    return micro_batches % 2 == 0


def test_sizes_whose_micro_batches_a_schedule_can_compute() -> None:
    assert exact_sizes(GLOBAL, MICRO, 12, uneven=False, runs=pairs) == [6, 3, 2, 1]
    assert exact_sizes(GLOBAL, MICRO, 12, uneven=False, each=3, runs=pairs) == [2, 1]


@pytest.mark.parametrize(
    ("at_once", "stages", "allowed"),
    [(2, 2, {2, 4, 6, 8}), (3, 2, {3, 5, 6, 8}), (4, 2, {4, 6, 7, 8}), (4, 4, {4, 8}), (2, 3, set())],
)
def test_micro_batches_of_the_interleaved_schedule(at_once: int, stages: int, allowed: set[int]) -> None:
    assert {n for n in range(1, 9) if elastic.interleaves(at_once, stages, n)} == allowed


# -- your own loop -------------------------------------------------------------------------------


def made(monkeypatch: pytest.MonkeyPatch, place: tuple[int, int], **more: Any) -> batches_of.ElasticBatches:
    monkeypatch.setattr(batches_of, "_place", lambda group: place)
    given: dict[str, Any] = {"counted": True, "chunks": 2, "runs": pairs, **more}
    batch = FrameworkBatch(GLOBAL, MICRO, **given)
    return batches_of.ElasticBatches(
        TensorDataset(torch.arange(30)), batches_of.BatchSettings(seed=5), framework=lambda: batch
    )


def drained(batches: batches_of.ElasticBatches, step: int, chunk: int) -> list[tuple[int, list[int]]]:
    return [(batch.number, batch.data[0].tolist()) for batch in batches.of(step, chunk)]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_each_chunk_has_all_micro_batches(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = made(monkeypatch, (size - 1, size))
    batches.begin(3)
    first = drained(batches, 3, 0)
    with pytest.raises(RegistrationError, match=r"for model chunks \[1\]"):
        batches.refuse_unread(3)
    assert drained(batches, 3, 1) == first and len(first) == 12 // size
    batches.refuse_unread(3)
    batches.begin(4)
    with pytest.raises(RegistrationError, match=r"for model chunks \[0, 1\]"):
        batches.refuse_unread(4)


def test_one_chunk_twice_is_not_both(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = made(monkeypatch, (0, 2))
    batches.begin(0)
    for _ in range(2):
        drained(batches, 0, 1)
    with pytest.raises(RegistrationError, match=r"for model chunks \[0\]"):
        batches.refuse_unread(0)


@pytest.mark.parametrize("taken", ["all", "one ahead", "one chunk", "of the other chunk", "each in its turn", "unseen"])
def test_micro_batches_that_are_taken_before_they_are_computed(taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams are seeded when a micro-batch is handed out; the last one's would be drawn from for all of them."""
    chunks = [torch.nn.Identity(), torch.nn.Identity()]
    batches = made(monkeypatch, (0, 2), forwards=Forwards(chunks))
    for step in (0, 1):
        batches.begin(step)
        turns: list[Any] = [batches.of(step, chunk) for chunk in (0, 1)]
        if taken == "all":
            turns = [iter(list(turn)) for turn in turns]
        elif taken == "one chunk":
            turns[1] = iter(list(turns[1]))
        elif taken == "one ahead":
            turns[0] = chain([next(turns[0]), next(turns[0])], turns[0])
        elif taken == "of the other chunk":  # each chunk's first one
            turns = [chain([next(turn)], turn) for turn in turns]

        def compute(_: int, chunk: int, turns: Any = turns) -> None:
            batch = next(turns[chunk])
            if taken != "unseen":
                chunks[chunk](batch)

        interleaved(compute, 0, 2, 2)
        if taken in ("each in its turn", "unseen"):
            batches.refuse_unread(step)
        else:
            with pytest.raises(RegistrationError, match="before it computed the one before"):
                batches.refuse_unread(step)


def test_an_attempt_that_was_cut_short_says_nothing_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [torch.nn.Identity()]
    batches = made(monkeypatch, (0, 2), forwards=Forwards(chunks), chunks=1)
    batches.begin(0)
    turns = batches.of(0)
    next(turns), next(turns)
    batches.begin(0)
    for batch in batches.of(0):
        chunks[0](batch)
    batches.refuse_unread(0)


@pytest.mark.parametrize("chunk", [-1, 2])
def test_a_chunk_that_there_is_not(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RegistrationError, match=rf"chunk={chunk}\): 0 to 1 is allowed"):
        made(monkeypatch, (0, 2)).of(0, chunk)
    plain = made(monkeypatch, (0, 2), chunks=1)
    with pytest.raises(RegistrationError, match="0 to 0 is allowed"):
        plain.of(0, 1)


def test_sizes_and_one_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(monkeypatch, (0, 6)).sizes == [6, 3, 2, 1]
    with pytest.raises(ConfigError, match="cannot compute 3 of them on a replica"):
        made(monkeypatch, (0, 4))


Drawn = dict[tuple[int, int], tuple[float, float]]


def interleaved(draws: Callable[[int, int], None], replica: int, size: int, turn: int) -> None:
    """Computes micro-batches as the schedule does: that many of one chunk, as many of the other, and so on."""
    own = list(range(12 // size))
    for first in range(0, len(own), turn):
        for chunk in (0, 1):
            for _ in own[first : first + turn]:
                draws(replica, chunk)


@pytest.mark.parametrize(("size", "turn"), [(1, 2), (2, 2), (3, 4), (2, 3), (6, 2)])
def test_random_numbers_do_not_depend_on_the_size(size: int, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on the order in which the chunks take turns. Each chunk's are its own."""

    def of(size: int, turn: int) -> Drawn:
        drawn: Drawn = {}
        for replica in range(size):
            seed: Callable[[int, int], None] = lambda seed, chunk: torch.manual_seed(seed + chunk)  # noqa: E731
            batches = made(monkeypatch, (replica, size), seed=seed)
            batches.begin(7)
            turns = [batches.of(7, chunk) for chunk in (0, 1)]

            def draws(_: int, chunk: int, turns: Any = turns) -> None:
                batch = next(turns[chunk])
                drawn[batch.number, chunk] = float(torch.rand(1)), random.random()

            interleaved(draws, replica, size, turn)
        return drawn

    alone = of(1, 12)
    assert of(size, turn) == alone and len({first for first, _ in alone.values()}) == 24


# -- calls of a framework ------------------------------------------------------------------------------


def called(place: tuple[int, int], seeds: list[tuple[int, int]]) -> CallBatches:
    return CallBatches(
        global_batch=GLOBAL,
        micro_batch=MICRO,
        seed=5,
        place=lambda: place,
        seed_framework=lambda seed, chunk: seeds.append((seed, chunk)),
        chunks=2,
        runs=pairs,
    )


@pytest.mark.parametrize(("size", "turn"), [(1, 2), (2, 2), (3, 4), (6, 2)])
def test_calls_seed_each_chunk_alike_in_any_size(size: int, turn: int) -> None:
    def of(size: int, turn: int) -> set[tuple[int, int]]:
        seeds: list[tuple[int, int]] = []
        for replica in range(size):
            batches = called((replica, size), seeds)
            batches.begin(7)
            seeds.pop()  # of what is outside of micro-batches
            interleaved(lambda _, chunk, own=batches: own.micro_batch(chunk), replica, size, turn)  # type: ignore[misc]
            batches.refuse_unread(0)
        assert len(seeds) == len(set(seeds)) == 24  # each chunk's own
        return set(seeds)

    assert of(size, turn) == of(1, 12)


@pytest.mark.parametrize("computed", [(6, 4), (4, 6), (6, 0), (0, 6), (4, 4), (0, 0), (12, 6)])
def test_a_call_in_which_a_chunk_has_left_some(computed: tuple[int, int]) -> None:
    batches = called((0, 2), [])
    batches.begin(0)
    for chunk, number in enumerate(computed):
        for _ in range(number):
            batches.micro_batch(chunk)
    with pytest.raises(RegistrationError, match=f"of each model chunk {list(computed)}".replace("[", r"\[")):
        batches.refuse_unread(0)


def test_sizes_of_calls() -> None:
    assert called((0, 6), []).sizes == [6, 3, 2, 1]
    with pytest.raises(ConfigError, match="cannot compute 3 micro-batches on a replica"):
        called((0, 4), [])


# -- state of several chunks ---------------------------------------------------------------------------


def chunk(*lengths: int, frozen: bool = False) -> Any:
    """With one buffer of parameters of these lengths, or none."""
    parameters = [torch.nn.Parameter(torch.zeros(length)) for length in lengths]
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    buffer = SimpleNamespace(
        param_index_map={p: (end - p.numel(), end, 0) for p, end in zip(parameters, ends, strict=True)},
        buckets=[SimpleNamespace(offset=0, numel_unpadded=ends[-1])],
        param_dtype=torch.bfloat16,
        data_parallel_world_size=2,
    )
    return SimpleNamespace(
        buffers=[] if frozen else [buffer],
        expert_parallel_buffers=[],
        named_parameters=lambda: [(f"w{number}", p) for number, p in enumerate(parameters)],
        ddp_config=SimpleNamespace(pad_buckets_for_high_nccl_busbw=False),
    )


def test_parameters_of_chunks_have_names_and_places_of_their_own() -> None:
    """Chunks have parameters of the same names; a chunk without any that is trained has no buffer."""
    chunks = [chunk(300, 500), chunk(7, frozen=True), chunk(400)]
    membership = {"0.w0": 0, "0.w1": 1, "2.w0": 0}
    assert sorted(names_of(chunks).values()) == ["0.w0", "0.w1", "1.w0", "2.w0"]
    assert numbered_buffers(chunks, expert=False) == [(0, 0), (2, 0)] and not numbered_buffers(chunks, expert=True)
    layout = layout_of(chunks, membership)
    assert [(one.fqn, one.buffer, one.group) for one in layout.stored] == [
        ("0.w0", 0, 0),
        ("0.w1", 0, 1),
        ("2.w0", 1, 0),
    ]
    assert layout.in_order == ["0.w0", "2.w0", "0.w1"]  # groups go through all chunks
    parts = OptimizerShardLayout(chunks, None, membership, "stand=1", dict, lambda *_: None)
    assert parts.size == 2 and shard_layout.WEIGHTS == "/weights"
    names = {rule.name: rule.shard_at(0, 3) for rule in parts.rules({"state": []}) if rule.key == shard_layout.DATA}
    assert names == {
        "0.w0/weights": weights_name(0, "dense", 0, 3, "stand=1"),
        "0.w1/weights": weights_name(0, "dense", 0, 3, "stand=1"),
        "2.w0/weights": weights_name(2, "dense", 0, 3, "stand=1"),
    }


@pytest.mark.parametrize(
    ("experts", "context", "stages", "batched", "chunks", "refused"),
    [
        (None, 1, 2, False, 2, []),
        (None, 1, 4, True, 2, []),
        (4, 2, 2, True, 1, []),
        (4, 1, 2, False, 2, ["MoE layers in several model chunks"]),
        (None, 2, 2, False, 2, ["context_parallel_size = 2 with several model chunks"]),
        (None, 1, 2, True, 2, ["batch_p2p_comm with two pipeline ranks and several model chunks"]),
    ],
)
def test_what_has_not_been_tried_with_several(
    experts: int | None,
    context: int,
    stages: int,
    batched: bool,
    chunks: int,
    refused: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = pytest.importorskip("megatron.core.parallel_state")
    monkeypatch.setattr(state, "get_context_parallel_world_size", lambda: context)
    monkeypatch.setattr(state, "get_pipeline_model_parallel_world_size", lambda: stages)
    for name in ("_of_chunk", "_of_layout", "of_calculator"):
        monkeypatch.setattr(elastic, name, lambda *_: iter(()))

    class DistributedDataParallel:
        ddp_config = SimpleNamespace(use_distributed_optimizer=False)
        config = SimpleNamespace(num_moe_experts=experts, batch_p2p_comm=batched)

    found = list(elastic.tied_to_size([DistributedDataParallel()] * chunks, None))
    assert [text.partition(" (virtual")[0] for text in found] == refused


@pytest.mark.parametrize(
    ("chunks", "experts", "refused"),
    [(2, None, "several model chunks on a rank"), (1, 4, "with MoE layers or context parallelism"), (1, None, "")],
)
def test_growth_beyond_the_launch(
    chunks: int, experts: int | None, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = pytest.importorskip("fr_megatron.adapter")
    monkeypatch.setattr(adapter, "experts_or_context", lambda: False)
    monkeypatch.setattr(adapter.MegatronAdapter, "shard_layout", lambda _: None)
    made = adapter.MegatronAdapter.__new__(adapter.MegatronAdapter)
    made._chunks = [SimpleNamespace(config=SimpleNamespace(num_moe_experts=experts))] * chunks
    found = made.only_as_launched(3)
    assert refused in found and bool(found) is bool(refused)


def test_each_stage_of_the_whole_model_draws_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of two ranks with two chunks each draws what its stage draws on four ranks."""
    state = pytest.importorskip("megatron.core.parallel_state")
    monkeypatch.setattr(state, "get_tensor_model_parallel_rank", lambda: 0)

    def drawn(ranks: int) -> list[float]:
        monkeypatch.setattr(state, "get_pipeline_model_parallel_world_size", lambda: ranks)
        found = []
        for stage in range(4):
            monkeypatch.setattr(state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage % ranks)
            torch.manual_seed(9)
            elastic.seed_tracked(9, stage // ranks)
            found.append(float(torch.rand(1)))
        return found

    assert drawn(2) == drawn(4) and len({*drawn(2)}) == 4


# -- stages of several kinds ---------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("experts", [True, False])
def test_a_stage_without_experts_divides_the_rest(dense: bool, experts: bool) -> None:
    """Megatron makes an optimizer of experts on all ranks if there are any, which is of none on such a stage."""
    module = pytest.importorskip("fr_megatron.adapter")
    some, more = chunk(300, frozen=not dense), chunk(500, frozen=not experts)
    one = SimpleNamespace(
        buffers=some.buffers,
        expert_parallel_buffers=more.buffers,
        ddp_config=some.ddp_config,
        named_parameters=lambda: [("w", *some.named_parameters()[0][1:]), ("e", *more.named_parameters()[0][1:])],
    )
    adapter = module.MegatronAdapter.__new__(module.MegatronAdapter)
    adapter._chunks, adapter._membership = [one], {"0.w": 0, "0.e": 0}
    adapter._inner = [
        SimpleNamespace(param_groups=[{"is_expert_parallel": of_experts}]) for of_experts in (False, True)
    ]
    wrapper = SimpleNamespace(group=lambda *, expert: "")
    places = module.SharedPlaces((0, 1, 2, 3), 1, ("stand=0", "stand=1"), one_each=False)
    if not dense:
        with pytest.raises(UnsupportedError, match="trains nothing but experts"):
            adapter._sharded(wrapper, places)
        return
    made = adapter._sharded(wrapper, places)
    names = {rule.name for rule in made.rules({"dense": {"state": []}, "experts": {"state": []}})}
    assert made.size == 2 and bool([name for name in names if name.startswith("experts")]) is experts
    assert (made._experts is not None) is experts  # one of nothing has no size
