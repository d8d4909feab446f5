"""Where another thread is: its files, lines and functions, as Python's own traceback has them."""

from __future__ import annotations

import gc
import threading
import traceback
from pathlib import Path

from flashrecovery.runtime.thread_stack import first_line, stack_text, thread_stack
from flashrecovery.worker.preimport.preimport import Installed


def test_files_lines_and_functions(tmp_path: Path) -> None:
    script = tmp_path / 'größe "Δ" 𝛼, line 3 in x.py'
    script.write_text("def tiefe_ö(seen, wait):\n    seen()\n    wait()\n")
    found: dict[str, object] = {}
    exec(compile(script.read_text(), str(script), "exec"), found)
    there, on = threading.Event(), threading.Event()
    own: list[traceback.StackSummary] = []

    def run() -> None:
        found["tiefe_ö"](lambda: own.append(traceback.extract_stack()), wait)  # type: ignore[operator]

    def wait() -> None:
        there.set()
        on.wait()

    thread = threading.Thread(target=run)
    thread.start()
    assert there.wait(10) and thread.ident is not None
    stack, text = thread_stack(thread.ident), stack_text(thread.ident)
    on.set()
    thread.join()
    assert first_line(text, lambda file: file != str(script)) == (str(script), 3)
    assert first_line(text, lambda file: False) == (stack[0].file, stack[0].line)
    assert first_line(text, lambda file: True) is None
    seen = [(place.file, place.line, place.function) for place in stack]
    by_itself = [(frame.filename, frame.lineno, frame.name) for frame in reversed(own[0])]
    place = seen.index((str(script), 3, "tiefe_ö"))
    assert seen[place + 1 :] == by_itself[by_itself.index((str(script), 2, "tiefe_ö")) + 1 :]
    assert thread_stack(thread.ident) == []


def test_the_innermost_hundred_of_a_deep_stack() -> None:
    there, on = threading.Event(), threading.Event()

    def deep(more: int) -> None:
        if more:
            deep(more - 1)
        there.set()
        on.wait()

    thread = threading.Thread(target=deep, args=(300,))
    thread.start()
    assert there.wait(10) and thread.ident is not None
    stack = thread_stack(thread.ident)
    on.set()
    thread.join()
    assert len(stack) == 100 and stack[-1].function == "deep"


def test_a_look_begins_no_garbage_collection() -> None:
    """The thread that makes one object too many collects. With a list of frames for each look that was the thread
    that looks, since the training thread mostly waits; and it destroyed what that had left in cycles."""
    ident, installed = threading.get_ident(), Installed()
    collections: list[str] = []

    class Counted: ...

    def look(depth: int = 60) -> tuple[str, int] | None:
        return look(depth - 1) if depth else first_line(stack_text(ident), passed_by)

    def passed_by(file: str) -> bool:
        return file != __file__ and installed.has_file(file)

    def note(phase: str, _: dict[str, int]) -> None:
        collections.append(phase)

    before = gc.get_threshold()
    assert look() is not None and look() is not None  # each file is looked up once
    gc.callbacks.append(note)
    try:
        gc.collect(0)
        kept = [Counted() for _ in range(60)]
        gc.set_threshold(65)  # other versions of Python may make some
        collections.clear()
        look()
        by_looks = len(collections)  # a list of them would be counted
        kept += [Counted() for _ in range(20)]
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    assert by_looks == 0 and collections
