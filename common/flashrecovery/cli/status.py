"""``flashrecovery status``: what a job is doing now, from its controller; or how it ended, from its run
directory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import grpc
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flashrecovery.cli.course import COLUMNS, render_course
from flashrecovery.cli.history import read_history
from flashrecovery.cli.output import count_text, make_console, seconds_text
from flashrecovery.errors import ConfigError, StrangerError
from flashrecovery.events import ControllerInfo, RunFiles
from flashrecovery.observe.course import Course, coarser, course_of
from flashrecovery.plan.words import failed_text, step_text
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.proto import flashrecovery_pb2_grpc as rpc
from flashrecovery.rpc.channel import CONTROLLER, Access
from flashrecovery.rpc.tls import Tls
from flashrecovery.rpc.token import TOKEN_ENV

_ANSWER_S = 2.0
_REFRESH_S = 0.5
_RANKS = 32
"""Lines of the table of ranks; a job may have thousands."""
_ENDED = ("finished", "failed", "lost")


@dataclass(frozen=True)
class RankView:
    """One rank. ``tag``: the step tag in words; ``progress_age_s``: since its last sign of progress, None if
    unknown; ``generation``: in which its process joined; ``committed``: its newest committed version, None if
    none; ``own_s``: its own work in a step, None if unknown; ``straggler``: it is slower than the others."""

    rank: int
    pid: int
    node: str
    state: str
    tag: str
    progress_age_s: float | None
    generation: int
    committed: int | None
    step_s: float | None
    own_s: float | None = None
    straggler: bool = False


@dataclass(frozen=True)
class RecoveryView:
    """One finished recovery."""

    generation: int
    victims: tuple[int, ...]
    kind: str
    resume_step: int
    total_s: float
    iteration: int = -1


@dataclass(frozen=True)
class JobView:
    """One look at a job. ``live``: told by its controller just now; otherwise read from what it left behind.

    ``state`` is the controller's (starting, running, quiescing ... failed), or ``lost`` for a job whose
    launcher ended without a word. ``changes``: of size, members, nodes and parallel layout that are under way.
    """

    state: str
    live: bool
    generation: int
    run_dir: str
    seconds: float
    ranks: tuple[RankView, ...]
    standby_ready: int
    standby_starting: int
    recoveries: tuple[RecoveryView, ...]
    last_failure: str
    reason: str
    changes: tuple[str, ...] = ()
    course: Course | None = None


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path), required=False)
@click.option("--controller", default=None, help="HOST:PORT of the controller, instead of RUN_DIR.")
@click.option(
    "--tls-ca", type=click.Path(path_type=Path), default=None, help="With --controller: PEM file with its CA."
)
@click.option("--tls-name", default="", help="With --tls-ca: the host name in its certificate, if not its address.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (with --watch: one per line).")
@click.option("--watch", is_flag=True, help="Refresh until the job ends.")
def status(
    run_dir: Path | None, controller: str | None, tls_ca: Path | None, tls_name: str, as_json: bool, watch: bool
) -> None:
    """Show what the job in RUN_DIR, or of a controller, is doing."""
    look = _looker(run_dir, controller, _access(tls_ca, tls_name))
    if watch and not as_json:
        _watch(look)
        return
    while True:
        view = look()
        if as_json:
            click.echo(json.dumps(as_dict(view), indent=None if watch else 2))
        else:
            make_console().print(render(view))
        if not watch or view.state in _ENDED:
            return
        time.sleep(_REFRESH_S)


def _looker(run_dir: Path | None, controller: str | None, access: Access) -> Callable[[], JobView]:
    """Raises ConfigError unless one of the two is given."""
    if run_dir is not None and controller is None:
        return partial(_in_run_dir, run_dir)
    if run_dir is None and controller is not None:
        return partial(_at_controller, controller, access)
    raise ConfigError("status: give either RUN_DIR or --controller HOST:PORT")


def _at_controller(controller: str, access: Access) -> JobView:
    view = ask(controller, access)
    if view is None:
        raise ConfigError(f"--controller {controller}: no controller answers there within {_ANSWER_S:g} s")
    return view


def _in_run_dir(run_dir: Path) -> JobView:
    return look_at(RunFiles(run_dir))


def _access(tls_ca: Path | None, tls_name: str) -> Access:
    """As the command line and the environment say."""
    try:
        tls = Tls(tls_ca.read_bytes(), name=tls_name) if tls_ca is not None else None
    except OSError as e:
        raise ConfigError(f"--tls-ca {tls_ca}: {e.strerror}") from e
    return Access(os.environ.get(TOKEN_ENV, ""), tls)


def access_of(controller: ControllerInfo) -> Access:
    """As a run directory says."""
    tls = Tls(controller["ca"].encode(), name=controller["name"]) if controller["ca"] else None
    return Access(controller["token"], tls)


def _watch(look: Callable[[], JobView]) -> None:
    view = look()
    with Live(render(view), console=make_console(), auto_refresh=False) as screen:
        while view.state not in _ENDED:
            time.sleep(_REFRESH_S)
            view = look()
            screen.update(render(view), refresh=True)


# -- data -----------------------------------------------------------------------------------------


def look_at(files: RunFiles) -> JobView:
    """Ask the live controller of the run directory; if it does not answer, read what is on disk.

    Raises:
        ConfigError: this is no run directory.
    """
    controller = files.controller()
    if controller is not None and files.is_live():
        try:
            view = ask(controller["address"], access_of(controller))
        except StrangerError:
            view = None  # it has ended, and another program listens there now
        if view is not None:
            return view
    return from_files(files)


def ask(address: str, access: Access) -> JobView | None:
    """Ask the controller at ``host:port``; None if none answers within two seconds.

    Raises:
        StrangerError: another process listens there.
    """
    found = asyncio.run(_status(address, access))
    if found is None:
        return None
    return JobView(
        state=found.state,
        live=True,
        generation=found.generation,
        run_dir=found.run_dir,
        seconds=found.uptime_s,
        ranks=tuple(
            RankView(
                rank=r.rank,
                pid=r.pid,
                node=r.node,
                state=r.state,
                tag=tag_text(r.tag, r.iteration - 1),
                progress_age_s=r.progress_age_s,
                generation=r.generation,
                committed=r.committed if r.committed >= 0 else None,
                step_s=r.step_s or None,
                own_s=r.own_s or None,
                straggler=r.straggler,
            )
            for r in sorted(found.ranks, key=lambda r: r.rank)
        ),
        standby_ready=found.standby_ready,
        standby_starting=found.standby_starting,
        recoveries=tuple(
            RecoveryView(r.generation, tuple(r.victims), r.kind, r.resume_step, r.total_s, r.iteration - 1)
            for r in found.recoveries
        ),
        last_failure=found.last_failure,
        reason=found.failure_reason,
        changes=tuple(found.changes),
        course=Course.model_validate_json(found.course) if found.course else None,
    )


async def _status(address: str, access: Access) -> pb.JobStatus | None:
    try:
        async with access.dial(address, CONTROLLER, _ANSWER_S) as channel:
            status: pb.JobStatus = await rpc.ControllerStub(channel).Status(
                pb.StatusRequest(course=True), timeout=_ANSWER_S
            )
            return status
    except grpc.aio.AioRpcError:
        return None


def from_files(files: RunFiles) -> JobView:
    """What the event log and the last rank table say. Raises ConfigError if this is no run directory."""
    live = files.is_live()
    history = read_history(files.events())
    table = files.rank_table() or {"ranks": []}
    ended = history.state in ("finished", "failed")
    last = history.failures[-1] if history.failures else None
    return JobView(
        state=history.state if ended or live else "lost",
        live=False,
        generation=history.generation,
        run_dir=str(files.path),
        seconds=history.seconds,
        ranks=tuple(
            RankView(
                r["rank"],
                r["pid"],
                r["node"],
                "unknown" if live else "ended",
                "",
                None,
                r["joined_generation"],
                None,
                None,
            )
            for r in table["ranks"]
        ),
        standby_ready=history.standby_ready if live else 0,
        standby_starting=history.standby_starting if live else 0,
        recoveries=tuple(
            RecoveryView(r.generation, r.victims, r.cause, r.resume_step, r.total_s, r.iteration)
            for r in history.recoveries
            if r.finished
        ),
        last_failure=f"rank {last.rank}: {failed_text(last.kind, last.evidence)}" if last is not None else "",
        reason=history.reason,
        course=course_of(files),
    )


def as_dict(view: JobView) -> dict[str, Any]:
    """As plain data; the course in as many columns as a terminal has."""
    plain = dataclasses.asdict(dataclasses.replace(view, course=None))
    if view.course is not None:
        whole = coarser(view.course.whole, COLUMNS, view.course.step_s)
        plain["course"] = {**view.course.model_dump(exclude={"whole", "recent"}), "whole": whole.model_dump()}
    return plain


def tag_text(tag: int, iteration: int = -1) -> str:
    """The step tag in words. ``iteration``: see :func:`.step_text`."""
    if tag >= 0:
        return step_text(tag, iteration)
    return "updating" if tag == -1 else "set-up"


# -- terminal -------------------------------------------------------------------------------------

_STYLES = {"running": "green", "finished": "green", "failed": "red", "lost": "red"}


def render(view: JobView) -> Group:
    """The table for people."""
    head = Text("Job ")
    head.append(view.state, style=_STYLES.get(view.state, "yellow"))
    head.append(f", generation {view.generation}, {seconds_text(view.seconds)}, standbys {view.standby_ready} ready")
    if view.standby_starting:
        head.append(f" + {view.standby_starting} starting")
    head.append(f", {count_text(len(view.recoveries), 'recovery', 'recoveries')}\n{view.run_dir}")
    if view.state == "lost":
        head.append("\nThe launcher ended without a final event; its log may say why.", style="red")
    if view.reason:
        head.append(f"\nReason: {view.reason}", style="red")
    if view.changes:
        head.append(f"\nUnder way: {'; '.join(view.changes)}")
    if view.last_failure:
        head.append(f"\nLast interruption: {view.last_failure}")
    parts: list[Text | Table | Group] = [head]
    if view.course is not None:
        parts.append(render_course(view.course))
    if view.ranks:
        parts.append(_ranks(view))
    if view.recoveries:
        last = view.recoveries[-1]
        victims = "rank " + ", ".join(str(v) for v in last.victims) + " " if last.victims else ""
        parts.append(
            Text(
                f"Last recovery: {victims}({last.kind}), resumed at {step_text(last.resume_step, last.iteration)}, "
                f"{seconds_text(last.total_s)} in all"
            )
        )
    return Group(*parts)


def _ranks(view: JobView) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    times = ("last progress", "step time", "own work")
    for column in ("rank", "pid", "node", "state", "tag", "committed", *times, "joined in"):
        table.add_column(column, justify="left" if column in ("node", "state", "tag") else "right", no_wrap=True)
    shown = _worth_a_line(view.ranks)
    for r in shown:
        age = "-" if r.progress_age_s is None else seconds_text(r.progress_age_s)
        step = "-" if r.step_s is None else seconds_text(r.step_s)
        own = Text("-" if r.own_s is None else seconds_text(r.own_s), style="yellow" if r.straggler else "")
        own.append(" slow" if r.straggler else "")
        committed = "-" if r.committed is None else str(r.committed)
        joined = f"gen {r.generation}"
        table.add_row(str(r.rank), str(r.pid), escape(r.node), r.state, r.tag, committed, age, step, own, joined)
    if len(shown) < len(view.ranks):
        table.caption = f"{count_text(len(view.ranks) - len(shown), 'other rank', 'other ranks')} (--json has all)"
        table.caption_justify = "left"
    return table


def _worth_a_line(ranks: Sequence[RankView]) -> Sequence[RankView]:
    """All of them, as long as they fit; of more those that are not training, then the slow and the silent ones."""
    if len(ranks) <= _RANKS:
        return ranks

    def how_well(r: RankView) -> tuple[bool, bool, float, float, int]:
        return r.state == "running", not r.straggler, -(r.progress_age_s or 0.0), -(r.own_s or 0.0), r.rank

    return sorted(sorted(ranks, key=how_well)[:_RANKS], key=lambda r: r.rank)
