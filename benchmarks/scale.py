"""The control part of a recovery from 32 to 18,000 devices: the real controller, and agents without workers.

What does not depend on the hardware that trains: heartbeats, detection, the decision, the fan-out of commands and their
acknowledgements, the rank table. Agents are simulated (:mod:`simulated_agents`), eight devices each; controller,
relays, protocol and network stack are real, all on this machine, so the agents' own work is in every time. (Only from
an agent to its relay there is no network.) In each job a rank is killed, and then a whole node falls silent, whose
ranks a spare one takes.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

import harness
import stores

PER_NODE = 8
AGENTS_PER_PROCESS = 600
STEADY_S = 8.0
LIMIT_S = 1500.0
PAPER = {1000: ("8", "0.1"), 4000: ("31", "0.1"), 8000: ("60", "< 0.5"), 18000: ("249", "< 0.5")}
"""FlashRecovery (arXiv 2509.03047), Table I: seconds of the original update of the rank table, and of loading it."""
PATIENT = ("stop_ack_s", "resume_ack_s", "regroup_s")
PATIENT_S = 300.0
"""Thousands of agents share this machine with the controller, and may all be late; that is not what is measured."""
SETTLE_S = 4.0
"""After the launch: the first steps are watched more closely, and agents move to their relays."""


@dataclass(frozen=True)
class Measured:
    """Of one size. Seconds; ``beats``: heartbeats a second that the controller has got, of four that each agent should
    send, and ``cores``: what it has used meanwhile; ``sent_s``: from the failure to the last
    survivor's hold command; ``control_s``: all phases of the recovery but the repeated step, ``control_cpu_s``: the
    controller's processor time meanwhile; ``node_s``: the control part after a node has fallen silent, of which
    ``detect_s`` until that was certain; ``carried``: agents that speak through others."""

    devices: int
    launch_s: float
    beats: float
    cores: float
    sent_s: float
    control_s: float
    control_cpu_s: float
    load_s: float
    node_s: float
    detect_s: float
    carried: int


class Agents:
    """The processes of simulated agents, and what they have said."""

    def __init__(self, address: str, nodes: int, devices: int, folder: Path) -> None:
        script = str(Path(__file__).with_name("simulated_agents.py"))
        self.processes: list[subprocess.Popen[str]] = []
        self.outputs: list[IO[str]] = []
        for first in range(0, nodes + 1, AGENTS_PER_PROCESS):  # the last one is spare
            last = min(first + AGENTS_PER_PROCESS, nodes + 1)
            out = open(folder / f"agents{first}.out", "w")  # noqa: SIM115 - closed in stop()
            command = [sys.executable, script, address, str(first), str(last), str(PER_NODE), str(devices)]
            self.outputs.append(out)
            self.processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, text=True, env=harness.environment())
            )

    def tell(self, line: str) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def said(self, what: str) -> list[float]:
        """When, by CLOCK_MONOTONIC, for each time that any agent has said ``what``."""
        found = []
        for out in self.outputs:
            lines = Path(out.name).read_text().splitlines()
            found += [float(line.split()[1]) for line in lines if line.startswith(f"{what} ")]
        return found

    def wait_for(self, what: str) -> None:
        """Until every process has said it. Raises TimeoutError."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.said(what)) < len(self.processes):
            if time.monotonic() > deadline or any(p.poll() is not None for p in self.processes):
                raise TimeoutError(f"the simulated agents have not said {what!r}")
            time.sleep(0.1)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for out in self.outputs:
            out.close()


def measure(devices: int, folder: Path, profile: Path | None) -> Measured:
    """Launch, run for a while, lose one rank, recover. ``profile``: where to leave what the controller has done."""
    nodes = max(devices // PER_NODE, 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run_dir = folder / "run"
    profiled = ["-m", "cProfile", "-o", str(profile)] if profile is not None else []
    command = [sys.executable, *profiled, "-m", "flashrecovery.cli.main", "controller", "--bind", f"127.0.0.1:{port}"]
    command += ["--nnodes", str(nodes), "--spare-nodes", "1", "--nproc-per-node", str(PER_NODE)]
    command += ["--run-dir", str(run_dir)]
    settings = folder / "config.json"
    settings.write_text(json.dumps({"timeouts": dict.fromkeys(PATIENT, PATIENT_S)}))
    command += ["--config", str(settings)]
    controller = subprocess.Popen(command, env=harness.environment())
    while not (run_dir / "controller.json").exists() and controller.poll() is None:
        time.sleep(0.05)
    agents = Agents(f"127.0.0.1:{port}", nodes, devices, folder)
    try:
        began = time.monotonic()
        wait_for(run_dir, "job_started", controller)
        launch_s = time.monotonic() - began
        time.sleep(SETTLE_S)
        process = psutil.Process(controller.pid)
        agents.tell("count")
        before, lost = sum(process.cpu_times()[:2]), lost_datagrams(port)
        time.sleep(STEADY_S)
        agents.tell("count")
        cores = (sum(process.cpu_times()[:2]) - before) / STEADY_S
        lost = lost_datagrams(port) - lost
        before = sum(process.cpu_times()[:2])
        agents.tell(f"kill {devices // 2}")
        wait_for(run_dir, "recovery_phase", controller, name="verify")
        control_cpu_s = sum(process.cpu_times()[:2]) - before
        finished = wait_for(run_dir, "recovery_finished", controller)
        (failed,) = agents.said("failed")
        agents.tell("report")
        agents.wait_for("reported")
        sent_s = max(agents.said("hold")) - failed
        time.sleep(SETTLE_S)
        agents.tell(f"silence node{nodes // 4:05d}")
        finished_node = wait_for(run_dir, "recovery_finished", controller, generation=2)
        counts = agents.said("beats")
        beats = (sum(counts[1::2]) - sum(counts[::2]) - lost) / STEADY_S
        print(f"  heartbeats on streams, all told: {sum(agents.said('heartbeats-on-stream')):.0f}", flush=True)
        phases, node_phases = control_part(finished), control_part(finished_node)
        loads = [load_seconds(run_dir / "ranktable.json") for _ in range(5)]
        carried = int(sum(agents.said("carried")))
    finally:
        agents.stop()
        if profile is not None:
            controller.terminate()
        else:
            controller.kill()
        controller.wait()
    control_s, load_s, node_s = sum(phases.values()), statistics.median(loads), sum(node_phases.values())
    detect_s = node_phases["detect"]
    return Measured(
        devices, launch_s, beats, cores, sent_s, control_s, control_cpu_s, load_s, node_s, detect_s, carried
    )


def control_part(finished: dict[str, Any]) -> dict[str, float]:
    """Seconds of each phase of a recovery but the repeated step."""
    phases = {name: s for name, s in finished["phases"].items() if name != "redo"}
    print("  " + ", ".join(f"{name} {s:.2f}" for name, s in phases.items()), flush=True)
    return phases


def wait_for(run_dir: Path, event: str, controller: subprocess.Popen[bytes], **fields: object) -> dict[str, Any]:
    """The first event of this name with these fields. Raises TimeoutError."""
    deadline = time.monotonic() + LIMIT_S
    path = run_dir / "events.jsonl"
    while time.monotonic() < deadline and controller.poll() is None:
        if path.exists():
            for line in path.read_text().splitlines():
                if f'"event":"{event}"' in line and line.endswith("}"):
                    found: dict[str, Any] = json.loads(line)
                    if fields.items() <= found.items():
                        return found
        time.sleep(0.05)
    raise TimeoutError(f"no {event} within {LIMIT_S:g} s")


def lost_datagrams(port: int) -> int:
    """How many the kernel has dropped because the controller's socket was full."""
    for line in Path("/proc/net/udp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port:
            return int(fields[-1])
    return 0


def load_seconds(path: Path) -> float:
    """To read the rank table, as a process that needs it does."""
    began = time.monotonic()
    json.loads(path.read_text())
    return time.monotonic() - began


def main() -> None:
    """Measure and judge."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--devices", default="32,256,1000,4000,8000,18000")
    flags.add_argument("--profile", type=Path, help="folder for what cProfile says of the controller")
    flags.add_argument("--no-stores", action="store_true", help="leave the TCPStore out")
    flags.add_argument("--quick", action="store_true", help="at most 1000 devices")
    args = flags.parse_args()
    if args.quick:
        args.devices = "32,256,1000"
    harness.begin()
    results: list[Measured] = []
    established: list[stores.Established] = []
    for devices in map(int, args.devices.split(",")):
        with harness.job_directory() as folder:
            profile = args.profile / f"controller-{devices}.prof" if args.profile else None
            results.append(measure(devices, folder, profile))
            print(f"  {results[-1]}", flush=True)
        if not args.no_stores:
            established += dict.fromkeys(stores.both(devices))
    rows = []
    for r in results:
        before, after = PAPER.get(r.devices, ("", ""))
        rows.append(
            (
                f"{r.devices:,}",
                f"{r.beats:,.0f}",
                f"{r.cores:.2f}",
                f"{r.sent_s:.2f}",
                f"{r.control_s:.2f}",
                f"{r.control_cpu_s:.2f}",
                f"{r.node_s:.2f} ({r.detect_s:.2f})",
                f"{r.load_s:.3f}",
                before,
                after,
            )
        )
    head = (
        "devices",
        "heartbeats a second",
        "controller, cores",
        "failure to last command",
        "control part",
        "controller's processor time",
        "a silent node (until certain)",
        "rank table",
        "Table I",
        "loaded",
    )
    harness.table(
        "Seconds. The agents of all devices share this machine's cores with the controller: the first times are mostly "
        "theirs, the controller's own is its processor time. Table I: FlashRecovery's update of the rank table before, "
        "and loading it",
        head,
        rows,
    )
    if established:
        stores.show(established)
    largest, smallest = results[-1], results[0]
    all_beats = 4 * largest.devices / PER_NODE  # where the agents' processes are late, they send fewer
    goals = [
        ("heartbeats, cores for all", largest.cores * all_beats / max(largest.beats, 1.0), 0.5),
        ("failure to last command, s", largest.sent_s, 1.0),
        ("rank table, s a reader", largest.load_s, 0.5),
        ("growth of the control part, a silent node", largest.node_s / smallest.node_s, 2.0),
        ("growth of the control part, a killed rank", largest.control_s / smallest.control_s, 2.0),
    ]
    judged = [(n, f"{v:.2f}", f"<= {g:g}", "met" if v <= g else "NOT MET") for n, v, g in goals]
    harness.table(f"Goals at {largest.devices:,} devices", ("measure", "", "goal", ""), judged)
    sys.exit(0 if all(v <= g for _, v, g in goals) else 1)


if __name__ == "__main__":
    main()
