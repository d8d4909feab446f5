"""A handler that catches the interruption of a step, and begins the step again, is left; else its line is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import contextlib, os, sys
from flashrecovery.errors import StepInterrupted
from flashrecovery.worker.control.unwinding import PATIENCE, Unwinding

def give_up(text):
    print(text, flush=True)
    os._exit(3)

one, count = Unwinding(give_up), 0

def compute():
    global count
    count += 1
    one.interrupts()
    raise StepInterrupted

def base():
    while True:
        try:
            compute()
        except BaseException:
            continue

def kept():
    errors = []
    while True:
        try:
            compute()
        except BaseException as e:
            errors.append(e)

def few():
    for _ in range(PATIENCE - 1):
        try:
            compute()
        except BaseException:
            pass
    return "was left alone"

for loop in (base, kept, few, base):
    count = 0
    try:
        print(loop(), end=" ")
    except StepInterrupted:
        print("was interrupted", end=" ")
    one.over()
    print(count == PATIENCE - (loop is few), sys.gettrace())
while True:
    with contextlib.suppress(BaseException):
        compute()
"""


def test_the_next_interruption_is_raised_in_the_handler(tmp_path: Path) -> None:
    """In a separate process: it would go on for ever."""
    script = tmp_path / "stubborn.py"
    script.write_text(SCRIPT)
    code = f"import runpy; runpy.run_path({str(script)!r})"
    command = [sys.executable, "-c", code]
    job = subprocess.run(command, cwd=ROOT / "common", capture_output=True, text=True, timeout=100, check=False)
    *lines, named = job.stdout.splitlines()
    assert lines == [f"was {how} True None" for how in ("interrupted", "interrupted", "left alone", "interrupted")]
    line = SCRIPT.splitlines().index("    one.interrupts()") + 1
    assert job.returncode == 3 and named.startswith(f"{script}:{line} has caught "), job.stdout + job.stderr
