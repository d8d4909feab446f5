"""What is ours at a process's end comes after the script's own exit handlers, and not in what the script has forked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


BOOTSTRAP = """
import os, sys, types
from flashrecovery.runtime import process_end
from flashrecovery.worker.startup import bootstrap
from flashrecovery.worker.startup.above import Above
def say(*what): print(*what, flush=True)
channel = types.SimpleNamespace(send=lambda message: say("words", message.last_words.message))
bootstrap._connection = types.SimpleNamespace(detached=False, at_script_end=[lambda: say("told the end")])
process_end.reserve()
code = bootstrap._run_script([sys.argv[1]], channel, Above(None, None, None))
say("child" if process_end.is_fork() else "rank", code)
os._exit(code)
"""


@pytest.mark.parametrize("end", ["pass", "raise ValueError('in the child')", "raise SystemExit(3)"])
def test_what_the_script_has_forked_tells_the_agent_nothing(end: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import os\nif os.fork() == 0:\n    {end}\nelse:\n    os.wait()\n")
    command = [sys.executable, "-c", BOOTSTRAP, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    code = {"pass": 0, "raise SystemExit(3)": 3}.get(end, 1)
    assert done.stdout.splitlines() == [f"child {code}", "told the end", "rank 0"]


def test_a_ranks_own_words_are_sent(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise ValueError('of the rank')\n")
    command = [sys.executable, "-c", BOOTSTRAP, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["words of the rank", "rank 1"]
