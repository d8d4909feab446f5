"""Fault injections as ``flashrecovery run --inject`` takes them."""

from __future__ import annotations

from collections.abc import Sequence


def faults(*places: tuple[int, str, int], fault: str = "sigkill") -> list[str]:
    """One for each (rank, phase, step)."""
    return [f"rank={rank},fault={fault},at={phase},step={step}" for rank, phase, step in places]


def in_every_phase(phases: Sequence[str], victims: Sequence[int], rotation: int, fault: str) -> list[str]:
    """One fault in each phase, in every second step from the third on. The victims take turns, beginning with number
    ``rotation``: as many rotations as victims are all pairs of a phase and a victim."""
    turns = [victims[(i + rotation) % len(victims)] for i in range(len(phases))]
    return faults(*zip(turns, phases, range(2, 2 * len(phases) + 2, 2), strict=True), fault=fault)
