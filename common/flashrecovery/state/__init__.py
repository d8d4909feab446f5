"""Pieces of state: what a shard is, how it is encoded and compared. Nothing here knows of ranks that talk."""
