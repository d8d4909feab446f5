"""What the launcher sets for NCCL is what the doctor asks for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flashrecovery.config import RunConfig
from flashrecovery.runtime.environment import common_env
from flashrecovery.runtime.nccl_env import LAUNCH_DEFAULTS, free_choices, nccl_environment_findings


def test_nothing_set_is_a_finding_for_each_default() -> None:
    found = {f.name: f for f in nccl_environment_findings({})}
    assert set(found) == set(LAUNCH_DEFAULTS)
    assert all(f.value is None and f.advice.startswith("set it to ") for f in found.values())


def test_what_the_launcher_sets_is_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    assert nccl_environment_findings(common_env(RunConfig())) == []


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    env = common_env(RunConfig())
    assert env["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert [f.name for f in nccl_environment_findings(env)] == ["TORCH_NCCL_ENABLE_MONITORING"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_PROPAGATE_ERROR", "1"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "5"),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000"),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "soon"),
    ],
)
def test_bad_values(name: str, value: str) -> None:
    (found,) = nccl_environment_findings({**LAUNCH_DEFAULTS, name: value})
    assert (found.name, found.value) == (name, value)


def test_the_launcher_does_without_torch() -> None:
    code = "import sys, flashrecovery.runtime.environment; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_decides_the_order_of_sums_is_named_and_left_alone() -> None:
    assert free_choices({}) == ["NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE"]
    assert free_choices({"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}) == ["NCCL_NVLS_ENABLE"]
    assert not [name for name in common_env(RunConfig()) if name in free_choices({})]
