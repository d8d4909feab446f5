"""How every training process begins: it connects to the agent, then runs the user's script as ``__main__``.

``--worker`` fills a rank at once. ``--standby`` first imports installed packages
(:mod:`flashrecovery.worker.preimport.preimport`) and waits to be assigned a rank; from then on both are the same.
``--zygote`` forks such processes (:mod:`.zygote`), which go on here. A replacement runs the script from the top with
detached groups (see :mod:`flashrecovery.groups`), up to its first step.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from flashrecovery.errors import DataEndedError, DataSourceError, DivergedError, SetupDiffersError, UnsupportedError
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.words import HOW_TO_PROTECT
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime import page_reserve, process_end, temp_dir
from flashrecovery.runtime.channel import PAGE_ENV, Channel
from flashrecovery.runtime.environment import AGENT_PID_ENV, CPUS_ENV, OF_ZYGOTES, STANDBY_DEVICE_ENV, with_local_rank
from flashrecovery.runtime.lifeline import Lifeline
from flashrecovery.runtime.page import Page
from flashrecovery.runtime.process_control import die_with_parent, keep_to_cpus, redirect_output
from flashrecovery.terminal import say, wrapped
from flashrecovery.util.collector import uncollected
from flashrecovery.worker.connection import Assignment, Connection
from flashrecovery.worker.exit import script_error
from flashrecovery.worker.local_state.fast_forward import Ahead
from flashrecovery.worker.preimport.environment_watch import EnvironmentWatch
from flashrecovery.worker.preimport.import_environment import ImportEnvironment
from flashrecovery.worker.preimport.import_outcomes import ImportOutcomes
from flashrecovery.worker.preimport.preimport import Installed
from flashrecovery.worker.preimport.preimport_script import ScriptPreimport
from flashrecovery.worker.preimport.script_imports import ScriptFacts
from flashrecovery.worker.preimport.start_profile import LAUNCH_PERIOD_S, PERIOD_S, StartProfile
from flashrecovery.worker.script_checks.unprotected_steps import UnprotectedSteps
from flashrecovery.worker.setup_replay import record as setup_record
from flashrecovery.worker.setup_replay.record import SetupRecord
from flashrecovery.worker.setup_replay.replay import SetupReplay
from flashrecovery.worker.startup import inductor_files
from flashrecovery.worker.startup.above import Above
from flashrecovery.worker.startup.import_time_hooks import (
    install_adapter_hooks,
    install_group_hook,
    install_lightning_hook,
    install_loader_hook,
    install_save_hooks,
    install_spawn_hook,
    install_trainer_hook,
)
from flashrecovery.worker.startup.main_module import run_file, run_module
from flashrecovery.worker.startup.own_text import find_own_modules, script_is_over
from flashrecovery.worker.startup.wandb_service import install_tracker_hook

_connection: Connection | None = None


def connection() -> Connection:
    """The connection of this process. Raises RuntimeError outside the bootstrap."""
    if _connection is None:
        raise RuntimeError("this process was not started by the FlashRecovery bootstrap")
    return _connection


def main(above: Above) -> None:
    """Run until the script ends; the exit code is the script's."""
    role, command = sys.argv[1], sys.argv[2:]
    die_with_parent(int(os.environ[AGENT_PID_ENV]))
    _set_module_path(command)
    imported = ImportEnvironment(OF_ZYGOTES if role == "--zygote" else ())
    with imported.noting(), uncollected():  # it imports the adapters, and what they import
        install_adapter_hooks()
        install_save_hooks()
    install_spawn_hook()
    install_loader_hook()
    install_tracker_hook()
    install_trainer_hook(above.protected_train)
    install_lightning_hook(above.protected_fit)
    inductor_files.write_whole()
    sys.argv = _script_arguments(command)
    if role == "--zygote":
        from flashrecovery.worker.startup.zygote import serve  # not in sys.modules of a fresh interpreter without need

        standby, facts = serve(command, imported)
    else:
        standby, facts = role == "--standby", None
    _live(standby, command, facts, above)


def _live(standby: bool, command: list[str], facts: ScriptFacts | None, above: Above) -> None:
    """As what this process is: a standby, or one that fills a rank."""
    channel = Channel.from_env()
    page = Page(int(os.environ[PAGE_ENV]))
    os.set_inheritable(page.fd, False)
    Lifeline(page.fd).hold()
    assign = _wait_for_assignment(channel, command, facts)
    os.environ.update(assign.env)
    cpus = os.environ.pop(CPUS_ENV, None)
    if cpus is not None:
        keep_to_cpus(json.loads(cpus))
    if standby:
        _redirect_output(assign.log_path)
    _prepare(channel, page, assign, command)
    code = _run_script(command, channel, above)
    _leave(code)


def _wait_for_assignment(channel: Channel, command: list[str], facts: ScriptFacts | None = None) -> pb.Assign:
    """``facts``: what the zygote has read of the script, from which this process is forked."""
    while True:
        message = channel.receive()
        if message is None:
            sys.exit(1)
        if message.HasField("assign"):
            return message.assign
        if message.HasField("warm"):
            before = dict(os.environ)
            imported = ImportEnvironment()
            ScriptPreimport(command, imported=imported, facts=facts).import_all(message.warm.modules)
            os.environ.clear()
            os.environ.update(before)  # the script sets its variables itself
            imported.apply(os.environ)
            _warm_kernels()
            channel.send(pb.FromWorker(warmed=pb.Warmed()))


def _warm_kernels() -> None:
    """First calls load libraries and start thread pools; where it is wanted, a GPU is used from now on."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    from flashrecovery.worker.startup.warm_up import make_context, warm_kernels

    warm_kernels()
    device = os.environ.get(STANDBY_DEVICE_ENV)
    if device is not None:
        make_context(int(device))


def _redirect_output(path: str) -> None:
    redirect_output(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))


def _prepare(channel: Channel, page: Page, assign: pb.Assign, command: list[str]) -> None:
    """Everything that must be in place before the script's first line."""
    global _connection
    process_end.reserve()
    sockets = page.temp_dir
    temp_dir.use(sockets)
    process_end.at_last(lambda: temp_dir.remove(sockets))
    detached, ahead = assign.detached, Ahead.of(assign.ahead)
    if detached:
        page_reserve.begin(page.grown_bytes)
    setup_log, drawn = _predecessors_setup(page) if detached else (None, None)
    install_group_hook(detached, setup_log)
    installed = Installed.beside(command)
    setup = None if detached and drawn is None else SetupReplay(installed, drawn)
    watch = EnvironmentWatch(installed)
    profile = _start_profile(installed, channel, page, assign)
    place = int(assign.env.get("RANK", assign.rank))
    unprotected = _unprotected_steps(channel, assign)
    assigned = Assignment(assign.rank, place, assign.generation, detached, ahead)
    outcomes = ImportOutcomes(installed.has_file)
    _connection = Connection(channel, page, assigned, watch, profile, unprotected, setup, outcomes)
    watch.start()
    outcomes.start()
    profile.start()
    if setup is not None:
        setup.start()


def _predecessors_setup(page: Page) -> tuple[bytes | None, SetupRecord | None]:
    """What its collectives have returned, and what its script has drawn and written."""
    log = page.read_setup_log()
    return (None, None) if log is None else setup_record.split(log)


def _start_profile(installed: Installed, channel: Channel, page: Page, assign: pb.Assign) -> StartProfile:
    """At a launch all ranks wait for much the same, so one of them tells what; a replacement tells for itself."""

    def tell(line: str, seconds: float) -> None:
        _notify(channel, pb.Notice(rank=assign.rank, kind=NoticeKind.WAITING, text=line, step=-1, seconds=seconds))

    told = tell if assign.detached or assign.rank == 0 else None
    return StartProfile(installed, page, told, PERIOD_S if assign.detached else LAUNCH_PERIOD_S)


def _unprotected_steps(channel: Channel, assign: pb.Assign) -> UnprotectedSteps | None:
    """Rank 0 tells of them, at a launch: a replacement has come to a protected step before."""
    if assign.detached or assign.rank != 0:
        return None

    def tell(line: str) -> None:
        text = f"optimizer steps are taken at {line}, and none of them is protected: {HOW_TO_PROTECT}"
        _notify(channel, pb.Notice(rank=assign.rank, kind=NoticeKind.UNPROTECTED, text=text, step=-1))

    found = UnprotectedSteps(tell)
    found.watch()
    return found


def _notify(channel: Channel, notice: pb.Notice) -> None:
    with suppress(OSError):  # the agent is gone, which the control thread sees, too
        channel.send(pb.FromWorker(notice=notice))


def _set_module_path(command: list[str]) -> None:
    """The script finds the modules beside it, as under ``python``, and with ``-P`` it does not. The working directory,
    which comes first because this is ``python -m``, is no place of the script's."""
    if getattr(sys.flags, "safe_path", False):  # Python 3.11
        return
    first = os.getcwd() if command[0] == "-m" else str(Path(command[0]).resolve().parent)
    if sys.path and sys.path[0] == os.getcwd():
        sys.path[0] = first
    else:
        sys.path.insert(0, first)


def _script_arguments(command: list[str]) -> list[str]:
    """``sys.argv`` of the script."""
    return command[1:] if command[0] == "-m" else command


def _run_script(command: list[str], channel: Channel, above: Above) -> int:
    """``script.py args`` or ``-m module args``, as ``python`` would run it."""
    sys.argv = [with_local_rank(word, os.environ) for word in _script_arguments(command)]
    find_own_modules(above.init, replacement=connection().detached)
    try:
        try:
            if command[0] == "-m":
                run_module(sys.argv[0])
            else:
                run_file(sys.argv[0])
        except SystemExit as e:
            if e.code not in (None, 0):
                raise
        finally:
            script_is_over()
        for callback in () if process_end.is_fork() else connection().at_script_end:
            callback()
    except SystemExit as e:
        if e.code is None or e.code == 0:
            return 0
        if not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
        _last_words(channel, e)
        return e.code if isinstance(e.code, int) else 1
    except BaseException as e:  # noqa: BLE001 - reported to the agent, then the process ends
        print(wrapped(script_error.text_of(e)), end="", file=sys.stderr)
        _last_words(channel, e)
        return 1
    return 0


def _last_words(channel: Channel, error: BaseException) -> None:
    """Report why this process ends, in the event and on stderr. Not for processes that the script has forked: they are
    no ranks."""
    if process_end.is_fork():
        return
    text, place = script_error.text_of(error)[-16_000:], script_error.place_of(error)
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    groups = sys.modules.get("flashrecovery.groups")
    communication = groups is not None and groups.is_communication_error(error)
    follows = groups is not None and groups.follows_communication_error(error)
    again = isinstance(error, SetupDiffersError) and _may_differ_by_files()
    kept = isinstance(error, (UnsupportedError, DataSourceError, SetupDiffersError))
    refused = kept and not follows and not again
    fatal = isinstance(error, DivergedError) or (refused and isinstance(error, (DataEndedError, SetupDiffersError)))
    message = str(error)[:4000]
    device = "" if groups is None else groups.lost_context()
    words = pb.LastWords(
        exception=name,
        message=message,
        traceback=text,
        communication=communication,
        fatal=fatal,
        place=place,
        refused=refused,
        device=device,
    )
    if isinstance(error, DivergedError) and error.alike is not None:
        words.diverged.CopyFrom(pb.Diverged(suspects=error.suspects, alike=error.alike, partly=error.partly))
    try:
        channel.send(pb.FromWorker(last_words=words))
    except OSError:
        say("the agent is gone")


def _may_differ_by_files() -> bool:
    """Whether this replacement has found files that the first process of its rank did not find. Its own replacement,
    which takes over its page, then does not find them either."""
    own = connection()
    log = own.page.read_setup_log() if own.detached else None
    if log is None:
        return False
    collectives, record = setup_record.split(log)
    return record.hide_absent() and own.page.write_setup_log(record.behind(collectives))


def _leave(code: int) -> None:
    """A failed process must be gone at once; a good one may run its exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code != 0 or threading.current_thread() is not threading.main_thread():
        os._exit(code)
    sys.exit(0)
