"""The ``flash_recovery`` block of a DeepSpeed config. Imports neither torch nor deepspeed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from flashrecovery.config import validate
from flashrecovery.errors import ConfigError

KEY = "flash_recovery"
_OVERRIDES = ("redundancy", "undo", "verify")
"""Keys that are settings of a worker and have their names there."""


class FlashRecoveryConfig(BaseModel):
    """The keys of the block. What is not given keeps the value of ``flashrecovery run``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(False, description="recover from failures")
    redundancy: Literal["auto", "replica", "neighbor", "none"] = Field(
        "auto", description="copies of what no other rank holds (ZeRO partitions)"
    )
    undo: Literal["auto", "always", "never"] = Field("auto", description="own pre-step copy of the state")
    verify: bool = Field(True, description="compare the digest of every restored shard with its source's")
    hang_timeout_s: float | Literal["auto"] = Field("auto", description="belongs to the launcher")
    checkpoint: Mapping[str, Any] | None = Field(None, description="belongs to the launcher")

    @field_validator("hang_timeout_s")
    @classmethod
    def _no_timeout(cls, value: float | str) -> float | str:
        if value != "auto":
            raise ValueError(
                "the agent, not the worker, detects hangs: set timeouts.hang_floor_s in `flashrecovery run --config`"
            )
        return value

    @field_validator("checkpoint")
    @classmethod
    def _no_checkpoint(cls, value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if value is not None:
            raise ValueError("the controller decides when to save: set checkpoint.dir in `flashrecovery run --config`")
        return value

    def overrides(self) -> dict[str, Any]:
        """The worker's settings that this block sets."""
        return {name: getattr(self, name) for name in _OVERRIDES if name in self.model_fields_set}


def parse(config: Mapping[str, Any]) -> FlashRecoveryConfig:
    """The block of a whole DeepSpeed config, defaults if there is none.

    Raises:
        ConfigError: a key or value is wrong (the message names the nearest right one), also where a top-level key
            looks like a misspelt ``flash_recovery``, which DeepSpeed itself would ignore.
    """
    if KEY not in config:
        for name in difflib.get_close_matches(KEY, [str(k) for k in config], 1, cutoff=0.8):
            raise ConfigError(f"DeepSpeed config: unknown key {name!r}; did you mean {KEY!r}?")
        return FlashRecoveryConfig()
    block = config[KEY]
    if not isinstance(block, Mapping):
        raise ConfigError(f"DeepSpeed config: {KEY} = {block!r}: a mapping of keys is needed")
    parsed: FlashRecoveryConfig = validate(FlashRecoveryConfig, dict(block), f"DeepSpeed config: {KEY}")
    return parsed
