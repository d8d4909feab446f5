"""A script on the actors of a placement group, one for each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flashrecovery.errors import ConfigError, JobFailedError
from flashrecovery.ray.place import Meeting, start_guard


@ray.remote(max_restarts=0)
class _Place:
    """The place of one rank: its actor's resources, and the guard in it."""

    def node(self) -> tuple[str, str]:
        """Id and address of the node."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def meeting(self, host: str) -> Meeting:
        """The meeting of a job whose rank 0 is here."""
        return Meeting.here(host)

    def guard_task(self, arguments: Sequence[str], env: Mapping[str, str]) -> int:
        """Until the job's end. Returns the guard's code."""
        return start_guard(arguments, env).wait()


def run(
    command: Sequence[str],
    *,
    num_workers: int,
    resources_per_worker: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    group: PlacementGroup | None = None,
    options: Sequence[str] = ("--standby", "1"),
    timeout_s: float = 300.0,
) -> None:
    """Run a script on ``num_workers`` actors, and keep it going when ranks die. Returns when all ranks have finished.

    Args:
        command: the script and its arguments, or ``["-m", module, ...]``.
        resources_per_worker: of each bundle, such as ``{"CPU": 8, "GPU": 1}``; one CPU by default.
        strategy: of the placement group that is made.
        group: a placement group to use instead, with a bundle for each rank.
        options: of ``flashrecovery adopt``.
        timeout_s: for the actors to be placed.

    Raises:
        ConfigError: there are too few bundles, or nodes have different numbers of them.
        JobFailedError: the job has failed.
    """
    own = dict(resources_per_worker or {"CPU": 1})
    made = group is None
    if group is None:
        group = placement_group([own] * num_workers, strategy=strategy)
    try:
        _run(command, group, num_workers, own, options, timeout_s)
    finally:
        if made:
            remove_placement_group(group)


def _run(
    command: Sequence[str],
    group: PlacementGroup,
    number: int,
    resources: dict[str, float],
    options: Sequence[str],
    timeout_s: float,
) -> None:
    if len(group.bundle_specs) < number:
        raise ConfigError(f"num_workers={number}: the placement group has {len(group.bundle_specs)} bundles")
    ray.get(group.ready(), timeout=timeout_s)
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    actors: list[Any] = [
        _Place.options(  # type: ignore[attr-defined]
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            resources=others,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote()
        for bundle in range(number)
    ]
    try:
        nodes = ray.get([actor.node.remote() for actor in actors], timeout=timeout_s)
        ranked = sorted(range(number), key=lambda i: ([n for n, _ in nodes].index(nodes[i][0]), i))
        on_each = Counter(node for node, _ in nodes)
        if len(set(on_each.values())) > 1:
            raise ConfigError(f"each node needs the same number of ranks, but they have {sorted(on_each.values())}")
        each = number // len(on_each)
        first = ranked[0]
        meeting = ray.get(actors[first].meeting.remote(nodes[first][1]))
        arguments = [*options, *command]
        codes = ray.get(
            [
                actors[i].guard_task.remote(arguments, meeting.env(rank, number, rank % each, each))
                for rank, i in enumerate(ranked)
            ]
        )
    finally:
        for actor in actors:
            ray.kill(actor)
    if any(codes):
        raise JobFailedError(f"the ranks' guards have ended with the codes {codes}; rank 0's has said why")
