"""Buffers that a script changes through ``.data``, which no version counter counts: it is learned which ones do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flashrecovery.adapter.buffers import COMPARED_BYTES, BufferTracker, all_equal, equal_on_device
from flashrecovery.errors import DivergedError, UnsupportedError
from flashrecovery.state import codec
from flashrecovery.torch_native import ModuleAdapter, adapter_for
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.step.transaction import Transaction


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("codebook", torch.zeros(COMPARED_BYTES))
        self.register_buffer("mask", torch.ones(COMPARED_BYTES))
        self.register_buffer("small", torch.zeros(16))

    def write(self) -> None:
        self.codebook.data.add_(1)


class Looked:
    """A network and its tracker, at the hand-out of its first step."""

    def __init__(self) -> None:
        self.net = Net()
        self.tracker = BufferTracker(self.net)
        self.start = self.captured()

    def captured(self) -> dict[str, Any]:
        """What rank-local state says, sealed after a look."""
        self.tracker.mark()
        state: dict[str, Any] = codec.loads(codec.dumps(self.tracker.capture()))
        return state

    def step(self, *, closely: bool, writes: bool = True) -> dict[str, Any]:
        """The rank-local state of a step that writes the codebook in its forward pass."""
        self.tracker.look_closely(closely)
        if writes:
            self.net.write()
        self.captured()
        return self.captured()


def test_a_close_look_learns_it_and_from_then_on_each_look_sees_it() -> None:
    it = Looked()
    it.tracker.look_closely(True)
    before = it.tracker.mark()
    it.net.write()
    assert it.tracker.mark() != before and it.tracker.silent == ["codebook"]
    it.tracker.look_closely(False)
    before = it.tracker.mark()
    assert it.tracker.mark() == before, "it has not changed"
    it.net.write()
    after = it.tracker.mark()
    assert after != before
    changed = it.tracker.capture()["changed"]
    assert changed.keys() == {"codebook"} and torch.equal(changed["codebook"], it.net.codebook)
    assert it.tracker.mark() == after, "to capture is no change"


def test_a_write_after_a_visible_one_is_learned_in_the_same_step() -> None:
    """As after the optimizer of a step whose forward pass writes in the open."""
    it = Looked()
    it.tracker.look_closely(True)
    it.net.codebook.mul_(2)
    before = it.tracker.mark()
    it.net.write()
    assert it.tracker.mark() != before and it.tracker.silent == ["codebook"]


def test_the_next_close_look_learns_what_began_later() -> None:
    it = Looked()
    it.step(closely=True, writes=False)
    it.step(closely=False)
    assert it.tracker.silent == []
    state = it.step(closely=True, writes=False)
    assert it.tracker.silent == ["codebook"] and torch.equal(state["changed"]["codebook"], it.net.codebook)


def test_nothing_else_is_learned() -> None:
    """What is seen in any case, what has changed in the open, and what was written before the first step."""
    net = Net()
    tracker = BufferTracker(net)
    net.write()
    assert tracker.capture()["changed"].keys() == {"codebook"}
    tracker.look_closely(True)
    tracker.mark()
    net.norm(torch.randn(8, 4))
    net.mask[3] = 0.0
    net.small.data.add_(1)
    tracker.mark()
    assert tracker.silent == []
    assert tracker.capture()["changed"].keys() == {
        *("codebook", "mask", "small"),
        *(f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
    }


def test_a_small_buffer_that_marks_do_not_see_is_learned_too() -> None:
    """On a device, for one; here its memory has gaps."""
    net = Net()
    net.register_buffer("gaps", torch.zeros(8, 2)[:, 0])
    tracker = BufferTracker(net)
    tracker.capture()
    tracker.look_closely(True)
    tracker.mark()
    net.gaps.data.add_(1)
    tracker.mark()
    assert tracker.silent == ["gaps"]


def test_bits_are_compared_and_not_numbers() -> None:
    it = Looked()
    it.step(closely=True)
    it.net.codebook.data.fill_(float("nan"))
    before = it.tracker.mark()
    assert it.tracker.mark() == before, "NaN is what it was"
    it.net.codebook.data.zero_()
    before = it.tracker.mark()
    it.net.codebook.data.neg_()
    assert it.tracker.mark() != before, "-0.0 is not 0.0"
    it.net.small.data.neg_()
    assert torch.signbit(it.captured()["changed"]["small"]).all()


def test_a_survivor_goes_back_though_nobody_has_looked_since_the_write() -> None:
    it = Looked()
    it.tracker.look_closely(True)
    it.net.write()
    it.tracker.restore(it.start)
    assert not it.net.codebook.any() and it.tracker.silent == ["codebook"]
    assert it.captured()["changed"] == {}


def test_a_replacement_gets_content_and_knowledge_from_the_local_state() -> None:
    it, new = Looked(), Looked()
    state = it.step(closely=True)
    new.tracker.restore(state)
    assert torch.equal(new.net.codebook, it.net.codebook) and new.tracker.silent == ["codebook"]
    later = new.step(closely=False)
    assert torch.equal(later["changed"]["codebook"], new.net.codebook)
    it.tracker.restore(later)
    it.tracker.restore(state)
    assert it.net.codebook.eq(1).all()


def test_a_local_state_of_an_older_release_says_nothing_of_silent_buffers() -> None:
    it = Looked()
    state = {name: part for name, part in it.start.items() if name not in ("silent", "sure")}
    it.tracker.look_closely(True)
    it.net.write()
    it.tracker.restore(state)
    assert not it.net.codebook.any()


def test_what_others_have_learned_is_adopted() -> None:
    it = Looked()
    it.step(closely=True, writes=False)
    it.tracker.adopt_silent(["codebook", "of another stage"])
    it.tracker.look_closely(False)
    before = it.tracker.mark()
    it.net.write()
    assert it.tracker.mark() != before and it.tracker.silent == ["codebook"]


def test_what_has_perhaps_changed_unseen_before_the_step_is_refused() -> None:
    it = Looked()
    it.step(closely=True, writes=False)
    it.step(closely=False)  # the first write
    unsure = it.step(closely=False)
    assert "codebook" not in unsure["changed"]
    it.tracker.look_closely(False)
    with pytest.raises(DivergedError, match=r"\['codebook'\] .* torch.no_grad"):
        it.tracker.restore(unsure)


def test_also_if_a_close_look_of_the_step_has_found_it() -> None:
    it = Looked()
    it.step(closely=True, writes=False)
    unsure = it.step(closely=False)
    later = it.step(closely=True)
    with pytest.raises(DivergedError, match="codebook"):
        it.tracker.restore(unsure)
    it.net.write()
    it.tracker.restore(later)
    assert it.net.codebook.eq(2).all(), "what was sealed after the look is right"


def test_a_local_state_sealed_after_a_close_look_is_right_whatever_is_found_later() -> None:
    """As that of a checkpoint."""
    it = Looked()
    checkpoint = it.step(closely=True, writes=False)
    it.step(closely=False)
    it.step(closely=True)
    it.tracker.restore(checkpoint)
    assert not it.net.codebook.any()


def test_in_the_step_after_a_close_look_the_first_write_is_no_matter() -> None:
    it = Looked()
    it.step(closely=True, writes=False)
    state = it.captured()
    it.tracker.look_closely(False)
    it.net.write()
    it.tracker.restore({**state, "sure": False})
    assert not it.net.codebook.any()


@pytest.mark.parametrize(
    ("version", "known", "proof_due", "saves", "closely"),
    [
        (0, False, False, False, True),
        (1, True, False, False, True),
        (3, True, False, False, False),
        (3, True, True, False, True),
        (3, True, False, True, True),
        (64, True, False, False, True),
        (96, True, False, False, False),
        (128, True, False, False, True),
    ],
)
def test_when_a_step_is_looked_at_closely(
    version: int, known: bool, proof_due: bool, saves: bool, closely: bool
) -> None:
    """In the first, where the ranks compare, after a recovery, and where a checkpoint of its end is to be written."""
    step = SimpleNamespace(
        _habits=SimpleNamespace(known=known),
        _copies=SimpleNamespace(saves=lambda v: saves and v == version + 1),
        _proving=SimpleNamespace(due=proof_due),
    )
    assert Transaction.looks_closely(cast(Transaction, step), version) == closely


def _registry() -> tuple[Registry, Net]:
    made, net = Registry(0, 2, adapter_for, ModuleAdapter), Net()
    made.register(net, [], {})
    made.remember_start()
    return made, net


def test_the_registry_adopts_by_the_adapters_number_and_remembers_it_with_the_common_state() -> None:
    made, net = _registry()
    made.look_closely(True)
    net.write()
    made.drawn()
    assert made.silent() == ["0/codebook"] and made.habits.silent == []
    made.adopt_silent([*made.silent(), "0/mask", "3/of another stage"])
    assert made.adapters[0].silent() == ["codebook", "mask"]
    other, _ = _registry()
    other.restore_common(made.capture_common(1))
    assert other.adapters[0].silent() == ["codebook", "mask"]
    assert other.silent() == ["0/codebook", "0/mask", "3/of another stage"] == other.habits.silent


def test_too_large_a_state_of_one_rank_is_refused_by_the_names_of_its_parts() -> None:
    net = Net()
    limit = 1 << 20
    net.register_buffer("queue", torch.zeros(limit, dtype=torch.uint8))
    made = Registry(0, 2, adapter_for, ModuleAdapter)
    made.local_state_limit = limit
    made.register(net, [], {})
    made.capture_local_state(made.drawn(), 1)
    net.queue.add_(1)
    size = f"{limit:,}"
    with pytest.raises(UnsupportedError, match=rf"at most {size} can .*: buffer 'queue' \({size} bytes\)"):
        made.capture_local_state(made.drawn(), 1)


# -- how it is compared ---------------------------------------------------------------------------------


class _Waits(TorchDispatchMode):
    """Counts what would let the host wait for a device, each time it is called."""

    waits = frozenset({"equal", "is_nonzero", "_local_scalar_dense", "item"})

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.waits:
            self.counted.append(name)
        return func(*args, **(kwargs or {}))


def test_on_a_device_buffers_are_compared_there_and_the_host_waits_once_for_all() -> None:
    one = [torch.arange(n) for n in (0, 1, 2, 300)] + [torch.zeros(()), torch.tensor([True, False])]
    other = [t.clone() for t in one]
    other[2][1] = -1
    other[5][0] = False
    with _Waits() as waits:
        assert equal_on_device(list(zip(one, other, strict=True))) == [True, True, False, True, True, False]
    assert waits.counted == []  # a list of all flags is one copy
    with _Waits() as waits:
        torch.equal(one[3], other[3])
    assert waits.counted == ["equal"]  # such a wait would have been seen


def test_all_that_a_look_compares_is_compared_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Looked()
    calls: list[int] = []

    def counted(pairs: list[Any]) -> list[bool]:
        calls.append(len(pairs))
        return all_equal(pairs)

    monkeypatch.setattr("flashrecovery.adapter.buffers.all_equal", counted)
    it.tracker.look_closely(True)
    it.tracker.mark()
    it.net.write()
    it.net.small.data.add_(1)
    assert set(it.captured()["changed"]) == {"codebook", "small"}
    assert calls == [6, 6, 5]  # two close looks, and a capture, which leaves out the mask
