"""What appears on the terminal."""

from __future__ import annotations

from flashrecovery import events as ev
from flashrecovery.controller.service.console import Console
from flashrecovery.controller.state.iteration_numbers import Counting
from flashrecovery.proto import flashrecovery_pb2 as pb


def notice(rank: int, kind: str, text: str) -> ev.Notice:
    return ev.Notice(generation=0, rank=rank, kind=kind, text=text)


def test_what_all_ranks_find_out_alike_is_said_once() -> None:
    console = Console()
    lines = [console.line_of(notice(rank, "communication_outside", "all_reduce at train.py:7")) for rank in range(3)]
    assert lines == ["communication outside: all_reduce at train.py:7", None, None]
    assert console.line_of(notice(3, "communication_outside", "barrier at train.py:9")) is not None


def test_what_happens_again_is_said_again() -> None:
    console = Console()
    lines = [console.line_of(notice(0, "straggler", "rank 3 is slow")) for _ in range(2)]
    assert lines == ["straggler: rank 3 is slow"] * 2


def test_what_only_a_tool_wants_is_not_said() -> None:
    assert Console().line_of(notice(0, "fault_fired", "x")) is None


def test_where_steps_are_calls_the_frameworks_own_number_is_named() -> None:
    counting = Counting()
    failed = ev.FailureDetected(rank=1, kind="killed", evidence="killed by SIGKILL", step=61)
    assert counting.told(failed) is failed and Console().line_of(failed) == (
        "rank 1 failed at step 61 (killed by SIGKILL)"
    )
    counting.hear([pb.Counted(step=60, iteration=31), pb.Counted(step=61, iteration=31)])
    told = counting.told(failed)
    assert Console().line_of(told) == "rank 1 failed at iteration 31 (call 61) (killed by SIGKILL)"
    finished = counting.told(ev.RecoveryFinished(resume_step=62, victims=[1], total_s=0.5))
    assert "goes on from iteration 31 (call 62)" in (Console().line_of(finished) or ""), (
        "it is not begun: the one before"
    )
    assert counting.text(900) == "step 900" and counting.told(notice(0, "x", "y")) == notice(0, "x", "y")
    for step in range(1000):
        counting.hear([pb.Counted(step=step, iteration=step // 2)])
    assert counting.text(999) == "iteration 499 (call 999)" and counting.text(5) == "step 5", (
        "of the newest it is known"
    )


def test_a_long_exception_is_said_in_brief_as_it_is_raised() -> None:
    where = "(at train.py:7, log: runs/a/logs/rank0.gen0.log)"
    short = ev.FailureDetected(rank=0, kind="exception", exception="KeyError", evidence=f"KeyError: 'b' {where}")
    assert Console().line_of(short) == f"rank 0 failed at step 0 (exception: KeyError: 'b' {where})"
    long = short.model_copy(update={"evidence": f"ValueError: {'words ' * 100}{where}", "message": "words"})
    said = Console().line_of(long) or ""
    assert said.endswith(f"words ... {where})") and len(said) < 300, said
