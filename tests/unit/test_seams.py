"""Optional parts stay behind their seams: what a plain job's processes import has none of them.

Each process is asked in an interpreter of its own. What a capability needs is imported where that is asked for, at the
start of a process and not amid a recovery.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from flashrecovery.config import Settings
from flashrecovery.worker.preimport.preimport_script import OF_SETTINGS, asked_for

AGENT = "flashrecovery.job"
"""Also of the controller, which is in the same process."""
LAUNCHER = f"flashrecovery.cli.run, {AGENT}"
WORKER = (
    "flashrecovery, flashrecovery.worker.startup.bootstrap, flashrecovery.entry, flashrecovery.torch_native, "
    "flashrecovery.worker.session"
)
PLANNING = ("flashrecovery.plan.estimates", "flashrecovery.cli.plan", "flashrecovery.cli.strategies")
CHARTS = (
    *("flashrecovery.observe.picture", "flashrecovery.observe.course", "flashrecovery.observe.goodput"),
    *("flashrecovery.observe.timeline", "flashrecovery.cli.course"),
)
OTHER_LAUNCHERS = (
    *("flashrecovery.adopt", "flashrecovery.ray", "flashrecovery.launchers.accelerate"),
    *("flashrecovery.launchers.deepspeed", "flashrecovery.launchers.remote", "flashrecovery.launchers.node"),
)
PARITY = (
    *("flashrecovery.redundancy.parity", "flashrecovery.rpc.parity_messages", "flashrecovery.plan.parity.code"),
    *("flashrecovery.plan.parity.decode", "flashrecovery.plan.parity.decodable"),
)
RELAYOUT = (
    *("flashrecovery.worker.reshard.relayout", "flashrecovery.worker.reshard.remote_staging"),
    *(
        "flashrecovery.plan.strategy",
        "flashrecovery.plan.reshard.logical",
        "flashrecovery.redundancy.memory.staged_files",
    ),
    *("flashrecovery.contract.logical_state", "flashrecovery.adapter.relayout"),
)
ALWAYS = (*PLANNING, *CHARTS, *OTHER_LAUNCHERS)


def imported(modules: str) -> set[str]:
    script = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def behind(seam: tuple[str, ...], modules: set[str]) -> list[str]:
    return sorted(name for name in modules if f"{name}.".startswith(tuple(f"{part}." for part in seam)))


@pytest.mark.parametrize(
    ("process", "seam"),
    [
        (LAUNCHER, (*ALWAYS, "numpy", "torch")),
        (AGENT, (*ALWAYS, "flashrecovery.launchers", "flashrecovery.cli", "numpy", "torch")),
        (WORKER, (*ALWAYS, *PARITY, *RELAYOUT, "flashrecovery.launchers", "flashrecovery.observe")),
    ],
    ids=["launcher", "agent and controller", "worker"],
)
def test_a_plain_job_imports_nothing_from_behind_a_seam(process: str, seam: tuple[str, ...]) -> None:
    found = imported(process)
    assert AGENT in found or "flashrecovery.worker.session" in found
    assert behind(seam, found) == []


def test_what_a_job_asks_for_is_imported_ahead_of_its_script() -> None:
    """A standby and a zygote know the settings, so that a replacement need not import it amid a recovery."""
    plain = Settings().model_dump_json()
    assert asked_for(plain) == asked_for("{}") == []
    assert asked_for(Settings(redundancy="parity").model_dump_json()) == [OF_SETTINGS["parity"]]
    parallelism = Settings.model_validate({"parallelism": {}}).model_dump_json()
    assert asked_for(parallelism) == [OF_SETTINGS["parallelism"]]
    assert all(importlib.util.find_spec(module) is not None for module in OF_SETTINGS.values())


def test_a_process_begins_without_torch() -> None:
    """A zygote imports nothing before it has forked the next one, and a script may set what torch reads."""
    found = imported("flashrecovery.worker.startup.bootstrap")
    assert behind(("torch", "numpy", "flashrecovery.groups"), found) == []
