"""Break the worker's session and its recoverer in listed ways, one at a time, and say which ways no test notices.

    scripts/mutate_session.py [NAME...]    names of mutants, or parts of them (default: all)

A session shows what it is worth only in real processes that lose a real rank. So these mutants are chosen by hand and
run against whole jobs: minutes for one that survives, and more with ``--all-tests``. It works in copies of the tree
below ``--folder`` and ends with exit status 1 if a mutant has survived. docs/testing.md judges the survivors.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SESSION, RECOVER = (f"common/flashrecovery/worker/{name}.py" for name in ("session", "recover"))
UNIT = (
    "session_beats",
    "data_stream",
    "registered",
    "versions",
    "loop_checks",
    "wait_for_stop",
    "torch_native",
    "habits",
)
LAUNCHER = "tests/integration/test_launcher.py"
LOOPS = (*(f"tests/unit/test_{name}.py" for name in UNIT), "tests/conformance/test_loops.py")
QUICK = (
    *LOOPS,
    f"{LAUNCHER}::test_wrong_use_ends_the_job_with_its_reason",
    f"{LAUNCHER}::test_a_step_that_always_fails_ends_the_job",
    f"{LAUNCHER}::test_an_exception_between_two_steps_is_a_failure_like_any_other",
    f"{LAUNCHER}::test_bitwise_whatever_the_body_does",
    f"{LAUNCHER}::test_a_survivor_whose_collective_fails_before_it_hears_why_is_not_lost",
)
ALL = (*LOOPS, LAUNCHER, "tests/integration/test_torch_native_recovery.py")
PARTS = ("common", "tests", "fr_deepspeed", "fr_megatron", "examples", "patches", "docs", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """One way to break ``file``: ``new`` instead of ``old``, which stands there exactly once."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    # -- a version is complete when it is handed out ------------------------------------------------
    Mutant(
        "resumed-is-settled",
        SESSION,
        "self._unsettled, self._committed, self._proof_due = True,",
        "self._unsettled, self._committed, self._proof_due = False,",
    ),
    Mutant(
        "resumed-counts-as-committed",
        SESSION,
        "= True, False, self.gate.generation > 0",
        "= True, True, self.gate.generation > 0",
    ),
    Mutant("no-proof", SESSION, "= True, False, self.gate.generation > 0", "= True, False, False"),
    Mutant(
        "always-proof", SESSION, "        self._proof_due = False\n        if not self._own", "        if not self._own"
    ),
    Mutant("spoiled-counts", SESSION, "if self._committed and spoiled:", "if False:"),
    Mutant(
        "not-sealed-late",
        SESSION,
        "            self._seal(version, now, early=False)\n\n    def _publish",
        "            pass\n\n    def _publish",
    ),
    Mutant(
        "late-is-finished",
        SESSION,
        "        if self._written == now:\n            end =",
        "        if True:\n            end =",
    ),
    Mutant("published-though-stopped", SESSION, "self._published = not self.gate.stopped", "self._published = True"),
    Mutant(
        "touched-is-not-kept",
        SESSION,
        "        if habits.touched or not habits.known:\n            # Of",
        "        if False:\n            # Of",
    ),
    Mutant("not-copied", SESSION, "        self.copies.start(version)\n", ""),
    Mutant(
        "restored-capsule-not-in-page",
        SESSION,
        "                self.gate.page.write_capsule(version, capsule)\n",
        "                pass\n",
    ),
    Mutant(
        "late-not-told", SESSION, "self.late_versions[version] = now != before", "self.late_versions[version] = False"
    ),
    # -- a void run is taken back ----------------------------------------------------------------------
    Mutant(
        "void-run-lasts",
        SESSION,
        "        if self._void_run is not None:\n            self._take_back",
        "        if False:\n            self._take_back",
    ),
    Mutant("void-tensors-last", SESSION, "        void_run.take_back()\n", ""),
    Mutant("void-plain-lasts", SESSION, "        self.restore_plain(self.gate.version, fresh=False)\n", ""),
    Mutant(
        "void-gradients-last",
        SESSION,
        "            adapter.reset()\n        void_run",
        "            pass\n        void_run",
    ),
    Mutant("void-run-no-end", SESSION, "        void_run.end()\n", ""),
    Mutant("void-leaver-is-done", SESSION, "            self._left_in_void_run()\n", "            pass\n"),
    Mutant("newer-plain-stays", SESSION, "            shard.drop_after(version)", "            pass"),
    # -- before the mutation ------------------------------------------------------------------------------
    Mutant(
        "begin-keeps-seals",
        SESSION,
        "self._written = self._at_seal = self._at_mutation = None\n        self._hook",
        "self._hook",
    ),
    Mutant(
        "begin-keeps-hook",
        SESSION,
        "        self._hook_fired = False\n        self._failures",
        "        self._failures",
    ),
    Mutant("begin-keeps-failures", SESSION, "        self._failures_before = groups.failure_count()\n", ""),
    Mutant("recheck-is-blind", SESSION, "if recheck and now == self._at_seal:", "if recheck:"),
    Mutant("copies-not-awaited", SESSION, "        self.copies.wait()\n\n    def mutating", "\n    def mutating"),
    Mutant(
        "failed-collective-is-passed",
        SESSION,
        "        self._refuse_failed_collectives()\n        self.gate.check()\n        version",
        "        self.gate.check()\n        version",
    ),
    Mutant("changed-is-not-sealed", SESSION, "if sealed and self._written != now:", "if False:"),
    Mutant("no-barrier", SESSION, "elif not seen_forward or self._explicit_barrier or habits.reseal:", "elif False:"),
    Mutant("habits-not-compared", SESSION, "if proof.is_due(version):", "if False:"),
    Mutant(
        "barrier-is-not-said",
        SESSION,
        "            with self.gate.in_barrier():\n                group",
        "            if True:\n                group",
    ),
    Mutant("never-touched", SESSION, "if touched and not habits.touched:", "if False:"),
    Mutant(
        "touched-by-data-unseen",
        SESSION,
        "        if not self.registry.habits.known:\n            # Once",
        "        if False:\n            # Once",
    ),
    Mutant(
        "step-outside-block",
        SESSION,
        "        if not self.gate.in_block:\n            raise Unsupp",
        "        if False:\n            raise Unsupp",
    ),
    # -- the commit ---------------------------------------------------------------------------------------
    Mutant("torn-is-committed", SESSION, "            self._refuse_torn()\n        else", "        else"),
    Mutant(
        "unmutated-not-sealed",
        SESSION,
        "            self._before_mutation(version, seen_forward=False)\n            self._quiet",
        "            self._quiet",
    ),
    Mutant(
        "unmutated-failed-is-passed",
        SESSION,
        "            self._refuse_failed_collectives()\n            self.copies.wait()",
        "            self.copies.wait()",
    ),
    Mutant("no-stand-in", SESSION, "groups.stand_in(not self._own_calls)", "pass"),
    Mutant("stand-in-stays", SESSION, "        groups.stand_in(False)\n", ""),
    Mutant("stand-ins-from-start", SESSION, "            self._stand_ins_before = groups.stand_in_count()\n", ""),
    Mutant(
        "outside-not-watched",
        SESSION,
        "        if not self._own_calls:\n            self._outside.watch(True)",
        "            pass",
    ),
    Mutant("late-never-learnt", SESSION, "if late and not habits.late:", "if False:"),
    Mutant("undo-never-learnt", SESSION, "if not self._quiet and not habits.undo:", "if False:"),
    Mutant("changed-never-learnt", SESSION, "if changed and not habits.reseal and not habits.changed:", "if False:"),
    # -- the start -----------------------------------------------------------------------------------------
    Mutant(
        "own-objects-are-common", SESSION, "registry.habits.own = sorted({*registry.habits.own, *differing})", "pass"
    ),
    Mutant(
        "settings-may-differ",
        SESSION,
        "if unlike := [name for name in differing if name in settings]:",
        "if unlike := []:",
    ),
    Mutant("start-not-sealed", RECOVER, "            s.seal_start()\n", ""),
    Mutant("world-not-checked", SESSION, "        self._check_world()\n", ""),
    Mutant(
        "second-loop-runs",
        SESSION,
        "    def open(self, num_steps: int | None) -> None:",
        "    def open(self, num_steps: int | None) -> None:\n        self._recoverer = None",
    ),
    # -- whose failure it is -------------------------------------------------------------------------------
    Mutant(
        "no-stop-follows", SESSION, "return self.gate.stopped or self._stop_follows(error)", "return self.gate.stopped"
    ),
    Mutant("every-error-is-a-stop", SESSION, "return self.gate.stopped or self._stop_follows(error)", "return True"),
    # -- the controller's commands -----------------------------------------------------------------------
    Mutant(
        "stop-touched-not-torn", RECOVER, "        if s.gate.live >= 0 and s.touched:\n            s.gate.torn()\n", ""
    ),
    Mutant("stop-copies-run-on", RECOVER, "        s.copies.stop()\n", ""),
    Mutant("stop-not-drained", RECOVER, "        if not report.quiet:", "        if False:"),
    Mutant(
        "stop-late-not-told",
        RECOVER,
        "        reply.late.extend(sorted(v for v, late in s.late_versions.items() if late))\n",
        "",
    ),
    Mutant("stop-no-reset", RECOVER, "            self._reset()\n        return", "            pass\n        return"),
    Mutant("fresh-stays", RECOVER, "        self._fresh = False\n        if s", "        if s"),
    Mutant("never-fresh", RECOVER, "self._fresh = session.connection.detached", "self._fresh = False"),
    Mutant("transfer-not-torn", RECOVER, "        if incoming:\n            s.gate.torn()\n", ""),
    Mutant(
        "undo-not-torn",
        RECOVER,
        "                s.gate.torn()\n                s.copies.restore_undo",
        "                s.copies.restore_undo",
    ),
    Mutant(
        "undo-not-restored",
        RECOVER,
        "                s.copies.restore_undo(shard, version)\n",
        "                pass\n",
    ),
    Mutant("digests-not-looked-at", RECOVER, "wrong = report.mismatched if s.settings.verify else []", "wrong = []"),
    Mutant("wrong-is-adopted", RECOVER, "if n not in wrong", "if True"),
    Mutant("plain-not-restored", RECOVER, "        s.restore_plain(version, fresh=self._fresh)\n", ""),
    Mutant("joined-is-not-live", RECOVER, "            s.gate.live = 0\n", "            pass\n"),
    Mutant(
        "needs-never-told-again",
        RECOVER,
        "if self._told != (command.stop.needs_known, needs):",
        "if not self._told[1]:",
    ),
    Mutant("held-early-not-said", RECOVER, "early=shard.early(v),", "early=False,"),
    Mutant("page-early-not-said", RECOVER, "early=v in early)", "early=False)"),
    Mutant(
        "outdated-is-obeyed",
        RECOVER,
        "        if s.gate.outdated(command.generation):\n            return False\n        body",
        "        body",
    ),
    Mutant("stays-detached", RECOVER, "        groups.set_detached(False)\n", ""),
)


class Trial:
    """A copy of the tree in which mutants are tried, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in PARTS:
            source, target = ROOT / part, folder / part
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)

    def run(self, mutant: Mutant, tests: Sequence[str], limit_s: float) -> str:
        """Which test has killed it: "survived", "too long" or the first failed test."""
        path = self.folder / mutant.file
        path.write_text(mutated(mutant))
        out = self.folder.parent / f"{mutant.name}.log"
        env = {**os.environ, "PYTHONPATH": f"{self.folder / 'common'}{os.pathsep}{self.folder}"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
        try:
            with open(out, "w") as file:
                process = subprocess.Popen(
                    command, cwd=self.folder, env=env, stdout=file, stderr=file, start_new_session=True
                )
                try:
                    status = process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait()
                    return "too long"
        finally:
            path.write_text((ROOT / mutant.file).read_text())
        if status == 0:
            return "survived"
        failed = [line for line in out.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0][:150] if failed else f"exit status {status}, see {out}"


def mutated(mutant: Mutant) -> str:
    """The file's text with the mutant in it. Raises ValueError if the code is no longer what the mutant changes."""
    text = (ROOT / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {text.count(mutant.old)} times in {mutant.file}: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "mutants" / "session")
    parser.add_argument("--all-tests", action="store_true", help="more of the launcher's tests, and plain PyTorch's")
    parser.add_argument("--jobs", type=int, default=1, help="at the same time (a job has up to four ranks)")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one mutant")
    parser.add_argument("--minutes", type=float, help="begin no other mutant after so long")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.names or any(name in m.name for name in args.names)]
    for mutant in MUTANTS:
        mutated(mutant)
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in chosen:
        waiting.put(mutant)
    began = time.monotonic()
    survivors: list[str] = []

    def work(number: int) -> None:
        trial = Trial(args.folder / f"copy{number}")
        while args.minutes is None or time.monotonic() - began < 60 * args.minutes:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            start = time.monotonic()
            outcome = trial.run(mutant, ALL if args.all_tests else QUICK, args.limit)
            print(f"{mutant.name:32} {time.monotonic() - start:5.0f} s  {outcome}", flush=True)
            if outcome == "survived":
                survivors.append(mutant.name)

    threads = [threading.Thread(target=work, args=(n,), name=f"mutants-{n}") for n in range(args.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{len(chosen) - waiting.qsize()} of {len(chosen)} were run; survivors: {survivors or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
