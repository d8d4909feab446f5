"""Shards between ranks: this rank's part of a restore plan."""
