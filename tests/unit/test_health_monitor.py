"""Discovery of device plugins, the monitor's thread, and what a finding means for processes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flashrecovery.agent.monitoring import node_health
from flashrecovery.agent.monitoring.node_health import NodeHealth
from flashrecovery.capabilities.finding import Level
from flashrecovery.cli import health_checks
from flashrecovery.config import RunConfig, Timeouts
from flashrecovery.errors import ConfigError, PluginError
from flashrecovery.health.findings import HealthContext, HealthFinding, Severity
from flashrecovery.health.monitor import MAX_ERRORS, HealthMonitor, Reported
from flashrecovery.health.plugins import installed, open_plugin, select

FATAL, WARNING = Severity.FATAL, Severity.WARNING
LIMITS = Timeouts(health_s=0.01, health_stuck_s=0.2)


def finding(code: str, severity: Severity = FATAL, device: int | None = 0, text: str = "broken") -> HealthFinding:
    return HealthFinding(severity, "test", "npu 0", device, code, text)


class Scripted:
    """A plugin whose looks are a function of their number."""

    name = "scripted"

    def __init__(self, look: Callable[[int], Sequence[HealthFinding]]) -> None:
        self.look = look
        self.looks = 0
        self.closed = 0
        self.threads: set[int] = set()

    def health(self) -> Sequence[HealthFinding]:
        self.looks += 1
        self.threads.add(threading.get_ident())
        return self.look(self.looks)

    def close(self) -> None:
        self.closed += 1


def entry(name: str, factory: Callable[[HealthContext], object]) -> EntryPoint:
    return cast(EntryPoint, SimpleNamespace(name=name, value=f"test:{name}", load=lambda: factory))


def watch(
    *entries: EntryPoint, until: Callable[[list[HealthFinding], list[str]], bool], limit_s: float = 5, **options: Any
) -> tuple[list[HealthFinding], list[str]]:
    """Run a monitor until something holds, and a little longer."""

    async def run() -> tuple[list[HealthFinding], list[str]]:
        findings: list[HealthFinding] = []
        troubles: list[str] = []
        context = HealthContext(Path("."), 1)
        monitor = HealthMonitor(entries, context, LIMITS, findings.append, troubles.append, **options)
        monitor.start()
        deadline = time.monotonic() + limit_s
        while not until(findings, troubles) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        monitor.close()
        return findings, troubles

    return asyncio.run(run())


# -- discovery ------------------------------------------------------------------------------------


def test_the_built_in_plugins_are_entry_points() -> None:
    assert {"nvidia", "host"} <= set(installed())
    assert [e.name for e in select("host, nvidia,host")] == ["host", "nvidia"]
    assert select("none") == [] and set(installed()) == {e.name for e in select("auto")}


@pytest.mark.parametrize("choice", ["nvida", "host,nvida", "nvida,nowhere"])
def test_an_unknown_plugin_is_named(choice: str) -> None:
    with pytest.raises(ConfigError, match=r"'nvida'; did you mean 'nvidia'\? allowed: auto, none, host, nvidia"):
        select(choice)


def test_an_empty_choice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown device plugin ''"):
        select("")


def test_what_is_no_plugin_is_refused() -> None:
    context = HealthContext(Path("."), 1)
    with pytest.raises(PluginError, match="lacks name"):
        open_plugin(entry("wrong", lambda _: object()), context)
    missing = EntryPoint("gone", "flashrecovery_no_such_module:create", "flashrecovery.health")
    with pytest.raises(PluginError, match="cannot be imported: ModuleNotFoundError"):
        open_plugin(missing, context)


# -- the monitor ----------------------------------------------------------------------------------


def test_a_finding_is_told_once_until_it_is_gone() -> None:
    told = Reported(quiet_s=60)
    assert told.fresh([finding("a")], 0) == [finding("a")]
    assert told.fresh([finding("a", text="other words"), finding("b")], 1) == [finding("b")]
    assert told.fresh([], 2) == []
    assert told.fresh([finding("a")], 3) == [finding("a")]


def test_a_warning_has_to_stay_away_before_it_is_new() -> None:
    told = Reported(quiet_s=60)
    warning = finding("hot", WARNING)
    assert told.fresh([warning], 0) == [warning]
    assert told.fresh([], 1) == [] and told.fresh([warning], 59) == []
    assert told.fresh([], 118) == [] and told.fresh([warning], 118.5) == [], "away for less than 60 s each time"
    assert told.fresh([], 178.5) == [] and told.fresh([warning], 179) == [warning]
    assert told.fresh([finding("hot", FATAL)], 180) == [finding("hot", FATAL)], "worse than before is new"


def test_findings_come_on_the_loop_from_one_thread() -> None:
    plugin = Scripted(lambda look: [finding("xid_79")] if look >= 3 else [])
    findings, troubles = watch(entry("p", lambda _: plugin), until=lambda f, t: plugin.looks > 6)
    assert findings == [finding("xid_79")] and not troubles
    assert len(plugin.threads) == 1 and threading.get_ident() not in plugin.threads
    deadline = time.monotonic() + 5
    while not plugin.closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert plugin.closed == 1


def test_a_plugin_that_declines_is_quiet_unless_it_was_asked_for() -> None:
    declines = entry("absent", lambda _: None)
    assert watch(declines, until=lambda f, t: True) == ([], [])
    _, troubles = watch(declines, until=lambda f, t: bool(t), say_declined=True)
    assert troubles == ["absent: finds nothing to watch on this node"]


@pytest.mark.parametrize("wrong", ["raises", "factory", "no findings", "none"])
def test_a_plugin_that_fails_is_switched_off_with_a_notice(wrong: str) -> None:
    def look(number: int) -> Sequence[HealthFinding]:
        if wrong == "raises":
            raise ValueError("bad register")
        return cast(Any, ["xid 79"] if wrong == "no findings" else None)

    def factory(context: HealthContext) -> Scripted:
        if wrong == "factory":
            raise ValueError("bad driver")
        return plugin

    plugin, good = Scripted(look), Scripted(lambda number: [finding("a")])
    findings, (trouble,) = watch(
        entry("bad", factory), entry("good", lambda _: good), until=lambda f, t: good.looks > 2 * MAX_ERRORS
    )
    assert trouble.startswith(f"bad: has failed {MAX_ERRORS} times in a row and is switched off")
    assert plugin.looks == (0 if wrong == "factory" else MAX_ERRORS) and findings == [finding("a")]


def test_errors_now_and_then_do_no_harm() -> None:
    def look(number: int) -> Sequence[HealthFinding]:
        if number % MAX_ERRORS:
            raise ValueError("busy")
        return []

    plugin = Scripted(look)
    assert watch(entry("p", lambda _: plugin), until=lambda f, t: plugin.looks > 3 * MAX_ERRORS) == ([], [])


def test_a_stuck_plugin_is_told_and_the_others_go_on() -> None:
    release = threading.Event()

    def look(number: int) -> Sequence[HealthFinding]:
        if number == 2:
            release.wait(20)
        return [finding("late")] if number > 2 else []

    stuck, good = Scripted(look), Scripted(lambda number: [])
    at_stuck = 0

    def until(findings: list[HealthFinding], troubles: list[str]) -> bool:
        nonlocal at_stuck
        if troubles and not at_stuck:
            at_stuck = good.looks
        if at_stuck and good.looks > at_stuck + 3:
            release.set()
        return bool(findings)

    findings, troubles = watch(entry("stuck", lambda _: stuck), entry("good", lambda _: good), until=until)
    assert troubles == [
        "stuck: a call has not returned for 0.2 s; the others go on without it",
        "stuck: the call has returned; the plugin is asked again",
    ]
    assert findings == [finding("late")]


# -- the node's processes --------------------------------------------------------------------------


class Worker(SimpleNamespace):
    """As much of a worker process as is looked at here."""

    def __init__(self, rank: int) -> None:
        super().__init__(place=rank, local_rank=rank % 2, pid=1000 + rank, dead=False, killed=False, resumed=True)

    def kill(self) -> None:
        self.killed = True

    def expect_death(self) -> None:
        self.dead = True


class Node:
    """A node with ranks 2 and 3, without any process, and what is said of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setattr(node_health, "is_exiting", lambda pid: pid == 0)
        self.workers = [Worker(2), Worker(3)]
        self.failures: list[tuple[int, str, str]] = []
        self.notices: list[tuple[int, str, str]] = []
        self.health = asyncio.run(self.watched(folder))

    async def watched(self, folder: Path) -> NodeHealth:
        return NodeHealth(
            RunConfig(nproc_per_node=2, health="none"),
            folder,
            lambda: cast(Any, self.workers),
            lambda process, kind, evidence, late: self.failures.append((process.place, kind, evidence)),
            lambda rank, kind, text: self.notices.append((rank, kind, text)),
        )

    def finds(self, found: HealthFinding) -> None:
        self.health._on_finding(found)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Node:
    return Node(monkeypatch, tmp_path)


def test_a_fatal_finding_kills_and_reports_the_devices_worker(node: Node) -> None:
    node.finds(finding("xid_79", device=1))
    assert [w.killed for w in node.workers] == [False, True] and node.workers[1].dead
    ((rank, kind, evidence),) = node.failures
    assert node.health.suspect == finding("xid_79", device=1)
    assert (rank, kind) == (3, "device") and "xid_79" in evidence
    node.finds(finding("gpu_is_lost", device=1))
    assert len(node.failures) == 1, "the dead are not killed again"
    assert [(rank, kind) for rank, kind, _ in node.notices] == [(3, "health_fatal")]


def test_a_fatal_finding_of_the_node_hits_all_its_workers(node: Node) -> None:
    node.finds(finding("power", device=None))
    assert [(rank, kind) for rank, kind, _ in node.failures] == [(2, "device"), (3, "device")]


@pytest.mark.parametrize("why", [{"pid": 0}, {"resumed": False}], ids=["ending", "not yet trained"])
def test_a_worker_is_left_alone(node: Node, why: dict[str, int]) -> None:
    """It may have finished its work (its exit tells), or the finding may be of its predecessor."""
    node.workers[0].__dict__.update(why)
    node.finds(finding("xid_79", device=0))
    assert not node.workers[0].killed and [kind for _, kind, _ in node.notices] == ["health_fatal"]
    assert node.health.suspect is None


def test_a_warning_marks_the_node(node: Node) -> None:
    warning = finding("row_remap_pending", WARNING, device=1)
    node.finds(warning)
    assert node.health.suspect == warning
    ((rank, kind, text),) = node.notices
    assert (rank, kind) == (3, "health_warning")
    assert "npu 0" in text and "row_remap_pending" in text


# -- doctor ---------------------------------------------------------------------------------------


def test_doctor_lists_plugins_and_what_they_find(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(context: HealthContext) -> None:
        raise ValueError("no such register")

    plugins = {
        "absent": entry("absent", lambda _: None),
        "bad": entry("bad", fails),
        "good": entry("good", lambda _: Scripted(lambda number: [])),
        "hangs": entry("hangs", lambda _: Scripted(lambda number: time.sleep(1) or [])),
        "sick": entry("sick", lambda _: Scripted(lambda number: [finding("a", WARNING), finding("b")])),
    }
    monkeypatch.setattr(health_checks, "installed", lambda: plugins)
    found = health_checks.plugins(limit_s=0.3)
    assert [(f.check, f.level) for f in found] == [
        ("health: absent", Level.OK),
        ("health: bad", Level.WARN),
        ("health: good", Level.OK),
        ("health: hangs", Level.WARN),
        ("health: sick", Level.WARN),
        ("health: sick", Level.FAIL),
    ]
    assert "no such register" in found[1].found and "no answer within 0.3 s" in found[3].found
    assert all(f.advice or f.level is Level.OK for f in found)
