"""What ``flashrecovery doctor`` looks at. Each check is a function that returns findings and changes nothing."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import resource
import shutil
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from flashrecovery.capabilities import ENTRY_POINTS as CAPABILITIES
from flashrecovery.capabilities import Framework
from flashrecovery.capabilities.finding import Finding, Level
from flashrecovery.capabilities.of_apex import APEX
from flashrecovery.capabilities.of_torch import TORCH
from flashrecovery.capabilities.patches import ENTRY_POINTS, PatchTable
from flashrecovery.errors import FlashRecoveryError
from flashrecovery.runtime.host_memory import available_memory
from flashrecovery.runtime.lifeline import Lifeline
from flashrecovery.runtime.page import Page
from flashrecovery.util.versions import version_of

# -- software -------------------------------------------------------------------------------------


def python() -> list[Finding]:
    found = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()}"
    if sys.platform != "linux":
        return [Finding("python", Level.FAIL, found, "only Linux has pidfd, memfd and /proc", "run on Linux")]
    return [Finding("python", Level.OK, found, "supported")]


def torch_version() -> list[Finding]:
    if version_of("torch") is None:
        return [Finding("torch", Level.FAIL, "not installed", "training needs it", "install torch")]
    return capabilities(TORCH, needed=True)


def frameworks() -> list[Finding]:
    """The frameworks but torch that have an adapter, as far as they are installed, and what of their inside is used."""
    findings = []
    for entry in sorted(importlib.metadata.entry_points(group=CAPABILITIES), key=lambda e: e.name):
        try:
            framework: Framework = entry.load()
        except (ImportError, AttributeError) as e:
            found, advice = f"{entry.value}: {type(e).__name__}: {e}", "reinstall flashrecovery"
            findings.append(Finding(entry.name, Level.WARN, found, "a table of capabilities cannot be loaded", advice))
            continue
        if framework.is_there:
            findings += capabilities(framework, needed=False)
        else:
            findings.append(Finding(framework.name, Level.OK, "not installed", "optional"))
    if APEX.is_there:
        lines = capabilities(APEX, needed=False)
        # another project's version says nothing
        findings += lines[-1:] if APEX.capabilities[0].missing() else lines
    return findings


def capabilities(framework: Framework, needed: bool) -> list[Finding]:
    """The framework's version, and a line for each capability. ``needed``: nothing works without them."""
    version = version_of(framework.distribution)
    findings = []
    if version is not None and framework.is_tested(version):
        findings.append(Finding(framework.name, Level.OK, version, "tested"))
    elif version is not None:
        meaning = f"not a tested version ({', '.join(framework.tested)})"
        findings.append(Finding(framework.name, Level.WARN, version, meaning, "try a fault drill before a long run"))
    for one in framework.capabilities:
        check = f"{framework.name}: {one.name}"
        missing = "; ".join(one.missing())
        if not missing:
            findings.append(Finding(check, Level.OK, str(one.way), one.purpose))
        elif one.otherwise:
            findings.append(Finding(check, Level.OK, f"none: {one.otherwise}", one.purpose))
        else:
            advice = f"use a version that has it: {', '.join(framework.tested)} were tested"
            level = Level.FAIL if needed else Level.WARN
            findings.append(Finding(check, level, missing, f"{one.purpose}; refused without", advice))
    return findings


def patches() -> list[Finding]:
    """Changes that adapters make inside their frameworks at run time."""
    findings = []
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda e: e.name):
        try:
            table: PatchTable = entry.load()
        except (ImportError, AttributeError) as e:
            found, advice = f"{entry.value}: {type(e).__name__}: {e}", "reinstall flashrecovery"
            findings.append(Finding("patches", Level.WARN, found, "a table of patches cannot be loaded", advice))
            continue
        for patch in table.patches:
            when = "applied at import" if table.wanted(patch) else "the installed version needs no patch"
            found = f"{table.distribution}: {patch.name}, {when}"
            findings.append(Finding("patches", Level.OK, found, patch.reason))
    return findings or [Finding("patches", Level.OK, "none", "changes that adapters make in a framework")]


# -- process groups -------------------------------------------------------------------------------


def backend(build: bool, progress: Callable[[str], None]) -> list[Finding]:
    """The compiled process-group backend; compiled now if ``build``. Loading it is part of the check."""
    if version_of("torch") is None:
        return []
    from flashrecovery.groups import native_build

    path = native_build.cached()
    try:
        if path is None and build:
            path = native_build.build(progress)
        if path is not None:
            native_build.native()
            return [Finding("backend", Level.OK, str(path), "compiled for this torch, and loads")]
    except FlashRecoveryError as e:
        advice = "do what the message says, then: flashrecovery doctor --build"
        return [Finding("backend", Level.FAIL, str(e), "process groups cannot be exchanged without it", advice)]
    advice = "flashrecovery doctor --build"
    return [Finding("backend", Level.WARN, "not compiled yet", "the first launch compiles it (10-60 s)", advice)]


def compiler(built: bool) -> list[Finding]:
    """What the backend is compiled with; only needed while it is not compiled."""
    name = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [f"no {name}"] * (shutil.which(name) is None) + [f"no {headers}"] * (not headers.exists())
    if not missing:
        return [Finding("compiler", Level.OK, str(shutil.which(name)), "can compile the process-group backend")]
    level, advice = (Level.WARN if built else Level.FAIL), "Debian/Ubuntu: apt install g++ python3-dev"
    return [Finding("compiler", level, "; ".join(missing), "needed once for each torch build", advice)]


def nccl_backend(environment: Mapping[str, str]) -> list[Finding]:
    """Which of torch's NCCL backends a group that asks for ``nccl`` gets, and where its device comes from."""
    from flashrecovery.groups import what_nccl_means

    meant = what_nccl_means()
    if meant is None:
        return [Finding("nccl: backend", Level.OK, "none", "this torch has no NCCL: its groups are gloo's")]
    asked = environment.get("TORCH_DIST_USE_NCCL2")
    found = f"nccl means {meant.torch_class} ({meant.name}; TORCH_DIST_USE_NCCL2={asked or '(unset)'})"
    return [Finding("nccl: backend", Level.OK, found, f"its device: {meant.chosen_by}")]


def barrier() -> list[Finding]:
    """Who can wait for whole gradients before an optimizer."""
    from flashrecovery.groups.accelerator import why_not_held
    from flashrecovery.plan.device_barrier import FOUND_INF

    if not Path("/dev/nvidiactl").exists():
        return []
    if reason := why_not_held():
        return [Finding("nccl: barrier", Level.OK, "the host waits before each optimizer", reason)]
    kinds = ", ".join(sorted(kind.rpartition(".")[2] for kind in FOUND_INF))
    found = f"`barrier: auto` holds fused optimizers back: {kinds}"
    return [Finding("nccl: barrier", Level.OK, found, "where a job's first steps show that they do nothing if told so")]


def nccl(environment: Mapping[str, str], wanted: bool) -> list[Finding]:
    """NCCL's variables as a worker would see them, if there is an NVIDIA device or if asked for."""
    if not wanted and not Path("/dev/nvidiactl").exists():
        return [Finding("nccl", Level.OK, "no NVIDIA device", "not checked (--nccl forces it)")]
    from flashrecovery.config import RunConfig
    from flashrecovery.runtime.environment import common_env
    from flashrecovery.runtime.nccl_env import free_choices, nccl_environment_findings

    worker_environment = {**environment, **common_env(RunConfig())}
    found = nccl_environment_findings(worker_environment)
    meaning = "NCCL reacts to a failure itself, before the recovery can"
    findings = [
        Finding("nccl", Level.WARN, f"{f.name}={f.value if f.value is not None else '(unset)'}", meaning, f.advice)
        for f in found
    ] or [Finding("nccl", Level.OK, "environment variables", "they let FlashRecovery handle failures")]
    free = free_choices(worker_environment)
    if free:
        advice = "for equal bits with another node in the job, set them (NCCL_ALGO=Ring NCCL_PROTO=Simple, say)"
        findings.append(
            Finding("nccl", Level.OK, f"{', '.join(free)} (unset)", "NCCL chooses the order of sums", advice)
        )
    return findings


def _lifeline_works() -> bool:
    """Whether a waiter is woken when a thread that holds a lifeline ends."""
    page = Page.create("doctor")
    lifeline = Lifeline(page.fd)
    thread = threading.Thread(target=lifeline.hold, name="flashrecovery-lifeline-check")
    thread.start()
    thread.join()
    works = lifeline.cut(1.0)
    page.close()
    return works


# -- operating system -----------------------------------------------------------------------------


def kernel() -> list[Finding]:
    """The kernel features that detection and the rank-local state pages are made of."""
    findings = []
    statm = Path(f"/proc/{os.getpid()}/statm")
    readable = statm.exists() and statm.read_text().split()[1:2] != []
    findings.append(
        Finding("/proc", Level.OK, "readable", "hangs and exit causes can be detected")
        if readable
        else Finding("/proc", Level.FAIL, "unreadable", "deaths and hangs cannot be detected", "mount proc on /proc")
    )
    findings.append(
        Finding("lifeline", Level.OK, "works", "a kill is noticed before the process's memory is freed")
        if _lifeline_works()
        else Finding(
            "lifeline",
            Level.WARN,
            "the kernel does not release a robust mutex when its thread ends",
            "the death of a big process is noticed late, by its pidfd",
            "use a kernel with CONFIG_FUTEX, and allow set_robust_list in the container's seccomp profile",
        )
    )
    try:
        os.close(os.pidfd_open(os.getpid()))
        findings.append(Finding("pidfd", Level.OK, "works", "the end of a process is noticed without polling"))
    except (OSError, AttributeError) as e:
        advice = "use Linux 5.3 or newer, and allow pidfd_open in the container's seccomp profile"
        findings.append(Finding("pidfd", Level.FAIL, str(e), "the end of a process cannot be noticed", advice))
    try:
        fd = os.memfd_create("flashrecovery-doctor")
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            mmap.mmap(fd, mmap.PAGESIZE).close()
        finally:
            os.close(fd)
        findings.append(Finding("memfd", Level.OK, "works", "step tags and rank-local states survive their process"))
    except (OSError, AttributeError) as e:
        advice = "allow memfd_create in the container's seccomp profile"
        findings.append(Finding("memfd", Level.FAIL, str(e), "step tags and rank-local state cannot be stored", advice))
    return findings


def limits() -> list[Finding]:
    """Open files and processes."""
    findings = []
    for check, kind, least, good, use in (
        ("open files", resource.RLIMIT_NOFILE, 256, 4096, "a process group takes about 7 descriptors in each rank"),
        ("processes", resource.RLIMIT_NPROC, 128, 4096, "a process group takes about 4 threads in each rank"),
    ):
        soft, hard = resource.getrlimit(kind)
        found = f"{_limit(soft)} (at most {_limit(hard)})"
        if soft == resource.RLIM_INFINITY or soft >= good:
            findings.append(Finding(check, Level.OK, found, use))
            continue
        letter = "n" if kind == resource.RLIMIT_NOFILE else "u"
        level = Level.WARN if soft >= least else Level.FAIL
        findings.append(Finding(check, level, found, use, f"ulimit -{letter} {good}"))
    return findings


def memory() -> list[Finding]:
    """Host memory for copies of state; /dev/shm for data loaders (recovery itself leaves nothing there)."""
    free = available_memory()
    found = f"{free / 2**30:.1f} GiB available"
    use = "pre-step and neighbour copies take up to 4 times a rank's state in host memory"
    findings = [
        Finding("memory", Level.OK, found, use)
        if free >= 2 << 30
        else Finding("memory", Level.WARN, found, use, "free memory, or set redundancy and pre_step_copy")
    ]
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as e:
        advice = "mount a tmpfs on /dev/shm"
        return [*findings, Finding("/dev/shm", Level.WARN, str(e), "data loaders with workers need it", advice)]
    room = shm.f_bavail * shm.f_frsize
    found = f"{room / 2**20:.0f} MiB free"
    if room < 64 << 20:
        advice = "enlarge it (docker run --shm-size=1g), or remove what killed jobs left there"
        findings.append(
            Finding("/dev/shm", Level.WARN, found, "data loaders with workers fail when it is full", advice)
        )
    else:
        findings.append(Finding("/dev/shm", Level.OK, found, "for data loaders; recovery itself uses none"))
    return findings


def clock() -> list[Finding]:
    """Each step tag carries a monotonic time; where reading the clock is a system call, tags become slow."""
    cost = min(_reading_ns(400) for _ in range(5))  # other processes on this host interrupt some
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = source.read_text().strip() if source.exists() else "unknown source"
    found = f"{name}, {cost:.0f} ns a reading"
    if cost > 1000:
        advice = "use a clock source without system calls (tsc, kvm-clock, arch_sys_counter)"
        return [Finding("clock", Level.WARN, found, "a step tag costs more than 1 us", advice)]
    return [Finding("clock", Level.OK, found, "cheap enough for step tags")]


def _reading_ns(count: int) -> float:
    began = time.perf_counter_ns()
    for _ in range(count):
        time.monotonic_ns()
    return (time.perf_counter_ns() - began) / count


def threads(environment: Mapping[str, str], cpus: int) -> list[Finding]:
    """OMP_NUM_THREADS."""
    text = environment.get("OMP_NUM_THREADS")
    if text is None:
        meaning = "`flashrecovery run` sets 1 where it starts several processes on a node, as torchrun does"
        return [Finding("OMP_NUM_THREADS", Level.OK, "unset", meaning)]
    first = text.split(",")[0]
    if not first.isdigit() or int(first) < 1:
        return [Finding("OMP_NUM_THREADS", Level.WARN, text, "not a number >= 1", "unset it or set it to 1")]
    if int(first) > cpus:
        meaning = f"more threads in each rank than the {cpus} CPUs of this machine"
        return [Finding("OMP_NUM_THREADS", Level.WARN, text, meaning, "CPUs divided by ranks on this node")]
    return [Finding("OMP_NUM_THREADS", Level.OK, text, f"{cpus} CPUs")]


# -- network --------------------------------------------------------------------------------------


def _own_address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def own_name(environment: Mapping[str, str]) -> list[Finding]:
    """gloo listens on the address that the host's own name has, unless an interface is named."""
    interface = environment.get("GLOO_SOCKET_IFNAME")
    if interface is not None:
        known = {name for _, name in socket.if_nameindex()}
        unknown = [name for name in interface.split(",") if name not in known]
        if unknown:
            advice = f"one of: {', '.join(sorted(known))}"
            meaning = "gloo cannot listen there"
            return [Finding("host name", Level.FAIL, f"GLOO_SOCKET_IFNAME={interface}", meaning, advice)]
        return [Finding("host name", Level.OK, f"GLOO_SOCKET_IFNAME={interface}", "gloo listens there")]
    address = _own_address()
    name = socket.gethostname()
    if address is None:
        meaning = "gloo falls back to the loopback interface: enough for one node only"
        return [Finding("host name", Level.WARN, f"{name} has no address", meaning, "add it to /etc/hosts")]
    return [Finding("host name", Level.OK, f"{name} is {address}", "gloo listens there")]


def grpc_loopback() -> list[Finding]:
    """A real connection to our own gRPC server."""
    from concurrent import futures

    from flashrecovery.proto import CHANNEL_OPTIONS

    try:
        import grpc
    except ImportError as e:
        advice = "install grpcio"
        return [Finding("grpc", Level.FAIL, str(e), "controller and agents cannot talk", advice)]
    server = grpc.server(futures.ThreadPoolExecutor(1))
    try:
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            grpc.channel_ready_future(channel).result(timeout=5)
    except (grpc.FutureTimeoutError, RuntimeError) as e:
        advice = "allow connections on the loopback interface"
        found = f"{grpc.__version__}: no connection to 127.0.0.1 ({type(e).__name__})"
        return [Finding("grpc", Level.FAIL, found, "controller and agents cannot talk", advice)]
    finally:
        server.stop(None).wait()
    return [Finding("grpc", Level.OK, f"{grpc.__version__}", "connects over loopback")]


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
