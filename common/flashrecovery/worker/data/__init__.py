"""Data that rolls back with the step: streams, sources, samplers, global batches."""
