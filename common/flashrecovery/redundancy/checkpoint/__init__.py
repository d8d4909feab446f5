"""Fallback checkpoints on disk: written, read, resharded, verified."""
