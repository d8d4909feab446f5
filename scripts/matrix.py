"""``make matrix``: a chosen selection of tests with each supported version of torch, DeepSpeed, Megatron, transformers
and Python, and docs/versions.md, which says what was run, when, and what came of it.

    python scripts/matrix.py                      # all entries, one after another
    python scripts/matrix.py "torch==2.14.1"      # one; the others' results stay as they are
    python scripts/matrix.py --list
    python scripts/matrix.py --find-python 3.12   # an interpreter that runs, not a shim that does not

An entry's environment lies in ``--dir`` and is removed when its tests have ended. With the Python that runs this, it is
a thin one above that Python's packages, and contains only what the entry asks for (another torch: 3 to 7 GB); with
another Python it is a whole one. Results are kept in docs/versions.json, from which the page is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
RESULTS = ROOT / "docs" / "versions.json"
TIMEOUT_S = 3600
NOT_FOR_ANOTHER_TORCH = ("torch", "triton", "setuptools", "filelock", "sympy")


@dataclass(frozen=True)
class Selection:
    """Tests that say whether a version is supported: a phrase for the page, and pytest's arguments."""

    name: str
    arguments: tuple[str, ...]


def units(*files: str) -> Selection:
    """Unit tests of the parts that touch a framework's inside."""
    return Selection("units", tuple(f"tests/unit/test_{name}.py" for name in ("capabilities", *files)))


GROUPS = "tests/integration/groups/test_groups_"
SMALL = "tests/conformance/test_versions.py::test_one_of_two_ranks_is_killed"
GRID = "tests/conformance/test_grid.py::test_fault_in_phase"
ZERO = "tests/conformance/test_deepspeed_grid.py::"
MEGATRON = "tests/conformance/test_megatron_grid.py::test_every_phase"
TRAINER = "tests/conformance/test_trainer.py::test_deaths_in_steps"

PLAIN = (
    units("groups_build", "torch_native", "refusals", "scaler", "leftovers", "data_stream"),
    Selection("group battery", (f"{GROUPS}battery.py", f"{GROUPS}interrupt.py")),
    Selection("two ranks, one killed: DDP, FSDP2", (f"{SMALL}[ddp]", f"{SMALL}[fsdp2]")),
    Selection("DDP of four ranks, three killed", (f"{GRID}[ddp-backward-sigkill]",)),
    Selection("FSDP2 of four ranks, three killed", (f"{GRID}[fsdp-backward-sigkill]",)),
)
DEEPSPEED = (
    units("deepspeed_beta_powers", "deepspeed_calls", "deepspeed_config", "deepspeed_hook", "deepspeed_offload"),
    Selection("two ranks, one killed: ZeRO 0 to 3", tuple(f"{SMALL}[zero{n}]" for n in ("0-fp32", 1, 2, 3))),
    Selection("ZeRO-2, a rank killed in each phase", (f"{ZERO}test_every_phase[zero2-sigkill-0]",)),
    Selection("ZeRO-3, a rank killed in each phase", (f"{ZERO}test_every_phase[zero3-sigkill-0]",)),
    Selection("ZeRO-2 offloaded, a rank killed in each phase", (f"{ZERO}test_settings[zero2-offload-overlap]",)),
    Selection("ZeRO-2 without the reset goes wrong", (f"{ZERO}test_without_the_reset_it_fails[zero2]",)),
)
MEGATRON_CORE = (
    units("megatron_flags", "megatron_pieces"),
    Selection("two ranks, one killed: the distributed optimizer", (f"{SMALL}[megatron]",)),
    Selection("TP2 x DP2, a rank killed in each phase", (f"{MEGATRON}[tp2-dp2-sigkill-0]",)),
    Selection("distributed optimizer, DP4, a rank killed in each phase", (f"{MEGATRON}[dp4-distributed-sigkill-0]",)),
)
FAILURES = "tests/conformance/test_megatron_failures.py::"
ELASTIC = "tests/integration/elastic/test_elastic_megatron.py::test_killed_and_not_replaced"
NEW_CORE = (  # 0.18 and 0.19 ask for Python 3.12
    units("megatron_flags", "megatron_pieces", "megatron_buckets", "megatron_support", "megatron_doctor"),
    *MEGATRON_CORE[2:],
    Selection("gradients set to zero last", (f"{FAILURES}test_gradients_that_are_set_to_zero_last",)),
    Selection("elastic, the distributed optimizer", (f"{ELASTIC}[distributed-bf16-optimizer-1]",)),
)
NEWEST_CORE = (
    *NEW_CORE,
    Selection("both overlaps, DP2, a rank killed in each phase", (f"{MEGATRON}[dp2-overlaps-sigkill-0]",)),
    Selection("PP2 x DP2, a rank killed in each phase", (f"{MEGATRON}[pp2-dp2-sigkill-0]",)),
    Selection("EP2 x DP2, a rank killed in each phase", (f"{MEGATRON}[ep2-dp2-alltoall-sigkill-0]",)),
    Selection("Megatron-FSDP, a rank killed in each phase", (f"{MEGATRON}[megatron-fsdp-sigkill-0]",)),
)
NEWEST = (
    units("groups_build", "torch_native", "refusals", "scaler", "leftovers", "data_stream", "learned_sizes"),
    units("deepspeed_calls", "deepspeed_config", "deepspeed_hook", "trainer"),
    units("megatron_flags", "megatron_pieces", "megatron_buckets", "megatron_support", "megatron_doctor"),
    Selection("groups", (f"{GROUPS}battery.py",)),
    Selection("two ranks, one killed", tuple(f"{SMALL}[{name}]" for name in ("ddp", "fsdp2", "zero2", "zero3"))),
    Selection("the Trainer with DDP, ranks killed", (f"{TRAINER}[hf-ddp]",)),
    Selection("Megatron", (f"{MEGATRON}[tp2-dp2-sigkill-0]", f"{MEGATRON}[dp2-overlaps-sigkill-0]")),
    *(one for one in NEW_CORE if one.name in ("gradients set to zero last", "elastic, the distributed optimizer")),
)
"""Of ``make test-new``: with the newest of everything at once."""
HUGGING_FACE = (
    units("trainer"),
    Selection("the Trainer with DDP, ranks killed", (f"{TRAINER}[hf-ddp]",)),
    Selection("the Trainer with ZeRO-2, ranks killed", (f"{TRAINER}[hf-zero2]",)),
)


@dataclass(frozen=True)
class Entry:
    """One line of the matrix. ``name``: requirements as pip takes them, and ``python==`` for the interpreter."""

    name: str
    selections: tuple[Selection, ...]

    @property
    def python(self) -> str:
        """The version of Python, "" for the one that runs this."""
        return next((r.removeprefix("python==") for r in self.name.split() if r.startswith("python==")), "")

    @property
    def requirements(self) -> list[str]:
        return [r for r in self.name.split() if not r.startswith("python==")]


TORCHES = ("2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
ENTRIES = (
    *(Entry(f"torch=={version}", PLAIN) for version in TORCHES),
    *(Entry(f"deepspeed=={version}", DEEPSPEED) for version in ("0.19.8", "0.19.0", "0.18.9", "0.17.6", "0.16.9")),
    *(Entry(f"megatron-core=={version}", MEGATRON_CORE) for version in ("0.16.1", "0.15.3", "0.14.0", "0.13.1")),
    Entry("transformers==5.24.0 accelerate==1.15.0", HUGGING_FACE),
    Entry("transformers==5.23.0 accelerate==1.15.0", HUGGING_FACE),
    Entry("transformers==4.57.6 accelerate==1.12.0", HUGGING_FACE),
    *(Entry(f"python=={python} torch==2.14.1", PLAIN) for python in ("3.10", "3.12", "3.13")),
    Entry("python==3.12 torch==2.14.1 megatron-core==0.19.2", NEWEST_CORE),
    *(Entry(f"python==3.12 torch==2.14.1 megatron-core=={version}", NEW_CORE) for version in ("0.18.2", "0.17.1")),
)


# -- environments ---------------------------------------------------------------------------------


def make_environment(entry: Entry, folder: Path) -> Path:
    """The Python of an environment with what the entry asks for.

    Raises:
        RuntimeError: it cannot be had, and why.
    """
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    pip += ["--no-cache-dir"]
    if entry.python:
        _run([find_python(entry.python), "-m", "venv", "--without-pip", str(folder)])
        constraints = folder / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        older = tuple(map(int, entry.python.split("."))) < sys.version_info[:2]  # for it many are too new
        left = [] if older else [line for line in lines if line.partition("==")[0] not in NOT_FOR_ANOTHER_TORCH]
        constraints.write_text("\n".join(left) + "\n")
        _run([*pip, *entry.requirements])
        _run([*pip, "-c", str(constraints), *entry.requirements, "--editable", f"{ROOT}[test]"])
        return python
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "base.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # after what the entry has of its own
    # A source distribution looks for the torch that it is installed beside, and compiles nothing ahead of its use.
    _run([*pip, "--no-build-isolation", *entry.requirements], DS_BUILD_OPS="0")
    return python


MANAGED = ("~/.pyenv/versions/*/bin", "~/.local/share/uv/python/*/bin", "~/*conda*/envs/*/bin", "/opt/python/*/bin")
"""Where version managers keep interpreters: their shims on PATH may be there, and run none."""


def find_python(version: str) -> str:
    """An interpreter of this version ("3.12") that runs.

    Raises:
        RuntimeError: there is none, on PATH or where version managers keep theirs.
    """
    name = f"python{version}"
    managed = [str(path) for place in MANAGED for path in sorted(Path("/").glob(str(Path(place).expanduser())[1:]))]
    for folder in (*os.environ.get("PATH", "").split(os.pathsep), *managed):
        found = shutil.which(name, path=folder or os.curdir)
        if found is not None and _says(found) == version:
            return found
    raise RuntimeError(f"no {name} that runs here, on PATH or in {', '.join(MANAGED)}")


def _says(interpreter: str) -> str:
    """The version that an interpreter says it is; "" if it does not run."""
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _run(command: Sequence[str], **environment: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise RuntimeError(f"{Path(command[0]).name} {' '.join(command[1:4])} ...: {' '.join(last)}")


# -- tests ----------------------------------------------------------------------------------------


def _environment(python: Path) -> dict[str, str]:
    path = os.pathsep.join((str(ROOT / "common"), str(ROOT)))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONDONTWRITEBYTECODE": "",
    }


def run_selection(python: Path, selection: Selection, scratch: Path, wrap: Sequence[str]) -> dict[str, Any]:
    """The outcome: counts by pytest, seconds, and what failed, with the first line of its reason."""
    report = scratch / "report.xml"
    report.unlink(missing_ok=True)
    command = [*wrap, str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", f"--junitxml={report}"]
    command += [f"--basetemp={scratch / 'tmp'}"]  # what a failure leaves stays until the next one
    began = time.monotonic()
    with open(scratch / "output.txt", "w") as output:
        try:
            subprocess.run(
                [*command, *selection.arguments],
                cwd=ROOT,
                env=_environment(python),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"seconds": TIMEOUT_S, "passed": 0, "failed": [f"did not end in {TIMEOUT_S} s"]}
    seconds = round(time.monotonic() - began)
    if not report.exists():
        lines = (scratch / "output.txt").read_text().strip().splitlines()
        last = (lines or ["no output"])[-1][:200]
        return {"seconds": seconds, "passed": 0, "failed": [f"pytest did not end: {last}"]}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed, skipped = [], 0
    for case in cases:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            why = (problem.get("message") or "").strip().splitlines()
            failed.append(f"{case.get('name')}: {(why or [''])[0][:200]}")
        skipped += case.find("skipped") is not None
    if not cases:
        failed.append("no test has been run")
    return {"seconds": seconds, "passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def look_inside(python: Path) -> dict[str, str]:
    """What ``flashrecovery doctor`` says of versions and of capabilities, by their names."""
    code = (
        "import json, sys\n"
        "from flashrecovery.cli import checks\n"
        "print(json.dumps({f.check: f.found for f in [*checks.torch_version(), *checks.frameworks()]}))\n"
    )
    done = subprocess.run(
        [str(python), "-c", code], cwd=ROOT, env=_environment(python), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the doctor says nothing"])[-1])
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_entry(entry: Entry, folder: Path, wrap: Sequence[str], keep: bool, only: str) -> dict[str, Any]:
    """All selections of one entry (with ``only``: those whose name contains it), in an environment made for it."""
    environment = folder / entry.name.replace(" ", "_")
    result: dict[str, Any] = {"when": time.strftime("%Y-%m-%d", time.gmtime()), "selections": {}}
    try:
        python = environment / "bin" / "python"
        if not (environment / "ready").exists():
            shutil.rmtree(environment, ignore_errors=True)
            python = make_environment(entry, environment)
            (environment / "ready").touch()
        result["inside"] = look_inside(python)
        for selection in entry.selections:
            if only in selection.name:
                print(f"    {selection.name} ...", flush=True)
                outcome = run_selection(python, selection, environment, wrap)
                result["selections"][selection.name] = outcome
                print(f"    {_outcome(outcome)}", flush=True)
    except RuntimeError as e:
        result["error"] = str(e)
        print(f"    {e}", flush=True)
    finally:
        if not keep:
            shutil.rmtree(environment, ignore_errors=True)
    return result


# -- the page -------------------------------------------------------------------------------------

HEAD = """# Versions

Written by `make matrix` (`scripts/matrix.py`). The code asks for no version number: what it uses of a
framework's inside is a [capability](../common/flashrecovery/capabilities/README.md) that is looked up in the installed
version, and `flashrecovery doctor` has a line for each. Without one that is needed, a job is refused before it trains,
by the capability's name. A version that was not tested runs, with a notice (`untested`).

Every job here has real SIGKILLs, on CPUs with gloo, and must end with the bits of the same launch without a fault.
Torch 2.13.0 is a CPU build; the others are CUDA builds that run on the CPU. Where nothing else is said, an entry has
torch 2.13.0 and Python 3.11. DeepSpeed 0.16 wraps bf16 without ZeRO in its `BF16_Optimizer`, which is refused by name:
the failure of `zero0` with 0.16.9. DeepSpeed 0.18.9's ZeRO-1 and 2 do not train with torch 2.13 under torchrun
either (an all-gather into views). Torch 2.11.0 has been run on a GPU, too: [gpu.md](gpu.md).

Compiled code may have other bits in another release: torch 2.15's Inductor has nested reductions on by default
(pytorch#191974) and takes no more threads than the affinity mask allows (pytorch#194605). That has not been measured
here. A job keeps one release on all its nodes.

`enable_reconfigure` (torch 2.14 and 2.15) is refused by name, and so are torchcomms' backends. Read in 2.15's wheel
(`nccl2/ProcessGroupNCCL.hpp`, `nccl2/NcclApi.hpp`, `c10d/ProcessGroup.hpp`), not run: such a group has no communicator
until the script itself has exchanged handles of all its members and called `reconfigure`, so that two would decide who
is a member. It needs NCCL 2.28 (`ncclCommRevoke`), `nccl2` (neither `nccl-legacy` nor `nccl-lazy` has it), and a group
of one backend only, not `cpu:gloo,cuda:nccl`. It tears the old communicator down and makes a new one, as a recovery
here does. What it adds, that handles stay valid, all groups have here already ([groups.md](groups.md)), for gloo and
every NCCL backend.
"""


def declared_now() -> list[str]:
    """All capabilities, as ``flashrecovery doctor`` names them."""
    from flashrecovery.capabilities.of_torch import TORCH
    from flashrecovery.capabilities.of_trainer import ACCELERATE, TRANSFORMERS
    from fr_deepspeed.capabilities import DEEPSPEED
    from fr_megatron.capabilities import MEGATRON

    frameworks = (TORCH, DEEPSPEED, MEGATRON, TRANSFORMERS, ACCELERATE)
    return [f"{framework.name}: {one.name}" for framework in frameworks for one in framework.capabilities]


def page(results: dict[str, Any], declared: Sequence[str]) -> str:
    """docs/versions.md, from docs/versions.json. ``declared``: all capabilities that there are."""
    lines = [HEAD, "| version | when | run | result |", "|---|---|---|---|"]
    for entry in ENTRIES:
        found = results.get(entry.name)
        if found is None:
            lines.append(f"| {entry.name} | | | not run yet |")
        elif "error" in found:
            lines.append(f"| {entry.name} | {found['when']} | | not run: {_cell(found['error'])} |")
        else:
            for number, (name, outcome) in enumerate(found["selections"].items()):
                first = f"{entry.name} | {found['when']}" if number == 0 else " | "
                lines.append(f"| {first} | {name} | {_cell(_outcome(outcome))} |")
    lines += ["", "## What differs inside", "", "Capabilities that versions have in different ways, or not at all.", ""]
    lines += ["| capability | way | version |", "|---|---|---|"]
    for capability, way, names in _ways(results):
        lines.append(f"| {capability} | {_cell(way)} | {', '.join(names)} |")
    unseen = _unseen(results, declared)
    if unseen:
        lines += ["", "Declared since, and not looked up there yet:", "", "| capability | version |", "|---|---|"]
        lines += [f"| {capability} | {', '.join(names)} |" for capability, names in unseen.items()]
    return "\n".join(lines) + "\n"


def _outcome(outcome: dict[str, Any]) -> str:
    failed = outcome["failed"]
    text = f"{outcome['passed']} passed" + (f", {outcome['skipped']} skipped" if outcome.get("skipped") else "")
    return f"{text}, **{len(failed)} failed**: {'; '.join(failed)}" if failed else text


def _ways(results: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """(capability, way, versions), for capabilities of which there are several ways."""
    found: dict[str, dict[str, list[str]]] = {}
    for entry in ENTRIES:
        for check, way in results.get(entry.name, {}).get("inside", {}).items():
            if _is_of(check, entry):
                found.setdefault(check, {}).setdefault(way, []).append(entry.name)
    return [(check, way, names) for check, ways in found.items() if len(ways) > 1 for way, names in ways.items()]


def _unseen(results: dict[str, Any], declared: Sequence[str]) -> dict[str, list[str]]:
    """The versions whose inside was looked at before these capabilities were declared."""
    looked_at = [(entry, results[entry.name]["inside"]) for entry in ENTRIES if "inside" in results.get(entry.name, {})]
    found = {
        check: [entry.name for entry, inside in looked_at if _is_of(check, entry) and check not in inside]
        for check in declared
    }
    return {check: names for check, names in found.items() if names}


def _is_of(check: str, entry: Entry) -> bool:
    """The capability is of the framework whose version the entry is about."""
    framework, colon, _ = check.partition(": ")
    asked = entry.name.replace("-core", "").lower()
    return bool(colon) and framework.replace("-core", "").lower() in asked


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*", metavar="ENTRY", help="as --list shows them; all if none is given")
    parser.add_argument("--list", action="store_true", help="print the entries and their selections")
    parser.add_argument("--tests-new", action="store_true", help="print the tests of `make test-new`")
    parser.add_argument("--find-python", metavar="VERSION", help="print where an interpreter of it is that runs")
    parser.add_argument("--dir", type=Path, default=Path("/tmp/flashrecovery-matrix"), help="of the environments")
    parser.add_argument("--keep", action="store_true", help="do not remove an environment; it is used again")
    parser.add_argument("--only", default="", metavar="WORDS", help="selections whose name contains this")
    parser.add_argument("--wrap", default="", metavar="COMMAND", help="by which each pytest is run, say 'nice -n 10'")
    arguments = parser.parse_args()
    known = {entry.name: entry for entry in ENTRIES}
    if arguments.find_python:
        print(find_python(arguments.find_python))
        return
    if arguments.tests_new:
        print(*dict.fromkeys(test for selection in NEWEST for test in selection.arguments))
        return
    if arguments.list:
        for entry in ENTRIES:
            print(f"{entry.name}: {', '.join(s.name for s in entry.selections)}")
        return
    if unknown := [name for name in arguments.entries if name not in known]:
        parser.error(f"unknown entry {unknown[0]!r}; allowed: {', '.join(known)}")
    failed = False
    for entry in [known[name] for name in arguments.entries or known]:
        print(f"==> {entry.name}", flush=True)
        arguments.dir.mkdir(parents=True, exist_ok=True)
        result = run_entry(entry, arguments.dir, shlex.split(arguments.wrap), arguments.keep, arguments.only)
        results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        before = results.get(entry.name, {}).get("selections", {}) if arguments.only else {}
        result["selections"] = {**before, **result["selections"]}
        results[entry.name] = result
        failed |= "error" in result or any(s["failed"] for s in result["selections"].values())
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(page(json.loads(RESULTS.read_text()), declared_now()))
    sys.exit(failed)


if __name__ == "__main__":
    main()
