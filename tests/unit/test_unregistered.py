"""What a script changes from step to step and has not registered is named."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from flashrecovery.adapter.faults import before_gather, in_backward, in_forward
from flashrecovery.errors import RegistrationError
from flashrecovery.worker.data.stream import DataStream
from flashrecovery.worker.kept_attributes import KeptAttributes
from flashrecovery.worker.script_checks.unregistered import Unregistered
from flashrecovery.worker.script_text.script_frames import check_loop
from flashrecovery.worker.script_text.script_modules import ScriptModules

STEPS = 5


@pytest.fixture(autouse=True)
def no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of tests are none of a script's; see ``test_unregistered_modules.py``."""
    monkeypatch.setattr(ScriptModules, "besides", lambda self, variables: iter(()))


class Registered:
    """What a script has registered, and what it has been told."""

    def __init__(self, *more: object, frameworks: bool = False, calls: bool = False) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.told: list[str] = []
        known = [self.model, self.optimizer, *more]
        self.unregistered = Unregistered(known, frameworks, self.told.append, calls=calls)

    def step(self, generation: int = 0) -> None:
        self.unregistered.before_step(sys._getframe(1), generation)


class Counter:
    """An object of the script's."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        raise AssertionError("no code of the script is run")

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Memory(nn.Module):
    """Carries a tensor from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.held = torch.zeros(2)
        self.newest = torch.zeros(2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.held = self.held + x.detach()
        self.newest = x + 1
        return self.linear(self.held + self.newest)


def test_a_loop_that_keeps_to_the_rules() -> None:
    it = Registered()
    losses = []
    for number in range(STEPS):
        it.step()
        loss = it.model(torch.ones(1, 2)).sum()
        loss.backward()
        losses.append(number * float(loss.detach()))
    # the loop is over a range here: its variable is named, and nothing else
    (text,) = it.told
    assert "carried from step to step: number;" in text, text


def test_generators() -> None:
    it = Registered()
    mine, numbers, other = torch.Generator(), np.random.default_rng(1), random.Random(1)
    still = torch.Generator()
    for _step in itertools.repeat(0, STEPS):
        it.step()
        torch.rand(2, generator=mine), numbers.random(), other.random()
    (text,) = it.told
    assert "mine (Generator), numbers (Generator), other (Random)" in text and "still" not in text, still
    assert "recovery.register(mine=mine, numbers=numbers, other=other)" in text
    assert "test_unregistered.py:" in text


def test_modules_schedulers_and_objects_with_a_state() -> None:
    it = Registered()
    average, teacher, counter = nn.Linear(2, 2), nn.Linear(2, 2), Counter()
    schedule = torch.optim.lr_scheduler.StepLR(it.optimizer, 2)
    scaler = torch.amp.GradScaler("cpu")
    parts = {"more": [random.Random(2)]}
    for _step in itertools.repeat(0, STEPS):
        it.step()
        with torch.no_grad():
            average.weight.mul_(0.9)
        teacher(torch.ones(2))
        counter.count += 1
        it.optimizer.step()
        schedule.step()
        parts["more"][0].random()
    (text,) = it.told
    for named in ("average (Linear)", "counter (Counter)", "schedule (StepLR)", "parts['more'][0] (Random)"):
        assert named in text, text
    assert "teacher" not in text and "scaler" not in text, scaler


class Averaging:
    """Another method than its constructor makes what a method of the class before it uses."""

    def __init__(self) -> None:
        self.prepare()

    def prepare(self) -> None: ...

    def step(self) -> None:
        self.average.count += 1  # type: ignore[attr-defined]


class AveragingCounter(Averaging):
    def prepare(self) -> None:
        self.average = Counter()


def test_what_a_derived_class_makes_for_a_method_of_its_base_is_not_made_in_each_step() -> None:
    here, script = Registered(), AveragingCounter()
    for _step in itertools.repeat(0, STEPS):
        here.step()
        script.step()
    (told,) = here.told
    assert "script.average (Counter)" in told


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draws, self.numbers, self.norms = random.Random(1), np.random.default_rng(1), np.zeros(2)
        self.counter, self.count = Counter(), counting()
        self.still, self.width, self.never = random.Random(2), 3, counting()

    def forward(self) -> None:
        self.draws.random()
        self.numbers.random()
        self.norms += 1
        self.count()


def counting() -> Callable[[], int]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


def test_what_a_registered_model_holds() -> None:
    model = Holding()
    registered = Registered(model)
    for _ in range(STEPS):
        registered.step()
        model()
    text = registered.told[-1]
    assert "not registered: model.draws (Random), model.numbers (Generator); add" in text
    assert text.partition("from step to step: ")[2].startswith("_, model.norms, model.count.number; ")


def test_what_is_registered_is_not_named() -> None:
    average, counter, numbers = nn.Linear(2, 2), Counter(), np.random.default_rng(1)
    loader: DataLoader[Any] = DataLoader(torch.rand(64, 2), shuffle=True, generator=torch.Generator())  # type: ignore[arg-type]
    data = DataStream(loader)
    it = Registered(average, counter, numbers, data)
    part = it.model.weight
    for _step in itertools.repeat(0, STEPS):
        it.step()
        next(data)
        numbers.random()
        counter.count += 1
        with torch.no_grad():
            average.weight.mul_(0.9), part.mul_(0.9)
    assert not it.told


def test_attributes_of_what_is_registered_are_not_named() -> None:
    best, other, memory = Counter(), Counter(), Memory()
    loader: DataLoader[Any] = DataLoader(torch.rand(64, 2))  # type: ignore[arg-type]
    loader.difficulty = 0  # type: ignore[attr-defined]
    it = Registered(best, memory, DataStream(loader))
    for number in itertools.count():
        it.step()
        if number > best.count:
            best.count = number
        if number > other.count:
            other.count = number
        if memory.calls < number:
            memory.calls = number
        if loader.difficulty < number:  # type: ignore[attr-defined]
            loader.difficulty = number  # type: ignore[attr-defined]
        if number == STEPS:
            break
    text = it.told[-1]
    assert "other.count" in text and "loader.difficulty" in text, text
    assert "best.count" not in text and "memory.calls" not in text, text


def test_kept_attributes_are_not_named() -> None:
    """Those of an object, what is made again among them, and variables of this file."""
    kept = SimpleNamespace(counter=None, n=0)
    it = Registered(KeptAttributes(kept, "counter", "n"), KeptAttributes(sys.modules[__name__], "counted"))
    for _step in itertools.repeat(0, STEPS):
        counter, n = kept.counter, kept.n
        it.step()
        if n % 2 == 0:
            counter = Meter()
        counter.update(1.0)
        count_here()
        n += 1
        kept.counter, kept.n = counter, n
    assert it.told == []


class Meter:
    def __init__(self) -> None:
        self.sum = 0.0

    def update(self, value: float) -> None:
        self.sum += value


counted = 0


def count_here() -> None:
    global counted
    counted = counted + 1


def test_a_framework_has_its_own_schedulers() -> None:
    it = Registered(frameworks=True)
    schedule = torch.optim.lr_scheduler.StepLR(it.optimizer, 2)
    for _step in itertools.repeat(0, STEPS):
        it.step()
        it.optimizer.step()
        schedule.step()
    assert not it.told


def test_variables_of_the_loop_and_of_its_caller() -> None:
    it = Registered()

    def step(hidden: torch.Tensor) -> torch.Tensor:
        it.step()
        return hidden + 1

    hidden, best, losses = torch.zeros(2), 1.0, []
    for _step in itertools.repeat(0, STEPS):
        hidden = step(hidden)
        losses.append(float(hidden.sum()))
        if losses[-1] < best:
            best = losses[-1]
    (text,) = it.told
    assert "carried from step to step: best, hidden, losses;" in text, text


def test_attributes_that_methods_carry() -> None:
    memory = Memory()
    it = Registered()
    for _step in itertools.repeat(0, STEPS):
        it.step()
        memory(torch.ones(2))
    (text,) = it.told
    assert "memory.held" in text and "memory.calls" in text and "newest" not in text, text


class Shadow:
    """An average by hand: the values of a dictionary are replaced."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * parameter.detach()


def test_averages_by_hand() -> None:
    it = Registered()
    shadow = Shadow(it.model)
    averages = [p.detach().clone() for p in it.model.parameters()]
    newest = [torch.zeros(1)]
    for _step in itertools.repeat(0, STEPS):
        it.step()
        shadow.update(it.model)
        for average, parameter in zip(averages, it.model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.1)
        newest[0] = torch.rand(1).mul_(2)
    (text,) = it.told
    assert "averages" in text and "shadow.shadow" in text and "newest" not in text, text


COUNT = 0


def test_numbers_that_other_functions_set() -> None:
    it = Registered()
    rounds, temporary = 0, 0

    def count() -> int:
        global COUNT
        nonlocal rounds
        COUNT += 1
        rounds += 1
        return temporary

    for _step in itertools.repeat(0, STEPS):
        it.step()
        temporary = COUNT
        count()
    text = it.told[-1]
    assert "COUNT" in text and "rounds" in text and "temporary" not in text, text


def test_numbers_of_registered_modules_are_protected() -> None:
    memory = Memory()
    it = Registered(memory)
    for _step in itertools.repeat(0, STEPS):
        it.step()
        memory(torch.ones(2))
    (text,) = it.told
    assert "memory.held" in text and "memory.calls" not in text, text


@pytest.mark.parametrize("make", [iter, itertools.cycle, lambda loader: (batch for batch in loader)])
def test_iterators(make: Callable[[Any], Any]) -> None:
    it = Registered()
    batches = make(list(range(100)))
    for _step in itertools.repeat(0, STEPS):
        it.step()
        next(batches)
    (text,) = it.told
    assert "asked for another element in each step: batches; give what they read to recovery.data()" in text, text


def test_a_loop_over_a_loader() -> None:
    it = Registered()
    loader: DataLoader[Any] = DataLoader(torch.rand(STEPS, 2))  # type: ignore[arg-type]
    for _batch in loader:
        it.step()
    (text,) = it.told
    assert "in each step: loader;" in text, text


def test_it_is_told_again_after_each_recovery() -> None:
    it = Registered()
    numbers = random.Random(1)
    for _step in itertools.repeat(0, 2 * STEPS):
        it.step(generation=len(it.told))
        numbers.random()
    assert len(it.told) >= 3
    assert all("numbers (Random)" in text for text in it.told)
    assert all("may not be what they would have been" in text for text in it.told[1:])


def test_a_loop_that_counts_along_is_refused() -> None:
    class Recovery:
        def steps(self, n: int) -> Any:
            return range(n)

    recovery = Recovery()
    for _step, _batch in zip(recovery.steps(2), "ab", strict=True):
        with pytest.raises(RegistrationError, match=r"test_unregistered\.py:\d+: `for \.\.\. in zip\("):
            check_loop(sys._getframe())
    for _step in recovery.steps(2):
        check_loop(sys._getframe())


def test_code_without_a_text_is_left_alone() -> None:
    it = Registered()
    numbers = random.Random(1)
    code = compile("for i in range(5):\n    it.step()\n    numbers.random()\n    n += i\n", "<cell>", "exec")
    exec(code, {"it": it, "numbers": numbers, "n": 0})
    (text,) = it.told  # found in this function
    assert "numbers (Random)" in text, text


def test_what_each_round_makes_again_is_not_carried() -> None:
    it = Registered()
    reseeded, scratch, made, meter = torch.Generator(), torch.zeros(2), None, None
    loss, metrics = torch.zeros(1), {}
    for step in itertools.repeat(0, STEPS):
        it.step()
        made = torch.Generator().manual_seed(len(it.told) + step)
        torch.rand(2, generator=made)
        reseeded.manual_seed(step)
        torch.rand(2, generator=reseeded)
        scratch.zero_()
        scratch += 1
        meter = Counter()
        meter.count += random.randint(1, 1 << 30)
        for micro in range(2):
            loss = it.model(torch.ones(1, 2)).sum() * micro
        if step % 2 == 0:
            metrics = {"loss": float(loss.detach())}
        if step % 2 == 0:
            assert metrics, meter
    assert not it.told, it.told


def test_variables_of_a_function_that_is_called_in_each_step() -> None:
    it = Registered()
    kept = random.Random(3)

    def step(generator: random.Random) -> None:
        own = torch.Generator().manual_seed(generator.randint(1, 1 << 30))
        it.step()
        torch.rand(2, generator=own)

    for _step in itertools.repeat(0, STEPS):
        step(kept)
    (text,) = it.told
    assert "(Random)" in text and "own" not in text, text


@dataclasses.dataclass(frozen=True)
class State:
    """Of a script that makes its state again."""

    count: int = 0
    name: str = "run"


def test_an_object_of_plain_values_that_is_made_again() -> None:
    it = Registered()
    state = State()
    for _step in itertools.repeat(0, STEPS):
        it.step()
        state = dataclasses.replace(state, count=state.count + 1)
    (text,) = it.told
    assert "carried from step to step: state.count;" in text, text


def test_what_begins_to_change_later_is_found_before_the_first_step_after_a_recovery() -> None:
    it = Registered()
    average = [torch.zeros(2)]
    for step in itertools.repeat(0, 40):
        it.step(generation=len(it.told) and 1)
        if it.unregistered._steps > 24:
            average[0].add_(1)
        step += 1
        if it.unregistered._steps == 34:
            it.step(generation=1)
            assert it.told and "average" in it.told[0], it.told
            assert "may not be what they would have been" in it.told[-1]
            return


def test_where_steps_are_calls_what_a_replacement_makes_again_is_not_named() -> None:
    it = Registered(calls=True)
    batches, numbers, count, best = iter(range(100)), random.Random(1), 0, 1.0
    average, loss = nn.Linear(2, 2), 0.5
    schedule = torch.optim.lr_scheduler.StepLR(it.optimizer, 2)

    def train_batch() -> float:
        it.step()
        return 0.3

    for number in range(2 * STEPS):
        count += number % 2
        loss = train_batch()
        next(batches), numbers.random()
        it.optimizer.step(), schedule.step()
        if count % 100 == 99:
            print(number)
        with torch.no_grad():
            average.weight.mul_(0.9)
        best = min(best, loss)
    text = " ".join(it.told)
    assert "changed from step to step, and not registered: average (Linear); add" in text, text
    assert "carried from step to step: best;" in text, text
    assert "iterators" not in text and "count" not in text, text


def test_the_loop_of_a_framework_is_no_script(tmp_path: Path) -> None:
    it = Registered(calls=True)
    file = tmp_path / "training.py"
    text = "def train(step, n):\n  total = {}\n  while n:\n    step()\n    total[n] = total.get(n + 1, 0)\n    n -= 1\n"
    file.write_text(text)
    for name, told in (("megatron.training.training", False), ("my_training", True)):
        module: dict[str, Any] = {"__name__": name}
        exec(compile(text, str(file), "exec"), module)
        module["train"](it.step, STEPS)
        assert bool(it.told) == told, it.told


def test_a_checkpoint_of_what_is_registered_is_not_named() -> None:
    it = Registered()
    it.optimizer = torch.optim.Adam(it.model.parameters())
    it.unregistered = Unregistered([it.model, it.optimizer], False, it.told.append)
    it.model(torch.ones(1, 2)).sum().backward()
    it.optimizer.step()
    checkpoint = {"model": it.model.state_dict(), "optimizer": it.optimizer.state_dict()}
    for _step in itertools.repeat(0, STEPS):
        it.step()
        it.optimizer.step()
        if it.unregistered is None:
            print(checkpoint)
    assert not it.told, it.told


def test_parameter_groups_in_which_deepspeed_has_put_its_own_parameters_are_not_named() -> None:
    it = Registered()
    groups = [{"params": list(it.model.parameters())}]
    it.optimizer = torch.optim.SGD(groups, lr=0.1)
    flat = torch.cat([p.detach().flatten() for p in it.model.parameters()]).requires_grad_()
    groups[0]["params"] = [flat]
    assert it.optimizer.param_groups[0]["params"][0] is flat
    it.unregistered = Unregistered([it.model, it.optimizer], False, it.told.append)
    for _step in itertools.repeat(0, STEPS):
        it.step()
        with torch.no_grad():
            flat.mul_(0.9)
    assert not it.told, (it.told, groups)


def test_numbers_that_a_script_keeps_on_the_wrapper_of_its_model_are_named() -> None:
    """Those on the model itself come back, those on a wrapper or on DeepSpeed's engine do not."""
    around = nn.parallel.DataParallel(nn.Sequential(Memory()))  # torch's own, as an engine is DeepSpeed's
    inside = around.module
    around.average = inside.average = inside[0].calls = 1.0
    it = Registered(around)
    for step in itertools.repeat(0.5, STEPS):
        it.step()
        around.average = 0.9 * around.average + step
        inside.average = 0.9 * inside.average + step
    assert "around.average" in it.told[-1] and "inside.average" not in it.told[-1], it.told


class Private(nn.Module):
    """Carries numbers that are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = self._calls = 0
        self.average = np.float64(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self._calls += 1
        self.average = 0.9 * self.average + x.sum().item()
        return self.linear(x)


def test_numbers_of_a_registered_module_that_are_not_kept_are_named() -> None:
    model = Private()
    it = Registered(model)
    for _ in range(STEPS):
        it.step()
        model(torch.ones(2))
        model.seen = getattr(model, "seen", 0) + 1
    assert "carried from step to step: _, model._calls, model.average;" in it.told[-1], it.told


def test_numbers_of_a_module_around_the_registered_one_are_named() -> None:
    inside = Private()
    around = nn.Sequential(inside)
    around.extra = Memory()
    it = Registered(inside)
    for _ in range(STEPS):
        it.step()
        around[0](around.extra(torch.ones(2)))
    assert "around.extra.calls" in it.told[-1] and "inside.calls" not in it.told[-1], it.told


def test_the_hooks_of_an_injected_fault_are_not_the_scripts() -> None:
    mine = Registered()
    for number in range(30):
        if number == 7:
            in_forward(mine.model, lambda: None)
            in_backward(mine.model, lambda: None)
            before_gather(mine.model, lambda: None)
        mine.step()
    assert [text for text in mine.told if "hooks of modules have changed" in text] == []


def test_hooks_that_come_or_go_amid_training_are_named_once() -> None:
    mine = Registered()
    first = mine.model.register_forward_hook(lambda *_: None)  # of the set-up
    for number in range(30):
        if number == 7:
            mine.model.register_full_backward_hook(lambda *_: None)
        if number == 13:
            first.remove()
        mine.step()
    told = [text for text in mine.told if "hooks of modules have changed" in text]
    assert len(told) == 2 and all("model (Linear)" in text and "test_unregistered.py" in text for text in told)


def test_hooks_that_a_library_puts_on_in_the_first_step_are_none_of_the_scripts() -> None:
    mine, theirs = Registered(), Registered(frameworks=True)
    for number in range(30):
        mine.step()
        theirs.step()
        if number == 0:
            mine.model.register_forward_hook(lambda *_: None)
        if number == 9:
            theirs.model.register_forward_hook(lambda *_: None)  # a framework's own
    assert not [text for text in (*mine.told, *theirs.told) if "hooks" in text]
