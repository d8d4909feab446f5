"""Which of Megatron's ranks make up a replica, in Megatron's own numbering of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashrecovery.plan.elastic.replicas import ReplicaShape, shape_of

pytest.importorskip("megatron.core")

from megatron.core import parallel_state as state

from fr_megatron import elastic, replicas

Sizes = tuple[int, int, int, int, int]
LAYOUTS: tuple[Sizes, ...] = (  # tensor, context, experts, pipeline, world
    (1, 1, 2, 1, 4),
    (1, 1, 2, 1, 6),
    (1, 1, 4, 1, 12),
    (1, 1, 2, 2, 12),
    (2, 1, 2, 1, 12),
    (2, 1, 2, 2, 24),
    (1, 2, 1, 1, 6),
    (1, 2, 1, 2, 12),
    (2, 2, 1, 1, 12),
    (1, 2, 2, 1, 6),
    (1, 4, 2, 1, 12),
    (1, 2, 4, 1, 12),
    (1, 2, 4, 2, 24),
)


def generators(sizes: Sizes) -> tuple[Any, Any]:
    """As Megatron makes them: of all but the experts, and of the experts."""
    tensor, context, experts, stages, world = sizes
    common = {"tp": tensor, "pp": stages, "order": "tp-cp-ep-dp-pp"}
    return (
        state.RankGenerator(ep=1, dp=world // (tensor * context * stages), cp=context, **common),
        state.RankGenerator(ep=experts, dp=world // (tensor * experts * stages), cp=1, **common),
    )


def groups(sizes: Sizes) -> dict[str, list[list[int]]]:
    dense, of_experts = generators(sizes)
    found = {f"dense {kind}": dense.get_ranks(kind) for kind in ("dp", "dp-cp", "cp", "tp-pp", "tp", "pp", "tp-cp")}
    found |= {f"all {kind}": dense.get_ranks(kind) for kind in ("tp-dp", "tp-dp-cp")}
    found |= {f"experts {kind}": of_experts.get_ranks(kind) for kind in ("ep", "tp", "tp-ep", "tp-ep-pp", "dp")}
    return found


class Group(SimpleNamespace):
    """Of these ranks."""

    def size(self) -> int:
        return len(self.ranks)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Which group is chosen for a rank."""

    def of(sizes: Sizes, rank: int) -> list[int]:
        tensor, _, experts, _, _ = sizes
        found = groups(sizes)
        mine = {kind: next(ranks for ranks in found[kind] if rank in ranks) for kind in ("dense dp", "experts dp")}
        monkeypatch.setattr(state, "get_data_parallel_group", lambda: Group(ranks=mine["dense dp"]))
        monkeypatch.setattr(state, "get_expert_data_parallel_group", lambda: Group(ranks=mine["experts dp"]))
        monkeypatch.setattr(state, "get_expert_model_parallel_world_size", lambda: experts)
        monkeypatch.setattr(state, "get_tensor_model_parallel_world_size", lambda: tensor)
        monkeypatch.setattr(state, "get_expert_tensor_parallel_world_size", lambda: tensor)
        return list(replicas.replica_group().ranks)

    return of


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_all_of_megatrons_groups_follow(sizes: Sizes, chosen: Any) -> None:
    """Every rank finds the same replicas, each of which has the whole model once; which rank belongs to which group is
    known in any size; and groups of the same kind have their own names."""
    world = sizes[-1]
    found = {shape_of(chosen(sizes, rank), world) for rank in range(world)}
    assert len(found) == 1
    (shape,) = found
    assert shape is not None and shape.replicas > 1
    assert not list(replicas.unknown_replicas())
    assert replicas.computing() * shape.replicas == world // (sizes[0] * sizes[1] * sizes[3])
    for kind, some in groups(sizes).items():
        for ranks in some:
            assert shape.follows(ranks, range(world)), (kind, ranks, shape)
    for kind in ("dense dp-cp", "experts dp"):
        model_ranks = [named.model_rank(ranks[0]) for ranks in groups(sizes)[kind] if (named := shape_of(ranks, world))]
        assert len({*model_ranks}) == len(groups(sizes)[kind]), (kind, model_ranks)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_a_smaller_job_has_megatrons_groups_of_that_size(sizes: Sizes, chosen: Any) -> None:
    """Whichever replica is lost, those that stay, renumbered, are in the groups in which Megatron would have put
    them."""
    *parallel, world = sizes
    shape = shape_of(chosen(sizes, 0), world)
    assert shape is not None
    for lost in range(shape.replicas):
        members = [rank for rank in range(world) if shape.replica(rank) != lost]
        number = {rank: place for place, rank in enumerate(members)}
        smaller = groups((*parallel, len(members)))  # type: ignore[arg-type]
        for kind, some in groups(sizes).items():
            left = [[number[rank] for rank in ranks if rank in number] for ranks in some]
            assert sorted(filter(None, left)) == sorted(smaller[kind]), (kind, lost)


SEVERAL = [(1, c, e, 1, c * dp) for c in range(1, 7) for e in range(1, 7) for dp in range(2, 7) if c * dp % e == 0]


@pytest.mark.parametrize("sizes", [s for s in SEVERAL if s[1] % s[2] and s[2] % s[1]], ids=str)
def test_replicas_whose_places_have_other_experts(sizes: Sizes, chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the sizes divides the other: refused, also where there are more ranks that have the same experts than
    data-parallel ones."""
    monkeypatch.setattr(state, "get_context_parallel_world_size", lambda: sizes[1])
    shape = shape_of(chosen(sizes, 0), sizes[-1])
    found = groups(sizes)
    assert shape is None or not all(shape.follows(ranks, range(sizes[-1])) for some in found.values() for ranks in some)
    (words,) = replicas.unknown_replicas()
    assert words.endswith(f"= {sizes[2]} and context_parallel_size = {sizes[1]} (allowed: one that divides the other)")


@pytest.mark.parametrize("sizes", [s for s in SEVERAL if not s[1] % s[2] or not s[2] % s[1]], ids=str)
def test_replicas_whose_places_have_the_same_experts(sizes: Sizes, chosen: Any) -> None:
    chosen(sizes, 0)
    assert not list(replicas.unknown_replicas())


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"num_moe_experts": None, "moe_router_enable_expert_bias": True}, ""),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": "aux_loss"}, ""),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}, ""),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": "global_aux_loss"}, "global_aux_loss"),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}, "global_aux_loss"),
        ({"num_moe_experts": 4, "moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias"),
        ({"num_moe_experts": 4, "moe_enable_routing_replay": True}, "moe_enable_routing_replay"),
    ],
)
def test_what_experts_cannot(config: dict[str, Any], refused: str) -> None:
    found = list(elastic.of_experts(SimpleNamespace(**config)))
    assert len(found) == bool(refused) and all(words.startswith(refused) for words in found)


def test_the_first_example() -> None:
    assert ReplicaShape(2, 2).ranks(1) == [2, 3]


def test_what_is_refused(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen((1, 1, 2, 1, 4), 0)
    monkeypatch.setattr(state, "get_expert_tensor_parallel_world_size", lambda: 2)
    (tensor,) = replicas.unknown_replicas()
    assert tensor == "expert_tensor_parallel_size = 2 (allowed: that of the rest, 1)"
    chosen((1, 2, 3, 1, 6), 0)
    monkeypatch.setattr(state, "get_context_parallel_world_size", lambda: 2)
    (context,) = replicas.unknown_replicas()
    assert context.startswith("expert_model_parallel_size = 3 and context_parallel_size = 2 (allowed: one that")
