"""What a cluster's launcher (srun, mpirun, ...) says of a task: one of the processes that it starts, one for each rank.

Each launcher has different variables for the same five numbers. Sources: ``man srun`` (OUTPUT ENVIRONMENT VARIABLES),
``man mpirun`` of Open MPI 4 and 5, MPICH's Hydra and Intel MPI, torchrun's documentation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from flashrecovery.errors import ConfigError

JOB_ENV = "FLASHRECOVERY_JOB_ID"
"""Tells the jobs of a node apart where the launcher has no number for them; the same for all tasks of a job."""


@dataclass(frozen=True)
class Task:
    """One task, as its launcher numbers it.

    Attributes:
        launcher: whose variables these are, for messages.
        job: the same for all tasks of one launch, and no other launch's.
        head: the host of rank 0, if it is known.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    job: str
    head: str | None

    @property
    def node_rank(self) -> int:
        return self.rank // self.local_world_size

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_world_size


@dataclass(frozen=True)
class _Variables:
    """Names of a launcher's variables. ``job``: those that together tell its launches apart."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    job: tuple[str, ...] = ()
    job_may_lack: tuple[str, ...] = ()


# The first one wins whose variables are there: mpirun's tasks have also those of the srun that has started mpirun's
# daemons, and torchrun's those of whatever has started torchrun.
_LAUNCHERS = (
    _Variables("RANK, WORLD_SIZE, ...", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Variables(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",),
    ),
    _Variables("mpiexec (Hydra)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Variables(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        ("SLURM_RESTART_COUNT",),
    ),
)
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLD_SIZES = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
)


def task_of(environment: Mapping[str, str]) -> Task:
    """The task that this process is, by its environment. Raises ConfigError."""
    for names in _LAUNCHERS:
        if all(
            name in environment for name in (names.rank, names.world_size, names.local_rank, names.local_world_size)
        ):
            return _checked(_read(names, environment), environment)
    looked_for = "; ".join(f"{v.rank}, {v.world_size}, {v.local_rank}, {v.local_world_size}" for v in _LAUNCHERS)
    found = {name: environment[name] for name in (*_RANKS, *_WORLD_SIZES) if name in environment}
    raise ConfigError(
        f"this process is no task of a launcher that starts one for each rank: of the variables {looked_for} none are "
        f"complete (found: {found or 'none'}). Without such a launcher use `flashrecovery run`"
    )


def _read(names: _Variables, environment: Mapping[str, str]) -> Task:
    local_size = _uniform(environment[names.local_world_size], names)
    numbers = [_number(environment, name) for name in (names.rank, names.world_size, names.local_rank)]
    rank, world_size, local_rank = numbers
    return Task(names.launcher, rank, world_size, local_rank, local_size, _job(names, environment), _head(environment))


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment[name]
    if not value.isdigit():
        raise ConfigError(f"{name}={value!r}: a number >= 0 is needed")
    return int(value)


def _uniform(text: str, names: _Variables) -> int:
    """``4``, and Slurm's ``4(x3)``: as many on every node."""
    found = re.fullmatch(r"(\d+)(\(x\d+\))?", text)
    if found is None or int(found[1]) == 0:
        raise ConfigError(
            f"{names.local_world_size}={text!r}: every node needs the same number of tasks, at least 1 (srun: "
            "--ntasks-per-node)"
        )
    return int(found[1])


def _job(names: _Variables, environment: Mapping[str, str]) -> str:
    own = environment.get(JOB_ENV)
    if own:
        return own
    known = [environment[name] for name in names.job if environment.get(name)]
    if names.job and len(known) == len(names.job):
        known += [environment[name] for name in names.job_may_lack if environment.get(name)]
        return f"{names.launcher.split()[0]}-{'.'.join(known)}"
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if address and port:
        return f"{address}-{port}"
    raise ConfigError(
        f"{names.launcher}: nothing tells this job from others of the node; set MASTER_ADDR and MASTER_PORT, or "
        f"{JOB_ENV}, to the same for all its tasks"
    )


def _head(environment: Mapping[str, str]) -> str | None:
    """The host of rank 0."""
    address = environment.get("MASTER_ADDR")
    if address:
        return address
    nodes = environment.get("SLURM_STEP_NODELIST")
    return first_host(nodes) if nodes else None


def first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: ``n[07-09,12],m3`` -> ``n07``."""
    return "".join(re.findall(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)[0])


def _checked(task: Task, environment: Mapping[str, str]) -> Task:
    if not (task.local_rank < task.local_world_size and task.rank < task.world_size):
        raise ConfigError(f"{task.launcher}: a rank is not below the number of ranks: {task}")
    if task.world_size % task.local_world_size or task.rank % task.local_world_size != task.local_rank:
        raise ConfigError(
            f"{task.launcher}: rank {task.rank} of {task.world_size} has local rank {task.local_rank} of "
            f"{task.local_world_size}: each node needs as many ranks as the others, one after the other (srun: "
            "--distribution=block, mpirun: --map-by slot or --map-by ppr:N:node)"
        )
    said = environment.get("RANK")
    if said is not None and said != str(task.rank) and environment.get("WORLD_SIZE") == str(task.world_size):
        raise ConfigError(f"RANK={said!r}, but {task.launcher} says that this is rank {task.rank}")
    return task


def renumbered(environment: Mapping[str, str], rank: int, world_size: int) -> dict[str, str]:
    """The launcher's variables that this environment has, as they would be for ``rank`` of ``world_size``."""
    values = {**dict.fromkeys(_RANKS, str(rank)), **dict.fromkeys(_WORLD_SIZES, str(world_size))}
    return {name: value for name, value in values.items() if name in environment}
