"""Rank-local state that no shard holds: random numbers, scalers, what the core has learned about the steps."""
