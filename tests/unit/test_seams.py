"""Optional parts stay behind their seams: what a plain job's processes import has none of them.

Each process is asked in its own interpreter. What a capability needs is imported where that is asked for, at the
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
CONTROLLERS_PARITY = ("flashrecovery.plan.parity", "flashrecovery.rpc.parity_messages")
"""What the controller plans with; :mod:`flashrecovery.controller.state.parity` imports it where a rank keeps some."""
CONTROLLERS_RELAYOUT = (
    *("flashrecovery.controller.relayout", "flashrecovery.controller.membership.relayout_slots"),
    *("flashrecovery.controller.state.staged_layout", "flashrecovery.plan.strategy", "flashrecovery.plan.reshard"),
)
"""Of jobs whose settings have ``parallelism``."""
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
        (LAUNCHER, (*ALWAYS, *CONTROLLERS_PARITY, *CONTROLLERS_RELAYOUT, "numpy", "torch")),
        (
            AGENT,
            (
                *(*ALWAYS, *CONTROLLERS_PARITY, *CONTROLLERS_RELAYOUT),
                *("flashrecovery.launchers", "flashrecovery.cli", "numpy", "torch"),
            ),
        ),
        (WORKER, (*ALWAYS, *PARITY, *RELAYOUT, "flashrecovery.launchers", "flashrecovery.observe")),
    ],
    ids=["launcher", "agent and controller", "worker"],
)
def test_a_plain_job_imports_nothing_from_behind_a_seam(process: str, seam: tuple[str, ...]) -> None:
    found = imported(process)
    assert AGENT in found or "flashrecovery.worker.session" in found
    assert behind(seam, found) == []


RECOVERY = """
import sys
from flashrecovery.plan.transitions import State
from tests.unit.test_machine import World
world = World(4, steps=6, **SETTINGS)
made = set(sys.modules)
world.launch()
while world.version[0] < 2:
    world.step()
world.kill(2)
assert world.run() is State.FINISHED
print(*(sys.modules if WHOLE else made))
"""


def controllers_modules(settings: dict[str, object], *, whole: bool) -> set[str]:
    """What the controller has imported when its machine is made or, ``whole``, when a rank has been replaced."""
    script = RECOVERY.replace("SETTINGS", repr(settings)).replace("WHOLE", repr(whole))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_plain_recovery_imports_no_parity_and_no_other_layout() -> None:
    found = controllers_modules({}, whole=True)
    assert "flashrecovery.controller.recovery" in found
    assert behind((*CONTROLLERS_PARITY, *CONTROLLERS_RELAYOUT), found) == []


def test_a_controller_that_may_change_the_layout_has_imported_what_it_takes_before_the_launch() -> None:
    found = controllers_modules({"parallelism": {"min": 2}}, whole=False)
    assert {"flashrecovery.controller.relayout.relayout", "flashrecovery.plan.strategy.relayout"} <= found


def test_the_first_rank_that_keeps_parity_brings_all_that_a_recovery_will_need() -> None:
    script = (
        "import sys; from flashrecovery.proto import flashrecovery_pb2 as pb\n"
        "from flashrecovery.controller.state.parity import held_by\n"
        "assert held_by(0, None) is held_by(0, pb.Parity()) is None\n"
        "before = set(sys.modules)\nheld_by(0, pb.Parity(ranks=[0, 1], losses=1))\n"
        "print(*sys.modules.keys() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    parts = ("decodable", "groups")
    assert {f"flashrecovery.plan.parity.{part}" for part in parts} <= set(done.stdout.split())


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
