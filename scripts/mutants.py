"""What the mutation runs by hand share: mutants as exact replacements of text, tried in copies of the tree.

The scripts beside it say which mutants there are, and which tests are to notice each.
"""

from __future__ import annotations

import argparse
import ast
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("common", "tests", "fr_deepspeed", "fr_megatron", "examples", "patches", "docs", "pyproject.toml")
CHOSEN = "not slow and not soak and not chaos and not libraries and (not grid or mutants)"
"""What `make test` runs, and what is too dear for it and kills mutants."""
SURVIVED, TOO_LONG = "survived", "too long"
INVALID = "proves nothing: "
_BROKEN = ("flashrecovery.errors.BuildError: compiling", "ERROR: not found: ", "ERROR: file or directory not found: ")
"""In the output of tests that have failed because the mutant does not compile, or because there is no such test."""
_TIME_UP = ("from pytest-timeout", "subprocess.TimeoutExpired")
"""In the output where a fixture has waited in vain, as it may on a busy machine: a test has not begun."""
_NONE_RAN = 5
"""pytest's exit status."""


@dataclass(frozen=True)
class Mutant:
    """One way to break ``file``: ``new`` instead of ``old``, which stands there exactly once."""

    name: str
    file: str
    old: str
    new: str


def mutated(mutant: Mutant) -> str:
    """The file's text with the mutant in it. Raises ValueError if the code is no longer what the mutant changes, or the
    mutant no Python."""
    text = (ROOT / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {text.count(mutant.old)} times in {mutant.file}: {mutant.old!r}")
    text = text.replace(mutant.old, mutant.new)
    if mutant.file.endswith(".py"):
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"{mutant.name}: {error}") from error
    return text


class Trial:
    """A copy of the tree in which mutants are tried, one after the other.

    Args:
        env: for the tests, beside this process's.
        build: a command that compiles the C++, so that no time limit of a test has to be long enough for that.

    Raises RuntimeError if the tests would not import the copy, or the C++ does not compile.
    """

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None, build: Sequence[str] = ()) -> None:
        self.folder = folder = folder.resolve()
        path = f"{folder / 'common'}{os.pathsep}{folder}"
        self._env = {**os.environ, **(env or {}), "PYTHONPATH": path}
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
        for part in PARTS:
            source, target = ROOT / part, folder / part
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        self._check_import()
        self._build = build
        if problem := self._built():
            raise RuntimeError(problem)

    def _check_import(self) -> None:
        code = "import flashrecovery; print(flashrecovery.__file__)"
        command = [sys.executable, "-c", code]
        found = subprocess.run(command, cwd=self.folder, env=self._env, capture_output=True, text=True, check=True)
        if not Path(found.stdout.strip()).is_relative_to(self.folder):
            raise RuntimeError(f"the tests in {self.folder} import {found.stdout.strip()}")

    def _built(self) -> str:
        """Why not; "" if it has been."""
        if not self._build:
            return ""
        done = subprocess.run(self._build, cwd=self.folder, env=self._env, capture_output=True, text=True)
        return done.stderr.strip()[-500:] or f"exit status {done.returncode}" if done.returncode else ""

    def run(self, mutant: Mutant | None, tests: Sequence[str], limit_s: float) -> str:
        """Which test has killed it: the first that has failed, ``SURVIVED``, ``TOO_LONG``, or what begins with
        ``INVALID``. Without a mutant the code is as it is."""
        name = "unchanged" if mutant is None else mutant.name
        out = self.folder.parent / f"{name}.log"
        if mutant is not None:
            (self.folder / mutant.file).write_text(mutated(mutant))
        try:
            if mutant is not None and not mutant.file.endswith(".py") and (problem := self._built()):
                return f"{INVALID}{problem.splitlines()[-1]}"
            status = self._status(tests, out, limit_s)
        finally:
            if mutant is not None:
                (self.folder / mutant.file).write_text((ROOT / mutant.file).read_text())
        return TOO_LONG if status is None else verdict(status, out.read_text(), out)

    def _status(self, tests: Sequence[str], out: Path, limit_s: float) -> int | None:
        """pytest's, None if it has taken too long."""
        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-m", CHOSEN]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        with open(out, "w") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self._env, stdout=file, stderr=file, start_new_session=True
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                _kill(process.pid)
                process.wait()
                return None


def _kill(pid: int) -> None:
    """The process and all that it has started: a job is in a separate session."""
    tests = psutil.Process(pid)
    for process in [tests, *tests.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def verdict(status: int, text: str, where: Path) -> str:
    """What pytest's exit status and output say of a mutant; see :meth:`Trial.run`."""
    if status == 0:
        return SURVIVED
    broken = next((line.strip() for line in text.splitlines() if any(sign in line for sign in _BROKEN)), None)
    if status == _NONE_RAN or broken is not None:
        return f"{INVALID}{(broken or 'no test was run')[:120]}"
    failed = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed and failed[0].startswith("ERROR") and any(sign in text for sign in _TIME_UP):
        return f"{INVALID}the time was up before the test had begun"
    return failed[0][:150] if failed else f"exit status {status}, see {where}"


def noticed(outcome: str) -> bool:
    """Whether a test has killed the mutant."""
    return outcome not in (SURVIVED, TOO_LONG) and not outcome.startswith(INVALID)


def chosen(mutants: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """Those whose name has one of ``names`` in it; all if there are none. All mutants must fit the code."""
    for mutant in mutants:
        mutated(mutant)
    return [m for m in mutants if not names or any(name in m.name for name in names)]


def arguments(said: str | None, name: str, limit_s: float) -> argparse.ArgumentParser:
    """Of a run: the names of mutants, and those that all runs have. ``name``: of the folder."""
    parser = argparse.ArgumentParser(description=said, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "mutants" / name)
    parser.add_argument("--limit", type=float, default=limit_s, help="seconds for one mutant")
    parser.add_argument("--minutes", type=float, help="begin no other mutant after so long")
    return parser


def run(
    mutants: Sequence[Mutant],
    tests_of: Callable[[Mutant], Sequence[str]],
    trial: Callable[[int], Trial],
    *,
    jobs: int,
    limit_s: float,
    minutes: float | None,
) -> list[str]:
    """Try each mutant, and print what has come of it. ``trial``: makes that of one of ``jobs`` threads; ``minutes``:
    no other is begun after so long. Returns the names of those that no test has noticed."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    began = time.monotonic()
    survivors: list[str] = []

    def work(number: int) -> None:
        mine = trial(number)
        while minutes is None or time.monotonic() - began < 60 * minutes:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            start = time.monotonic()
            outcome = mine.run(mutant, tests_of(mutant), limit_s)
            print(f"{mutant.name:32} {time.monotonic() - start:5.0f} s  {outcome}", flush=True)
            if not noticed(outcome):
                survivors.append(mutant.name)

    threads = [threading.Thread(target=work, args=(n,), name=f"mutants-{n}") for n in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{len(mutants) - waiting.qsize()} of {len(mutants)} were run; survivors: {survivors or 'none'}")
    return survivors
