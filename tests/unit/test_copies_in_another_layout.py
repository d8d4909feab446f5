"""On which domains ranks are in another parallel layout, as each of them finds it in its environment."""

from __future__ import annotations

import pytest

from flashrecovery.config import RunConfig, validate
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.runtime.environment import DOMAINS_ENV, rank_env
from flashrecovery.worker.replication import policy


def found(monkeypatch: pytest.MonkeyPatch, domains: list[int], nodes: int) -> tuple[tuple[int, int], list[str]]:
    """What a rank of four finds that is started when that many nodes have ranks."""
    config = validate(RunConfig, {"nproc_per_node": 4}, "test")
    replace = pb.Replace(layout="tp=1,pp=2,dp=2", world_size=4, nodes=nodes, stride=2, domains=domains)
    monkeypatch.delenv(DOMAINS_ENV, raising=False)
    for name, value in rank_env(config, 0, 5, replace).items():
        monkeypatch.setenv(name, value)
    return policy.placement(), policy.domains_of_launch(4)


@pytest.mark.parametrize(("domains", "several"), [([0, 0, 1, 1], True), ([], False)])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_replacement_finds_what_the_others_have_found(
    monkeypatch: pytest.MonkeyPatch, domains: list[int], several: bool, nodes: int
) -> None:
    """Wherever ranks have moved since: else it would join other groups than they, and copy other shards."""
    (stride, there), names = found(monkeypatch, domains, nodes)
    assert stride == 2 and (there > 1) is several
    assert len(names) == 4 and len({*names}) == (2 if several else 4)
