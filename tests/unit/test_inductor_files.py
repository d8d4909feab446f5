"""A rank that is killed with its compiler leaves no part of a file where Inductor looks for a whole one."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashrecovery.worker.startup import inductor_files

cpp_builder = pytest.importorskip("torch._inductor.cpp_builder")

COMPILER = """#!/bin/sh
for word; do [ "$last" = -o ] && out=$word; last=$word; done
printf half > "$out"
[ -e "$(dirname "$0")/slow" ] && touch "$(dirname "$0")/begun" && sleep 60
printf ' and half' >> "$out"
"""
WORKER = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb')).build()"


def _builder(folder: Path) -> Path:
    """One as it is sent to one of Inductor's compile workers, which knows nothing of us."""
    compiler = folder / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    inductor_files._renames(cpp_builder)
    options = cpp_builder.BuildOptionsBase(compiler=str(compiler))
    builder = cpp_builder.CppBuilder("kernel", [str(folder / "kernel.cpp")], options, str(folder))
    assert builder.get_target_file_path() == str(folder / "kernel.so")
    sent = folder / "builder.pickle"
    sent.write_bytes(pickle.dumps(builder))
    return sent


def test_a_compiler_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    sent = _builder(tmp_path)
    (tmp_path / "slow").touch()
    killed = subprocess.Popen([sys.executable, "-c", WORKER, str(sent)], start_new_session=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "begun").exists():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "kernel.so").exists()
    (tmp_path / "slow").unlink()
    subprocess.run([sys.executable, "-c", WORKER, str(sent)], check=True)
    assert (tmp_path / "kernel.so").read_text() == "half and half"


def test_what_could_not_be_compiled_leaves_nothing(tmp_path: Path) -> None:
    builder = pickle.loads(_builder(tmp_path).read_bytes())
    (tmp_path / "compiler").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(Exception, match="C\\+\\+ compile error"):
        builder.build()
    assert not list(tmp_path.glob("kernel.so*"))
