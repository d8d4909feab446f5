"""How many versions are kept of what is small."""

VERSIONS_KEPT = 3
"""The one that the ranks are at, the one before, and the one that is sealed already."""
