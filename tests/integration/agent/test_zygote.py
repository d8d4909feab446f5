"""Workers that are forked from a zygote are like fresh interpreters, and a zygote's end harms no other process."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.support.jobs import DDP, MARKER, Job, Layout, RunningJob, check_clean, check_recovered, check_same, run_job
from tests.support.shared_imports import IMAGE

PACKAGES = Path("lib") / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
FACTS = """
import atexit, multiprocessing, os, random, sys, threading
import numpy, torch, torch.distributed as dist
import flashrecovery, sets_variables

def child(queue):
    queue.put((__name__, os.getpid() != PARENT, torch.ones(3).sum().item()))

PARENT = os.getpid()
if __name__ == "__main__":
    rank, differs = os.environ["RANK"], {}
    def same(name, value): print("same", name, value, flush=True)
    def differs(name, value): print("differs", rank, name, value, flush=True)
    same("argv", sys.argv)
    same("main", (__name__, os.path.basename(__file__), sys.modules["__main__"].__dict__ is globals()))
    same("path", sys.path[0] == os.path.dirname(os.path.abspath(__file__)))
    same("threads", (torch.get_num_threads(), torch.get_num_interop_threads(), os.environ.get("OMP_NUM_THREADS")))
    same("python", (sys.flags, sys.dont_write_bytecode, sys.stdout.line_buffering, sys.stdin.read()))
    same("session", os.getsid(0) == os.getpid() == os.getpgid(0))
    same("main thread", threading.main_thread() is threading.current_thread())
    same("native thread", threading.get_native_id() == os.getpid())
    same("environment", sorted(os.environ))
    same("set by imports", [os.environ.get(name) for name in sets_variables.NAMES])
    differs("python random", random.random())
    differs("numpy random", numpy.random.rand())
    differs("torch seed", torch.initial_seed())
    differs("torch random", torch.rand(1).item())
    differs("authkey", multiprocessing.current_process().authkey.hex())
    differs("pid", os.getpid())
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        same(f"child by {method}", queue.get(timeout=60))
        process.join()
    same("matmul", torch.linalg.matrix_norm(torch.arange(512.0 * 512).reshape(512, 512) @ torch.ones(512, 512)).item())
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, num_workers=2)
    same("loader", [batch.tolist() for batch in loader])
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recovery.register(model=model, optimizer=optimizer)
    for step in recovery.steps(3):
        with step:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    dist.destroy_process_group()
    print("started with", open("/proc/self/cmdline").read().split("\\0")[4], flush=True)
    atexit.register(lambda: print("same at exit", flush=True))
"""
SETS_VARIABLES = """
import os
NAMES = ["OF_ADAPTER", "SET", "CHANGED", "REMOVED", "DEFAULT"]
os.environ["SET"] = os.environ["CHANGED"] = "import"
os.environ.pop("REMOVED", None)
os.environ.setdefault("DEFAULT", "import")
"""
ADAPTER = """
import os
os.environ["OF_ADAPTER"] = "import"
def install(module):
    pass
"""
LIKE_ANY = """
import os, sys, time
import torch, torch.distributed as dist
{imports}
import flashrecovery

dist.init_process_group("gloo")
recovery = flashrecovery.init()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recovery.register(model=model, optimizer=optimizer)
for step in recovery.steps(30):
    with step:
        optimizer.zero_grad()
        while step.index == 3 and not os.path.exists(sys.argv[-1]):
            time.sleep(0.02)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    print(f"step={{step.index}}", flush=True)
print("started with", open("/proc/self/cmdline").read().split("\\0")[4])
dist.destroy_process_group()
"""


def logs(job: Job, pattern: str = "rank*.log") -> str:
    return "\n".join(path.read_text() for path in sorted((job.run_dir / "logs").glob(pattern)))


def zygotes(job: RunningJob) -> list[psutil.Process]:
    return [p for p in psutil.Process(job.popen.pid).children() if p.name() == "fr-zygote"]


def any_job(folder: Path, imports: str = "", ends: str = "", **options: object) -> RunningJob:
    """Two ranks of a small script, which stand in step 3 until ``go`` is there. ``ends``: its last lines."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(LIKE_ANY.format(imports=imports) + ends)
    layout = Layout("any", "", nproc=2)
    flags = [str(folder / "go")]
    options = {"own_imports": True, "standby": 0, **options}
    return RunningJob(folder / "run", layout, script=folder / "script.py", flags=flags, **options)  # type: ignore[arg-type]


def installed(folder: Path, **modules: str) -> dict[str, str]:
    """The environment in which these modules are installed packages."""
    place = folder / "base" / PACKAGES
    place.mkdir(parents=True)
    for name, text in modules.items():
        (place / f"{name}.py").write_text(text)
    return {"PYTHONUSERBASE": str(folder / "base"), "PYTHONPATH": f"{place}:{os.environ.get('PYTHONPATH', '')}"}


def finish(job: RunningJob, folder: Path) -> Job:
    (folder / "go").touch()
    done = job.wait()
    assert done.code == 0, done.explain()
    check_clean(done)
    return done


# -- like a fresh interpreter -------------------------------------------------------------------------


@pytest.mark.grid
@pytest.mark.parametrize("threads", [pytest.param(None, id="one thread"), pytest.param("2", id="two threads")])
def test_a_forked_worker_finds_what_a_fresh_one_finds(threads: str | None, tmp_path: Path) -> None:
    """Also of the environment, which modules have changed that are imported before the script is."""
    (tmp_path / "script.py").write_text(FACTS)
    env = installed(tmp_path, sets_variables=SETS_VARIABLES, an_adapter=ADAPTER)
    facts = tmp_path / "base" / PACKAGES / "an_adapter-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: an_adapter\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[flashrecovery.import_hooks]\nnever_imported = an_adapter:install\n")
    env |= {"CHANGED": "launch", "REMOVED": "launch", "DEFAULT": "launch"}
    env |= {} if threads is None else {"OMP_NUM_THREADS": threads}
    found = {}
    for method, own_imports in (("zygote", True), ("zygote", False), ("spawn", True)):
        job = run_job(
            tmp_path / f"{method}-{own_imports}",
            Layout("facts", "", nproc=2),
            script=tmp_path / "script.py",
            flags=["--a", "b"],
            standby=0,
            own_imports=own_imports,
            options=["--start-method", method],
            env=env,
        )
        assert job.code == 0, job.explain()
        check_clean(job)
        text = logs(job)
        same = re.findall(r"^same (.*)", text, re.MULTILINE)
        assert len(same) == 2 * 15 and len(set(same)) == 15, job.explain()  # both ranks alike
        assert "set by imports ['import', 'import', 'import', None, 'launch']" in same, same
        found[method, own_imports] = set(same)
        values = re.findall(r"^differs (\d) (.*) (\S+)$", text, re.MULTILINE)
        assert len(values) == 12 and len({value for _, _, value in values}) == 12, values
        roles = re.findall(r"^started with (.*)", text, re.MULTILINE)
        assert roles == ["--zygote" if method == "zygote" else "--worker"] * 2, roles
    assert found["zygote", True] == found["spawn", True]
    assert found["zygote", False] == found["spawn", True], "a fork of what tests share is not as a new interpreter"


def test_the_jobs_of_tests_have_a_zygote_that_has_imported_before(tmp_path: Path) -> None:
    """See :mod:`tests.support.shared_imports`: a child of the launcher, which waits no more. So is its store."""
    job = any_job(tmp_path, own_imports=False)
    job.wait_for("job_started")
    children = [p.cmdline() for p in psutil.Process(job.popen.pid).children()]
    assert zygotes(job) and not [words for words in children if str(IMAGE) in words], children
    assert {p.environ().get(MARKER) for p in zygotes(job)} == {job.marker}
    (store,) = [words for words in children if "flashrecovery.agent.stores.store_server" in words]
    assert [word for word in store if word][-1] == "1", f"all of torch has been imported in {store}"
    finish(job, tmp_path)


def test_the_same_bits_as_with_new_interpreters(tmp_path: Path) -> None:
    two = replace(DDP, nproc=2)
    reference = run_job(tmp_path / "reference", two, steps=8, standby=0, options=["--start-method", "spawn"])
    inject = ["rank=1,fault=sigkill,at=backward,step=3"]
    job = run_job(tmp_path / "job", two, steps=8, standby=0, own_imports=True, inject=inject)
    check_same(job, reference)
    check_recovered(job, {1})


def test_variables_that_the_script_sets_are_there_when_a_library_asks_for_them(tmp_path: Path) -> None:
    """Known ones in the zygote. A library that asks for another one is left to each rank, and so is, after a recovery,
    a library that only a function imports."""
    text = "import os\nSEEN = os.environ.get('{}', 'unset')\n"
    env = installed(tmp_path, **{f"asks_{name}": text.format(name.upper()) for name in ("known", "own", "late")})
    imports = """
os.environ["KNOWN"] = "7"
os.environ["OWN"] = "of" + os.environ["RANK"]
import asks_known, asks_own
def later():
    os.environ["LATE"] = "same"
    import asks_late
    return asks_late
print("seen", asks_known.SEEN, asks_own.SEEN, later().SEEN, flush=True)
"""
    job = any_job(tmp_path / "job", imports, env=env)
    job.wait_for_step(2)
    for zygote in zygotes(job):
        with suppress(psutil.NoSuchProcess):
            wait_until_idle(zygote)  # it has learned of the late one
    job.kill(1)
    job.wait_for("recovery_started")
    done = finish(job, tmp_path / "job")
    check_recovered(done, {1})
    seen = re.findall(r"^seen (.*)", logs(done), re.MULTILINE)
    assert sorted(seen) == ["7 of0 same", "7 of1 same", "7 of1 same"], done.explain()
    ahead = logs(done, "zygote.log")
    assert "asks_own not imported ahead" in ahead and "asks_known not imported" not in ahead, ahead


@pytest.mark.grid
def test_variables_that_a_function_sets_are_there_when_the_optimizer_imports(tmp_path: Path) -> None:
    """torch imports its compiler in an optimizer's first step, and a zygote does so before the script runs."""
    imports = """
import atexit
def prepare():
    os.environ["TORCHDYNAMO_VERBOSE"] = "1"
prepare()
atexit.register(lambda: print("verbose", sys.modules["torch._dynamo.config"].verbose, flush=True))
"""
    job = any_job(tmp_path / "job", imports)
    job.wait_for_step(2)
    job.kill(1)
    job.wait_for("recovery_started")
    done = finish(job, tmp_path / "job")
    check_recovered(done, {1})
    assert re.findall(r"^verbose (.*)", logs(done), re.MULTILINE) == ["True", "True"], done.explain()


@pytest.mark.grid
def test_a_script_that_replaces_parts_of_a_library_or_brings_its_own_finds_them(tmp_path: Path) -> None:
    """As a fresh interpreter does, before and after a recovery: any process that imports ahead would have others."""
    env = installed(
        tmp_path,
        base="def add(): return 'original'\n",
        binds="from base import add\n",
        lazy="from base import add\n",
        shadowed="WHERE = 'installed'\n",
    )
    own = tmp_path / "own"
    own.mkdir()
    (own / "shadowed.py").write_text("WHERE = 'own'\n")
    imports = f"""
import base
def patch():
    base.add = lambda: "replaced"
patch()
import binds
def later():
    import lazy
    sys.path.insert(0, {str(own)!r})
    import shadowed
    return lazy.add(), shadowed.WHERE
print("seen", binds.add(), *later(), flush=True)
"""
    job = any_job(tmp_path / "job", imports, env=env)
    job.wait_for_step(2)
    time.sleep(1)
    job.kill(1)
    job.wait_for("recovery_started")
    done = finish(job, tmp_path / "job")
    check_recovered(done, {1})
    seen = re.findall(r"^seen (.*)", logs(done), re.MULTILINE)
    assert seen == ["replaced replaced own"] * 3, done.explain()
    assert "a function replaces base.add" in logs(done, "zygote.log")


@pytest.mark.parametrize("method", ["zygote", pytest.param("spawn", marks=pytest.mark.grid)])
def test_a_package_that_the_script_changes_between_two_imports(method: str, tmp_path: Path) -> None:
    """What reads the change while it is imported is left to each rank; what does not is imported ahead."""
    env = installed(
        tmp_path,
        base="FLAG = LATE = False\n",
        reads="import base\nSCALE = 3.0 if base.FLAG else 1.0\n",
        lazy="import base\nSHIFT = 0.5 if base.LATE else 0.0\n",
        through="from lazy import SHIFT\n",
        harmless="import base, os\nprint('harmless is imported by', os.getpid(), flush=True)\n",
    )
    imports = """
import base
base.FLAG = True
import reads
def later():
    base.LATE = True
    import harmless, through
    return through.SHIFT
print("pid", os.getpid(), "seen", reads.SCALE, later(), flush=True)
"""
    ends = "print('weights', *(w * reads.SCALE + later() for p in model.parameters() for w in p.flatten().tolist()))\n"
    found = {}
    for faults in (0, 1):
        folder = tmp_path / f"job{faults}"
        job = any_job(folder, imports, ends, env=env, options=["--start-method", method], standby=faults)
        job.wait_for_step(2)
        if faults:
            for zygote in zygotes(job):
                with suppress(psutil.NoSuchProcess):
                    wait_until_idle(zygote)  # it has learned what the workers have imported
            job.wait_for("standby_ready")
            job.kill(1)
            job.wait_for("recovery_started")
        done = finish(job, folder)
        seen = re.findall(r"^pid (\d+) seen (.*)", logs(done), re.MULTILINE)
        assert [values for _, values in seen] == ["3.0 0.5"] * (2 + faults), done.explain()
        found[faults] = set(re.findall(r"^weights (.*)", logs(done), re.MULTILINE))
        if faults:
            check_recovered(done, {1})
            assert "imported ahead, lazy is other than in the workers" in logs(done, "*.log"), done.explain()
            imported_by = set(re.findall(r"^harmless is imported by (\d+)", logs(done), re.MULTILINE))
            assert len({pid for pid, _ in seen} - imported_by) == 1, "the replacement has found it imported"
    assert len(found[0]) == 1 and found[0] == found[1]


# -- modules that are unfit -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "said"),
    [
        pytest.param(
            "import threading, time\nthreading.Thread(target=time.sleep, args=(999,), daemon=True).start()\n",
            "a thread",
            id="thread",
            marks=pytest.mark.grid,
        ),
        pytest.param(
            "import sys, types\nsys.modules['mpi4py'] = types.ModuleType('mpi4py')\n",
            "mpi4py: it initialises MPI",
            id="known",
            marks=pytest.mark.grid,
        ),
        pytest.param(
            "import os\nif '--zygote' in open('/proc/self/cmdline').read(): raise ValueError('half')\n",
            "in its middle",
            id="raises",
        ),
    ],
)
def test_an_unfit_module_is_named_and_left_to_each_rank(module: str, said: str, tmp_path: Path) -> None:
    env = installed(tmp_path, unfit=module, harmless="")
    imports = "import harmless\ntry:\n    import unfit\nexcept ValueError:\n    pass\n"
    job = any_job(tmp_path / "job", imports, env=env)
    job.wait_for_step(2)
    job.kill(1)
    job.wait_for("recovery_started")
    done = finish(job, tmp_path / "job")
    check_recovered(done, {1})
    (notice,) = {notice["text"] for notice in done.notices("zygote")}
    assert notice.startswith("unfit is left to each process's own import") and said in notice, notice


@pytest.mark.grid
def test_packages_can_be_named_as_unfit(tmp_path: Path) -> None:
    env = installed(tmp_path, unfit="", harmless="import unfit\n")
    job = any_job(tmp_path / "job", "import harmless\n", env=env, config={"fork_denylist": ["unfit"]})
    done = finish(job, tmp_path / "job")
    (notice,) = {notice["text"] for notice in done.notices("zygote")}
    assert notice.startswith("harmless is left to each process's own import: unfit: the setting"), notice


# -- zygotes that die -------------------------------------------------------------------------------------


@pytest.mark.grid
def test_workers_outlive_every_zygote_and_ranks_are_still_replaced(tmp_path: Path) -> None:
    job = any_job(tmp_path / "job")
    job.wait_for_step(2)
    before = job.ranks()
    for zygote in zygotes(job):
        zygote.kill()
    time.sleep(0.5)
    assert job.ranks() == before and all(psutil.pid_exists(pid) for pid in before.values())
    job.kill(1)
    job.wait_for("recovery_started")
    done = finish(job, tmp_path / "job")
    check_recovered(done, {1})
    assert any("new interpreters" in notice["text"] for notice in done.notices("zygote")), done.explain()


def wait_until_idle(process: psutil.Process) -> None:
    """Until it and its children have taken no processor time for a second. Raises AssertionError after two minutes."""
    deadline = time.monotonic() + 120
    used, since = -1.0, time.monotonic()
    while time.monotonic() < since + 1:
        assert time.monotonic() < deadline, f"{process} is busy still"
        now = sum(process.cpu_times())
        for child in process.children():
            with suppress(psutil.NoSuchProcess):
                now += sum(child.cpu_times())
        if now != used:
            used, since = now, time.monotonic()
        time.sleep(0.05)


def test_another_zygote_is_grown_from_the_first_one(tmp_path: Path) -> None:
    job = any_job(tmp_path / "job")
    job.wait_for_step(2)
    time.sleep(1)
    first, *grown = sorted(zygotes(job), key=lambda p: p.create_time())
    for zygote in grown:
        zygote.kill()
    deadline = time.monotonic() + 30
    while not (others := [p for p in zygotes(job) if p != first and p not in grown]) and time.monotonic() < deadline:
        time.sleep(0.05)
    with suppress(psutil.NoSuchProcess):
        wait_until_idle(others[0])  # it has imported, unless another one has taken its place
    job.kill(1)
    job.wait_for("recovery_started")
    done = finish(job, tmp_path / "job")
    check_recovered(done, {1})
    assert "--zygote" in _command_of(done, 1), "forked again"


@pytest.mark.grid
def test_zygotes_that_do_not_answer_are_given_up(tmp_path: Path) -> None:
    """All of them; of one, and of those that are only late: ``test_zygote_late.py``."""
    job = any_job(tmp_path / "job")
    job.wait_for_step(2)
    time.sleep(1)
    for zygote in zygotes(job):
        zygote.send_signal(signal.SIGSTOP)
    job.kill(1)
    job.wait_for("recovery_started")
    done = finish(job, tmp_path / "job")
    check_recovered(done, {1})
    assert "--worker" in _command_of(done, 1), "a new interpreter"


def test_what_a_dead_worker_leaves_behind_is_buried(tmp_path: Path) -> None:
    """Its data loaders' processes become the launcher's children."""
    imports = """
import multiprocessing
if os.environ["RANK"] == "1":
    for _ in range(3):
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(999,), daemon=True).start()
"""
    job = any_job(tmp_path / "job", imports)
    job.wait_for_step(2)
    launcher = psutil.Process(job.popen.pid)
    (victim,) = [p for p in launcher.children() if p.pid == job.ranks()[1]]
    left = victim.children()
    assert len(left) == 3
    job.kill(1)
    deadline = time.monotonic() + 10
    while any(p.is_running() for p in left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(p.is_running() for p in left), [p.status() for p in left]
    finish(job, tmp_path / "job")


def _command_of(job: Job, rank: int) -> str:
    """How the newest process of this rank was started, as it has said at its end."""
    newest = max((job.run_dir / "logs").glob(f"rank{rank}.gen*.log"), key=lambda path: path.stat().st_mtime)
    (found,) = re.findall(r"^started with (.*)", newest.read_text(), re.MULTILINE)
    return found
