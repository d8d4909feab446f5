"""What one GPU can show of a recovery's parts, each in a separate process: ``python -m tests.gpu_parts [NAME...]``.

A part is a function that raises AssertionError if something is not as it should be, and returns what it has measured.
:mod:`tests.gpu_check` runs all of them before its jobs. What a device does is asked of ``Gpu``; without one,
``tests/integration/worker/test_gpu_parts.py`` has stand-ins answer, which tests this program and nothing of CUDA.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from flashrecovery import groups
from flashrecovery.agent.processes.gpu_fence import GpuFence
from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.errors import DrainError
from flashrecovery.groups.accelerator import accelerator
from flashrecovery.health.gpu_processes import GpuProcesses
from flashrecovery.redundancy.memory.flat_buffer import Layout, Slot
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.runtime.nccl_env import LAUNCH_DEFAULTS
from flashrecovery.snapshot.memory import HEADER, SharedMemory
from flashrecovery.state.shard import Shard
from flashrecovery.state.spec import ShardSpec
from flashrecovery.worker.control.device_sync import DeviceClock
from flashrecovery.worker.local_state.rng import RngState, restore_rng
from flashrecovery.worker.step.device_barrier import DeviceBarrier
from tests.support.groups_ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
PART_S = 120.0
"""Longer than any of them takes."""
_ROOM = 128 << 20
"""By that many bytes the GPU's free memory may vary without anybody's doing; a context takes more."""

Found = dict[str, Any]
"""What a part has measured, by name."""


@dataclass
class Gpu:
    """The first GPU.

    Attributes:
        device: where tensors are made. held: bytes that a process holds that is to be killed. busy_s: how long the
            device is kept busy. copied: bytes that are copied to the host.
    """

    device: str = "cuda"
    held: int = 1 << 30
    busy_s: float = 1.0
    copied: int = 1 << 30

    def busy(self, seconds: float) -> Any:
        """Keep a separate stream busy for about so long. Returns its event."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * 1e9))  # cycles, of 1 to 2 GHz
            return stream.record_event()

    def free_bytes(self) -> int:
        """Of the GPU's memory."""
        free, _total = torch.cuda.mem_get_info()
        return int(free)

    def fence(self) -> GpuFence:
        return GpuFence(lambda: GpuProcesses.create(os.environ, 1))

    def holder(self) -> list[str]:
        """A program that takes memory of the GPU, says so in a line, and waits; given more input, it ends."""
        code = f"import sys, torch\nx = torch.ones({self.held}, dtype=torch.uint8, device='cuda')\n"
        return [sys.executable, "-c", f"{code}torch.cuda.synchronize()\nprint(flush=True)\nsys.stdin.read()"]

    def standby(self) -> list[str]:
        """A program that does what a standby does: it imports, says so; given a line, it begins to use the GPU, and
        says so; given more input, it ends."""
        code = (
            "import sys\nfrom flashrecovery.worker.preimport.preimport import import_ahead\n"
            "from flashrecovery.worker.startup.warm_up import make_context, warm_kernels\n"
            "import_ahead(['torch', 'torch.distributed', 'torch.nn.parallel'], ['train.py'])\nwarm_kernels()\n"
            "print(flush=True)\nsys.stdin.readline()\nmake_context(0)\nprint(flush=True)\nsys.stdin.read()\n"
        )
        return [sys.executable, "-c", code]

    def generator(self) -> torch.Generator:
        """The one that is used where none is named."""
        return torch.cuda.default_generators[torch.cuda.current_device()]

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return bool(memory.is_pinned())

    def join(self, rank: int) -> str:
        """Make this process a rank that shares the GPU with others; returns the backend of its groups.

        NCCL refuses two ranks on one GPU of a host; to a host's name of each rank's own it talks over sockets.
        """
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        torch.cuda.set_device(0)
        return "nccl"


class Helper:
    """Another process, in a separate session."""

    def __init__(self, command: Sequence[str]) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT}
        self.popen: subprocess.Popen[bytes] = subprocess.Popen(command, start_new_session=True, **pipes)
        self.hear()

    def hear(self) -> None:
        """Until it says something."""
        assert self.popen.stdout is not None and self.popen.stdout.readline(), "the process has ended"

    def say(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(b"\n")
        self.popen.stdin.flush()

    def kill(self) -> None:
        self.popen.kill()

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


def fence(gpu: Gpu) -> Found:
    """Row 7: when a killed process is said to have left its GPU, its memory is free."""
    before = gpu.free_bytes()
    helper = Helper(gpu.holder())
    try:
        taken = before - gpu.free_bytes()
        assert taken > gpu.held // 2, f"the process has taken {taken} bytes only"
        place: Any = SimpleNamespace(pid=helper.popen.pid, local_rank=0)
        began = time.monotonic()
        helper.kill()
        assert asyncio.run(_released(gpu, place)), "it is still listed 30 s after SIGKILL"
        seconds = time.monotonic() - began
        missing = before - gpu.free_bytes()
        assert missing < _ROOM, f"{missing} bytes are not free although the fence has let it pass"
    finally:
        helper.end()
    return {"released_s": seconds, "held_bytes": taken}


async def _released(gpu: Gpu, process: WorkerProcess) -> bool:
    fence = gpu.fence()
    await fence.prepare()
    return await fence.released(process, 30.0)


def device_tag(gpu: Gpu) -> Found:
    """Row 3 and 16: a commit waits for every stream; a stop waits for the device, and no longer than it is asked to."""
    clock = DeviceClock()
    assert clock.runs_behind
    event = gpu.busy(gpu.busy_s)
    assert not event.query(), "the device was not busy"
    began = time.monotonic()
    clock.before_commit()
    waited = time.monotonic() - began
    assert event.query(), "the commit came before the device had done its work"
    event = gpu.busy(gpu.busy_s)
    bound = gpu.busy_s / 20
    began = time.monotonic()
    try:
        clock.settle(bound)
    except DrainError:
        refused = time.monotonic() - began
    else:
        raise AssertionError("a busy device was said to be idle")
    clock.settle(PART_S)
    assert event.query(), "a device was said to be idle that was not"
    return {"commit_waited_s": waited, "busy_refused_after_s": refused}


def random_numbers(gpu: Gpu) -> Found:
    """The GPU's stream comes back, and any process that keeps its generator goes on with it."""
    kept = gpu.generator()
    torch.randn(3, device=gpu.device)
    state = RngState.now().plain()
    first = torch.randn(1000, device=gpu.device)
    second = torch.randn(1000, device=gpu.device)
    assert not torch.equal(first, second)
    restore_rng(state)
    assert torch.equal(torch.randn(1000, device=gpu.device), first), "other numbers after a restore"
    restore_rng(state)
    assert torch.equal(torch.randn(1000, device=gpu.device, generator=kept), first), "it is another generator"
    drawn = RngState.now().plain()
    assert drawn != state, "what the GPU has drawn is not seen"
    return {"streams": len(state["cuda"])}


def pinned_staging(gpu: Gpu) -> Found:
    """Row 11: the copies' memory is page-locked and another process can map it; what a page-locked copy is faster."""
    tensor = torch.arange(gpu.copied // 8, dtype=torch.int64, device=gpu.device)
    layout = Layout.of({"w": {"x": tensor}})
    rates = {}
    for name, pin in (("pinned", True), ("pageable", False)):
        slot = Slot()
        slot.shape(layout, pin=pin, share=True)
        assert gpu.is_pinned(slot.buffer) is pin, f"is_pinned() is {not pin}"
        slot.views[0].copy_(tensor, non_blocking=True)  # touches the memory for the first time
        rates[name] = _seconds(lambda view=slot.views[0]: view.copy_(tensor, non_blocking=True))
        assert slot.shared is not None
        seen = SharedMemory.open(slot.shared.address)
        assert seen is not None, "another process could not map it"
        assert torch.equal(torch.frombuffer(seen.map, dtype=torch.int64, offset=HEADER), tensor.cpu()), (
            "another process would see something else"
        )
    return {f"{name}_gb_s": gpu.copied / seconds / 1e9 for name, seconds in rates.items()}


def _seconds(action: Callable[[], object]) -> float:
    """With the device's work. The fastest of three."""
    clock, times = DeviceClock(), []
    for _ in range(3):
        clock.before_commit()
        began = time.monotonic()
        action()
        clock.before_commit()
        times.append(time.monotonic() - began)
    return min(times)


class _Weights(Shard):
    name = "w"
    holders = (0,)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"x": self.tensor}

    def values(self) -> dict[str, Any]:
        return {}

    def allocate(self, spec: ShardSpec) -> dict[str, torch.Tensor]:
        return self.tensors()


def overlap(gpu: Gpu) -> Found:
    """Row 12: a pre-step copy runs beside the step's kernels, and has what the step began with whatever they write."""
    weights = _Weights(torch.empty(gpu.copied // 4, dtype=torch.float32, device=gpu.device))
    size = 4096 if gpu.device == "cuda" else 64
    factor = torch.ones(size, size, device=gpu.device)
    copy = PreStepCopy([weights])
    try:
        for version in (1, 2, 3):  # both slots are page-locked by then
            weights.tensor.fill_(version)
            copy.hold(version)

        def step(version: int, *, copied: bool) -> None:
            weights.tensor.fill_(version)
            if copied:
                copy.start(version)
            for _ in range(50):
                factor.matmul(factor)
            if copied:
                copy.before_mutation()
            weights.tensor.fill_(-1.0)

        alone = _seconds(lambda: step(3, copied=False))
        numbers = iter(range(4, 100))
        beside = _seconds(lambda: step(next(numbers), copied=True))
        copy.wait()
        for version in copy.versions():
            (held,) = copy.source("w", version).tensors
            assert bool((held == version).all()), f"the copy of version {version} has what the step has written"
        assert copy.versions() == [5, 6], copy.versions()
        only = _seconds(lambda: copy.hold(next(numbers)))
    finally:
        copy.close()
    return {"step_s": alone, "step_with_copy_s": beside, "copy_alone_s": only}


def standby_context(gpu: Gpu) -> Found:
    """Row 21: a standby takes nothing of a GPU while it imports, and its context where it is told."""
    before = gpu.free_bytes()
    helper = Helper(gpu.standby())
    try:
        imported = before - gpu.free_bytes()
        assert imported < _ROOM, f"it has taken {imported} bytes by importing"
        began = time.monotonic()
        helper.say()
        helper.hear()
        seconds = time.monotonic() - began
        taken = before - gpu.free_bytes()
        assert taken >= _ROOM, f"it was asked to use the GPU, and has taken {taken} bytes"
    finally:
        helper.end()
    return {"context_bytes": taken, "context_s": seconds}


def control_groups(gpu: Gpu) -> Found:
    """Ranks that use one GPU: gloo's groups and the recovery's own are given up and connected again, also under a
    collective of the GPU's tensors."""
    groups.build()

    def rank(me: int, size: int, store: dist.Store) -> None:
        groups.install()
        dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=me, world_size=size)
        for generation in (1, 2, 3):
            dist.all_reduce(t := torch.full((1000,), me + 1.0, device=gpu.device))
            assert t.cpu().tolist() == [3.0] * 1000
            control = groups.control_group()
            assert control is not None
            control.barrier().wait()
            began = time.monotonic()
            work = dist.all_reduce(torch.ones(1000, device=gpu.device), async_op=True) if me == 0 else None
            groups.abandon("a drill")
            if work is not None:
                try:
                    work.wait()
                except dist.DistBackendError:
                    pass
                else:
                    raise AssertionError("a collective has succeeded in which no other rank takes part")
            report = groups.drain(10.0)
            assert report.quiet, report
            DeviceClock().settle(10.0)
            groups.detach_all()
            groups.attach(store, generation, 30.0)
            print(f"exchanged in {time.monotonic() - began:.6f}", flush=True)
        dist.barrier()  # the end of this rank closes connections that the other one may still be making

    said = " ".join(run_ranks(2, rank))
    times = [float(word) for word, before in _pairs(said.split()) if before == "in"]
    assert len(times) == 6, said
    return {"exchange_s": max(times)}


_RANKS, _GROUPS, _ROUNDS = 3, 8, 6
"""Of :func:`nccl_groups`: ranks, groups of each, and how often all are given up."""


def nccl_groups(gpu: Gpu) -> Found:
    """Rows 4, 6, 10 and 30: many communicators are aborted under a collective for which no other rank comes, and
    connected again, in turn after the aborts and beside them; how long it takes, and what memory each round costs."""
    groups.build()

    def rank(me: int, size: int, store: dist.Store) -> None:
        os.environ.update(LAUNCH_DEFAULTS)
        backend = gpu.join(me)
        groups.install()
        dist.init_process_group(backend, store=dist.PrefixStore("job", store), rank=me, world_size=size)
        everybody = [dist.group.WORLD, *(dist.new_group(list(range(size))) for _ in range(_GROUPS - 1))]

        def use() -> None:
            for group in everybody:
                dist.all_reduce(t := torch.full((1000,), me + 1.0, device=gpu.device), group=group)
                assert t.cpu().tolist() == [size * (size + 1) / 2.0] * 1000, t

        for generation in range(1, _ROUNDS + 1):
            use()
            store.set(f"{generation}/{me}", "here")
            store.wait([f"{generation}/{r}" for r in range(size)])
            if me == 0:
                print("free", gpu.free_bytes(), flush=True)
            store.set(f"{generation}/{me}/seen", "here")
            store.wait([f"{generation}/{r}/seen" for r in range(size)])
            if me == 0:
                for group in everybody[::2]:
                    dist.all_reduce(torch.ones(1000, device=gpu.device), group=group, async_op=True)
                time.sleep(0.2)
            began = time.monotonic()
            groups.abandon("a drill")
            beside = generation % 2 == 0
            report = groups.drain(20.0, aborts=not beside)
            assert report.quiet, report
            aborted_s = time.monotonic() - began
            DeviceClock().settle(10.0)
            groups.detach_all()
            attached_s = groups.attach(store, generation, 60.0).seconds
            if beside:
                print("beside", time.monotonic() - began, flush=True)
            else:
                print("abort", aborted_s, "attach", attached_s, "after", time.monotonic() - began, flush=True)
        use()

    said = " ".join(run_ranks(_RANKS, rank, PART_S - 20.0)).split()
    times = {
        name: [float(word) for word, before in _pairs(said) if before == name]
        for name in ("abort", "attach", "after", "beside", "free")
    }
    half = _RANKS * _ROUNDS // 2
    assert len(times["abort"]) == len(times["beside"]) == half and len(times["free"]) == _ROUNDS, said
    lost = (times["free"][1] - times["free"][-1]) / (_ROUNDS - 2)  # the first time makes what stays
    return {
        "abort_s": max(times["abort"]),
        "attach_s": max(times["attach"]),
        "attach_median_s": statistics.median(times["attach"]),
        "aborts_then_attach_median_s": statistics.median(times["after"]),
        "attach_beside_aborts_median_s": statistics.median(times["beside"]),
        "lost_bytes_a_round": lost / _RANKS,
    }


def held_back(gpu: Gpu) -> Found:
    """Row 26: the stream waits for the host's word and the flag arrives, real fused optimizers do nothing with it, also
    with torn gradients; how long the launch takes, and how long the kernels need from the word on."""
    launches, ends = [], []
    for kind, options in (
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ):
        parameters = [
            torch.nn.Parameter(torch.linspace(-1, 1, size, device=gpu.device)) for size in (1000, gpu.copied >> 4)
        ]
        optimizer = kind(parameters, lr=0.1, fused=True, **options)
        told: list[str] = []
        barrier = DeviceBarrier(told.append, on=True)
        optimizer.register_step_pre_hook(lambda *_: None)  # where an adapter has its own
        optimizer.register_step_post_hook(lambda *_: None)
        for void, gradient in ((None, 1.0), (True, 1.0), (True, float("nan")), (False, 1.0)):
            before = _content(optimizer)
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, gradient)
            if void is None:
                optimizer.step()  # makes the state
                continue
            assert barrier.guards(optimizer), told
            barrier.begin(optimizer)
            began = time.monotonic()
            optimizer.step()
            launches.append(time.monotonic() - began)
            barrier.wait()
            began = time.monotonic()
            barrier.end(void=void)
            mark = accelerator().mark(torch.device(gpu.device))
            while not mark.done():
                pass
            ends.append(time.monotonic() - began)
            same = all(map(torch.equal, before, _content(optimizer)))
            assert same is void, (
                f"{kind.__name__}: {'a void step has changed' if void else 'a step has not changed'} it"
            )
    return {"launch_s": statistics.median(launches), "let_go_s": statistics.median(ends)}


def _content(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    return [tensor.detach().clone() for tensor in (*parameters, *states)]


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """Each word with the one before it."""
    return list(zip(words[1:], words, strict=False))


PARTS: dict[str, Callable[[Gpu], Found]] = {
    "fence": fence,
    "device tag": device_tag,
    "random numbers": random_numbers,
    "pinned staging": pinned_staging,
    "overlap": overlap,
    "standby context": standby_context,
    "control groups": control_groups,
    "nccl groups": nccl_groups,
    "held back": held_back,
}
FORKING = frozenset({"control groups", "nccl groups"})
"""Their ranks are forked from this process, which must not have begun to use CUDA."""


@dataclass(frozen=True)
class PartResult:
    """``problem``: why it has failed, "" if it has not."""

    name: str
    found: Found
    problem: str = ""


def run_part(name: str, timeout_s: float = PART_S) -> PartResult:
    """In a separate process: an error of the device ends with it."""
    command = [sys.executable, "-m", "tests.gpu_parts", name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return PartResult(name, {}, f"not over within {timeout_s:g} s")
    return read(name, done.returncode, done.stdout, done.stderr)


def read(name: str, code: int, out: str, err: str) -> PartResult:
    """What a part's process has said; the last line of its output is what it has measured."""
    if code == 0:
        return PartResult(name, json.loads(out.splitlines()[-1]))
    last = next((line for line in reversed(err.splitlines()) if line.strip()), f"exit status {code}")
    return PartResult(name, {}, last.strip()[:300])


def main(names: Sequence[str]) -> int:
    if unknown := [name for name in names if name not in PARTS]:
        sys.exit(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    gpu = Gpu()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # CUDA itself is not begun: ranks are forked, and use the GPU
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    for name in names or PARTS:
        if name not in FORKING:
            torch.cuda.init()
        found = PARTS[name](gpu)
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
