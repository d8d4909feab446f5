"""Change the code in many small ways, one at a time, and list the changes that no unit test notices.

    scripts/mutate.py [TARGET...]    targets: plan, decisions, controller, gate, session (default: all)

Works in a copy below ``--folder`` with mutmut (the extra ``mutate``), so nothing of this tree is touched; a run that
was stopped goes on where it was. Ends with the diff of every survivor in ``FOLDER/TARGET.txt``. What the survivors mean
is in docs/testing.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLAN_TESTS = ("test_plan_*.py", "test_nodes.py", "test_decide.py", "test_proactive_replacement.py", "test_electors.py")
RESTORE_TESTS = ("test_early_local_state.py", "test_restore_round.py")
MACHINE_TESTS = (
    "test_machine*.py",
    "test_next_move.py",
    "test_takeover.py",
    *RESTORE_TESTS,
    "test_nodes.py",
    "test_plan_stores.py",
)
CONTROLLER_TESTS = (*MACHINE_TESTS, "test_hang_verdict.py", "test_relays.py", "test_fan_out.py", "test_heartbeat.py")
DECISIONS = tuple(
    f"flashrecovery/controller/{name}.py"
    for name in (
        *("machine", "recovery", "next_move", "relayout/next_step", "state/restore_plan", "takeover"),
        *("membership/launch", "membership/placement"),
    )
)
TARGETS = {
    "plan": (
        (
            "flashrecovery/plan/*",
            "flashrecovery/plan/*/*",
        ),
        (*PLAN_TESTS, "test_machine*.py"),
    ),
    "decisions": (DECISIONS, MACHINE_TESTS),
    "controller": (("flashrecovery/controller/*", "flashrecovery/controller/*/*"), (*PLAN_TESTS, *CONTROLLER_TESTS)),
    "gate": (("flashrecovery/worker/control/gate.py",), ("test_gate*.py",)),
    "session": (
        tuple(
            f"flashrecovery/worker/{name}.py"
            for name in ("session", "loop", "step/transaction", "step/sealing", "local_state/step_profile")
        ),
        ("test_versions.py", "test_sealing.py", "test_data_stream.py", "test_calls.py"),
    ),
}
"""What is mutated, and by which tests of ``tests/unit`` it is covered."""


def stage(folder: Path, target: str) -> Path:
    """A copy of the tree in which mutmut finds the package where it is imported from."""
    only, patterns = TARGETS[target]
    copy = folder / target
    if copy.exists():
        return copy
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "common" / "flashrecovery", copy / "flashrecovery", ignore=ignored)
    for name in ("tests", "fr_deepspeed", "fr_megatron"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    tests = sorted({f"tests/unit/{p.name}" for pattern in patterns for p in (ROOT / "tests/unit").glob(pattern)})
    markers = [name + ": see the repository" for name in ("slow", "grid", "soak", "chaos", "megatron", "deepspeed")]
    lines = (
        "[tool.pytest.ini_options]",
        'addopts = "-p no:cacheprovider"',
        "timeout = 120",
        f"markers = {markers}",
        "[tool.mutmut]",
        'source_paths = ["flashrecovery"]',
        f"only_mutate = {list(only)}",
        'pytest_add_cli_args = ["-k", "not seconds"]',  # a mutant may be slow, and a machine that mutates is busy
        f"pytest_add_cli_args_test_selection = {tests}",
        'also_copy = ["tests", "fr_deepspeed", "fr_megatron"]',
    )
    (copy / "pyproject.toml").write_text("\n".join(lines) + "\n")
    return copy


def mutmut(copy: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    # not this tree's package: the tests have to import the mutated one
    kept = [
        p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and ROOT not in (Path(p), *Path(p).parents)
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(kept)}
    command = [sys.executable, "-m", "mutmut", *arguments]
    return subprocess.run(command, cwd=copy, env=env, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def report(copy: Path, out: Path) -> str:
    """Write the survivors' diffs; returns a line with the numbers."""
    listed = mutmut(copy, "results", "--all", "true", capture_output=True).stdout
    outcomes = dict(line.strip().rsplit(": ", 1) for line in listed.splitlines() if ": " in line)
    counts = {outcome: list(outcomes.values()).count(outcome) for outcome in sorted(set(outcomes.values()))}
    with open(out, "w") as file:
        for name, outcome in outcomes.items():
            if outcome in ("survived", "no tests"):
                diff = mutmut(copy, "show", name, capture_output=True).stdout if outcome == "survived" else ""
                file.write(f"== {name}: {outcome}\n{diff}\n")
    return f"{copy.name}: {counts}; survivors in {out}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "mutants")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, help="stop each target after so long")
    parser.add_argument("--report-only", action="store_true", help="of runs that were made before")
    args = parser.parse_args()
    for target in args.targets:
        if target not in TARGETS:
            parser.error(f"no target {target!r}; there are {', '.join(TARGETS)}")
        copy = stage(args.folder, target)
        if not args.report_only:
            limit_s = 60 * args.minutes if args.minutes else None
            try:
                mutmut(copy, "run", "--max-children", str(args.processes), timeout=limit_s)
            except subprocess.TimeoutExpired:
                print(f"\n{target}: not all within {args.minutes:g} minutes")
        print(report(copy, args.folder / f"{target}.txt"))


if __name__ == "__main__":
    main()
