"""Step time beside neighbour copies over the link speed, with and without the copies' priority. Needs root, and ``tc``.

Two ranks on two hosts (network namespaces) whose links are shaped to a speed train with FSDP2: each step gathers the
parameters twice and reduces the gradients over the same link that the copies take. The computation is a sleep, in the
place of an accelerator's, so that the cores are free as they would be there. All of it lies in the forward pass: at its
end the copies must be there if gradients are not accumulated. At the middle speed a copy alone takes ``--part`` of
that time. Modes take turns: no copies, copies that go as fast as they can, copies that wait for training's messages.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import flashrecovery
from flashrecovery.plan import pacing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # hosts are the tests'
from tests.support.hosts import Host, available, network

LAYERS = 4
BATCH = 4
WARM_UP = 16
PLAN_ENV = "FLASHRECOVERY_COPIES_BENCHMARK"
MODES = {"none": "no copies", "fast": "as fast as they can", "paced": "training first"}


def copy_bytes(width: int) -> int:
    """A step and rank: half of the parameters, each with Adam's two moments, in fp32."""
    return LAYERS * width * width // 2 * 4 * 3


class Layer(nn.Module):
    """A matrix product on an accelerator."""

    def __init__(self, width: int, busy_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.busy_s = busy_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.busy_s)
        return torch.tanh(self.linear(x))


def work() -> None:
    """One rank: trains, and rank 0 writes down when each step was handed out."""
    mode, steps, width, busy_s, out = json.loads(os.environ[PLAN_ENV])
    if mode == "fast":
        pacing.window_s = lambda seen: 0.0
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    model = nn.Sequential(*[Layer(width, busy_s / LAYERS) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    recovery.register(model=model, optimizer=optimizer)
    batch = torch.randn(BATCH, width)
    times = []
    for step in recovery.steps(steps):
        times.append(time.monotonic())
        with step:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(times))
    dist.destroy_process_group()


def run(hosts: list[Host], mode: str, steps: int, width: int, busy_s: float) -> list[float]:
    """Step times in seconds, without the first ones. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "times.json", Path(folder) / "log"
        env = {**os.environ, PLAN_ENV: json.dumps([mode, steps, width, busy_s, str(out)]), "OMP_NUM_THREADS": "1"}
        env |= {
            "FLASHRECOVERY_TOKEN": "the-token-of-this-benchmark",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        env.pop("GLOO_SOCKET_IFNAME", None)
        redundancy = ["--redundancy", "none" if mode == "none" else "neighbor"]
        shared = ["--nnodes", "2", "--nproc-per-node", "1", "--run-dir", f"{folder}/run", "--standby", "0", *redundancy]
        nodes: list[subprocess.Popen[bytes]] = []
        for number, host in enumerate(hosts):
            place = ["--node-rank", str(number), "--node-name", host.name, "--controller", f"{hosts[0].address}:29400"]
            command = [*host.command, sys.executable, "-m", "flashrecovery.cli.main", "run", *shared, *place, __file__]
            with log.open("ab") as output:
                nodes.append(subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True))
        try:
            codes = [node.wait(steps * 20) for node in nodes]
        finally:
            for node in nodes:
                if node.poll() is None:
                    os.killpg(node.pid, signal.SIGKILL)
                    node.wait()
        if any(codes):
            raise RuntimeError(f"{mode}: the job ended with {codes}\n{log.read_text()[-3000:]}")
        times = json.loads(out.read_text())
    return [b - a for a, b in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, round(part * (len(values) - 1)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", type=float, nargs="*", default=[100, 200, 400], metavar="MB/S")
    parser.add_argument("--width", type=int, default=1600, help="of the four layers: a copy has 24 x its square")
    parser.add_argument(
        "--part", type=float, default=0.9, help="of the idle time that a copy takes at the middle speed"
    )
    parser.add_argument("--steps", type=int, default=120, help="a launch")
    parser.add_argument("--launches", type=int, default=2, help="of each mode")
    parser.add_argument("--quick", action="store_true", help="one speed, 40 steps, one launch of each mode")
    args = parser.parse_args()
    if args.quick:
        args.speeds, args.steps, args.launches = [200], 40, 1
    if not available():
        parser.error("needs root and iproute2, for network namespaces")
    middle = sorted(args.speeds)[len(args.speeds) // 2]
    nbytes = copy_bytes(args.width)
    busy_s = nbytes / (middle * 1e6) / args.part
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; copies of {nbytes / 1e6:.1f} MB a step, "
        f"{busy_s * 1e3:.0f} ms of computation; ms a step: median, 99th percentile, and how much longer than without"
    )
    print(f"{'MB/s':>5}  {'a copy takes':>12}  " + "  ".join(f"{text:>34}" for text in MODES.values()))
    with network(2) as net:
        for speed in args.speeds:
            for host in net.hosts:
                host.shape(speed)
            seen: dict[str, list[float]] = defaultdict(list)
            for _ in range(args.launches):
                for mode in MODES:
                    seen[mode] += run(net.hosts, mode, args.steps, args.width, busy_s)
            plain = statistics.median(seen["none"]), percentile(seen["none"], 0.99)
            cells = []
            for mode in MODES:
                now = statistics.median(seen[mode]), percentile(seen[mode], 0.99)
                ratios = [100 * (a / b - 1) for a, b in zip(now, plain, strict=True)]
                cells.append(f"{now[0] * 1e3:7.1f} ({ratios[0]:+5.1f} %) {now[1] * 1e3:7.1f} ({ratios[1]:+5.1f} %)")
            part = nbytes / (speed * 1e6) / busy_s
            print(f"{speed:5.0f}  {100 * part:10.0f} %  " + "  ".join(f"{cell:>34}" for cell in cells), flush=True)


if __name__ == "__main__":
    work() if PLAN_ENV in os.environ else main()
