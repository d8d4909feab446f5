"""``python -m tests.sanitizers address|thread [pytest options]``: the tests of the groups with sanitized extensions."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    "address": ("ASAN_OPTIONS", ("detect_leaks=0",)),
    "thread": (
        "TSAN_OPTIONS",
        (
            "exitcode=0",  # reports are read from their files
            "ignore_noninstrumented_modules=1",  # the locks and counters of torch, gloo and Python are not seen
            "die_after_fork=0",  # ranks are forked
            "atexit_sleep_ms=0",  # a rank that is to die dies at once
            "report_thread_leaks=0",  # a process may end with groups that still have threads
            "history_size=4",
        ),
    ),
}
_LEAKS = "tests/integration/groups/test_groups_leaks.py"
"""The sanitizers' own memory grows."""
LEFT_OUT = {
    "address": (
        _LEAKS,
        # a forked child inherits the locks of its allocator, held by a thread that the child has not got
        "tests/integration/groups/test_groups_exit.py::test_a_child_that_is_forked_while_threads_are_busy",
    ),
    "thread": (_LEAKS,),
}
TESTS = ("tests/sanitizers", "tests/integration/groups/test_nccl.py", "tests/integration/groups/test_groups_*.py")


def _library(name: str) -> str:
    """Where the compiler has it."""
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        sys.exit(f"{compiler} has no {name} (Debian/Ubuntu: it comes with g++)")
    return path


def _preloaded(sanitizer: str) -> str:
    """The sanitizer's library has to be in the process first, since Python itself is not built with it.

    With it comes what throws exceptions: it looks for that when it starts, and Python has none.
    """
    return f"{_library(RUNTIMES[sanitizer])}:{_library('libstdc++.so.6')}"


def main(sanitizer: str, options: list[str]) -> int:
    """Returns pytest's exit status."""
    root = HERE.parents[1]
    with tempfile.TemporaryDirectory(prefix="fr-sanitizer-") as reports:
        name, values = OPTIONS[sanitizer]
        environment = dict(os.environ)
        environment |= {
            "FLASHRECOVERY_SANITIZE": sanitizer,
            "FR_SANITIZER_REPORTS": reports,
            "LD_PRELOAD": _preloaded(sanitizer),
            name: ":".join((*values, f"log_path={reports}/report")),
        }
        tests = [str(path.relative_to(root)) for pattern in TESTS for path in sorted(root.glob(pattern))]
        left_out = [f"--deselect={test}" for test in LEFT_OUT[sanitizer]]
        command = [sys.executable, "-m", "pytest", "-p", "tests.sanitizers.plugin", "--timeout", "900", *left_out]
        return subprocess.run([*command, *options, *tests], cwd=root, env=environment, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in RUNTIMES:
        sys.exit(f"the first argument is one of {', '.join(RUNTIMES)}")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
