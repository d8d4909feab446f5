"""What Megatron-LM's loop keeps between two calls, with Megatron's own rerun state machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flashrecovery.errors import ConfigError, UnsupportedError
from flashrecovery.state import codec
from fr_megatron import trackers
from fr_megatron.capabilities import METRICS
from fr_megatron.lm import packed
from fr_megatron.lm.calls import ProtectedLoop, _Made
from fr_megatron.lm.layer_losses import LayerLosses
from fr_megatron.lm.state import NOTHING, LMLoop, LMLoopAdapter, TrainResult

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron
of_a_dictionary = pytest.mark.skipif(
    not METRICS.takes("dictionary"), reason="losses of experts are no dictionary (from megatron-core 0.18 on)"
)


@pytest.mark.parametrize("name", ["DISABLED", "VALIDATE_RESULTS", "REPORT_DETERMINISM_STATS"])
def test_an_evaluation_that_is_cut_short_leaves_results_validated_as_before(name: str) -> None:
    """While it computes, Megatron validates none. Whether it does decides which rank communicates after a step."""
    from megatron.core.rerun_state_machine import RerunMode, RerunState, RerunStateMachine

    mode = RerunMode[name]
    machine = RerunStateMachine(mode=mode)
    loop = LMLoop(SimpleNamespace(consumed_valid_samples=8), SimpleNamespace(_timers={}), machine)
    saved = codec.loads(codec.dumps(loop.save()))  # also in a replacement
    machine.set_mode(RerunMode.DISABLED)
    machine.state = RerunState.INITIAL_RUN
    loop.load(saved)
    assert machine.get_mode() is mode
    assert machine.state is RerunState.NOT_RUNNING_YET


def test_a_replacement_ends_where_the_loop_has_decided_to() -> None:
    """Before its last iteration: ``--exit-interval``, a time limit, a signal."""
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    def loop() -> LMLoop:
        machine = RerunStateMachine(mode=RerunMode.DISABLED)
        return LMLoop(SimpleNamespace(consumed_valid_samples=8), SimpleNamespace(_timers={}), machine)

    first, replacement = loop(), loop()
    before, changes = first.save(), first.changes
    first.decided(True)
    assert first.changes > changes  # so that it is kept
    replacement.restored(codec.loads(codec.dumps(first.save())))
    assert not replacement.exits  # the job went on after all earlier calls
    replacement.resume()
    assert replacement.exits
    first.load(before)  # the call is made again
    assert not first.exits


@pytest.mark.parametrize("cut", [False, True])
def test_an_evaluation_that_is_cut_short_leaves_the_reduction_as_before(cut: bool) -> None:
    """The interleaved schedule puts the functions aside while it only goes forward."""
    from fr_megatron.lm.calls import kept_functions

    config = SimpleNamespace(grad_sync_func=[print], param_sync_func=None)

    def evaluate() -> None:
        with kept_functions(config):
            kept, config.grad_sync_func = config.grad_sync_func, None
            if cut:
                raise InterruptedError
            config.grad_sync_func = kept

    if cut:
        with pytest.raises(InterruptedError):
            evaluate()
    else:
        evaluate()
    assert config.grad_sync_func == [print] and config.param_sync_func is None
    with kept_functions(None):  # a loop without a model
        pass


@pytest.mark.parametrize(("iteration", "asked"), [(1, True), (2, False), (3, True), (4, False)])
def test_a_log_that_is_not_due_does_not_communicate(
    iteration: int, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no protected call: a rank that is replaced goes through it alone. megatron-core 0.16 reduces the learning
    rate in all of them."""
    reduced: list[float] = []
    module = SimpleNamespace()

    def reduce_max(rate: float) -> float:
        reduced.append(rate)
        return rate

    def training_log(losses: Any, totals: Any, rate: float, number: int, *_: Any, **__: Any) -> float:
        found: float = module.reduce_max_stat_across_model_parallel_group(rate)
        return found

    module.reduce_max_stat_across_model_parallel_group = reduce_max
    monkeypatch.setitem(sys.modules, "megatron.training.training", module)
    settings = SimpleNamespace(log_interval=3, num_experts=None)
    monkeypatch.setattr(ProtectedLoop, "_args", settings)
    loop = ProtectedLoop.__new__(ProtectedLoop)
    loop._elastic = loop._layouts = None
    log: Any = SimpleNamespace(
        logging=lambda _: None, summed=lambda *_: None, printed=lambda _: None, result=NOTHING, made_again=False
    )
    loop._made = _Made("model", 0, 0, log)
    loop._original, loop._started = {"training_log": training_log}, False
    rest = 1.0, True, 0, None, None, None, None
    assert loop.training_log({}, {}, 0.25, iteration, *rest, is_first_iteration=iteration == 1) == 0.25
    assert bool(reduced) is asked
    assert module.reduce_max_stat_across_model_parallel_group is reduce_max


@pytest.mark.parametrize("printed", [False, True], ids=["summed-up", "printed"])
def test_a_step_that_is_made_again_in_another_size_is_logged_with_its_last_loss(printed: bool) -> None:
    """The loop has got its first one, and has added it to what it prints some iterations later."""
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    machine = RerunStateMachine(mode=RerunMode.DISABLED)
    loop = LMLoop(SimpleNamespace(consumed_valid_samples=8), SimpleNamespace(_timers={}), machine)
    totals: dict[str, Any] = {"lm loss": torch.tensor([1.0])}
    loop.logging(totals)

    def log() -> None:
        add(totals)
        loop.printed(4) if printed else loop.summed(4, add)

    def add(into: dict[str, Any]) -> None:
        into["lm loss"] = into["lm loss"] + losses["lm loss"]

    def step(loss: float) -> Any:
        return loop.finished(4, ({"lm loss": torch.tensor([loss])}, False, False, False, 0, None, None, 0))[0]

    before_step = loop.save()
    losses = step(2.0)
    before_log = loop.save()
    log()
    before_next = loop.save()
    loop.load(before_step)
    step(3.0)
    assert totals["lm loss"] == 1.0  # as it is kept for others
    if printed:
        loop.load(before_log)
        log()
    loop.load(before_next)
    assert losses["lm loss"] == 3.0 and totals["lm loss"] == 4.0


@pytest.mark.parametrize("printed", [False, True], ids=["summed-up", "printed"])
def test_a_step_that_is_made_again_is_logged_with_its_last_norms(
    printed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gradients and parameters. The loop has the first ones in its own variables."""
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    logged: list[tuple[Any, ...]] = []

    def training_log(losses: Any, totals: Any, *given: Any, **_: Any) -> bool:
        totals["lm loss"] = losses["lm loss"]
        logged.append(given)
        return True

    def body(kind: str, function: Any, skipped: Any) -> Any:
        assert kind == "log"
        bodies.append(function)
        return function()

    bodies: list[Any] = []
    monkeypatch.setitem(sys.modules, "megatron.training.training", SimpleNamespace())
    monkeypatch.setattr(ProtectedLoop, "_args", SimpleNamespace(log_interval=1 if printed else 3, num_experts=None))
    protected = ProtectedLoop.__new__(ProtectedLoop)
    protected._elastic = protected._layouts = None
    machine = RerunStateMachine(mode=RerunMode.DISABLED)
    loop = LMLoop(SimpleNamespace(consumed_valid_samples=8), SimpleNamespace(_timers={}), machine)
    protected._made = _Made("model", 0, 0, loop)
    protected._original, protected._started = {"training_log": training_log}, True
    monkeypatch.setattr(protected, "_call", body)

    def step(norm: float, zeros: int, of_parameters: float) -> Any:
        losses = {"lm loss": torch.tensor([norm])}
        return loop.finished(4, (losses, False, False, False, 0, norm, zeros, 0), of_parameters)

    before = loop.save()
    losses, skipped, _, _, _, norm, zeros, rest = step(2.0, 3, 5.0)
    seen = protected.calc_params_l2_norm([])
    protected.training_log(losses, {}, 0.1, 5, 1.0, True, skipped, norm, seen, zeros, rest)
    loop.load(before)
    step(2.5, 4, 6.0)
    if printed:
        bodies[0]()
    assert logged == [(0.1, 5, 1.0, True, 0, 2.0, 5.0, 3, 0), (0.1, 5, 1.0, True, 0, 2.5, 6.0, 4, 0)]
    replacement = LMLoop(SimpleNamespace(consumed_valid_samples=8), SimpleNamespace(_timers={}), machine)
    replacement.restored(codec.loads(codec.dumps(loop.save())))
    replacement.resume()
    assert replacement.result.params_norm == 6.0


def test_the_norm_of_the_parameters_is_a_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop asks for it outside of all calls, where a rank that is replaced would reduce alone."""
    asked: list[Any] = []

    def norm(model: Any) -> float:
        asked.append(model)
        return 7.0

    protected = ProtectedLoop.__new__(ProtectedLoop)
    protected._original, protected._started = {"calc_params_l2_norm": norm}, False
    assert protected.calc_params_l2_norm("before training") == 7.0
    protected._started = True
    monkeypatch.setattr(ProtectedLoop, "_args", SimpleNamespace(log_params_norm=True, curr_iteration=0))
    monkeypatch.setattr(ProtectedLoop, "_report_tokens", lambda _: None)
    protected._elastic = protected._layouts = None
    machine = SimpleNamespace(mode=None)
    protected._made = _Made("model", 0, 0, LMLoop(SimpleNamespace(), SimpleNamespace(_timers={}), machine))
    inside: list[Any] = []

    def call(kind: str, body: Any, skipped: Any) -> Any:
        asked.clear()
        found = body()
        inside.extend(asked)
        return found

    monkeypatch.setattr(protected, "_call", call)
    protected._original["train_step"] = lambda *_, **__: ({}, False, False, False, 0, 1.0, None, 0)
    protected.train_step(None, [])
    assert inside == ["model"] and protected.calc_params_l2_norm("model") == 7.0 and asked == ["model"]
    monkeypatch.setattr(ProtectedLoop, "_args", SimpleNamespace(log_params_norm=False, curr_iteration=1))
    protected.train_step(None, [])
    assert not asked and protected.calc_params_l2_norm("model") is None


def _protected(monkeypatch: pytest.MonkeyPatch, **original: Any) -> ProtectedLoop:
    """One that is in its loop, without elastic jobs."""
    protected = ProtectedLoop.__new__(ProtectedLoop)
    protected._original, protected._started = original, True
    protected._elastic = protected._layouts = None
    loop = LMLoop(SimpleNamespace(), SimpleNamespace(_timers={}), SimpleNamespace(mode=None))
    protected._made = _Made("model", 0, 0, loop)
    monkeypatch.setattr(ProtectedLoop, "_args", SimpleNamespace(log_params_norm=False, curr_iteration=0))
    monkeypatch.setattr(ProtectedLoop, "_report_tokens", lambda _: None)
    return protected


def test_counts_of_packed_samples_are_a_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.18 on the loop reduces them between the step and its log, where no call is; a step that is made again
    would count twice."""
    training: Any = ModuleType("megatron.training.training")
    training._seqlen_stats_in_iteration, training._seqlen_stats_active = None, False
    for name, module in (("megatron.training", ModuleType("megatron.training")), (training.__name__, training)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(packed, "PACKED", SimpleNamespace(way="there"))
    attempts: list[str] = []

    def train_step(*_: Any, **__: Any) -> Any:
        attempts.append("attempt")
        if training._seqlen_stats_in_iteration is None:
            training._seqlen_stats_in_iteration = torch.zeros(2)
        training._seqlen_stats_in_iteration += torch.tensor([5.0, 25.0])
        training._seqlen_stats_active = True
        if len(attempts) == 1:
            raise InterruptedError
        return {}, False, False, False, 0, 1.0, None, 0

    def consume() -> tuple[float | None, float | None]:
        if not training._seqlen_stats_active:
            return None, None
        tokens, squares = training._seqlen_stats_in_iteration.tolist()
        training._seqlen_stats_in_iteration.zero_()
        training._seqlen_stats_active = False
        return tokens, squares

    protected = _protected(monkeypatch, train_step=train_step, consume_seqlen_stats_in_iteration=consume)
    monkeypatch.setattr(protected, "_call", lambda kind, body, skipped: body())
    with pytest.raises(InterruptedError):
        protected.train_step(None, [])
    protected.train_step(None, [])
    assert consume() == (None, None), "it was reduced within the step"
    assert protected.consume_seqlen_stats_in_iteration() == (5.0, 25.0)
    saved = codec.loads(codec.dumps(TrainResult.of(({}, 0), None, (5.0, 25.0)).packed))
    assert tuple(saved) == (5.0, 25.0)


def test_new_timeouts_of_the_groups_are_set_by_one_call_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with a barrier, which a replacement that comes by alone leaves out."""
    said: list[str] = []
    monkeypatch.setattr(torch.distributed, "barrier", lambda *_: said.append("barrier"))

    def update(timeout: int, pg: Any = None) -> None:
        torch.distributed.barrier(pg)
        said.append(f"set {timeout}")

    protected = _protected(monkeypatch, update_pg_timeout=update)
    monkeypatch.setattr(protected, "_call", lambda kind, body, skipped: (said.append(kind), body(), skipped()))
    protected.update_pg_timeout(7)
    assert said == ["timeout", "barrier", "set 7", "set 7"]


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("hybrid_context_parallel", "--hybrid-context-parallel"),
        ("optimizer_cuda_graph", "--optimizer-cuda-graph"),
        ("moe_expert_rank_capacity_factor", "--moe-expert-rank-capacity-factor"),
        ("moe_routing_trace_path", "--moe-routing-trace-path"),
        ("perform_rl_step", "--perform-rl-step"),
    ],
)
def test_what_of_later_loops_is_outside_of_calls_is_refused(name: str, flag: str) -> None:
    from fr_megatron.lm.arguments import check_protected

    check_protected(argparse.Namespace(**{name: None}))
    with pytest.raises(UnsupportedError, match=flag):
        check_protected(argparse.Namespace(**{name: 1}))


def test_hooks_that_gather_are_taken_away_as_this_release_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By position, too: 0.19 has the optimizer in second place."""
    taken: list[Any] = []

    def before(model_chunks: Any, param_sync: bool = True) -> None:
        taken.append((model_chunks, param_sync))

    def now(model_chunks: Any, optimizer: Any = None, param_sync: bool = True) -> None:
        taken.append((model_chunks, param_sync))

    for disable, given in ((before, ([], False)), (now, ([], "optimizer", False))):
        _protected(monkeypatch, disable_forward_pre_hook=disable).disable_forward_pre_hook(*given)
    assert taken == [([], False)] * 2


def test_checkpoints_that_are_written_beside_training_are_refused() -> None:
    from fr_megatron.lm.arguments import check_protected

    check_protected(argparse.Namespace(async_save=False))
    check_protected(argparse.Namespace())
    with pytest.raises(UnsupportedError, match="--async-save"):
        check_protected(argparse.Namespace(async_save=True))


def test_what_communicates_after_the_last_iteration_is_refused() -> None:
    from fr_megatron.lm.arguments import check_protected

    with pytest.raises(UnsupportedError, match=r"--async-save .*; --log-energy"):
        check_protected(argparse.Namespace(async_save=True, log_energy=True))


@pytest.mark.parametrize(
    ("load", "save", "step", "refused"),
    [
        ("here", "here", None, True),
        ("here", "link/../here", None, True),
        ("here", "link", None, True),
        ("here", "here", 4, False),
        ("here", "there", None, False),
        ("here", None, None, False),
        (None, "here", None, False),
    ],
)
def test_arguments_from_a_checkpoint_that_is_not_the_launchs(
    load: str | None, save: str | None, step: int | None, refused: bool, tmp_path: Path
) -> None:
    from fr_megatron.lm.arguments import check_protected, checked_arguments

    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("here")
    places = {name: place and str(tmp_path / place) for name, place in (("load", load), ("save", save))}
    check_protected(argparse.Namespace(**places, ckpt_step=step, use_checkpoint_args=False))
    args = argparse.Namespace(**places, ckpt_step=step, use_checkpoint_args=True)
    if refused:
        with pytest.raises(UnsupportedError, match="--use-checkpoint-args with --load and --save of the same"):
            check_protected(args)
    else:
        check_protected(args)
    read: list[str] = []  # without the flag, by args_defaults of the script

    def load_args_from_checkpoint(args: Any, load_arg: str = "load", checkpointing_context: Any = None) -> Any:
        read.append(load_arg)
        return args

    without_flag = argparse.Namespace(**places, ckpt_step=step, use_checkpoint_args=False)
    checked = checked_arguments(load_args_from_checkpoint)
    assert checked(without_flag, load_arg="pretrained_checkpoint") is without_flag
    if refused:
        with pytest.raises(UnsupportedError, match="--use-checkpoint-args with --load and --save of the same"):
            checked(without_flag)
    else:
        assert checked(without_flag, checkpointing_context={}) is without_flag
    assert read == ["pretrained_checkpoint", *["load"] * (not refused)]


def test_a_log_that_is_made_again_has_all_that_its_step_has_found() -> None:
    """In a process that has skipped the step the loop has got nothing of it."""
    found = TrainResult.of(({}, True, False, False, 0, 1.5, 7, torch.tensor(3.25)), 2.5)
    rate, iteration, scale, memory = head = (0.1, 4, 8.0, False)
    _, skipped, *_, norm, zeros, logit = NOTHING.returned()
    given = *head, skipped, norm, None, zeros, logit
    assert found.logged(given) == (rate, iteration, scale, memory, 1, 1.5, 2.5, 7, 3.25)
    assert found.logged(given[:8]) == (*head, 1, 1.5, 2.5, 7)  # of a Megatron-LM that logs none
    assert found.logged((*given, "groups")) == (*head, 1, 1.5, 2.5, 7, 3.25, "groups")
    short = TrainResult.of(({}, False, False, False, 0, 1.5, 7))
    assert short.logged(given) == (*head, 0, 1.5, None, 7, logit)
    assert NOTHING.logged(given) == given


@pytest.mark.parametrize("elastic", [False, True])
def test_a_step_that_is_made_again_sees_the_loop_where_it_was(elastic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no log comes between two steps, a rank that was ahead makes one again when its loop has gone on to the
    next: with another iteration, and, where the batch size ramps up, another number of micro-batches. A replacement's
    loop is where it has come to itself."""
    from megatron.core import num_microbatches_calculator as module
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    calculator = module.ConstantNumMicroBatchesCalculator(24, 2, 2, False, 0)
    monkeypatch.setattr(module, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", calculator)

    def loop(iteration: int) -> LMLoop:
        args = SimpleNamespace(
            consumed_valid_samples=0, curr_iteration=iteration, consumed_train_samples=24 * iteration
        )
        losses = LayerLosses(args)
        of_size = SimpleNamespace(positions=list, set_positions=lambda _: None, losses=losses) if elastic else None
        machine = RerunStateMachine(mode=RerunMode.DISABLED)
        return LMLoop(args, SimpleNamespace(_timers={}), machine, of_size)  # type: ignore[arg-type]

    def seen(of: LMLoop) -> tuple[int, int, int]:
        return of._args.curr_iteration, of._args.consumed_train_samples, calculator.num_micro_batches

    ahead = loop(4)
    step = ahead.save()
    ahead._args.curr_iteration, ahead._args.consumed_train_samples, calculator.num_micro_batches = 5, 120, 7
    following = ahead.save()
    ahead.load(step)
    assert seen(ahead) == (4, 96, 7 if elastic else 6)
    ahead.load(following)
    assert seen(ahead) == (5, 120, 7)
    replacement = loop(4)
    replacement.restored(codec.loads(codec.dumps(step)))
    replacement.resume()
    assert seen(replacement) == (4, 96, 7)


@pytest.mark.parametrize("back", ["to the step", "to the log"])
def test_a_log_is_of_its_step_as_it_was_made_last(back: str) -> None:
    """A job that goes back over both makes the step again, perhaps in another size."""

    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    args = SimpleNamespace(consumed_valid_samples=0, curr_iteration=4, consumed_train_samples=96)
    losses = LayerLosses(args)
    elastic: Any = SimpleNamespace(positions=list, set_positions=lambda _: None, losses=losses)
    loop = LMLoop(args, SimpleNamespace(_timers={}), RerunStateMachine(mode=RerunMode.DISABLED), elastic)

    def step(size: int) -> None:
        losses.adopt({"z_loss": {"values": torch.tensor([float(size)])}}, size)
        loop.finished(4, ({}, 0, False, False, 0, 1.0 / size, 0))

    loop.kind = "train"
    before = loop.save()
    step(3)
    loop.kind = "log"
    log = loop.save()
    losses.adopt({}, 3)  # it has been made
    size = 6 if back == "to the step" else 3
    if back == "to the step":
        loop.load(before)
        assert not losses.entries
        step(size)
    loop.load(log)
    assert losses.micro_batches == size and losses.entries["z_loss"]["values"].tolist() == [size]
    assert loop.result.rest[3] == 1.0 / size


@pytest.mark.parametrize("other", ["iteration", "samples", "kind"])
def test_a_script_that_has_come_elsewhere_is_refused(other: str) -> None:
    """It was begun with another checkpoint of Megatron's, or does something at other intervals: the calls that it
    skips are not those that the state has behind it."""
    first, launched = _loop(4, 96), _loop(*{"iteration": (5, 96), "samples": (4, 100)}.get(other, (4, 96)))
    first.kind, launched.kind = "log", "train" if other == "kind" else "log"
    launched.restored(codec.loads(codec.dumps(first.save())))
    with pytest.raises(ConfigError, match="another place in Megatron-LM's loop"):
        launched.resume()


@pytest.mark.parametrize("exits", [True, False])
def test_a_loop_that_has_ended_ends_in_a_replacement_also_if_calls_came_after_it(exits: bool) -> None:
    """With ``--overlap-param-gather`` parameters are gathered at the end."""
    dead = _loop(4, 96)
    dead.decided(exits)
    dead.kind = "gather"
    state = codec.loads(codec.dumps(dead.save()))
    replacement = _loop(3, 72)
    assert not replacement.has_ended()  # nothing is known yet
    replacement.restored(state)
    assert not replacement.has_ended()  # an iteration before
    vars(replacement._args).update(curr_iteration=4, consumed_train_samples=96)
    assert replacement.has_ended() is exits
    replacement.kind = "gather"
    replacement.resume()
    assert replacement.exits is exits


def _loop(iteration: int, samples: int) -> LMLoop:
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    args = SimpleNamespace(consumed_valid_samples=0, curr_iteration=iteration, consumed_train_samples=samples)
    machine = RerunStateMachine(mode=RerunMode.DISABLED)
    return LMLoop(args, SimpleNamespace(_timers={}), machine, far_back=True)


class Trained:
    """The loop of a script that logs the mean of two iterations, summed up outside of calls in between, whose losses
    are ``factor`` times the iteration's number, and what it does is made by calls that can be made again."""

    def __init__(self) -> None:
        self.loop = _loop(0, 0)
        self.totals: dict[str, Any] = {}
        self.factor = 1.0
        self.places: list[tuple[Any, Any]] = []
        self.ends: list[Any] = []
        self.printed: list[tuple[int, float]] = []

    def call(self, kind: str, body: Any) -> None:
        self.loop.kind = kind
        self.places.append((body, self.loop.place()))
        body()
        self.ends.append(codec.dumps(self.loop.save()))

    def run(self, iterations: int) -> None:
        for number in range(iterations):
            self.loop._args.curr_iteration = number
            losses: dict[str, Any] = {}

            def step(number: int = number, losses: dict[str, Any] = losses) -> None:
                found = {"lm loss": torch.tensor([self.factor * number])}
                handed = self.loop.finished(number, (found, False, False, False, 0, None, None, 0))[0]
                losses["of"] = handed

            self.call("train", step)
            self.loop._args.consumed_train_samples += 24

            def add(totals: dict[str, Any], losses: dict[str, Any] = losses) -> None:
                totals["lm loss"] = totals.get("lm loss", 0) + losses["of"]["lm loss"]

            self.loop.logging(self.totals)
            if number % 2 == 0:
                add(self.totals)
                self.loop.summed(number, add)
                continue

            def log(number: int = number, add: Any = add) -> None:
                add(self.totals)
                self.printed.append((number, float(self.totals["lm loss"])))
                self.totals["lm loss"] = torch.zeros(1)
                self.loop.printed(number)

            self.call("log", log)

    def again(self, first: int) -> None:
        for number, (body, place) in enumerate(self.places[first:], first):
            self.loop.go_back(place, restored=number == first)
            body()


TWICE = [(1, 2.0), (3, 10.0), (5, 18.0), (7, 26.0), (9, 34.0)]


@pytest.mark.parametrize(
    ("version", "printed"),
    [
        (1, [(1, 0.0 + 2.0), *TWICE[1:]]),  # behind a step whose loss was summed up outside of calls since
        (2, [(1, 0.0 + 1.0), *TWICE[1:]]),  # before a log
        (3, TWICE[1:]),
        (4, [(3, 2.0 + 6.0), *TWICE[2:]]),
        (14, [(9, 8.0 + 9.0)]),
    ],
)
def test_calls_that_lie_far_back_are_made_again(version: int, printed: list[tuple[int, float]]) -> None:
    """From the end of call ``version - 1``; with other losses, as in another size."""
    trained = Trained()
    trained.run(10)
    assert trained.printed == [(1, 1.0), (3, 5.0), (5, 9.0), (7, 13.0), (9, 17.0)]
    trained.factor = 2.0
    for back in (1, version):  # what the loop has got by the second time is not what the state has behind it
        trained.printed.clear()
        trained.loop.restored(codec.loads(trained.ends[back - 1]))
        trained.again(back)
    assert trained.printed == printed
    args = trained.loop._args
    assert (args.curr_iteration, args.consumed_train_samples, trained.loop.kind) == (9, 240, "log")
    assert trained.loop.made_again


def test_its_calls_can_be_made_again_from_any_version_on() -> None:
    from flashrecovery.adapter.loop import LoopAdapter

    assert LMLoopAdapter(_loop(0, 0)).makes_any_call_again()
    other = SimpleNamespace(save=None, load=None, restored=None, resume=None)
    assert not LoopAdapter(other).makes_any_call_again()  # type: ignore[arg-type]


def test_losses_are_kept_as_far_as_they_may_be_logged_again() -> None:
    trained = Trained()
    trained.run(10)
    assert sorted(trained.loop._losses) == list(range(10))
    trained.loop.forget(trained.places[9][1])  # that of iteration 6
    assert sorted(trained.loop._losses) == [5, 6, 7, 8, 9]
    plain = LMLoop(trained.loop._args, SimpleNamespace(_timers={}), trained.loop._rerun)
    for number in range(10):
        plain.handed(number, ({}, 0))
    assert sorted(plain._losses) == [6, 7, 8, 9]


@pytest.mark.parametrize("stages", [1, 2])
def test_beyond_the_launch_pipeline_stages_have_not_been_tried(stages: int) -> None:
    from fr_megatron.lm.elastic_loop import ElasticLoop

    elastic = object.__new__(ElasticLoop)
    elastic._args = SimpleNamespace(pipeline_model_parallel_size=stages)
    loop = LMLoop(SimpleNamespace(), SimpleNamespace(_timers={}), SimpleNamespace(), elastic)
    assert ("--pipeline-model-parallel-size 2" in LMLoopAdapter(loop).only_as_launched(3)) == (stages == 2)


class Exits:
    """``checkpoint_and_decide_exit`` of a rank whose Megatron ends when ``over``, or when the time limit says so, and
    then saves. ``others``: what the loops of other ranks know about each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, due: bool = True, **settings: Any) -> None:
        from fr_megatron.lm import calls

        self.over, self.others, self.asked, self.saved = False, [], 0, []  # type: ignore[var-annotated]
        self.bodies: list[Any] = []
        self.settings = SimpleNamespace(save_interval=None, non_persistent_save_interval=None, exit_interval=None)
        self.settings.exit_signal_handler, self.settings.exit_duration_in_mins = False, 1 if due else None
        self.training = SimpleNamespace(get_args=lambda: self.settings)
        monkeypatch.setitem(sys.modules, "megatron.training.training", self.training)
        monkeypatch.setattr(ProtectedLoop, "_args", self.settings)
        monkeypatch.setattr(calls.dist, "get_world_size", lambda: 1 + len(self.others))
        monkeypatch.setattr(calls.dist, "all_gather_object", self._gather)
        self.of = ProtectedLoop.__new__(ProtectedLoop)
        self.of._made = _Made("model", 0, 0, _loop(4, 96))
        self.of._recovery = SimpleNamespace(has_checkpoints=True, generation=0)  # type: ignore[assignment]
        self.of._original = {"checkpoint_and_decide_exit": self._original}
        monkeypatch.setattr(self.of, "_call", self._call)

    def _gather(self, found: list[Any], mine: Any) -> None:
        self.asked += 1
        found[:] = [mine, *self.others]

    def _original(self, _model: Any, _optimizer: Any, _scheduler: Any, iteration: int) -> bool:
        args = self.training.get_args()
        exits = bool(args.exit_signal_handler and self.over)
        if not exits and args.exit_duration_in_mins:
            exits = self.over or args.exit_duration_in_mins < 0
        elif not exits and args.exit_duration_in_mins is None and not self.settings.exit_duration_in_mins:
            exits = self.over
        if exits:
            self.saved.append(iteration)
        return exits

    def _call(self, kind: str, body: Any, skipped: Any) -> Any:
        self.bodies.append(body)
        return body()

    def __call__(self, iteration: int) -> bool:
        return bool(self.of.checkpoint_and_decide_exit(None, None, None, iteration))


def test_a_time_limit_that_comes_while_calls_are_made_again_counts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ranks' loops have gone on after that call; those of replacements are in it. And nothing is saved there,
    which each of the calls would do until they have caught up."""
    exits = Exits(monkeypatch)
    exits.others = [None]
    assert not exits(5) and not exits.asked
    exits.of._recovery.generation, exits.over = 1, True  # type: ignore[misc]
    assert not exits.bodies[0]() and not exits.of._training.loop.exits and exits.saved == []
    exits.others = [False]  # a replacement, which others have left behind
    assert not exits(6) and exits.saved == []
    exits.others = [None]
    assert exits(7) and exits.saved == [7] and exits.of._training.loop.exits


@pytest.mark.parametrize("mine", [True, False])
@pytest.mark.parametrize("handler", [True, False])
def test_a_loop_that_has_ended_ends_again(mine: bool, handler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a signal that only the dead rank had got, or a time that is not over in another process."""
    exits = Exits(monkeypatch)
    exits.settings.exit_signal_handler, exits.others = handler, [None]
    exits.over = mine
    assert exits(5) is mine
    exits.over, exits.of._recovery.generation = False, 1  # type: ignore[misc]
    if mine:
        assert exits.bodies[0]() and exits.of._training.loop.exits
    else:
        exits.others = [True]  # this one is a replacement
        assert exits(5) and exits.of._training.loop.exits
    assert exits.saved[-1] == 5, "the end is saved, as the calls before it have been again"
    assert (exits.settings.exit_signal_handler, exits.settings.exit_duration_in_mins) == (handler, 1)
    assert exits.training.get_args() is exits.settings


def test_an_end_that_no_call_decides_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a transition of phases. The others may be elsewhere: one that is replaced goes by it alone."""
    exits = Exits(monkeypatch, due=False)
    exits.of._recovery.generation, exits.over = 1, True  # type: ignore[misc]
    assert exits(5) and not exits.asked and exits.of._training.loop.exits


class Chunk:
    """Of a model, with hooks that gather parameters."""

    def __init__(self) -> None:
        self.remove_forward_pre_hook_handles: dict[str, int] = {}
        self.config: Any = SimpleNamespace(param_sync_func=None, grad_sync_func="reduce")

    def enable_forward_pre_hook(self) -> None:
        assert not self.remove_forward_pre_hook_handles
        self.remove_forward_pre_hook_handles["hook"] = 1

    def disable_forward_pre_hook(self, param_sync: bool) -> None:
        assert not param_sync
        self.remove_forward_pre_hook_handles.clear()


def test_a_call_that_is_made_again_has_hooks_that_gather_as_it_had() -> None:
    """An evaluation has none, and the loop gives them back after it; a rank that has come that far goes back to it with
    one that has not, and with a replacement, which has none."""
    chunk, machine = Chunk(), _loop(0, 0)._rerun
    args = SimpleNamespace(consumed_valid_samples=0, curr_iteration=0, consumed_train_samples=0)
    loop = LMLoop(args, SimpleNamespace(_timers={}), machine, chunks=[chunk])
    evaluation = loop.save()
    chunk.enable_forward_pre_hook()
    chunk.config.param_sync_func = print  # after the first iteration; an interleaved schedule gathers with it
    following = loop.save()
    for saved in (evaluation, following, evaluation):
        loop.load(saved)
        assert bool(chunk.remove_forward_pre_hook_handles) is (saved is following)
        assert chunk.config.param_sync_func is (print if saved is following else None)
    loop.load(following)
    in_local_state = codec.loads(codec.dumps(LMLoopAdapter(loop).capture_rank()))
    loop.load(evaluation)
    loop.restored(in_local_state)
    loop.resume()  # in a replacement: its script has come there itself
    assert not chunk.remove_forward_pre_hook_handles and chunk.config.param_sync_func is None
    del evaluation["hooked"]  # of a version before this
    chunk.enable_forward_pre_hook()
    loop.load(evaluation)
    assert chunk.remove_forward_pre_hook_handles


def test_hooks_that_gather_are_as_they_were_before_a_call_that_lies_far_back() -> None:
    """The loop takes them away for its first iteration, and for each evaluation, in a call, and gives them back outside
    of calls."""

    chunk, machine = Chunk(), _loop(0, 0)._rerun
    args = SimpleNamespace(consumed_valid_samples=0, curr_iteration=0, consumed_train_samples=0)
    loop = LMLoop(args, SimpleNamespace(_timers={}), machine, far_back=True, chunks=[chunk])
    loop.restored(loop.save())
    first = loop.place()
    chunk.enable_forward_pre_hook()
    chunk.config.param_sync_func = "gather"
    second = loop.place()
    for place, restored in ((first, True), (second, False), (first, False)):
        loop.go_back(place, restored=restored)
        assert bool(chunk.remove_forward_pre_hook_handles) is (place is second)
        assert chunk.config.param_sync_func == ("gather" if place is second else None)
        assert chunk.config.grad_sync_func == "reduce"


@of_a_dictionary
def test_what_an_evaluation_has_summed_up_of_experts_is_not_logged_by_a_step_that_is_made_again() -> None:
    """The loop clears it, outside of calls; a log is made of what its step has summed up."""
    from megatron.core.transformer.moe import moe_utils

    entries = moe_utils.get_moe_layer_wise_logging_tracker()
    loop = _loop(3, 72)
    places = {}
    for loop.kind in ("train", "log"):
        places[loop.kind] = loop.place()
    try:
        entries["load_balancing_loss"] = {"values": torch.ones(2), "reduce_group": None, "avg_group": None}
        loop.go_back(places["log"], restored=False)
        assert entries["load_balancing_loss"]["values"].tolist() == [1, 1]
        loop.go_back(places["train"], restored=False)
        assert entries["load_balancing_loss"]["values"].tolist() == [0, 0]
    finally:
        entries.clear()


@of_a_dictionary
def test_a_rank_of_another_size_logs_what_a_step_has_summed_up_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks keep the same of it, so it does not matter whose they get, nor what their layers have summed up since:
    they are in the middle of another step, or have computed nothing."""
    from megatron.core.transformer.moe import moe_utils

    from fr_megatron.lm import layer_losses

    def elastic_loop() -> LMLoop:
        loop = _loop(3, 72)
        losses = LayerLosses(SimpleNamespace(num_experts=4))
        loop.elastic = loop._positions = SimpleNamespace(  # type: ignore[assignment]
            positions=list, set_positions=lambda _: None, losses=losses
        )
        return loop

    entries = moe_utils.get_moe_layer_wise_logging_tracker()
    monkeypatch.setattr(layer_losses, "calculator", lambda: SimpleNamespace(get=lambda: 3))
    settled = {"z_loss": {"values": torch.tensor([0.5, 2.0]), "reduce_group": None, "avg_group": None}}
    monkeypatch.setattr(trackers, "settle", lambda: settled)
    one, other = elastic_loop(), elastic_loop()
    assert one.elastic is not None and other.elastic is not None
    one.elastic.losses.stepped()
    kept = codec.dumps(one.save())
    try:
        entries["z_loss"] = {"values": torch.full((2,), 7.0), "reduce_group": "other", "avg_group": None}
        other.restored(codec.loads(kept))
        other.resume()
        assert entries["z_loss"]["values"].tolist() == [0.5, 2.0] and entries["z_loss"]["reduce_group"] is None
        assert other.elastic.losses.micro_batches == 3 and codec.dumps(other.save()["trackers"]) == codec.dumps(settled)
        other.load(elastic_loop().save())
        assert entries["z_loss"]["values"].tolist() == [0, 0] and not other.elastic.losses.entries
    finally:
        entries.clear()
