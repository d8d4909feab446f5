"""Calls that are steps: what is made again, what is skipped, and what becomes of the state of the script's loop."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from flashrecovery.errors import RegistrationError
from flashrecovery.worker.control.overhead import Overhead
from flashrecovery.worker.framework_calls import Calls
from flashrecovery.worker.local_state.fast_forward import Ahead


class FakePage:
    shown = 0, 0

    def set_shown(self, step: int, writes: int) -> None:
        self.shown = step, writes


class FakeSession:
    """And its loop. Commits each step. An exception goes back to version ``back_to``, or to that of the step."""

    def __init__(self, version: int = 0) -> None:
        self.gate = SimpleNamespace(version=version, stopped=False, paused=False, page=FakePage())
        self.left = self.from_checkpoint = False
        self.ended_at = 0
        self.has_checkpoints, self.oldest_checkpoint = False, 0
        self.pauses: list[int] = []
        self.overhead = Overhead()
        self.back_to: int | None = None
        self.ahead = Ahead()
        self.opened = 0
        self.counted: list[str] = []

    def came_from_checkpoint(self) -> bool:
        came, self.from_checkpoint = self.from_checkpoint, False
        return came

    def count_calls(self, what: str) -> None:
        self.counted.append(what)

    def at_script_end(self, callback: Callable[[], None]) -> None: ...

    def open(self, num_steps: int | None) -> FakeSession:
        self.opened += 1
        return self

    def settle(self) -> None: ...

    def pause(self) -> None:
        self.pauses.append(self.gate.version)
        self.gate.paused = False

    def entered(self, frame: FrameType) -> None: ...

    def begin(self) -> None: ...

    def end(self, error: BaseException | None) -> bool:
        if error is None:
            self.gate.version += 1
        elif self.back_to is not None:
            self.gate.version, self.back_to = self.back_to, None
        return True


class Total:
    """A loop's average: the script adds to it between the calls, and one kind of call takes it away."""

    def __init__(self) -> None:
        self.value = 0
        self.reported: list[int] = []
        self.resumed = 0

    def save(self) -> Any:
        return self.value, list(self.reported)

    def load(self, saved: Any) -> None:
        self.value, self.reported = saved[0], list(saved[1])

    def resume(self) -> None:
        self.resumed += 1
        self.value, self.reported = 30, [11]


class Script:
    """Trains, adds the result to the total, and reports it in every second round. ``fails``: calls that fail once."""

    def __init__(self, session: FakeSession, fails: dict[str, int | None]) -> None:
        self.session = session
        self.calls = Calls(session)  # type: ignore[arg-type]
        self.total = Total()
        self.fails = fails
        self.made: list[str] = []

    def _body(self, name: str, result: Callable[[], int]) -> Callable[[], int]:
        def body() -> int:
            self.made.append(name)
            value = result()
            if name in self.fails:
                self.session.back_to = self.fails.pop(name)
                raise RuntimeError("a peer has died")
            return value

        return body

    def _report(self) -> int:
        self.total.reported.append(self.total.value)
        self.total.value = 0
        return 0

    def run(self, rounds: int) -> None:
        for i in range(rounds):
            train = self._body(f"train{i}", lambda i=i: 10 + i)  # type: ignore[misc]
            result = self.calls.run("train", train, lambda: 7, self.total)
            self.total.value += result
            if i % 2:
                self.calls.run("report", self._body(f"report{i}", self._report), lambda: 0, self.total)


def test_what_a_step_is_where_it_is_a_call_is_said_once() -> None:
    """Of a loop that makes others than a framework's steps: "step 6" is no iteration there."""
    script = Script(FakeSession(), {"report1": None})
    script.run(4)
    assert script.session.counted == []
    script = Script(FakeSession(), {"report1": None})
    script.total.counted = "calls of this loop"  # type: ignore[attr-defined]
    script.run(4)
    assert script.session.counted == ["calls of this loop"]


def test_a_call_that_fails_begins_again_with_the_loop_as_it_was() -> None:
    script = Script(FakeSession(), {"report1": None, "train2": None})
    script.run(4)
    assert script.total.reported == [21, 25] and script.total.value == 0
    assert script.made == ["train0", "train1", "report1", "report1", "train2", "train2", "train3", "report3"]


def test_an_earlier_call_is_repeated_with_its_own_loop_state() -> None:
    """The report is undone with the step that failed after it: it reports the same again, and nothing twice."""
    script = Script(FakeSession(), {"train2": 2})
    script.run(4)
    assert script.made[:6] == ["train0", "train1", "report1", "train2", "report1", "train2"]
    assert script.total.reported == [21, 25] and script.total.value == 0


def test_a_replacement_resumes_after_its_last_skipped_call() -> None:
    script = Script(FakeSession(version=4), {})
    script.run(4)
    assert script.made == ["train3", "report3"]
    assert script.total.resumed == 1
    # What the dead process had when the fourth call returned (30 and [11]), and what the loop adds after it.
    assert script.total.reported == [11, 30 + 7 + 13]


def test_without_a_loop_state_nothing_else_changes() -> None:
    session = FakeSession()
    calls = Calls(session)  # type: ignore[arg-type]
    failures = [RuntimeError()]

    def body() -> int:
        if failures:
            raise failures.pop()
        return 5

    assert calls.run("train", body, lambda: 0) == 5 and session.gate.version == 1


def test_a_call_waits_where_the_job_pauses() -> None:
    session = FakeSession()
    calls, total, made = Calls(session), Total(), []  # type: ignore[arg-type]

    def body() -> int:
        made.append(total.value)
        return 1

    calls.run("train", body, lambda: 0, total)
    session.gate.paused = True
    calls.run("train", body, lambda: 0, total)
    assert session.pauses == [1] and len(made) == 2 and session.gate.version == 2


def test_a_rank_that_has_left_does_not_wait_for_the_end() -> None:
    session = FakeSession()
    calls = Calls(session)  # type: ignore[arg-type]
    calls.run("train", lambda: 1, lambda: 0)
    session.left = True
    calls.finish()


class BesideTraining:
    """A script in a process that is built up beside a job that has ``reached`` calls behind it."""

    def __init__(self, reached: int, *, until: float = float("inf"), version: int = 0) -> None:
        self.session = FakeSession(version)
        self.session.ahead = Ahead(reached, until)
        self.calls, self.loop = Calls(self.session), Total()  # type: ignore[arg-type]
        self.made: list[int] = []
        self.skipped: list[tuple[int, int]] = []
        """Of each skipped call: its number, and how often the loop had been opened."""

    def run(self, calls: int, *, ahead: bool = True) -> None:
        for number in range(calls):
            self.calls.run(
                "train",
                lambda n=number: self.made.append(n),  # type: ignore[misc]
                lambda n=number: self.skipped.append((n, self.session.opened)),  # type: ignore[misc]
                self.loop,
                ahead=ahead,
            )


def test_what_others_have_behind_them_is_skipped_before_the_first_step() -> None:
    """And what they have done meanwhile after it. The script gets what belongs to its last skipped call."""
    script = BesideTraining(1000, version=1010)
    script.run(1012)
    before = [number for number, opened in script.skipped if not opened]
    assert before == list(range(996)) and [number for number, _ in script.skipped] == list(range(1010))
    assert script.made == [1010, 1011] and script.loop.resumed == 1 and script.session.opened == 1


@pytest.mark.parametrize("version", [997, 1000])
def test_the_others_may_go_back_by_some_versions(version: int) -> None:
    script = BesideTraining(1000, version=version)
    script.run(1001)
    assert script.made[0] == version and script.loop.resumed == 1


@pytest.mark.parametrize("version", [5, 996])
def test_one_that_has_skipped_too_much_ends(version: int) -> None:
    """The others have gone back to a checkpoint: it has not got what it would have to do again."""
    script = BesideTraining(1000, version=version)
    with pytest.raises(RegistrationError, match="996 were skipped"):
        script.run(1001)
    assert not script.made


def test_it_is_there_in_time_all_the_same() -> None:
    script = BesideTraining(1000, until=0.0, version=1000)
    script.run(1000)
    assert {opened for _, opened in script.skipped} == {1} and len(script.skipped) == 1000


def test_a_call_whose_result_comes_from_the_others_waits_for_them() -> None:
    script = BesideTraining(1000, version=1000)
    script.run(1000, ahead=False)
    assert script.skipped[0] == (0, 1)


def test_a_process_at_the_launch_skips_nothing() -> None:
    script = BesideTraining(0)
    script.run(3)
    assert script.made == [0, 1, 2] and not script.skipped


# -- back to a checkpoint ----------------------------------------------------------------------------------


class Placed(Total):
    """A :class:`flashrecovery.worker.framework_calls.PlacedLoop`. ``kept``: at the end of each version. ``results``: of
    training, by round."""

    def __init__(self) -> None:
        super().__init__()
        self.round = 0
        self.kept: dict[int, Any] = {0: (0, [])}
        self.results: dict[int, int] = {}
        self.brought: Any = None
        self.went: list[tuple[int, bool]] = []
        self.forgotten: list[int] = []
        self._since: list[int] = []

    def restored(self, saved: Any) -> None:
        self.brought = saved

    def add(self) -> None:
        """The script does, between two calls."""
        self.value += self.results.get(self.round, 0)
        self._since.append(self.round)

    def place(self) -> Any:
        since, self._since = self._since, []
        return self.round, since

    def go_back(self, place: Any, *, restored: bool) -> None:
        self.went.append((place[0], restored))
        if restored:
            self.load(self.brought)
        self.round = place[0]
        self.value += sum(self.results[number] for number in place[1])

    def forget(self, place: Any) -> None:
        self.forgotten.append(place[0])


class Checkpointed:
    """A script of one training call in each round, which uses the round's number, and one report in every second
    round. In call ``at`` the job goes back to version ``to``, from a checkpoint or in place; each once."""

    def __init__(self, *back: tuple[int, int, bool], version: int = 0) -> None:
        self.session = FakeSession(version)
        self.session.has_checkpoints = True
        self.calls, self.loop = Calls(self.session), Placed()  # type: ignore[arg-type]
        self.back = list(back)
        self.made: list[str] = []

    def _call(self, kind: str, body: Callable[[], int]) -> int:
        def made() -> int:
            self.made.append(f"{kind}{self.loop.round}")
            value = body()
            version = self.session.gate.version
            if self.back and self.back[0][0] == version:
                _, to, from_checkpoint = self.back.pop(0)
                self.session.back_to, self.session.from_checkpoint = to, from_checkpoint
                if from_checkpoint or to < version:
                    self.loop.restored(self.loop.kept[to])
                raise RuntimeError("peers have died")
            self.loop.kept[version + 1] = self.loop.save()
            return value

        return self.calls.run(kind, made, lambda: 0, self.loop)

    def _train(self) -> int:
        self.loop.results[self.loop.round] = 10 + self.loop.round
        return 0

    def _report(self) -> int:
        self.loop.reported.append(self.loop.value)
        self.loop.value = 0
        return 0

    def run(self, rounds: int) -> None:
        for number in range(rounds):
            self.loop.round = number
            self._call("train", self._train)
            self.loop.add()
            if number % 2:
                self._call("report", self._report)


REPORTED = [21, 25, 29, 33]


@pytest.mark.parametrize("at", [10, 11])
@pytest.mark.parametrize("to", [0, 1, 2, 3, 8, 9, 10])
def test_after_a_fallback_each_call_is_made_again_as_itself(at: int, to: int) -> None:
    """Version 8 and those after it are those to which a recovery in place goes, too."""
    script = Checkpointed((at, to, True))
    script.run(8)
    assert script.loop.reported == REPORTED and script.loop.value == 0
    names = ["train0", "train1", "report1", "train2", "train3", "report3", "train4", "train5", "report5"]
    names += ["train6", "train7", "report7"]
    assert script.made == [*names[: at + 1], *names[to:]]
    assert script.loop.went[0][1] and not any(restored for _, restored in script.loop.went[1:])


@pytest.mark.parametrize("second", [(3, 3, False), (4, 3, False), (5, 1, True), (3, 2, True), (11, 10, False)])
def test_a_second_death_on_the_way_forward(second: tuple[int, int, bool]) -> None:
    script = Checkpointed((10, 2, True), second)
    script.run(8)
    assert script.loop.reported == REPORTED and script.loop.value == 0 and not script.back


def test_what_was_skipped_is_made_again_as_itself() -> None:
    """A replacement has skipped it, and survives the next ones."""
    script = Checkpointed((10, 3, True), version=9)
    script.loop.kept[3] = (0, [21])  # as a survivor has left it
    script.run(8)
    assert script.made[:4] == ["train6", "train7", "train2", "train3"]
    assert script.loop.reported == REPORTED


def test_calls_before_the_oldest_checkpoint_are_forgotten() -> None:
    script = Checkpointed((10, 4, True))
    run = script.calls.run

    def running(*args: Any, **kwargs: Any) -> Any:
        if len(script.calls._kinds) == 9:
            script.session.oldest_checkpoint = 6
        return run(*args, **kwargs)

    script.calls.run = running  # type: ignore[method-assign]
    with pytest.raises(RegistrationError, match="call 4 is to be repeated, and it came before the oldest checkpoint"):
        script.run(8)
    assert script.loop.forgotten == [4]


def test_a_fallback_at_the_end() -> None:
    """The script has come to its end, and waits for the others."""
    script = Checkpointed()
    script.run(4)
    session = script.session
    ended: list[bool] = []

    def finished(total: int) -> bool:
        if not ended:
            ended.append(True)
            session.gate.version, session.from_checkpoint = 2, True
            script.loop.restored(script.loop.kept[2])
        return bool(session.gate.version >= total)

    session.finished = finished  # type: ignore[attr-defined]
    script.calls.finish()
    assert script.loop.reported == REPORTED[:2] and script.made[-4:] == ["report1", "train2", "train3", "report3"]


def test_a_replacement_whose_loop_goes_on_where_the_others_have_ended() -> None:
    """What has told them to (a signal, say) has died with the process before. Its next call would wait for ever."""
    script = Checkpointed(version=4)
    script.session.ended_at = 6
    with pytest.raises(RegistrationError, match="come to their end after 6 calls, and this one makes another"):
        script.run(8)
    assert script.made == ["train3", "report3"]
    again = Checkpointed((5, 2, True))  # those that have ended make theirs again
    again.run(4)
    again.session.ended_at = 6
    again.session.finished = lambda total: again.session.gate.version >= total  # type: ignore[attr-defined]
    again.calls.finish()


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_launch_whose_script_ends_before_the_state_has_trained_nothing(rounds: int) -> None:
    """It was begun with a later checkpoint of the framework's own, so it makes fewer calls than the state has behind
    it."""
    script = Checkpointed(version=7)
    script.session.finished = lambda total: script.session.gate.version >= total  # type: ignore[attr-defined]
    script.run(rounds)
    with pytest.raises(RegistrationError, match="and the state has 7 behind it"):
        script.calls.finish()
    assert not script.made


def test_a_launch_whose_script_ends_just_there() -> None:
    """The job before had come to its end."""
    script = Checkpointed(version=6)
    script.session.finished = lambda total: script.session.gate.version >= total  # type: ignore[attr-defined]
    script.run(4)
    script.calls.finish()
    assert not script.made


def test_what_follows_a_skipped_call_that_is_made_again_has_its_result() -> None:
    """A replacement begins with call 7, and the others go back to 6 in place: what it had added of 6 is not what 6 has
    now."""
    script = Checkpointed((7, 6, False), version=7)
    script.loop.kept[6] = (0, [21, 25])
    script.run(8)
    assert script.made[:4] == ["train5", "train4", "train5", "report5"] and script.loop.reported == REPORTED


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_what_is_let_out_is_let_out_once(skipped: int) -> None:
    """In a call that is made again, between two calls, and in a process that takes over the page and skips calls."""
    out: list[str] = []

    def run(session: FakeSession, died_in: list[str]) -> None:
        calls = Calls(session)  # type: ignore[arg-type]

        def let_out(text: str) -> None:
            if calls.deliveries.next_is_new():
                out.append(text)
            calls.deliveries.made()
            if text in died_in:
                died_in.remove(text)
                raise RuntimeError("a peer has died")

        for number in range(2):
            calls.run("log", lambda number=number: [let_out(f"{number}{part}") for part in "ab"], list)  # type: ignore[misc]
            let_out(f"after {number}")

    first = FakeSession()
    run(first, ["0a", "0b", "1a"])
    whole = ["0a", "0b", "after 0", "1a", "1b", "after 1"]
    assert out == whole
    second = FakeSession(skipped)
    second.gate.page = first.gate.page
    run(second, [])
    assert out == whole
