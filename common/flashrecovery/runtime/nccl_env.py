"""The environment that torch's NCCL process groups need to be recovered: the launcher sets it, ``doctor`` checks it.

torch reads these variables once, when a process makes its first NCCL group (torch 2.13, ProcessGroupNCCL.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_DUMP_WAIT = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"

LAUNCH_DEFAULTS: Mapping[str, str] = {
    # Detection by NCCL's watchdog is slow and ends the process. Ours is outside of it.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # The watchdog waits so long for debug dumps, four times for each failed operation, before an aborted group goes.
    _DUMP_WAIT: "1",
}
"""What a worker's environment says where the user's does not."""

_MAX_DUMP_WAIT_MS = 100
_MIN_HEARTBEAT_S = 120


@dataclass(frozen=True)
class WrongVariable:
    """An environment variable that should be another one; ``value`` is None if it is not set."""

    name: str
    value: str | None
    advice: str


# name, torch's default, the values that are fine, why the others are not
_WANTED: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "3",
        ("0",),
        "set it to 0: otherwise the watchdog ends the process when a peer dies, instead of leaving it to be recovered",
    ),
    (
        "TORCH_NCCL_ENABLE_MONITORING",
        "1",
        ("0", "false"),
        "set it to 0: otherwise the heartbeat monitor kills a process whose communicators are being aborted",
    ),
    (
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "1",
        ("0", "false"),
        "set it to 0: otherwise a failure is followed by up to a minute of waiting for debug dumps",
    ),
    (
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "1",
        ("0", "false"),
        "set it to 0: otherwise the watchdog thread rethrows an error that the recovery has already handled",
    ),
    (
        "TORCH_NCCL_PROPAGATE_ERROR",
        "0",
        ("0", "false"),
        "unset it or set it to 0: otherwise one rank's error is spread through the store to the new generation as well",
    ),
)


_ORDERS_OF_SUMS = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE")
"""What decides in which order a reduction adds; NCCL chooses each by the topology that it finds."""


def free_choices(env: Mapping[str, str]) -> list[str]:
    """The variables that are not set, so that NCCL may add in another order where a rank has come to another node: the
    sums then differ in their last bits from those of a run without a failure. Nothing else depends on it."""
    return [name for name in _ORDERS_OF_SUMS if not env.get(name)]


def nccl_environment_findings(env: Mapping[str, str]) -> list[WrongVariable]:
    """The variables in ``env`` (or missing from it) that stand in the way of recovering NCCL groups."""
    findings = []
    for name, default, good, advice in _WANTED:
        value = env.get(name)
        if (default if value is None else value).strip().lower() not in good:
            findings.append(WrongVariable(name, value, advice))
    waits = env.get(_DUMP_WAIT)
    if waits is None or not waits.isdigit() or int(waits) > _MAX_DUMP_WAIT_MS:
        findings.append(
            WrongVariable(
                _DUMP_WAIT,
                waits,
                f"set it to 1 (at most {_MAX_DUMP_WAIT_MS} ms): otherwise an aborted group keeps its memory and its "
                "watchdog's lock for about a minute, in which no collective can be started",
            )
        )
    heartbeat = env.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    if heartbeat is not None and (not heartbeat.isdigit() or int(heartbeat) < _MIN_HEARTBEAT_S):
        findings.append(
            WrongVariable(
                "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
                heartbeat,
                f"use at least {_MIN_HEARTBEAT_S} s: a shorter one can kill a process in the middle of its recovery",
            )
        )
    return findings
