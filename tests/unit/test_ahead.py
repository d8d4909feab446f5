"""What a standby imports ahead: installed packages with the script's real arguments, and nothing of the user's own."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest

from flashrecovery.util.collector import uncollected
from flashrecovery.worker.preimport.preimport import Installed, import_ahead, not_imported
from flashrecovery.worker.preimport.preimport_script import imported_so_far


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


def test_only_what_is_installed_counts(folder: Path) -> None:
    (folder / "mine.py").write_text("")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "spread").mkdir()
    (folder / "spread" / "part.py").write_text("")
    installed = Installed(own="yaml")
    assert all(
        installed.has(name) for name in ("json", "sys", "zipimport", "torch.nn", "numpy", "flashrecovery.runtime.page")
    )
    for name in ("mine", "package", "package.sub", "spread.part", "yaml", "nowhere", "__main__"):
        assert not installed.has(name), name


def test_a_link_to_a_checkout_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = folder / "checkout"
    checkout.mkdir()
    (checkout / "linked.py").write_text("")
    packages = folder / "packages"
    packages.mkdir()
    (packages / "linked.py").symlink_to(checkout / "linked.py")
    (packages / "copied.py").write_text("")
    monkeypatch.syspath_prepend(str(packages))
    paths = {**sysconfig.get_paths(), "purelib": str(packages)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    assert Installed().has("copied") and not Installed().has("linked")


def test_what_an_installer_has_put_into_a_folder_of_pythonpath_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pip install --target` and the module systems of clusters do. What lies beside it is not."""
    records = folder / "some_library-1.0.dist-info"
    (folder / "some_library").mkdir()
    records.mkdir()
    for name in ("some_library/__init__.py", "single.py", "mine.py"):
        (folder / name).write_text("")
    (records / "RECORD").write_text("some_library/__init__.py,sha256=x,0\nsingle.py,,\n../../bin/tool,,\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert not Installed().has("some_library"), "only folders of PYTHONPATH are asked"
    monkeypatch.setenv("PYTHONPATH", f":{folder}:/nowhere")
    installed = Installed()
    assert installed.has("some_library.part") and installed.has("single") and not installed.has("mine")
    assert installed.has_file(str(folder / "some_library" / "part.py")) and installed.has_file(
        str(folder / "single.py")
    )
    assert not installed.has_file(str(folder / "mine.py")) and not installed.has_file(str(folder))


@pytest.mark.parametrize("key", ["RANK", "LOCAL_RANK"])
@pytest.mark.parametrize(
    "how", ["os.environ['{}']", "os.environ.get('{}', 0)", "os.getenv('{}')", "'{}' in os.environ"]
)
def test_a_module_that_asks_for_its_rank_is_left_to_the_script(
    how: str, key: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also below a library that goes on without a part that it cannot import."""
    (folder / "asks_for_rank.py").write_text(f"import os\nVALUE = {how.format(key)}\n")
    (folder / "lenient.py").write_text("try:\n    import asks_for_rank\nexcept Exception:\n    asks_for_rank = None\n")
    monkeypatch.setattr(Installed, "has", lambda self, name: True)
    assert import_ahead(["lenient", "asks_for_rank"], Installed()) == 0
    assert not {"lenient", "asks_for_rank"} & set(sys.modules)
    assert f"lenient not imported ahead: RankUnknownError: it reads {key}" in capsys.readouterr().err
    os.environ.get(key)  # outside, no one minds


def test_a_package_that_cannot_be_imported_is_tried_once_and_not_again_for_each_of_its_modules(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one import of a large package costs, each of its hundreds of modules would cost, too."""
    (folder / "curious" / "inner").mkdir(parents=True)
    (folder / "curious" / "__init__.py").write_text("import builtins\nbuiltins.tries.append(1)\n")
    (folder / "curious" / "inner" / "__init__.py").write_text("import os\nos.environ['RANK']\n")
    (folder / "curious" / "inner" / "a.py").write_text("")
    (folder / "curious" / "b.py").write_text("")
    monkeypatch.setattr(Installed, "_found", lambda self, top: True)
    monkeypatch.setattr("builtins.tries", tries := [], raising=False)
    failed: list[str] = []
    names = ["curious.inner.a", "curious.inner", "curious.b", "curious.inner.a"]

    def tried(name: str, error: BaseException | None) -> None:
        if error is not None:
            failed.append(not_imported(name))

    assert import_ahead(names, Installed(), tried=tried) == 1, "curious.b alone can be imported"
    assert failed == ["curious.inner"] and len(tries) == 1
    monkeypatch.delitem(sys.modules, "curious")
    assert not_imported("curious.inner.a") == "curious"


def test_no_library_that_is_needed_asks_for_its_rank() -> None:
    """Else no standby would be of use."""
    code = (
        "from flashrecovery.worker.preimport.preimport import Installed, import_ahead, not_imported\n"
        "import sys\n"
        "import_ahead(['torch', 'torch.distributed.fsdp', 'torch._dynamo', 'flashrecovery'], Installed())\n"
        "assert 'torch._dynamo' in sys.modules and 'flashrecovery' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


LATER = """
import sys
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.worker.preimport.preimport_script import ScriptPreimport

failed = []
ahead = ScriptPreimport([sys.argv[1]], tried=lambda name, error: failed.extend([name] if error else []))
ahead.import_all(pb.Modules())
print("torch._dynamo" in sys.modules, failed)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "True []"),
        pytest.param("os.environ['TORCHDYNAMO_VERBOSE'] = '1'", "True []", marks=pytest.mark.slow),
        pytest.param("def main(): os.environ['OF_MINE'] = '1'", "True []", marks=pytest.mark.slow),
        pytest.param("def main(): os.environ['TORCHDYNAMO_VERBOSE'] = '1'", "False []", marks=pytest.mark.slow),
        ("def main(): os.environ.update(settings)", "False []"),
    ],
)
def test_what_an_optimizers_first_step_imports(text: str, expected: str, tmp_path: Path) -> None:
    """It reads the environment, which the script may have set by then."""
    (tmp_path / "train.py").write_text(f"import os\n{text}\nimport torch\n")
    command = [sys.executable, "-c", LATER, str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert expected in done.stdout


def test_what_an_import_does_about_warnings_stays(folder: Path) -> None:
    """It is done in the script, too: filters, and where warnings go. What is imported ahead itself warns of nothing."""
    (folder / "about_warnings.py").write_text(
        "import logging, warnings\n"
        "warnings.filterwarnings('error', message='mine')\n"
        "logging.captureWarnings(True)\n"
        "warnings.warn('loud')\n"
    )
    code = (
        "import logging, warnings\n"
        "from flashrecovery.worker.preimport.preimport import Installed, import_ahead\n"
        "before, shown = list(warnings.filters), warnings.showwarning\n"
        "installed = Installed(); installed._known['about_warnings'] = True\n"
        "assert import_ahead(['about_warnings'], installed) == 1\n"
        "assert warnings.filters[1:] == before, warnings.filters\n"
        "assert warnings.filters[0][0] == 'error' and warnings.showwarning is not shown\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "loud" not in done.stderr, done.stderr


def test_modules_that_were_made_are_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.compile's, which no one can import."""
    made = "torch._inductor.runtime.compile_tasks.cabc"
    monkeypatch.setitem(sys.modules, made, types.ModuleType(made))
    monkeypatch.setitem(sys.modules, made.rpartition(".")[0], types.ModuleType(made.rpartition(".")[0]))
    told = {*imported_so_far({}, {}).names}
    assert made not in told and {"os.path", "importlib.machinery", "pytest"} <= told


@pytest.mark.parametrize(("set_by_a_module", "afterwards"), [(None, (600, 7, 8)), (5000, (5000, 7, 8))])
def test_imports_are_without_the_collector_and_a_threshold_that_a_module_sets_stays(
    set_by_a_module: int | None, afterwards: tuple[int, int, int]
) -> None:
    before = gc.get_threshold()
    gc.set_threshold(600, 7, 8)
    try:
        with uncollected():
            assert gc.get_threshold()[0] == 0 and gc.isenabled()
            if set_by_a_module is not None:
                gc.set_threshold(set_by_a_module)
        assert gc.get_threshold() == afterwards
    finally:
        gc.set_threshold(*before)
