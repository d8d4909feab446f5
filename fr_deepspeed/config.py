"""The ``flash_recovery`` block of a DeepSpeed config. Imports neither torch nor deepspeed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from flashrecovery.config import validate
from flashrecovery.errors import ConfigError

KEY = "flash_recovery"
_OVERRIDES = ("redundancy", "parity", "parity_group", "pre_step_copy", "verify")
"""Keys that are settings of a worker and have their names there."""


class CheckpointBlock(BaseModel):
    """Where fallback checkpoints are kept, and how often they are written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dir: Path = Field(description="directory that every rank can read and write")
    interval_s: Annotated[float, Field(gt=0)] | Literal["auto"] = Field("auto", description="seconds between two")


class FlashRecoveryConfig(BaseModel):
    """The keys of the block. What is not given keeps the value of ``flashrecovery run``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(False, description="recover from failures")
    redundancy: Literal["auto", "replica", "neighbor", "parity", "none"] = Field(
        "auto", description="copies, or parity, of what no other rank holds (ZeRO partitions)"
    )
    parity: Literal[1, 2] = Field(1, description="of a parity group, how many ranks may be lost at once")
    parity_group: int = Field(8, ge=2, description="ranks of a parity group at most, if they can be divided so")
    pre_step_copy: Literal["auto", "always", "never"] = Field("auto", description="own pre-step copy of the state")
    verify: bool = Field(True, description="compare the digest of every restored shard with its source's")
    hang_timeout_s: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto", description="seconds without progress after which a rank counts as hung"
    )
    sequence_length: int | None = Field(
        None, ge=1, description="tokens of a sample, to show tokens a second beside steps a second"
    )
    checkpoint: CheckpointBlock | None = Field(None, description="the fallback, used where no copy is left")

    def overrides(self) -> dict[str, Any]:
        """The worker's settings that this block sets."""
        result = {name: getattr(self, name) for name in _OVERRIDES if name in self.model_fields_set}
        if self.hang_timeout_s != "auto":
            result["timeouts"] = {"hang_step_s": self.hang_timeout_s}
        if self.checkpoint is not None:
            result["checkpoint"] = self.checkpoint.model_dump(exclude_unset=True)
        return result


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
