"""What is generated agrees with what it is generated from, and the launcher stays light."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from flashrecovery import errors
from flashrecovery.kinds import FailureKind, NoticeKind

ROOT = Path(__file__).resolve().parents[2]


OURS = ("flashrecovery", "fr_deepspeed", "fr_megatron")


def _toml(name: str):  # type: ignore[no-untyped-def]
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
    return tomllib.loads(_text(name))


def _text(name: str) -> str:
    return (ROOT / name).read_text()


def _is_test(name: str) -> bool:
    """A file, or a function in it."""
    file, _, function = name.partition("::")
    return (ROOT / file).exists() and (not function or f"def {function}(" in _text(file))


def _tracked(*patterns: str) -> list[str]:
    """Files that git knows, by their paths in the repository."""
    command = ["git", "ls-files", *patterns]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def _script(name: str):  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    sys.path.insert(0, str(ROOT / "scripts"))  # as if it were run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return module


def test_configuration_tables_are_current() -> None:
    docs = _script("generate_config_docs")
    text = docs.DOC.read_text()
    assert docs.render(text) == text, "run scripts/generate_config_docs.py"


def test_generated_messages_are_current(tmp_path: Path) -> None:
    from grpc_tools import protoc

    name = "flashrecovery/proto/flashrecovery"
    assert protoc.main(["protoc", f"-I{ROOT / 'common'}", f"--python_out={tmp_path}", f"{name}.proto"]) == 0
    current = (tmp_path / f"{name}_pb2.py").read_text()
    assert current == (ROOT / "common" / f"{name}_pb2.py").read_text(), "run scripts/generate_proto.py"


def test_the_launcher_does_not_import_torch() -> None:
    code = "import sys, flashrecovery.job, flashrecovery.cli.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_core_imports_no_framework() -> None:
    for path in (ROOT / "common").rglob("*.py"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] in ("import", "from"):
                assert words[1].split(".")[0] not in ("deepspeed", "megatron"), (path, line)


def test_the_controller_never_imports_the_worker() -> None:
    for path in (ROOT / "common/flashrecovery/controller").rglob("*.py"):
        assert "flashrecovery.worker" not in path.read_text(), path


def test_the_files_that_the_architecture_names_are_there() -> None:
    """Each name is the end of a path."""
    text = _text("docs/architecture.md")
    folders = ("common", "fr_deepspeed", "fr_megatron", "tests", "docs", "scripts")
    here = [p.relative_to(ROOT).as_posix() for folder in folders for p in (ROOT / folder).rglob("*.*")]
    named = set(re.findall(r"`([\w/]+\.(?:py|h|md))`", text))
    assert len(named) > 40
    assert [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in here)] == []


def test_the_functions_that_the_architecture_names_are_there() -> None:
    """`file.py` (`function`): of a class as `Class.method`."""
    text = _text("docs/architecture.md")
    section = text[text.index("## Where is it decided?") : text.index("## Threads and loops")]
    found = re.findall(r"`([\w/]+\.py)` \(([^)]*)\)", section)
    named = [(file, name) for file, names in found for name in re.findall(r"`([\w.]+)`", names)]
    assert len(named) > 20
    missing = []
    for file, name in named:
        path = next(p for p in (ROOT / "common/flashrecovery" / file, ROOT / file) if p.exists())
        body: list[ast.stmt] = ast.parse(path.read_text()).body
        for part in name.split("."):
            inner = [n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
            body = next((list(n.body) for n in inner if n.name == part), [])
        missing += [f"{file}: {name}"] if not body else []
    assert missing == []


def test_what_scripts_import_of_ours_is_there() -> None:
    """Those that only the long runs start, too."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("megatron.core")
    wrong = []
    for name in _tracked("tests/*.py", "benchmarks/*.py", "examples/*.py", "scripts/*.py"):
        for node in ast.walk(ast.parse(_text(name))):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in OURS:
                continue
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if not hasattr(module, alias.name) and not (hasattr(module, "__path__") and find_spec(inner)):
                    wrong.append(f"{name}: {inner}")
    assert not wrong


def test_what_the_mutation_runs_name_is_there() -> None:
    """Each place that is broken by hand stands exactly once where it is said to be; each pattern finds something."""
    by_hand = _script("mutate_session")
    assert by_hand.chosen(by_hand.MUTANTS, []) == [*by_hand.MUTANTS]
    for tests in (by_hand.LOOPS, by_hand.QUICK, by_hand.ALL):
        assert [name for name in tests if not _is_test(name)] == []
    parity = _script("mutate_parity")
    assert parity.chosen(parity.MUTANTS, []) == [*parity.MUTANTS]
    assert [name for name in parity.TESTS if not _is_test(name)] == []
    for only, patterns in _script("mutate").TARGETS.values():
        assert [p for p in only if not list((ROOT / "common").glob(p))] == []
        assert [p for p in patterns if not list((ROOT / "tests" / "unit").glob(p))] == []


def test_each_mend_for_nccl_is_taken_out_or_it_is_said_why_not() -> None:
    nccl = _script("mutate_nccl")
    assert nccl.chosen(nccl.MUTANTS, []) == [*nccl.MUTANTS]
    assert [row.number for row in nccl.ROWS] == list(range(1, 33))
    assert [row.number for row in nccl.ROWS if not row.mutants and not row.without] == []
    named = {test for tests in nccl.TESTS.values() for test in tests if not test.startswith("--")}
    assert [test for test in sorted(named) if not _is_test(test)] == []
    assert all(
        tests and m.name in _text("docs/testing.md") for m, tests in ((m, nccl.TESTS[m.name]) for m in nccl.MUTANTS)
    )


def test_a_mutant_that_proves_nothing_is_not_taken_for_noticed(tmp_path: Path) -> None:
    mutants = _script("mutants")

    def of(status: int, text: str) -> str:
        outcome = mutants.verdict(status, text, tmp_path)
        return "noticed" if mutants.noticed(outcome) else outcome

    assert of(0, "3 passed") == "survived"
    assert of(1, "E   AssertionError\nFAILED tests/unit/test_x.py::test_y - AssertionError") == "noticed"
    assert of(-6, "Fatal Python error: Aborted") == "noticed"
    broken = "flashrecovery.errors.BuildError: compiling the backend failed; install a compiler"
    assert of(1, f"E   {broken}\nERROR tests/x.py").startswith("proves nothing: E   flashrecovery")
    late = "Failed: Timeout (>180.0s) from pytest-timeout.\nERROR tests/x.py::test_y"
    assert of(1, late).startswith("proves nothing: the time was up")
    assert of(1, late.replace("ERROR", "FAILED")) == "noticed"
    late = "E   subprocess.TimeoutExpired: Command '...' timed out after 170 seconds\nERROR tests/x.py::test_y"
    assert of(1, late).startswith("proves nothing: the time was up")
    assert of(1, "E   AssertionError: Traceback\nERROR tests/x.py::test_y - AssertionError") == "noticed"
    assert of(5, "1 deselected") == "proves nothing: no test was run"
    assert of(4, "ERROR: not found: tests/x.py::test_gone").startswith("proves nothing")
    for old in ("no such text", "import"):  # not there, and there more than once
        with pytest.raises(ValueError, match=r"times in scripts/mutants\.py"):
            mutants.mutated(mutants.Mutant("m", "scripts/mutants.py", old, ""))
    with pytest.raises(ValueError, match="m: "):
        mutants.mutated(mutants.Mutant("m", "scripts/mutants.py", "def noticed(outcome", "def noticed(("))


def test_a_mutant_that_takes_too_long_leaves_no_job_behind(tmp_path: Path) -> None:
    """Its processes may be in their own sessions."""
    mutants = _script("mutants")
    code = "import subprocess, sys, time\n{}time.sleep(600)\n"
    inner = code.format("")
    job = f"subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)\nprint(flush=True)\n"
    tests = subprocess.Popen([sys.executable, "-c", code.format(job)], stdout=subprocess.PIPE)
    assert tests.stdout is not None and tests.stdout.readline()
    (left,) = psutil.Process(tests.pid).children()
    mutants._kill(tests.pid)
    tests.communicate()
    psutil.wait_procs([left], 10)
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE


def test_every_error_failure_and_notice_has_an_entry_that_says_what_to_do() -> None:
    pages = _script("generate_errors_docs")
    assert _text("docs/errors_and_notices.md") == pages.render(), "run scripts/generate_errors_docs.py"
    types, raised = pages.errors()
    kinds = ROOT / "common/flashrecovery/kinds.py"
    failures, notices = pages.members(kinds, "FailureKind"), pages.members(kinds, "NoticeKind")
    assert {entry.name for entry in failures} == {kind.value for kind in FailureKind}
    assert {entry.name for entry in notices} == {kind.value for kind in NoticeKind}
    defined = {name for name, thing in vars(errors).items() if isinstance(thing, type)}
    assert defined <= {entry.name for entry in types} and raised["ConfigError"]
    assert [entry for entry in (*types, *failures, *notices) if not entry.means or not entry.do] == []


def test_a_docstring_without_advice_has_no_entry() -> None:
    pages = _script("generate_errors_docs")
    assert pages.parsed("x", "It is\n    lost.\n\n    Do: look\n    for it.\n\n    Args: none") == pages.Entry(
        "x", "It is lost.", "Look for it."
    )
    assert not pages.parsed("x", "It is lost.").do and not pages.parsed("x", "").means


def test_a_wheel_has_all_packages_but_the_stand_ins_for_a_gpu() -> None:
    find_packages = pytest.importorskip("setuptools").find_packages
    chosen = _toml("pyproject.toml")["tool"]["setuptools"]["packages"]["find"]
    packed = {
        name
        for where in chosen["where"]
        for name in find_packages(str(ROOT / where), include=chosen["include"], exclude=chosen["exclude"])
    }
    here = {
        ".".join(path.parent.relative_to(root).parts)
        for root, names in ((ROOT / "common", ["flashrecovery"]), (ROOT, ["fr_deepspeed", "fr_megatron"]))
        for name in names
        for path in (root / name).rglob("__init__.py")
    }
    assert here - packed == {"fr_megatron.cpu"} and packed <= here


def test_every_folder_says_what_it_is_for() -> None:
    """In a README of a few lines. (Inner folders are explained in that of the folder around them.)"""
    roots = (
        "common/flashrecovery",
        "fr_deepspeed",
        "fr_megatron",
        "tests",
        "benchmarks",
        "examples/gpt",
        "scripts",
        "patches",
    )
    folders = {Path(name).parent for name in _tracked(*roots) if name.endswith(".py")} - {Path("common/flashrecovery")}
    inner = {
        f
        for f in folders
        if (f.parts[0] in ("fr_megatron", "benchmarks", "examples") and f.as_posix() not in roots)
        or (f.parts[0] == "common" and len(f.parts) > len(Path("common/flashrecovery/worker").parts))
        or (f.is_relative_to("tests/integration") and f.parts[2:])
    }
    assert [f for f in sorted(folders - inner) if not (ROOT / f / "README.md").exists()] == []


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for name in _tracked("*.md"):
        text = re.sub(r"^```.*?^```", "", _text(name), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            there = (ROOT / name).parent / path if path else ROOT / name
            if not there.exists():
                broken.append((name, target))
            elif anchor:
                headings = re.findall(r"^#+ (.*)$", there.read_text(), re.M)
                if anchor not in map(_anchor, headings):
                    broken.append((name, target))
    assert broken == []


def test_the_readme_fits_on_two_screens() -> None:
    """A reader in a hurry reads it whole; the rest is in docs."""
    assert len(_text("README.md").splitlines()) <= 120


def test_each_page_is_in_the_index_and_in_the_site() -> None:
    pages = {name.removeprefix("docs/") for name in _tracked("docs/*.md")} - {"index.md"}
    assert pages - set(re.findall(r"\]\(([\w/]+\.md)\)", _text("docs/index.md"))) == set()
    assert pages - set(re.findall(r"^ +- ([\w/]+\.md)$", _text("mkdocs.yml"), re.M)) == set()


def test_scripts_in_the_pages_for_beginners_are_python() -> None:
    for name in ("README.md", "docs/tutorial.md"):
        blocks = re.findall(r"^```python\n(.*?)^```", _text(name), re.M | re.S)
        assert blocks, name
        for block in blocks:
            ast.parse(block, name)


def test_the_names_of_the_api_pages_are_there() -> None:
    """Else `make docs` fails."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("megatron.core")
    names = [name for page in _tracked("docs/api/*.md") for name in re.findall(r"^::: (\S+)", _text(page), re.M)]
    assert len(names) > 10
    wrong = []
    for name in names:
        parts = name.split(".")
        module = next(m for m in (".".join(parts[:n]) for n in range(len(parts), 0, -1)) if _importable(m))
        thing: object = importlib.import_module(module)
        for part in parts[module.count(".") + 1 :]:
            thing = getattr(thing, part, None)
        if thing is None:
            wrong.append(name)
    assert wrong == []


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_the_tests_that_the_page_of_elastic_jobs_names_exist() -> None:
    """Each in a file that its section names."""
    files: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        files.setdefault(path.name, set()).update(re.findall(r"^def (test_\w+)", path.read_text(), re.M))
    sections = re.split(r"^## ", _text("docs/elastic_tests.md"), flags=re.M)
    named = [(re.findall(r"\btest_\w+\.py", section), re.findall(r"::(test_\w+)", section)) for section in sections]
    assert sum(len(tests) for _, tests in named) > 200
    assert [file for there, _ in named for file in there if file not in files] == []
    assert [test for there, tests in named for test in tests if not any(test in files[file] for file in there)] == []


def test_the_fixed_bounds_in_the_documentation_are_those_in_the_code() -> None:
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `(\w+_S)` \| `([\d.]+)` \|", _text("docs/configuration.md"), re.M)
    assert len(rows) > 15
    core = "common/flashrecovery"
    assert [row for row in rows if f"\n{row[1]} = {row[2]}" not in _text(f"{core}/{row[0]}")] == []
