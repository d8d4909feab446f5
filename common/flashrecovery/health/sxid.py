"""NVSwitch errors (SXids) in the kernel's log: which of them end the use of a node. No I/O; :mod:`.nvswitch` reads.

Source: NVIDIA's Fabric Manager user guide (DU-09883-001), the appendix on NVSwitch SXid errors: non-fatal, fatal and
*always fatal* ones, after which "the host needs to be restarted". A fatal one ends the use of the GPU behind its link,
and reaches that GPU as XID 74, which is fatal there. The SXid does not tell which GPU that is, so here it is a warning.
12028 is non-fatal in that table, and is what public reports (ai2cm/ace#1438) have seen when a process ended or aborted
while its peers' kernels transferred. The table is compiled by hand: compare it with the edition for your switches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashrecovery.health.findings import HealthFinding, Severity

ALWAYS_FATAL = frozenset({10003, 12020, 22003, 22011, *range(23001, 23018)})
"""Of the whole fabric: all GPUs of the node, and its switches, have to be reset."""
CORRECTED = frozenset(
    {
        *(11012, 11021, 11022, 11023, 12021, 12023, 15008, 15011, 24001, 24002, 24003),
        *(19049, 19055, 19057, 19059, 19062, 19065, 19068, 19071),
        *(20001, 22013),
    }
)
"""The hardware has mended it (single bit errors, a replayed packet), or it may be ignored; not a finding."""
TEARDOWN = 12028
"""Egress non-posted PRIV error: a GPU has reached for memory of another one that is not there."""
_LINE = re.compile(r"nvidia-nvswitch(\d+): SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+), (Fatal|Non-fatal)\b(?:, Link (\d+))?")


@dataclass(frozen=True)
class SXid:
    """One error of a switch. ``fatal``: the driver's word; ``link``: of the switch, None: not one."""

    switch: int
    pci: str
    number: int
    fatal: bool
    link: int | None


def parse(line: str) -> SXid | None:
    """What a line of the kernel's log says; None: something else. The driver writes further lines with the same number,
    which have no class."""
    found = _LINE.search(line)
    if found is None:
        return None
    switch, pci, number, said, link = found.groups()
    return SXid(int(switch), pci, int(number), said == "Fatal", None if link is None else int(link))


def judge(found: SXid) -> HealthFinding | None:
    """What it means; None: nothing. It is the node's, not one device's."""
    if found.number in CORRECTED:
        return None
    severity = Severity.FATAL if found.number in ALWAYS_FATAL else Severity.WARNING
    return HealthFinding(
        severity=severity,
        plugin="nvidia",
        subject=f"NVSwitch {found.switch} (PCI {found.pci})",
        device=None,
        code=f"sxid_{found.number}",
        text=_text(found),
        evidence="" if found.link is None else f"link {found.link}",
    )


def _text(found: SXid) -> str:
    if found.number in ALWAYS_FATAL:
        return "the fabric has to be reset, with all GPUs of the node"
    if found.number == TEARDOWN:
        return "a GPU has reached for a peer's memory that is not there: mostly a process has ended amid a transfer"
    return "a fatal error of a link: its GPU reports XID 74" if found.fatal else "an error of a link or a switch"
