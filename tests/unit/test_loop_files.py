"""Files that a script's loops write: as a step found them, when it is done again."""

from __future__ import annotations

import csv
import gzip
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrecovery.runtime.page import FILE_NOTES_LIMIT, Page
from flashrecovery.worker.own_loops import files as module
from flashrecovery.worker.own_loops.environment import EnvironmentChanges
from flashrecovery.worker.own_loops.files import LoopFiles


class Notes:
    """What a page keeps."""

    def __init__(self) -> None:
        self.data = b""

    def write_file_notes(self, data: bytes) -> bool:
        self.data = data
        return True

    def read_file_notes(self) -> bytes:
        return self.data


class Job:
    """One process after the other."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.told: list[str] = []
        self.files = LoopFiles()

    def start(self, *, replacement: bool = False) -> LoopFiles:
        self.files._undo()
        self.files = LoopFiles()
        self.files.take(replacement=replacement)
        return self.files

    def protect(self) -> LoopFiles:
        self.files.protect(self.notes, self.told.append)
        return self.files


@pytest.fixture
def job() -> Iterator[Job]:
    found = Job()
    yield found
    found.files._undo()


def started(job: Job) -> LoopFiles:
    """Its first step has begun."""
    job.start()
    files = job.protect()
    files.handed_out(0)
    return files


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def test_what_a_step_has_appended_is_cut_off(job: Job, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("from an earlier run\n")
    files = started(job)
    append(log, "step 0\n")
    files.handed_out(1)
    append(log, "step 1, in vain\n")
    files.restore(1)
    assert log.read_text() == "from an earlier run\nstep 0\n"
    files.handed_out(1)
    append(log, "step 1\n")
    files.handed_out(2)
    append(log, "step 2, in vain\n")
    files.restore(1)  # a peer has not come so far
    assert log.read_text() == "from an earlier run\nstep 0\n"


def test_what_a_step_has_written_is_noted_beside_earlier_steps(job: Job, tmp_path: Path) -> None:
    """A line that is added encodes the notes of its own step alone. Those of the others are as they are by then."""
    files = started(job)
    kept, left = tmp_path / "kept", tmp_path / "left"
    append(kept, "0\n")
    append(left, "0\n")
    files.handed_out(1)
    with open(kept, "a", buffering=1) as log:
        log.write("1\n")
        by_others(left)
        append(left, "1\n")  # is found to be another's as well
        log.write("1\n")
        log.flush()
        job.start(replacement=True)
        dead = job.protect()
    assert dead._before[1][str(kept)].added == 4
    assert [str(path) in of_step for of_step in dead._before.values() for path in (kept, left)] == [True, False] * 2


def test_a_line_that_is_added_leaves_the_notes_of_earlier_steps(job: Job, tmp_path: Path) -> None:
    files, path = started(job), tmp_path / "log"
    for step in range(1, 4):
        append(path, "line\n")
        noted = dict(files._before[step - 1])
        assert noted[str(path)].added == len("line\n")
        files.handed_out(step)
    append(path, "line\n")
    job.start(replacement=True)
    assert [of_step[str(path)].added for of_step in job.protect()._before.values()] == [len("line\n")] * 4


def test_a_line_of_another_thread_while_a_step_begins_keeps_the_notes_of_the_one_before(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, path = started(job), tmp_path / "log"
    with open(path, "a", buffering=1) as log:
        log.write("0\n")

        def writes_and_is_killed(_: object) -> None:
            log.write("1\n")
            raise KeyboardInterrupt

        monkeypatch.setattr(files, "_look_at_sizes", writes_and_is_killed)
        with pytest.raises(KeyboardInterrupt):
            files.handed_out(1)
    job.start(replacement=True)
    assert {step: files[str(path)].added for step, files in job.protect()._before.items()} == {0: 2, 1: 2}


def test_a_file_that_was_made_by_the_step_is_gone(job: Job, tmp_path: Path) -> None:
    files = started(job)
    for _ in range(2):
        with open(tmp_path / "new", "x") as file:
            file.write("once")
        files.restore(0)
        assert not (tmp_path / "new").exists()
        files.handed_out(0)


def test_a_file_that_is_kept_open_goes_back(job: Job, tmp_path: Path) -> None:
    job.start()
    table = open(tmp_path / "table", "w", newline="")  # noqa: SIM115
    rows = csv.writer(table)
    rows.writerow(["step"])
    files = job.protect()
    files.handed_out(0)
    rows.writerow([0])
    files.handed_out(1)
    assert (tmp_path / "table").read_text() == "step\n0\n"  # nothing that is committed lies in a buffer
    rows.writerow(["in vain"])
    files.restore(1)
    files.handed_out(1)
    rows.writerow([1])
    table.close()
    assert (tmp_path / "table").read_text() == "step\n0\n1\n"


@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_replacement_goes_on_where_the_dead_process_was(job: Job, tmp_path: Path, mode: str) -> None:
    """Its set-up, and the rounds that it goes through once more, write nothing again."""
    path = tmp_path / "log"

    def script(replacement: bool) -> tuple[LoopFiles, Any]:
        files = job.start(replacement=replacement)
        if mode == "a":
            append(path, "set-up\n")
        files = job.protect()
        if replacement:
            files.restore(2)
        file = open(path, mode)  # noqa: SIM115 - in a round of an outer loop
        file.write("the epoch begins\n")
        return files, file

    files, file = script(False)
    for step in range(3):
        files.handed_out(step)
        file.write(f"step {step}\n")
    file.flush()
    del file  # killed
    files, file = script(True)
    files.restore(2)
    files.handed_out(2)
    file.write("step 2\n")
    file.close()
    first = "" if mode == "w" else "set-up\n"
    assert path.read_text() == f"{first}the epoch begins\nstep 0\nstep 1\nstep 2\n"


def test_lines_that_the_dead_process_had_in_a_buffer_are_there(job: Job, tmp_path: Path) -> None:
    """They belong to the version, from the moment when it is captured."""
    job.start()
    kept = open(tmp_path / "log", "w")  # noqa: SIM115
    files = job.protect()
    files.handed_out(0)
    kept.write("step 0\n")
    files.flush()
    assert (tmp_path / "log").read_text() == "step 0\n"


def test_on_the_way_of_a_survivor_nothing_is_written(job: Job, tmp_path: Path) -> None:
    job.start()
    log = open(tmp_path / "log", "w")  # noqa: SIM115
    files = job.protect()
    files.handed_out(0)
    log.write("step 0\n")
    files.handed_out(1)
    log.write("epoch 1\n")
    files.restore(1)
    files.go_back()
    log.write("epoch 0\n")
    append(tmp_path / "epochs", "")
    append(tmp_path / "log", "again\n")
    files.restore(1)
    files.handed_out(1)
    log.write("step 1\n")
    log.flush()
    assert (tmp_path / "log").read_text() == "step 0\nstep 1\n"


def test_a_small_file_that_is_read_and_written_again_has_its_old_content(job: Job, tmp_path: Path) -> None:
    history = tmp_path / "history"
    history.write_text("0")
    files = started(job)
    for _ in range(2):
        history.write_text(f"{history.read_text()}, 1")
        files.restore(0)
        assert history.read_text() == "0"
    with open(history, "r+") as file:
        file.write("changed")
    files.restore(0)
    assert history.read_text() == "0" and not job.told


def test_a_large_one_is_named(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CONTENT", 4)
    (tmp_path / "history").write_text("12345")
    files = started(job)
    (tmp_path / "history").write_text((tmp_path / "history").read_text() + "6")
    files.restore(0)
    assert len(job.told) == 1 and "history" in job.told[0]


def by_others(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"another rank\n")
    os.close(fd)


@pytest.mark.parametrize("kept_open", [False, True])
def test_a_file_that_others_write_is_named_and_left_alone(job: Job, tmp_path: Path, kept_open: bool) -> None:
    log = tmp_path / "log"
    job.start()
    file = open(log, "a") if kept_open else None  # noqa: SIM115
    files = job.protect()
    for step in range(3):
        files.handed_out(step)
        if file is None:
            append(log, f"step {step}\n")
        else:
            file.write(f"step {step}\n")
            file.flush()
        if step == 1:
            if file is None:
                files.handed_out(2)
            by_others(log)
    files.restore(2)
    assert "another rank\n" in log.read_text() and log.read_text().endswith("step 2\n")
    assert len(job.told) == 1 and str(log) in job.told[0]


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("replacement", [False, True])
def test_a_line_of_another_process_in_the_same_step_is_not_lost(
    job: Job, tmp_path: Path, replacement: bool, there: bool
) -> None:
    """In the first step that adds to it, when nothing else could tell."""
    log = tmp_path / "log"
    if there:
        log.write_text("of a run before\n")
    files = started(job)
    files.handed_out(1)
    append(log, "in vain\n")
    by_others(log)
    if replacement:
        job.start(replacement=True)
        files = job.protect()
    files.restore(1)
    assert log.read_text().endswith("in vain\nanother rank\n")
    assert len(job.told) == 1 and str(log) in job.told[0]


def test_a_line_of_another_process_in_a_file_that_is_kept_open_is_not_lost(job: Job, tmp_path: Path) -> None:
    job.start()
    log = open(tmp_path / "log", "w")  # noqa: SIM115
    files = job.protect()
    files.handed_out(0)
    log.write("step 0\n")
    log.flush()
    by_others(tmp_path / "log")
    files.restore(0)
    assert (tmp_path / "log").read_text() == "step 0\nanother rank\n" and len(job.told) == 1


@pytest.mark.parametrize("replacement", [False, True])
def test_what_another_has_put_in_its_place_is_not_removed(job: Job, tmp_path: Path, replacement: bool) -> None:
    new = tmp_path / "new"
    files = started(job)
    append(new, "a longer line of the step\n")
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / "other").rename(new)
    if replacement:
        job.start(replacement=True)
        files = job.protect()
    files.restore(0)
    assert new.exists() and len(job.told) == 1


def test_what_was_in_a_buffer_counts_for_the_step_that_wrote_it(job: Job, tmp_path: Path) -> None:
    """All go two steps back."""
    job.start()
    log = open(tmp_path / "log", "w")  # noqa: SIM115
    files = job.protect()
    for step in range(4):
        files.handed_out(step)
        log.write(f"step {step}\n")
    files.restore(2)
    assert (tmp_path / "log").read_text() == "step 0\nstep 1\n" and not job.told


def test_what_a_forked_process_writes_is_not_counted(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job.start()
    log = open(tmp_path / "log", "a")  # noqa: SIM115 - before the fork, by a loader's worker
    files = job.protect()
    files.handed_out(0)
    log.write("step 0\n")
    log.flush()
    noted = job.notes.data
    with monkeypatch.context() as fork:
        fork.setattr(module.process_end, "is_fork", lambda: True)
        log.write("of the worker\n")
        log.flush()
    assert job.notes.data == noted
    files.restore(0)
    assert (tmp_path / "log").read_text() == "step 0\nof the worker\n" and len(job.told) == 1


def test_a_new_file_is_gone_if_the_process_died_as_it_was_opened(job: Job, tmp_path: Path) -> None:
    """Before its number was noted."""
    files = started(job)
    files._note(str(tmp_path / "new"), None, "x")
    (tmp_path / "new").touch()
    job.start(replacement=True)
    job.protect().restore(0)
    assert not (tmp_path / "new").exists() and not job.told


def test_a_link_stays_and_the_file_behind_it_goes_back(job: Job, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("old\n")
    for name, target in (("to old", old), ("to new", new)):
        (tmp_path / name).symlink_to(target)
    files = started(job)
    append(old, "in vain\n")
    append(tmp_path / "to old", "in vain\n")
    append(tmp_path / "to new", "in vain\n")
    files.restore(0)
    assert old.read_text() == "old\n" and not new.exists() and (tmp_path / "to new").is_symlink() and not job.told


def test_two_objects_of_one_file_lose_nothing_that_was_in_their_buffers(job: Job, tmp_path: Path) -> None:
    job.start()
    one, two = open(tmp_path / "log", "a"), open(tmp_path / "log", "a")  # noqa: SIM115
    files = job.protect()
    files.handed_out(0)
    one.write("one\n")
    two.write("two\n")
    files.handed_out(1)
    one.write("in vain\n")
    two.write("in vain\n")
    files.restore(1)
    assert (tmp_path / "log").read_text() == "one\ntwo\n" and not job.told


def test_a_log_that_a_step_adds_to_and_then_clears_has_its_old_content(job: Job, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("committed\n")
    files = started(job)
    append(log, "in vain\n")
    log.write_text("cleared, as it was too long\n")
    append(log, "and goes on\n")
    files.restore(0)
    assert log.read_text() == "committed\n" and not job.told


def test_a_file_that_a_step_has_renamed_or_cut_short_is_named(job: Job, tmp_path: Path) -> None:
    job.start()
    short = open(tmp_path / "short", "w")  # noqa: SIM115
    short.write("committed\n")
    files = job.protect()
    append(tmp_path / "log", "committed\n")
    files.handed_out(0)
    append(tmp_path / "log", "step\n")
    (tmp_path / "log").rename(tmp_path / "log.1")
    append(tmp_path / "log", "step\n")
    short.seek(0)
    short.truncate()
    files.restore(0)
    assert (tmp_path / "log.1").read_text() == "committed\nstep\n" and (tmp_path / "log").read_text() == "step\n"
    assert len(job.told) == 2, job.told


def test_a_file_that_is_kept_open_through_a_compressor_is_named(job: Job, tmp_path: Path) -> None:
    job.start()
    with gzip.open(tmp_path / "kept", "wt") as kept:
        files = job.protect()
        files.handed_out(0)
        with gzip.open(tmp_path / "each", "at") as each:
            each.write("in vain\n")
        kept.write("step 0\n")
        files.restore(0)
        assert len(job.told) == 1 and "kept" in job.told[0] and not (tmp_path / "each").exists()
    with gzip.open(tmp_path / "kept", "rt") as kept:
        assert kept.read() == "step 0\n"


def test_an_array_that_is_saved_again_is_not_named(job: Job, tmp_path: Path) -> None:
    """numpy writes past the file object, but the step that does it again begins from nothing."""
    files = started(job)
    for _ in range(2):
        np.save(tmp_path / "array.npy", np.arange(1000))
        files.restore(0)
        files.handed_out(0)
    assert not job.told


def test_a_file_that_is_dropped_is_closed(job: Job, tmp_path: Path) -> None:
    """At once, with what was in its buffer."""
    started(job)
    open(tmp_path / "log", "w").write("at once\n")  # noqa: SIM115
    assert (tmp_path / "log").read_text() == "at once\n"


def test_a_file_that_the_script_itself_reads_is_its_own(job: Job, tmp_path: Path) -> None:
    job.start()
    log = open(tmp_path / "log", "a+")  # noqa: SIM115
    files = job.protect()
    for step in range(3):
        files.handed_out(step)
        log.write(f"step {step}\n")
        log.seek(0)
    files.restore(2)
    log.flush()
    assert (tmp_path / "log").read_text() == "step 0\nstep 1\n" and not job.told


def test_a_file_that_cannot_be_cut_off_is_named(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = started(job)
    append(tmp_path / "one", "")
    files.handed_out(1)
    append(tmp_path / "one", "step 1\n")

    def refused(path: str, size: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "truncate", refused)
    files.restore(1)
    assert len(job.told) == 1 and "not permitted" in job.told[0]


def test_a_file_that_a_replacement_would_clear_in_a_later_step_goes_on(job: Job, tmp_path: Path) -> None:
    """Opened by the first step, and kept."""
    files = started(job)
    log = open(tmp_path / "log", "w")  # noqa: SIM115
    log.write("step 0\n")
    files.handed_out(1)
    log.close()
    job.start(replacement=True)
    files = job.protect()
    files.restore(1)
    files.handed_out(1)
    with open(tmp_path / "log", "w") as again:
        again.write("step 1\n")
    assert (tmp_path / "log").read_text() == "step 0\nstep 1\n"
    assert len(job.told) == 1


def test_other_threads_and_installed_packages_are_left_alone(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = started(job)
    thread = threading.Thread(target=append, args=(tmp_path / "thread", "1"))
    thread.start()
    thread.join()
    monkeypatch.setattr(module, "is_own_file", lambda file: False)
    append(tmp_path / "package", "1")
    files.restore(0)
    assert (tmp_path / "thread").exists() and (tmp_path / "package").exists()


def test_nothing_is_done_with_files_once_the_steps_are_over(job: Job, tmp_path: Path) -> None:
    before = open
    files = started(job)
    assert open is not before
    append(tmp_path / "log", "step 0\n")
    files.end()
    append(tmp_path / "log", "the end\n")
    files.restore(0)
    assert (tmp_path / "log").read_text() == "step 0\nthe end\n" and open is before


def test_devices_and_pipes_are_no_files(job: Job) -> None:
    files = started(job)
    null = open(os.devnull, "w")  # noqa: SIM115
    reader, writer = os.pipe()
    pipe = os.fdopen(writer, "w")
    files.handed_out(1)
    files.restore(0)
    pipe.write("x")
    pipe.close()
    null.close()
    os.close(reader)
    assert not job.told


@pytest.fixture
def page() -> Iterator[Callable[[], Page]]:
    pages: list[Page] = []

    def make() -> Page:
        pages.append(Page.create(f"test{len(pages)}", 1 << 16))
        return pages[-1]

    yield make
    for one in pages:
        one.close()


def test_notes_outlive_the_process(page: Callable[[], Page]) -> None:
    old, new = page(), page()
    assert old.read_file_notes() == b""
    for number in range(5):
        assert old.write_file_notes(b"%d" % number * number)
        assert old.read_file_notes() == b"%d" % number * number
    assert not old.write_file_notes(bytes(FILE_NOTES_LIMIT + 1))
    new.inherit(old)
    assert new.read_file_notes() == b"4444"


def test_a_worker_that_dies_while_it_writes_leaves_the_notes_of_before(page: Callable[[], Page]) -> None:
    one = page()
    one.write_file_notes(b"before")
    one.write_file_notes(b"newest")
    words, begin = one._notes_at(2)
    one._words[words] = 0
    one._map[begin : begin + 3] = b"hal"
    assert one.read_file_notes() == b"newest"


def test_variables_of_the_environment_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEFORE", "1")
    monkeypatch.setenv("GOES", "1")
    monkeypatch.delenv("COMES", raising=False)
    changes = EnvironmentChanges()
    changes.begin()
    monkeypatch.setenv("BEFORE", "2")
    version = changes.now()
    assert version == {b"BEFORE": b"2"}
    monkeypatch.setenv("BEFORE", "3")
    monkeypatch.setenv("COMES", "1")
    monkeypatch.setenv("RANK", "7")  # of a job that is resized
    monkeypatch.delenv("GOES")
    changes.put(version)
    assert (os.environ["BEFORE"], os.environ["GOES"], os.environ["RANK"]) == ("2", "1", "7")
    assert "COMES" not in os.environ
