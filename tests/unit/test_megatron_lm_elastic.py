"""Megatron-LM's loop in an elastic job, as far as it can be seen without one: the flag, what is refused, the samples of
a step, and the micro-batches that the loop compares."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashrecovery.adapter.loop import CallBatches
from flashrecovery.config import ElasticSettings, Settings
from flashrecovery.errors import ConfigError, RegistrationError, UnsupportedError
from flashrecovery.worker.reshard import elastic_checks
from fr_megatron.lm import layer_losses
from fr_megatron.lm.elastic_data import FollowingLoader
from fr_megatron.lm.elastic_loop import ElasticLoop, check_flag

GLOBAL, MICRO, SAMPLES = 24, 2, 24 * 5


def recovery(elastic: ElasticSettings | None, *, checkpoints: bool = False) -> Any:
    return SimpleNamespace(elastic=elastic, take_batches=lambda batches: None, has_checkpoints=checkpoints)


@pytest.mark.parametrize(
    ("said", "launched", "words"),
    [
        ("2:4", None, "start it with `flashrecovery run --elastic 2:4`"),
        ("2:4", ElasticSettings(min=1, max=4), "the launcher says --elastic 1:4: the same is allowed"),
        ("4", ElasticSettings(min=2, max=4), "MIN:MAX is needed"),
        ("2:x", ElasticSettings(min=2, max=4), "MIN:MAX is needed"),
    ],
)
def test_a_flag_that_says_something_else(said: str, launched: ElasticSettings | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_flag(SimpleNamespace(flash_recovery_elastic=said), recovery(launched))


def test_a_flag_that_says_the_same_or_nothing() -> None:
    launched = ElasticSettings(min=2, max=4)
    check_flag(SimpleNamespace(flash_recovery_elastic="2:4"), recovery(launched))
    check_flag(SimpleNamespace(flash_recovery_elastic=None), recovery(launched))
    check_flag(SimpleNamespace(flash_recovery_elastic=None), recovery(None))
    check_flag(SimpleNamespace(), recovery(launched))  # arguments of a file


class MegatronPretrainingSampler:
    """As Megatron-LM's, with its names."""

    def __init__(self, consumed_samples: int, data_parallel_rank: int, data_parallel_size: int) -> None:
        self.consumed_samples = consumed_samples
        self.micro_batch_size = MICRO
        self.data_parallel_rank = data_parallel_rank
        self.micro_batch_times_data_parallel_size = MICRO * data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(self.consumed_samples, SAMPLES):
            batch.append(index)
            if len(batch) == self.micro_batch_times_data_parallel_size:
                start = self.data_parallel_rank * MICRO
                yield batch[start : start + MICRO]
                batch = []


class Replica:
    """One replica's loader, whose number and size are set."""

    def __init__(self, number: int, size: int, consumed: int = 0, workers: int = 0) -> None:
        self.place = (number, size)
        loader = torch.utils.data.DataLoader(
            range(SAMPLES),  # type: ignore[arg-type]
            batch_sampler=MegatronPretrainingSampler(consumed, number, size),  # type: ignore[arg-type]
            num_workers=workers,
        )
        self.fetched = 0
        self.loader = FollowingLoader(loader, 1, lambda: self.place, self._fetching)

    def _fetching(self) -> None:
        self.fetched += 1

    def take(self, micro_batches: int) -> list[int]:
        return [int(sample) for _ in range(micro_batches) for sample in next(self.loader)]

    def step(self) -> list[int]:
        found = self.take(GLOBAL // MICRO // self.place[1])
        self.loader.keep()
        return found


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_has_the_same_samples_in_any_size(workers: int) -> None:
    replicas = [Replica(number, 4, workers=workers) for number in range(4)]
    order = []
    for size in (4, 3, 2, 4, 1):
        for number, replica in enumerate(replicas[:size]):
            replica.place = (number, size)
        for replica in replicas[size:]:
            replica.loader.go_to(replicas[0].loader.position + GLOBAL)
        order.append(sorted(sample for replica in replicas[:size] for sample in replica.step()))
        assert {replica.loader.position for replica in replicas} == {GLOBAL * len(order)}
    assert order == [list(range(GLOBAL * step, GLOBAL * (step + 1))) for step in range(5)]


def test_the_micro_batches_are_numbered_across_the_replicas() -> None:
    """As Megatron's sampler has them; so are the random streams."""
    assert Replica(1, 3).take(2) == [2, 3, 8, 9]
    assert Replica(0, 2, consumed=GLOBAL).take(2) == [24, 25, 28, 29]


def test_a_step_that_was_cut_short_begins_again_in_another_size() -> None:
    replica = Replica(1, 4)
    first = replica.step()
    replica.take(2)
    replica.place = (0, 3)
    replica.loader.go_to(replica.loader.position)
    assert first[:2] == [2, 3]
    assert replica.step() == [24, 25, 30, 31, 36, 37, 42, 43]


def test_it_does_not_begin_again_where_it_need_not() -> None:
    """Workers go on to read ahead."""
    replica = Replica(0, 2)
    begun: list[int] = []
    begin = replica.loader._begin

    def watched(at: int, number: int, size: int) -> Iterator[Any]:
        begun.append(at)
        return begin(at, number, size)

    replica.loader._begin = watched  # type: ignore[method-assign]
    for _ in range(3):
        replica.step()
    assert begun == [0] and replica.fetched == 3 * 6


def test_a_sample_that_could_not_be_read_is_read_again() -> None:
    """Whatever the source has skipped meanwhile."""
    replica = Replica(0, 2)
    source = replica.loader._begin(0, 0, 2)

    def failing() -> Iterator[Any]:
        next(source)
        raise OSError("the file system is slow")
        yield

    begin, sources = replica.loader._begin, [failing()]
    replica.loader._begin = lambda *at: sources.pop() if sources else begin(*at)  # type: ignore[method-assign]
    with pytest.raises(OSError, match="slow"):
        replica.take(1)
    assert replica.take(2) == [0, 1, 4, 5]


def test_a_sample_in_the_middle_is_read_again() -> None:
    """The source that goes on is one that has been asked to go on at another place."""
    replica = Replica(0, 2)
    replica.take(1)
    assert replica.loader._source is not None
    source = replica.loader._source

    class Failing:
        def __next__(self) -> Any:
            next(source)
            raise OSError("the file system is slow")

    replica.loader._source = Failing()  # type: ignore[assignment]
    with pytest.raises(OSError, match="slow"):
        replica.take(1)
    replica.loader._source = source
    assert replica.take(1) == [4, 5]


def test_another_sampler_is_refused() -> None:
    loader = torch.utils.data.DataLoader(range(4), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="batch sampler is a BatchSampler"):
        FollowingLoader(loader, 1, lambda: (0, 1), lambda: None)


def test_no_random_number_is_drawn_by_a_loader_that_begins() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    Replica(0, 2, workers=1).take(1)
    assert torch.equal(before, torch.get_rng_state())


# -- batches of calls ------------------------------------------------------------------------------


def batches(place: tuple[int, int], seen: list[int] | None = None) -> CallBatches:
    seeds = [] if seen is None else seen
    return CallBatches(
        global_batch=GLOBAL,
        micro_batch=MICRO,
        seed=7,
        place=lambda: place,
        seed_framework=lambda seed, chunk: seeds.append(seed),
    )


def seeds_of(place: tuple[int, int], step: int) -> list[int]:
    seen: list[int] = []
    made = batches(place, seen)
    made.begin(step)
    for _ in range(made.accumulation):
        made.micro_batch()
    made.end()
    return seen


def test_a_micro_batch_has_its_seed_in_any_size() -> None:
    """By its number across the replicas; and all replicas have the same before and after a step."""
    alone = seeds_of((0, 1), 3)
    assert len(set(alone)) == GLOBAL // MICRO + 2
    for size in (2, 3, 4):
        for number in range(size):
            begin, *own, end = seeds_of((number, size), 3)
            assert own == alone[1:-1][number::size]
            assert (begin, end) == (alone[0], alone[-1])
    assert seeds_of((0, 1), 4)[0] == alone[-1] and not set(seeds_of((0, 1), 4)[1:]) & set(alone)


def test_a_step_that_is_computed_twice_has_its_seeds_twice() -> None:
    """Megatron's rerun machine does that to validate results."""
    seen: list[int] = []
    made = batches((1, 4), seen)
    made.begin(0)
    for _ in range(2 * made.accumulation):
        made.micro_batch()
    assert seen[1:4] == seen[4:7]
    made.refuse_unread(0)


@pytest.mark.parametrize("computed", [0, 1, 2, 4])
def test_a_step_that_leaves_micro_batches_is_refused(computed: int) -> None:
    made = batches((0, 4))
    made.refuse_unread(0)  # a call that computes nothing
    made.begin(0)
    for _ in range(computed):
        made.micro_batch()
    with pytest.raises(RegistrationError, match=f"has computed {computed} micro-batches, and 3 are this replica's"):
        made.refuse_unread(1)
    made.refuse_unread(2)


def test_a_step_that_is_given_up_is_not_missed_by_the_call_before_it() -> None:
    """The job goes back from the middle of a step to a log that some had not committed."""
    made = batches((0, 4))
    made.begin(1)
    made.micro_batch()
    made.give_up()
    made.refuse_unread(3)
    made.begin(1)
    with pytest.raises(RegistrationError):
        made.refuse_unread(4)


def test_going_back_gives_the_step_up() -> None:
    made = loop()
    made._batches._seed_framework = lambda seed, chunk: None
    made._batches.begin(1)
    made._batches.micro_batch()
    made.set_positions([])
    made._batches.refuse_unread(3)


def test_fallback_checkpoints_of_other_loops_are_refused() -> None:
    """Calls that lie far back are made again by the newest call of their kind, which stands at its own samples."""
    registry: Any = SimpleNamespace(adapters=[], batches=batches((0, 4)))
    settings = Settings.model_validate({"elastic": {"min": 1, "max": 4}, "checkpoint": {"dir": "/somewhere"}})
    with pytest.raises(
        UnsupportedError, match=r"fallback checkpoints \(checkpoint.dir\) whose steps are a framework's own"
    ):
        elastic_checks.check_start(registry, settings, ElasticSettings(min=1, max=4), [], single_calls=True)


def test_sizes() -> None:
    assert batches((0, 4)).sizes == [4, 3, 2, 1]
    with pytest.raises(ConfigError, match="on 5 replicas: each of them needs as many"):
        batches((0, 5))


# -- the loop --------------------------------------------------------------------------------------


def loop(**flags: Any) -> ElasticLoop:
    pytest.importorskip("megatron.core")
    given = {"global_batch_size": GLOBAL, "micro_batch_size": MICRO, "seed": 1, "dataloader_type": "single", **flags}
    return ElasticLoop(SimpleNamespace(**given), recovery(None), [None], place=lambda: (0, 4))


def test_what_is_refused_of_the_flags() -> None:
    assert not list(loop(tensorboard_dir=None, full_validation=False, iterations_to_skip=[]).tied_to_size())
    (text,) = loop(tensorboard_dir="/somewhere").tied_to_size()
    assert text == "--tensorboard-dir (the last rank of the launch writes)"
    (text,) = loop(dataloader_type="cyclic").tied_to_size()
    assert "--dataloader-type cyclic" in text and "allowed: single" in text
    (text,) = loop(ckpt_assume_constant_structure=True).tied_to_size()
    assert text.startswith("--ckpt-assume-constant-structure (it keeps which rank writes which part")
    (text,) = loop(non_persistent_ckpt_type="local").tied_to_size()
    assert text.startswith("--non-persistent-ckpt-type local")
    assert not list(loop(non_persistent_ckpt_type="global").tied_to_size())
    assert len(list(loop(log_straggler=True, iterations_to_skip=[3], sft=True).tied_to_size())) == 3


@pytest.mark.parametrize("flag", ["check_for_spiky_loss", "check_for_large_grads"])
def test_fallback_checkpoints_with_what_ranks_remember_are_refused(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_losses, "METRICS", SimpleNamespace(takes=lambda way: way == "dictionary"))
    made = loop(**{flag: True})
    assert not list(made.tied_to_size())
    made._recovery = recovery(None, checkpoints=True)
    (text,) = made.tied_to_size()
    assert text.startswith(f"--{flag.replace('_', '-')} and fallback checkpoints (each rank remembers the largest")
    made = loop(**{flag: False}, num_experts=4)
    made._recovery = recovery(None, checkpoints=True)
    assert not list(made.tied_to_size())


def test_losses_of_layers_that_cannot_follow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_losses, "METRICS", SimpleNamespace(takes=lambda way: way == "dictionary"))
    (text,) = loop(dsa_indexer_loss_coeff=0.5).tied_to_size()
    assert text.startswith("--dsa-indexer-loss-coeff (what layers have summed up")
    assert not list(loop(dsa_indexer_loss_coeff=0.0, num_experts=4).tied_to_size())
    monkeypatch.setattr(layer_losses, "METRICS", SimpleNamespace(takes=lambda way: way == "entries"))
    (text,) = loop(num_experts=4).tied_to_size()
    assert text.startswith("--num-experts 4 with a megatron-core that keeps losses of experts in another way")
    assert not list(loop(num_experts=None).tied_to_size())


def test_the_loop_sees_no_ramp_up() -> None:
    """Between its two updates it compares micro-batches with those of the iteration before, which may only rise; and
    where it computes it has those of the size."""
    made = loop()
    made.training(3)
    assert made.seen(3) == 3
    for now in (3, 4, 6, 3):
        made.updated(checks=False)
        assert made.seen(now) == 3
        made.updated(checks=True)
        assert made.seen(now) == now
