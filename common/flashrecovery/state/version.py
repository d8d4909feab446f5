"""How many versions of small state (rank-local states, common state) are kept."""

VERSIONS_KEPT = 3
"""The one that the ranks are at, the one before, and the one that is sealed already."""
