"""The ``flash_recovery`` block of a DeepSpeed config. Only the last test needs deepspeed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashrecovery.errors import ConfigError
from fr_deepspeed.config import FlashRecoveryConfig, parse


def test_without_the_key_recovery_is_off() -> None:
    assert parse({"train_batch_size": 8}) == FlashRecoveryConfig()
    assert not parse({}).enabled


def test_only_what_is_given_overrides_the_launcher() -> None:
    assert parse({"flash_recovery": {"enabled": True}}).overrides() == {}
    block = {"enabled": True, "redundancy": "neighbor", "verify": False, "hang_timeout_s": "auto"}
    assert parse({"flash_recovery": block}).overrides() == {"redundancy": "neighbor", "verify": False}
    block = {"hang_timeout_s": 30, "checkpoint": {"dir": "/x", "interval_s": "auto"}}
    assert parse({"flash_recovery": block}).overrides() == {
        "timeouts": {"hang_step_s": 30},
        "checkpoint": {"dir": Path("/x"), "interval_s": "auto"},
    }


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"flash_recovery": {"enable": True}}, ["'enable'", "did you mean 'enabled'?"]),
        ({"flash_recovery": {"undo": "always"}}, ["'undo'", "it is called 'pre_step_copy' now"]),
        ({"flash_recovery": {"redundency": "auto"}}, ["'redundency'", "did you mean 'redundancy'?", "verify"]),
        ({"flash_recovery": {"redundancy": "neighbour"}}, ["redundancy = 'neighbour'", "'neighbor'"]),
        ({"flash_recovery": True}, ["flash_recovery = True", "mapping"]),
        ({"flash_recovry": {"enabled": True}}, ["'flash_recovry'", "did you mean 'flash_recovery'?"]),
        ({"flash_recovery": {"hang_timeout_s": 0}}, ["hang_timeout_s", "= 0"]),
        ({"flash_recovery": {"hang_timeout_s": "soon"}}, ["hang_timeout_s", "'soon'", "'auto'"]),
        ({"flash_recovery": {"checkpoint": {"interval_s": 30}}}, ["checkpoint.dir", "required"]),
        ({"flash_recovery": {"checkpoint": {"directory": "/x"}}}, ["checkpoint", "'directory'"]),
    ],
)
def test_errors_name_the_key_and_what_is_right(config: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(config)
    for word in words:
        assert word in str(caught.value)


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, fr_deepspeed.config, fr_deepspeed.support; sys.exit(bool({'deepspeed', 'torch'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
