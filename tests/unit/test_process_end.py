"""What is ours at a process's end comes after the script's own exit handlers, and not in what the script has forked."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import atexit, os, sys
from flashrecovery.runtime import process_end
def say(text): print(text, process_end.is_fork(), flush=True)
{first}
atexit.register(say, "script")
process_end.at_last(lambda: say("ours"))
if os.fork() == 0:
    sys.exit(0)
os.wait()
"""


def said(first: str) -> list[str]:
    code = SCRIPT.format(first=first)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_after_the_scripts_own_and_not_in_its_forks() -> None:
    assert said("process_end.reserve()") == ["script True", "script False", "ours False"]


def test_what_was_there_before_a_zygote_forked_the_process() -> None:
    first = "process_end.at_last(lambda: say('before')); process_end.reserve()"
    assert said(first) == ["script True", "script False", "ours False", "before False"]


def test_without_the_bootstrap_it_is_an_exit_handler_like_others() -> None:
    assert "ours False" in said("")
