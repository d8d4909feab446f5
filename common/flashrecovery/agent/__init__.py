"""One per node: starts, watches and replaces the training processes; keeps standbys."""
