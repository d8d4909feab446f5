"""What an import must not leave in a process that is to be forked: forks would share it, and fresh processes have their
own each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, sys
from flashrecovery.worker.startup.zygote import _open_files, why_unfit
before = frozenset(_open_files())
assert why_unfit({{}}, before) is None
{left}
print(why_unfit({{}}, before))
"""


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ("kept = open(sys.argv[1])", "data.bin open, which all processes would share"),
        ("import socket; kept = socket.socket()", "it keeps socket:["),
        ("kept = os.pipe()", "it keeps pipe:["),
        ("import multiprocessing; kept = multiprocessing.Lock()", "memory that all processes would share: /dev/shm/"),
        ("import mmap; kept = mmap.mmap(-1, 4096)", "memory that all processes would share: /dev/zero"),
        ("kept = open(os.devnull), os.open('/dev/urandom', os.O_RDONLY)", "None"),
        (
            "import threading, time\nfrom flashrecovery.runtime.process_control import name_thread\n"
            "name_thread('fr-zygote')\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "it has started a thread: one without a name\n",
        ),
        (
            "import threading, time\nfrom flashrecovery.runtime.process_control import name_thread\n"
            "def work(): name_thread('watchdog'); ready.set(); time.sleep(60)\n"
            "ready = threading.Event(); threading.Thread(target=work, daemon=True).start(); ready.wait()",
            "it has started a thread: watchdog\n",
        ),
        (
            "import mmap\nwith open(sys.argv[1], 'rb') as f: kept = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)",
            "open",
        ),
        (
            "import mmap\nwith open(sys.argv[1], 'rb') as f: kept = mmap.mmap(f.fileno(), 0, mmap.MAP_PRIVATE)\n"
            "os.close(max(d for d in _open_files() if d not in before))",
            "None",
        ),
    ],
)
def test_what_all_forks_would_share(left: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"data")
    command = [sys.executable, "-c", CODE.format(left=left), str(tmp_path / "data.bin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert said in done.stdout, done.stdout


WATCHED = """
import os, sys
from flashrecovery.worker.startup.zygote import ThreadWatch, why_unfit
watch = ThreadWatch()
sys.meta_path.insert(0, watch)
import {module}
print(why_unfit({{}}, frozenset(map(int, os.listdir("/proc/self/fd"))), watch.look("{module}")))
"""
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("uses_it", "library.lib, which it imports, has started a thread: "),
        ("library", "library.lib, which it imports, has started a thread: "),
        ("library.lib", "it has started a thread: "),
    ],
)
def test_the_module_is_named_whose_import_has_started_a_thread(module: str, said: str, tmp_path: Path) -> None:
    """Not the one that happens to import it."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "__init__.py").write_text("import string\nfrom library import lib\nimport wave\n")
    (tmp_path / "library" / "lib.py").write_text(THREAD)
    (tmp_path / "uses_it.py").write_text("import colorsys\nimport library\nimport plistlib\n")
    command = [sys.executable, "-c", WATCHED.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert done.stdout.startswith(said), done.stdout
