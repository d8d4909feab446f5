"""Processes with managed groups end in an orderly way, whatever state the groups are in; and making a group can be
abandoned."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.errors import RegroupError
from tests.support.groups_ranks import run_ranks

ENDINGS = {
    "destroyed": "dist.all_reduce(t); dist.destroy_process_group()",
    "left alone": "dist.all_reduce(t)",
    "abandoned while blocked": """
        w = dist.irecv(torch.ones(1_000_000), 1 - rank)
        big = dist.isend(torch.ones(5_000_000), 1 - rank, tag=5)
        store.set(f"blocked {rank}", "")
        store.wait([f"blocked {1 - rank}"])  # one that had left already could not be sent to
        groups.abandon("end")
        """,
    "abandoned and drained": "dist.all_reduce(t, async_op=True); groups.abandon('end'); assert groups.drain(5).quiet",
    "detached": "groups.abandon('end'); groups.drain(5); groups.detach_all(); dist.all_reduce(t)",
    "exchanged": """
        for g in range(3):
            groups.abandon('end'); groups.drain(5); groups.detach_all(); groups.attach(store, g, 20)
            store.set(f"attached {g} {rank}", "")
            store.wait([f"attached {g} {1 - rank}"])  # leaving closes connections that a peer makes
        dist.all_reduce(t)
        """,
    "an error": "dist.all_reduce(t); sys.exit(0 if rank else 'on purpose')",
    "an exit handler that communicates": """
        def last():
            try:
                dist.all_reduce(t)
            except BaseException:
                os._exit(9)
        atexit.register(last)
        """,
    "a forked child that ends first": """
        forked = os.fork()
        if forked == 0:
            sys.exit(0)
        assert os.waitpid(forked, 0)[1] == 0
        dist.all_reduce(t)
        """,
}
LATE_THREADS = {  # that want the interpreter while it is finalized; the pause: they have begun
    "a lane drops what it has received": """
        groups.control_group().allgather([[slow_to_go(), torch.empty(2)]], [torch.ones(2)])
        time.sleep(0.1)
        """,
    "gloo drops what it has reduced": "dist.all_reduce(slow_to_go(), async_op=True); time.sleep(0.1)",
    "the same, of a group that is destroyed and still held": """
        held = dist.group.WORLD
        dist.all_reduce(slow_to_go(), async_op=True)
        dist.destroy_process_group()
        time.sleep(0.1)
        """,
    "a thread is in a call of ours": """
        outer = groups.groups()[0].outer()
        beside(lambda: native_build.native().undrained(outer))
        """,
    "a thread waits for a peer": "beside(lambda: dist.recv(torch.ones(1), 1 - rank)); time.sleep(0.1)",
    "a thread is in a call of torch": "beside(lambda: torch.ones(1).add_(1))",
}


# Each ending in two forked ranks, which then leave through the interpreter's own finalization (no os._exit).
SCRIPT = """
import atexit, os, sys, tempfile, threading, time, weakref, torch, torch.distributed as dist
from flashrecovery import groups
from flashrecovery.groups import native_build

def slow_to_go():
    \"\"\"A tensor whose Python object takes a second to go, for which its thread gives up the GIL fifty times.\"\"\"
    tensor = torch.ones(2)
    weakref.finalize(tensor, lambda: [time.sleep(0.02) for _ in range(50)]).atexit = False
    return tensor

def beside(call):
    def run():
        while True:
            call()
    threading.Thread(target=run, daemon=True).start()

endings = {endings!r}
bad = []
for name, code in endings.items():
    folder = tempfile.mkdtemp(dir=sys.argv[1])
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            break
        children.append(child)
    if child == 0:
        groups.install()
        store = dist.FileStore(folder + "/store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        t = torch.ones(4)
        dist.all_reduce(t)
        exec(code)
        sys.exit(0)
    began = time.monotonic()
    waiting = dict.fromkeys(children)
    while waiting and time.monotonic() < began + 30:
        for pid in list(waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del waiting[pid]
                if os.waitstatus_to_exitcode(status) != (1 if "on purpose" in code and pid == children[0] else 0):
                    bad.append((name, status))
        time.sleep(0.01)
    for pid in waiting:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        bad.append((name, "hangs"))
    print(name, round(time.monotonic() - began, 2), flush=True)
print("bad", bad)
sys.exit(1 if bad else 0)
"""


@pytest.mark.parametrize(
    "endings", [pytest.param(ENDINGS, id="groups"), pytest.param(LATE_THREADS, id="threads", marks=pytest.mark.grid)]
)
def test_processes_end_in_an_orderly_way(endings: dict[str, str], tmp_path: Path) -> None:
    groups.build()
    script = tmp_path / "endings.py"
    script.write_text(SCRIPT.format(endings={name: textwrap.dedent(code) for name, code in endings.items()}))
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, env=env, timeout=120
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "terminate called" not in done.stderr


def _abandon_while_connecting(reason: str) -> None:
    while "flashrecovery-connect" not in {thread.name for thread in threading.enumerate()}:
        time.sleep(0.005)
    time.sleep(0.2)  # it waits for its peer
    groups.abandon(reason)


def _making_a_group(rank: int, size: int, store: dist.Store) -> None:
    groups.install(control_group=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    if rank == 1:
        store.wait(["done"])  # does not take part in making the group
        return
    threading.Thread(target=_abandon_while_connecting, args=["stop"]).start()
    with pytest.raises(dist.DistBackendError, match="abandoned"):
        dist.new_group([0, 1])
    store.set("done", "1")


def test_making_a_group_can_be_abandoned() -> None:
    run_ranks(2, _making_a_group)


def _dead_peer_in_attach(rank: int, size: int, store: dist.Store) -> None:
    """A peer that has published its address and died: connecting blocks, and can be abandoned."""
    groups.install(control_group=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    dist.barrier()  # a rank that abandons closes connections that a peer may be making
    groups.abandon("x")
    groups.drain(5.0)
    groups.detach_all()
    if rank == 1:
        # Its address, as gloo has it, stays in the store; the process is gone when rank 0 connects.
        before = store.num_keys()
        attaching = threading.Thread(target=lambda: groups.attach(store, 1, 30.0), daemon=True)
        attaching.start()
        while store.num_keys() == before:
            time.sleep(0.01)
        store.set("published", str(os.getpid()))
        os._exit(0)
    peer = int(store.get("published"))
    while psutil.pid_exists(peer):  # as long as one of its threads is ending, the kernel still takes connections
        time.sleep(0.01)
    timer = threading.Timer(0.3, groups.abandon, ["second"])
    timer.start()
    began = time.monotonic()
    with pytest.raises(RegroupError):
        groups.attach(store, 1, 30.0)
    assert time.monotonic() - began < 25, "it has waited for its own time-out"
    timer.join()  # what comes later would be an abandonment of the groups that are detached below
    groups.detach_all()
    dist.all_reduce(torch.ones(1))


def test_a_peer_that_dies_while_connecting() -> None:
    run_ranks(2, _dead_peer_in_attach)


@pytest.mark.parametrize(
    "script", ["fork_while_burying.py", pytest.param("fork_while_entering.py", marks=pytest.mark.grid)]
)
def test_a_child_that_is_forked_while_threads_are_busy(script: str) -> None:
    """As a data loader's worker is: it inherits no lock that a thread of its parent holds."""
    path = Path(__file__).resolve().parents[2] / "scripts" / script
    done = subprocess.run([sys.executable, str(path), "5"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "children got through" in done.stdout, done.stdout + done.stderr
