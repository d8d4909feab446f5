"""What appears on the terminal."""

from __future__ import annotations

from flashrecovery import events as ev
from flashrecovery.controller.console import Console


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
