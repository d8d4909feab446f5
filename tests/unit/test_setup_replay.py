"""What a script draws and writes before its first step, and what it gets in a replacement."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flashrecovery.worker.setup_replay.record import SetupRecord, split

DRIVER = """
import runpy, sys
from pathlib import Path
from flashrecovery.worker.preimport.preimport import Installed
from flashrecovery.worker.setup_replay.record import split
from flashrecovery.worker.setup_replay.replay import SetupReplay

script, log, old = sys.argv[1], Path(sys.argv[2]), len(sys.argv) > 3
record = split(log.read_bytes())[1] if old else None
setup = SetupReplay(Installed(), record)
sys.argv = [script]
setup.start()
names = runpy.run_path(script, run_name="__main__")
setup.stop(lambda kind, text: print(kind, text))
if not old:
    log.write_bytes(setup.record.behind(b"collectives"))
if "step" in names:
    names["step"]()
"""


def run(tmp_path: Path, text: str, *, old: bool = False) -> str:
    script = tmp_path / "train.py"
    script.write_text(text)
    more = ["old"] if old else []
    command = [sys.executable, "-c", DRIVER, str(script), str(tmp_path / "log"), *more]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def both(tmp_path: Path, text: str) -> tuple[str, str]:
    return run(tmp_path, text), run(tmp_path, text, old=True)


def test_record_behind_a_log() -> None:
    record = SetupRecord({"uuid1|a:1": ["x"]}, {"/a": (3, 4)}, ["/b"], [3, 1], [7])
    assert split(record.behind(b"log")) == (b"log", record)
    record.absent = {__file__: 2, "/missing": 1}
    assert record.hide_absent() and not record.hide_absent(), "a second time it would make no difference"
    assert split(record.behind(b"log")) == (b"log", record) and record.hides
    assert not SetupRecord(absent={"/missing": 1, "/": 1}).hide_absent(), "it would find it missing anyway"
    assert split(b"log") == (b"log", SetupRecord()) and split(b"x" * 40) == (b"x" * 40, SetupRecord())


DRAWN = """
import datetime, numpy, os, random, secrets, tempfile, time, uuid
print(uuid.uuid4().hex)
print(uuid.uuid1())
print(secrets.token_hex(4), secrets.choice('abcdefgh'), os.urandom(5))
print(random.SystemRandom().randrange(10**9))
print(random.random(), numpy.random.rand())
values = [
    f'{time.time_ns()}',
    time.strftime('%H%M%S') + str(time.time()),
    time.strftime('%H%M%S', time.localtime(time.time())) + f'{time.time()}',
    str(datetime.datetime.now()),
    datetime.datetime.now(datetime.timezone(datetime.timedelta(hours=3))).isoformat(),
    datetime.datetime.utcnow().isoformat(),
    str(datetime.datetime.today()),
    tempfile.mkdtemp(dir='.'),
    *(uuid.uuid4().hex for _ in range(3)),
]
print(*values, sep="\\n")
"""


def test_values_are_those_of_the_process_before(tmp_path: Path) -> None:
    first, second = both(tmp_path, DRAWN)
    assert first == second
    assert len(set(first.split("\n"))) == 17


UNSEEDED = """
import torch
from torch.utils.data import random_split
print(*random_split(range(20), [15, 5])[1], torch.rand(1).item(), torch.initial_seed())
print(torch.seed(), torch.rand(1).item())
print(torch.random.seed(), torch.randperm(9).tolist())
"""


def test_a_script_that_seeds_nothing_begins_with_the_same_stream_of_torch(tmp_path: Path) -> None:
    first, again = both(tmp_path, UNSEEDED)
    assert first == again and first != run(tmp_path, UNSEEDED)


def test_measured_time_and_what_is_drawn_after_the_first_step_is_new(tmp_path: Path) -> None:
    text = """
import datetime, pickle, time, uuid
from time import time as now
from datetime import datetime as kind
start = time.time(), now(), kind.now(), time.monotonic(), time.perf_counter()
assert pickle.loads(pickle.dumps(start[2])) == start[2] and type(start[2]) is kind
print(start)
def step():
    print(uuid.uuid4(), f"{time.time()} {kind.now()}")
    assert kind.now.__self__ is kind and "method" in type(kind.__dict__["now"]).__name__
"""
    first, second = (out.split("\n") for out in both(tmp_path, text))
    assert first[0] != second[0] and first[1] != second[1]


def test_a_process_that_goes_another_way_draws_again(tmp_path: Path) -> None:
    text = """
import os, uuid
def name():
    return uuid.uuid4().hex
if os.path.exists("there"):
    print("extra", name())
print("name", name())
open("there", "a").close()
"""
    first, second = both(tmp_path, text)
    assert first.split()[-1] in second.split() and len(set(second.split())) > 4
    assert "setup_differs random or clock values are drawn" in second and "train.py:4 (urandom(16))" in second


LOG = """
import csv, logging, os, sys
from pathlib import Path
os.makedirs("run/inner")
Path("run/config.json").write_text("{}")
with open("run/pid", "x") as file:
    print(os.getpid(), file=file)
with open("run/plain.csv", "w") as file:
    file.write("step,loss\\n")
held = open("run/held.log", "w", buffering=1)
held.write("header\\n")
pathed = Path("run/pathed.log").open("x", buffering=1)
logging.basicConfig(filename="run/logged.log", filemode="w", force=True, format="%(message)s", level="INFO")
logging.info("header")
def step():
    held.write("step\\n")
    logging.info("step")
    pathed.write("step\\n")
    with open("run/plain.csv", "a") as file:
        file.write("0,1\\n")
    os._exit(0)
"""


def test_logs_are_not_cut_off(tmp_path: Path) -> None:
    first, second = both(tmp_path, LOG)
    read = {
        name: (tmp_path / "run" / name).read_text()
        for name in ("plain.csv", "held.log", "logged.log", "config.json", "pathed.log")
    }
    assert read["held.log"] == read["logged.log"] == "header\nstep\nstep\n"
    assert read["plain.csv"] == "step,loss\n0,1\n0,1\n" and read["config.json"] == "{}"
    assert read["pathed.log"] == "step\nstep\n"
    assert first == "" and "file_kept" in second and "train.py:10 (held.log)" in second and "pid" not in second


def test_a_folder_that_another_has_made_is_there(tmp_path: Path) -> None:
    text = """
import os, uuid
try:
    os.mkdir("elsewhere")
except FileExistsError:
    print("was there")
"""
    (tmp_path / "elsewhere").mkdir()
    assert both(tmp_path, text) == ("was there\n", "was there\n")


def test_locks_and_guards_stay_the_scripts_own(tmp_path: Path) -> None:
    """A file or folder whose being there tells that someone has been faster is no name of a run."""
    text = """
import contextlib, os, uuid
from pathlib import Path
try:
    os.mkdir("built")
    print("first")
except FileExistsError:
    print("later")
with contextlib.suppress(OSError):
    open("built/lock", "x").close()
    print("locked")
run = Path(uuid.uuid4().hex)
run.mkdir()
os.symlink("../built", run / "link")
(run / "link2").symlink_to("../built")
"""
    assert both(tmp_path, text) == ("first\nlocked\n", "later\n")


def test_a_compressed_log_is_named(tmp_path: Path) -> None:
    text = """
import gzip
held = gzip.open("log.gz", "wt")
def step():
    held.write("step")
    held.close()
"""
    assert "cut off that had been written to: train.py:3 (log.gz)" in both(tmp_path, text)[1]


ASKED = """
import os
from pathlib import Path
print(os.path.exists("cache"), Path("cache").is_file(), os.path.exists("again"), Path("later").exists())
for name in ("cache", "again"):
    with open("new", "w") as file:
        file.write(name)
    os.replace("new", name)
os.makedirs("folder", exist_ok=True)
print(os.path.exists("cache"), Path("folder").is_dir(), os.path.lexists("again"))
def step():
    print(os.path.exists("cache"), Path("cache").is_file())
"""


def test_what_was_missing_is_missing_again_where_a_replacement_went_another_way(tmp_path: Path) -> None:
    """Until the first process found it; from the first step on it is there. A first replacement finds it."""
    first, there = run(tmp_path, ASKED), "True True True"
    assert first.split("\n")[:3] == ["False False False False", there, "True True"]
    (tmp_path / "later").touch()
    assert run(tmp_path, ASKED, old=True).split("\n")[:3] == ["True True True True", there, "True True"]
    log = tmp_path / "log"
    collectives, record = split(log.read_bytes())
    assert record.absent.keys() == {str(tmp_path / name) for name in ("cache", "again", "later")}
    record.absent[str(tmp_path / "again")] += 3  # whatever else the first process has asked for
    assert record.hide_absent()
    log.write_bytes(record.behind(collectives))
    assert run(tmp_path, ASKED, old=True).split("\n")[:3] == first.split("\n")[:3]
