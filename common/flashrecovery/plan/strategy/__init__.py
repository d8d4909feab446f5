"""Parallel layouts for a number of ranks: which there are, what they cost, which one to take. Pure."""
