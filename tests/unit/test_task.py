"""What launchers say of their tasks is understood, or refused by name."""

from __future__ import annotations

import pytest

from flashrecovery.adopt.launch import placed
from flashrecovery.errors import ConfigError
from flashrecovery.runtime.surroundings import Surroundings
from flashrecovery.runtime.task import Task, first_host, renumbered, task_of


def open_mpi(rank: int = 5, size: int = 8, local: int = 1, local_size: int = 4) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": local_size}
    return {**{f"OMPI_COMM_WORLD_{name}": str(n) for name, n in numbers.items()}, "PMIX_NAMESPACE": "77"}


SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[07-08]",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PLAIN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MASTER = {"MASTER_ADDR": "n07", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "launcher", "job", "head"),
    [
        (open_mpi(), "mpirun (Open MPI)", "mpirun-77", None),
        ({**open_mpi(), **MASTER}, "mpirun (Open MPI)", "mpirun-77", "n07"),
        (SRUN, "srun", "srun-12.0", "n07"),
        ({**SRUN, "SLURM_RESTART_COUNT": "2"}, "srun", "srun-12.0.2", "n07"),
        ({**HYDRA, **MASTER}, "mpiexec (Hydra)", "n07-29500", "n07"),
        ({**PLAIN, **MASTER}, "RANK, WORLD_SIZE, ...", "n07-29500", "n07"),
        ({**PLAIN, "FLASHRECOVERY_JOB_ID": "mine"}, "RANK, WORLD_SIZE, ...", "mine", None),
    ],
)
def test_every_launcher_says_the_same(environment: dict[str, str], launcher: str, job: str, head: str | None) -> None:
    task = task_of(environment)
    assert task == Task(launcher, 5, 8, 1, 4, job, head)
    assert (task.node_rank, task.nodes) == (1, 2)


def test_the_launcher_that_has_started_this_very_process_counts() -> None:
    """mpirun's daemons are tasks of srun, and a batch script has some of srun's variables, too."""
    daemons = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert task_of({**daemons, **open_mpi()}).launcher == "mpirun (Open MPI)"
    assert task_of({**daemons, **PLAIN, **MASTER}).rank == 5
    with pytest.raises(ConfigError, match="no task of a launcher"):
        task_of({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"})


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "flashrecovery run"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "'RANK': '0'"),
        ({**PLAIN, **MASTER, "RANK": "x"}, "RANK='x'"),
        (PLAIN, "FLASHRECOVERY_JOB_ID"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,3"}, "SLURM_STEP_TASKS_PER_NODE='4,3'"),
        ({**SRUN, "SLURM_LOCALID": "2"}, "--distribution=block"),  # cyclic: rank 5 is the third one of the second node
        (open_mpi(local=0), "--map-by"),
        (open_mpi(size=6), "each node needs as many ranks"),
        (open_mpi(rank=9), "not below the number of ranks"),
        ({**open_mpi(), "RANK": "3", "WORLD_SIZE": "8"}, "RANK='3', but mpirun"),
    ],
)
def test_what_cannot_be_understood_is_named(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        task_of(environment)


def test_the_first_of_a_list_of_nodes() -> None:
    lists = {"n1": "n1", "n[07-09,12],m3": "n07", "a,b": "a", "rack[1-2]-node": "rack1-node", "x-1.example.com": None}
    for text, first in lists.items():
        assert first_host(text) == (first or text)


def test_a_place_that_another_rank_fills_has_its_numbers() -> None:
    assert renumbered({**SRUN, "SLURM_NTASKS": "8", "OTHER": "5"}, 1, 4) == {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NTASKS": "4",
    }


def test_nodes_and_ranks_are_the_launchers() -> None:
    task = task_of(SRUN)
    values = placed(task, {"standby": 1, "spare_nodes": 1}, {"SLURMD_NODENAME": "n08"})
    assert values == {
        "standby": 1,
        "spare_nodes": 1,
        "nproc_per_node": 4,
        "nnodes": 1,
        "node_rank": 1,
        "node_name": "n08",
        "controller": values["controller"],
        "log": "none",
    }
    host, port = values["controller"].split(":")
    assert host == "n07" and 20_000 <= int(port) < 30_000
    assert placed(task, {}, MASTER)["controller"] == "n07:29500"
    with pytest.raises(ConfigError, match="--spare-nodes 2"):
        placed(task, {"spare_nodes": 2}, {})
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        placed(task_of(open_mpi()), {}, {})
    assert "controller" not in placed(task_of(open_mpi(1, 4, 1, 4)), {}, {}), "one node needs no address"


def test_a_process_may_take_the_place_of_one_that_reaches_no_more() -> None:
    names = ["mnt:[1]", "pid:[2]"]
    both, one = Surroundings.of([*names, "/dev/nvidia0", "/dev/nvidia1"]), Surroundings.of([*names, "/dev/nvidia1"])
    assert both.covers(one) and not one.covers(both)
    assert not both.covers(Surroundings.of(["mnt:[9]", "pid:[2]", "/dev/nvidia1"]))
    own = Surroundings.own()
    assert Surroundings.of(own.lines()) == own and own.namespaces
