"""What a job writes about itself: the run directory and its event log.

``events.jsonl`` is the job's history, one JSON object a line, written by the controller and never rewritten.
Every line carries ``event`` (its name), ``time`` (Unix seconds, to compare with other logs), ``monotonic``
(CLOCK_MONOTONIC seconds, to subtract) and ``generation``. All durations are seconds.

::

    RUN_DIR/
        ranktable.json          who fills which rank now; replaced atomically once a generation's processes exist
        events.jsonl            the events below
        controller.json         where the controller listens, and the token for fault injection (for its owner only)
        timeline.json           the speed of training over time, of a bounded size; replaced atomically
        logs/rank<R>.gen<G>.log what each process has printed
        lock                    held (flock) as long as the job lives

Models ignore fields that they do not know, so that a newer job's directory stays readable.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from io import RawIOBase
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from flashrecovery.errors import ConfigError, FlashRecoveryError
from flashrecovery.util.atomic_file import replace_file

log = logging.getLogger("flashrecovery")


class EventLogError(FlashRecoveryError):
    """A line of an event log is not one of our events; the message names file and line.

    Do: give the run directory of a FlashRecovery job; if the file is damaged, delete the line.
    """


class Event(BaseModel):
    """What all events have. ``time`` and ``monotonic`` are filled in when the event is written."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    event: str
    time: float = 0.0
    monotonic: float = 0.0
    generation: int = 0


class ControllerStarted(Event):
    """A controller begins to write: the first event of a launch, also of one that never comes to a step. A successor's,
    too; that one emits a notice. ``checkpoint_dir``: where its fallback checkpoints go; "": it makes none."""

    event: Literal["controller_started"] = "controller_started"
    world_size: int = 0
    checkpoint_dir: str = ""


class StartLine(BaseModel):
    """A line of the script, and for how long a process was there, or in what that line calls, on its way to its first
    step. ``where``: file and number; ``text``: what stands there."""

    where: str
    text: str
    seconds: float


class GroupBackend(BaseModel):
    """What stands in so many groups of ``ranks``: torch's name and class of a backend, the device of its communicators
    ("": host memory, or not known yet), and what has chosen that device."""

    name: str
    torch_class: str
    device: str = ""
    chosen_by: str = ""
    groups: int = 0
    ranks: list[int] = Field(default_factory=list)


class JobStarted(Event):
    """Every rank has come to its first step, ``seconds`` after the launch. ``step``: the one at which the job begins,
    above 0 if it goes on from what an earlier launch has left. ``start``: lines of the script in which the slowest
    rank spent most of that time, longest first. ``replicas``: of an elastic job, what its ranks make up; else 0.
    ``backends``: what stands in the ranks' process groups."""

    event: Literal["job_started"] = "job_started"
    world_size: int = 0
    replicas: int = 0
    seconds: float = 0.0
    step: int = 0
    start: list[StartLine] = Field(default_factory=list)
    backends: list[GroupBackend] = Field(default_factory=list)


class FailureDetected(Event):
    """A rank has failed. ``detect_s``: from the failure, as well as its time is known, to its detection. ``iteration``,
    here and below: that of the step, as a framework numbers it in its log, where steps are calls of its loop; -1: not
    known, or steps are steps."""

    event: Literal["failure_detected"] = "failure_detected"
    rank: int
    kind: str
    evidence: str = ""
    detect_s: float = 0.0
    step: int = 0
    iteration: int = -1
    exception: str = ""
    message: str = ""
    traceback: str = ""


class RecoveryStarted(Event):
    """The survivors are being stopped. Comes again, with all victims, for a failure during a recovery: in the same
    generation if it joins, else in the next one."""

    event: Literal["recovery_started"] = "recovery_started"
    victims: list[int] = Field(default_factory=list)
    cause: str = ""


class RecoveryPhase(Event):
    """One phase of the current recovery is over."""

    event: Literal["recovery_phase"] = "recovery_phase"
    name: str
    seconds: float


class RecoveryFinished(Event):
    """Every rank has committed a new step. ``total_s`` runs from the failure to that step.

    ``sources``: transfers by source rank. ``survivors_given``: ranks that were given state although they live: the
    failure has kept them from completing a step that others have completed. ``bytes``: bytes of state that ranks got
    from others; ``device_bytes``: how many of them from device to device, the others through host memory;
    ``rank_bytes``: how many the rank got that got the most; ``copy_speed``, ``link_speed``: in bytes a second, how fast
    one thread of the slowest host copies memory, and what the slowest network link between the hosts is made for (0:
    not known, or not used). ``decoded_bytes``: how many of them came out of parity; ``reshaped_bytes``: how many
    because state was sharded among other ranks, which needed ``lacking_bytes`` that they did not hold. ``phases``:
    seconds by name. ``reason``: why the job went on from ``resume_step``. ``left``: victims that were not replaced:
    an elastic job goes on without them. ``start``: lines of the script in which the slowest replacement spent most
    time before its first step, longest first.
    """

    event: Literal["recovery_finished"] = "recovery_finished"
    resume_step: int
    iteration: int = -1
    victims: list[int] = Field(default_factory=list)
    sources: dict[str, int] = Field(default_factory=dict)
    survivors_given: list[int] = Field(default_factory=list)
    bytes: int = 0
    device_bytes: int = 0
    rank_bytes: int = 0
    copy_speed: float = 0.0
    link_speed: float = 0.0
    decoded_bytes: int = 0
    reshaped_bytes: int = 0
    lacking_bytes: int = 0
    phases: dict[str, float] = Field(default_factory=dict)
    total_s: float = 0.0
    cause: str = ""
    reason: str = ""
    left: list[int] = Field(default_factory=list)
    start: list[StartLine] = Field(default_factory=list)


class JobResized(Event):
    """An elastic job continues at ``step`` with another number of replicas than ``before``. ``ranks``: numbered as
    the job was launched, in the order of their numbers in the process groups; ``left``: those that left; ``came``:
    those that joined. If both are empty and ``before`` equals ``replicas``, this event corrects the previous one: that
    change takes place at ``step`` instead, because its checkpoint was damaged or another rank has died."""

    event: Literal["job_resized"] = "job_resized"
    step: int
    iteration: int = -1
    before: int
    replicas: int
    ranks: list[int] = Field(default_factory=list)
    left: list[int] = Field(default_factory=list)
    came: list[int] = Field(default_factory=list)

    @property
    def only_step(self) -> bool:
        """It says at which other step the change before takes place."""
        return self.before == self.replicas and not self.left and not self.came


class JobReplanned(Event):
    """All ranks are restarted in another parallel layout, to go on at ``step``. ``before``, ``layout``: as
    tp=2,pp=2,dp=1. ``ranks``: how many there are now. ``bytes``: of state that went to the node's memory; 0: it was
    there already, or is read from a checkpoint. ``why``: the reason, as text."""

    event: Literal["job_replanned"] = "job_replanned"
    step: int
    iteration: int = -1
    before: str
    layout: str
    ranks: int
    bytes: int = 0
    why: list[str] = Field(default_factory=list)


class FallbackStarted(Event):
    """No consistent cut exists in memory (``reason``): the job goes back to a checkpoint."""

    event: Literal["fallback_started"] = "fallback_started"
    version: int
    path: str
    reason: str = ""


class CheckpointSaved(Event):
    """A fallback checkpoint of ``version`` is complete, ``seconds`` after its version was committed.

    ``k0_s``: it held training up for so long, on the rank that completed it. ``step_s``: what a step takes. 0: not
    known.
    """

    event: Literal["checkpoint_saved"] = "checkpoint_saved"
    version: int
    path: str
    seconds: float = 0.0
    k0_s: float = 0.0
    step_s: float = 0.0


class StandbyReady(Event):
    """The number of standbys has changed."""

    event: Literal["standby_ready"] = "standby_ready"
    ready: int = 0
    starting: int = 0


class JobFinished(Event):
    """Every rank finished. ``step``: the newest version that was committed, -1: none known. ``step_s``: what a step
    took; 0: not known."""

    event: Literal["job_finished"] = "job_finished"
    exit_code: int = 0
    seconds: float = 0.0
    step: int = -1
    iteration: int = -1
    step_s: float = 0.0


class JobFailed(Event):
    """The job cannot be recovered, or was stopped. ``step``, ``step_s``: as in :class:`JobFinished`."""

    event: Literal["job_failed"] = "job_failed"
    reason: str
    step: int = -1
    iteration: int = -1
    step_s: float = 0.0


class FaultInjected(Event):
    """A fault was injected on purpose (``flashrecovery inject`` or ``--inject``)."""

    event: Literal["fault_injected"] = "fault_injected"
    rank: int
    fault: str
    phase: str = ""
    step: int = -1


class NodeJoined(Event):
    """A node's agent has come: at the launch, as a spare, or again after it was lost."""

    event: Literal["node_joined"] = "node_joined"
    node: str
    host: str = ""
    domain: str = ""
    slots: int = 0


class NodeLost(Event):
    """A node does not answer any more. ``detect_s``: since its last sign of life. ``ranks``: which it held."""

    event: Literal["node_lost"] = "node_lost"
    node: str
    ranks: list[int] = Field(default_factory=list)
    evidence: str = ""
    detect_s: float = 0.0


class Notice(Event):
    """Something that an operator may want to know, and that changes nothing. ``seconds``: of ``waiting``, for how long
    it has lasted; ``step``: of ``last_save``, of which step the state is."""

    event: Literal["notice"] = "notice"
    rank: int = -1
    kind: str = ""
    text: str = ""
    seconds: float = 0.0
    step: int = -1


AnyEvent = Annotated[
    ControllerStarted
    | JobStarted
    | FailureDetected
    | RecoveryStarted
    | RecoveryPhase
    | RecoveryFinished
    | JobResized
    | JobReplanned
    | FallbackStarted
    | CheckpointSaved
    | StandbyReady
    | JobFinished
    | JobFailed
    | FaultInjected
    | NodeJoined
    | NodeLost
    | Notice,
    Field(discriminator="event"),
]
_LONGEST_LINE = 1 << 20
_LOCK_TRIES = 5  # a tool that looks whether the directory is in use holds the lock for a moment
_PARSER: TypeAdapter[Event] = TypeAdapter(AnyEvent)


class EventLog:
    """Appends events to a file. Each line is handed to the kernel at once: it survives the end of this
    process. A line that cannot be written (disk full) is left out, and that is logged: the job is worth more."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be written."""
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
            _drop_unfinished_line(self._file)
        except OSError as e:
            raise ConfigError(f"event log {path} cannot be written: {e.strerror}") from e
        self._torn = False  # the last line is not whole
        self._listeners: list[Callable[[Event], None]] = []

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Call ``listener`` with every further event, once it is written. It must not block. What it raises is
        logged."""
        self._listeners.append(listener)

    def write(self, event: Event) -> Event:
        """Append ``event`` with the present time; returns it as written."""
        stamped = event.model_copy(update={"time": time.time(), "monotonic": time.monotonic()})
        self._append(stamped.model_dump_json().encode() + b"\n")
        for listener in self._listeners:
            try:
                listener(stamped)
            except Exception as e:  # who only looks at a job does not end it
                log.error("what is shown of the job has missed %s", stamped.event, exc_info=e)
        return stamped

    def _append(self, line: bytes) -> None:
        try:
            if self._torn:
                _drop_unfinished_line(self._file)
            self._torn = True
            if self._file.write(line) != len(line):
                raise OSError("only a part of the line was written")
            self._torn = False
        except OSError as e:
            log.error("the event log %s cannot be written: %s", self._file.name, e)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _drop_unfinished_line(file: RawIOBase) -> None:
    """An earlier writer may have been killed within a line; what follows must not become part of it."""
    size = file.seek(0, os.SEEK_END)
    tail = min(size, _LONGEST_LINE)
    file.seek(size - tail)
    content = file.read(tail) or b""
    file.truncate(size - (len(content) - 1 - content.rfind(b"\n")))


def read_events(path: Path, size: int | None = None) -> list[Event]:
    """All events of the file, or of its first ``size`` bytes, oldest first. A last line without its end (the writer was
    killed) is left out.

    Raises:
        FileNotFoundError: there is no such file.
        EventLogError: a line is not an event of this version.
    """
    events = []
    *lines, _unfinished = path.read_bytes()[:size].split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            events.append(_PARSER.validate_json(line))
        except ValidationError as e:
            first = e.errors(include_url=False)[0]
            raise EventLogError(f"{path}:{number}: not a FlashRecovery event: {first['msg']}") from e
    return events


class ControllerInfo(TypedDict):
    """Where a job's controller listens (``host:port``), its process, the token for fault injection, and the URL of its
    page and metrics ("": not served). With TLS, ``ca`` is its authority's certificate (PEM), and ``name`` that to which
    its own is made out, if not to its address."""

    address: str
    pid: int
    token: str
    observe: str
    ca: str
    name: str


class RunFiles:
    """Where things are in a run directory, and how to read them. Touches nothing when made."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def ranktable_path(self) -> Path:
        return self.path / "ranktable.json"

    @property
    def controller_path(self) -> Path:
        return self.path / "controller.json"

    @property
    def timeline_path(self) -> Path:
        return self.path / "timeline.json"

    @property
    def lock_path(self) -> Path:
        return self.path / "lock"

    @property
    def log_dir(self) -> Path:
        return self.path / "logs"

    def log_path(self, rank: int, generation: int) -> Path:
        return self.log_dir / f"rank{rank}.gen{generation}.log"

    def events(self) -> list[Event]:
        """Raises ConfigError if this is no run directory, EventLogError if its log is damaged."""
        try:
            return read_events(self.events_path)
        except OSError as e:
            raise ConfigError(f"{self.path} is not a run directory: {self.events_path}: {e.strerror}") from e

    def rank_table(self) -> dict[str, Any] | None:
        """``{"generation": g, "ranks": [...]}``, or None if no generation has been complete yet."""
        return _read_json(self.ranktable_path)

    def controller(self) -> ControllerInfo | None:
        """None if no controller has been started. Raises ConfigError if its file is damaged."""
        found = _read_json(self.controller_path)
        if found is None:
            return None
        try:
            return ControllerInfo(
                address=str(found["address"]),
                pid=int(found["pid"]),
                token=str(found["token"]),
                observe=str(found.get("observe", "")),
                ca=str(found.get("ca", "")),
                name=str(found.get("name", "")),
            )
        except (KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"{self.controller_path}: address, pid and token are needed") from e

    def is_live(self) -> bool:
        """True while a job holds the directory."""
        try:
            with open(self.lock_path, "rb") as f:
                fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


class RunDir(RunFiles):
    """A live job's own run directory: made if need be, and locked against other jobs until :meth:`close`.

    What an earlier, ended job left there stays (its log is continued), except its rank table and controller.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the directory cannot be written or belongs to another live job."""
        super().__init__(path)
        self._lock: int | None = None
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            # Not inherited by workers (close-on-exec), so the lock ends with the launcher, however it ends.
            self._lock = os.open(self.lock_path, os.O_RDWR | os.O_CREAT, 0o644)
            self._acquire(self._lock)
            self.ranktable_path.unlink(missing_ok=True)
            self.controller_path.unlink(missing_ok=True)
        except OSError as e:
            self.close()
            raise ConfigError(f"run directory {path} cannot be written: {e.strerror}") from e

    def write_rank_table(self, generation: int, ranks: Sequence[dict[str, Any]]) -> None:
        """Replace the rank table atomically. ``ranks``: rank, host, pid, node, joined_generation of each."""
        _replace_json(self.ranktable_path, {"generation": generation, "ranks": list(ranks)}, 0o644)

    def write_controller(
        self, address: str, pid: int, token: str, observe: str = "", ca: str = "", name: str = ""
    ) -> None:
        """Say where the controller listens, and the rest of :class:`ControllerInfo`. Only the owner may read it."""
        content = {"address": address, "pid": pid, "token": token, "observe": observe}
        if ca:
            content |= {"ca": ca, "name": name}
        _replace_json(self.controller_path, content, 0o600)

    def _acquire(self, lock: int) -> None:
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as e:
                if attempt + 1 < _LOCK_TRIES:
                    time.sleep(0.02)
                    continue
                holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
                self.close()
                raise ConfigError(
                    f"run directory {self.path} belongs to another live job (pid {holder or 'unknown'}); "
                    "wait for its end or choose another --run-dir"
                ) from e
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let the directory go. Its content stays. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        loaded = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from e
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: a JSON object is needed, not {type(loaded).__name__}")
    return loaded


def _replace_json(path: Path, content: Mapping[str, Any], mode: int) -> None:
    replace_file(path, json.dumps(content), mode)  # at once: in pieces a large rank table takes ten times as long
