"""What Megatron-LM's loop keeps between two calls, with Megatron's own rerun state machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashrecovery.state import codec
from fr_megatron.lm.state import LMLoop

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("name", ["DISABLED", "VALIDATE_RESULTS", "REPORT_DETERMINISM_STATS"])
def test_an_evaluation_that_is_cut_short_leaves_results_validated_as_before(name: str) -> None:
    """While it computes, Megatron validates none. Whether it does decides who communicates after a step."""
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
