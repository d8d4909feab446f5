"""Failures with megatron-core that the grid of phases does not have: several at once, in a recovery, in an exchange.

And the negative control: without the reset of what is half-finished, the same faults have another end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import megatron as mg
from tests.support.faults import faults
from tests.support.installed import skip_module_without
from tests.support.jobs import ROOT, Job, Layout, check_clean, check_fired, check_recovered, check_same

skip_module_without("megatron.core")

SCRIPTS = ROOT / "tests" / "scripts"
SLOW = ("--step-time", "100")
STATES = ("quiescing", "replacing", "regrouping", "restoring", "verifying")

pytestmark = [pytest.mark.megatron, pytest.mark.grid, pytest.mark.timeout(3 * mg.TIMEOUT_S)]
Reference = Callable[[Layout], Job]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same launch without a fault, once a layout."""
    return mg.references(tmp_path_factory)


@pytest.mark.parametrize(
    ("layout", "victims"),
    [
        pytest.param(mg.TP2_DP2, (0, 3), id="tp2-dp2-different-dp-groups"),
        pytest.param(mg.TP2_DP2, (0, 1), id="tp2-dp2-one-replica"),
        pytest.param(mg.TP2_DP2_OVERLAPS, (0, 2), id="tp2-dp2-overlaps-same-dp-group"),
        pytest.param(mg.DP4_DISTRIBUTED, (1, 3), id="dp4-distributed-not-neighbours"),
        pytest.param(mg.DP4_INSTANCES, (0, 1), id="dp4-instances2-one-instance"),
        pytest.param(mg.TP2_PP2_DP2, (0, 5), id="tp2-pp2-dp2-two-stages"),
    ],
)
def test_victims_at_once(layout: Layout, victims: tuple[int, ...], tmp_path: Path) -> None:
    undisturbed = mg.run(tmp_path / "reference", layout, standby=0, flags=SLOW)
    job = _killed_at_once(tmp_path / "run", layout, victims)
    check_same(job, undisturbed)
    (finished,) = job.of("recovery_finished")
    assert set(finished["victims"]) == set(victims)


def test_a_whole_data_parallel_group_at_once_is_lost(tmp_path: Path) -> None:
    """No rank has what ranks 0 and 2 shared, and there is no checkpoint: what is lost is named."""
    job = _killed_at_once(tmp_path / "run", mg.TP2_DP2, (0, 2))
    assert job.code == 1 and not job.of("recovery_finished"), job.explain()
    assert "no version exists for every shard" in job.output and "rank 0: 'param/0.module." in job.output
    check_clean(job)


def test_gradients_that_are_set_to_zero_last(tmp_path: Path) -> None:
    """Not at a step's beginning, where whatever is left of a reduction would be forgotten in any case: from core 0.18
    on a group of buckets notes that it has been reduced, and does it no second time. The survivor waits in the
    all-gather after the optimizer."""
    layout = mg.gpt("dp2-overlap-grad", *mg.DISTRIBUTED, "--overlap-grad-reduce", "--ddp-bucket-size", "5000", nproc=2)
    script = SCRIPTS / "megatron_zero_last.py"
    undisturbed = mg.run(tmp_path / "reference", layout, standby=0, script=script)
    inject = faults((1, "optimizer", 3), (0, "optimizer", 6))
    job = mg.run(tmp_path / "run", layout, standby=1, inject=inject, script=script, options=["--hang-timeout", "30"])
    check_same(job, undisturbed)
    check_fired(job, len(inject))
    check_recovered(job, [0, 1])


def test_a_router_that_balances_by_quantiles(tmp_path: Path) -> None:
    """Its buffers change at two places of a step, and are all of the state that no loss trains."""
    from megatron.core.transformer import TransformerConfig

    if not hasattr(TransformerConfig, "moe_router_quantile_balancing_ema"):
        pytest.skip("this megatron-core has none (from 0.19 on)")
    script, layout = SCRIPTS / "megatron_quantile.py", mg.gpt("dp2-quantile", "--num-experts", "4", nproc=2)
    undisturbed = mg.run(tmp_path / "reference", layout, standby=0, script=script)
    places = ("forward", "backward", "grad-sync", "optimizer", "commit")
    inject = faults(*((at % 2, phase, 2 + 3 * at) for at, phase in enumerate(places)))
    job = mg.run(tmp_path / "run", layout, standby=1, inject=inject, script=script)
    check_same(job, undisturbed)
    check_fired(job, len(inject))
    check_recovered(job, [0, 1])


def _killed_at_once(run_dir: Path, layout: Layout, victims: tuple[int, ...]) -> Job:
    """From outside: of injected faults one may come after the other."""
    running = mg.start(run_dir, layout, standby=2, flags=SLOW, options=["--snapshots", "never"])
    running.wait_for_step(4, mg.TIMEOUT_S)
    running.kill(*victims)
    return running.wait(mg.TIMEOUT_S)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("layout", "survivor"), [(mg.TP2_DP2, 2), (mg.DP4_DISTRIBUTED, 3)], ids=["tp2", "dp4"])
def test_second_failure_in_a_recovery_state(
    layout: Layout, survivor: int, state: str, tmp_path: Path, reference: Reference
) -> None:
    second = 1 if state == "replacing" else survivor  # the replacement itself, or one that has nothing of rank 1's
    inject = ["rank=1,at=backward,step=4", f"rank={second},at=recovery:{state}"]
    job = mg.run(tmp_path / "run", layout, standby=1, inject=inject)
    check_same(job, reference(layout))
    check_fired(job, 2)
    check_recovered(job)


@pytest.mark.parametrize("layout", [mg.DP4_DISTRIBUTED, mg.TP2_DP2_OVERLAPS], ids=lambda layout: layout.name)
def test_a_death_in_the_neighbour_exchange(layout: Layout, tmp_path: Path, reference: Reference) -> None:
    """As between hosts: the copies are sent. The victim has sent its own part."""
    job = mg.run(tmp_path / "run", layout, standby=1, script=SCRIPTS / "megatron_exchange_death.py")
    check_same(job, reference(layout))
    check_recovered(job, [1])


@pytest.mark.parametrize("layout", [mg.TP2_DP2, mg.TP2_DP2_OVERLAPS], ids=lambda layout: layout.name)
def test_an_optimizer_that_counts_its_steps_in_the_group(layout: Layout, tmp_path: Path) -> None:
    """As FusedAdam of apex and Transformer Engine does. It keeps more in its attributes."""
    script = SCRIPTS / "megatron_fused_adam.py"
    undisturbed = mg.run(tmp_path / "reference", layout, standby=0, script=script)
    inject = faults((1, "backward", 0), (3, "optimizer", 3), (0, "commit", 6))
    job = mg.run(tmp_path / "run", layout, standby=1, inject=inject, script=script)
    check_same(job, undisturbed)
    check_fired(job, len(inject))


LAYER_WISE = mg.gpt("layer-wise", "--bf16", nproc=2)
LAYER_WISE_TP2 = mg.gpt("layer-wise-tp2", *mg.TP)


@pytest.mark.parametrize("layout", [LAYER_WISE, LAYER_WISE_TP2], ids=lambda layout: layout.name)
def test_an_optimizer_whose_ranks_own_whole_parameters(layout: Layout, tmp_path: Path) -> None:
    """LayerWiseDistributedOptimizer: what a rank alone has is known before the first step. It sends its parameters in
    the optimizer's step."""
    script = SCRIPTS / "megatron_layer_wise.py"
    undisturbed = mg.run(tmp_path / "reference", layout, standby=0, script=script)
    inject = faults((1, "backward", 0), (0, "param-gather", 3), (1, "optimizer", 6), (0, "commit", 9))
    job = mg.run(tmp_path / "run", layout, standby=1, inject=inject, script=script)
    check_same(job, undisturbed)
    check_fired(job, len(inject))
    (said,) = [notice["text"] for notice in undisturbed.notices("redundancy")]
    assert said.startswith("neighbour copies"), said


@pytest.mark.parametrize("elastic", [("--elastic", "1:2"), ("--parallelism", "1")], ids=["elastic", "replan"])
def test_such_an_optimizer_in_a_job_of_another_size_is_refused(elastic: tuple[str, ...], tmp_path: Path) -> None:
    script = SCRIPTS / "megatron_layer_wise.py"
    job = mg.run(tmp_path / "run", LAYER_WISE, standby=0, script=script, options=elastic, flags=["--elastic-loop"])
    assert job.code == 1 and "LayerWiseDistributedOptimizer" in job.output, job.explain()
    check_clean(job)


def test_without_the_reset_it_fails(tmp_path: Path, reference: Reference) -> None:
    layout = mg.DP2_OVERLAPS  # its buckets are under way in backward; without overlaps nothing is left half-finished
    job = mg.run(
        tmp_path / "run",
        layout,
        standby=1,
        script=SCRIPTS / "megatron_no_reset.py",
        inject=faults((1, "backward", 6)),
        options=["--hang-timeout", "15"],
    )
    check_fired(job)
    assert job.code != 0 or job.digests != reference(layout).digests, job.explain()
    check_clean(job)
