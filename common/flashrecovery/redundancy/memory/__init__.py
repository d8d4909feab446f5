"""Copies in host memory: a rank's own, its neighbour's, and the staging area of another layout."""
