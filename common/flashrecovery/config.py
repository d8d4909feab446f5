"""Every setting and every timeout that can be set, in one validated place.

``Timeouts`` has the reason for each default beside it. Bounds that need not be set (how often something is looked
at, how long one answer may take) stand beside their use, with the reason; docs/configuration.md lists those that show
in a log. A wrong key or value is a :class:`ConfigError` that names the key, the value and what is allowed, before any
process starts.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from flashrecovery._version import __version__
from flashrecovery.errors import ConfigError
from flashrecovery.plan.membership import leases

CONTROLLER_PORT = 29400
"""The default port of the controller, which is also torchrun's for its rendezvous."""
CONFIG_ENV = "FLASHRECOVERY_CONFIG"
"""Environment variable in which a worker finds its :class:`Settings` as JSON."""


def protects_as_it_is(env: Mapping[str, str]) -> bool:
    """Whether a worker with the environment ``env`` runs a script by ``--auto``; asked before there are settings."""
    return bool(json.loads(env.get(CONFIG_ENV, "{}")).get("auto"))


PATCH_ENV = "FLASHRECOVERY_PATCH"
"""Environment variable with the file to which ``--auto=print`` writes its patch."""


def prints_patch(env: Mapping[str, str]) -> bool:
    """Whether it runs by ``--auto=print``."""
    return bool(json.loads(env.get(CONFIG_ENV, "{}")).get("auto") == "print")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Timeouts(_Model):
    """All timeouts and periods, in seconds."""

    heartbeat_s: float = Field(
        0.25,
        gt=0,
        le=0.25,
        description="period of the agents' heartbeats to the controller; at most 0.25, so at least 4 Hz",
    )
    hang_step_s: float = Field(
        120.0,
        gt=0,
        description="a hang in a step, or in the fetch of its batch, is at least this long without progress: loaders "
        "stall",
    )
    hang_first_step_s: float = Field(
        900.0,
        gt=0,
        description="... in the first step of a process, and in a compilation in any step; what ends after one counts "
        "as progress. Here and below: never less than hang_step_s",
    )
    hang_evaluation_s: float = Field(
        900.0,
        gt=0,
        description="... in the script's own code between two steps; each forward pass of an evaluation counts as "
        "progress",
    )
    hang_save_s: float = Field(1800.0, gt=0, description="... in a checkpoint that the script writes")
    hang_factor: float = Field(10.0, ge=2, description="a hang is also at least this many times a usual step")
    stopped_s: float = Field(
        2.0, gt=0, description="a process that is stopped (state T, SIGSTOP) for this long has failed"
    )
    ping_s: float = Field(
        1.0, gt=0, description="if a hang is suspected, control threads must answer a ping within this time (two pings)"
    )
    mutation_grace_s: float = Field(
        30.0,
        gt=0,
        description="time for a rank that is changing its state (tag -1) to finish; offloaded optimizers take seconds",
    )
    mutation_blocked_s: float = Field(
        0.25,
        gt=0,
        description="... unless it has waited in one collective for this long: its peer may be dead",
    )
    stop_ack_s: float = Field(
        10.0,
        gt=0,
        description="from the stop command until a survivor has left its step (plus mutation_grace_s); kernels "
        "finish first",
    )
    between_steps_s: float = Field(
        1800.0,
        gt=0,
        description="... or until it reaches its next step, if it runs the script's code between two steps (an "
        "evaluation)",
    )
    drain_s: float = Field(
        5.0, gt=0, description="time for aborted operations to release their tensors; milliseconds on gloo"
    )
    peer_error_wait_s: float = Field(
        20.0,
        gt=0,
        description="a rank whose collective failed waits this long for the controller's stop command, then it "
        "raises the error; time without a controller does not count",
    )
    node_silence_s: float = Field(
        0.75, gt=0, description="a node is suspected after this time without a heartbeat: three in a row"
    )
    node_probe_s: float = Field(
        0.25, gt=0, description="... and it is lost if no neighbour gets an answer from it within this time either"
    )
    lease_s: float = Field(
        0.4,
        gt=0,
        description="an agent halts its workers, and electors may vote, when no heartbeat was answered for this "
        "time, directly or through another node. It must be shorter than node_silence_s, so that no rank runs twice",
    )
    node_wait_s: float = Field(
        1800.0, gt=0, description="how long ranks of a lost node wait for a node with room; schedulers take minutes"
    )
    rendezvous_s: float = Field(
        900.0,
        gt=0,
        description="how long an agent tries to reach the controller at the start, and how long the first node waits "
        "for the others",
    )
    takeover_s: float = Field(
        10.0,
        gt=0,
        description="how long a restarted controller waits for the agents of its job before it recovers the job",
    )
    controller_gone_s: float = Field(
        600.0, gt=0, description="how long training continues without a controller; then the agents end their workers"
    )
    fence_s: float = Field(
        10.0, gt=0, description="from SIGKILL until the process has ended; a process of 100 GB takes seconds"
    )
    replacement_s: float = Field(
        900.0,
        gt=0,
        description="time for a replacement to reach its first step: imports, building the model and the data set",
    )
    startup_s: float = Field(
        3600.0,
        gt=0,
        description="time for all ranks to reach their first step at launch; if none does, the script runs on "
        "unprotected, with a notice",
    )
    regroup_s: float = Field(60.0, gt=0, description="time to form all process groups of a new generation")
    restore_s: float = Field(600.0, gt=0, description="time to transfer and verify all lost state")
    resume_ack_s: float = Field(
        30.0, gt=0, description="time for every rank to return to its loop after the resume command"
    )
    health_s: float = Field(
        1.0,
        gt=0,
        description="how often device plugins are called; a call takes milliseconds, and XIDs wait in the driver",
    )
    health_stuck_s: float = Field(
        30.0, gt=0, description="a call of a device plugin that takes this long is stuck; NVML takes seconds to start"
    )
    health_quiet_s: float = Field(
        60.0, gt=0, description="a device warning that is repeated within this time counts as the same one"
    )
    handoff_s: float = Field(
        20.0,
        gt=0,
        description="a node that gets SIGTERM stays at most this long to hand over its ranks; schedulers kill after "
        "30 s",
    )
    signal_grace_s: float = Field(
        8.0,
        ge=0,
        le=3600.0,
        description="if the script handles the signal that ends the job, it has this long to end by itself",
    )
    last_save_s: float = Field(
        15.0,
        gt=0,
        le=3600.0,
        description="if the job ends early, it may take this long to stop its ranks and copy their state; then they "
        "end, and the state is written to disk. Schedulers kill after 30 s",
    )
    shutdown_grace_s: float = Field(
        3.0, gt=0, le=4.0, description="from SIGTERM to SIGKILL at the end; all processes end within 5 s"
    )


class CheckpointSettings(_Model):
    """Fallback checkpoint: written rarely, used only when no consistent cut exists."""

    dir: Path | None = Field(None, description="directory that all ranks can read and write; none: no checkpoints")
    interval_s: float | Literal["auto"] = Field("auto", description="seconds between checkpoints")
    keep: int = Field(2, ge=1, description="complete checkpoints to keep")
    failures_per_day: float = Field(
        0.05,
        gt=0,
        description="assumed failures per day that need the checkpoint: m/d of FlashRecovery equation (3)",
    )


class SnapshotSettings(_Model):
    """Copies of the state in memory, held by a separate process on each node, which outlives the processes of the
    job."""

    keep: Literal["auto", "always", "never"] = Field(
        "auto",
        description="auto: in each step that makes copies anyway, else (every shard has replicas) from time to time; "
        "always: in each step",
    )
    max_age_s: float = Field(
        30.0,
        gt=0,
        description="with auto, where every shard has replicas: a snapshot is at most this many seconds old, or two "
        "steps; more if copies would hold training up for more than a five-hundredth of the time",
    )
    linger_s: float = Field(
        60.0,
        ge=0,
        description="if its agent was killed, a snapshot process waits this many seconds for the next launch",
    )
    persist: bool = Field(
        True,
        description="write the snapshots to the run directory if the job ends early, or if no launch resumes within "
        "linger_s",
    )


class ObserveSettings(_Model):
    """Metrics, web page and traces of the job; all are read-only."""

    port: int | None = Field(
        None, ge=0, le=65535, description="port of the metrics and the web page; 0: any free port; none: off"
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address to listen on; everyone who can reach it can read everything, without a token",
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/\s]+",
        description="URL of an OpenTelemetry collector (OTLP over HTTP) that receives a trace of each recovery; "
        "needs the extra `otel`",
    )


class TlsSettings(_Model):
    """Encryption between controller, agents and tools; not of datagram heartbeats, training traffic and state
    transfers. Each node needs the three files; a job of one node can make them itself."""

    auto: bool = Field(
        False, description="one node: create a CA and a certificate in the run directory; needs the extra `tls`"
    )
    certificate: Path | None = Field(None, description="PEM file with this node's certificate and its chain")
    key: Path | None = Field(None, description="PEM file with the certificate's private key, without a password")
    ca: Path | None = Field(None, description="PEM file with the trusted CA certificates")
    name: str | None = Field(
        None,
        min_length=1,
        description="host name in the certificates of all nodes; none: each has its node's address",
    )


class NoticeSettings(_Model):
    """How this node learns that it will be preempted, so that its ranks can be handed over in time."""

    file: Path | None = Field(None, description="a file that exists once the node will be preempted")
    command: list[str] = Field([], description="a command with its arguments; exit code 0: the node will be preempted")
    poll_s: float = Field(1.0, gt=0, description="seconds between two checks of file and command")
    within_s: float = Field(
        100.0, gt=0, description="seconds from the notice to the preemption; clouds give 30 s to 2 minutes"
    )
    warnings: bool = Field(False, description="a warning of a device plugin (health) counts as a notice, too")


class ElasticSettings(_Model):
    """A job that continues with fewer data-parallel replicas if a rank cannot be replaced."""

    min: int = Field(ge=1, description="the fewest replicas that train; with fewer, the job waits for nodes")
    max: int = Field(ge=2, description="the most replicas; at least those of the launch")
    replace: Literal["auto", "never"] = Field(
        "auto",
        description="auto: a rank leaves only if no node has room for it; never: lost ranks are not replaced",
    )
    grow: Literal["auto", "never"] = Field(
        "auto", description="auto: replicas join when a node joins; never: only by command (flashrecovery resize)"
    )

    @property
    def text(self) -> str:
        """As on the command line."""
        return f"{self.min}:{self.max}"


class ParallelismSettings(_Model):
    """A job that continues in another parallel layout, with fewer ranks, if a rank cannot be replaced."""

    min: int = Field(1, ge=1, description="the fewest ranks that train")
    replace: Literal["auto", "never"] = Field(
        "auto",
        description="auto: the layout changes only if a rank cannot be replaced, or by command; never: it changes "
        "with each loss",
    )


class Settings(_Model):
    """The settings that a worker needs (passed in :data:`CONFIG_ENV`)."""

    auto: bool | Literal["print"] = Field(
        False,
        description="protect a plain PyTorch script that has no FlashRecovery calls; print: print a patch that adds "
        "the calls, and end before the first step",
    )
    redundancy: Literal["auto", "replica", "neighbor", "parity", "none"] = Field(
        "auto", description="how to protect state that no data-parallel peer holds"
    )
    parity: Literal[1, 2] = Field(1, description="how many ranks of a parity group may be lost at once")
    parity_group: int = Field(8, ge=2, description="most ranks in a parity group, if the ranks can be divided that way")
    pre_step_copy: Literal["auto", "always", "never"] = Field(
        "auto", description="whether each step first copies the rank's own state"
    )
    barrier: Literal["host", "auto"] = Field(
        "host",
        description="with GPUs, what waits for whole gradients before the optimizer changes the state; auto: the "
        "device, where a fused optimizer honours its flag (gpu.md)",
    )
    gpu_domain: int | None = Field(
        None,
        ge=1,
        description="number of neighbouring GPUs (NVLink) that are all lost if a process on one of them dies; none: "
        "only its own",
    )
    rank_local_state_mib: int = Field(
        1024,
        ge=1,
        le=1024,
        description="limit of a rank's local state, in MiB (changing buffers, objects that differ between ranks, the "
        "data's position); four copies are kept",
    )
    verify: bool = Field(True, description="compare the digest of each restored shard with that of its source")
    checkpoint: CheckpointSettings = Field(CheckpointSettings(), description="fallback checkpoint")
    snapshots: SnapshotSettings = Field(SnapshotSettings(), description="copies that outlive the job's processes")
    timeouts: Timeouts = Field(Timeouts(), description="all timeouts")
    elastic: ElasticSettings | None = Field(None, description="range of the number of replicas; none: it is fixed")
    parallelism: ParallelismSettings | None = Field(
        None, description="allow the parallel layout to change; none: it is fixed"
    )
    resume: bool = Field(
        False,
        description="continue from the newest snapshot (in memory or on disk) or fallback checkpoint, if there is one",
    )

    @field_validator("auto", mode="before")
    @classmethod
    def _auto_or_print(cls, value: object) -> object:
        word = str(value).lower()
        if word not in (*_TRUE, *_FALSE, "print"):
            raise ValueError("allowed: true, false, print (--auto, --auto=print)")
        return word if word == "print" else word in _TRUE


FaultKind = Literal["sigkill", "sigstop", "exit", "raise", "segv", "hang", "corrupt", "device"]
FAULTS: tuple[str, ...] = get_args(FaultKind)
"""The faults that can be injected. ``corrupt``: flips one bit of the state that a rank receives in a restore.
``device``: every later call of the process to its device fails."""
CORRUPTIBLE = "recovery:restoring"


_TRUE, _FALSE = ("true", "t", "yes", "y", "on", "1"), ("false", "f", "no", "n", "off", "0")


class FaultSpec(_Model):
    """One injected fault: ``rank=1,fault=sigkill,at=backward,step=3``."""

    rank: int = Field(ge=0)
    fault: FaultKind = "sigkill"
    at: str | None = None
    step: int | None = Field(None, ge=0)


class RunConfig(Settings):
    """All settings of ``flashrecovery run``. Options that torchrun has, too, have torchrun's names."""

    nproc_per_node: int = Field(1, ge=1, description="training processes on this node")
    nnodes: int = Field(1, ge=1, description="nodes that hold ranks")
    spare_nodes: int = Field(0, ge=0, description="spare nodes, which take over the ranks of lost nodes")
    node_rank: int | None = Field(
        None,
        ge=0,
        description="number of this node; none: in the order of arrival. Nodes with number nnodes or above are spare",
    )
    spare: bool = Field(False, description="this node is a spare node")
    node_name: str | None = Field(None, min_length=1, description="unique name of this node; none: the host name")
    node_address: str | None = Field(
        None, description="address at which other nodes reach this one; none: the one it uses to reach the controller"
    )
    failure_domain: str | None = Field(
        None,
        description="name of what fails together with this node, such as its switch; copies go to nodes of "
        "another domain",
    )
    slots: int | None = Field(None, ge=1, description="most ranks on this node; none: nproc_per_node")
    master_port: int = Field(0, ge=0, le=65535, description="port of this node's TCPStore; 0: any free port")
    stores: int | None = Field(
        None, ge=1, description="number of TCPStores that share the process groups; none: one for each 1,000 ranks"
    )
    controller: str | None = Field(
        None, description=f"HOST or HOST:PORT of the controller (port {CONTROLLER_PORT}); needed with several nodes"
    )
    datagrams: bool = Field(
        True, description="send heartbeats as UDP datagrams to the controller's port, if these arrive"
    )
    max_direct_agents: int = Field(
        64,
        ge=1,
        description="most agents that connect to the controller directly; any further agents connect through these",
    )
    embed_controller: bool = Field(
        True,
        description="the node with the controller's address also runs the controller, unless one listens there already",
    )
    token_file: Path | None = Field(
        None, description="file with the token that all nodes share; none: the environment variable FLASHRECOVERY_TOKEN"
    )
    start_method: Literal["zygote", "spawn"] = Field(
        "zygote",
        description="zygote: one process per node imports the script's modules, and workers are forked from it where "
        "that is safe; spawn: each worker is a new interpreter",
    )
    fork_denylist: tuple[str, ...] = Field(
        (), description="packages that a zygote must not import, because they do not work after a fork"
    )
    standby: int = Field(0, ge=0, description="number of pre-warmed processes to keep")
    standby_device: bool = Field(
        False,
        description="standbys use a GPU from the start, one per local rank (needs standby = nproc_per_node); false: "
        "only once they replace a rank",
    )
    run_dir: Path | None = Field(
        None, description="directory for events, logs and the rank table; none: `runs/TIME-PID`"
    )
    node_failure_log: Path | None = Field(
        None,
        description="file that records failures of nodes for later jobs: bad nodes are used last, then not at all; "
        "none: node_marks.jsonl next to the run directory, if it exists",
    )
    log: Literal["0", "all", "none"] = Field("0", description="which ranks' output is shown live")
    health: str = Field(
        "auto", description="device plugins: auto (all that are installed), none, or names separated by commas"
    )
    preflight: bool = Field(
        False,
        description="before the job starts, each node multiplies matrices and reduces numbers of known result on each "
        "of its GPUs (without GPUs: in each rank), in a minute once all have started; a bad one is named, and no job "
        "starts",
    )
    notice: NoticeSettings = Field(NoticeSettings(), description="how this node learns that it will be preempted")
    max_restarts: int = Field(3, ge=0, description="most restarts of the whole job before the first trained step")
    max_failures_per_step: int = Field(
        3,
        ge=1,
        description="the job ends if the same rank fails this often at the same step, or before its replacement's "
        "first step, by its own fault (exception, exit, crash, hang, device): a crash loop",
    )
    max_kills_per_step: int = Field(
        10,
        ge=1,
        description="the same for failures from outside (SIGKILL, SIGTERM, SIGSTOP), such as the out-of-memory killer",
    )
    run_id: str = Field("flashrecovery", min_length=1, description="TORCHELASTIC_RUN_ID of the ranks")
    role: str = Field("default", min_length=1, description="ROLE_NAME of the ranks")
    inject: tuple[FaultSpec, ...] = Field((), description="drills: faults to inject")
    observe: ObserveSettings = Field(ObserveSettings(), description="metrics, web page, traces")
    tls: TlsSettings = Field(TlsSettings(), description="encryption between controller, agents and tools")

    def settings(self) -> Settings:
        return Settings.model_validate({name: getattr(self, name) for name in Settings.model_fields})

    @field_validator("fork_denylist")
    @classmethod
    def _module_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"{name!r} is not a module name")
        return value

    @field_validator("controller")
    @classmethod
    def _with_port(cls, value: str | None) -> str | None:
        return f"{value}:{CONTROLLER_PORT}" if value and ":" not in value else value

    def shared(self) -> dict[str, str]:
        """What all nodes and their controller must have alike: by dotted key, as JSON."""
        values = self.settings().model_dump(mode="json")
        shape = {"nnodes": self.nnodes, "nproc_per_node": self.nproc_per_node}
        return flat({"flashrecovery": __version__, **shape, **values})

    @property
    def world_size(self) -> int:
        return self.nproc_per_node * self.nnodes

    @property
    def most_ranks(self) -> int:
        """That the job may ever have, whatever its replicas turn out to be; ranks are numbered below."""
        if self.elastic is None:
            return self.world_size
        launches = range(self.elastic.min, self.elastic.max + 1)
        each = max((self.world_size // n for n in launches if self.world_size % n == 0), default=1)
        return max(self.world_size, self.elastic.max * each)

    @property
    def several_nodes(self) -> bool:
        """Whether there are other agents than this one."""
        return self.nnodes + self.spare_nodes > 1


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Values as JSON, by dotted key."""
    found: dict[str, str] = {}
    for key, value in values.items():
        found.update(flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: json.dumps(value)})
    return found


PHASES = (
    "between",
    "data",
    "forward",
    "backward",
    "grad-sync",
    "optimizer-start",
    "optimizer",
    "param-gather",
    "commit",
    "below",
)
RECOVERY_PHASES = tuple(
    f"recovery:{state}"
    for state in ("quiescing", "replacing", "stashing", "regrouping", "restoring", "reshaping", "verifying", "resuming")
)


def parse_fault(text: str) -> FaultSpec:
    """``rank=1,fault=sigkill,at=backward,step=3`` -> :class:`FaultSpec`. Raises ConfigError."""
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, sep, value = part.partition("=")
        if not sep:
            raise ConfigError(f"--inject {text!r}: {part!r} is not KEY=VALUE; keys: rank, fault, at, step")
        values[key.strip()] = value.strip()
    spec: FaultSpec = validate(FaultSpec, values, f"--inject {text!r}")
    check_fault(spec.fault, spec.at)
    return spec


def check_phase(phase: str | None) -> None:
    """Raises ConfigError if ``phase`` is not a phase of a step or of a recovery."""
    if phase is not None and phase not in PHASES + RECOVERY_PHASES:
        near = difflib.get_close_matches(phase, PHASES + RECOVERY_PHASES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"phase {phase!r} is unknown{hint}; allowed: {', '.join(PHASES + RECOVERY_PHASES)}")


def check_fault(fault: str, phase: str | None) -> None:
    """Raises ConfigError if there is no such fault, or it does nothing in ``phase`` (None: at once)."""
    if fault not in FAULTS:
        raise ConfigError(f"fault {fault!r} is unknown; allowed: {', '.join(FAULTS)}")
    check_phase(phase)
    if fault == "corrupt" and phase != CORRUPTIBLE:
        raise ConfigError(f"fault 'corrupt' needs at={CORRUPTIBLE}, and does nothing at {phase or 'once'!r}")


def overlaid(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with ``overrides`` on top, also inside of blocks (checkpoint, timeouts)."""
    result = dict(values)
    for key, value in overrides.items():
        below = result.get(key)
        result[key] = {**below, **value} if isinstance(value, dict) and isinstance(below, dict) else value
    return result


def load_run_config(file: Path | None, overrides: dict[str, Any]) -> RunConfig:
    """The YAML ``file`` (may be None) overlaid with ``overrides``. Raises ConfigError."""
    return run_config(overlaid(read_config(file), overrides), "command line" if file is None else str(file))


def read_config(file: Path | None) -> dict[str, Any]:
    """What stands in the YAML ``file``; nothing without one. Raises ConfigError."""
    if file is None:
        return {}
    try:
        loaded = yaml.safe_load(file.read_text())
    except OSError as e:
        raise ConfigError(f"--config {file}: {e.strerror}") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"--config {file}: not valid YAML: {e}") from e
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"--config {file}: a mapping of keys is needed, not {type(loaded).__name__}")
    return dict(loaded or {})


def run_config(values: dict[str, Any], where: str) -> RunConfig:
    """The configuration with these ``values``, which stand ``where``. Raises ConfigError."""
    config: RunConfig = validate(RunConfig, values, where)
    _check_nodes(config)
    _check_leases(config.timeouts)
    _check_tls(config)
    if config.standby_device and config.standby != config.nproc_per_node:
        raise ConfigError(
            f"standby_device: one standby for each GPU: standby = {config.standby}, allowed: {config.nproc_per_node} "
            "(nproc_per_node)"
        )
    for spec in config.inject:
        check_fault(spec.fault, spec.at)
        if spec.rank >= config.most_ranks:
            raise ConfigError(f"inject: rank {spec.rank} is outside the world of {config.most_ranks} ranks")
    if config.world_size == 1 and config.redundancy in ("replica", "neighbor", "parity"):
        raise ConfigError(
            f"redundancy: {config.redundancy!r} needs another rank to hold the copy, but the world size is 1; "
            "allowed here: 'auto' or 'none' (with a checkpoint)"
        )
    if config.notice.warnings and config.health == "none":
        raise ConfigError("notice.warnings: no plugin warns with health: none; allowed: auto, or the names of plugins")
    if config.auto == "print" and config.several_nodes:
        raise ConfigError("auto = 'print' looks at a script on one node: give no --nnodes; allowed here: true, false")
    _check_parity(config)
    _check_gpu_domain(config)
    _check_elastic(config)
    _check_replan(config)
    return config


def _check_replan(config: RunConfig) -> None:
    """What goes together with a layout that may change. Raises ConfigError."""
    parallelism = config.parallelism
    if parallelism is None:
        return
    if parallelism.min > config.world_size:
        raise ConfigError(
            f"parallelism.min = {parallelism.min}: at most the ranks of the launch ({config.world_size}) is allowed"
        )
    if config.elastic is not None and config.elastic.max > config.world_size:
        raise ConfigError(
            f"elastic = {config.elastic.text} with parallelism: a job whose parallel layout may change does not grow "
            f"beyond its launch; elastic.max of at most the replicas of the launch, which has {config.world_size} "
            "ranks, is allowed"
        )
    if config.redundancy in ("parity", "replica"):
        raise ConfigError(
            f"redundancy: {config.redundancy!r} with parallelism: not every layout has it; 'auto', 'neighbor', 'none' "
            "are allowed"
        )
    if config.redundancy == "neighbor" and parallelism.min < 2:
        raise ConfigError(
            "redundancy: 'neighbor' with parallelism.min = 1: a world of one rank has no peer to hold a copy; 2 or "
            "more, or redundancy: 'auto' is allowed"
        )
    if config.snapshots.keep == "always":
        raise ConfigError(
            "snapshots.keep: 'always' with parallelism: snapshots are of one layout; 'auto' and 'never' are allowed"
        )


def _check_elastic(config: RunConfig) -> None:
    """What goes together with an elastic job. Raises ConfigError."""
    elastic = config.elastic
    if elastic is None:
        return
    if elastic.min > elastic.max:
        raise ConfigError(f"elastic.min = {elastic.min}: at most elastic.max ({elastic.max}) is allowed")
    if config.world_size == 1:
        raise ConfigError(
            f"elastic = {elastic.text} with one rank: a job that is launched on one is not elastic; two or more are "
            "allowed"
        )
    if not any(config.world_size % replicas == 0 for replicas in range(elastic.min, elastic.max + 1)):
        raise ConfigError(
            f"elastic = {elastic.text}: the job is launched with {config.world_size} ranks (nnodes = {config.nnodes} x "
            f"nproc_per_node = {config.nproc_per_node}), which are no {elastic.min} to {elastic.max} replicas, also "
            "where these have several ranks; a launch within MIN:MAX is allowed"
        )
    if config.redundancy not in ("auto", "replica", "none"):
        raise ConfigError(
            f"redundancy: {config.redundancy!r} in an elastic job (elastic = {elastic.text}), of which 'auto' keeps "
            f"the "
            "copies that are needed; allowed here: 'auto', 'replica', 'none'"
        )
    if config.snapshots.keep == "always":
        raise ConfigError(
            f"snapshots.keep: 'always' in an elastic job (elastic = {elastic.text}): snapshots are of one number of "
            "ranks; allowed here: 'auto', 'never'"
        )


def _check_parity(config: RunConfig) -> None:
    """Whether parity groups can be formed. Raises ConfigError."""
    if config.redundancy != "parity":
        return
    if config.parity_group <= config.parity:
        raise ConfigError(f"parity_group = {config.parity_group}: more than parity ({config.parity}) is allowed")
    places, what = (config.nnodes, "nodes") if config.nnodes > 1 else (config.world_size, "ranks")
    if places <= config.parity:
        raise ConfigError(
            f"redundancy: 'parity' with parity = {config.parity} needs at least {config.parity + 1} {what}, and there "
            f"are {places}; allowed here: 'auto', 'neighbor'" + (", parity = 1" if places == config.parity == 2 else "")
        )


def _check_gpu_domain(config: RunConfig) -> None:
    """Whether the GPUs of a node can be divided so. Raises ConfigError."""
    size, ranks = config.gpu_domain, config.nproc_per_node
    if size is not None and size < ranks and ranks % size:
        raise ConfigError(
            f"gpu_domain = {size}: nproc_per_node = {ranks} is no multiple of it; 1 to {ranks} that divide it, or "
            "more (the whole node), are allowed"
        )


def _check_nodes(config: RunConfig) -> None:
    """What the keys about nodes must fulfil together. Raises ConfigError."""
    nodes = config.nnodes + config.spare_nodes
    if nodes > 1 and config.controller is None:
        raise ConfigError(
            f"nnodes = {config.nnodes}, spare_nodes = {config.spare_nodes}: several nodes need --controller HOST:PORT, "
            "the same on all of them, with HOST one of them"
        )
    if config.node_rank is not None and config.node_rank >= nodes:
        raise ConfigError(
            f"node_rank = {config.node_rank}: allowed: 0 to {nodes - 1} (nnodes = {config.nnodes}, "
            f"spare_nodes = {config.spare_nodes})"
        )
    if config.slots is not None and config.slots < config.nproc_per_node:
        raise ConfigError(f"slots = {config.slots}: at least nproc_per_node = {config.nproc_per_node} is needed")


def _check_leases(limits: Timeouts) -> None:
    """Whether a node that is cut off halts, and a controller ceases to decide, in time. Raises ConfigError."""
    wrong = leases.complaint(limits.lease_s, limits.node_probe_s, limits.node_silence_s)
    if wrong:
        raise ConfigError(f"timeouts: {wrong}")


def _check_tls(config: RunConfig) -> None:
    """Checks which keys of `tls` go together. Raises ConfigError."""
    tls = config.tls
    files = {"tls.certificate": tls.certificate, "tls.key": tls.key, "tls.ca": tls.ca}
    missing = [key for key, path in files.items() if path is None]
    if tls.auto and len(missing) < len(files):
        raise ConfigError("tls.auto = true makes certificate, key and ca itself; give either it or these three")
    if tls.auto and config.controller is not None:
        raise ConfigError(
            f"tls.auto = true is for jobs of one node; with controller = {config.controller} every node needs "
            "tls.certificate, tls.key and tls.ca, of one authority"
        )
    if 0 < len(missing) < len(files):
        raise ConfigError(f"tls: {', '.join(missing)} missing; certificate, key and ca are needed together")
    if tls.name is not None and missing:
        raise ConfigError(f"tls.name = {tls.name!r} needs tls.certificate, tls.key and tls.ca")


RENAMED: dict[str, str] = {
    "undo": "pre_step_copy",
    "node_marks": "node_failure_log",
    "unforkable": "fork_denylist",
    "direct_agents": "max_direct_agents",
    "outside_s": "between_steps_s",
    "replan": "parallelism",
    "hang_floor_s": "hang_step_s",
}
"""Keys that had another name before the first release."""


def validate(model: type[Any], values: dict[str, Any], where: str) -> Any:
    """An instance of ``model``. Raises ConfigError that names key, value, what is allowed, and ``where`` they stand."""
    try:
        return model.model_validate(values)
    except ValidationError as e:
        raise ConfigError("\n".join(_explain(err, model, where) for err in e.errors())) from e


def _explain(err: Any, model: type[BaseModel], where: str) -> str:
    """One pydantic error in the user's words: key, value, what is allowed."""
    path = ".".join(str(p) for p in err["loc"])
    if err["type"] == "extra_forbidden":
        owner: Any = model
        for part in err["loc"][:-1]:
            field = getattr(owner, "model_fields", {}).get(part)
            owner = field.annotation if field is not None else owner
        allowed = sorted(getattr(owner, "model_fields", {}))
        key = str(err["loc"][-1])
        near = difflib.get_close_matches(key, allowed, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        hint = f"it is called {RENAMED[key]!r} now; " if RENAMED.get(key) in allowed else hint
        return f"{where}: unknown key {path!r} (value {err['input']!r}); {hint}allowed: {', '.join(allowed)}"
    return f"{where}: {path} = {err['input']!r}: {err['msg']}"
